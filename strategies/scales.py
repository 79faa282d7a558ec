"""Scales: the fp32 values that fp8 codes are multiplied by, as bits."""

from __future__ import annotations

import struct

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.strategies.choices import skewed, weighted

#: Kind -> weight. `any`: the payload as it is, every bit pattern equally often.
KINDS = {"any": 34, "one": 8, "distinct": 24, "ordinary": 16, "special": 18}

_KINDS = weighted(KINDS)
_COUNTS = skewed((50, (4,)), (30, (5, 7)), (20, (1, 2, 3, 13)))
_FIRST = st.sampled_from(range(251))

SPECIAL = (
    0x7FC00000,  # NaN
    0xFF800001,  # a negative NaN that signals
    0x7F800000,  # infinity
    0xFF800000,
    0x00000000,
    0x80000000,  # -0
    0x00000001,  # the least subnormal
    0x807FFFFF,  # the largest negative subnormal
    0x00800000,  # the least normal
    0x7F7FFFFF,  # the largest number
    0xBF800000,  # -1
    0x3F808000,  # a tie in bf16, 1 + 2^-8
    0x3F818000,  # the next tie
    0x7F000000,  # overflows with every code above 1
    0x00400000,  # half of the least normal
)


def bits(value: float) -> int:
    """The bits of a float32."""
    word: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return word


def _distinct(index: int, first: int) -> int:
    """Powers of two, each two magnitudes from its neighbours: no product of one group is one of
    another group's."""
    return (127 - 40 + (index * 21 + first) % 83) << 23


def _ordinary(index: int, first: int) -> int:
    """What writers store: some 2^-12..2^4, with all bits of the significand in use."""
    word = ((index + 1) * 0x9E3779B1 + (first + 1) * 0x85EBCA77) % 2**32
    return (115 + word % 16) << 23 | word >> 9


@st.composite
def scales(draw: st.DrawFn) -> tuple[int, ...] | None:
    """fp32 bits of 1..13 scales that a cache repeats, or None: what its payload holds there; 1 or 3
    draws.

    Shrinks towards None, then the scale 1 everywhere.
    """
    kind = draw(_KINDS)
    event(f"scales: {kind}")
    if kind == "any":
        return None
    if kind == "one":
        return (bits(1.0),)
    count, first = draw(_COUNTS), draw(_FIRST)
    if kind == "special":
        return tuple(SPECIAL[(first + index) % len(SPECIAL)] for index in range(count))
    of = _distinct if kind == "distinct" else _ordinary
    return tuple(of(index, first) for index in range(count))
