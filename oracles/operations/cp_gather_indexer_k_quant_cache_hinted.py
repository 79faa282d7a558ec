"""(d) cp_gather_indexer_k_quant_cache in its Triton form: each row has a hint whose request it is.

The contract is that of `cp_gather_indexer_k_quant_cache`, with one more index buffer,
`token_to_seq`, int32 [num_tokens]:

    for row in [0, num_tokens):
        r = token_to_seq[row]
        if r is not in [0, num_requests) or row not in [b_r, e_r): untouched, not counted
        else: as request r maps it

A page, or a request with a negative seq_start, is counted by its first row alone (row == b_r, or
slot 0), if that row's hint is right. In contract every row that a request covers has that request
as its hint; rows that nobody covers may have any.

Decisions where contracts.md is open, beside those of the operation without hints:

* A row whose hint is wrong is not mapped in this form: it is written by nobody, and neither a table
  entry nor a cache byte is readable on its account, so that a table entry which such rows alone
  would look up is poison. All of starts and seq_starts stay readable.
* Where starts decrease, a row >= m is claimed by the request that its hint names, if that request
  covers it, and by nobody else: each element is old or that request's.
* token_to_seq is int32 of rank 1, aligned to 4, needs 4 * num_tokens bytes and is not optional.
* The recipe `owners` gives every covered row the first request that covers it; hints of other rows
  are poison, in contract whatever they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles import gather_text, index_values
from pagefuzz.oracles.case import CaseError, Values
from pagefuzz.oracles.expectation import Counts, Footprint
from pagefuzz.oracles.gather import GatherOperation
from pagefuzz.oracles.indexer_gather import IndexerGather
from pagefuzz.oracles.indexer_references import IndexerReferences, integers
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import BufferRole, Dtype, Image, Plan, Role
from pagefuzz.oracles.pages import Pages, counts
from pagefuzz.oracles.rows import Int64s, RowMap

HINTS = "token_to_seq"


@dataclass(frozen=True)
class _Covered:
    """Every (request, row) pair with row in [b_r, e_r), by request, then row. int64 [n]."""

    request: Int64s
    row: Int64s

    @classmethod
    def of(cls, starts: Int64s, sizes: Mapping[str, int]) -> _Covered:
        begin, end = _row_bounds(starts, sizes)
        length = np.maximum(end - begin, 0)
        request = np.repeat(np.arange(begin.size, dtype=np.int64), length)
        before = np.cumsum(length) - length
        row = np.arange(request.size, dtype=np.int64) + (begin - before)[request]
        return cls(request, row)


def _row_bounds(starts: Int64s, sizes: Mapping[str, int]) -> tuple[Int64s, Int64s]:
    """b and e of every request."""
    requests, tokens = sizes["num_requests"], sizes["num_tokens"]
    bounds = np.clip(starts, 0, tokens)
    if bounds.size == requests:
        bounds = np.append(bounds, tokens)
    return bounds[:requests], bounds[1 : requests + 1]


class CpGatherIndexerKQuantCacheHinted(IndexerReferences):
    name = "cp_gather_indexer_k_quant_cache_hinted"
    summary = "the same, with a hint for each row which request it belongs to; in Triton"
    buffers = (
        *IndexerGather.buffers[:4],
        BufferRole(HINTS, Role.INDEX),
        *IndexerGather.buffers[4:],
    )
    run_time: ClassVar[tuple[str, ...]] = (
        "num_requests",
        "num_tokens",
        "num_pages",
        "table_width",
        "table_row_stride",
        "page_stride_bytes",
        "dst_k_rows",
        "dst_k_row_stride_bytes",
        "dst_scale_rows",
        "dst_scale_row_stride_bytes",
    )
    counted: ClassVar[tuple[str, str]] = (
        f"{GatherOperation.counted[0]}, if its first row's hint is right",
        f"{GatherOperation.counted[1]}, if its first row's hint is right",
    )

    # ---- planning --------------------------------------------------------------------------------

    def _index_buffers(self) -> dict[str, tuple[Dtype, int]]:
        return {**super()._index_buffers(), HINTS: (Dtype.I32, 1)}

    def required(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {**super().required(sizes), HINTS: 4 * sizes["num_tokens"]}

    def _images(self, plan: Plan, sizes: Mapping[str, int], refused: bool) -> dict[str, Image]:
        values = plan.case.values
        if HINTS not in values:
            raise CaseError(f"values of {self.name} needs {HINTS!r}; it is not optional")
        images = super()._images(plan, sizes, refused)
        if not refused and sizes["num_tokens"]:
            starts = np.empty(0, np.int64)
            if "starts" in images:
                starts = index_values.int32s(images["starts"])
            images[HINTS] = _hint_image(values[HINTS], _Covered.of(starts, sizes), sizes)
            if sizes["num_requests"]:
                rows = self.row_map(plan.with_images(images))
                images["block_table"] = self._table_image(values["block_table"], sizes, rows)
        return images

    # ---- the contract, vectorised ----------------------------------------------------------------

    def row_map(self, plan: Plan) -> RowMap:
        """The claims of rows whose hint names the claimant."""
        rows = super().row_map(plan)
        kept = np.flatnonzero(_hints_at(plan, rows.row) == rows.request)
        first = np.ones(kept.size, dtype=np.bool_)
        np.not_equal(rows.page[kept][1:], rows.page[kept][:-1], out=first[1:])
        pages = rows.page[kept][first]
        negative = rows.negative_requests
        begin, _ = _row_bounds(self.index_vectors(plan)[0], plan.arguments)
        return replace(
            rows,
            request=rows.request[kept],
            row=rows.row[kept],
            token=rows.token[kept],
            slot=rows.slot[kept],
            page=np.cumsum(first, dtype=np.int64) - 1,
            page_request=rows.page_request[pages],
            page_column=rows.page_column[pages],
            negative_requests=negative[_hints_at(plan, begin[negative]) == negative],
        )

    def counts_of(self, plan: Plan, rows: RowMap, pages: Pages) -> Counts | None:
        begin, _ = _row_bounds(self.index_vectors(plan)[0], plan.arguments)
        nearest = np.searchsorted(rows.page, np.arange(rows.page_request.size))
        is_first = rows.row[nearest] == begin[rows.page_request]
        return counts(rows, pages, is_first | (rows.slot[nearest] == 0))

    def index_footprints(self, plan: Plan, pages: Pages) -> dict[str, Footprint]:
        hints = IntervalSet([0], [4 * plan.arguments["num_tokens"]])
        return {**super().index_footprints(plan, pages), HINTS: Footprint(hints)}

    def hostile_index_values(self, plan: Plan, rows: RowMap, pages: Pages) -> tuple[str, ...]:
        found = super().hostile_index_values(plan, rows, pages)
        covered = _Covered.of(self.index_vectors(plan)[0], plan.arguments)
        hints = _hints_at(plan, covered.row)
        if (wrong := np.flatnonzero(hints != covered.request)).size:
            at = wrong[0]
            row, owner = covered.row[at], covered.request[at]
            found += (f"{HINTS}[{row}]={hints[at]}, the row is covered by request {owner}",)
        return found

    def split_images(self, plan: Plan, request: int, row: int) -> Mapping[str, Image]:
        """Hints of the second half and of all later requests name the next one; those of rows that
        nobody covers too, which is as good as any."""
        image = plan.buffers[HINTS].image
        hints = index_values.int32s(image)
        later = (hints > request) | ((hints == request) & (image.offsets // 4 >= row))
        moved = np.where(later & (hints < index_values.INT32.stop - 1), hints + 1, hints)
        return {HINTS: Image.of_elements(image.offsets // 4, moved.astype(np.int32))}

    # ---- the other references --------------------------------------------------------------------

    def hints(self, plan: Plan) -> Mapping[int, int] | None:
        return integers(plan, HINTS)

    # ---- texts -----------------------------------------------------------------------------------

    def locate(self, plan: Plan, buffer: str, offset_bytes: int) -> str:
        if buffer == HINTS:
            return f"element {offset_bytes // 4} of {plan.arguments['num_tokens']}"
        return super().locate(plan, buffer, offset_bytes)

    def index_parts(self, plan: Plan) -> list[str]:
        hints = gather_text.table_text(plan.case.values[HINTS])
        return [*super().index_parts(plan), f"hints {hints}"]


def _hint_image(values: Values, covered: _Covered, sizes: Mapping[str, int]) -> Image:
    """Hints of the rows that a request covers, and those that the case gives."""
    tokens = sizes["num_tokens"]
    if values.recipe != "owners":
        hints = index_values.vector(values, tokens, index_values.INT32, HINTS)
        return Image.of_elements(np.arange(tokens, dtype=np.int64), hints.astype(np.int32))
    row, first = np.unique(covered.row, return_index=True)
    hint = dict(zip(row.tolist(), covered.request[first].tolist(), strict=True))
    for at, value in values.edits.items():
        if not 0 <= at < tokens:
            raise CaseError(f"{HINTS} has an edit at element {at}, it has {tokens} elements")
        if value not in index_values.INT32:
            raise CaseError(f"{HINTS}[{at}]={value} must lie in -2147483648..2147483647")
        hint[at] = value
    told = sorted(hint)
    elements = np.array([hint[at] for at in told], dtype=np.int32)
    return Image.of_elements(np.array(told, dtype=np.int64), elements)


def _hints_at(plan: Plan, row: npt.NDArray[np.int64]) -> Int64s:
    """The hints of covered rows; the image holds all of these."""
    image = plan.buffers[HINTS].image
    if not row.size:
        return np.empty(0, dtype=np.int64)
    return index_values.int32s(image)[np.searchsorted(image.offsets, row * 4)]
