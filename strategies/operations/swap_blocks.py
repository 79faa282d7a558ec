"""Cases of (e) swap_blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Placement, Values
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
    payload_argument,
    size_lies,
    strides_of,
)
from pagefuzz.strategies.page_copy_corners import swap_corners
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.refusals import Surface, lies, wrong_stride

OPERATION = "swap_blocks"

#: What reaches a boundary of 32-bit arithmetic, and in which cache -> weight.
QUANTITIES = {
    f"{side}:{quantity}": weight
    for side in ("src", "dst")
    for quantity, weight in (("page", 20), ("packed page", 15), ("page stride", 15))
}

_CACHES = {side: {f"{side}_page_stride_bytes": f"{side}_num_pages"} for side in ("src", "dst")}
STRIDES: Mapping[str, str] = MappingProxyType({**_CACHES["src"], **_CACHES["dst"]})


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """Cases of swap_blocks: three in five in contract (a quarter of them at overflow scale), one in
    four hostile, the others refused; about 25 draws each.

    Shrinks towards page 0 copied to page 1, of one byte.

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
            QUANTITIES, case_class=case_class, limit_bytes=limit_bytes, one_cache=False
        )
    )
    copy = PageCopy(choices, limit_bytes)
    unit = copy.element_bytes
    alignments = {"pairs": 8, "src_cache": unit, "dst_cache": unit, "counts": 8}
    case = _case(copy, draw(placements(alignments, "dst_cache")))
    told = surface(case)
    caches = ("src_cache", "dst_cache")
    return draw(lies(told) if case_class == "refused" else oddly(told, caches))


def _case(copy: PageCopy, placed: Mapping[str, Placement]) -> Case:
    values = {"pairs": listed(copy.pairs)}
    if copy.choices.counters is not None:
        values["counts"] = Values.literal(*copy.choices.counters)
    source, destination = copy.pools
    return Case(
        operation=OPERATION,
        sizes={
            "num_pairs": len(copy.pairs),
            "src_num_pages": source.num_pages,
            "dst_num_pages": destination.num_pages,
            "src_page_stride_bytes": source.page_stride_bytes,
            "dst_page_stride_bytes": destination.page_stride_bytes,
            "page_bytes": copy.page_bytes,
            "element_bytes": copy.element_bytes,
        },
        values=values,
        placements={n: place for n, place in placed.items() if n != "counts" or n in values},
        seed=copy.choices.seed,
    )


# ---- refusals ------------------------------------------------------------------------------------


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    return {
        "pairs": 16 * case.sizes["num_pairs"],
        "src_cache": extent_bytes(case, _CACHES["src"]),
        "dst_cache": extent_bytes(case, _CACHES["dst"]),
        "counts": 16 if "counts" in case.values else 0,
    }


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    sizes, needed = case.sizes, required_bytes(case)
    index = index_arguments(case)
    less = sizes["page_bytes"] - sizes["element_bytes"]
    return Surface(
        case=case,
        arguments={
            "pairs": index["pairs"],
            "src_cache": payload_argument(case, 2, needed["src_cache"]),
            "dst_cache": payload_argument(case, 2, needed["dst_cache"]),
            "counts": index["counts"],
        },
        destinations=("dst_cache",),
        strides=strides_of(case, STRIDES),
        extents={name: (size,) for name, size in STRIDES.items()},
        counts=("num_pairs", "src_num_pages", "dst_num_pages"),
        own={
            **size_lies(case),
            "not_nested": wrong_stride(
                case, "not_nested", "dst_page_stride_bytes", "dst_num_pages", less, 0
            ),
            "conflict": conflict_lies(case, sizes["src_num_pages"], sizes["dst_num_pages"]),
        },
    )


# ---- reports -------------------------------------------------------------------------------------


def _reported_strides() -> Case:
    """Report 18: page strides of both caches are more than their pages, and not the same."""
    return Case(
        operation=OPERATION,
        sizes={
            "num_pairs": 2,
            "src_num_pages": 3,
            "dst_num_pages": 4,
            "src_page_stride_bytes": 24,
            "dst_page_stride_bytes": 20,
            "page_bytes": 16,
            "element_bytes": 2,
        },
        values={"pairs": listed([(2, 1), (1, 3)]), "counts": Values.literal(0, 0)},
    )


def _pages_of_a_byte(pages: int) -> dict[str, int]:
    return {
        "src_num_pages": pages,
        "dst_num_pages": pages,
        "src_page_stride_bytes": 1,
        "dst_page_stride_bytes": 1,
    }


REPORTED: Mapping[str, Callable[[], Case]] = MappingProxyType(
    {
        "18-strides": _reported_strides,
        **many_pairs(OPERATION, _pages_of_a_byte),
    }
)


# ---- corners -------------------------------------------------------------------------------------

#: Name -> whether a case is in that corner.
CORNERS: Corners = swap_corners()
