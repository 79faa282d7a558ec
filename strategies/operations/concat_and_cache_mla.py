"""Cases of (e) concat_and_cache_mla."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

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
from pagefuzz.strategies.quantising import (
    cache_dtype,
    float_bits,
    input_dtypes,
    kv_dtypes,
    null_scale_lies,
    scales,
    type_lies,
    units,
)
from pagefuzz.strategies.refusals import Lie, Surface, lies, wrong_stride
from pagefuzz.strategies.write_corners import mla_corners
from pagefuzz.strategies.writes import Write, row_lies, write_choices

OPERATION = "concat_and_cache_mla"

#: Legal but unusual -> weight.
ODDITIES = {
    "none": 70,
    "ignored strides": 10,  # strides of dimensions of size <= 1 hold nonsense
    "codes as bytes": 10,  # an fp8 cache of U8, as engines keep it
    "unread scale": 6,  # with auto a scale is given
    "null where empty": 4,  # a null pointer for every buffer of no bytes
}

#: Page size, latent and rope elements, types of inputs and cache, as engines run it.
PRODUCTION = (
    (64, 512, 64, Dtype.BF16, 0),
    (64, 512, 64, Dtype.BF16, 1),
    (64, 512, 64, Dtype.F16, 0),
    (256, 512, 64, Dtype.BF16, 0),
)

_ODDITIES = weighted(ODDITIES)
_JUNK = st.sampled_from(range(17))
_LATENT = skewed((40, range(1, 10)), (30, range(10, 70)), (30, (64, 128, 256, 512, 512, 513)))
_ROPE = skewed((50, range(1, 7)), (50, (8, 16, 16, 24, 63, 64, 64, 65)))
_KV_DTYPES, _INPUT_DTYPES, _SCALES = kv_dtypes(), input_dtypes(), scales()


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """Cases of concat_and_cache_mla: three in five in contract (a quarter of them at overflow
    scale), one in four hostile, the others refused; about 25 draws each.

    Shrinks towards one token of one latent and one rope element, F32 stored as it is, in a pool of
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
    kv_dtype, input_type = draw(_KV_DTYPES), draw(_INPUT_DTYPES)
    latent, rope = draw(_LATENT), draw(_ROPE)
    if shape is not None:
        latent, rope, input_type, kv_dtype = shape
    input_dtype = Dtype(input_type)
    scale = draw(_SCALES) if kv_dtype else None
    oddity, junk = drawn(draw, case_class, _ODDITIES, _JUNK)
    unit = input_dtype.size_bytes
    if choices.crossing is not None and choices.crossing.quantity == "slot index":
        latent, rope = 1, 1
    stored = 1 if kv_dtype else unit
    write = Write(
        choices,
        limit_bytes,
        entry_bytes=(latent + rope) * stored,
        element_bytes=stored,
        input_bytes=(latent + rope) * unit,
        input_element_bytes=unit,
    )
    if oddity == "unread scale" and scale is None:
        scale = float_bits(0.0)
    of = LatentWrite(unit, stored, has_scale=True)
    kinds = {"input_dtype": int(input_dtype), "kv_dtype": kv_dtype}
    placed = draw(placements(of.alignments, "cache"))
    given = {} if scale is None else {"scale": Values.literal(scale)}
    case = write.case(OPERATION, {**of.sizes(write, latent, rope), **kinds}, placed, given)
    if case_class == "refused":
        return draw(lies(surface(case)))
    if oddity == "codes as bytes" and kv_dtype:
        case = replace(case, overrides={"cache.dtype": int(Dtype.U8)})
    return oddly(surface(case), oddity, junk)


# ---- reports -------------------------------------------------------------------------------------


