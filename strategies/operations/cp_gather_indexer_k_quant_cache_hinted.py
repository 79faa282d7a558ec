"""Cases of cp_gather_indexer_k_quant_cache in its hinted form.

A launch has few rows: its kernel is interpreted on the host, a program a row, at a millisecond or
two each. Overflow scale is reached by strides and by pages, not by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Values
from pagefuzz.strategies.boundaries import crossings
from pagefuzz.strategies.corners import Corners, Predicate, gather_corners
from pagefuzz.strategies.facts import Facts
from pagefuzz.strategies.fixed_gathers import indexed, more_requests, more_rows
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.hints import hints
from pagefuzz.strategies.hostility import IndexValues
from pagefuzz.strategies.indexer_corners import INDEXER_SITUATIONS
from pagefuzz.strategies.indexer_gathers import (
    HINTS,
    QUANTITIES,
    REASONS,
    Variant,
    indexer_cases,
    surface,
)

OPERATION = "cp_gather_indexer_k_quant_cache_hinted"
PLAIN = "cp_gather_indexer_k_quant_cache"

__all__ = ["CORNERS", "ON_GPU", "OPERATION", "REPORTED", "SHAPES", "cases", "surface"]

#: Rows of one launch, about.
MOST_ROWS = 12

#: Triton compiles a kernel for each, which takes a GPU's user a second.
PAGE_SIZES = (1, 3, 16, 17, 64, 100, 4096)
HEADS = (16, 48, 128, 640)

#: These take two million rows.
_OF_MANY_ROWS = ("dst row", "row index")


def _add(draw: st.DrawFn, index: IndexValues, hostile: bool) -> Mapping[str, Values]:
    return {HINTS: hints(draw, index, hostile)}


_VARIANT = Variant(
    OPERATION,
    crossings(
        {
            # Rows reach a boundary by their stride alone.
            name: 24 if name == "dst stride" else weight
            for name, weight in QUANTITIES.items()
            if name not in _OF_MANY_ROWS
        }
    ),
    MOST_ROWS,
    PAGE_SIZES,
    HEADS,
    _add,
)


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """See `indexer_gathers.indexer_cases`; of a few rows each."""
    return indexer_cases(_VARIANT, hostile=hostile, refused=refused, limit_bytes=limit_bytes)


# ---- reports -------------------------------------------------------------------------------------


def _as_hinted(name: str) -> Callable[[], Case]:
    """A reported case of the form without hints, in this one."""

    def case() -> Case:
        from pagefuzz.strategies.reported import examples_for

        plain = examples_for(PLAIN)[name]
        return replace(plain, operation=OPERATION, values={HINTS: Values("owners"), **plain.values})

    return case


def _uncovered_rows() -> Case:
    """Report 19: num_tokens is larger than the last start, and the rows beyond are request 0's."""
    plain = _as_hinted("19-uncovered-rows")()
    return replace(plain, values={**plain.values, HINTS: Values("owners", {}, {2: 0, 3: 1})})


REPORTED: Mapping[str, Callable[[], Case]] = {
    **{
        name: _as_hinted(name)
        for name in (
            "8-packed-pool-good",
            "8-packed-pool-bad",
            "9-packed-pool-good",
            "9-packed-pool-bad",
            "10-scale-offset-good",
            "10-scale-offset-bad",
            "14-column-slice",
            "29-empty-among-others",
            "many-2049-requests",
            "many-columns",
            "production-head-128",
        )
    },
    "19-uncovered-rows": _uncovered_rows,
}


def _hinted(case: Callable[[], Case]) -> Callable[[], Case]:
    def hinted() -> Case:
        plain = case()
        return replace(plain, values={HINTS: Values("owners"), **plain.values})

    return hinted


#: As many rows as a grid's y axis does not have take a minute in the interpreter.
ON_GPU: Mapping[str, Callable[[], Case]] = {
    name: _hinted(case)
    for fixed in (more_rows, more_requests)
    for name, case in fixed(OPERATION, indexed(HEADS[0])).items()
}


