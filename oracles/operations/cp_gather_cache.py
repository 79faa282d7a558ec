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
from typing import TYPE_CHECKING

import numpy as np

from pagefuzz.oracles import contents
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.entry_gather import EntryGather
from pagefuzz.oracles.expectation import (
    Contested,
    Counts,
    Expectation,
    Expected,
    Footprint,
    Refusal,
)
from pagefuzz.oracles.gather import BLOCK_TABLE, COUNTS, SEQ_STARTS, STARTS
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import BufferRole, Bytes, Dtype, Plan, Role
from pagefuzz.oracles.pages import counts
from pagefuzz.oracles.refusals import (
    Found,
    check_dtype,
    check_overlaps,
    check_pointer,
    check_rank,
    check_stride_alignment,
    dtype_name,
    is_absent,
)
from pagefuzz.oracles.rows import PADDING_PAGE, Int64s
from pagefuzz.oracles.verdict import CaseClass

if TYPE_CHECKING:
    import torch

_ELEMENT_DTYPES = {1: Dtype.U8, 2: Dtype.U16, 4: Dtype.U32, 8: Dtype.U64}


class CpGatherCache(EntryGather):
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
        if arguments["num_tokens"] > arguments["dst_rows"]:
            found.append(
                Refusal(
                    "dst_rows",
                    f"num_tokens={arguments['num_tokens']} is more than "
                    f"dst_rows={arguments['dst_rows']}",
                )
            )
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

    # ---- the contract, vectorised ----------------------------------------------------------------

    def expect(self, plan: Plan) -> Expectation:
        if refusals := self.refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        arguments = plan.arguments
        entry = arguments["entry_bytes"]
        page_stride, slot_stride, row_stride = self.effective_strides(arguments)
        rows = self.row_map(plan)
        pages = self.pages(plan, rows)
        hostile = self.hostile_index_values(plan, rows, pages)
        runs = bool(arguments["num_requests"] and arguments["num_tokens"])

        row, page, slot = rows.row, rows.page, rows.slot
        if not pages.valid.all():
            claims = np.flatnonzero(pages.valid[page])
            row, page, slot = row[claims], page[claims], slot[claims]
        src_offsets = pages.page_id[page] * page_stride + slot * slot_stride
        dst_offsets = row * row_stride
        values = contents.payload_at(plan.case.seed, src_offsets, entry)

        contested = None
        may_write = IntervalSet()
        exact: Int64s | slice = slice(None)
        if rows.first_contested_row is not None:
            is_exact = row < rows.first_contested_row
            exact = np.flatnonzero(is_exact)
            claimed = np.flatnonzero(~is_exact)
            contested = Contested(dst_offsets[claimed], values[claimed], arguments["element_bytes"])
            may_write = IntervalSet.of_runs(dst_offsets[claimed], entry)
        footprints = self.index_footprints(plan, pages) if runs else {}
        if runs:
            footprints["src"] = Footprint(IntervalSet.of_runs(src_offsets, entry))
            footprints["dst"] = Footprint(
                must_write=IntervalSet.of_runs(dst_offsets[exact], entry), may_write=may_write
            )
        return Expectation(
            case_class=CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT,
            hostile=hostile,
            footprints=footprints,
            expected={"dst": Expected(dst_offsets[exact], values[exact], contested)},
            counts=counts(rows, pages),
            counters={
                "mapped_rows": rows.row.size,
                "pages_touched": rows.page_request.size,
                "source_closeness": _closeness(src_offsets, arguments["element_bytes"]),
                "destination_closeness": _closeness(dst_offsets, arguments["element_bytes"]),
            },
        )

    # ---- the contract as a loop ------------------------------------------------------------------

    def expect_by_loop(self, plan: Plan) -> Expectation:
        """Plain integers, one row at a time; shares nothing with `expect` but the payload."""
        if refusals := self.refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        a = plan.arguments
        requests, tokens = a["num_requests"], a["num_tokens"]
        page_size, entry = a["page_size_tokens"], a["entry_bytes"]
        page_stride = a["page_stride_bytes"] if a["num_pages"] > 1 else 0
        slot_stride = a["slot_stride_bytes"] if page_size > 1 else 0
        row_stride = a["dst_row_stride_bytes"] if a["dst_rows"] > 1 else 0
        table_stride = a["table_row_stride"] if requests > 1 else 0
        table = _integers(plan, "block_table", 4)
        starts = _integers(plan, "starts", 4)
        seq_starts = (
            None if is_absent(plan.buffers["seq_starts"]) else _integers(plan, "seq_starts", 4)
        )

        def start(r: int) -> int:
            return starts[r] if r < requests or a["has_terminal"] else tokens

        def clamp(value: int) -> int:
            return min(max(value, 0), tokens)

        contested_from = tokens
        decreasing = False
        for k in range(requests):
            if clamp(start(k + 1)) < clamp(start(k)):
                contested_from = min(clamp(start(i)) for i in range(k + 1, requests + 1))
                decreasing = True
                break

        readable_src: list[tuple[int, int]] = []
        readable_table: list[tuple[int, int]] = []
        must: dict[int, bytes] = {}
        claims: list[tuple[int, bytes]] = []
        padding = skipped = 0
        in_contract = all(
            start(r) >= 0 for r in range(requests + a["has_terminal"] if requests else 0)
        )
        in_contract &= all(
            start(r) <= start(r + 1) for r in range(requests if a["has_terminal"] else requests - 1)
        )
        for r in range(requests):
            first, last = clamp(start(r)), clamp(start(r + 1))
            seq_start = seq_starts[r] if seq_starts is not None else 0
            counted: set[int] = set()
            for row in range(first, last):
                if seq_start < 0:
                    in_contract = False
                    if -1 not in counted:
                        counted.add(-1)
                        skipped += 1
                    continue
                token = seq_start + (row - start(r))
                column, slot = token // page_size, token % page_size
                page_id = None
                if column < a["table_width"]:
                    element = r * table_stride + column
                    readable_table.append((4 * element, 4 * element + 4))
                    page_id = table[element]
                if page_id is None or not 0 <= page_id < a["num_pages"]:
                    in_contract = False
                    if column not in counted:
                        counted.add(column)
                        padding += page_id == PADDING_PAGE
                        skipped += page_id != PADDING_PAGE
                    continue
                at = page_id * page_stride + slot * slot_stride
                readable_src.append((at, at + entry))
                data = contents.payload(plan.case.seed, at, at + entry).tobytes()
                if row < contested_from:
                    must[row * row_stride] = data
                else:
                    claims.append((row * row_stride, data))

        footprints = {}
        if requests and tokens:
            footprints = {
                "src": Footprint(_intervals(readable_src)),
                "dst": Footprint(
                    must_write=_intervals([(at, at + entry) for at in must]),
                    may_write=_intervals([(at, at + entry) for at, _ in claims]),
                ),
                "block_table": Footprint(_intervals(readable_table)),
                "starts": Footprint(_intervals([(0, 4 * (requests + a["has_terminal"]))])),
            }
            if seq_starts is not None:
                footprints["seq_starts"] = Footprint(_intervals([(0, 4 * requests)]))
            if not is_absent(plan.buffers["counts"]):
                pair = _intervals([(0, 16)])
                footprints["counts"] = Footprint(pair, may_write=pair)
        contested = None
        if decreasing:
            contested = Contested(*_runs(claims, entry), a["element_bytes"])
        return Expectation(
            case_class=CaseClass.IN_CONTRACT if in_contract else CaseClass.HOSTILE,
            footprints=footprints,
            expected={"dst": Expected(*_runs(sorted(must.items()), entry), contested)},
            counts=None if decreasing else Counts(padding, skipped),
        )

    # ---- the contract in torch -------------------------------------------------------------------

    def expected_by_torch(self, plan: Plan) -> Mapping[str, Mapping[int, bytes]]:
        """Gathers with strided tensors that really exist.

        Raises `CaseError` if source and table are above 256 MiB.
        """
        import torch  # seconds, that a campaign need not wait for

        a = plan.arguments
        if self.refusals(plan) or not (a["num_requests"] and a["num_tokens"]):
            return {"dst": {}}
        page_stride, slot_stride, row_stride = self.effective_strides(a)
        src_bytes, table_bytes = self.payload_bytes(a)["src"], self._required(a)["block_table"]
        if (needed := src_bytes + table_bytes) > 2**28:
            raise CaseError(f"the torch reference needs {needed} bytes; it makes at most 2^28")
        payload = torch.from_numpy(contents.payload(plan.case.seed, 0, src_bytes).copy())
        cache = payload.as_strided(
            (a["num_pages"], a["page_size_tokens"], a["entry_bytes"]),
            (page_stride, slot_stride, 1),
        )
        table_stride = a["table_row_stride"] if a["num_requests"] > 1 else 0
        table = torch.full((table_bytes // 4,), -2, dtype=torch.int64)
        for element, page in _integers(plan, "block_table", 4).items():
            table[element] = page
        table = table.as_strided((a["num_requests"], a["table_width"]), (table_stride, 1))

        starts = _tensor(_integers(plan, "starts", 4))
        seq_starts = torch.zeros(a["num_requests"], dtype=torch.int64)
        if not is_absent(plan.buffers["seq_starts"]):
            seq_starts = _tensor(_integers(plan, "seq_starts", 4))
        clamped = starts.clamp(0, a["num_tokens"])
        if not a["has_terminal"]:
            clamped = torch.cat((clamped, _tensor([a["num_tokens"]])))
        exact_rows = a["num_tokens"]
        falls = (clamped.diff() < 0).nonzero().view(-1)
        if len(falls):
            exact_rows = int(clamped[falls[0] + 1 :].min())

        out: dict[int, bytes] = {}
        for r in range(a["num_requests"]):
            if seq_starts[r] < 0:
                continue
            row = torch.arange(int(clamped[r]), max(int(clamped[r + 1]), int(clamped[r])))
            row = row[row < exact_rows]
            token = seq_starts[r] + row - starts[r]
            column = token.div(a["page_size_tokens"], rounding_mode="floor")
            row, token, column = (x[column < a["table_width"]] for x in (row, token, column))
            page_id = table[r][column]
            valid = (page_id >= 0) & (page_id < a["num_pages"])
            slot = token.remainder(a["page_size_tokens"])
            entries = cache[page_id[valid], slot[valid]]
            for at, entry in zip((row[valid] * row_stride).tolist(), entries, strict=True):
                out[at] = entry.numpy().tobytes()
        return {"dst": out}


def _integers(plan: Plan, buffer: str, width: int) -> dict[int, int]:
    """Element index -> value, of an index buffer's image."""
    image = plan.buffers[buffer].image
    return {
        at // width: int.from_bytes(raw.tobytes(), "little", signed=True)
        for at, raw in zip(image.offsets.tolist(), image.values, strict=True)
    }


def _tensor(values: Mapping[int, int] | list[int]) -> torch.Tensor:
    import torch

    items = [values[i] for i in range(len(values))]
    return torch.tensor(items, dtype=torch.int64)


def _intervals(pairs: list[tuple[int, int]]) -> IntervalSet:
    return IntervalSet([begin for begin, _ in pairs], [end for _, end in pairs])


def _runs(runs: list[tuple[int, bytes]], size_bytes: int) -> tuple[Int64s, Bytes]:
    """Offsets and values of runs of one size."""
    offsets = np.array([at for at, _ in runs], dtype=np.int64)
    raw = np.frombuffer(b"".join(data for _, data in runs), dtype=np.uint8)
    return offsets, raw.reshape(len(runs), size_bytes)


def _closeness(offsets: Int64s, element_bytes: int) -> int:
    """64 less the bits of the smallest distance between an offset and 2^31 or 2^32, bytes or
    elements; 0 if there is no offset."""
    if not offsets.size:
        return 0
    distance = min(
        int(np.abs(offsets - boundary * unit).min()) // unit
        for boundary in (2**31, 2**32)
        for unit in {1, element_bytes}
    )
    return 64 - distance.bit_length()
