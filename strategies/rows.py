"""Which rows each request maps: the part of the contract that strategies need to size things.

A second writing of the row mapping, in plain integers over requests, never over rows. Whether a
case is in contract is the oracle's to say; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """The rows of one request.

    request       its index
    first_row     clamped, >= 0
    row_count     >= 1
    first_token   position of the first row in the request's paged sequence; may be negative
    """

    request: int
    first_row: int
    row_count: int
    first_token: int

    @property
    def last_token(self) -> int:
        return self.first_token + self.row_count - 1

    def columns(self, page_size_tokens: int) -> range:
        """Logical pages that the span maps (negative ones included)."""
        return range(self.first_token // page_size_tokens, self.last_token // page_size_tokens + 1)


def spans(
    starts: Sequence[int],
    seq_starts: Sequence[int] | None,
    num_requests: int,
    num_tokens: int,
) -> list[Span]:
    """Every request that has rows, in order. `starts` has num_requests values, or one more."""
    found = []
    for request in range(num_requests):
        start = starts[request]
        end = starts[request + 1] if request + 1 < len(starts) else num_tokens
        begin_row, end_row = (min(max(value, 0), num_tokens) for value in (start, end))
        if end_row > begin_row:
            token = (seq_starts[request] if seq_starts else 0) + begin_row - start
            found.append(Span(request, begin_row, end_row - begin_row, token))
    return found
