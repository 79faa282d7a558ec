"""The driver's memory functions over mappings of this process.

Handles are memfds: memory is really aliased, guards and read-only mappings really fault, and a
tebibyte costs nothing. What the driver would refuse is an assertion here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagefuzz.harness.memory.arena import DeviceFaultError, DoesNotFitError
from pagefuzz.harness.memory.driver import GRANULE_BYTES

_NONE, _READ, _READ_WRITE = 0, 1, 1 | 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_REMOVE = 9  # MADV_REMOVE: the pages of a shared mapping become holes
_RESERVATION = _PRIVATE | _ANONYMOUS | _NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = _libc.madvise.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
]
_libc.read.argtypes = _libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]


def can_read(address: int) -> bool:
    """Whether the byte there can be read: the kernel says so where an access would be fatal."""
    return _transfer(_libc.write, 1, address)


def can_write(address: int) -> bool:
    """Whether the byte there can be written; it keeps its value."""
    if not can_read(address):
        return False
    return _transfer(_libc.read, 0, address, ctypes.string_at(address, 1))


def _transfer(call: Any, end: int, address: int, data: bytes = b"") -> bool:
    ends = os.pipe()
    try:
        if data:
            os.write(ends[1], data)
        return bool(call(ends[end], address, 1) == 1)
    finally:
        for file in ends:
            os.close(file)


@dataclass
class _Handle:
    """mappings  how often it is mapped; `is_held` until it is released."""

    file: int
    size_bytes: int
    mappings: int = 0
    is_held: bool = True


class FakeDriver:
    """`created` and `mapped` count calls; `fault` is what the next synchronise finds."""

    def __init__(self, memory_bytes: int = 2**31) -> None:
        self.memory_bytes = memory_bytes
        self.created = self.mapped = 0
        self.fault = ""
        self.reservations: dict[int, int] = {}  # address -> size
        self.mappings: dict[int, _Handle] = {}  # address -> what lies there
        self.allocations: dict[int, Any] = {}
        self._handles: dict[int, _Handle] = {}

    # ---- plain memory ----

    def allocate(self, size_bytes: int) -> int:
        if size_bytes > self.free_bytes():
            raise DoesNotFitError(f"no {size_bytes:,} bytes of device memory are free")
        memory = mmap.mmap(-1, size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.allocations[address] = memory
        return address

    def free(self, pointer: int) -> None:
        del self.allocations[pointer]

    def free_bytes(self) -> int:
        physical = sum(h.size_bytes for h in self._handles.values())
        return self.memory_bytes - physical - sum(map(len, self.allocations.values()))

    def copy_in(self, target: int, source: Any) -> None:
        ctypes.memmove(target, source.ctypes.data, source.nbytes)

    def copy_out(self, target: Any, source: int) -> None:
        ctypes.memmove(target.ctypes.data, source, target.nbytes)

    def set_bytes(self, target: int, value: int, size_bytes: int) -> None:
        if value == 0 and target % mmap.PAGESIZE == size_bytes % mmap.PAGESIZE == 0:
            assert _libc.madvise(target, size_bytes, _REMOVE) == 0
        else:
            ctypes.memset(target, value, size_bytes)

    def synchronise(self) -> None:
        if self.fault:
            raise DeviceFaultError(self.fault, "cuCtxSynchronize says so")

    # ---- virtual memory ----

    def reserve(self, size_bytes: int) -> int:
        """At a multiple of the granule."""
        assert size_bytes > 0
        assert size_bytes % GRANULE_BYTES == 0
        room = size_bytes + GRANULE_BYTES
        start = _libc.mmap(None, room, _NONE, _RESERVATION, -1, 0)
        if start == ctypes.c_void_p(-1).value:
            raise DoesNotFitError(f"no device address space for {size_bytes:,} bytes")
        address = -(-start // GRANULE_BYTES) * GRANULE_BYTES
        if address > start:
            _libc.munmap(start, address - start)
        if address - start < GRANULE_BYTES:
            _libc.munmap(address + size_bytes, GRANULE_BYTES - (address - start))
        self.reservations[address] = size_bytes
        return address

    def unreserve(self, address: int, size_bytes: int) -> None:
        assert self.reservations.pop(address) == size_bytes
        assert not self._inside(address, size_bytes), "something is still mapped there"
        _libc.munmap(address, size_bytes)

    def create(self, size_bytes: int) -> int:
        assert size_bytes > 0
        assert size_bytes % GRANULE_BYTES == 0
        if size_bytes > self.free_bytes():
            raise DoesNotFitError(f"no {size_bytes:,} bytes of device memory are free")
        file = os.memfd_create("fake-device-memory", os.MFD_CLOEXEC)
        os.ftruncate(file, size_bytes)
        # Contents of new memory are undefined.
        for begin in (0, size_bytes // 2, size_bytes - 8):
            os.pwrite(file, b"leftover", begin)
        self.created += 1
        self._handles[self.created] = _Handle(file, size_bytes)
        return self.created

    def release(self, handle: int) -> None:
        assert self._handles[handle].is_held
        self._handles[handle].is_held = False
        self._forget_unused()

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        held = self._handles[handle]
        assert size_bytes == held.size_bytes
        assert any(
            b <= address and address + size_bytes <= b + n for b, n in self.reservations.items()
        )
        assert address not in self.mappings
        self._mmap(address, size_bytes, _SHARED | _FIXED | _NORESERVE, held.file)
        self.mappings[address] = held
        held.mappings += 1
        self.mapped += 1

    def unmap(self, address: int, size_bytes: int) -> None:
        for at in self._inside(address, size_bytes, whole=True):
            self.mappings.pop(at).mappings -= 1
        self._mmap(address, size_bytes, _RESERVATION | _FIXED, -1)
        self._forget_unused()

    def allow(self, address: int, size_bytes: int, *, writable: bool) -> None:
        self._inside(address, size_bytes, whole=True)
        protection = _READ_WRITE if writable else _READ
        assert _libc.mprotect(address, size_bytes, protection) == 0

    def _mmap(self, address: int, size_bytes: int, flags: int, file: int) -> None:
        assert _libc.mmap(address, size_bytes, _NONE, flags, file, 0) == address

    def _inside(self, address: int, size_bytes: int, *, whole: bool = False) -> list[int]:
        """Mappings that begin there; if `whole`, they must fill it without a gap."""
        found = sorted(at for at in self.mappings if address <= at < address + size_bytes)
        end = address
        for at in found if whole else ():
            assert at == end, "part of the range is not mapped"
            end = at + self.mappings[at].size_bytes
        assert not whole or end == address + size_bytes
        return found

    def _forget_unused(self) -> None:
        for number, handle in list(self._handles.items()):
            if not handle.is_held and not handle.mappings:
                os.close(handle.file)
                del self._handles[number]

    # ---- times ----

    def event(self) -> list[float]:
        return []

    def record(self, event: list[float]) -> None:
        event[:] = [time.perf_counter()]

    def elapsed_us(self, start: list[float], end: list[float]) -> float:
        return (end[0] - start[0]) * 1e6

    def forget_event(self, event: list[float]) -> None:
        event.clear()

    def close(self) -> None:
        """Whatever a test left."""
        for address, size_bytes in self.reservations.items():
            _libc.munmap(address, size_bytes)
        for handle in self._handles.values():
            os.close(handle.file)

    # ---- pf_scan ----

    def scan(self, data: int, size_bytes: int, chunk_bytes: int, value: int, flags: int) -> None:
        """Looks at the pages that exist only: the others hold zeros."""
        differs = np.full(-(-size_bytes // chunk_bytes), value != 0)
        at = data
        while at < data + size_bytes:
            handle = self.mappings[at]
            for begin, end in _pages_in_memory(handle.file):
                page = np.frombuffer(os.pread(handle.file, end - begin, begin), np.uint8)
                first = at - data + begin
                if value:
                    differs[first // chunk_bytes : -(-(first + page.size) // chunk_bytes)] = False
                changed = (np.flatnonzero(page != value) + first) // chunk_bytes
                differs[changed] = True
            at += handle.size_bytes
        assert at == data + size_bytes, "it reads what is not mapped"
        ctypes.memmove(flags, differs.view(np.uint8).ctypes.data, differs.size)


def _pages_in_memory(file: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    end = 0
    while True:
        try:
            begin = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return found
        end = os.lseek(file, begin, os.SEEK_HOLE)
        found.append((begin, end))
