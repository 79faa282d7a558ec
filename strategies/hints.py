"""Hints: which request each row is said to be of (`token_to_seq`).

In contract a row that a request covers has that request as its hint; rows that nobody covers hold
what was there before. Hostile hints are wrong about covered rows.
"""

from __future__ import annotations

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.oracles.case import Values
from pagefuzz.strategies.boundaries import INT32_MAX, INT32_MIN
from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.hostility import IndexValues

#: What rows that nobody covers hold -> weight.
UNCOVERED = {
    "poison": 30,  # ids of no request
    "zero": 25,  # the first request
    "before": 25,  # the owner of the last covered row before, as a longer batch left it
    "any": 20,
}

#: How hints of covered rows are wrong -> weight. `right` leaves it to others to be hostile.
WRONG = {
    "right": 50,
    "one row": 20,
    "first row": 16,  # of a request or a page: nobody counts for it
    "next request": 6,  # every row's
    "one request": 5,  # the same for every row
    "no request": 4,  # an id outside the batch, for every row
}

_UNCOVERED = weighted(UNCOVERED)
_WRONG = weighted(WRONG)
_PLACES = skewed((2, range(8)), (1, range(67)))
_IDS = skewed((1, range(6)), (1, range(61)))


def hints(draw: st.DrawFn, index: IndexValues, hostile: bool) -> Values:
    """Hints of all rows: the owner of each, but for edits; 1 draw, 4 if hostile.

    Shrinks towards owners, and ids of no request for rows without one.
    """
    owners: dict[int, int] = {}
    for span in index.spans():
        for row in range(span.first_row, span.first_row + span.row_count):
            owners.setdefault(row, span.request)
    uncovered = draw(_UNCOVERED)
    event(f"hints of uncovered rows: {uncovered}")
    edits = _uncovered(uncovered, index, owners)
    if hostile:
        wrong, place, amount = draw(_WRONG), draw(_PLACES), draw(_IDS)
        event(f"hints: {wrong}")
        edits |= _wrong(wrong, index, owners, place, amount)
    return Values("owners", {}, dict(sorted(edits.items())))


def _uncovered(kind: str, index: IndexValues, owners: dict[int, int]) -> dict[int, int]:
    found, last = {}, 0
    for row in range(index.num_tokens if kind != "poison" else 0):
        if row in owners:
            last = owners[row]
        elif kind == "any":
            found[row] = (5 * row + 3) % (index.num_requests + 2) - 1
        else:
            found[row] = 0 if kind == "zero" else last
    return found


def _wrong(
    kind: str, index: IndexValues, owners: dict[int, int], place: int, amount: int
) -> dict[int, int]:
    rows = list(owners)
    if kind == "first row":
        size = index.page_size_tokens
        rows = [
            row
            for span in index.spans()
            for row in range(span.first_row, span.first_row + span.row_count)
            if row == span.first_row or (span.first_token + row - span.first_row) % size == 0
        ]
    if not rows or kind == "right":
        return {}
    if kind in ("one row", "first row"):
        row = rows[place % len(rows)]
        return {row: _other(index, owners[row], amount)}
    if kind == "next request":
        return {row: (owners[row] + 1 + amount // 8) % index.num_requests for row in rows}
    same = amount % index.num_requests if kind == "one request" else _outside(index, amount)
    return dict.fromkeys(rows, same)


def _other(index: IndexValues, owner: int, amount: int) -> int:
    """An id that is not the owner's; of another request where there is one."""
    requests = index.num_requests
    if amount % 3 and requests > 1:
        return (owner + 1 + amount // 3 % (requests - 1)) % requests
    return _outside(index, amount // 3)


def _outside(index: IndexValues, amount: int) -> int:
    requests = index.num_requests
    return (requests, -1, requests + 1 + amount, INT32_MAX, INT32_MIN)[amount % 5]
