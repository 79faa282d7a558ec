"""Batches: how many requests there are and how many rows each asks for."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.strategies.choices import skewed, weighted

#: Shape -> weight. `one` comes first: what everything shrinks towards.
SHAPES = {
    "one": 26,
    "even": 14,
    "mixed": 18,
    "empty first": 6,
    "empty middle": 6,
    "empty last": 6,
    "uneven": 10,
    "many": 4,
    "all empty": 4,
    "none": 3,
}

#: How the longest request's length relates to the page size.
SNAPS = {"free": 60, "whole pages": 20, "one past": 10, "one short": 10}

_SHAPES = weighted(SHAPES)
_SNAPS = weighted(SNAPS)
_REQUESTS = skewed((60, range(2, 5)), (32, range(5, 9)), (6, range(9, 33)))
# Begins with few, so that a fault that many requests showed shrinks within the shape.
_MANY = skewed((6, range(1, 9)), (30, range(9, 65)), (12, range(65, 301)))
_ANY = 0  # stands for a second draw
_LONGEST = skewed((50, range(1, 9)), (30, range(9, 40)), (14, range(40, 200)), (6, (_ANY,)))
_ANY_LONGEST = st.sampled_from(range(1, 4201))


@dataclass(frozen=True)
class Batch:
    """A batch before page size and memory budget are known.

    shape           key of `SHAPES`
    request_count   0 or more
    longest         rows the longest request asks for, before `snap`; >= 1
    snap            key of `SNAPS`
    """

    shape: str
    request_count: int
    longest: int
    snap: str

    def lengths(self, page_size_tokens: int, max_rows: int) -> list[int]:
        """Rows each request asks for; [request_count].

        Their sum stays within about `max_rows` (every request of a shape without empty ones keeps
        its one row).
        """
        count = self.request_count
        if self.shape in ("none", "all empty"):
            return [0] * count
        if self.shape == "many":
            sizes = (1, 0, 1, 2, 1, 3, 0)
            return [sizes[index % len(sizes)] for index in range(count)]
        longest = min(self.longest, max(1, max_rows // count))
        if self.shape == "uneven":
            # One request holds nearly everything, the others a row or none.
            longest = min(self.longest * 8 - 7, max(1, max_rows))
        longest = _snapped(longest, self.snap, page_size_tokens, max_rows)
        if self.shape in ("one", "even"):
            return [longest] * count
        if self.shape == "uneven":
            return [longest if index == count // 2 else 1 - index % 2 for index in range(count)]
        lengths = [1 + (longest - 1) * (index * 5 % 7) // 6 for index in range(count)]
        lengths[-1] = longest
        empty = {"empty first": 0, "empty middle": count // 2, "empty last": count - 1}
        if self.shape in empty:
            lengths[empty[self.shape]] = 0
            lengths[0 if self.shape != "empty first" else -1] = longest
        return lengths


def _snapped(longest: int, snap: str, page_size_tokens: int, max_rows: int) -> int:
    whole = -(-longest // page_size_tokens) * page_size_tokens
    if snap == "free" or whole > max_rows:
        return longest
    return max(1, whole + {"whole pages": 0, "one past": 1, "one short": -1}[snap])


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Batches of 0 to 300 requests (mostly up to 8) of 0 to about 4,200 rows, in at most 5 draws.

    Shrinks towards one request of one row, then fewer requests, then shorter ones.
    """
    shape = draw(_SHAPES)
    event(f"batch: {shape}")
    # Drawn for every shape: what takes fewer draws counts as simpler, and that is to be `one`.
    longest = draw(_LONGEST) or draw(_ANY_LONGEST)
    snap = draw(_SNAPS)
    if shape == "one":
        return Batch(shape, 1, longest, snap)
    count = draw(_MANY if shape == "many" else _REQUESTS)
    if shape == "none":
        count = 0
    elif shape == "all empty":
        count -= 1
    elif shape == "empty middle":
        count += 1
    return Batch(shape, count, longest, snap)
