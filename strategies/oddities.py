"""Oddities: what is legal in a gather's case, but unusual.

Those of index values change a `Gather` before it becomes a case, the others a case. `junk` picks
among the values that an oddity knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pagefuzz.oracles.case import Case
from pagefuzz.strategies.boundaries import INT32_MAX, INT32_MIN
from pagefuzz.strategies.gathers import Gather

_STRIDES = (-1, 0, 3, INT32_MIN, 2**63 - 1, -(2**63), 2**32)
_SEQ_STARTS = (-7, INT32_MIN, INT32_MAX)


def far_starts(gather: Gather, junk: int) -> None:
    """Starts at num_tokens and beyond mean the same wherever they lie."""
    index = gather.index
    far = INT32_MAX if junk % 2 == 0 else min(index.num_tokens + 1 + junk, INT32_MAX)
    for at in range(len(index.starts) - 1, 0, -1):
        if index.starts[at] < index.num_tokens:
            break
        index.starts[at] = max(index.starts[at], far)


def unread_seq_starts(gather: Gather, junk: int) -> None:
    """Nobody reads the sequence start of a request without rows on its account."""
    index = gather.index
    live = {span.request for span in index.spans()}
    if index.seq_starts is not None:
        for request in set(range(index.num_requests)) - live:
            index.seq_starts[request] = _SEQ_STARTS[(junk + request) % len(_SEQ_STARTS)]


def single_row(gather: Gather, junk: int) -> None:
    """Sometimes one row is left, so that the destination's row stride is ignored too."""
    if junk % 4 == 3 and not gather.quantity:
        gather.index.num_tokens = min(gather.index.num_tokens, 1)
        gather.dst_rows = gather.index.num_tokens


def ignored_strides(case: Case, junk: int, strides: Mapping[str, tuple[str, int]]) -> Case:
    """Strides of dimensions of size <= 1 hold nonsense. `strides`: as in `refusals.Surface`."""
    ignored = [name for name, (size, _) in strides.items() if case.sizes[size] <= 1]
    return case.with_sizes(
        **{name: _STRIDES[(junk + at) % len(_STRIDES)] for at, name in enumerate(ignored)}
    )


def null_where_empty(case: Case, required_bytes: Mapping[str, int]) -> Case:
    """A null pointer for every buffer of no bytes."""
    empty = [name for name, needed in required_bytes.items() if needed == 0]
    kept = {name: place for name, place in case.placements.items() if name not in empty}
    return replace(case, placements=kept, overrides={f"{name}.data": 0 for name in empty})


def absent_arguments(case: Case, junk: int, optional: Iterable[str]) -> Case:
    """dtype and rank of an absent buffer hold nonsense."""
    absent = [name for name in optional if name not in case.values]
    return replace(
        case,
        overrides={f"{name}.{part}": junk - 1 for name in absent for part in ("dtype", "rank")},
    )
