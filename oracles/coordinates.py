"""Byte offsets turned back into what a reader of the contract calls them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """A byte of a cache; `byte_index` counts from the slot's first byte and may lie behind its
    entry, in a gap."""

    page_index: int
    slot_index: int
    byte_index: int


@dataclass(frozen=True)
class CacheGrid:
    """A cache of pages and slots at byte strides; ignored strides are 0."""

    page_count: int
    page_size_tokens: int
    page_stride_bytes: int
    slot_stride_bytes: int

    def slot_at(self, offset_bytes: int) -> Slot:
        """The slot that a byte belongs to or follows; for entries that overlap, the last one.

        Offsets outside the cache get the first or last page.
        """
        page_first = self.page_stride_bytes >= self.slot_stride_bytes
        if page_first:
            page, rest = _divide(offset_bytes, self.page_stride_bytes, self.page_count)
            slot, rest = _divide(rest, self.slot_stride_bytes, self.page_size_tokens)
        else:
            slot, rest = _divide(offset_bytes, self.slot_stride_bytes, self.page_size_tokens)
            page, rest = _divide(rest, self.page_stride_bytes, self.page_count)
        return Slot(page, slot, rest)


def _divide(offset: int, stride: int, count: int) -> tuple[int, int]:
    index = min(max(offset // stride, 0), max(count - 1, 0)) if stride > 0 else 0
    return index, offset - index * stride
