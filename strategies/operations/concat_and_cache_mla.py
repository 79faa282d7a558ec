"""Cases of (e) concat_and_cache_mla."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.classes import check_limit, classes
from pagefuzz.strategies.corners import Corners
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.quantising import float_bits, input_dtypes, kv_dtypes, scales
from pagefuzz.strategies.refusals import Argument, Lie, Surface, lies
from pagefuzz.strategies.write_corners import mla_corners
from pagefuzz.strategies.writes import (
    Write,
    WriteChoices,
    index_arguments,
    reach,
    row_lies,
    write_choices,
)

OPERATION = "concat_and_cache_mla"

#: Legal but unusual -> weight.
ODDITIES = {
    "none": 70,
    "ignored strides": 10,  # strides of dimensions of size <= 1 hold nonsense
    "codes as bytes": 10,  # an fp8 cache of U8, as engines keep it
    "unread scale": 6,  # with auto a scale is given
    "null where empty": 4,  # a null pointer for every buffer of no bytes
}

_ODDITIES = weighted(ODDITIES)
_JUNK = st.sampled_from(range(17))
_STRIDE_JUNK = (-1, 0, 3, -(2**31), 2**63 - 1, -(2**63), 2**32)
_LATENT = skewed((40, range(1, 10)), (30, range(10, 70)), (30, (64, 128, 256, 512, 512, 513)))
_ROPE = skewed((50, range(1, 7)), (50, (8, 16, 16, 24, 63, 64, 64, 65)))
_KV_DTYPES, _INPUT_DTYPES, _SCALES = kv_dtypes(), input_dtypes(), scales()


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """Cases of concat_and_cache_mla: three in five in contract (a quarter of them at overflow
    scale), one in four hostile, the others refused; about 25 draws each.

    hostile, refused  whether cases of that class may be drawn; without both, all are in contract
    limit_bytes       bound on the memory of all buffers of a case together

    Shrinks towards one token of one latent and one rope element, F32 stored as it is, in a pool of
    one page of one slot. Raises `InvalidArgument` for `limit_bytes` below 64 MiB.
    """
    check_limit(limit_bytes)
    return _cases(classes(hostile=hostile, refused=refused), limit_bytes)


@st.composite
def _cases(draw: st.DrawFn, classes: SearchStrategy[str], limit_bytes: int) -> Case:
    case_class = draw(classes)
    event(f"class: {case_class}")
    choices = draw(write_choices(case_class=case_class, limit_bytes=limit_bytes))
    kv_dtype, input_dtype = draw(_KV_DTYPES), Dtype(draw(_INPUT_DTYPES))
    latent, rope = draw(_LATENT), draw(_ROPE)
    scale = draw(_SCALES) if kv_dtype else None
    oddity = draw(_ODDITIES) if case_class != "refused" else "none"
    junk = draw(_JUNK) if oddity != "none" else 0
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
    elements = {"kv_c_elements": latent, "k_pe_elements": rope}
    kinds = {"input_dtype": int(input_dtype), "kv_dtype": kv_dtype}
    placed = draw(placements(_alignments(unit, stored), "cache"))
    case = _case(write, choices, {**elements, **kinds}, scale, placed)
    if oddity != "none":
        event(f"oddity: {oddity}")
    if oddity == "ignored strides":
        ignored = [name for name, (size, _) in _strides(case).items() if case.sizes[size] <= 1]
        case = case.with_sizes(
            **{n: _STRIDE_JUNK[(junk + at) % len(_STRIDE_JUNK)] for at, n in enumerate(ignored)}
        )
    elif oddity == "codes as bytes" and kv_dtype:
        case = replace(case, overrides={"cache.dtype": int(Dtype.U8)})
    elif oddity == "null where empty":
        empty = [name for name, needed in required_bytes(case).items() if needed == 0]
        kept = {name: place for name, place in case.placements.items() if name not in empty}
        case = replace(case, placements=kept, overrides={f"{name}.data": 0 for name in empty})
    return draw(lies(surface(case))) if case_class == "refused" else case


def _alignments(unit: int, stored: int) -> dict[str, int]:
    inputs = {"kv_c": unit, "k_pe": unit, "slot_mapping": 8, "scale": 4}
    return {**inputs, "cache": stored, "counts": 8}


def _case(
    write: Write,
    choices: WriteChoices,
    sizes: Mapping[str, int],
    scale: int | None,
    placed: Mapping[str, Placement],
) -> Case:
    values = {"slot_mapping": Values.literal(*write.slots)}
    if scale is not None:
        values["scale"] = Values.literal(scale)
    if choices.counters is not None:
        values["counts"] = Values.literal(*choices.counters)
    present = ("kv_c", "k_pe", "cache", *values)
    rows = write.input_rows
    unit = Dtype(sizes["input_dtype"]).size_bytes
    return Case(
        operation=OPERATION,
        sizes={
            "num_tokens": write.num_tokens,
            "kv_c_rows": rows,
            "k_pe_rows": max(write.num_tokens, rows - rows % 2),
            "kv_c_row_stride_bytes": write.row_stride_bytes(sizes["kv_c_elements"] * unit),
            "k_pe_row_stride_bytes": write.row_stride_bytes(sizes["k_pe_elements"] * unit),
            "kv_c_elements": sizes["kv_c_elements"],
            "k_pe_elements": sizes["k_pe_elements"],
            "page_size_tokens": write.page_size_tokens,
            "num_pages": write.num_pages,
            "page_stride_bytes": write.page_stride_bytes,
            "slot_stride_bytes": write.slot_stride_bytes,
            "input_dtype": sizes["input_dtype"],
            "kv_dtype": sizes["kv_dtype"],
        },
        values=values,
        placements={name: place for name, place in placed.items() if name in present},
        seed=choices.seed,
    )


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
#: tell. 24: ties, and codes above 256. 25: a scale that is not 1, and values above 448 times it.
#: 30: more tokens than a grid's y axis has room for.
REPORTED: Mapping[str, Callable[[], Case]] = {
    "13-slot-offset-good": lambda: _far_slot(3_728_270),
    "13-slot-offset-bad": lambda: _far_slot(3_728_271),
    "15-padded-tail": lambda: _reported((5, 0, -1, -1)),
    "16-longer-inputs": lambda: _reported((5, 0, 10), spare_rows=5),
    "18-page-stride": lambda: _reported((5, 0, 10), page_stride_bytes=768),
    "18-slot-stride": lambda: _reported((5, 0, 10), slot_stride_bytes=192),
    "24-every-magnitude": lambda: _reported((5, 0, 10, 3, 7), latent=128, rope=32, scale=1.0),
    "25-scale-one-half": lambda: _reported((5, 0, 10, 3, 7), scale=0.5),
    "30-65535-tokens": lambda: _many(65_535),
    "30-65536-tokens": lambda: _many(65_536),
}


# ---- refusals ------------------------------------------------------------------------------------


def _units(case: Case) -> tuple[int, int]:
    """Bytes of an input element and of a stored one."""
    unit = Dtype(case.sizes["input_dtype"]).size_bytes
    return unit, 1 if case.sizes["kv_dtype"] else unit


def _strides(case: Case) -> dict[str, tuple[str, int]]:
    """Stride -> (size that must exceed 1 for it to count, alignment in bytes)."""
    unit, stored = _units(case)
    return {
        "kv_c_row_stride_bytes": ("kv_c_rows", unit),
        "k_pe_row_stride_bytes": ("k_pe_rows", unit),
        "page_stride_bytes": ("num_pages", stored),
        "slot_stride_bytes": ("page_size_tokens", stored),
    }


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    sizes, (unit, stored) = case.sizes, _units(case)
    reached, tokens = reach(case, _strides(case)), sizes["num_tokens"]
    needed = {}
    for name in ("kv_c", "k_pe"):
        stride = sizes[f"{name}_row_stride_bytes"] if sizes[f"{name}_rows"] > 1 else 0
        row = sizes[f"{name}_elements"] * unit
        needed[name] = (tokens - 1) * stride + row if tokens else 0
    entry = (sizes["kv_c_elements"] + sizes["k_pe_elements"]) * stored
    pool = reached["page_stride_bytes"] + reached["slot_stride_bytes"] + entry
    return {
        **needed,
        "slot_mapping": 8 * tokens,
        "scale": 4 if "scale" in case.values else 0,
        "cache": pool if sizes["num_pages"] else 0,
        "counts": 16 if "counts" in case.values else 0,
    }


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    sizes, needed = case.sizes, required_bytes(case)
    unit, stored = _units(case)
    kv_dtype, input_dtype = sizes["kv_dtype"], sizes["input_dtype"]
    cache_dtype = (input_dtype, int(Dtype.E4M3), int(Dtype.E5M2))[kv_dtype]
    index = index_arguments(case)
    has_scale = "scale" in case.values
    arguments = {
        "kv_c": Argument(input_dtype, 2, needed["kv_c"], unit),
        "k_pe": Argument(input_dtype, 2, needed["k_pe"], unit),
        "slot_mapping": index["slot_mapping"],
        "scale": Argument(int(Dtype.F32), 1, needed["scale"], 4, is_absent=not has_scale),
        "cache": Argument(cache_dtype, 3, needed["cache"], stored),
        "counts": index["counts"],
    }
    entry = (sizes["kv_c_elements"] + sizes["k_pe_elements"]) * stored
    null_scale = {"scale.data": 0, "scale.extent_bytes": 0}
    own = {
        "kv_dtype": [Lie("kv_dtype", {"kv_dtype": value}) for value in (3, -1, 2**32 + 1, 10)],
        "input_dtype": [
            Lie("input_dtype", {"input_dtype": value}) for value in (0, int(Dtype.U8), 10, -1)
        ],
        "elements": [
            Lie("elements", {name: value})
            for name in ("kv_c_elements", "k_pe_elements")
            for value in (0, -1, 2**31)
        ],
        "input_rows": row_lies(case, "kv_c_rows", "k_pe_rows"),
        "null_scale": [Lie("null_scale", {**null_scale, "kv_dtype": kv_dtype or 1})],
        "not_nested": [
            Lie("not_nested", {"slot_stride_bytes": stride, "page_size_tokens": max(size, 2)})
            for size in (sizes["page_size_tokens"],)
            for stride in (entry - stored, 0)
        ]
        + [Lie("not_nested", {"page_stride_bytes": 0, "num_pages": max(sizes["num_pages"], 2)})],
    }
    return Surface(
        case=case,
        arguments=arguments,
        destinations=("cache",),
        strides=_strides(case),
        extents={
            "kv_c_row_stride_bytes": ("num_tokens", "kv_c_rows"),
            "k_pe_row_stride_bytes": ("num_tokens", "k_pe_rows"),
            "page_stride_bytes": ("num_pages",),
            "slot_stride_bytes": ("page_size_tokens", "num_pages"),
        },
        counts=("num_tokens", "num_pages"),
        own=own,
    )


# ---- corners -------------------------------------------------------------------------------------

#: Name -> whether a case is in that corner.
CORNERS: Corners = mla_corners()
