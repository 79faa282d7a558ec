"""Boundaries of offsets, and the sizes that put a product on either side of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.strategies.choices import skewed, weighted

#: Where int32 and uint32 end.
LIMITS = (2**31, 2**32)
#: A tebibyte: where 40-bit offsets end, such as those packed into a word beside something else, and
#: where one that is computed in floats has lost its low bits. In bytes alone, whatever the element.
FAR_BYTES = 2**40
INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)

#: One in sixteen is far: it is for faults that fewer kernels have.
_FAR_CHOICE = 4
_CHOICES = skewed((15, range(_FAR_CHOICE)), (1, (_FAR_CHOICE,)))
_SIDES = weighted({"past": 50, "below": 50})
_EXTRA = skewed((70, (0,)), (30, range(1, 4)))


@dataclass(frozen=True)
class Boundary:
    """limit: 2^31, 2^32 or far, counted in units of `unit_bytes` (1, or one element)."""

    limit: int
    unit_bytes: int

    @property
    def offset_bytes(self) -> int:
        return self.limit * self.unit_bytes

    def first_index(self, stride_bytes: int) -> int:
        """The first index whose offset `index * stride_bytes` is not below the boundary."""
        return -(-self.offset_bytes // stride_bytes)

    def stride_bytes(self, index: int, alignment_bytes: int) -> int:
        """The least aligned stride with which `index` (>= 1) is not below the boundary."""
        stride = -(-self.offset_bytes // index)
        return -(-stride // alignment_bytes) * alignment_bytes


def boundaries_within(limit_bytes: int, element_bytes: int) -> tuple[Boundary, ...]:
    """Boundaries of 32 bits at most `limit_bytes` from a base, nearest first, bytes before
    elements."""
    units = (1,) if element_bytes == 1 else (1, element_bytes)
    found = [Boundary(limit, unit) for unit in units for limit in LIMITS]
    return tuple(
        sorted(
            (one for one in found if one.offset_bytes <= limit_bytes),
            key=lambda one: one.offset_bytes,
        )
    )


@dataclass(frozen=True)
class Crossing:
    """What reaches a boundary, and from which side.

    quantity  which product of the operation; the operation says what it means
    choice    picks among the boundaries of 32 bits that fit, or the far one
    below     whether the last index lies just below; otherwise the first lies at or just past
    extra     steps further away from the boundary
    """

    quantity: str
    choice: int
    below: bool
    extra: int

    def boundary(self, limit_bytes: int, element_bytes: int, *, factor: int = 1) -> Boundary | None:
        """None if no boundary lies within `limit_bytes`.

        factor  by what the offsets are multiplied in the end; a power of two
        """
        if self.choice == _FAR_CHOICE and FAR_BYTES // factor <= limit_bytes:
            return Boundary(FAR_BYTES // factor, 1)
        fitting = boundaries_within(limit_bytes, element_bytes)
        return fitting[self.choice % len(fitting)] if fitting else None


@st.composite
def crossings(draw: st.DrawFn, quantities: Mapping[str, int]) -> Crossing:
    """Crossings of one of `quantities` (name -> weight), in 4 draws.

    Shrinks towards the first quantity at 2^31 bytes, just past it.
    """
    quantity = draw(weighted(quantities))
    crossing = Crossing(quantity, draw(_CHOICES), draw(_SIDES) == "below", draw(_EXTRA))
    event(f"boundary: {quantity} {'below' if crossing.below else 'past'}")
    return crossing
