"""What memory of either backend offers, and how small buffers share one slab.

Every buffer of a case gets its own *region*: the buffer, the workspace it is a slice of and red
zones of at least `RED_ZONE_BYTES` beyond both. Small regions lie side by side in one slab and are
filled and compared whole. A large region is sparse: only *windows* around the footprint hold
contents, every other byte is zero, and what a launch touched is found without walking the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.case import BASE_ALIGNMENT_BYTES, CaseError
from pagefuzz.oracles.contents import initial_bytes
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Bytes, Plan, PlannedBuffer, Role
from pagefuzz.oracles.observation import Chunk

RED_ZONE_BYTES = 256

#: Regions up to this size are filled and compared whole: writing position-hashed bytes costs about
#: 7 ns each, so that a region of this size costs what the rest of a case does.
SLAB_REGION_BYTES = 256 * 1024


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


class Arena(Protocol):
    """Memory for the buffers of one case at a time. `place`, then per launch `fill`, `collect`."""

    def place(self, plan: Plan, expectation: Expectation) -> Mapping[str, int]:
        """Gives every buffer of the plan memory; returns the address of its base, 0 for an absent
        one. Ends the previous case. Raises `DoesNotFitError`."""

    def fill(self, fill: int) -> None:
        """Writes what every region holds before a launch with this fill."""

    def store(self, values: npt.NDArray[np.int64]) -> int:
        """Copies values (permissions) to where kernels can read them; valid until the next call."""

    def synchronise(self) -> None:
        """Waits for launches. Raises `DeviceFaultError`."""

    def collect(self) -> Collected:
        """Compares every region with what `fill` wrote."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class SlabRegion:
    """A small buffer's region in a slab.

    base   offset of the buffer's base in the slab, in bytes
    begin  first byte of the region as an offset from the base; the region before it ends there
    end    exclusive
    """

    buffer: PlannedBuffer
    base: int
    begin: int
    end: int

    @property
    def slice(self) -> slice:
        return slice(self.base + self.begin, self.base + self.end)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def aligned_base(at_least: int, buffer: PlannedBuffer) -> int:
    """The lowest offset >= `at_least` with exactly the misalignment that the placement asks for."""
    offset = buffer.placement.offset_bytes
    return round_up(at_least - offset, BASE_ALIGNMENT_BYTES) + offset


def slab_regions(buffers: Iterable[PlannedBuffer], granularity: int) -> list[SlabRegion]:
    """Regions that tile a slab: what lies between two buffers belongs to one of them.

    The last region ends at a multiple of `granularity`.
    """
    regions: list[SlabRegion] = []
    cursor = 0
    for buffer in buffers:
        base = aligned_base(cursor + RED_ZONE_BYTES + buffer.placement.before_bytes, buffer)
        end = base + buffer.memory_bytes + RED_ZONE_BYTES
        regions.append(SlabRegion(buffer, base, cursor - base, end - base))
        cursor = end
    if regions:
        last = regions[-1]
        end = round_up(cursor, granularity) - last.base
        regions[-1] = SlabRegion(last.buffer, last.base, last.begin, end)
    return regions


def placed_buffers(plan: Plan) -> tuple[list[PlannedBuffer], list[PlannedBuffer]]:
    """The buffers with memory of their own: (small ones, large ones). An absent one has none."""
    small: list[PlannedBuffer] = []
    large: list[PlannedBuffer] = []
    for buffer in plan.buffers.values():
        if buffer.placement.over is not None or (buffer.is_null and not buffer.memory_bytes):
            continue
        span = buffer.placement.before_bytes + buffer.memory_bytes
        (small if span <= SLAB_REGION_BYTES else large).append(buffer)
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
    """Whether judgements want the buffer's bytes even where nothing changed."""
    return buffer.role.is_destination or buffer.role is Role.COUNTERS


def contents(
    buffer: PlannedBuffer, expectation: Expectation, seed: int, fill: int, begin: int, end: int
) -> Bytes:
    readable = expectation.footprint(buffer.name).may_read
    return initial_bytes(buffer, readable, seed, fill, begin, end)


def slab_chunks(
    regions: Sequence[SlabRegion], before: Bytes, after: Bytes
) -> dict[str, tuple[Chunk, ...]]:
    """Regions that changed, and those of written buffers, as chunks.

    `before` and `after` hold the whole slab.
    """
    chunks: dict[str, tuple[Chunk, ...]] = {}
    for region in regions:
        old, new = before[region.slice], after[region.slice]
        if is_written(region.buffer) or not np.array_equal(old, new):
            chunks[region.buffer.name] = (Chunk(region.begin, old, new),)
    return chunks
