"""Memory of the cuda backend, through the driver.

One slab for all small regions: one copy in and one copy out a launch. Large regions are
allocations of their own, kept between cases, zeroed by the device and searched by the device for
what a launch touched (`pf_scan` of the built object), so that only those chunks come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagefuzz.harness.memory.arena import (
    RED_ZONE_BYTES,
    Collected,
    DoesNotFitError,
    aligned_base,
    contents,
    overlaid_addresses,
    placed_buffers,
    round_up,
)
from pagefuzz.harness.memory.driver import Driver
from pagefuzz.harness.memory.windows import Windows
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, Plan, PlannedBuffer
from pagefuzz.oracles.observation import Chunk

SCAN_CHUNK_BYTES = 64 * 1024
_WINDOW_GRANULARITY = 4096
_SLAB_GRANULARITY = 4096
_LARGE_GRANULARITY = 2 * 2**20  # the driver's own; sizes rounded to it are found again in the cache
_KEPT_BYTES = 4 * 2**30  # of large allocations not in use: other workers need memory too
_RESERVE_BYTES = 256 * 2**20  # left to the subject: local memory, printf, modules

#: (data, size_bytes, chunk_bytes, flags): flags[i] = 1 if chunk i holds a byte other than 0
Scan = Callable[[int, int, int, int], None]


@dataclass
class _LargeRegion:
    """A large buffer's region.

    address  of the allocation
    base     offset of the buffer's base in it
    """

    buffer: PlannedBuffer
    address: int
    size_bytes: int
    base: int
    windows: Windows


class _Allocation:
    """Device memory that grows: what it held is lost then."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.address, self.size_bytes = 0, 0

    def at_least(self, size_bytes: int) -> int:
        if size_bytes > self.size_bytes:
            if self.address:
                self._driver.free(self.address)
                self.address, self.size_bytes = 0, 0
            wanted = round_up(max(size_bytes, 2 * 2**20), 2**20)
            self.address, self.size_bytes = self._driver.allocate(wanted), wanted
        return self.address


