"""Cases of (e) copy_blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.classes import check_limit, classes
from pagefuzz.strategies.corners import Corners
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.page_copies import (
    PageCopy,
    conflict_lies,
    extent_bytes,
    index_arguments,
    listed,
    many_pairs,
    oddly,
    page_copy_choices,
    pair_lies,
    payload_argument,
    size_lies,
    strides_of,
)
from pagefuzz.strategies.page_copy_corners import copy_corners
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.refusals import Lie, Surface, lies, wrong_stride

OPERATION = "copy_blocks"

#: What reaches a boundary of 32-bit arithmetic -> weight.
QUANTITIES = {
    "page": 30,  # page * page stride, by way of the page count
    "packed page": 20,  # the same with page strides of about a million bytes
    "page stride": 28,
    "layer stride": 22,
}
#: Scratch -> weight. Without a cycle any will do, with one only the second and third.
SCRATCH = {"absent": 40, "exact": 25, "larger": 15, "one byte short": 10, "of no bytes": 10}

STRIDES: Mapping[str, str] = MappingProxyType(
    {"layer_stride_bytes": "num_layers", "page_stride_bytes": "num_pages"}
)
_SCRATCH = weighted(SCRATCH)


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """Cases of copy_blocks: three in five in contract (a quarter of them at overflow scale), one in
    four hostile, the others refused; about 25 draws each.

    Shrinks towards page 0 copied to page 1, of one byte, in one layer.

    Arguments, and what it raises: see `registry.cases_for`.
    """
    check_limit(limit_bytes)
    return _cases(classes(hostile=hostile, refused=refused), limit_bytes)


@st.composite
def _cases(draw: st.DrawFn, classes: SearchStrategy[str], limit_bytes: int) -> Case:
    case_class = draw(classes)
    event(f"class: {case_class}")
    choices = draw(
        page_copy_choices(
            QUANTITIES, case_class=case_class, limit_bytes=limit_bytes, one_cache=True
        )
    )
    copy = PageCopy(choices, limit_bytes)
    scratch = draw(_SCRATCH)
    if scratch not in ("absent", "larger") and (copy.has_cycle or case_class == "refused"):
        scratch = "exact"  # lies are told of memory that is there
    if copy.has_cycle and scratch == "absent":
        scratch = "exact"
    event(f"scratch: {scratch}")
    unit = copy.element_bytes
    placed = draw(placements({"pairs": 8, "cache": unit, "scratch": unit, "counts": 8}, "cache"))
    case = _case(copy, scratch, placed)
    told = surface(case)
    payload = [name for name in ("cache", "scratch") if name == "cache" or name in case.values]
    return draw(lies(told) if case_class == "refused" else oddly(told, payload))


def _case(copy: PageCopy, scratch: str, placed: Mapping[str, Placement]) -> Case:
    values = {"pairs": listed(copy.pairs)}
    overrides = {}
    placed = dict(placed)
    if scratch != "absent":
        values["scratch"] = Values.literal()
        if scratch == "larger":
            mine = placed.get("scratch", Placement())
            placed["scratch"] = replace(mine, slack_bytes=mine.slack_bytes + 7)
    if scratch in ("one byte short", "of no bytes"):
        overrides["scratch.extent_bytes"] = copy.page_bytes - 1 if "short" in scratch else 0
    if copy.choices.counters is not None:
        values["counts"] = Values.literal(*copy.choices.counters)
    pool = copy.pools[0]
    return Case(
        operation=OPERATION,
        sizes={
            "num_pairs": len(copy.pairs),
            "num_layers": copy.num_layers,
            "num_pages": pool.num_pages,
            "layer_stride_bytes": pool.layer_stride_bytes,
            "page_stride_bytes": pool.page_stride_bytes,
            "page_bytes": copy.page_bytes,
            "element_bytes": copy.element_bytes,
        },
        values=values,
        placements={n: place for n, place in placed.items() if n == "cache" or n in values},
        overrides=overrides,
        seed=copy.choices.seed,
    )


# ---- refusals ------------------------------------------------------------------------------------


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs, scratch as if there were a cycle; absent ones 0."""
    return {
        "pairs": 16 * case.sizes["num_pairs"],
        "cache": extent_bytes(case, STRIDES),
        "scratch": case.sizes["page_bytes"] if "scratch" in case.values else 0,
        "counts": 16 if "counts" in case.values else 0,
    }


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    sizes, needed = case.sizes, required_bytes(case)
    index = index_arguments(case)
    is_absent = "scratch" not in case.values
    scratch = payload_argument(case, 1, needed["scratch"], is_scratch=True, is_absent=is_absent)
    unit, pages = sizes["element_bytes"], sizes["num_pages"]
    less = sizes["page_bytes"] - unit
    return Surface(
        case=case,
        arguments={
            "pairs": index["pairs"],
            "cache": payload_argument(case, 3, needed["cache"]),
            "scratch": scratch,
            "counts": index["counts"],
        },
        destinations=("cache", "scratch"),
        strides=strides_of(case, STRIDES),
        extents={
            "layer_stride_bytes": ("num_layers", "num_pages"),
            "page_stride_bytes": ("num_pages", "num_layers"),
        },
        counts=("num_pairs", "num_layers", "num_pages"),
        own={
            **size_lies(case),
            "not_nested": [
                *wrong_stride(case, "not_nested", "page_stride_bytes", "num_pages", less, 0),
                *wrong_stride(case, "not_nested", "layer_stride_bytes", "num_layers", 0),
            ],
            "conflict": conflict_lies(case, pages, pages),
            "scratch": _scratch_lies(case),
        },
    )


def _scratch_lies(case: Case) -> list[Lie]:
    """A cycle, and no scratch that it fits in."""
    if case.sizes["num_pages"] < 2:
        return []
    last = case.sizes["num_pages"] - 1
    told = [{"scratch.data": 0, "scratch.extent_bytes": 0}]
    if "scratch" in case.values:
        short = case.sizes["page_bytes"] - 1
        told += [{"scratch.extent_bytes": short}, {"scratch.extent_bytes": 0}]
    cycles = pair_lies(case, "scratch", [[(0, last), (last, 0)]])
    return [Lie("scratch", one, values=lie.values) for lie in cycles for one in told]


# ---- reports -------------------------------------------------------------------------------------


def _reported_cycle() -> Case:
    """Report 34: pages 1 and 2 change places; one by one, both end up as page 1."""
    return Case(
        operation=OPERATION,
        sizes={
            "num_pairs": 2,
            "num_layers": 1,
            "num_pages": 3,
            "layer_stride_bytes": 48,
            "page_stride_bytes": 16,
            "page_bytes": 16,
            "element_bytes": 1,
        },
        values={
            "pairs": listed([(1, 2), (2, 1)]),
            "scratch": Values.literal(),
            "counts": Values.literal(0, 0),
        },
    )


def _pages_of_a_byte(pages: int) -> dict[str, int]:
    return {
        "num_layers": 1,
        "num_pages": pages,
        "layer_stride_bytes": pages,
        "page_stride_bytes": 1,
    }


REPORTED: Mapping[str, Callable[[], Case]] = MappingProxyType(
    {
        **many_pairs(OPERATION, _pages_of_a_byte),
        "34-cycle": _reported_cycle,
    }
)


# ---- corners -------------------------------------------------------------------------------------

#: Name -> whether a case is in that corner.
CORNERS: Corners = copy_corners()
