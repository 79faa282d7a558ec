"""Element types and scales of writers that store bits or fp8 codes."""

from __future__ import annotations

import struct

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.refusals import Lie, wrong_size

#: kv_dtype -> weight: auto, fp8_e4m3, fp8_e5m2.
KV_DTYPES = {0: 40, 1: 38, 2: 22}
INPUT_DTYPES = {int(Dtype.F32): 40, int(Dtype.F16): 26, int(Dtype.BF16): 34}

#: Scales -> weight: powers of two, under which values lie exactly on codes and ties; others; and
#: what no model has, the formula as it stands.
SCALES = {
    1.0: 34,
    0.5: 10,
    2.0: 8,
    2.0**-9: 6,
    3.0: 8,
    0.1: 8,
    0.0123: 6,
    7e-4: 4,
    -2.0: 3,
    1e-40: 2,  # subnormal
    2.0**-126: 1,
    3e38: 2,
    0.0: 3,
    float("inf"): 2,
    float("-inf"): 1,
}
#: scale_kind of a scale for each group: plain, a power of two.
SCALE_KINDS = weighted({0: 50, 1: 49})
_NAN_BITS, _NEGATIVE_ZERO_BITS = 0x7FC00000, -(2**31)


def float_bits(value: float) -> int:
    """The bits of a float32 as an int32, as `Values` hold them."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def kv_dtypes() -> SearchStrategy[int]:
    """1 draw. Shrinks towards auto."""
    return _KV_DTYPES


def input_dtypes() -> SearchStrategy[int]:
    """1 draw. Shrinks towards F32."""
    return _INPUT_DTYPES


def scales() -> SearchStrategy[int]:
    """Bits of a scale; 1 draw. Shrinks towards 1.0."""
    return _SCALES


_KV_DTYPES, _INPUT_DTYPES = weighted(KV_DTYPES), weighted(INPUT_DTYPES)
_SCALES = weighted(
    {
        **{float_bits(value): weight for value, weight in SCALES.items()},
        _NAN_BITS: 2,
        _NEGATIVE_ZERO_BITS: 1,
    }
)


@st.composite
def scale_vectors(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """Bits of `count` scales, of which at most four differ."""
    few = [draw(_SCALES) for _ in range(min(count, 3))]
    return tuple(few[(at * 7 // 2) % len(few)] for at in range(count))


# ---- cases ---------------------------------------------------------------------------------------


def units(case: Case) -> tuple[int, int]:
    """Bytes of an input element and of a stored one."""
    unit = Dtype(case.sizes["input_dtype"]).size_bytes
    return unit, 1 if case.sizes["kv_dtype"] else unit


def cache_dtype(case: Case) -> int:
    """What a sound case stores."""
    kinds = (case.sizes["input_dtype"], int(Dtype.E4M3), int(Dtype.E5M2))
    return kinds[case.sizes["kv_dtype"]]


def type_lies() -> dict[str, list[Lie]]:
    """Element types that there are not."""
    return {
        "kv_dtype": wrong_size("kv_dtype", 3, -1, 2**32 + 1, 10),
        "input_dtype": wrong_size("input_dtype", 0, int(Dtype.U8), 10, -1),
    }


def null_scale_lies(case: Case, *names: str) -> list[Lie]:
    """Codes, and no scale."""
    kind = case.sizes["kv_dtype"] or 1
    return [
        Lie("null_scale", {f"{name}.data": 0, f"{name}.extent_bytes": 0, "kv_dtype": kind})
        for name in names
    ]


def scale_kind_lies() -> list[Lie]:
    return wrong_size("scale_kind", 2, -1, 2**32)