def _prompt(number: int) -> Case:
    """A shape of report 32: a batch of other sizes and strides, as the next prompt has."""
    requests = number % 5 + 1
    lengths = [1 + (7 * request + 3 * number) % 13 for request in range(requests)]
    tokens, width, pages = sum(lengths) + number % 3, number % 4 + 1, 3 * number + 16
    present = {"seq_starts": Values("constant", {"value": 0})} if number % 2 else {}
    if number % 3:
        present["counts"] = Values.literal(0, 0)
    return Case(
        operation=OPERATION,
        sizes={
            "num_requests": requests,
            "num_tokens": tokens,
            "page_size_tokens": 64,
            "num_pages": pages,
            "table_width": width,
            "table_row_stride": width + 3 * (number % 2),
            "page_stride_bytes": 8448 + 4 * (13 * number % 17),
            "dst_k_rows": tokens + number % 4,
            "dst_k_row_stride_bytes": 128 + number % 7,
            "dst_scale_rows": tokens + number % 2,
            "dst_scale_row_stride_bytes": 4 + 4 * (number % 5),
            "head_dim": 128,
            "quant_block": 128,
            "page_layout": 1,
            "has_terminal": int(number % 7 > 0),
        },
        values={
            "block_table": Values("identity"),
            HINTS: Values("owners"),
            "starts": Values(
                "cumulative",
                {"first": 0, "steps": tuple(lengths if number % 7 else lengths[:-1])},
            ),
            **present,
        },
    )


#: Report 32 counts compilations over as many.
SHAPES = tuple(_prompt(number) for number in range(20))


# ---- corners -------------------------------------------------------------------------------------


def _edits(f: Facts) -> dict[int, int]:
    return dict(f.case.values[HINTS].edits)


def _covered(f: Facts) -> set[int]:
    return {row for s in f.spans for row in range(s.first_row, s.first_row + s.row_count)}


def _uncovered_named(f: Facts, *, inside: bool) -> bool:
    """A row that nobody covers has a hint, which names a request or does not."""
    covered = _covered(f)
    return f.sound and any(
        row not in covered and (0 <= hint < f.requests) is inside for row, hint in _edits(f).items()
    )


def _misled(holds: Callable[[Facts, int], bool]) -> Predicate:
    """A covered row has a hint like that, which is wrong."""

    def corner(f: Facts) -> bool:
        owners: dict[int, set[int]] = {}
        for s in f.spans:
            for row in range(s.first_row, s.first_row + s.row_count):
                owners.setdefault(row, set()).add(s.request)
        wrong = [h for row, h in _edits(f).items() if row in owners and h not in owners[row]]
        return any(holds(f, hint) for hint in wrong)

    return corner


#: What takes more rows than a launch has here.
_UNREACHED = ("boundary: row 2^31 - 2",)

_SITUATIONS: Mapping[str, Predicate] = {
    **{name: one for name, one in INDEXER_SITUATIONS.items() if name not in _UNREACHED},
    "hints: an uncovered row names a request": lambda f: _uncovered_named(f, inside=True),
    "hints: an uncovered row names nobody": lambda f: _uncovered_named(f, inside=False),
    "hostile: a hint of another request": _misled(lambda f, hint: 0 <= hint < f.requests),
    "hostile: a hint past the requests": _misled(lambda f, hint: hint == f.requests),
    "hostile: a hint of 2^31 - 1": _misled(lambda _, hint: hint == 2**31 - 1),
    "hostile: a negative hint": _misled(lambda _, hint: hint < 0),
    "hostile: a row is exact, its neighbour misled": lambda f: (
        bool(f.row.size) and f.hostile and len(f.row) < len(_covered(f))
    ),
}

#: Name -> whether a case is in that corner.
CORNERS: Corners = gather_corners(_SITUATIONS, REASONS)
