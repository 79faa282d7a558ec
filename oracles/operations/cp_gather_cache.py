"""(a) cp_gather_cache: copies cache entries to rows, byte for byte.

The contract, with src [num_pages, page_size_tokens, entry_bytes] and dst [dst_rows, entry_bytes]:

    b = clamp(starts[r], 0, num_tokens)
    e = clamp(starts[r + 1], 0, num_tokens)     # the last request without a terminal: num_tokens
    for row in [b, e):
        p = seq_starts[r] + (row - starts[r])
        q, o = divmod(p, page_size_tokens)
        B = block_table[r * table_row_stride + q]
        dst[row] = src[B, o]

Decisions where contracts.md is open, beside those of all gathers (`oracles/gather.py`):

* Required bytes: src 0 if num_pages == 0, else (num_pages - 1) * page_stride_bytes +
  (page_size_tokens - 1) * slot_stride_bytes + entry_bytes; dst 0 if num_tokens == 0, else
  (num_tokens - 1) * dst_row_stride_bytes + entry_bytes.
* src has rank 3 and dst rank 2; both have one dtype, whose size is element_bytes.
* Source entries may overlap (any strides >= 0 do); the destination must nest:
  dst_row_stride_bytes >= entry_bytes when dst_rows > 1.
* Bases, and strides that are not ignored, of src and dst are multiples of element_bytes, even where
  an extent is 0; a null pointer is aligned.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagefuzz.oracles.entry_references import EntryReferences
from pagefuzz.oracles.expectation import Refusal
from pagefuzz.oracles.gather import BLOCK_TABLE, COUNTS, SEQ_STARTS, STARTS
from pagefuzz.oracles.layout import BufferRole, Dtype, Plan, Role
from pagefuzz.oracles.refusals import (
    Found,
    check_dtype,
    check_overlaps,
    check_pointer,
    check_rank,
    check_rows,
    check_stride_alignment,
    dtype_name,
)

_ELEMENT_DTYPES = {1: Dtype.U8, 2: Dtype.U16, 4: Dtype.U32, 8: Dtype.U64}


class CpGatherCache(EntryReferences):
    """Operation (a)."""

    name = "cp_gather_cache"
    summary = "raw copy of cache entries through a block table"
    sizes = (
        "num_requests",
        "num_tokens",
        "page_size_tokens",
        "num_pages",
        "table_width",
        "table_row_stride",
        "page_stride_bytes",
        "slot_stride_bytes",
        "dst_rows",
        "dst_row_stride_bytes",
        "entry_bytes",
        "element_bytes",
        "has_terminal",
    )
    buffers = (
        BufferRole("src", Role.SOURCE),
        BufferRole("dst", Role.DESTINATION),
        BLOCK_TABLE,
        STARTS,
        SEQ_STARTS,
        COUNTS,
    )

    # ---- arguments -----------------------------------------------------------------------------

    def entry_bytes(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        return sizes["entry_bytes"], sizes["entry_bytes"]

    def element_sizes(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        return sizes["element_bytes"], sizes["element_bytes"]

    def payload_types(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        dtype = _ELEMENT_DTYPES.get(sizes["element_bytes"], Dtype.U8)
        return {"src": (dtype, 3), "dst": (dtype, 2)}

    def clamped(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {**super().clamped(sizes), "entry_bytes": max(sizes["entry_bytes"], 1)}

    def payload_refusals(self, found: Found, plan: Plan) -> None:
        arguments, buffers = plan.arguments, plan.buffers
        element, entry = arguments["element_bytes"], arguments["entry_bytes"]
        known = element in _ELEMENT_DTYPES
        if not known:
            found.append(Refusal("element_bytes", f"element_bytes={element} must be 1, 2, 4 or 8"))
        if entry <= 0 or (known and entry % element):
            found.append(
                Refusal(
                    "entry_bytes", f"entry_bytes={entry} must be a positive multiple of {element}"
                )
            )
        check_rows(found, arguments, "dst_rows")
        src, dst = buffers["src"], buffers["dst"]
        fitting = [d for d in Dtype if not known or d.size_bytes == element]
        check_dtype(found, src, fitting)
        check_dtype(found, dst, fitting)
        if src.dtype != dst.dtype and src.dtype in fitting and dst.dtype in fitting:
            found.append(
                Refusal("dtype", f"src is {dtype_name(src.dtype)}, dst {dtype_name(dst.dtype)}")
            )
        check_rank(found, src, 3)
        check_rank(found, dst, 2)
        strides = self.strides(arguments)
        for name in ("src", "dst"):
            check_pointer(found, plan, name, element if known else 1)
        check_stride_alignment(found, strides, element if known else 1)
        row_stride = strides.get("dst_row_stride_bytes")
        if row_stride is not None and 0 <= row_stride < entry:
            found.append(
                Refusal(
                    "not_nested",
                    f"dst_row_stride_bytes={row_stride} is below entry_bytes={entry}",
                )
            )
        others = ("src", "block_table", "starts", "seq_starts", "counts")
        check_overlaps(found, plan, "dst", others)

    def element_text(self, plan: Plan) -> str:
        element_bytes = plan.arguments["element_bytes"]
        return f" of {element_bytes} B elements" if element_bytes > 1 else ""
