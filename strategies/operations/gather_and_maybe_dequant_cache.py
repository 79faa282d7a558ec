"""Cases of (b) gather_and_maybe_dequant_cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.entry_references import EntryReferences
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Dtype, Plan
from pagefuzz.oracles.registry import operation
from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.classes import check_limit, classes
from pagefuzz.strategies.corners import GATHER_CORNERS, Corners
from pagefuzz.strategies.fixed_gathers import (
    dequantised,
    hostile_productions,
    long_batches,
    more_requests,
)
from pagefuzz.strategies.gather_cases import Entries
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES, Form, Gather, gather_choices
from pagefuzz.strategies.oddities import begin_oddly, drawn, oddly
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.productions import Production, productions
from pagefuzz.strategies.refusals import Lie, Surface, lies, wrong_size
from pagefuzz.strategies.strides import entry_sizes
from pagefuzz.strategies.told import Told, corners_of, refused_for

OPERATION = "gather_and_maybe_dequant_cache"

#: What the cache holds -> weight; the value of kv_dtype is the position.
KV_DTYPES = {"auto": 30, "fp8_e4m3": 40, "fp8_e5m2": 30}

#: Legal but unusual -> weight.
ODDITIES = {
    "none": 57,
    "ignored strides": 13,
    "far starts": 8,
    "unread seq_starts": 7,
    "bytes": 6,  # fp8 codes in a cache of U8
    "null where empty": 6,
    "absent arguments": 3,
}


def _bits(scale: float) -> int:
    return int(np.array([scale], np.float32).view(np.int32)[0])


#: fp32 bits of scales, as int32. The first is 1.
SCALES = (
    *(_bits(x) for x in (1.0, 0.5, 0.3, 448.0, 1 / 448, 0.0, -0.0, -2.5, 1e-6, 1e-30, 3e38)),
    *(_bits(x) for x in (float("inf"), float("-inf"), float("nan"))),
    *(1, 0x00300000, 0x00800000, 0x7F800001, 0x7F7FFFFF, 0x33800000),
)

_ODDITIES, _KINDS = weighted(ODDITIES), weighted(KV_DTYPES)
_JUNK = st.sampled_from(range(16))
_RESULTS = st.sampled_from((int(Dtype.BF16), int(Dtype.F16), int(Dtype.F32)))
_SCALES = st.sampled_from(SCALES) | st.integers(-(2**31), 2**31 - 1)
_ENTRY_SIZES = entry_sizes()
_CODES = (None, Dtype.E4M3, Dtype.E5M2)

#: Latent entries: (kv_dtype, dst_dtype, values of an entry) -> weight; in pages of 64 tokens.
PRODUCTIONS = {
    (1, int(Dtype.BF16), 576): 4,
    (0, int(Dtype.BF16), 576): 2,
    (1, int(Dtype.F16), 576): 2,
    (1, int(Dtype.BF16), 512): 1,
    (1, int(Dtype.BF16), 320): 1,
}
_PRODUCTION_PAGE = 64
_PRODUCTIONS = productions(PRODUCTIONS)


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """Cases of gather_and_maybe_dequant_cache, in the shares of `classes.CLASSES` and `KV_DTYPES`.

    Shrinks as the cases of cp_gather_cache do, towards a copy of bf16; with fp8 towards scale 1.

    Arguments, and what it raises: see `registry.cases_for`.
    """
    check_limit(limit_bytes)
    return _cases(classes(hostile=hostile, refused=refused), limit_bytes)


@dataclass(frozen=True)
class _Types:
    """What is gathered.

    kind, result  kv_dtype and dst_dtype
    follows_src   which side the drawn sizes are those of; the other side's follow from it
    """

    kind: int
    result: int
    follows_src: bool

    @property
    def dst_element(self) -> int:
        return Dtype(self.result).size_bytes

    @property
    def src_element(self) -> int:
        return 1 if self.kind else self.dst_element

    @property
    def unit(self) -> int:
        return self.src_element if self.follows_src else self.dst_element

    @property
    def row_factor(self) -> int:
        """By what the drawn row sizes are multiplied."""
        return self.dst_element // self.unit


@st.composite
def _cases(draw: st.DrawFn, classes: SearchStrategy[str], limit_bytes: int) -> Case:
    case_class = draw(classes)
    event(f"class: {case_class}")
    kind = list(KV_DTYPES).index(draw(_KINDS))
    result = draw(_RESULTS)
    production = draw(_PRODUCTIONS)
    if production is not None:
        kind, result, _ = production
    types = _Types(kind, result, bool(kind and draw(st.booleans())))
    event(f"types: {list(KV_DTYPES)[kind]} to {Dtype(result).name}")
    scale = draw(_SCALES) if kind or draw(st.booleans()) else None
    room = limit_bytes // types.row_factor
    choices = draw(
        gather_choices(st.just(types.unit), _ENTRY_SIZES, case_class=case_class, limit_bytes=room)
    )
    if production is not None:
        choices = Production(_PRODUCTION_PAGE, production[2] * types.unit).of(choices)
    form = Form(row_factor=types.row_factor)
    gather = Gather(choices, room, form)
    if gather.element_bytes != types.unit:  # too little memory for so many rows of such elements
        gather = Gather(replace(choices, crossing=None), room, form)
    oddity, junk = drawn(draw, case_class, _ODDITIES, _JUNK)
    entries = Entries(types.src_element, types.dst_element, has_scale=True)
    placed = draw(placements(entries.alignments, "dst"))
    begin_oddly(gather, oddity, junk)
    case = entries.case(
        OPERATION,
        gather,
        {
            "entry_elements": gather.entry_bytes // types.unit,
            "kv_dtype": types.kind,
            "dst_dtype": types.result,
        },
        placed,
        row_factor=types.row_factor,
        scale={} if scale is None else {"scale": Values.literal(scale)},
    )
    if case_class == "refused":
        return draw(lies(surface(case)))
    if oddity == "bytes" and kind:
        case = replace(case, overrides={"src.dtype": int(Dtype.U8)})
    return oddly(surface(case), oddity, junk)


# ---- fixed cases ---------------------------------------------------------------------------------

_ONE_CODE = dequantised(1, Dtype.BF16, 1)
REPORTED: Mapping[str, Callable[[], Case]] = {
    **long_batches(OPERATION, _ONE_CODE),
    **hostile_productions(
        OPERATION,
        (
            (
                f"{elements}-{list(KV_DTYPES)[kind]}-to-{Dtype(result).name.lower()}",
                _PRODUCTION_PAGE,
                dequantised(kind, result, elements),
            )
            for kind, result, elements in PRODUCTIONS
        ),
    ),
}
ON_GPU: Mapping[str, Callable[[], Case]] = more_requests(OPERATION, _ONE_CODE)


# ---- refusals ------------------------------------------------------------------------------------


def _entries(case: Case) -> Entries:
    result = Dtype(case.sizes["dst_dtype"]).size_bytes
    return Entries(1 if case.sizes["kv_dtype"] else result, result, has_scale=True)


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    elements, entries = case.sizes["entry_elements"], _entries(case)
    return entries.required_bytes(case, elements * entries.src_unit, elements * entries.dst_unit)


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    entries, kind, result = _entries(case), case.sizes["kv_dtype"], case.sizes["dst_dtype"]
    own = {
        "entry_elements": wrong_size("entry_elements", 0, -1, 2**31, 2**63 - 1),
        "kv_dtype": wrong_size("kv_dtype", 3, -1, 2**32),
        "dst_dtype": wrong_size(
            "dst_dtype", int(Dtype.U16), int(Dtype.E4M3), 0, -1, 2**32 + int(Dtype.BF16)
        ),
        "null_scale": [
            Lie("null_scale", {"scale.data": 0, "scale.extent_bytes": 0}),
        ]
        if kind
        else [],
    }
    return entries.surface(
        case,
        required_bytes(case),
        {"src": (_CODES[kind] or result, 3), "dst": (result, 2)},
        case.sizes["entry_elements"] * entries.dst_unit,
        own,
    )


# ---- corners -------------------------------------------------------------------------------------

_Corner = Callable[[Plan, Expectation], bool]

_SHARED = ("batch", "rows", "pages", "table", "seq_starts", "hostile", "refused", "class", "counts")
_NOT_SHARED = ("refused: element_bytes", "refused: entry_bytes")


def _writes(expectation: Expectation) -> bool:
    return any(expected.offsets.size for expected in expectation.expected.values())


def _gathers(predicate: Callable[[Mapping[str, int]], bool]) -> _Corner:
    """Some row is written, and the sizes are as said."""
    return lambda plan, expectation: _writes(expectation) and predicate(plan.arguments)


def _types(kind: int, result: Dtype) -> _Corner:
    return _gathers(lambda a: a["kv_dtype"] == kind and a["dst_dtype"] == result)


def _scaled(predicate: Callable[[float], bool]) -> _Corner:
    """Codes are multiplied by such a scale."""

    def holds(plan: Plan, expectation: Expectation) -> bool:
        if not (_writes(expectation) and plan.arguments["kv_dtype"]):
            return False
        return predicate(float(plan.buffers["scale"].image.values.view(np.float32)[0, 0]))

    return holds


def _elements_per_16_bytes(plan: Plan, expectation: Expectation) -> bool:
    """Rows of whole 16-byte stores, from codes."""
    a = plan.arguments
    row_bytes = a["entry_elements"] * _entries(plan.case).dst_unit
    return _writes(expectation) and a["kv_dtype"] > 0 and row_bytes % 16 == 0


def _nan_expected(plan: Plan, expectation: Expectation) -> bool:
    return any(expected.free_nans is not None for expected in expectation.expected.values())


def _all_codes(kind: int) -> _Corner:
    """Every one of the 256 codes is read in one launch, by its first rows."""

    def holds(plan: Plan, expectation: Expectation) -> bool:
        if plan.arguments["kv_dtype"] != kind or not _writes(expectation):
            return False
        found = operation(OPERATION)
        assert isinstance(found, EntryReferences)
        rows = found.row_map(plan)
        pages = found.pages(plan, rows)
        page_stride, slot_stride, _ = found.effective_strides(plan.arguments)
        at = pages.page_id[rows.page] * page_stride + rows.slot * slot_stride
        entries = found.entries_at(plan, np.unique(at[pages.valid[rows.page]])[:64])
        return np.unique(entries).size == 256

    return holds


def _past(buffer: str, boundary: int) -> _Corner:
    """The launch touches bytes of the buffer at and past a boundary."""

    def holds(plan: Plan, expectation: Expectation) -> bool:
        footprint = expectation.footprint(buffer)
        touched = footprint.may_read if buffer == "src" else footprint.writable
        return bool(touched) and int(touched.end[-1]) > boundary

    return holds


_LEAST_NORMAL = float(np.finfo(np.float32).tiny)

#: Name -> whether a case is in that corner.
CORNERS: Corners = MappingProxyType(
    {
        **{
            name: holds
            for name, holds in GATHER_CORNERS.items()
            if name.split(":")[0] in _SHARED and name not in _NOT_SHARED
        },
        **{
            f"types: {name} to {result.name}": _types(kind, result)
            for kind, name in enumerate(KV_DTYPES)
            for result in (Dtype.F32, Dtype.F16, Dtype.BF16)
        },
        "scale: 1": _scaled(lambda scale: scale == 1),
        "scale: zero": _scaled(lambda scale: scale == 0),
        "scale: subnormal": _scaled(lambda scale: 0 < abs(scale) < _LEAST_NORMAL),
        "scale: negative": _scaled(lambda scale: scale < 0),
        "scale: infinite": _scaled(lambda scale: abs(scale) == float("inf")),
        "scale: NaN": _scaled(lambda scale: scale != scale),
        "scale: huge": _scaled(lambda scale: 1e30 < abs(scale) < float("inf")),
        "scale: given to a copy": lambda plan, expectation: (
            _writes(expectation) and plan.arguments["kv_dtype"] == 0 and "scale" in plan.case.values
        ),
        "scale: absent": _gathers(lambda a: a["kv_dtype"] == 0),
        **{
            f"codes: all 256 of {name}": _all_codes(kind)
            for kind, name in enumerate(KV_DTYPES)
            if kind
        },
        "rows: a NaN": _nan_expected,
        "entry: whole 16-byte stores": _elements_per_16_bytes,
        "entry: one element": _gathers(lambda a: a["entry_elements"] == 1),
        "entry: odd": _gathers(lambda a: a["entry_elements"] % 2 == 1),
        "entry: 512 or more elements": _gathers(lambda a: a["entry_elements"] >= 512),
        "src: bytes": lambda plan, expectation: (
            _writes(expectation) and plan.buffers["src"].dtype == Dtype.U8
        ),
        **{
            f"boundary: {buffer} past 2^{power}": _past(buffer, 2**power)
            for buffer in ("src", "dst")
            for power in (31, 32)
        },
        **corners_of(Told, refused_for("entry_elements", "kv_dtype", "dst_dtype", "null_scale")),
    }
)
