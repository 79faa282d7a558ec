"""Which cache entry each destination row takes: the row mapping of contracts.md, vectorised.

Operations (a) to (d) share it. Nothing here knows more of memory than the index values that are
passed in, and every array is proportional to the rows that are mapped, never to a buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.case import CaseError

Int64s = npt.NDArray[np.int64]

#: Above this, a case costs more memory and time than a fuzz run has.
MAX_CLAIMS = 2**21

#: The page id that engines pad tables with: counted apart from other illegal ids.
PADDING_PAGE = -1


@dataclass(frozen=True, slots=True)
class RowMap:
    """Every claim: a (request, row) pair of the mapping whose request has `seq_starts >= 0`.

    request, row, token, slot   int64 [n], claims by request, then row; `token` is the position in
                                the request's paged sequence, `slot` the one in its page
    page                        int64 [n], index into the `page_*` arrays
    page_request, page_column   int64 [m], the distinct (request, logical page) pairs, same order
    negative_requests           int64, requests that have rows and a negative seq_start
    first_contested_row         where clamped starts decrease, the lowest clamped start after the
                                first decrease (`m` of the contract); otherwise None. No row below
                                it has more than one claim.
    """

    request: Int64s
    row: Int64s
    token: Int64s
    slot: Int64s
    page: Int64s
    page_request: Int64s
    page_column: Int64s
    negative_requests: Int64s
    first_contested_row: int | None


def map_rows(
    starts: Int64s,
    seq_starts: Int64s | None,
    *,
    num_requests: int,
    num_tokens: int,
    page_size_tokens: int,
) -> RowMap:
    """Maps every row.

    starts      int64 [num_requests] or, with a terminal value, [num_requests + 1]
    seq_starts  int64 [num_requests], or None where the argument is absent

    Raises `CaseError` if there are more than `MAX_CLAIMS` claims.
    """
    clamped = np.minimum(np.maximum(starts, 0), num_tokens)
    if clamped.size == num_requests:
        clamped = np.concatenate((clamped, np.array([num_tokens], dtype=np.int64)))
    length = clamped[1:] - clamped[:-1]
    first_contested_row = None
    if decreases := np.flatnonzero(length < 0).tolist():
        first_contested_row = int(clamped[decreases[0] + 1 :].min())
    live = length > 0
    negative_requests = np.empty(0, np.int64)
    if seq_starts is not None:
        negative = seq_starts < 0
        negative_requests = np.flatnonzero(live & negative)
        live &= ~negative
    requests = np.flatnonzero(live)
    length = length[requests]
    total = int(length.sum())
    if total > MAX_CLAIMS:
        raise CaseError(
            f"the case maps {total} rows (a row counts once for each request that claims it); "
            f"at most {MAX_CLAIMS} can be expanded"
        )
    before = np.cumsum(length) - length
    # Per request: what turns the running number of a claim into its row and its token.
    to_row = clamped[requests] - before
    to_token = to_row - starts[requests]
    if seq_starts is not None:
        to_token += seq_starts[requests]
    running = np.arange(total, dtype=np.int64)
    of_claim = np.repeat(np.arange(requests.size, dtype=np.int64), length)
    request = requests[of_claim]
    token = running + to_token[of_claim]
    column, slot = np.divmod(token, page_size_tokens)
    first = np.empty(total, dtype=np.bool_)
    first[:1] = True
    if total > 1:
        np.not_equal(column[1:], column[:-1], out=first[1:])
        first[1:] |= of_claim[1:] != of_claim[:-1]
    at = np.flatnonzero(first)
    return RowMap(
        request=request,
        row=running + to_row[of_claim],
        token=token,
        slot=slot,
        page=np.cumsum(first, dtype=np.int64) - 1,
        page_request=request[at],
        page_column=column[at],
        negative_requests=negative_requests,
        first_contested_row=first_contested_row,
    )
