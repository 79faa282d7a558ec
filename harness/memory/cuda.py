"""Memory of the cuda backend, through the driver's virtual memory.

A small buffer lies at one end of a granule of its own, and only its region of that granule is
copied in and out; the rest holds one byte value everywhere, whatever the fill, and one search by
the device (`pf_scan` of the built object) over all granules tells where it no longer does.

A large buffer's region has physical memory everywhere as long as a case's regions are few bytes: it
holds the background of the fill outside windows, and the same search tells where not. Beyond, only
the granules that hold windows have memory. Nothing is mapped in the rest, the holes: an access
there is a fault, reads whose value is thrown away included, which no search would show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pagefuzz.harness.memory.arena import (
    BACKGROUND,
    SMALL_BYTES,
    Collected,
    DoesNotFitError,
    PoolRegion,
    is_written,
    least_region_bytes,
    overlaid_addresses,
    placed_buffers,
    pool_chunk,
    round_up,
)
from pagefuzz.harness.memory.device_memory import KEPT_BYTES, Allocation, DeviceMemory
from pagefuzz.harness.memory.device_regions import (
    POOL_BACKGROUND,
    Layout,
    LayoutKey,
    Pool,
    Pools,
)
from pagefuzz.harness.memory.driver import GRANULE_BYTES, Driver
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.harness.memory.windows import Windows
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, Plan, PlannedBuffer
from pagefuzz.oracles.observation import Around, Chunk

#: Regions of small buffers: what is copied in and out of a granule.
REGION_BYTES = (4096, 4 * 4096, 16 * 4096, 2 * SMALL_BYTES)

#: Large regions of one case that are not sparse, together.
WHOLE_BYTES = 512 * 2**20

SCAN_CHUNK_BYTES = 64 * 1024  # of large regions
_POOL_CHUNK_BYTES = REGION_BYTES[0]
_POOL_CHUNKS = GRANULE_BYTES // _POOL_CHUNK_BYTES
_WINDOW_GRANULARITY = 4096
_KEPT_LAYOUTS = 8
_STRAY_BYTES = 4 * 2**20  # most that is looked at at once

#: (data, size_bytes, chunk_bytes, value, flags): flags[i] = 1 if chunk i holds another byte
Scan = Callable[[int, int, int, int, int], None]


@dataclass
class _SmallRegion:
    """A small buffer's region in its pool.

    begin   of the region in the granule, in bytes
    before  what `fill` wrote
    """

    region: PoolRegion
    pool: Pool
    begin: int
    before: Bytes

    @property
    def end(self) -> int:
        return self.begin + self.region.pool_bytes

    @classmethod
    def of(cls, region: PoolRegion, pool: Pool) -> _SmallRegion:
        room = GRANULE_BYTES - region.pool_bytes
        middle = room // 2 // _POOL_CHUNK_BYTES * _POOL_CHUNK_BYTES
        begin = {"end": room, "start": 0, "none": middle}[region.buffer.placement.guard]
        return cls(region, pool, begin, np.empty(0, np.uint8))


@dataclass
class _LargeRegion:
    """A large buffer's region.

    base    offset of the buffer's base in it
    around  the buffer
    """

    buffer: PlannedBuffer
    layout: Layout
    base: int
    windows: Windows
    around: Around


class CudaArena:
    """Memory of the cuda backend; see `arena.Arena`. `scan` is the built object's `pf_scan`.

    limit_bytes  of physical memory; a case that needs more does not fit. None: what is free.
    """

    def __init__(self, driver: Driver, scan: Scan, limit_bytes: int | None = None) -> None:
        self._driver, self._scan = driver, scan
        self._memory = DeviceMemory(driver, limit_bytes)
        self._memory.reclaim = self._close_idle
        # The other half of a limit is for pools and windows.
        self._whole_bytes = min(
            WHOLE_BYTES, (2 * WHOLE_BYTES if limit_bytes is None else limit_bytes) // 2
        )
        self._store, self._flags = Allocation(self._memory), Allocation(self._memory)
        self._pools = Pools(self._memory)
        self._idle: list[Layout] = []  # of earlier launches, the latest last
        self._host = HostArena()
        self._small: list[_SmallRegion] = []
        self._large: list[_LargeRegion] = []
        self._is_uncollected = False
        self._fill = 0

    @property
    def allocated_bytes(self) -> int:
        """Physical memory held, that kept for later cases included."""
        return self._memory.allocated_bytes

    @property
    def address_bytes(self) -> int:
        """Address space reserved, guards included."""
        return self._memory.address_bytes

    # ---- place ----

    def place(self, plan: Plan, expectation: Expectation) -> Mapping[str, int]:
        self._small = []
        self._idle += [region.layout for region in self._large]
        self._large = []
        if self._is_uncollected:
            self._forget_strays()
        self._plan, self._expectation = plan, expectation
        # The launcher itself reads these, where launches on the host have them.
        host = {name: one for name, one in plan.buffers.items() if one.host}
        own = {name: one for name, one in host.items() if one.placement.over is None}
        addresses = dict(self._host.place(replace(plan, buffers=own), expectation))
        device = {name: one for name, one in plan.buffers.items() if not one.host}
        small, large = placed_buffers(replace(plan, buffers=device))
        self._small = [self._small_region(nth, buffer) for nth, buffer in enumerate(small)]
        self._must_be_background = self._background_chunks()
        whole_bytes = self._whole_bytes
        for buffer in large:
            region = self._large_region(buffer, expectation, whole_bytes)
            self._large.append(region)
            if region.layout.is_whole:
                whole_bytes -= region.layout.own_bytes
        self._trim_idle()
        addresses |= {
            s.region.buffer.name: s.pool.address + s.begin + s.region.base for s in self._small
        }
        addresses |= {r.buffer.name: r.layout.address + r.base for r in self._large}
        overlaid_addresses(plan, addresses)
        return addresses

    def _forget_strays(self) -> None:
        """A launch that nobody collected may have left something anywhere."""
        self._pools.reset()
        self._is_uncollected = False

    def _small_region(self, nth: int, buffer: PlannedBuffer) -> _SmallRegion:
        try:
            pool = self._pools.pool(nth, writable=is_written(buffer))
        except DoesNotFitError as error:
            raise DoesNotFitError(f"{buffer.name}: {error}") from None
        return _SmallRegion.of(PoolRegion.of(buffer, REGION_BYTES), pool)

    def _background_chunks(self) -> npt.NDArray[np.bool_]:
        """bool [chunks of all pools]: which of them a launch must leave at `POOL_BACKGROUND`."""
        out = np.zeros((self._pools.size_bytes // GRANULE_BYTES, _POOL_CHUNKS), np.bool_)
        for small in self._small:
            row = out[(small.pool.own - self._pools.address) // GRANULE_BYTES]
            row[:] = True
            row[small.begin // _POOL_CHUNK_BYTES : small.end // _POOL_CHUNK_BYTES] = False
        return out.ravel()

    def _large_region(
        self, buffer: PlannedBuffer, expectation: Expectation, whole_bytes: int
    ) -> _LargeRegion:
        size_bytes = round_up(least_region_bytes(buffer), GRANULE_BYTES)
        planned = PoolRegion.of(buffer, [size_bytes])
        base = planned.base
        windows = Windows(
            buffer,
            expectation,
            begin=-base,
            end=size_bytes - base,
            granularity=_WINDOW_GRANULARITY,
        )
        writable = is_written(buffer)
        keys = []
        if size_bytes <= whole_bytes:
            keys.append(LayoutKey.whole(size_bytes, writable=writable))
        held = IntervalSet(windows.spans.begin + base, windows.spans.end + base)
        keys.append(LayoutKey.sparse(size_bytes, held, writable=writable))
        said = ""
        for key in keys:
            try:
                return _LargeRegion(buffer, self._layout(key), base, windows, planned.around)
            except DoesNotFitError as error:
                said = str(error)
        raise DoesNotFitError(f"{buffer.name}: {said}")

    def _layout(self, key: LayoutKey) -> Layout:
        for layout in reversed(self._idle):
            if layout.key == key:
                self._idle.remove(layout)
                return layout
        return Layout(self._memory, key)

    def _trim_idle(self) -> None:
        excess = len(self._idle) - _KEPT_LAYOUTS
        kept_bytes = sum(layout.own_bytes for layout in self._idle)
        closed = 0
        while closed < excess or kept_bytes > KEPT_BYTES:
            kept_bytes -= self._idle[closed].own_bytes
            closed += 1
        self._close_layouts(self._idle[:closed])
        del self._idle[:closed]

    def _close_idle(self) -> None:
        idle, self._idle = self._idle, []
        self._close_layouts(idle)

    def _close_layouts(self, layouts: list[Layout]) -> None:
        if layouts:
            self._driver.synchronise()  # nothing may still be using them
        for layout in layouts:
            layout.close()

    # ---- fill ----

    def fill(self, fill: int) -> None:
        seed = self._plan.case.seed
        self._is_uncollected = True
        self._fill = fill
        self._host.fill(fill)
        for small in self._small:
            begin, end = small.begin, small.end
            old_begin, old_end = small.pool.used
            if old_begin < begin or old_end > end:
                own = small.pool.own
                self._driver.set_bytes(own + old_begin, POOL_BACKGROUND, old_end - old_begin)
            small.pool.used = (begin, end)
            # Judgements keep what this makes: it is made anew for each launch.
            small.before = small.region.contents(self._expectation, seed, fill)
            self._driver.copy_in(small.pool.own + begin, small.before)
        for large in self._large:
            layout, windows = large.layout, large.windows
            self._driver.set_bytes(layout.own_address, BACKGROUND[fill], layout.own_bytes)
            windows.fill(seed, fill)
            for begin, data in windows.slices(windows.before):
                self._driver.copy_in(layout.own_at(large.base + begin), data)

    def closed(self) -> Mapping[str, IntervalSet]:
        found = dict(self._host.closed())
        for large in self._large:
            holes = large.layout.holes
            found[large.buffer.name] = IntervalSet(holes.begin - large.base, holes.end - large.base)
        return found

    def mapped(self) -> Mapping[str, tuple[int, int]]:
        return {}

    def keep(self) -> None:
        self._is_uncollected = True
        self._host.keep()

    def store(self, values: npt.NDArray[np.int64]) -> int:
        address = self._store.at_least(values.nbytes)
        self._driver.copy_in(address, values)
        return address

    def synchronise(self) -> None:
        self._driver.synchronise()

    # ---- collect ----

    def collect(self) -> Collected:
        in_host_memory = self._host.collect()
        chunks = {**in_host_memory.chunks, **self._small_chunks()}
        examined = in_host_memory.examined_bytes + len(self._small) * GRANULE_BYTES
        for large in self._large:
            examined += large.layout.key.size_bytes
            if found := self._large_chunks(large):
                chunks[large.buffer.name] = found
        self._is_uncollected = False
        around = in_host_memory.around
        around = sum((small.region.around for small in self._small), start=around)
        around = sum((large.around for large in self._large), start=around)
        return Collected(chunks, examined, around)

    def _small_chunks(self) -> dict[str, tuple[Chunk, ...]]:
        if not self._small:
            return {}
        afters = [np.empty_like(small.before) for small in self._small]
        for small, after in zip(self._small, afters, strict=True):
            self._driver.copy_out(after, small.pool.own + small.begin)
        strays = self._pool_strays()  # waits for the copies, too
        chunks: dict[str, tuple[Chunk, ...]] = {}
        for small, after in zip(self._small, afters, strict=True):
            found = pool_chunk(small.region, small.before, after)
            if small.pool.own in strays:
                found = _in_order([*found, *self._background_strays(small, strays)])
            if found:
                chunks[small.region.buffer.name] = found
        return chunks

    def _pool_strays(self) -> dict[int, IntervalSet]:
        """Pool (where the harness sees it) -> bytes, from there on, that no longer are
        `POOL_BACKGROUND`, in chunks."""
        address, size_bytes = self._pools.address, self._pools.size_bytes
        flags = self._differing(address, size_bytes, _POOL_CHUNK_BYTES, POOL_BACKGROUND)
        rows, columns = np.divmod(np.flatnonzero(flags & self._must_be_background), _POOL_CHUNKS)
        return {
            address + row * GRANULE_BYTES: IntervalSet.of_runs(
                columns[rows == row] * _POOL_CHUNK_BYTES, _POOL_CHUNK_BYTES
            )
            for row in np.unique(rows).tolist()
        }

    def _background_strays(
        self, small: _SmallRegion, strays: Mapping[int, IntervalSet]
    ) -> Iterator[Chunk]:
        """What a launch left in the pool beside the region; restored."""
        found = strays[small.pool.own]
        for begin, end in found:
            at = begin - small.begin - small.region.base
            yield from self._strays(small.pool.own + begin, at, end - begin, POOL_BACKGROUND)
            self._driver.set_bytes(small.pool.own + begin, POOL_BACKGROUND, end - begin)

    def _large_chunks(self, large: _LargeRegion) -> tuple[Chunk, ...]:
        """Windows that changed, and what was touched outside them, by offset."""
        layout, base = large.layout, large.base
        after = np.empty_like(large.windows.before)
        for begin, data in large.windows.slices(after):
            self._driver.copy_out(data, layout.own_at(base + begin))
        held = BACKGROUND[self._fill]
        flags = self._differing(layout.own_address, layout.own_bytes, SCAN_CHUNK_BYTES, held)
        touched = IntervalSet.of_runs(
            layout.in_region(np.flatnonzero(flags) * SCAN_CHUNK_BYTES) - base, SCAN_CHUNK_BYTES
        )
        found = large.windows.changed(after)
        outside = touched.without(large.windows.spans)
        for begin, end in outside:
            found += self._strays(layout.own_at(base + begin), begin, end - begin, held)
        return _in_order(found)

    def _differing(
        self, address: int, size_bytes: int, chunk_bytes: int, value: int
    ) -> npt.NDArray[np.bool_]:
        """bool [chunks]: those that hold a byte other than `value`. Synchronises."""
        count = -(-size_bytes // chunk_bytes)
        flags = np.empty(count, np.uint8)
        device_flags = self._flags.at_least(count)
        self._scan(address, size_bytes, chunk_bytes, value, device_flags)
        self._driver.copy_out(flags, device_flags)
        self._driver.synchronise()
        return flags.view(np.bool_)

    def _strays(self, address: int, offset: int, size_bytes: int, value: int) -> Iterator[Chunk]:
        """Runs of memory that held `value` everywhere, cut to what differs now; none longer than a
        few megabytes. `offset` of its first byte, from the buffer's base."""
        for at in range(0, size_bytes, _STRAY_BYTES):
            after = np.empty(min(_STRAY_BYTES, size_bytes - at), np.uint8)
            self._driver.copy_out(after, address + at)
            self._driver.synchronise()
            different = np.flatnonzero(after != value)
            if different.size:
                run = slice(int(different[0]), int(different[-1]) + 1)
                changed = after[run].copy()
                yield Chunk(offset + at + run.start, np.full_like(changed, value), changed)

    def close(self) -> None:
        """Gives everything back. Raises `DeviceFaultError` where the context is lost."""
        self._driver.synchronise()
        for layout in [*self._idle, *(region.layout for region in self._large)]:
            layout.close()
        self._pools.close()
        self._store.close()
        self._flags.close()
        self._memory.release_unused()
        self._idle, self._large, self._small = [], [], []
        self._is_uncollected = False


def _in_order(chunks: list[Chunk]) -> tuple[Chunk, ...]:
    return tuple(sorted(chunks, key=lambda chunk: chunk.offset_bytes))
