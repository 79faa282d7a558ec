"""Strides of one buffer, and others that are legal too.

A buffer is a grid of runs. Dimensions *nest* if, by stride, each is at least as far apart as all
smaller ones together reach: then no two runs share a byte, whoever reads or writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import permutations
from math import factorial

from pagefuzz.oracles.cells import Cells, Rows

#: What and how many -> one of 0 .. how many - 1.
Choose = Callable[[str, int], int]

#: Units between runs, 0 (dense) among them.
_MOST_PADDING = 9


@dataclass(frozen=True)
class Nest:
    """buffer      name of it
    dimensions  (name of the stride, how many)
    run         of what lies together, in units of the strides: bytes, or elements of a table
    """

    buffer: str
    dimensions: tuple[tuple[str, int], ...]
    run: int

    @classmethod
    def of_cells(cls, cells: Cells) -> Nest:
        return cls(cells.name, cells.dimensions, cells.run_bytes)

    @classmethod
    def of_rows(cls, rows: Rows, sizes: Mapping[str, int]) -> Nest:
        return cls(rows.name, ((rows.stride, sizes[rows.rows]),), rows.row_bytes)

    @property
    def counted(self) -> tuple[tuple[str, int], ...]:
        """The dimensions whose stride is not ignored."""
        return tuple((name, count) for name, count in self.dimensions if count > 1)

    def others(
        self, sizes: Mapping[str, int], wanted: Collection[str], unit: int, choose: Choose
    ) -> dict[str, int]:
        """Other strides, which nest and are multiples of `unit`, for those that are wanted, and for
        those that would not nest with them; if all are wanted, in any order of dimensions."""
        order = sorted(self.counted, key=lambda dimension: sizes[dimension[0]])
        if all(name in wanted for name, _ in order):
            nth = choose(f"{self.buffer} order", factorial(len(order)))
            order = list(list(permutations(order))[nth])
        inner, strides = self.run, {}
        for name, count in order:
            stride, least = sizes[name], -(-inner // unit) * unit
            if name in wanted or stride < least:
                stride = least + unit * choose(name, _MOST_PADDING)
                stride += unit * (stride == sizes[name])
            strides[name] = stride
            inner += (count - 1) * stride
        return strides

    def multiplied(self, sizes: Mapping[str, int], factor: int) -> dict[str, int]:
        """Strides so many times as large: runs that shared no byte with those of another nest share
        none if both are multiplied, and the distance between them."""
        return {name: factor * sizes[name] for name, _ in self.counted}
