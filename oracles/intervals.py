"""Sets of byte offsets as sorted, disjoint, non-adjacent intervals.

The currency of footprints: their size follows the case, not the buffer, so that a set over a
tebibyte costs as little as one over a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]


class IntervalSet:
    """An immutable set of int64 byte offsets. `begin` and `end` (exclusive) are int64 [n]."""

    __slots__ = ("begin", "end")

    def __init__(self, begin: npt.ArrayLike = (), end: npt.ArrayLike = ()) -> None:
        """Any intervals, in any order, overlapping, adjacent or empty; they are merged.

        Raises `ValueError` if an end lies before its begin.
        """
        b = np.asarray(begin, dtype=np.int64).ravel()
        e = np.asarray(end, dtype=np.int64).ravel()
        if b.shape != e.shape or bool(np.any(e < b)):
            raise ValueError("an interval set needs as many ends as begins, none before its begin")
        keep = e > b
        b, e = b[keep], e[keep]
        if b.size > 1:
            order = np.argsort(b, kind="stable")
            b, e = b[order], e[order]
            reach = np.maximum.accumulate(e)
            starts = np.concatenate(([True], b[1:] > reach[:-1]))
            first = np.flatnonzero(starts)
            e = np.maximum.reduceat(e, first)
            b = b[first]
        self.begin: Offsets = b
        self.end: Offsets = e

    def __len__(self) -> int:
        return int(self.begin.size)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of each, ascending."""
        return zip(self.begin.tolist(), self.end.tolist(), strict=True)

    def __bool__(self) -> bool:
        return self.begin.size > 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntervalSet):
            return NotImplemented
        return np.array_equal(self.begin, other.begin) and np.array_equal(self.end, other.end)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"[{b}, {e})" for b, e in zip(self.begin[:4], self.end[:4], strict=True))
        return f"IntervalSet({shown}{', ...' if len(self) > 4 else ''})"

    @property
    def total_bytes(self) -> int:
        return int((self.end - self.begin).sum())

    def union(self, other: IntervalSet) -> IntervalSet:
        return IntervalSet(
            np.concatenate((self.begin, other.begin)), np.concatenate((self.end, other.end))
        )

    def widened(self, margin: int) -> IntervalSet:
        """Every interval grown by `margin` bytes at both ends."""
        return IntervalSet(self.begin - margin, self.end + margin)

    def clipped(self, begin: int, end: int) -> IntervalSet:
        """The part inside [begin, end)."""
        b, e = np.clip(self.begin, begin, end), np.clip(self.end, begin, end)
        return IntervalSet(b, e)

    def without(self, other: IntervalSet) -> IntervalSet:
        """The offsets of this set that are not in `other`."""
        if not self or not other:
            return self
        lo, hi = int(min(self.begin[0], other.begin[0])), int(max(self.end[-1], other.end[-1]))
        gaps_begin = np.concatenate(([lo], other.end))
        gaps_end = np.concatenate((other.begin, [hi]))
        return self.intersection(IntervalSet(gaps_begin, np.maximum(gaps_end, gaps_begin)))

    def intersection(self, other: IntervalSet) -> IntervalSet:
        if not self or not other:
            return IntervalSet()
        # For each interval of self, the run of other's intervals that meet it.
        first = np.searchsorted(other.end, self.begin, side="right")
        last = np.searchsorted(other.begin, self.end, side="left")
        counts = np.maximum(last - first, 0)
        mine = np.repeat(np.arange(len(self)), counts)
        offset = np.arange(mine.size) - np.repeat(np.cumsum(counts) - counts, counts)
        theirs = np.repeat(first, counts) + offset
        return IntervalSet(
            np.maximum(self.begin[mine], other.begin[theirs]),
            np.minimum(self.end[mine], other.end[theirs]),
        )

    def contains(self, begin: int, end: int) -> bool:
        """Whether all of [begin, end) lies in the set; an empty range always does."""
        if end <= begin:
            return True
        index = int(np.searchsorted(self.begin, begin, side="right")) - 1
        return index >= 0 and int(self.end[index]) >= end

    def mask(self, begin: int, end: int) -> npt.NDArray[np.bool_]:
        """bool [end - begin]: which offsets of [begin, end) are in the set."""
        inside = self.clipped(begin, end)
        edges = np.empty(2 * len(inside) + 2, dtype=np.int64)
        edges[0], edges[-1] = begin, end
        edges[1:-1:2], edges[2:-1:2] = inside.begin, inside.end
        is_member = np.zeros(edges.size - 1, dtype=np.bool_)
        is_member[1::2] = True
        return np.repeat(is_member, np.diff(edges))

    def offsets(self) -> Offsets:
        """Every offset, ascending; int64 [total_bytes]."""
        sizes = self.end - self.begin
        starts = np.cumsum(sizes) - sizes
        out: Offsets = np.arange(int(sizes.sum()), dtype=np.int64)
        out += np.repeat(self.begin - starts, sizes)
        return out

    @classmethod
    def of_runs(cls, begin: npt.ArrayLike, size_bytes: int) -> Self:
        """Runs of equal size at each of `begin`."""
        b = np.asarray(begin, dtype=np.int64).ravel()
        return cls(b, b + np.int64(size_bytes))
