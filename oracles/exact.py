"""Rounding by exact fractions, one number at a time: the plain truth behind the loops' numerics."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction
from functools import cache

from pagefuzz.oracles.layout import Dtype

_NAN_CODE = 0x7F


@cache
def _ladder(fp8: Dtype) -> list[Fraction]:
    """The magnitude of every finite code without a sign, by hand from the format."""
    mantissa, bias, last = (3, 7, 0x7E) if fp8 is Dtype.E4M3 else (2, 15, 0x7B)
    out = []
    for code in range(last + 1):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        significand = Fraction(fraction, 1 << mantissa) + (1 if exponent else 0)
        out.append(significand * Fraction(2) ** (max(exponent, 1) - bias))
    return out


def fp8_code(value: float, fp8: Dtype) -> int:
    """The nearest code of E4M3 or E5M2, the even one of two; saturates; a NaN gives 0x7F."""
    if math.isnan(value):
        return _NAN_CODE
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    ladder = _ladder(fp8)
    largest = len(ladder) - 1
    if math.isinf(value) or abs(Fraction(value)) >= ladder[largest]:
        return sign | largest
    magnitude = abs(Fraction(value))
    above = bisect_left(ladder, magnitude)
    # The nearest; of two equally near ones, the even.
    near = range(max(above - 1, 0), above + 1)
    return sign | min(near, key=lambda code: (abs(ladder[code] - magnitude), code & 1))


def float32_of(value: Fraction) -> float:
    """The nearest float32, the even one of two, of a number >= 0; too large ones are infinite."""
    if not value:
        return 0.0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(value / unit) * unit  # a Fraction rounds to even
    return math.inf if rounded >= 2**128 else float(rounded)
