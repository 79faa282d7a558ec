"""Cases of (e) concat_and_cache_ds_mla."""

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
from pagefuzz.strategies.latent_writes import LatentWrite
from pagefuzz.strategies.oddities import drawn, oddly
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.quantising import SCALE_KINDS, scale_kind_lies
from pagefuzz.strategies.refusals import Lie, Surface, lies, wrong_stride
from pagefuzz.strategies.strides import rounded_up
from pagefuzz.strategies.write_corners import ds_mla_corners
from pagefuzz.strategies.writes import Write, row_lies, write_choices

OPERATION = "concat_and_cache_ds_mla"

#: Legal but unusual -> weight.
ODDITIES = {
    "none": 82,
    "ignored strides": 13,  # strides of dimensions of size <= 1 hold nonsense
    "null where empty": 5,  # a null pointer for every buffer of no bytes
}

GROUP = 128
_INPUT, _UNIT = 2, 4
#: 2^31 slots of the smallest record are more memory than a case may have.
_INSTEAD = {"slot index": "page"}

#: Page size, latent and rope elements, as engines run it.
PRODUCTION = ((64, 512, 64), (64, 512, 64), (256, 512, 64))

_ODDITIES = weighted(ODDITIES)
_JUNK = st.sampled_from(range(17))
_GROUPS = skewed((40, (1,)), (25, (2, 3)), (35, (4, 4, 4, 5, 8)))
_ROPE = skewed((50, range(1, 7)), (50, (8, 16, 16, 24, 63, 64, 64, 64, 65, 128)))
_WRITE = LatentWrite(_INPUT, _UNIT)


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """Cases of concat_and_cache_ds_mla: three in five in contract (a quarter of them at overflow
    scale), one in four hostile, the others refused; about 23 draws each.

    Shrinks towards one token of 128 latent values and one rope value, plain scales, in a pool of
    one page of one slot.

    Arguments, and what it raises: see `registry.cases_for`.
    """
    check_limit(limit_bytes)
    return _cases(classes(hostile=hostile, refused=refused), limit_bytes)


@st.composite
def _cases(draw: st.DrawFn, classes: SearchStrategy[str], limit_bytes: int) -> Case:
    case_class = draw(classes)
    event(f"class: {case_class}")
    drawn_choices = draw(write_choices(case_class=case_class, limit_bytes=limit_bytes))
    choices, shape = drawn_choices.produced(PRODUCTION)
    latent, rope, scale_kind = GROUP * draw(_GROUPS), draw(_ROPE), draw(SCALE_KINDS)
    if shape is not None:
        latent, rope = shape
    oddity, junk = drawn(draw, case_class, _ODDITIES, _JUNK)
    write = Write(
        choices,
        limit_bytes,
        entry_bytes=rounded_up(_record(latent, rope), _UNIT),
        element_bytes=_UNIT,
        input_bytes=(latent + rope) * _INPUT,
        input_element_bytes=_INPUT,
        instead=_INSTEAD,
    )
    placed = draw(placements(_WRITE.alignments, "cache"))
    sizes = {**_WRITE.sizes(write, latent, rope), "scale_kind": scale_kind}
    told = surface(write.case(OPERATION, sizes, placed))
    return draw(lies(told)) if case_class == "refused" else oddly(told, oddity, junk)


def _record(latent: int, rope: int) -> int:
    """Bytes of a record: codes, scales, raw values."""
    return latent + latent // GROUP * 4 + rope * _INPUT


