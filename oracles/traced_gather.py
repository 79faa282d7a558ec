"""What a byte of a gather's payload is called, how the contract comes to it, and where bytes come
from that were found at a wrong place.

Nothing here knows how many destinations an operation has or how a page of its source is laid out;
an operation says where rows and slots lie, the rest follows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from pagefuzz.oracles import contents, gather_text
from pagefuzz.oracles.cells import Cells
from pagefuzz.oracles.gather import GatherOperation
from pagefuzz.oracles.layout import Bytes, Plan, Role
from pagefuzz.oracles.origin import Origin, OriginKind
from pagefuzz.oracles.pages import Pages
from pagefuzz.oracles.rows import Int64s, RowMap


class TracedGather(GatherOperation):
    """A gather from `src` to one or more destinations of rows."""

    # ---- what an operation adds ------------------------------------------------------------------

    @abstractmethod
    def rows_of(self, sizes: Mapping[str, int]) -> Mapping[str, tuple[int, int]]:
        """Destination -> its row stride in bytes, 0 if ignored, and the payload bytes of a row."""

    @abstractmethod
    def source_cells(self, sizes: Mapping[str, int]) -> Cells:
        """src, as far as it has strides."""

    @abstractmethod
    def slot_place(self, plan: Plan, offset_bytes: int) -> str:
        """What a byte inside src is called: "page 4 slot 1, byte 0"."""

    @abstractmethod
    def slot_of(self, plan: Plan, offset_bytes: int) -> tuple[int, int]:
        """Page and slot that a byte of src belongs to, or lies behind."""

    @abstractmethod
    def source_of(
        self, plan: Plan, buffer: str, page_id: Int64s, slot: Int64s, byte: int
    ) -> Int64s:
        """Where in src the byte lies that belongs at `byte` of a row of a destination."""

    @abstractmethod
    def entry_pieces(
        self, plan: Plan, page_id: Int64s, slot: Int64s
    ) -> tuple[tuple[Int64s, int], ...]:
        """Where in src entries lie: for each kind of piece the byte offsets, int64 [entries,
        pieces], and the bytes of one piece."""

    # ---- texts -----------------------------------------------------------------------------------

    def locate(self, plan: Plan, buffer: str, offset_bytes: int) -> str:
        if buffer == "src":
            return self._source_place(plan, offset_bytes)
        if buffer in self.rows_of(plan.arguments):
            return self._row_place(plan, buffer, offset_bytes)
        return gather_text.index_place(plan, self._mapped(plan), buffer, offset_bytes)

    def mapping(self, plan: Plan, buffer: str, offset_bytes: int) -> str | None:
        if (mapped := self._mapped(plan)) is None:
            return None
        rows, pages = mapped
        destinations = self.rows_of(plan.arguments)
        if buffer in destinations:
            row, byte = self._row_at(plan, buffer, offset_bytes)
            if not 0 <= byte < destinations[buffer][1]:
                return None
            claims = np.flatnonzero(rows.row == row).tolist()
        elif buffer == "src":
            page_index, slot_index = self.slot_of(plan, offset_bytes)
            page = rows.page
            claims = np.flatnonzero(
                pages.valid[page] & (pages.page_id[page] == page_index) & (rows.slot == slot_index)
            ).tolist()
        elif buffer == "block_table":
            claim = gather_text.table_claim(rows, pages, offset_bytes // 4)
            return None if claim is None else gather_text.claim_text(plan, rows, pages, claim)
        else:
            return None
        if not claims:
            return "no request maps it"
        return "; ".join(gather_text.claim_text(plan, rows, pages, claim) for claim in claims[:3])

    def origin(self, plan: Plan, buffer: str, offset_bytes: int, found: Bytes) -> Origin | None:
        is_destination = buffer in self.rows_of(plan.arguments)
        if is_destination:
            at = np.array([offset_bytes], dtype=np.int64)
            for fill in contents.FILLS:
                old = contents.destination_poison_at(plan.case.seed, fill, at, found.size)
                if np.array_equal(old[0], found):
                    return Origin(OriginKind.OLD, "what was there before")
        if not found.any():
            return Origin(OriginKind.ZEROS, "zeros")
        if (traced := contents.trace(plan.case.seed, found)) is not None:
            return self._traced_origin(plan, buffer, traced)
        return self._searched_origin(plan, buffer, offset_bytes, found) if is_destination else None

    def _mapped(self, plan: Plan) -> tuple[RowMap, Pages] | None:
        """None if the case must be refused: then no row is mapped."""
        if self.refusals(plan):
            return None
        rows = self.row_map(plan)
        return rows, self.pages(plan, rows)

    def _source_place(self, plan: Plan, offset_bytes: int) -> str:
        size_bytes = self.payload_bytes(plan.arguments)["src"]
        if not 0 <= offset_bytes < size_bytes:
            return "in front of page 0" if offset_bytes < 0 else f"past its {size_bytes} bytes"
        return self.slot_place(plan, offset_bytes)

    def _row_place(self, plan: Plan, buffer: str, offset_bytes: int) -> str:
        row, byte = self._row_at(plan, buffer, offset_bytes)
        row_bytes = self.rows_of(plan.arguments)[buffer][1]
        if not 0 <= byte < row_bytes:
            return f"row {row}, byte {byte} of an entry of {row_bytes}"
        tokens = plan.arguments["num_tokens"]
        return f"row {row}{'' if 0 <= row < tokens else f' of {tokens}'}, byte {byte}"

    def _traced_origin(self, plan: Plan, buffer: str, traced: contents.Trace) -> Origin:
        if traced.role is Role.DESTINATION:
            # All destinations hold the same bytes before a launch: of which one, nobody can tell.
            destinations = tuple(self.rows_of(plan.arguments))
            name = buffer if buffer in destinations else destinations[0]
            where = self.locate(plan, name, traced.offset_bytes)
            return Origin(OriginKind.FORBIDDEN, f"what {name} held before at {where}")
        where = self.locate(plan, "src", traced.offset_bytes)
        if traced.is_payload:
            return Origin(OriginKind.ENTRY, where)
        inside = 0 <= traced.offset_bytes < self.payload_bytes(plan.arguments)["src"]
        text = f"{where} of src, which no row maps" if inside else f"what lies {where}, of src"
        return Origin(OriginKind.FORBIDDEN, text)

    def _searched_origin(
        self, plan: Plan, buffer: str, offset_bytes: int, found: Bytes
    ) -> Origin | None:
        """Compares with the same bytes of every mapped entry; for runs too short to be traced.

        None if a match could be chance.
        """
        mapped = self._mapped(plan)
        if mapped is None:
            return None
        rows, pages = mapped
        valid = pages.valid[rows.page]
        _, byte = self._row_at(plan, buffer, offset_bytes)
        if not 0 <= byte < self.rows_of(plan.arguments)[buffer][1]:
            return None  # of no row, so of no entry
        page_id, slot = pages.page_id[rows.page][valid], rows.slot[valid]
        entries = np.unique(self.source_of(plan, buffer, page_id, slot, byte))
        values = contents.payload_at(plan.case.seed, entries, found.size)
        same = np.flatnonzero((values == found[None, :]).all(axis=1))
        if not same.size or entries.size > 256**found.size // 20:
            return None
        return Origin(OriginKind.ENTRY, self.locate(plan, "src", int(entries[same[0]])))

    def _row_at(self, plan: Plan, buffer: str, offset_bytes: int) -> tuple[int, int]:
        """Row of a destination and byte in it."""
        row_stride = self.rows_of(plan.arguments)[buffer][0]
        return divmod(offset_bytes, row_stride) if row_stride else (0, offset_bytes)
