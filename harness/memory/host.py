"""Memory of the host backend.

Every region lies between reservations that no process may touch, wide enough that an offset that
wrapped at 2^32 elements of 8 bytes faults there instead of landing in the worker's own heap.
Regions above `SLAB_REGION_BYTES` are sparse: pages of a memfd that nobody touched do not exist, so
that a buffer of a tebibyte costs a few system calls, and the kernel's own map of the file says
which pages a launch touched.
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
    RED_ZONE_BYTES,
    Collected,
    DoesNotFitError,
    SlabRegion,
    aligned_base,
    contents,
    overlaid_addresses,
    placed_buffers,
    round_up,
    slab_chunks,
    slab_regions,
)
from pagefuzz.harness.memory.windows import Windows
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, Plan, PlannedBuffer
from pagefuzz.oracles.observation import Chunk

PAGE_BYTES = mmap.PAGESIZE
GUARD_BYTES = 34 * 2**30

_PROT_NONE, _PROT_READ_WRITE = 0, 1 | 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000
_SLAB_BYTES = 64 * 2**20  # of address space; pages are only there once touched

_ffi = cffi.FFI()
_ffi.cdef(
    """
    void *mmap(void *address, size_t size, int protection, int flags, int file, int64_t offset);
    int munmap(void *address, size_t size);
    int mprotect(void *address, size_t size, int protection);
    void __asan_poison_memory_region(const void *address, size_t size);
    void __asan_unpoison_memory_region(const void *address, size_t size);
    """
)
_libc: Any = _ffi.dlopen(None)


def _poison(address: int, size_bytes: int) -> None:
    _libc.__asan_poison_memory_region(_ffi.cast("void *", address), size_bytes)


def _unpoison(address: int, size_bytes: int) -> None:
    _libc.__asan_unpoison_memory_region(_ffi.cast("void *", address), size_bytes)


class _Mapping:
    """`size_bytes` of address space between two inaccessible reservations of `GUARD_BYTES`."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = round_up(size_bytes, PAGE_BYTES)
        self._reserved_bytes = self.size_bytes + 2 * GUARD_BYTES
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        self._start = _mmap(_ffi.NULL, self._reserved_bytes, _PROT_NONE, flags, -1)
        self.address = int(_ffi.cast("uintptr_t", self._start)) + GUARD_BYTES

    def back_with(self, file: int) -> None:
        """Maps the whole of a file here."""
        flags = _MAP_SHARED | _MAP_FIXED | _MAP_NORESERVE
        _mmap(_ffi.cast("void *", self.address), self.size_bytes, _PROT_READ_WRITE, flags, file)

    def protect(self, begin: int, end: int, protection: int) -> None:
        """Changes what [begin, end), page multiples from `address`, allows."""
        if end > begin:
            start = _ffi.cast("void *", self.address + begin)
            if _libc.mprotect(start, end - begin, protection):
                raise DoesNotFitError(f"mprotect: {os.strerror(_ffi.errno)}")

    def view(self) -> Bytes:
        pointer = _ffi.cast("uint8_t *", self.address)
        return np.frombuffer(_ffi.buffer(pointer, self.size_bytes), np.uint8)

    def close(self) -> None:
        _libc.munmap(self._start, self._reserved_bytes)


def _mmap(address: Any, size_bytes: int, protection: int, flags: int, file: int) -> Any:
    got = _libc.mmap(address, size_bytes, protection, flags, file, 0)
    if int(_ffi.cast("intptr_t", got)) == -1:
        raise DoesNotFitError(
            f"no address space for {size_bytes:,} bytes: {os.strerror(_ffi.errno)}"
        )
    return got


class _SparseRegion:
    """A large buffer's region: a memfd mapped between guards, holes but for its windows.

    base  offset of the buffer's base in the file
    """

    def __init__(self, buffer: PlannedBuffer, expectation: Expectation) -> None:
        """Raises `DoesNotFitError`, and leaves nothing behind then."""
        self.buffer = buffer
        self.base = aligned_base(RED_ZONE_BYTES + buffer.placement.before_bytes, buffer)
        size_bytes = round_up(self.base + buffer.memory_bytes + RED_ZONE_BYTES, PAGE_BYTES)
        self._windows = Windows(
            buffer,
            expectation,
            begin=-self.base,
            end=size_bytes - self.base,
            granularity=PAGE_BYTES,
        )
        try:
            self.mapping = _Mapping(size_bytes)
        except DoesNotFitError as error:
            raise DoesNotFitError(f"{buffer.name}: {error}") from None
        self._file = -1
        try:
            self._file = os.memfd_create(f"pagefuzz-{buffer.name}", os.MFD_CLOEXEC)
            os.ftruncate(self._file, size_bytes)
            self.mapping.back_with(self._file)
        except (OSError, DoesNotFitError) as error:
            self.close()
            raise DoesNotFitError(f"{buffer.name}: no sparse memory: {error}") from None

    def fill(self, seed: int, fill: int) -> None:
        # Cutting the file to nothing drops every page; growing it again leaves one hole.
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, self.mapping.size_bytes)
        self._windows.fill(seed, fill)
        for begin, data in self._windows.slices(self._windows.before):
            os.pwrite(self._file, data.data, self.base + begin)

    def chunks(self) -> tuple[Chunk, ...]:
        """Windows and pages that changed, by offset."""
        after = np.empty_like(self._windows.before)
        for begin, data in self._windows.slices(after):
            self._read(begin, data)
        found = self._windows.changed(after)
        outside = self._pages_in_memory().without(self._windows.spans)
        for begin, end in zip(outside.begin.tolist(), outside.end.tolist(), strict=True):
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
        """Pages outside all windows that hold something now. They held zeros, or did not exist;
        a launch that only read them leaves zeros."""
        step = 2**20
        for position in range(begin, end, step):
            after = np.empty(min(step, end - position), np.uint8)
            self._read(position, after)
            pages = after.reshape(-1, PAGE_BYTES)
            for page_index in np.flatnonzero(pages.any(axis=1)).tolist():
                page = pages[page_index].copy()
                yield Chunk(position + page_index * PAGE_BYTES, np.zeros_like(page), page)

    def _read(self, begin: int, out: Bytes) -> None:
        got = os.preadv(self._file, [out.data], self.base + begin)
        assert got == out.size, "the file is as long as the region"

    def close(self) -> None:
        self.mapping.close()
        if self._file >= 0:
            os.close(self._file)


