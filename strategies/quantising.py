"""Element types and scales of writers that store bits or fp8 codes."""

from __future__ import annotations

import struct

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.choices import weighted

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