# ---- refusals ------------------------------------------------------------------------------------


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    record = _record(case.sizes["kv_c_elements"], case.sizes["k_pe_elements"])
    return _WRITE.required_bytes(case, record)


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    sizes = case.sizes
    less = rounded_up(_record(sizes["kv_c_elements"], sizes["k_pe_elements"]), _UNIT) - _UNIT
    own = {
        "scale_kind": scale_kind_lies(),
        "elements": [
            *(Lie("elements", {"kv_c_elements": value}) for value in (0, -GROUP, 2**31)),
            Lie("elements", {"kv_c_elements": sizes["kv_c_elements"] + GROUP // 2}),
            *(Lie("elements", {"k_pe_elements": value}) for value in (0, -1, 2**31)),
        ],
        "input_rows": row_lies(case, "kv_c_rows", "k_pe_rows"),
        "not_nested": [
            *wrong_stride(case, "not_nested", "slot_stride_bytes", "page_size_tokens", less, 0),
            *wrong_stride(case, "not_nested", "page_stride_bytes", "num_pages", less, 0),
        ],
    }
    return _WRITE.surface(case, required_bytes(case), int(Dtype.BF16), int(Dtype.U8), own)


# ---- reported cases ------------------------------------------------------------------------------


def _reported(
    slots: tuple[int, ...],
    *,
    latent: int = 512,
    rope: int = 64,
    spare_rows: int = 0,
    scale_kind: int = 0,
    page_size_tokens: int = 64,
    num_pages: int = 2,
    kv_c: tuple[int, ...] = (),
) -> Case:
    tokens, record = len(slots), rounded_up(_record(latent, rope), _UNIT)
    values = {"slot_mapping": Values.literal(*slots), "counts": Values.literal(0, 0)}
    if kv_c:
        values["kv_c"] = Values.literal(*kv_c)
    return Case(
        OPERATION,
        {
            "num_tokens": tokens,
            "kv_c_rows": tokens + spare_rows,
            "k_pe_rows": tokens + spare_rows,
            "kv_c_row_stride_bytes": latent * _INPUT,
            "k_pe_row_stride_bytes": rope * _INPUT,
            "kv_c_elements": latent,
            "k_pe_elements": rope,
            "page_size_tokens": page_size_tokens,
            "num_pages": num_pages,
            "page_stride_bytes": page_size_tokens * record,
            "slot_stride_bytes": record,
            "scale_kind": scale_kind,
        },
        values,
    )


def _slot_wraps(slot: int) -> Case:
    return _reported((slot, 5), page_size_tokens=64, num_pages=slot // 64 + 1)


def _slot_good() -> Case:
    """Report 13: slot times 656 bytes is below 2^31."""
    return _slot_wraps(2**31 // 656)


def _slot_bad() -> Case:
    """Report 13: the first slot whose record begins past 2^31."""
    return _slot_wraps(2**31 // 656 + 1)


def _padded_tail() -> Case:
    """Report 15: the tail of -1 is no slot of page 0, and nothing lies below the cache."""
    return _reported((3, 4, 5, -1, -1, -1))


def _longer_inputs() -> Case:
    """Report 16: inputs of a padded graph have more rows than slot_mapping has tokens."""
    return _reported((9, 2, 77), spare_rows=13)


def _row_stride() -> Case:
    """Report 18: k_pe is a slice of wider rows, kv_c is dense."""
    return _reported((9, 2, 77)).with_sizes(k_pe_row_stride_bytes=192)


#: bf16 bits of 336, and a row of it.
_ROW_336 = (0x43A8, *(0x4120,) * 127)


def _amax_336() -> Case:
    """Report 26: an amax of 336 gives the scale 0.75, exactly representable but no power of two."""
    return _reported((0, 65), kv_c=_ROW_336)


def _amax_336_pow2() -> Case:
    """Report 26: under the other contract the scale is 1."""
    return _reported((0, 65), kv_c=_ROW_336, scale_kind=1)


def _width_528() -> Case:
    """Report 27: 512 latent and 16 rope values, whose tile of 128 would span both parts."""
    return _reported((0, 65, 127), rope=16)


def _many(tokens: int) -> Case:
    """Report 30: a grid's y axis has room for 65,535 tokens. Padding, but for the first and the
    last one; input rows overlap, so that they take little memory."""
    case = _reported((3,), latent=GROUP, rope=2, page_size_tokens=4)
    slots = Values("constant", {"value": -1}, {0: 3, tokens - 1: 7})
    case = case.with_sizes(
        num_tokens=tokens,
        kv_c_rows=tokens,
        k_pe_rows=tokens,
        kv_c_row_stride_bytes=_INPUT,
        k_pe_row_stride_bytes=_INPUT,
    )
    return replace(case, values={**case.values, "slot_mapping": slots})


#: Cases of public reports by number and name.
REPORTED: Mapping[str, Callable[[], Case]] = {
    "13-slot-good": _slot_good,
    "13-slot-bad": _slot_bad,
    "15-padded-tail": _padded_tail,
    "16-longer-inputs": _longer_inputs,
    "18-row-stride": _row_stride,
    "26-amax-336": _amax_336,
    "26-amax-336-pow2": _amax_336_pow2,
    "27-width-528": _width_528,
    "30-65535-tokens": partial(_many, 65_535),
    "30-65536-tokens": partial(_many, 65_536),
}


# ---- corners -------------------------------------------------------------------------------------

#: Name -> whether a case is in that corner.
CORNERS: Corners = ds_mla_corners()