def _reported(
    slots: tuple[int, ...],
    *,
    latent: int = 64,
    rope: int = 16,
    scale: float | None = None,
    num_pages: int = 4,
    spare_rows: int = 0,
    **sizes: int,
) -> Case:
    """Pages of 4 slots of bf16, or of E4M3 codes with a `scale`; dense where `sizes` says nothing
    else."""
    entry = (latent + rope) * (2 if scale is None else 1)
    rows = len(slots) + spare_rows
    slot_stride = sizes.get("slot_stride_bytes", entry)
    scales = {} if scale is None else {"scale": Values.literal(float_bits(scale))}
    return Case(
        operation=OPERATION,
        sizes={
            "num_tokens": len(slots),
            "kv_c_rows": rows,
            "k_pe_rows": rows,
            "kv_c_row_stride_bytes": 2 * latent,
            "k_pe_row_stride_bytes": 2 * rope,
            "kv_c_elements": latent,
            "k_pe_elements": rope,
            "page_size_tokens": 4,
            "num_pages": num_pages,
            "page_stride_bytes": sizes.get("page_size_tokens", 4) * slot_stride,
            "slot_stride_bytes": slot_stride,
            "input_dtype": int(Dtype.BF16),
            "kv_dtype": 0 if scale is None else 1,
            **sizes,
        },
        values={
            "slot_mapping": Values.literal(*slots),
            **scales,
            "counts": Values.literal(0, 0),
        },
    )


def _far_slot(slot: int) -> Case:
    """Entries of 576 codes in pages of 16."""
    return _reported(
        (0, slot), latent=512, rope=64, scale=1.0, num_pages=slot // 16 + 1, page_size_tokens=16
    )


def _many(tokens: int) -> Case:
    """Padding, but for the first and the last token."""
    case = _reported((3,), latent=4, rope=2)
    case = case.with_sizes(num_tokens=tokens, kv_c_rows=tokens, k_pe_rows=tokens)
    slots = Values("constant", {"value": -1}, {0: 3, tokens - 1: 7})
    return replace(case, values={**case.values, "slot_mapping": slots})


#: Inputs of public reports, by the number of the report. 13: the byte offset of the slot passes
#: 2^31. 15: a padded tail. 16: inputs longer than slot_mapping. 18: one stride that sizes do not
#: tell; k_pe may be a slice beside a dense kv_c. 24: ties, and codes above 256. 25: a
#: scale that is not 1, and values above 448 times it. 30: more tokens than a grid's y axis has room
#: for.
REPORTED: Mapping[str, Callable[[], Case]] = {
    "13-slot-offset-good": lambda: _far_slot(3_728_270),
    "13-slot-offset-bad": lambda: _far_slot(3_728_271),
    "15-padded-tail": lambda: _reported((5, 0, -1, -1)),
    "16-longer-inputs": lambda: _reported((5, 0, 10), spare_rows=5),
    "18-page-stride": lambda: _reported((5, 0, 10), page_stride_bytes=768),
    "18-row-stride": lambda: _reported((5, 0, 10), k_pe_row_stride_bytes=160),
    "18-slot-stride": lambda: _reported((5, 0, 10), slot_stride_bytes=192),
    "24-every-magnitude": lambda: _reported((5, 0, 10, 3, 7), latent=128, rope=32, scale=1.0),
    "25-scale-one-half": lambda: _reported((5, 0, 10, 3, 7), scale=0.5),
    "30-65535-tokens": lambda: _many(65_535),
    "30-65536-tokens": lambda: _many(65_536),
}


# ---- refusals ------------------------------------------------------------------------------------


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    of = LatentWrite(*units(case), has_scale=True)
    return of.required_bytes(case, _entry_bytes(case))


def _entry_bytes(case: Case) -> int:
    return (case.sizes["kv_c_elements"] + case.sizes["k_pe_elements"]) * units(case)[1]


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    sizes, (unit, stored) = case.sizes, units(case)
    less = _entry_bytes(case) - stored
    own = {
        **type_lies(),
        "elements": [
            Lie("elements", {name: value})
            for name in ("kv_c_elements", "k_pe_elements")
            for value in (0, -1, 2**31)
        ],
        "input_rows": row_lies(case, "kv_c_rows", "k_pe_rows"),
        "null_scale": null_scale_lies(case, "scale"),
        "not_nested": [
            *wrong_stride(case, "not_nested", "slot_stride_bytes", "page_size_tokens", less, 0),
            *wrong_stride(case, "not_nested", "page_stride_bytes", "num_pages", 0),
        ],
    }
    of = LatentWrite(unit, stored, has_scale=True)
    return of.surface(case, required_bytes(case), sizes["input_dtype"], cache_dtype(case), own)


# ---- corners -------------------------------------------------------------------------------------

#: Name -> whether a case is in that corner.
CORNERS: Corners = mla_corners()
