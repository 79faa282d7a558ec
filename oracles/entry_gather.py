"""Gathers from a cache whose every slot is one run of bytes, operations (a) to (c).

The cache `src` has pages at `page_stride_bytes` and slots at `slot_stride_bytes`, the destination
`dst` rows at `dst_row_stride_bytes`. Here is what follows from that alone: required bytes, and what
a byte of either is called.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from pagefuzz.oracles import gather_text
from pagefuzz.oracles.cells import Cells
from pagefuzz.oracles.coordinates import CacheGrid
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.traced_gather import TracedGather


class EntryGather(TracedGather):
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

    def rows_of(self, sizes: Mapping[str, int]) -> Mapping[str, tuple[int, int]]:
        return {"dst": (self.effective_strides(sizes)[2], self.entry_bytes(sizes)[1])}

    def source_cells(self, sizes: Mapping[str, int]) -> Cells:
        dimensions = (
            ("page_stride_bytes", sizes["num_pages"]),
            ("slot_stride_bytes", sizes["page_size_tokens"]),
        )
        return Cells("src", dimensions, self.entry_bytes(sizes)[0], 1)

    def slot_place(self, plan: Plan, offset_bytes: int) -> str:
        place = self._grid(plan).slot_at(offset_bytes)
        what = f"page {place.page_index} slot {place.slot_index}, byte {place.byte_index}"
        entry, _ = self.entry_bytes(plan.arguments)
        return what if 0 <= place.byte_index < entry else f"{what} of an entry of {entry}"

    def slot_of(self, plan: Plan, offset_bytes: int) -> tuple[int, int]:
        place = self._grid(plan).slot_at(offset_bytes)
        return place.page_index, place.slot_index

    def source_of(
        self, plan: Plan, buffer: str, page_id: Int64s, slot: Int64s, byte: int
    ) -> Int64s:
        page_stride, slot_stride, _ = self.effective_strides(plan.arguments)
        return page_id * page_stride + slot * slot_stride + byte

    def entry_pieces(
        self, plan: Plan, page_id: Int64s, slot: Int64s
    ) -> tuple[tuple[Int64s, int], ...]:
        entries = self.source_of(plan, "dst", page_id, slot, 0)
        return ((entries[:, None], self.entry_bytes(plan.arguments)[0]),)

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

    def _grid(self, plan: Plan) -> CacheGrid:
        page_stride, slot_stride, _ = self.effective_strides(plan.arguments)
        return CacheGrid(
            plan.arguments["num_pages"],
            plan.arguments["page_size_tokens"],
            page_stride,
            slot_stride,
        )
