"""Inputs of writers that compute their scales: groups of bf16 whose largest magnitude is chosen.

Of random bits nearly every group is too large for all of its values to be seen but one. Here each
group has a kind, made from the payload bytes where it begins, and each element is made from its own
payload bytes and its group's: numbers that fp8 holds exactly under the group's scale, ties between
two of them, their neighbours; a largest magnitude that makes the scale a power of two exactly, or
just not; floors of the scale on both sides; groups of zeros, subnormals, NaNs, infinities. Groups
that lie side by side have magnitudes far from each other, so that a wrong scale is gross.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.fp8 import Float32s, fp8_table
from pagefuzz.oracles.layout import Bytes, Dtype
from pagefuzz.oracles.rows import Int64s

_Words = npt.NDArray[np.int64]

#: Kind of a group -> weight; 32 in all.
KINDS = {
    "exact": 7,  # 448 times a power of two
    "seven": 4,  # and times 7: a product with fp32's 1/7 misses ties, with 1/3 or 1/5 it does not
    "above": 3,  # the bf16 next above it
    "below": 3,  # the bf16 next below it
    "any": 4,
    "zero": 1,
    "subnormal": 1,
    "least": 1,  # around 448 times the least normal float32
    "floors": 3,  # around 1e-4 and 448 times that
    "huge": 1,
    "infinite": 1,
    "NaN": 1,
    "some NaN": 2,
    "raw": 1,  # the payload bits as they are
}
_KIND = np.repeat(np.arange(len(KINDS)), list(KINDS.values()))
_NUMBER = {name: nth for nth, name in enumerate(KINDS)}

_INFINITY, _SIGN = 0x7F80, 0x8000
_LARGEST = 448.0


def _word(values: Float32s) -> _Words:
    """The upper half of float32s."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.int64)


_FLOORS = _word(np.array([1e-4, 1e-4 * _LARGEST], dtype=np.float32))


def grouped(payload: Bytes, first: Bytes, group: Int64s, index: Int64s, size: int) -> Bytes:
    """uint8 [n, 2]: a bf16 for each row of `payload` (uint8 [n, 2]).

    first  uint8 [n, 4], the payload bytes where the element's group begins
    group  int64 [n], its number in its row; index int64 [n], the element's number in it
    size   elements of a group
    """
    kind = _KIND[first[:, 0] % len(_KIND)]
    spread = first[:, 3].astype(np.int64)
    least = kind == _NUMBER["least"]
    exponent = np.where(least, -127 + spread % 3, (7 * group + first[:, 1] % 3) % 29 - 9)
    factor = np.where(kind == _NUMBER["seven"], 7, 1)
    unit: Float32s = np.ldexp(factor.astype(np.float32), exponent)

    top = _word(unit * np.float32(_LARGEST))
    lead = np.select(
        [
            kind == _NUMBER[name]
            for name in ("above", "below", "any", "least", "floors", "huge", "infinite")
        ],
        [
            top + 1,
            top - 1,
            (top & ~0x7F) | (spread & 0x7F),
            top + spread // 3 % 3 - 1,
            _FLOORS[spread % 2] + spread // 2 % 3 - 1,
            _INFINITY - 1 - spread % 3,
            np.int64(_INFINITY),
        ],
        top,
    )
    is_lead = index == first[:, 2].astype(np.int64) % size
    any_word = payload[:, 0].astype(np.int64) | (payload[:, 1].astype(np.int64) & 0x7F) << 8
    on_codes = np.isin(
        kind, [_NUMBER[name] for name in ("exact", "seven", "above", "below", "least", "some NaN")]
    )
    word = np.where(on_codes, _around_codes(payload, unit), any_word % (lead + 1))
    word = np.where(is_lead, lead, word)
    word[kind == _NUMBER["zero"]] = 0
    word = np.where(kind == _NUMBER["subnormal"], any_word & 0x7F, word)
    nan = _INFINITY | np.maximum(any_word & 0x7F, 1)
    some = (kind == _NUMBER["some NaN"]) & (payload[:, 1] % 4 == 0)
    word = np.where((kind == _NUMBER["NaN"]) | some, nan, word)
    also_infinite = (kind == _NUMBER["infinite"]) & (payload[:, 1] % 8 == 0)
    word[also_infinite] = _INFINITY
    word = np.where(kind == _NUMBER["raw"], any_word, word)
    word |= (payload[:, 1].astype(np.int64) & 0x80) << 8
    out: Bytes = word.astype("<u2").view(np.uint8).reshape(payload.shape)
    return out


def _around_codes(payload: Bytes, unit: Float32s) -> _Words:
    """Magnitudes below the largest code's: codes, ties between two, their neighbours."""
    table = fp8_table(Dtype.E4M3)
    code = np.minimum(payload[:, 0] & 0x7F, np.uint8(0x7D))
    way = payload[:, 1] & 7
    tie: Float32s = (table[code] + table[code + 1]) / np.float32(2)
    word = _word(np.where(way < 3, table[code], tie) * unit)
    step = np.select([way == 5, way == 6], [1, -1], 0)
    around: _Words = np.maximum(word + step, 0)
    return around
