"""Numbers of the small formats, by tables and float64 arithmetic; a NaN is any NaN.

The values of a format's codes are listed from its definition. An encoder looks its input up among
them: float64 holds every float32 and every midpoint exactly, so that rounding is a comparison.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.layout import Dtype

Float32s = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

FP8_MAX = {Dtype.E4M3: 448.0, Dtype.E5M2: 57344.0}
_NAN_CODE = 0x7F


class _Layout(NamedTuple):
    exponent_bits: int
    mantissa_bits: int

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1)) - 1


_LAYOUTS = {
    Dtype.E4M3: _Layout(4, 3),
    Dtype.E5M2: _Layout(5, 2),
    Dtype.F16: _Layout(5, 10),
    Dtype.BF16: _Layout(8, 7),
}


@cache
def _magnitudes(dtype: Dtype) -> npt.NDArray[np.float64]:
    """The value of every code without a sign, as float64, as if all exponents were of numbers."""
    layout = _LAYOUTS[dtype]
    codes = np.arange(2 ** (layout.exponent_bits + layout.mantissa_bits))
    exponent, mantissa = np.divmod(codes, 2**layout.mantissa_bits)
    significand = mantissa + np.where(exponent > 0, 2**layout.mantissa_bits, 0)
    scale = np.maximum(exponent, 1) - layout.bias - layout.mantissa_bits
    values: npt.NDArray[np.float64] = np.ldexp(significand.astype(np.float64), scale)
    return values


@cache
def fp8_table(dtype: Dtype) -> Float32s:
    """float32 [256]: the value of every code."""
    values = _magnitudes(dtype).astype(np.float32)
    if dtype is Dtype.E4M3:
        values[0x7F] = np.nan
    else:
        values[0x7C] = np.inf
        values[0x7D:] = np.nan
    table = np.concatenate((values, -values))
    table.setflags(write=False)
    return table


def decode_fp8(codes: Codes, dtype: Dtype) -> Float32s:
    """The exact value of every code."""
    return fp8_table(dtype)[codes]


def encode_fp8(values: Float32s, dtype: Dtype) -> Codes:
    """One rounding to nearest even, saturating to the finite maximum; a NaN gives 0x7F."""
    finite = _magnitudes(dtype)[: 0x7F if dtype is Dtype.E4M3 else 0x7C]
    code = _nearest(values, finite).astype(np.uint8)
    code[np.isnan(values)] = _NAN_CODE
    return code | np.where(np.signbit(values), np.uint8(0x80), np.uint8(0))


def quantise_fp8(values: Float32s, scale: npt.ArrayLike, dtype: Dtype) -> Codes:
    """What writers store: one float32 division, then one rounding."""
    with np.errstate(all="ignore"):
        quotient: Float32s = np.divide(values, np.asarray(scale, dtype=np.float32))
    return encode_fp8(quotient, dtype)


def dequantise_fp8(codes: Codes, scale: npt.ArrayLike, dtype: Dtype) -> Float32s:
    """What readers make of codes before the final rounding: one float32 multiplication."""
    with np.errstate(all="ignore"):
        product: Float32s = decode_fp8(codes, dtype) * np.asarray(scale, dtype=np.float32)
    return product


def to_bf16(values: Float32s) -> Words:
    """bf16 bits, nearest even; beyond the largest finite number to infinity."""
    return _to_half(values, Dtype.BF16, infinity=0x7F80, nan=0x7FC0)


def to_fp16(values: Float32s) -> Words:
    """fp16 bits, nearest even; beyond the largest finite number to infinity."""
    return _to_half(values, Dtype.F16, infinity=0x7C00, nan=0x7E00)


def from_bf16(words: Words) -> Float32s:
    return _from_half(words, Dtype.BF16, 0x7F80)


def from_fp16(words: Words) -> Float32s:
    return _from_half(words, Dtype.F16, 0x7C00)


def to_dtype(values: Float32s, dtype: Dtype) -> npt.NDArray[np.generic]:
    """Elements of fp32, fp16 or bf16 (the latter two as bits)."""
    if dtype is Dtype.F32:
        return values.astype(np.float32)
    return to_bf16(values) if dtype is Dtype.BF16 else to_fp16(values)


def _nearest(values: Float32s, finite: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Index of the number in `finite` (from 0 up) nearest to |value|; ties to an even one."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        magnitude = np.abs(values.astype(np.float64))
    midpoints = (finite[1:] + finite[:-1]) / 2
    low = np.searchsorted(midpoints, magnitude, side="left")  # a tie stays below
    high = np.searchsorted(midpoints, magnitude, side="right")  # a tie goes above
    return np.where(low % 2, high, low).astype(np.int64)


def _to_half(values: Float32s, dtype: Dtype, *, infinity: int, nan: int) -> Words:
    # One number more than there are: what is nearest to it overflows.
    word = _nearest(values, _magnitudes(dtype)[: infinity + 1]).astype(np.uint16)
    word[np.isnan(values)] = nan
    return word | np.where(np.signbit(values), np.uint16(0x8000), np.uint16(0))


def _from_half(words: Words, dtype: Dtype, infinity: int) -> Float32s:
    magnitude = words & np.uint16(0x7FFF)
    finite = _magnitudes(dtype)[:infinity].astype(np.float32)
    out = finite[np.minimum(magnitude, infinity - 1)]
    out[magnitude == infinity] = np.inf
    out[magnitude > infinity] = np.nan
    signed: Float32s = np.where(words >= 0x8000, -out, out)
    return signed
