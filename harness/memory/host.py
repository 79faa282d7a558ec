"""Memory of the host backend.

Every region lies between reservations that no process may touch. What lies between them is a memfd.
The launch sees it through that mapping, read-only unless it may write there; the harness fills and
compares it through another one, so that no protection ever changes and, once its pools exist, a
case costs no system call that maps.

Regions above `SMALL_BYTES` are sparse: pages of a memfd that nobody touched do not exist, so that a
buffer of a tebibyte costs a few system calls, and the kernel's own map of the file says which pages
a launch touched. In holes, where no byte is legal, that is not enough: a page that a read brought
into being looks like one that zeros were stored to, and neither tells the instruction. So a launch
finds holes closed, and dies of an access there as it does at a guard: byte and source line are
known.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Any

import cffi
import numpy as np
import numpy.typing as npt

from pagefuzz.harness.memory.arena import (
    GUARD_BYTES,
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
from pagefuzz.harness.memory.windows import Windows
from pagefuzz.harness.own_process import SpoiledProcessError
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, Plan, PlannedBuffer
from pagefuzz.oracles.observation import Around, Chunk

PAGE_BYTES = mmap.PAGESIZE

#: Sizes of pools: of the one in use mostly more than a quarter is filled; the last holds any.
POOL_BYTES = (PAGE_BYTES, 4 * PAGE_BYTES, 16 * PAGE_BYTES, 2 * SMALL_BYTES)

#: Most holes of a region that are closed, the largest ones. Each takes two of a process's mappings,
#: of which there are 65,530, and a case has a handful.
MOST_CLOSED = 2048

_PROT_NONE, _PROT_READ, _PROT_READ_WRITE = 0, 1, 1 | 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000

_ffi = cffi.FFI()
_ffi.cdef(
    """
    void *mmap(void *address, size_t size, int protection, int flags, int file, int64_t offset);
    int munmap(void *address, size_t size);
    int mprotect(void *address, size_t size, int protection);
    int madvise(void *address, size_t size, int advice);
    void __asan_poison_memory_region(const void *address, size_t size);
    void __asan_unpoison_memory_region(const void *address, size_t size);
    """
)
_libc: Any = _ffi.dlopen(None)


def _poison(address: int, size_bytes: int) -> None:
    _libc.__asan_poison_memory_region(_ffi.cast("void *", address), size_bytes)


def _unpoison(address: int, size_bytes: int) -> None:
    _libc.__asan_unpoison_memory_region(_ffi.cast("void *", address), size_bytes)


# Asks the kernel to make a page ready for reading, or for writing, which it refuses where that is
# not allowed: four times cheaper than an access of its own that faults.
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23


def _may(access: int, address: int) -> bool:
    page = _ffi.cast("void *", address - address % PAGE_BYTES)
    return bool(_libc.madvise(page, 1, access) == 0)


def _is_protected(begin: int, size_bytes: int, *, writable: bool) -> bool:
    """Whether nobody may touch the bytes on either side of a region, and nobody may write to it
    unless it is writable. A kernel before Linux 5.14 cannot say, and nothing is found."""
    for beside in (begin - 1, begin + size_bytes):
        if _may(_MADV_POPULATE_READ, beside) or _may(_MADV_POPULATE_WRITE, beside):
            return False
    return writable or not _may(_MADV_POPULATE_WRITE, begin)


class _Mapping:
    """`size_bytes` of address space between two inaccessible reservations of `GUARD_BYTES`."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = round_up(size_bytes, PAGE_BYTES)
        self.reserved_bytes = self.size_bytes + 2 * GUARD_BYTES
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        self._start = _mmap(_ffi.NULL, self.reserved_bytes, _PROT_NONE, flags, -1)
        self.address = int(_ffi.cast("uintptr_t", self._start)) + GUARD_BYTES

    def back_with(self, file: int, *, writable: bool) -> None:
        """Maps the whole of a file here."""
        flags = _MAP_SHARED | _MAP_FIXED | _MAP_NORESERVE
        protection = _PROT_READ_WRITE if writable else _PROT_READ
        _mmap(_ffi.cast("void *", self.address), self.size_bytes, protection, flags, file)

    def shut(self, begin: int, size_bytes: int) -> None:
        """From now on nobody may touch these whole pages; begin: offset in the mapping."""
        page = _ffi.cast("void *", self.address + begin)
        if _libc.mprotect(page, size_bytes, _PROT_NONE):
            raise DoesNotFitError(f"no more mappings: {os.strerror(_ffi.errno)}")

    def close(self) -> None:
        _libc.munmap(self._start, self.reserved_bytes)


