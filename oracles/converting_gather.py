"""Gathers whose rows are computed from cache entries, rather than copied.

An operation adds `convert`, from the bytes of entries to the bytes of rows. Here is the contract
around it, vectorised, and where wrong bytes of a row come from.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from pagefuzz.oracles import contents
from pagefuzz.oracles.closeness import closeness
from pagefuzz.oracles.entry_gather import EntryGather
from pagefuzz.oracles.expectation import Contested, Expectation, Expected, Footprint
from pagefuzz.oracles.free_nans import FreeNans
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, Plan
from pagefuzz.oracles.origin import Origin, OriginKind
from pagefuzz.oracles.pages import counts
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.verdict import CaseClass


class ConvertingGather(EntryGather):
    """A gather of entries to rows that are computed from them.

    row_element_bytes  of a row: what may not be torn where rows are contested
    """

    row_element_bytes: ClassVar[int]

    @abstractmethod
    def convert(self, plan: Plan, entries: Bytes) -> tuple[Bytes, FreeNans | None]:
        """Rows, uint8 [n, row bytes], of entries, uint8 [n, entry bytes], and their free NaNs."""

    def entries_at(self, plan: Plan, offsets: Int64s) -> Bytes:
        """uint8 [n, entry bytes]: what src holds at each of `offsets`."""
        return contents.payload_at(plan.case.seed, offsets, self.entry_bytes(plan.arguments)[0])

    def expect(self, plan: Plan) -> Expectation:
        if refusals := self.refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        arguments = plan.arguments
        entry_bytes, row_bytes = self.entry_bytes(arguments)
        page_stride, slot_stride, row_stride = self.effective_strides(arguments)
        rows = self.row_map(plan)
        pages = self.pages(plan, rows)
        hostile = self.hostile_index_values(plan, rows, pages)
        runs = bool(arguments["num_requests"] and arguments["num_tokens"])

        claims = np.flatnonzero(pages.valid[rows.page])
        row, page = rows.row[claims], rows.page[claims]
        src_offsets = pages.page_id[page] * page_stride + rows.slot[claims] * slot_stride
        dst_offsets = row * row_stride
        first_contested = rows.first_contested_row
        contested = None
        exact: Int64s | slice = slice(None)
        may_write = IntervalSet()
        if first_contested is not None:
            exact = np.flatnonzero(row < first_contested)
            others = np.flatnonzero(row >= first_contested)
            values, free = self.convert(plan, self.entries_at(plan, src_offsets[others]))
            contested = Contested(dst_offsets[others], values, self.row_element_bytes, free)
            may_write = IntervalSet.of_runs(dst_offsets[others], row_bytes)
        values, free = self.convert(plan, self.entries_at(plan, src_offsets[exact]))
        footprints = self.index_footprints(plan, pages) if runs else {}
        if runs:
            footprints["src"] = Footprint(IntervalSet.of_runs(src_offsets, entry_bytes))
            footprints["dst"] = Footprint(
                must_write=IntervalSet.of_runs(dst_offsets[exact], row_bytes), may_write=may_write
            )
        return Expectation(
            case_class=CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT,
            hostile=hostile,
            footprints=footprints,
            expected={"dst": Expected(dst_offsets[exact], values, contested, free)},
            counts=counts(rows, pages),
            counters={
                "mapped_rows": rows.row.size,
                "pages_touched": rows.page_request.size,
                "source_closeness": closeness(src_offsets, 1),
                "destination_closeness": closeness(dst_offsets, self.row_element_bytes),
            },
        )

    def _searched_origin(self, plan: Plan, offset_bytes: int, found: Bytes) -> Origin | None:
        """Compares with the same bytes of every row that some mapped entry gives."""
        mapped = self._mapped(plan)
        if mapped is None:
            return None
        rows, pages = mapped
        page_stride, slot_stride, _ = self.effective_strides(plan.arguments)
        entries = pages.page_id[rows.page] * page_stride + rows.slot * slot_stride
        entries = np.unique(entries[pages.valid[rows.page]])
        _, byte = self._row_at(plan, offset_bytes)
        values, _ = self.convert(plan, self.entries_at(plan, entries))
        same = np.flatnonzero((values[:, byte : byte + found.size] == found).all(axis=1))
        if not same.size or entries.size > 256**found.size // 20:
            return None
        where = self.locate(plan, "src", int(entries[same[0]]))
        return Origin(OriginKind.ENTRY, f"{where.split(',')[0]}, from byte {byte} of its row on")
