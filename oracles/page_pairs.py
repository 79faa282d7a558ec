"""Pairs of pages: which of them move anything, and which of those form cycles.

Vectorised; `page_copies.PageCopyOperation.expect_by_loop` says the same pair by pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.expectation import Counts
from pagefuzz.oracles.rows import Int64s

PADDING_PAGE = -1


@dataclass(frozen=True)
class PagePairs:
    """The pairs of a launch, resolved.

    pairs        int64 [num_pairs, 2]
    is_padding   bool [num_pairs], -1 on either side
    is_skipped   bool [num_pairs], not padding, and an id names no page
    is_hostile   bool [num_pairs], an id is neither -1 nor a page's, be the other one -1
    moves        int64 [m, 2]: the others by destination, then source, no two alike; within one
                 cache without those from a page to itself
    conflict     (source, source, destination) if one page is to become two; the lowest such
    on_cycle     bool [m]: the move is part of a cycle; none is if there is a conflict
    """

    pairs: Int64s
    is_padding: npt.NDArray[np.bool_]
    is_skipped: npt.NDArray[np.bool_]
    is_hostile: npt.NDArray[np.bool_]
    moves: Int64s
    conflict: tuple[int, int, int] | None
    on_cycle: npt.NDArray[np.bool_]

    @property
    def counts(self) -> Counts:
        return Counts(int(self.is_padding.sum()), int(self.is_skipped.sum()))

    @classmethod
    def of(
        cls, pairs: Int64s, source_pages: int, destination_pages: int, *, one_cache: bool
    ) -> PagePairs:
        padding = (pairs == PADDING_PAGE).any(axis=1)
        named = (pairs >= 0) & (pairs < np.array([source_pages, destination_pages]))
        exist = named.all(axis=1)
        hostile = ~(named | (pairs == PADDING_PAGE)).all(axis=1)
        moves = pairs[exist]
        moves = moves[np.lexsort((moves[:, 0], moves[:, 1]))]
        moves = moves[np.append(True, (moves[1:] != moves[:-1]).any(axis=1))[: len(moves)]]
        twice = np.flatnonzero(moves[1:, 1] == moves[:-1, 1])
        conflict = None
        if twice.size:
            first, second = moves[twice[0]], moves[twice[0] + 1]
            conflict = (int(first[0]), int(second[0]), int(first[1]))
        if one_cache:
            moves = moves[moves[:, 0] != moves[:, 1]]
        on_cycle = np.zeros(len(moves), dtype=np.bool_)
        if one_cache and conflict is None:
            on_cycle = _on_cycle(moves)
        return cls(pairs, padding, ~padding & ~exist, hostile, moves, conflict, on_cycle)


def _on_cycle(moves: Int64s) -> npt.NDArray[np.bool_]:
    """bool [m]. Destinations are distinct: each page is written by one move at most, and a cycle is
    what remains of going back from a page to the one that it is copied from for ever."""
    source, destination = moves[:, 0], moves[:, 1]
    count = len(moves)
    # back[i]: the move that writes the source of move i; `count`, which leads to itself: none.
    at = np.minimum(np.searchsorted(destination, source), max(count - 1, 0))
    back = np.full(count + 1, count, dtype=np.int64)
    if count:
        back[:-1] = np.where(destination[at] == source, at, count)
    steps = back.copy()
    for _ in range(count.bit_length()):
        steps = steps[steps]
    # 2^k >= m steps back from anywhere lie either nowhere or on a cycle, and all of it is reached.
    cycle = np.zeros(count + 1, dtype=np.bool_)
    cycle[steps[:-1]] = True
    return cycle[:-1]
