"""Gathers from a cache whose every slot is one run of bytes, operations (a) to (c).

The cache `src` has pages at `page_stride_bytes` and slots at `slot_stride_bytes`, the destination
`dst` rows at `dst_row_stride_bytes`. Here is what follows from that alone: required bytes, and what
a byte of either is called.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from pagefuzz.oracles import contents, gather_text
from pagefuzz.oracles.coordinates import CacheGrid
from pagefuzz.oracles.gather import GatherOperation
from pagefuzz.oracles.layout import Bytes, Plan, Role
from pagefuzz.oracles.origin import Origin, OriginKind
from pagefuzz.oracles.pages import Pages
from pagefuzz.oracles.rows import RowMap


class EntryGather(GatherOperation):
    """A gather of entries to rows."""

    @abstractmethod
    def entry_bytes(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Payload bytes of a cache entry, and of the destination row that it becomes."""

    def element_text(self, plan: Plan) -> str:
        """What `describe` adds to the size of an entry."""
        return ""

    def strides(self, sizes: Mapping[str, int]) -> dict[str, int]:
        strides = {}
        if sizes["num_pages"] > 1:
            strides["page_stride_bytes"] = sizes["page_stride_bytes"]
        if sizes["page_size_tokens"] > 1:
            strides["slot_stride_bytes"] = sizes["slot_stride_bytes"]
        if sizes["dst_rows"] > 1:
            strides["dst_row_stride_bytes"] = sizes["dst_row_stride_bytes"]
        return strides

    def effective_strides(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """Page, slot and row stride in bytes, ignored ones as 0."""
        strides = self.strides(sizes)
        return (
            strides.get("page_stride_bytes", 0),
            strides.get("slot_stride_bytes", 0),
            strides.get("dst_row_stride_bytes", 0),
        )

    def payload_bytes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        page_stride, slot_stride, row_stride = self.effective_strides(sizes)
        entry, row = self.entry_bytes(sizes)
        pages, slots, tokens = sizes["num_pages"], sizes["page_size_tokens"], sizes["num_tokens"]
        src = (pages - 1) * page_stride + (slots - 1) * slot_stride + entry if pages else 0
        return {"src": src, "dst": (tokens - 1) * row_stride + row if tokens else 0}

    def row_bytes(self, sizes: Mapping[str, int]) -> int:
        return max(self.entry_bytes(sizes))

    def clamped(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {**sizes, **{name: max(value, 0) for name, value in self.strides(sizes).items()}}

    # ---- texts -----------------------------------------------------------------------------------

    def locate(self, plan: Plan, buffer: str, offset_bytes: int) -> str:
        if buffer == "src":
            return self._source_place(plan, offset_bytes)
        if buffer == "dst":
            return self._row_place(plan, offset_bytes)
        return gather_text.index_place(plan, self._mapped(plan), buffer, offset_bytes)

    def mapping(self, plan: Plan, buffer: str, offset_bytes: int) -> str | None:
        if (mapped := self._mapped(plan)) is None:
            return None
        rows, pages = mapped
        if buffer == "dst":
            row, byte = self._row_at(plan, offset_bytes)
            if not 0 <= byte < self.entry_bytes(plan.arguments)[1]:
                return None
            claims = np.flatnonzero(rows.row == row).tolist()
        elif buffer == "src":
            place = self._grid(plan).slot_at(offset_bytes)
            page = rows.page
            claims = np.flatnonzero(
                pages.valid[page]
                & (pages.page_id[page] == place.page_index)
                & (rows.slot == place.slot_index)
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
        if buffer == "dst":
            at = np.array([offset_bytes], dtype=np.int64)
            for fill in contents.FILLS:
                old = contents.destination_poison_at(plan.case.seed, fill, at, found.size)
                if np.array_equal(old[0], found):
                    return Origin(OriginKind.OLD, "what was there before")
        if not found.any():
            return Origin(OriginKind.ZEROS, "zeros")
        if (traced := contents.trace(plan.case.seed, found)) is not None:
            return self._traced_origin(plan, traced)
        return self._searched_origin(plan, offset_bytes, found) if buffer == "dst" else None

    def describe(self, plan: Plan) -> str:
        a = plan.arguments
        entry, row = self.entry_bytes(a)
        dense = {
            "page_stride_bytes": ("cb", a["page_size_tokens"] * entry),
            "slot_stride_bytes": ("ce", entry),
            "dst_row_stride_bytes": ("d0", row),
        }
        padded = [
            f"{dense[name][0]}={stride}"
            for name, stride in self.strides(a).items()
            if stride != dense[name][1]
        ]
        size = f"entry {entry} B{self.element_text(plan)}"
        payload = f"{size}, {' '.join(padded) or 'dense'}, seed {plan.case.seed}"
        return "  ".join([*gather_text.index_parts(plan), payload, *gather_text.oddities(plan)])

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
        place = self._grid(plan).slot_at(offset_bytes)
        what = f"page {place.page_index} slot {place.slot_index}, byte {place.byte_index}"
        entry, _ = self.entry_bytes(plan.arguments)
        return what if 0 <= place.byte_index < entry else f"{what} of an entry of {entry}"

    def _row_place(self, plan: Plan, offset_bytes: int) -> str:
        row, byte = self._row_at(plan, offset_bytes)
        _, row_bytes = self.entry_bytes(plan.arguments)
        if not 0 <= byte < row_bytes:
            return f"row {row}, byte {byte} of an entry of {row_bytes}"
        tokens = plan.arguments["num_tokens"]
        return f"row {row}{'' if 0 <= row < tokens else f' of {tokens}'}, byte {byte}"

    def _traced_origin(self, plan: Plan, traced: contents.Trace) -> Origin:
        if traced.role is Role.DESTINATION:
            where = self.locate(plan, "dst", traced.offset_bytes)
            return Origin(OriginKind.FORBIDDEN, f"what dst held before at {where}")
        where = self.locate(plan, "src", traced.offset_bytes)
        if traced.is_payload:
            return Origin(OriginKind.ENTRY, where)
        inside = 0 <= traced.offset_bytes < self.payload_bytes(plan.arguments)["src"]
        text = f"{where} of src, which no row maps" if inside else f"what lies {where}, of src"
        return Origin(OriginKind.FORBIDDEN, text)

    @abstractmethod
    def _searched_origin(self, plan: Plan, offset_bytes: int, found: Bytes) -> Origin | None:
        """Where bytes of a row come from that are of no stream; None if it cannot be told."""

    def _grid(self, plan: Plan) -> CacheGrid:
        page_stride, slot_stride, _ = self.effective_strides(plan.arguments)
        return CacheGrid(
            plan.arguments["num_pages"],
            plan.arguments["page_size_tokens"],
            page_stride,
            slot_stride,
        )

    def _row_at(self, plan: Plan, offset_bytes: int) -> tuple[int, int]:
        """Row of dst and byte in it."""
        row_stride = self.effective_strides(plan.arguments)[2]
        return divmod(offset_bytes, row_stride) if row_stride else (0, offset_bytes)
