"""Device memory in which a sanitizer sees every end: each buffer is an allocation of its own.

No pools, no guards, no mappings: a tool that knows allocations would be blind in them. An
allocation ends with the last byte of what the launcher is told the buffer has. In front lie at most
255 bytes, for the misalignment that a placement asks for; the driver aligns to 256 at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pagefuzz.harness.memory.arena import (
    BACKGROUND,
    SMALL_BYTES,
    DoesNotFitError,
    aligned_base,
    contents,
    overlaid_addresses,
    placed_buffers,
    round_up,
)
from pagefuzz.harness.memory.driver import Driver
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.harness.memory.windows import Windows
from pagefuzz.oracles.case import BASE_ALIGNMENT_BYTES
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Plan, PlannedBuffer, Role

#: Most pieces in which one buffer is written where only what may be read is: each is a copy of its
#: own, and they are slow under a sanitizer.
MOST_RUNS = 4096


@dataclass(frozen=True)
class _Allocated:
    """address  of the base; `size_bytes` of the buffer from there."""

    buffer: PlannedBuffer
    address: int
    size_bytes: int


class PlainArena:
    """Memory for the buffers of one case at a time, as in `arena.Arena`; nothing is collected.

    readable_only  writes only bytes that the contract lets a launch read, so that a tool which
                   knows what was written sees the reads of all others
    """

    def __init__(self, driver: Driver, *, readable_only: bool = False) -> None:
        self._driver, self._readable_only = driver, readable_only
        self._host = HostArena()
        self._allocations: dict[int, int] = {}  # address -> bytes
        self._held: list[_Allocated] = []

    def place(self, plan: Plan, expectation: Expectation) -> Mapping[str, int]:
        """The address of each buffer's base, 0 for an absent one. Ends the previous case. Raises
        `DoesNotFitError`."""
        self._free()
        self._plan, self._expectation = plan, expectation
        # The launcher itself reads these.
        host = {name: one for name, one in plan.buffers.items() if one.host}
        addresses = dict(self._host.place(replace(plan, buffers=host), expectation))
        device = {name: one for name, one in plan.buffers.items() if not one.host}
        overlaid = any(one.placement.over is not None for one in device.values())
        small, large = placed_buffers(replace(plan, buffers=device))
        for buffer in (*small, *large):
            size_bytes = buffer.memory_bytes
            if not overlaid:  # else another one may lie in the workspace
                size_bytes = min(size_bytes, max(buffer.extent_bytes, 0))
            # Of an empty buffer the base is just behind an allocation: nobody may touch it.
            base = aligned_base(0 if size_bytes else BASE_ALIGNMENT_BYTES, buffer)
            whole_bytes = base + size_bytes
            try:
                address = self._driver.allocate(whole_bytes)
            except DoesNotFitError as error:
                raise DoesNotFitError(f"{buffer.name}: {error}") from None
            self._allocations[address] = whole_bytes
            self._held.append(_Allocated(buffer, address + base, size_bytes))
            addresses[buffer.name] = address + base
        overlaid_addresses(plan, addresses)
        return addresses

    def fill(self, fill: int) -> None:
        """Writes what every buffer holds before a launch with this fill."""
        self._host.fill(fill)
        for held in self._held:
            if self._readable_only:
                self._fill_readable(held, fill)
            elif held.size_bytes <= SMALL_BYTES:
                self._write(held, 0, held.size_bytes, fill)
            else:
                self._fill_windows(held, fill)

    def _write(self, held: _Allocated, begin: int, end: int, fill: int) -> None:
        seed = self._plan.case.seed
        data = contents(held.buffer, self._expectation, seed, fill, begin, end)
        self._driver.copy_in(held.address + begin, data)
        self._driver.synchronise()  # the array goes

    def _fill_readable(self, held: _Allocated, fill: int) -> None:
        footprint = self._expectation.footprint(held.buffer.name)
        runs = footprint.may_read
        if held.buffer.role is Role.COUNTERS:  # they are added to
            runs = runs.union(footprint.changeable)
        runs = runs.intersection(IntervalSet([0], [held.size_bytes]))
        if len(runs) > MOST_RUNS:
            raise DoesNotFitError(
                f"{held.buffer.name} may be read in {len(runs):,} pieces, more than the "
                f"{MOST_RUNS:,} that are written one by one"
            )
        for begin, end in runs:
            self._write(held, begin, end, fill)

    def _fill_windows(self, held: _Allocated, fill: int) -> None:
        """`BACKGROUND` outside of windows, as in a large region that is memory everywhere."""
        self._driver.set_bytes(held.address, BACKGROUND[fill], held.size_bytes)
        windows = Windows(
            held.buffer,
            self._expectation,
            begin=0,
            end=round_up(held.size_bytes, BASE_ALIGNMENT_BYTES),
            granularity=BASE_ALIGNMENT_BYTES,
        )
        windows.fill(self._plan.case.seed, fill)
        for begin, data in windows.slices(windows.before):
            self._driver.copy_in(held.address + begin, data[: held.size_bytes - begin])
        self._driver.synchronise()

    def synchronise(self) -> None:
        """Waits for launches. Raises `DeviceFaultError`."""
        self._driver.synchronise()

    def _free(self) -> None:
        for address in self._allocations:
            self._driver.free(address)
        self._allocations, self._held = {}, []

    @property
    def allocated_bytes(self) -> int:
        """Device memory of the case that is there."""
        return sum(self._allocations.values())

    @property
    def address_bytes(self) -> int:
        """The same: nothing lies between allocations."""
        return self.allocated_bytes

    def close(self) -> None:
        """Gives everything back."""
        self._free()
        self._host.close()
