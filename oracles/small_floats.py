"""fp8, fp16 and bf16 by their exponents and quanta: the round trips' own arithmetic.

The references of the operations look numbers up in tables (`oracles/fp8.py`). Here a number is
rounded to a multiple of its quantum, so that a mistake in one of the two is none in the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.layout import Bytes, Dtype

Float32s = npt.NDArray[np.float32]


class _Format(NamedTuple):
    """mantissa bits, exponent of the least normal number, largest finite number."""

    mantissa: int
    least: int
    largest: float


_FP8 = {Dtype.E4M3: _Format(3, -6, 448.0), Dtype.E5M2: _Format(2, -14, 57344.0)}
_NAN_CODE, _SIGN = 0x7F, 0x80


def codes_of(values: Float32s, dtype: Dtype) -> Bytes:
    """The fp8 code of every number: nearest even, saturating, a NaN as 0x7F."""
    form = _FP8[dtype]
    with np.errstate(all="ignore"):
        magnitude = np.abs(values.astype(np.float64))
        quantum = _quantum(magnitude, form)
        rounded = np.fmin(np.rint(magnitude / quantum) * quantum, form.largest)
        quantum = _quantum(rounded, form)  # rounding may have reached the next power of two
        steps = np.log2(quantum).astype(np.int64) - (form.least - form.mantissa)
        code = (rounded / quantum).astype(np.int64) + (steps << form.mantissa)
    code[np.isnan(values)] = _NAN_CODE
    out: Bytes = (code | np.where(np.signbit(values), _SIGN, 0)).astype(np.uint8)
    return out


def _quantum(magnitude: npt.NDArray[np.float64], form: _Format) -> npt.NDArray[np.float64]:
    """What neighbouring numbers of the format differ by."""
    finite = np.where(np.isfinite(magnitude), magnitude, 1.0)
    exponent = np.maximum(np.frexp(finite)[1].astype(np.int64) - 1, form.least)
    exponent[finite == 0] = form.least  # frexp gives zero the exponent 0
    out: npt.NDArray[np.float64] = np.ldexp(1.0, exponent - form.mantissa)
    return out


def values_of(codes: Bytes, dtype: Dtype) -> Float32s:
    """The number that every fp8 code stands for."""
    form = _FP8[dtype]
    exponent = (codes & 0x7F).astype(np.int64) >> form.mantissa
    fraction = codes.astype(np.int64) & ((1 << form.mantissa) - 1)
    significand = fraction + np.where(exponent > 0, 1 << form.mantissa, 0)
    shift = np.maximum(exponent, 1) - 1 + form.least - form.mantissa
    value = np.ldexp(significand.astype(np.float64), shift)
    if dtype is Dtype.E4M3:
        value[(codes & 0x7F) == _NAN_CODE] = np.nan
    else:
        value[exponent == 31] = np.inf
        value[(exponent == 31) & (fraction > 0)] = np.nan
    signed: Float32s = np.where(codes & _SIGN, -value, value).astype(np.float32)
    return signed


def widened(raw: Bytes, dtype: Dtype) -> Float32s:
    """float32 [n, elements] of uint8 [n, bytes] of fp32, fp16 or bf16."""
    raw = np.ascontiguousarray(raw)
    if dtype is Dtype.F32:
        return raw.view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        if dtype is Dtype.F16:
            return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrowed(values: Float32s, dtype: Dtype) -> Bytes:
    """uint8 [n, bytes] of float32 [n, elements], rounded once to nearest even."""
    with np.errstate(all="ignore"):
        if dtype is Dtype.F32:
            return np.ascontiguousarray(values).view(np.uint8)
        if dtype is Dtype.F16:
            return np.ascontiguousarray(values.astype(np.float16)).view(np.uint8)
        bits = np.ascontiguousarray(values).view(np.uint32)
        half = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        half[np.isnan(values)] = 0x7FC0
        return half.view(np.uint8)