class HostArena:
    """Memory of the host backend; see `arena.Arena`.

    poisons  tells AddressSanitizer, which must be loaded, that nothing outside the buffers may be
             touched during a launch
    """

    def __init__(self, *, poisons: bool = False) -> None:
        self._poisons = poisons
        self._slab = _Mapping(_SLAB_BYTES)
        self._memory = self._slab.view()
        self._open_bytes = 0
        self._regions: list[SlabRegion] = []
        self._sparse: list[_SparseRegion] = []
        self._before: Bytes = np.empty(0, np.uint8)
        self._stored: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def place(self, plan: Plan, expectation: Expectation) -> Mapping[str, int]:
        self._drop_sparse()
        small, large = placed_buffers(plan)
        self._plan, self._expectation = plan, expectation
        self._regions = slab_regions(small, PAGE_BYTES)
        used = self._regions[-1].slice.stop if self._regions else 0
        self._open(used)
        self._before = np.empty(used, np.uint8)
        for buffer in large:
            self._sparse.append(_SparseRegion(buffer, expectation))
        addresses = {r.buffer.name: self._slab.address + r.base for r in self._regions}
        addresses |= {s.buffer.name: s.mapping.address + s.base for s in self._sparse}
        overlaid_addresses(plan, addresses)
        return addresses

    def _open(self, used: int) -> None:
        """Makes exactly the first `used` bytes of the slab accessible."""
        if used > self._slab.size_bytes:
            raise DoesNotFitError(f"small buffers need {used:,} bytes together")
        self._slab.protect(self._open_bytes, used, _PROT_READ_WRITE)
        self._slab.protect(used, self._open_bytes, _PROT_NONE)
        self._open_bytes = used

    def fill(self, fill: int) -> None:
        seed = self._plan.case.seed
        for region in self._regions:
            self._before[region.slice] = contents(
                region.buffer, self._expectation, seed, fill, region.begin, region.end
            )
        self._memory[: self._before.size] = self._before
        for sparse in self._sparse:
            sparse.fill(seed, fill)
        if self._poisons:
            for address, size_bytes in self._outside():
                _poison(address, size_bytes)

    def store(self, values: npt.NDArray[np.int64]) -> int:
        self._stored = values  # kept alive until the next call
        return int(values.ctypes.data)

    def synchronise(self) -> None:
        """A host launch has ended when it returns."""

    def collect(self) -> Collected:
        if self._poisons:
            for address, size_bytes in self._outside():
                _unpoison(address, size_bytes)
        after = self._memory[: self._before.size].copy()
        # The next fill writes over `_before`; judgements keep views of this launch's.
        chunks = slab_chunks(self._regions, self._before, after)
        self._before = np.empty_like(self._before)
        examined = after.size
        for sparse in self._sparse:
            examined += sparse.mapping.size_bytes
            if found := sparse.chunks():
                chunks[sparse.buffer.name] = found
        return Collected(chunks, examined)

    def _outside(self) -> Iterator[tuple[int, int]]:
        """(address, size) of every run of memory that belongs to no buffer's extent."""
        spans = [(r.buffer, self._slab.address + r.base, r.begin, r.end) for r in self._regions] + [
            (s.buffer, s.mapping.address + s.base, -s.base, s.mapping.size_bytes - s.base)
            for s in self._sparse
        ]
        overlaid = any(b.placement.over is not None for b in self._plan.buffers.values())
        for buffer, address, begin, end in () if overlaid else spans:
            # One shadow byte describes 8 bytes and can only shorten them from the end.
            stop = round_up(address + max(buffer.extent_bytes, 0), 8)
            yield address + begin, -begin - address % 8
            if stop < address + end:
                yield stop, address + end - stop

    def _drop_sparse(self) -> None:
        for sparse in self._sparse:
            sparse.close()
        self._sparse = []

    def close(self) -> None:
        self._drop_sparse()
        self._memory = np.empty(0, np.uint8)
        self._slab.close()
