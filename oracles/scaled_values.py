"""Inputs of writers that quantise: values that lie on, between and beyond what fp8 can hold.

Random bits of a float are nearly all far too large or too small for fp8, so that rounding, ties and
saturation would hardly ever be seen. Here each element is made from its own payload bytes and the
scale it will be divided by: a number that fp8 holds exactly, a tie between two of them, one of
their neighbours, the edge of saturation, something special, or the payload bits as they are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.fp8 import FP8_MAX, Float32s, fp8_table, to_dtype
from pagefuzz.oracles.layout import Bytes, Dtype

_SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-126), 3.4e38], dtype=np.float32
)


def shaped(payload: Bytes, dtype: Dtype, scale: Float32s, fp8: Dtype) -> Bytes:
    """uint8 [n, element bytes]: an element for each row of `payload` (uint8, the same shape).

    dtype  of the elements: F32, F16 or BF16
    scale  float32 [n], what each element will be divided by
    fp8    E4M3 or E5M2, the format it will be stored in
    """
    first = payload[:, 0]
    kind: Bytes = first & np.uint8(7)
    step: Bytes = first >> np.uint8(5)
    tweak = first >> np.uint8(3) & np.uint8(3)
    with np.errstate(all="ignore"):
        quotient = _quotients(kind, payload[:, 1], step, fp8)
        value = (quotient * scale.astype(np.float64)).astype(np.float32)
        up = np.where(tweak == 2, np.float32(np.inf), np.float32(-np.inf))
        value = np.where(tweak >= 2, np.nextafter(value, up), value)
        value = np.where(kind == 7, _SPECIAL[step], value)
        elements = np.ascontiguousarray(to_dtype(value.astype(np.float32), dtype))
    raw: Bytes = elements.view(np.uint8).reshape(payload.shape)
    return np.where((kind == 5)[:, None], payload, raw)


def _quotients(kind: Bytes, code: Bytes, step: Bytes, fp8: Dtype) -> npt.NDArray[np.float64]:
    """What the division by the scale should give, before a neighbour is taken."""
    table = fp8_table(fp8).astype(np.float64)
    largest = FP8_MAX[fp8]
    exact = np.nan_to_num(table, nan=largest, posinf=largest, neginf=-largest)
    magnitude = np.minimum(code & 0x7F, np.uint8(0x7E))
    above = exact[np.where(magnitude == 0x7E, magnitude, magnitude + 1)]
    sign = np.where(code & 0x80, -1.0, 1.0)
    middle = sign * (exact[magnitude] + above) / 2
    # The edge: the maximum, the tie above it, and what lies beyond, up to twice as much.
    edge = sign * largest * (1 + step.astype(np.float64) / (28 if fp8 is Dtype.E4M3 else 14))
    return np.where(kind < 2, sign * exact[magnitude], np.where(kind == 6, edge, middle))