class CudaArena:
    """Memory of the cuda backend; see `arena.Arena`. `scan` is the built object's `pf_scan`."""

    def __init__(self, driver: Driver, scan: Scan) -> None:
        self._driver, self._scan = driver, scan
        self._slab, self._store = _Allocation(driver), _Allocation(driver)
        self._flags = _Allocation(driver)
        self._free: dict[int, list[int]] = {}  # size -> addresses of large allocations not in use
        self._regions: list[SlabRegion] = []
        self._large: list[_LargeRegion] = []
        self._before: Bytes = np.empty(0, np.uint8)

    def place(self, plan: Plan, expectation: Expectation) -> Mapping[str, int]:
        for region in self._large:
            self._free.setdefault(region.size_bytes, []).append(region.address)
        self._large = []
        self._plan, self._expectation = plan, expectation
        small, large = placed_buffers(plan)
        self._regions = slab_regions(small, _SLAB_GRANULARITY)
        used = self._regions[-1].slice.stop if self._regions else 0
        slab = self._slab.at_least(used)
        self._before = np.empty(used, np.uint8)
        for buffer in large:
            self._large.append(self._large_region(buffer, expectation))
        addresses = {r.buffer.name: slab + r.base for r in self._regions}
        addresses |= {r.buffer.name: r.address + r.base for r in self._large}
        overlaid_addresses(plan, addresses)
        return addresses

    def _large_region(self, buffer: PlannedBuffer, expectation: Expectation) -> _LargeRegion:
        base = aligned_base(RED_ZONE_BYTES + buffer.placement.before_bytes, buffer)
        size_bytes = round_up(base + buffer.memory_bytes + RED_ZONE_BYTES, _LARGE_GRANULARITY)
        windows = Windows(
            buffer,
            expectation,
            begin=-base,
            end=size_bytes - base,
            granularity=_WINDOW_GRANULARITY,
        )
        try:
            address = self._take(size_bytes)
        except DoesNotFitError as error:
            raise DoesNotFitError(f"{buffer.name}: {error}") from None
        return _LargeRegion(buffer, address, size_bytes, base, windows)

    def _take(self, size_bytes: int) -> int:
        if kept := self._free.get(size_bytes):
            return kept.pop()
        kept_bytes = sum(size * len(addresses) for size, addresses in self._free.items())
        wanted_bytes = size_bytes + _RESERVE_BYTES
        if kept_bytes + size_bytes > _KEPT_BYTES or self._driver.free_bytes() < wanted_bytes:
            for addresses in self._free.values():
                for address in addresses:
                    self._driver.free(address)
            self._free = {}
        if self._driver.free_bytes() < wanted_bytes:
            # No figure of what is free: runs count their reasons, and it is never the same.
            raise DoesNotFitError(f"needs {size_bytes:,} bytes of device memory, fewer are free")
        return self._driver.allocate(size_bytes)

    def fill(self, fill: int) -> None:
        seed = self._plan.case.seed
        for region in self._regions:
            self._before[region.slice] = contents(
                region.buffer, self._expectation, seed, fill, region.begin, region.end
            )
        self._driver.copy_in(self._slab.address, self._before)
        for large in self._large:
            self._driver.zero(large.address, large.size_bytes)
            large.windows.fill(seed, fill)
            for begin, data in large.windows.slices(large.windows.before):
                self._driver.copy_in(large.address + large.base + begin, data)

    def store(self, values: npt.NDArray[np.int64]) -> int:
        address = self._store.at_least(values.nbytes)
        self._driver.copy_in(address, values)
        return address

    def synchronise(self) -> None:
        self._driver.synchronise()

    def collect(self) -> Collected:
        before, self._before = self._before, np.empty_like(self._before)
        after = np.empty_like(before)
        self._driver.copy_out(after, self._slab.address)
        self._driver.synchronise()
        chunks = slab_chunks(self._regions, before, after)
        examined = after.size
        for large in self._large:
            examined += large.size_bytes
            if found := self._large_chunks(large):
                chunks[large.buffer.name] = found
        return Collected(chunks, examined)

    def _large_chunks(self, large: _LargeRegion) -> tuple[Chunk, ...]:
        """Windows that changed, and what was touched outside them, by offset."""
        base = large.address + large.base
        after = np.empty_like(large.windows.before)
        for begin, data in large.windows.slices(after):
            self._driver.copy_out(data, base + begin)
        touched = self._touched(large)
        found = large.windows.changed(after)
        for begin, end in self._outside_windows(large, touched):
            stray = np.empty(end - begin, np.uint8)
            self._driver.copy_out(stray, base + begin)
            self._driver.synchronise()
            nonzero = np.flatnonzero(stray)
            if nonzero.size:
                run = slice(int(nonzero[0]), int(nonzero[-1]) + 1)
                changed = stray[run].copy()
                found.append(Chunk(begin + run.start, np.zeros_like(changed), changed))
        return tuple(sorted(found, key=lambda chunk: chunk.offset_bytes))

    def _touched(self, large: _LargeRegion) -> IntervalSet:
        """Chunks that hold a byte other than zero, as offsets from the base. Synchronises."""
        count = -(-large.size_bytes // SCAN_CHUNK_BYTES)
        flags = np.empty(count, np.uint8)
        device_flags = self._flags.at_least(count)
        self._driver.zero(device_flags, count)
        self._scan(large.address, large.size_bytes, SCAN_CHUNK_BYTES, device_flags)
        self._driver.copy_out(flags, device_flags)
        self._driver.synchronise()
        begins = np.flatnonzero(flags).astype(np.int64) * SCAN_CHUNK_BYTES - large.base
        return IntervalSet.of_runs(begins, SCAN_CHUNK_BYTES)

    @staticmethod
    def _outside_windows(large: _LargeRegion, touched: IntervalSet) -> Iterator[tuple[int, int]]:
        """Touched runs without the windows in them, none longer than a few megabytes."""
        step = 4 * 2**20
        rest = touched.without(large.windows.spans)
        for begin, end in zip(rest.begin.tolist(), rest.end.tolist(), strict=True):
            for position in range(begin, end, step):
                yield position, min(end, position + step)

    def close(self) -> None:
        """The context ends with the worker, and the memory with it."""
