"""What memory of either backend offers.

Every buffer of a case gets its own *region*: the buffer and the workspace it is a slice of. The
region lies against a *guard*, memory that nobody may touch, at the end that its placement names; at
its other end, and between the buffer and the guard where alignment leaves room, lies a red zone.
Small regions lie in *pools*, mapped once and reused, and are filled and compared whole. A large
region is sparse: only *windows* around the footprint hold contents, and what a launch touched is
found without walking the buffer. Between windows lie *holes*, in which no
byte is legal; a hole that nobody may touch is *closed*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.case import BASE_ALIGNMENT_BYTES, CaseError
from pagefuzz.oracles.contents import initial_bytes
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, Plan, PlannedBuffer, Role
from pagefuzz.oracles.observation import Around, Chunk

RED_ZONE_BYTES = 256

#: Address space on either side of a region that nobody may touch: so wide that an offset which
#: wrapped at 2^32 elements of 8 bytes faults there, instead of landing in other memory.
GUARD_BYTES = 34 * 2**30

#: A buffer lies less than this from its guard: see `PlannedBuffer.base_offset_bytes`.
NEAR_BYTES = 16

#: Regions up to this size are filled and compared whole: writing position-hashed bytes costs about
#: 7 ns each, so that a region of this size costs what the rest of a case does.
SMALL_BYTES = 256 * 1024

#: What memory holds far from anything legal, by fill. As a number it is large in every format that
#: there is (8 to 32 bits, floating point or not; as an index it is illegal), so that a maximum, a
#: sum or an address that takes it in by mistake shows it.
BACKGROUND = (0x7A, 0xF5)


class DoesNotFitError(Exception):
    """A case that needs more memory than there is; it is counted as not run, never as passed."""


class DeviceFaultError(Exception):
    """The launch broke the device's context: the worker cannot go on.

    name  the fault in words ("illegal memory access"); the message says where it was noticed
    """

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(detail)
        self.name = name


@dataclass(frozen=True)
class Collected:
    """What a launch left behind; the fields are those of `observation.Launch`."""

    chunks: Mapping[str, tuple[Chunk, ...]]
    examined_bytes: int
    around: Around


class Arena(Protocol):
    """Memory for the buffers of one case at a time. `place`, then per launch `fill` (or `keep`),
    `collect`."""

    @property
    def address_bytes(self) -> int:
        """Address space reserved, guards included."""

    @property
    def allocated_bytes(self) -> int:
        """Physical memory held, that kept for later cases included."""

    def place(self, plan: Plan, expectation: Expectation) -> Mapping[str, int]:
        """Gives every buffer of the plan memory; returns the address of its base, 0 for an absent
        one. Ends the previous case. Raises `DoesNotFitError`."""

    def fill(self, fill: int) -> None:
        """Writes what every region holds before a launch with this fill."""

    def closed(self) -> Mapping[str, IntervalSet]:
        """By buffer, the holes that nobody may touch, as offsets from its base in bytes."""

    def mapped(self) -> Mapping[str, tuple[int, int]]:
        """By buffer with memory of its own, where a launch on the host may at least read: (begin,
        end) of its region as offsets from its base in bytes, closed holes aside. Empty on a device,
        which does not tell where it faults."""

    def keep(self) -> None:
        """In place of `fill`: the next launch finds what the last one has left, and `collect` tells
        what both did."""

    def store(self, values: npt.NDArray[np.int64]) -> int:
        """Copies values (permissions) to where kernels can read them; valid until the next call."""

    def synchronise(self) -> None:
        """Waits for launches. Raises `DeviceFaultError`."""

    def collect(self) -> Collected:
        """Compares every region with what `fill` wrote."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class PoolRegion:
    """A small buffer's region: all of a pool.

    base        offset of the buffer's base in the pool, in bytes
    pool_bytes  of the pool: one of `POOL_BYTES`
    """

    buffer: PlannedBuffer
    base: int
    pool_bytes: int

    @classmethod
    def of(
        cls, buffer: PlannedBuffer, pool_bytes: Sequence[int], *, guarded: bool = True
    ) -> PoolRegion:
        """In the smallest of `pool_bytes` that holds it; a multiple of 256, all of them.

        guarded  whether it lies against its guard; else between red zones, its base modulo 256 as
                 it would be
        """
        front, behind = _beside(buffer, guarded=guarded)
        base = aligned_base(front, buffer)
        least = base + buffer.memory_bytes + behind
        size = next(size for size in pool_bytes if size >= least)
        if guarded and buffer.placement.guard == "end":
            latest = size - buffer.memory_bytes
            base = latest - (latest - buffer.base_offset_bytes) % BASE_ALIGNMENT_BYTES
        return cls(buffer, base, size)

    @property
    def begin(self) -> int:
        """The pool's first byte, as an offset from the base."""
        return -self.base

    @property
    def end(self) -> int:
        return self.pool_bytes - self.base

    @property
    def around(self) -> Around:
        """What lies around the buffer and its workspace: measured, not what was asked for."""
        front = self.base - self.buffer.placement.before_bytes
        behind = self.end - self.buffer.memory_bytes
        size_bytes = self.buffer.placement.before_bytes + self.buffer.memory_bytes
        return Around(
            guarded_bytes=size_bytes if min(front, behind) < NEAR_BYTES else 0,
            red_zone_bytes=min(front, RED_ZONE_BYTES) + min(behind, RED_ZONE_BYTES),
            read_only_bytes=0 if is_written(self.buffer) else size_bytes,
        )

    def contents(self, expectation: Expectation, seed: int, fill: int) -> Bytes:
        """uint8 [pool_bytes]: what the pool holds before a launch, `BACKGROUND` beyond the red
        zones."""
        placement = self.buffer.placement
        begin = max(self.begin, -placement.before_bytes - RED_ZONE_BYTES)
        end = min(self.end, self.buffer.memory_bytes + RED_ZONE_BYTES)
        out = np.full(self.pool_bytes, BACKGROUND[fill], np.uint8)
        out[begin + self.base : end + self.base] = contents(
            self.buffer, expectation, seed, fill, begin, end
        )
        return out


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def aligned_base(at_least: int, buffer: PlannedBuffer) -> int:
    """The lowest offset >= `at_least` with exactly the misalignment that the placement asks for."""
    offset = buffer.base_offset_bytes
    return round_up(at_least - offset, BASE_ALIGNMENT_BYTES) + offset


