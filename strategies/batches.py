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
    "whole tables": 10,
}

#: How the longest request's length relates to the page size.
SNAPS = {"free": 60, "whole pages": 20, "one past": 10, "one short": 10}

#: Pages of a request of `whole tables`: powers of two and their neighbours. What a kernel does a
#: chunk of pages at a time goes wrong where the pages are just as many (report 28), or one more.
TABLE_PAGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
#: How full the last of those pages is.
TAILS = ("one", "one short", "full")
#: Requests of a batch of `many` that keeps something for each in 1,024 threads, or shared memory,
#: is one too many for.
MOST_REQUESTS = 1025
#: Above so many requests only a few have rows.
_MOST_WITH_ROWS = 300
_FEW = 16

_SHAPES = weighted(SHAPES)
_SNAPS = weighted(SNAPS)
_REQUESTS = skewed((60, range(2, 5)), (32, range(5, 9)), (6, range(9, 33)))
# Begins with few, so that a fault that many requests showed shrinks within the shape.
_MANY = skewed(
    (6, range(1, 9)),
    (30, range(9, 65)),
    (12, range(65, _MOST_WITH_ROWS + 1)),
    (4, (MOST_REQUESTS,)),
)
_TABLE_PAGES = st.sampled_from(TABLE_PAGES)
_TAILS = st.sampled_from(TAILS)
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
    table_pages, tail  of the first request of `whole tables`: which of `TABLE_PAGES` and `TAILS`
    """

    shape: str
    request_count: int
    longest: int
    snap: str
    table_pages: int = TABLE_PAGES[0]
    tail: str = TAILS[0]

    def _whole_tables(self) -> list[tuple[int, str]]:
        """Pages and tail of each request of `whole tables`; the first one's are those drawn, the
        others' are others of the lists."""
        page, tail = TABLE_PAGES.index(self.table_pages), TAILS.index(self.tail)
        return [
            (
                TABLE_PAGES[(page + 5 * index) % len(TABLE_PAGES)],
                TAILS[(tail + index) % len(TAILS)],
            )
            for index in range(self.request_count)
        ]

    def lengths(self, page_size_tokens: int, max_rows: int) -> list[int]:
        """Rows each request asks for; [request_count].

        Their sum stays within about `max_rows` (every request of a shape without empty ones keeps
        its one row, and one of `whole tables` its pages).
        """
        count = self.request_count
        if self.shape in ("none", "all empty"):
            return [0] * count
        if self.shape == "many":
            sizes = (1, 0, 1, 2, 1, 3, 0)
            if count > _MOST_WITH_ROWS:  # the first and the last ones
                edge = _FEW // 2
                return [
                    sizes[index % len(sizes)] if min(index, count - 1 - index) < edge else 0
                    for index in range(count)
                ]
            return [sizes[index % len(sizes)] for index in range(count)]
        if self.shape == "whole tables":
            size = page_size_tokens
            missing = {"one": size - 1, "one short": min(1, size - 1), "full": 0}
            return [pages * size - missing[tail] for pages, tail in self._whole_tables()]
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
    """Batches of 0 to 300 requests (mostly up to 8; rarely 1,025) of 0 to about 4,200 rows, in at
    most 6 draws.

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
    if shape == "whole tables":
        # One to three requests: they are long.
        return Batch(shape, 1 + count % 3, longest, snap, draw(_TABLE_PAGES), draw(_TAILS))
    if shape == "none":
        count = 0
    elif shape == "all empty":
        count -= 1
    elif shape == "empty middle":
        count += 1
    return Batch(shape, count, longest, snap)
