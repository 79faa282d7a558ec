"""What writers write from and to: rows of inputs, cells of caches, and the slots between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pagefuzz.oracles.expectation import Counts
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

    def stride_bytes(self, sizes: Mapping[str, int]) -> int:
        """0 where it is ignored."""
        return sizes[self.stride] if sizes[self.rows] > 1 else 0


@dataclass(frozen=True)
class Cells:
    """A cache: in each slot a grid of runs of `run_bytes`.

    dimensions  (name of the stride, how many): pages, slots, then those inside a slot
    """

    name: str
    dimensions: tuple[tuple[str, int], ...]
    run_bytes: int
    element_bytes: int

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