def _mmap(address: Any, size_bytes: int, protection: int, flags: int, file: int) -> Any:
    got = _libc.mmap(address, size_bytes, protection, flags, file, 0)
    if int(_ffi.cast("intptr_t", got)) == -1:
        raise DoesNotFitError(
            f"no address space for {size_bytes:,} bytes: {os.strerror(_ffi.errno)}"
        )
    return got


class _Pool:
    """A pool that one small buffer at a time lies in.

    address  where the launch sees it
    memory   uint8, the same bytes for the harness
    """

    def __init__(self, size_bytes: int, *, writable: bool) -> None:
        """Raises `DoesNotFitError`, and leaves nothing behind then."""
        self._mapping = _Mapping(size_bytes)
        self.address = self._mapping.address
        self.reserved_bytes = self._mapping.reserved_bytes
        try:
            self._own = self._backed(size_bytes, writable=writable)
        except (OSError, DoesNotFitError) as error:
            self._mapping.close()
            raise DoesNotFitError(f"no memory for a pool: {error}") from None
        self.memory: Bytes = np.frombuffer(self._own, np.uint8)

    def _backed(self, size_bytes: int, *, writable: bool) -> mmap.mmap:
        """Maps a file there; returns the harness's mapping of it."""
        file = os.memfd_create("pagefuzz-pool", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size_bytes)
            self._mapping.back_with(file, writable=writable)
            return mmap.mmap(file, size_bytes)
        finally:
            os.close(file)

    def close(self) -> None:
        self._mapping.close()  # the other mapping goes with its last view


