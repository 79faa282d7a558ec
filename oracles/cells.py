"""What writers write from and to: rows of inputs, cells of caches, and the slots between them.

A cell is what one slot of a cache holds. Where its elements have several sizes (codes, scales, raw
values) it has a part for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pagefuzz.oracles.expectation import Counts
from pagefuzz.oracles.indexer_pages import IndexerPages
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.rows import Int64s

PADDING_SLOT = -1


@dataclass(frozen=True)
class Rows:
    """An input: rows of `row_bytes` at a stride. `rows` and `stride` are names of sizes."""

    name: str
    rows: str
    stride: str
    row_bytes: int
    element_bytes: int

    @classmethod
    def named(cls, name: str, row_bytes: int, element_bytes: int) -> Rows:
        """Of NAME_rows rows, NAME_row_stride_bytes apart."""
        return cls(name, f"{name}_rows", f"{name}_row_stride_bytes", row_bytes, element_bytes)

    def stride_bytes(self, sizes: Mapping[str, int]) -> int:
        """0 where it is ignored."""
        return sizes[self.stride] if sizes[self.rows] > 1 else 0


@dataclass(frozen=True)
class Part:
    """What a cell holds of elements of one size.

    name            what is expected of it goes by
    run_bytes       of each of its runs
    element_bytes   the unit that is not torn where several tokens write one slot
    begin_bytes     of a run, from where the cell's run begins
    computed        type of elements that are computed, so that a NaN may be any; None: copied, or
                    never a NaN
    """

    name: str
    run_bytes: int
    element_bytes: int
    begin_bytes: int = 0
    computed: Dtype | None = None


@dataclass(frozen=True)
class Cells:
    """A cache: in each slot a grid of runs of `run_bytes`.

    dimensions     (name of the stride, how many): pages, slots, then those inside a slot
    element_bytes  that bases and strides are multiples of
    divided        the parts of a run; without any, it is one part named like the cache
    """

    name: str
    dimensions: tuple[tuple[str, int], ...]
    run_bytes: int
    element_bytes: int
    divided: tuple[Part, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.divided or (Part(self.name, self.run_bytes, self.element_bytes),)

    def begins(self, sizes: Mapping[str, int], part: Part, page: Int64s, slot: Int64s) -> Int64s:
        """int64 [n, runs]: where the runs of a part begin, in slot `slot` of page `page`."""
        page_stride, slot_stride, *_ = self.strides(sizes)
        begin = page * page_stride + slot * slot_stride + part.begin_bytes
        return begin[:, None] + self.run_offsets(sizes)

    def place(self, sizes: Mapping[str, int], offset_bytes: int) -> tuple[int, int | None, str]:
        """Page, slot (None: it belongs to none) and what of it a byte is; outside the cache those
        of the nearest page.

        Strides nest: from the largest stride to the smallest, each divides what is left. Those
        inside a slot may be larger than the slot's.
        """
        strides = self.strides(sizes)
        index = [0] * len(strides)
        rest = offset_bytes
        for nth in sorted(range(len(strides)), key=lambda nth: -strides[nth]):
            count = self.dimensions[nth][1]
            if strides[nth] and count > 1:
                index[nth] = min(max(rest // strides[nth], 0), count - 1)
                rest -= index[nth] * strides[nth]
        inside = sum(i * s for i, s in zip(index[2:], strides[2:], strict=True))
        return index[0], index[1], f"byte {inside + rest}"

    def element(self, sizes: Mapping[str, int], offset_bytes: int) -> tuple[Part, int, int] | None:
        """The part, the number of its run in the cell, and the byte of that run; None if no slot
        holds the byte."""
        page, slot, _ = self.place(sizes, offset_bytes)
        if slot is None:
            return None
        at = np.array([page], dtype=np.int64), np.array([slot], dtype=np.int64)
        for part in self.parts:
            byte = offset_bytes - self.begins(sizes, part, *at)[0]
            run = np.flatnonzero((byte >= 0) & (byte < part.run_bytes))
            if run.size:
                return part, int(run[0]), int(byte[run[0]])
        return None

    def strides(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """0 where it is ignored."""
        return tuple(sizes[name] if count > 1 else 0 for name, count in self.dimensions)

    def run_offsets(self, sizes: Mapping[str, int]) -> Int64s:
        """int64 [runs of a slot], from the slot's beginning."""
        offsets = np.zeros(1, dtype=np.int64)
        counts = [count for _, count in self.dimensions]
        for count, stride in zip(counts[2:], self.strides(sizes)[2:], strict=True):
            offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
        return offsets

    def required_bytes(self, sizes: Mapping[str, int]) -> int:
        counts = [count for _, count in self.dimensions]
        if 0 in counts:
            return 0
        reach = [(n - 1) * s for n, s in zip(counts, self.strides(sizes), strict=True)]
        return sum(reach) + self.run_bytes

    def nests(self, sizes: Mapping[str, int]) -> bool:
        counted = [(sizes[name], count) for name, count in self.dimensions if count > 1]
        inner = self.run_bytes
        for stride, count in sorted(counted):
            if stride < inner:
                return False
            inner += (count - 1) * stride
        return True


@dataclass(frozen=True)
class IndexerCells(Cells):
    """A cache of the indexer: its pages alone have a stride, and `run_bytes` are those of a page.

    divided  keys, then scales
    """

    pages: IndexerPages = field(kw_only=True)

    def begins(self, sizes: Mapping[str, int], part: Part, page: Int64s, slot: Int64s) -> Int64s:
        if part == self.divided[0]:
            return self.pages.key_pieces(page, slot)[0]
        return self.pages.scale_words(page, slot)[:, None]

    def place(self, sizes: Mapping[str, int], offset_bytes: int) -> tuple[int, int | None, str]:
        return self.pages.place(max(offset_bytes, 0), max(self.dimensions[0][1], 1))


@dataclass(frozen=True)
class Slots:
    """slot_mapping, resolved. `token`, `page` and `offset` are of the tokens that are written."""

    slot: Int64s
    token: Int64s
    page: Int64s
    offset: Int64s

    @property
    def counts(self) -> Counts:
        padding = int((self.slot == PADDING_SLOT).sum())
        return Counts(padding, int(self.slot.size - self.token.size) - padding)
