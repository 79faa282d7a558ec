"""Gathers from the indexer's cache, operation (d).

Pages hold key bytes and then scales, rows lie in two destinations. Here is what follows from that
alone: arguments, refusals, what a byte is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from pagefuzz.oracles import gather_text
from pagefuzz.oracles.cells import Cells
from pagefuzz.oracles.expectation import Refusal
from pagefuzz.oracles.gather import BLOCK_TABLE, COUNTS, SEQ_STARTS, STARTS, GatherOperation
from pagefuzz.oracles.indexer_pages import TILE, WORD_BYTES, IndexerPages
from pagefuzz.oracles.layout import BufferRole, Bytes, Dtype, Plan, Role
from pagefuzz.oracles.origin import Origin
from pagefuzz.oracles.refusals import (
    Found,
    check_dtype,
    check_overlaps,
    check_pointer,
    check_rank,
    check_rows,
    check_stride_alignment,
)
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.traced_gather import TracedGather

FLAT, TILED16 = 0, 1
MAX_HEAD_DIM = 1024

_KEY_DTYPES = (Dtype.U8, Dtype.E4M3, Dtype.E5M2)


def pages_of(sizes: Mapping[str, int]) -> IndexerPages:
    keys = sizes["head_dim"]
    return IndexerPages(
        sizes["page_stride_bytes"] if sizes["num_pages"] > 1 else 0,
        sizes["page_size_tokens"],
        keys,
        WORD_BYTES * (keys // max(sizes["quant_block"], 1)),
        sizes["page_layout"] == TILED16,
    )


class IndexerGather(TracedGather):
    """A gather of keys and scales to `dst_k` and `dst_scale`."""

    sizes = (
        "num_requests",
        "num_tokens",
        "page_size_tokens",
        "num_pages",
        "table_width",
        "table_row_stride",
        "page_stride_bytes",
        "dst_k_rows",
        "dst_k_row_stride_bytes",
        "dst_scale_rows",
        "dst_scale_row_stride_bytes",
        "head_dim",
        "quant_block",
        "page_layout",
        "has_terminal",
    )
    buffers: ClassVar[tuple[BufferRole, ...]] = (
        BufferRole("src", Role.SOURCE),
        BufferRole("dst_k", Role.DESTINATION),
        BufferRole("dst_scale", Role.DESTINATION),
        BLOCK_TABLE,
        STARTS,
        SEQ_STARTS,
        COUNTS,
    )
    ranges: ClassVar[Mapping[str, tuple[str, range]]] = {
        **GatherOperation.ranges,
        "page_layout": ("page_layout", range(2)),
    }
    unmeasurable: ClassVar[frozenset[str]] = frozenset({"head_dim", "quant_block"})
    alignments: ClassVar[Mapping[str, int]] = MappingProxyType({"src": WORD_BYTES})

    # ---- arguments -----------------------------------------------------------------------------

    def strides(self, sizes: Mapping[str, int]) -> dict[str, int]:
        counted = {
            "page_stride_bytes": "num_pages",
            "dst_k_row_stride_bytes": "dst_k_rows",
            "dst_scale_row_stride_bytes": "dst_scale_rows",
        }
        return {name: sizes[name] for name, size in counted.items() if sizes[size] > 1}

    def rows_of(self, sizes: Mapping[str, int]) -> Mapping[str, tuple[int, int]]:
        shape, strides = pages_of(sizes), self.strides(sizes)
        return {
            "dst_k": (strides.get("dst_k_row_stride_bytes", 0), shape.keys),
            "dst_scale": (strides.get("dst_scale_row_stride_bytes", 0), shape.scales),
        }

    def payload_bytes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        shape, pages, tokens = pages_of(sizes), sizes["num_pages"], sizes["num_tokens"]
        needed = {"src": (pages - 1) * shape.stride + shape.page_bytes if pages else 0}
        for name, (stride, row) in self.rows_of(sizes).items():
            needed[name] = (tokens - 1) * stride + row if tokens else 0
        return needed

    def row_bytes(self, sizes: Mapping[str, int]) -> int:
        return sum(row for _, row in self.rows_of(sizes).values())

    def payload_types(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        return {"src": (Dtype.U8, 3), "dst_k": (Dtype.U8, 2), "dst_scale": (Dtype.F32, 2)}

    def clamped(self, sizes: Mapping[str, int]) -> dict[str, int]:
        laid = {**sizes, **{name: max(value, 0) for name, value in self.strides(sizes).items()}}
        laid["head_dim"] = min(max(sizes["head_dim"], 1), 2 * MAX_HEAD_DIM)
        laid["quant_block"] = min(max(sizes["quant_block"], 1), laid["head_dim"])
        return laid

    def payload_refusals(self, found: Found, plan: Plan) -> None:
        arguments, buffers = plan.arguments, plan.buffers
        head, block = arguments["head_dim"], arguments["quant_block"]
        size = arguments["page_size_tokens"]
        whole = head % 16 == 0 and 16 <= head <= MAX_HEAD_DIM
        if not whole:
            text = f"head_dim={head} must be a multiple of 16 in 16..{MAX_HEAD_DIM}"
            found.append(Refusal("head_dim", text))
        if block <= 0 or (whole and head % block):
            found.append(Refusal("quant_block", f"quant_block={block} must divide head_dim={head}"))
        if arguments["page_layout"] == TILED16 and size % TILE:
            text = f"page_size_tokens={size} must be a multiple of 16 in page_layout 1"
            found.append(Refusal("page_size_tokens", text))
        check_rows(found, arguments, "dst_k_rows", "dst_scale_rows")
        types = {"src": ((Dtype.U8,), 3), "dst_k": (_KEY_DTYPES, 2), "dst_scale": ((Dtype.F32,), 2)}
        for name, (dtypes, rank) in types.items():
            check_dtype(found, buffers[name], dtypes)
            check_rank(found, buffers[name], rank)
            check_pointer(found, plan, name, 1 if name == "dst_k" else WORD_BYTES)
        strides = self.strides(arguments)
        strides.pop("dst_k_row_stride_bytes", None)
        check_stride_alignment(found, strides, WORD_BYTES)
        if not self.unmeasurable & {refusal.reason for refusal in found}:
            self._check_fits(found, arguments)
        read_only = [one.name for one in self.buffers if one.role is not Role.DESTINATION]
        for name in ("dst_k", "dst_scale"):
            check_overlaps(found, plan, name, read_only)

    def _check_fits(self, found: Found, sizes: Mapping[str, int]) -> None:
        """Pages and rows lie apart. A negative stride has a reason of its own."""
        strides, needed = self.strides(sizes), pages_of(sizes).page_bytes
        page_stride = strides.get("page_stride_bytes", needed)
        if 0 <= page_stride < needed:
            text = f"page_stride_bytes={page_stride} is below the {needed} bytes of a page"
            found.append(Refusal("page_stride", text))
        for name, (_, row) in self.rows_of(sizes).items():
            stride = strides.get(f"{name}_row_stride_bytes", row)
            if 0 <= stride < row:
                text = f"{name}_row_stride_bytes={stride} is below the {row} bytes of a row"
                found.append(Refusal("not_nested", text))

    # ---- texts -----------------------------------------------------------------------------------

    def source_cells(self, sizes: Mapping[str, int]) -> Cells:
        dimensions = (("page_stride_bytes", sizes["num_pages"]),)
        return Cells("src", dimensions, pages_of(sizes).page_bytes, WORD_BYTES)

    def slot_of(self, plan: Plan, offset_bytes: int) -> tuple[int, int]:
        pages = pages_of(plan.arguments)
        page, slot, _ = pages.place(offset_bytes, plan.arguments["num_pages"])
        return page, -1 if slot is None else slot

    def slot_place(self, plan: Plan, offset_bytes: int) -> str:
        pages = pages_of(plan.arguments)
        page, slot, what = pages.place(offset_bytes, plan.arguments["num_pages"])
        return f"page {page}, {what}" if slot is None else f"page {page} slot {slot}, {what}"

    def source_of(
        self, plan: Plan, buffer: str, page_id: Int64s, slot: Int64s, byte: int
    ) -> Int64s:
        pages = pages_of(plan.arguments)
        if buffer == "dst_scale":
            return pages.scale_words(page_id, slot) + byte
        pieces, piece_bytes = pages.key_pieces(page_id, slot)
        found: Int64s = pieces[:, byte // piece_bytes] + byte % piece_bytes
        return found

    def entry_pieces(
        self, plan: Plan, page_id: Int64s, slot: Int64s
    ) -> tuple[tuple[Int64s, int], ...]:
        pages = pages_of(plan.arguments)
        words = pages.scale_words(page_id, slot)[:, None]
        return pages.key_pieces(page_id, slot), (words, pages.scales)

    def origin(self, plan: Plan, buffer: str, offset_bytes: int, found: Bytes) -> Origin | None:
        if buffer == "dst_k" and plan.arguments["page_layout"] == TILED16:
            # Of the bytes of a row only those of one tile lie side by side in a page.
            _, byte = self._row_at(plan, buffer, offset_bytes)
            found = found[: TILE - byte % TILE]
        return super().origin(plan, buffer, offset_bytes, found)

    def describe(self, plan: Plan) -> str:
        a, shape = plan.arguments, pages_of(plan.arguments)
        dense = {
            "page_stride_bytes": ("cb", shape.page_bytes),
            "dst_k_row_stride_bytes": ("d0(k)", shape.keys),
            "dst_scale_row_stride_bytes": ("d0(scale)", shape.scales),
        }
        padded = [
            f"{dense[name][0]}={stride}"
            for name, stride in self.strides(a).items()
            if stride != dense[name][1]
        ]
        layout = "tiled16" if shape.is_tiled else "flat"
        payload = (
            f"D={a['head_dim']} Q={a['quant_block']} {layout}, {' '.join(padded) or 'dense'}, "
            f"seed {plan.case.seed}"
        )
        return "  ".join([*self.index_parts(plan), payload, *gather_text.oddities(plan)])

    def index_parts(self, plan: Plan) -> list[str]:
        """What `describe` says of sizes and index values."""
        return gather_text.index_parts(plan)