class _SparseRegion:
    """A large buffer's region: a memfd mapped between guards, holes but for its windows.

    base    offset of the buffer's base in the file
    around  the buffer
    closed  holes that nobody may touch, as offsets from the base
    """

    def __init__(self, buffer: PlannedBuffer, expectation: Expectation) -> None:
        """Raises `DoesNotFitError`, and leaves nothing behind then."""
        self.buffer = buffer
        size_bytes = round_up(least_region_bytes(buffer), PAGE_BYTES)
        region = PoolRegion.of(buffer, [size_bytes])
        self.base, self.around = region.base, region.around
        self._windows = Windows(
            buffer,
            expectation,
            begin=-self.base,
            end=size_bytes - self.base,
            granularity=PAGE_BYTES,
        )
        self.closed = _largest(self._windows.holes, MOST_CLOSED)
        try:
            self.mapping = _Mapping(size_bytes)
        except DoesNotFitError as error:
            raise DoesNotFitError(f"{buffer.name}: {error}") from None
        self._file = -1
        try:
            self._file = os.memfd_create(f"pagefuzz-{buffer.name}", os.MFD_CLOEXEC)
            os.ftruncate(self._file, size_bytes)
            self.mapping.back_with(self._file, writable=is_written(buffer))
            for begin, end in self.closed:
                self.mapping.shut(self.base + begin, end - begin)
        except (OSError, DoesNotFitError) as error:
            self.close()
            raise DoesNotFitError(f"{buffer.name}: no sparse memory: {error}") from None

    @property
    def is_protected(self) -> bool:
        """Whether a launch has left protections as they were."""
        address, size_bytes = self.mapping.address, self.mapping.size_bytes
        return _is_protected(address, size_bytes, writable=is_written(self.buffer)) and not any(
            _may(_MADV_POPULATE_READ, address + self.base + begin) for begin, _ in self.closed
        )

    @property
    def allocated_bytes(self) -> int:
        """Of the pages that exist."""
        return os.fstat(self._file).st_blocks * 512

    def fill(self, seed: int, fill: int) -> None:
        # Cutting the file to nothing drops every page; growing it again leaves one hole.
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, self.mapping.size_bytes)
        self._windows.fill(seed, fill)
        for begin, data in self._windows.slices(self._windows.before):
            self._write(begin, data)

    def chunks(self) -> tuple[Chunk, ...]:
        """Windows and pages that changed, by offset."""
        after = np.empty_like(self._windows.before)
        for begin, data in self._windows.slices(after):
            self._read(begin, data)
        found = self._windows.changed(after)
        outside = self._pages_in_memory().without(self._windows.spans)
        for begin, end in outside:
            found.extend(self._strays(begin, end))
        return tuple(sorted(found, key=lambda chunk: chunk.offset_bytes))

    def _pages_in_memory(self) -> IntervalSet:
        """Pages that exist: the windows and what the launch touched."""
        begins: list[int] = []
        ends: list[int] = []
        end = 0
        while True:
            try:
                begin = os.lseek(self._file, end, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                return IntervalSet(begins, ends)
            end = os.lseek(self._file, begin, os.SEEK_HOLE)
            begins.append(begin - self.base)
            ends.append(end - self.base)

    def _strays(self, begin: int, end: int) -> Iterator[Chunk]:
        """Pages outside all windows that hold something now: of holes that are not closed. They did
        not exist; a launch that only read them leaves zeros."""
        step = 2**20
        for position in range(begin, end, step):
            after = np.empty(min(step, end - position), np.uint8)
            self._read(position, after)
            pages = after.reshape(-1, PAGE_BYTES)
            for page_index in np.flatnonzero(pages.any(axis=1)).tolist():
                page = pages[page_index].copy()
                yield Chunk(position + page_index * PAGE_BYTES, np.zeros_like(page), page)

    # One call moves less than 2 GiB, whatever it is asked for: each of these makes as many as it
    # takes.

    def _write(self, begin: int, data: Bytes) -> None:
        at = 0
        while at < data.size:
            at += os.pwrite(self._file, data[at:].data, self.base + begin + at)

    def _read(self, begin: int, out: Bytes) -> None:
        at = 0
        while at < out.size:
            got = os.preadv(self._file, [out[at:].data], self.base + begin + at)
            assert got > 0, "the file is as long as the region"
            at += got

    def close(self) -> None:
        self.mapping.close()
        if self._file >= 0:
            os.close(self._file)


def _largest(intervals: IntervalSet, count: int) -> IntervalSet:
    if len(intervals) <= count:
        return intervals
    kept = np.argsort(intervals.begin - intervals.end, kind="stable")[:count]
    return IntervalSet(intervals.begin[kept], intervals.end[kept])


class HostArena:
    """Memory of the host backend; see `arena.Arena`.

    poisons  tells AddressSanitizer, which must be loaded, that nothing outside the buffers may be
             touched during a launch
    """

    def __init__(self, *, poisons: bool = False) -> None:
        self._poisons = poisons
        self._pools: dict[tuple[int, int, bool], _Pool] = {}
        self._regions: list[tuple[PoolRegion, _Pool]] = []
        self._before: list[Bytes] = []  # of each region
        self._sparse: list[_SparseRegion] = []
        self._poisoned: list[tuple[int, int]] = []  # (address, bytes)
        self._around = Around()
        self._stored: npt.NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def address_bytes(self) -> int:
        return sum(pool.reserved_bytes for pool in self._pools.values()) + sum(
            sparse.mapping.reserved_bytes for sparse in self._sparse
        )

    @property
    def allocated_bytes(self) -> int:
        return sum(pool.memory.size for pool in self._pools.values()) + sum(
            sparse.allocated_bytes for sparse in self._sparse
        )

    def place(self, plan: Plan, expectation: Expectation) -> Mapping[str, int]:
        try:
            return self._placed(plan, expectation)
        except DoesNotFitError:
            # Pools of earlier cases take gigabytes of addresses each, which may be limited.
            self._drop_pools()
            return self._placed(plan, expectation)

    def _placed(self, plan: Plan, expectation: Expectation) -> Mapping[str, int]:
        self._drop_sparse()
        small, large = placed_buffers(plan)
        self._plan, self._expectation = plan, expectation
        # A sanitizer that sees every byte outside says more about it than a guard does.
        regions = [PoolRegion.of(b, POOL_BYTES, guarded=not self._poisons) for b in small]
        self._regions = [(region, self._pool(nth, region)) for nth, region in enumerate(regions)]
        for buffer in large:
            self._sparse.append(_SparseRegion(buffer, expectation))
        around = [region.around for region in regions] + [one.around for one in self._sparse]
        self._poisoned = list(self._outside()) if self._poisons else []
        poisoned = Around(poisoned_bytes=sum(size_bytes for _, size_bytes in self._poisoned))
        self._around = sum(around, start=poisoned)
        addresses = {r.buffer.name: pool.address + r.base for r, pool in self._regions}
        addresses |= {s.buffer.name: s.mapping.address + s.base for s in self._sparse}
        overlaid_addresses(plan, addresses)
        return addresses

    def _pool(self, nth: int, region: PoolRegion) -> _Pool:
        """A pool for the nth small buffer of a case."""
        key = (nth, region.pool_bytes, is_written(region.buffer))
        if key not in self._pools:
            self._pools[key] = _Pool(region.pool_bytes, writable=key[2])
        return self._pools[key]

    def _drop_pools(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools, self._regions = {}, []

    def fill(self, fill: int) -> None:
        seed = self._plan.case.seed
        # Judgements keep what this makes: it is made anew for each launch.
        self._before = [
            region.contents(self._expectation, seed, fill) for region, _ in self._regions
        ]
        for (_, pool), before in zip(self._regions, self._before, strict=True):
            pool.memory[:] = before
        for sparse in self._sparse:
            sparse.fill(seed, fill)
        self.keep()

    def closed(self) -> Mapping[str, IntervalSet]:
        return {sparse.buffer.name: sparse.closed for sparse in self._sparse}

    def mapped(self) -> Mapping[str, tuple[int, int]]:
        found = {region.buffer.name: (region.begin, region.end) for region, _ in self._regions}
        for one in self._sparse:
            found[one.buffer.name] = (-one.base, one.mapping.size_bytes - one.base)
        return found

    def keep(self) -> None:
        for address, size_bytes in self._poisoned:
            _poison(address, size_bytes)

    def store(self, values: npt.NDArray[np.int64]) -> int:
        self._stored = values  # kept alive until the next call
        return int(values.ctypes.data)

    def synchronise(self) -> None:
        """A host launch has ended when it returns. Raises `SpoiledProcessError` if it has changed
        what protects the memory: then nothing that it did elsewhere was seen."""
        if self._poisons:  # whose runtime does not let anybody look there
            return
        changed = [
            region.buffer.name
            for region, pool in self._regions
            if not _is_protected(pool.address, pool.memory.size, writable=is_written(region.buffer))
        ] + [sparse.buffer.name for sparse in self._sparse if not sparse.is_protected]
        if changed:
            raise SpoiledProcessError(
                f"the launch has changed the protection of {changed[0]}, or of the memory "
                "beside it, so that faults there go unseen"
            )

    def collect(self) -> Collected:
        for address, size_bytes in self._poisoned:
            _unpoison(address, size_bytes)
        chunks: dict[str, tuple[Chunk, ...]] = {}
        examined = 0
        for (region, pool), before in zip(self._regions, self._before, strict=True):
            examined += region.pool_bytes
            if found := pool_chunk(region, before, pool.memory.copy()):
                chunks[region.buffer.name] = found
        for sparse in self._sparse:
            examined += sparse.mapping.size_bytes
            if strays := sparse.chunks():
                chunks[sparse.buffer.name] = strays
        return Collected(chunks, examined, self._around)

    def _outside(self) -> Iterator[tuple[int, int]]:
        """(address, size) of every run of memory that belongs to no buffer's extent, but for closed
        holes: a tebibyte of workspace has 128 GiB of shadow bytes, and there a fault says as much.
        """
        none = IntervalSet()
        spans = [(r.buffer, p.address + r.base, r.begin, r.end, none) for r, p in self._regions] + [
            (s.buffer, s.mapping.address + s.base, -s.base, s.mapping.size_bytes - s.base, s.closed)
            for s in self._sparse
        ]
        for buffer, address, begin, end, closed in spans:
            outside = IntervalSet([begin], [end]).without(self._extents(buffer.name, address, end))
            for first, last in outside.without(closed):
                yield address + first, last - first

    def _extents(self, name: str, address: int, end: int) -> IntervalSet:
        """Of the buffer whose base is at `address` and of those that lie over it, from there on."""
        begins, ends = [], []
        for other in self._plan.buffers.values():
            root, at = self._plan.base(other.name)
            if root == name and other.extent_bytes > 0:
                # One shadow byte describes 8 bytes and can only shorten them from the end.
                begins.append(at - (address + at) % 8)
                ends.append(min(at + other.extent_bytes, end))
        return IntervalSet(begins, ends)

    def _drop_sparse(self) -> None:
        for sparse in self._sparse:
            sparse.close()
        self._sparse = []

    def close(self) -> None:
        self._drop_sparse()
        self._drop_pools()
