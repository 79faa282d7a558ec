"""Hostility: values in device memory that no correct caller would pass.

Edits are applied to the index values of a sound case in the order in which they depend on each
other: starts before the table is sized, its width while it is, everything else afterwards. An edit
that finds nothing to act on (no request has rows, the table is not read) changes nothing, so that
an edited case may still be in contract; it is the oracle that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from pagefuzz.oracles.case import Values
from pagefuzz.strategies.boundaries import INT32_MAX, INT32_MIN
from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.rows import Span, spans

#: Kind -> weight. In the order of contracts.md's table.
KINDS = {
    "past the table": 14,
    "narrow table": 10,
    "padding id": 13,
    "foreign id": 20,
    "negative start": 12,
    "negative seq_start": 9,
    "falling starts": 16,
    "falling past the end": 4,
    "extreme start": 8,
    "scattered starts": 5,
    "extreme seq_start": 5,
}

_MOST_EDITS = 3
# One set of strategies for each edit of a case, for labels of their own (see `choices`); what an
# index means is the same in all, so that an edit can be left out and the next take its place.
_EDITS = tuple(
    (
        weighted({**KINDS, "extreme seq_start": KINDS["extreme seq_start"] + nth}),
        skewed((1, (0, 1, 2)), (1, range(64 + nth))),
        skewed((3, range(8)), (2, range(64 + nth))),
        weighted({False: 70, True: 30 + nth}),
    )
    for nth in range(_MOST_EDITS)
)

#: Rows that edited starts may claim, all requests together; beyond it, starts stay as they are.
MAX_CLAIMED_ROWS = 2**14


@dataclass
class IndexValues:
    """Index values of a gather on their way into a case; edits change them in place.

    starts             [num_requests] or [num_requests + 1]
    seq_starts         [num_requests], or None if the vector is absent
    table_edits        element (row * table_width + column) -> page id
    The table's sizes are 0 until it is sized.
    """

    num_requests: int
    num_tokens: int
    page_size_tokens: int
    starts: list[int]
    seq_starts: list[int] | None
    table_width: int = 0
    table_row_stride: int = 0
    num_pages: int = 0
    table_edits: dict[int, int] = field(default_factory=dict)

    def spans(self) -> list[Span]:
        return spans(self.starts, self.seq_starts, self.num_requests, self.num_tokens)

    def mapped_columns(self) -> int:
        """Columns a table needs so that every mapped one is below its width."""
        size = self.page_size_tokens
        return max((span.last_token // size + 1 for span in self.spans()), default=0)

    def cell(self, request: int, column: int) -> int:
        """The element of the recipe that lies where (request, column) is looked up.

        Later rows are laid over earlier ones, so with a row stride below the width it may belong
        to another row.
        """
        stride = self.table_row_stride if self.num_requests > 1 else 0
        element = request * stride + column
        row = min(element // stride, self.num_requests - 1) if stride else self.num_requests - 1
        return row * self.table_width + element - row * stride

    def starts_values(self) -> Values:
        return Values.literal(*self.starts)


@dataclass(frozen=True)
class Edit:
    """kind: key of `KINDS`; place: which request or column; amount: how far, or which value."""

    kind: str
    place: int
    amount: int


@st.composite
def edits(draw: st.DrawFn, *, max_count: int = _MOST_EDITS) -> tuple[Edit, ...]:
    """One to `max_count` hostile edits, 4 draws each.

    Shrinks towards one edit, that of a sequence start that runs one row past the table. Raises
    `InvalidArgument` for `max_count` outside 1..3.
    """
    if max_count not in range(1, _MOST_EDITS + 1):
        raise InvalidArgument(f"max_count={max_count!r} must lie in 1..{_MOST_EDITS}")
    found = []
    for kinds, places, amounts, more in _EDITS[:max_count]:
        kind = draw(kinds)
        event(f"hostile: {kind}")
        found.append(Edit(kind, draw(places), draw(amounts)))
        if not draw(more):
            break
    return tuple(found)


def edit_starts(state: IndexValues, hostile: Sequence[Edit]) -> None:
    """Applies the edits of starts; the table has no size yet."""
    for edit in hostile:
        before = list(state.starts)
        if state.starts:
            _edit_starts(state, edit)
        if sum(span.row_count for span in state.spans()) > MAX_CLAIMED_ROWS:
            state.starts = before


def _edit_starts(state: IndexValues, edit: Edit) -> None:
    starts, amount = state.starts, edit.amount
    last = len(starts) - 1
    if edit.kind == "negative start":
        if amount % 4 < 2 or last == 0:
            # The first request gains rows: its first start alone moves.
            starts[0] = INT32_MIN if amount % 16 == 13 else -1 - amount // 2
        else:
            shift = starts[edit.place % len(starts)] + 1 + amount // 4
            state.starts = [max(start - shift, INT32_MIN) for start in starts]
    elif edit.kind == "falling starts" and last:
        at = edit.place % last
        if amount % 3 == 0:  # the later one falls below the earlier one
            starts[at + 1] = starts[at] - 1 - amount // 3
        elif amount % 3 == 1:  # the earlier one rises above the later one
            starts[at] = min(starts[at + 1] + 1 + amount // 3, INT32_MAX)
        else:
            starts[at], starts[at + 1] = starts[at + 1], starts[at]
    elif edit.kind == "falling past the end" and last:
        # They fall, but all of those that do clamp to num_tokens.
        starts[last - 1] = min(state.num_tokens + 2 + amount, INT32_MAX)
        starts[last] = max(starts[last - 1] - 1 - edit.place, state.num_tokens)
    elif edit.kind == "extreme start":
        starts[edit.place % len(starts)] = (INT32_MAX, INT32_MIN)[amount % 2]
    elif edit.kind == "scattered starts":
        for index in range(len(starts)):
            word = ((index + 1) * 0x9E3779B1 + amount * 0x85EBCA77 + edit.place) % 2**32
            small = word % (state.num_tokens + 9) - 4
            starts[index] = small if word % 5 else word - 2**31
    for index, start in enumerate(state.starts):
        state.starts[index] = min(max(start, INT32_MIN), INT32_MAX)


def narrowed(width: int, hostile: Sequence[Edit]) -> int:
    """The width of a table of which edits take columns away."""
    for edit in hostile:
        if edit.kind == "narrow table":
            width = max(0, width - 1 - edit.amount)
    return width


def edit_sized(state: IndexValues, hostile: Sequence[Edit]) -> None:
    """Applies the edits of sequence starts and of page ids to values whose table is sized."""
    for edit in hostile:
        live = state.spans()
        if not live:
            return
        span = live[edit.place % len(live)]
        if edit.kind in ("past the table", "negative seq_start", "extreme seq_start"):
            _edit_seq_start(state, edit, span)
        elif edit.kind in ("padding id", "foreign id"):
            columns = span.columns(state.page_size_tokens)
            column = columns[edit.place // len(live) % len(columns)]
            if 0 <= column < state.table_width:
                page = -1 if edit.kind == "padding id" else _foreign_id(state, edit.amount)
                state.table_edits[state.cell(span.request, column)] = page


def _edit_seq_start(state: IndexValues, edit: Edit, span: Span) -> None:
    if state.seq_starts is None:
        state.seq_starts = [0] * state.num_requests
    size, amount, seq_starts = state.page_size_tokens, edit.amount, state.seq_starts
    if edit.kind == "negative seq_start":
        seq_starts[span.request] = INT32_MIN if amount % 4 == 3 else -1 - (amount // 2) * size
    elif edit.kind == "extreme seq_start":
        seq_starts[span.request] = INT32_MAX - amount // 4
    else:
        # One row past the table, a page past it, every row past it, or far away.
        to_end = state.table_width * size - span.last_token
        further = (0, 0, size, span.row_count - 1, 64 * size)[amount % 5]
        moved = max(seq_starts[span.request] + to_end + further, 0)
        seq_starts[span.request] = min(moved, INT32_MAX)


def _foreign_id(state: IndexValues, amount: int) -> int:
    """An id of no page that is not the padding id."""
    near = (state.num_pages, -2, INT32_MAX, INT32_MIN)
    ids = (*near, *near, state.num_pages + 1 + amount, -3 - amount)
    return min(ids[amount % len(ids)], INT32_MAX)
