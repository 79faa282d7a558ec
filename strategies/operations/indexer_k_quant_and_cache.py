"""Cases of (e) indexer_k_quant_and_cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.classes import check_limit, classes
from pagefuzz.strategies.corners import Corners
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.indexer_pages import LAYOUTS, quant_block, wrong_pages
from pagefuzz.strategies.oddities import drawn, oddly
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.quantising import SCALE_KINDS, scale_kind_lies
from pagefuzz.strategies.refusals import Argument, Lie, Surface, lies, reach, rows_bytes
from pagefuzz.strategies.write_corners import indexer_write_corners
from pagefuzz.strategies.writes import (
    COUNTS,
    Write,
    index_arguments,
    row_lies,
    write_choices,
)

OPERATION = "indexer_k_quant_and_cache"

#: Legal but unusual -> weight.
ODDITIES = {
    "none": 83,
    "ignored strides": 12,  # strides of dimensions of size <= 1 hold nonsense
    "null where empty": 5,  # a null pointer for every buffer of no bytes
}

TILED16, TILE = 1, 16
_INPUT, _UNIT = 2, 4
#: Page size, values and values a scale, page layout, as engines run it.
PRODUCTION = ((64, 128, 128, 0), (64, 128, 128, TILED16))
#: Slots have no stride of their own.
_INSTEAD = {"slot stride": "page stride"}
#: Of all tokens together: each is a task of its own.
_MOST_GROUPS = 2048

_ODDITIES = weighted(ODDITIES)
_JUNK = st.sampled_from(range(17))
_HEADS = skewed((50, range(16, 129, 16)), (35, (128, 128, 192, 256)), (15, range(16, 1025, 16)))
_BLOCKS = skewed((52, (0,)), (48, range(1, 40)))
_ALIGNMENTS = {"k": 2, "slot_mapping": 8, "cache": 4, "counts": 8}


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """Cases of indexer_k_quant_and_cache: three in five in contract (a quarter of them at overflow
    scale), one in four hostile, the others refused; about 24 draws each.

    Shrinks towards one token of 16 values with one plain scale, in a flat pool of one page of one
    slot.

    Arguments, and what it raises: see `registry.cases_for`.
    """
    check_limit(limit_bytes)
    return _cases(classes(hostile=hostile, refused=refused), limit_bytes)


@st.composite
def _cases(draw: st.DrawFn, classes: SearchStrategy[str], limit_bytes: int) -> Case:
    case_class = draw(classes)
    event(f"class: {case_class}")
    drawn_choices = draw(write_choices(case_class=case_class, limit_bytes=limit_bytes, inputs=1))
    choices, shape = drawn_choices.produced(PRODUCTION)
    layout, head, block = draw(LAYOUTS), draw(_HEADS), draw(_BLOCKS)
    size = quant_block(head, block)
    if shape is not None:
        head, size, layout = shape
    event(f"layout: {'tiled16' if layout else 'flat'}")
    scale_kind = draw(SCALE_KINDS)
    oddity, junk = drawn(draw, case_class, _ODDITIES, _JUNK)
    if choices.crossing is not None and choices.crossing.quantity == "slot index":
        head = TILE  # the least that a token takes
        size = quant_block(head, 0)
    groups = head // size
    tokens = min(choices.mapping.num_tokens, max(1, _MOST_GROUPS // groups))
    write = Write(
        choices.with_tokens(tokens),
        limit_bytes,
        entry_bytes=head + 4 * groups,
        element_bytes=_UNIT,
        input_bytes=head * _INPUT,
        input_element_bytes=_INPUT,
        page_multiple_tokens=TILE if layout == TILED16 else 1,
        instead=_INSTEAD,
    )
    placed = draw(placements(_ALIGNMENTS, "cache"))
    sizes = {
        **write.inputs(k=head * _INPUT),
        "head_dim": head,
        "quant_block": size,
        "page_layout": layout,
        "page_size_tokens": write.page_size_tokens,
        "num_pages": write.num_pages,
        # Some of its layouts have slots that are further apart, or pages that interleave.
        "page_stride_bytes": max(
            write.page_stride_bytes, write.page_size_tokens * (head + 4 * groups)
        ),
        "scale_kind": scale_kind,
    }
    told = surface(write.case(OPERATION, sizes, placed))
    return draw(lies(told)) if case_class == "refused" else oddly(told, oddity, junk)


def _page(sizes: Mapping[str, int]) -> int:
    """Bytes of a page: keys, then scales."""
    scales = 4 * (sizes["head_dim"] // sizes["quant_block"])
    return sizes["page_size_tokens"] * (sizes["head_dim"] + scales)


# ---- refusals ------------------------------------------------------------------------------------

#: Stride -> (size that must exceed 1 for it to count, alignment in bytes).
STRIDES: Mapping[str, tuple[str, int]] = {
    "k_row_stride_bytes": ("k_rows", _INPUT),
    "page_stride_bytes": ("num_pages", _UNIT),
}


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    sizes = case.sizes
    pool = reach(case, STRIDES)["page_stride_bytes"] + _page(sizes)
    return {
        **rows_bytes(case, k=sizes["head_dim"] * _INPUT),
        "slot_mapping": 8 * sizes["num_tokens"],
        "cache": pool if sizes["num_pages"] else 0,
        "counts": 16 if "counts" in case.values else 0,
    }


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    sizes, needed = case.sizes, required_bytes(case)
    index = index_arguments(case)
    arguments = {
        "k": Argument(int(Dtype.BF16), 2, needed["k"], _INPUT),
        "slot_mapping": index["slot_mapping"],
        "cache": Argument(int(Dtype.U8), 3, needed["cache"], _UNIT),
        "counts": index["counts"],
    }
    told: dict[str, list[dict[str, int]]] = {
        **wrong_pages(sizes["head_dim"]),
        "not_nested": [
            {"page_stride_bytes": stride, "num_pages": max(sizes["num_pages"], 2)}
            for stride in (_page(sizes) - _UNIT, 0)
        ],
    }
    own = {reason: [Lie(reason, one) for one in several] for reason, several in told.items()}
    return Surface(
        case=case,
        arguments=arguments,
        destinations=("cache",),
        strides=STRIDES,
        extents={
            "k_row_stride_bytes": ("num_tokens", "k_rows"),
            "page_stride_bytes": ("num_pages",),
        },
        counts=COUNTS,
        own={"scale_kind": scale_kind_lies(), **own, "input_rows": row_lies(case, "k_rows")},
    )


# ---- reported cases ------------------------------------------------------------------------------


def _reported(
    slots: tuple[int, ...],
    *,
    page_stride_bytes: int = 64 * 132,
    page_layout: int = 0,
    num_pages: int = 3,
    spare_rows: int = 0,
    scale_kind: int = 0,
    k: tuple[int, ...] = (),
) -> Case:
    """Keys of 128 values with one scale, pages of 64 tokens."""
    values = {"slot_mapping": Values.literal(*slots), "counts": Values.literal(0, 0)}
    if k:
        values["k"] = Values.literal(*k)
    return Case(
        OPERATION,
        {
            "num_tokens": len(slots),
            "k_rows": len(slots) + spare_rows,
            "k_row_stride_bytes": 256,
            "head_dim": 128,
            "quant_block": 128,
            "page_layout": page_layout,
            "page_size_tokens": 64,
            "num_pages": num_pages,
            "page_stride_bytes": page_stride_bytes,
            "scale_kind": scale_kind,
        },
        values,
    )


def _packed_pool(page_stride_bytes: int, page: int) -> Case:
    slots = (64 * page, 64 * page + 63, 1)
    return _reported(slots, page_stride_bytes=page_stride_bytes, num_pages=page + 1)


def _packed_good() -> Case:
    """Report 8: page 2,065 of a packed pool begins below 2^31."""
    return _packed_pool(1_039_680, 2065)


def _packed_bad() -> Case:
    """Report 8: page 2,066 is the first to begin past 2^31."""
    return _packed_pool(1_039_680, 2066)


def _padded_tail() -> Case:
    """Report 15: the tail of -1 is not page 0, offset -1: nothing lies below the cache."""
    return _reported((3, 4, 5, -1, -1, -1))


def _longer_inputs() -> Case:
    """Report 16: inputs of a padded graph have more rows than slot_mapping has tokens."""
    return _reported((9, 2, 77), spare_rows=13)


def _padded_pages() -> Case:
    """Report 35: pages of 8,448 bytes lie 8,640 apart."""
    return _reported((70, 3, 191), page_stride_bytes=8640)


def _padded_tiled_pages() -> Case:
    """Report 35: the same in tiles."""
    return _reported((70, 3, 191), page_stride_bytes=8640, page_layout=TILED16)


#: bf16 bits of 336, and a row of it.
_ROW_336 = (0x43A8, *(0x4120,) * 127)


def _amax_336() -> Case:
    """Report 26: an amax of 336 gives the scale 0.75."""
    return _reported((0, 65), k=_ROW_336)


def _amax_336_pow2() -> Case:
    """Report 26: under the other contract the scale is 1."""
    return _reported((0, 65), k=_ROW_336, scale_kind=1)


def _many(tokens: int) -> Case:
    """Report 30: a grid's y axis has room for 65,535 tokens. Padding, but for the first and the
    last one; input rows overlap, so that they take little memory."""
    case = _reported((3,))
    slots = Values("constant", {"value": -1}, {0: 3, tokens - 1: 70})
    case = case.with_sizes(num_tokens=tokens, k_rows=tokens, k_row_stride_bytes=_INPUT)
    return replace(case, values={**case.values, "slot_mapping": slots})


#: Cases of public reports by number and name.
REPORTED: Mapping[str, Callable[[], Case]] = {
    "8-packed-pool-good": _packed_good,
    "8-packed-pool-bad": _packed_bad,
    "15-padded-tail": _padded_tail,
    "16-longer-inputs": _longer_inputs,
    "26-amax-336": _amax_336,
    "26-amax-336-pow2": _amax_336_pow2,
    "30-65535-tokens": partial(_many, 65_535),
    "30-65536-tokens": partial(_many, 65_536),
    "35-padded-pages": _padded_pages,
    "35-padded-tiled-pages": _padded_tiled_pages,
}


# ---- corners -------------------------------------------------------------------------------------

#: Name -> whether a case is in that corner.
CORNERS: Corners = indexer_write_corners()
