"""Sequence starts: the token at which each request's rows begin in its paged sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.strategies.choices import skewed, weighted

#: Kind -> weight. `absent`: the optional vector is not passed.
KINDS = {
    "absent": 30,
    "zero": 10,
    "tokens": 22,
    "whole pages": 14,
    "staggered": 12,
    "to page end": 12,
}

_KINDS = weighted(KINDS)
_AMOUNTS = skewed((50, range(1, 9)), (30, range(9, 70)), (8, range(70, 5000)))


@dataclass(frozen=True)
class SequenceStarts:
    """kind: key of `KINDS`; amount: tokens or pages, >= 1 where the kind uses it."""

    kind: str
    amount: int = 0

    def values(
        self, lengths: Sequence[int], page_size_tokens: int, max_tokens: int
    ) -> list[int] | None:
        """Token offset of each request, each at most about `max_tokens`; None if absent.

        `to page end`: the request's last row is the last slot of a page, so that with a table of
        exact width it is the last slot of the last column.
        """
        if self.kind == "absent":
            return None
        count, size = len(lengths), page_size_tokens
        amount = min(self.amount, max_tokens)
        if self.kind == "tokens":
            return [amount] * count
        if self.kind == "whole pages":
            return [min(amount, max(1, max_tokens // size)) * size] * count
        if self.kind == "staggered":
            return [
                (amount + 17 * index) % max(2, min(3 * size, max_tokens)) for index in range(count)
            ]
        if self.kind == "to page end":
            pages = min(amount - 1, max_tokens // size)
            return [pages * size + -length % size for length in lengths]
        return [0] * count


@st.composite
def sequence_starts(draw: st.DrawFn) -> SequenceStarts:
    """Sequence starts that are absent, zero, on a page, in a page or past pages; 1 or 2 draws.

    Shrinks towards an absent vector, then zeros, then small equal offsets.
    """
    kind = draw(_KINDS)
    event(f"seq_starts: {kind}")
    return SequenceStarts(kind, 0 if kind in ("absent", "zero") else draw(_AMOUNTS))
