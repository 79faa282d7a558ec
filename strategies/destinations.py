"""Destinations: where the batch's rows begin and how many rows there are."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.strides import row_paddings

_FIRST_STARTS = skewed((70, (0,)), (20, range(1, 9)), (8, range(9, 300)))
_ENDS = weighted({"equal": 58, "above": 21, "below": 21})
_MORE = skewed((70, range(1, 5)), (25, range(5, 100)))
_FEWER = skewed((70, range(1, 6)), (20, range(6, 100)), (10, (5000,)))
_SPARE_ROWS = skewed((75, (0,)), (20, range(1, 5)), (5, range(5, 40)))
_TERMINALS = weighted({1: 70, 0: 30})


@dataclass(frozen=True)
class Destination:
    """The destination before the batch is known.

    has_terminal           1 if starts has a value that ends the last request, else 0
    first_start            rows before the first request's
    extra_tokens           num_tokens minus the rows up to the end of the batch; negative cuts it
    spare_rows             rows of the destination beyond num_tokens
    row_padding_elements   between rows
    """

    has_terminal: int = 1
    first_start: int = 0
    extra_tokens: int = 0
    spare_rows: int = 0
    row_padding_elements: int = 0


@st.composite
def destinations(draw: st.DrawFn) -> Destination:
    """Destinations with the batch's rows exactly, with more, or with fewer; 5 or 6 draws.

    Shrinks towards a terminal value, a first start of 0, and dense rows that the batch fills.
    """
    has_terminal = draw(_TERMINALS)
    first_start = draw(_FIRST_STARTS)
    end = draw(_ENDS)
    extra_tokens = 0
    if end == "above":
        extra_tokens = draw(_MORE)
    elif end == "below":
        extra_tokens = -draw(_FEWER)
    event(f"num_tokens: {end}")
    return Destination(
        has_terminal, first_start, extra_tokens, draw(_SPARE_ROWS), draw(row_paddings())
    )
