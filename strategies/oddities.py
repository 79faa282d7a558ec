"""Legal but unusual: nonsense where nobody looks, null pointers where nothing is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case
from pagefuzz.strategies.boundaries import INT32_MAX, INT32_MIN
from pagefuzz.strategies.gathers import Gather
from pagefuzz.strategies.refusals import Surface

#: Stands in strides that nobody may look at.
_STRIDE_JUNK = (-1, 0, 3, INT32_MIN, 2**63 - 1, -(2**63), 2**32)
_SEQ_JUNK = (-7, INT32_MIN, INT32_MAX)


def drawn(
    draw: st.DrawFn, case_class: str, oddities: SearchStrategy[str], junk: SearchStrategy[int]
) -> tuple[str, int]:
    """An oddity, and which nonsense; in 1 or 2 draws. "none" for a case to be refused, in none."""
    oddity = draw(oddities) if case_class != "refused" else "none"
    return oddity, draw(junk) if oddity != "none" else 0


# ---- of any case ---------------------------------------------------------------------------------


def oddly(surface: Surface, oddity: str, junk: int) -> Case:
    """The surface's case with an oddity that any operation can have; as it is for any other."""
    case = surface.case
    if oddity != "none":
        event(f"oddity: {oddity}")
    if oddity == "ignored strides":
        return _ignored_strides(case, surface.strides, junk)
    if oddity == "null where empty":
        return _null_where_empty(surface)
    if oddity == "absent arguments":
        absent = [name for name, argument in surface.arguments.items() if argument.is_absent]
        return _absent_arguments(case, absent, junk)
    return case


def _ignored_strides(case: Case, strides: Mapping[str, tuple[str, int]], junk: int) -> Case:
    """Strides of dimensions of size <= 1 hold nonsense."""
    ignored = [name for name, (size, _) in strides.items() if case.sizes[size] <= 1]
    return case.with_sizes(
        **{name: _STRIDE_JUNK[(junk + at) % len(_STRIDE_JUNK)] for at, name in enumerate(ignored)}
    )


def _null_where_empty(surface: Surface) -> Case:
    """A null pointer for every buffer of no bytes."""
    case = surface.case
    empty = [name for name, one in surface.arguments.items() if one.required_bytes == 0]
    kept = {name: place for name, place in case.placements.items() if name not in empty}
    return replace(case, placements=kept, overrides={f"{name}.data": 0 for name in empty})


def _absent_arguments(case: Case, absent: Sequence[str], junk: int) -> Case:
    """dtype and rank of absent buffers hold nonsense."""
    told = {f"{name}.{part}": junk - 1 for name in absent for part in ("dtype", "rank")}
    return replace(case, overrides=told)


# ---- of a gather, before it is a case ------------------------------------------------------------


def begin_oddly(gather: Gather, oddity: str, junk: int, *, one_row_in: int = 4) -> None:
    """What an oddity changes of a gather's index and rows, if anything.

    one_row_in  of so many cases with ignored strides one has a single row, so that the row strides
                of destinations are ignored too
    """
    if oddity == "far starts":
        _far_starts(gather, junk)
    elif oddity == "unread seq_starts":
        _unread_seq_starts(gather, junk)
    elif oddity == "ignored strides" and junk % one_row_in == one_row_in - 1:
        gather.leave_one_row()


def _far_starts(gather: Gather, junk: int) -> None:
    """Starts at num_tokens and beyond mean the same wherever they lie."""
    index = gather.index
    far = INT32_MAX if junk % 2 == 0 else min(index.num_tokens + 1 + junk, INT32_MAX)
    for at in range(len(index.starts) - 1, 0, -1):
        if index.starts[at] < index.num_tokens:
            break
        index.starts[at] = max(index.starts[at], far)


def _unread_seq_starts(gather: Gather, junk: int) -> None:
    """Nobody reads the sequence start of a request without rows on its account."""
    index = gather.index
    live = {span.request for span in index.spans()}
    if index.seq_starts is not None:
        for request in set(range(index.num_requests)) - live:
            index.seq_starts[request] = _SEQ_JUNK[(junk + request) % len(_SEQ_JUNK)]