def _beside(buffer: PlannedBuffer, *, guarded: bool = True) -> tuple[int, int]:
    """Bytes that a region between guards needs in front of the base (the workspace there, too) and
    behind the buffer: a red zone at the ends that touch no guard."""
    guard = buffer.placement.guard if guarded else "none"
    front = buffer.placement.before_bytes + (0 if guard == "start" else RED_ZONE_BYTES)
    return front, 0 if guard == "end" else RED_ZONE_BYTES


def least_region_bytes(buffer: PlannedBuffer) -> int:
    """What a region between guards has at least, unrounded."""
    front, behind = _beside(buffer)
    return aligned_base(front, buffer) + buffer.memory_bytes + behind


def placed_buffers(plan: Plan) -> tuple[list[PlannedBuffer], list[PlannedBuffer]]:
    """The buffers with memory of their own: (small ones, large ones). An absent one has none."""
    small: list[PlannedBuffer] = []
    large: list[PlannedBuffer] = []
    for buffer in plan.buffers.values():
        if buffer.placement.over is not None or (buffer.is_null and not buffer.memory_bytes):
            continue
        span = buffer.placement.before_bytes + buffer.memory_bytes
        (small if span <= SMALL_BYTES else large).append(buffer)
    return small, large


def overlaid_addresses(plan: Plan, addresses: dict[str, int]) -> None:
    """Adds the buffers that lie inside another's memory, and zeros for absent ones."""
    for name, buffer in plan.buffers.items():
        if buffer.placement.over is not None:
            other, offset_bytes = buffer.placement.over
            if other not in addresses:
                raise CaseError(
                    f"placements.{name}.over names {other!r}, which has no memory of its own"
                )
            addresses[name] = addresses[other] + offset_bytes
    for name in plan.buffers:
        addresses.setdefault(name, 0)


def is_written(buffer: PlannedBuffer) -> bool:
    """Whether a launch may write to the buffer: the others are mapped read-only, and judgements
    want its bytes even where nothing changed."""
    return buffer.role.is_destination or buffer.role is Role.COUNTERS


def contents(
    buffer: PlannedBuffer, expectation: Expectation, seed: int, fill: int, begin: int, end: int
) -> Bytes:
    readable = expectation.footprint(buffer.name).may_read
    return initial_bytes(buffer, readable, seed, fill, begin, end)


def pool_chunk(region: PoolRegion, before: Bytes, after: Bytes) -> tuple[Chunk, ...]:
    """The pool as a chunk, if it changed or its buffer is written."""
    if is_written(region.buffer) or not np.array_equal(before, after):
        return (Chunk(region.begin, before, after),)
    return ()
