"""Physical memory and address space of a GPU, within a limit and used again.

Physical memory comes in *handles*; a *view* is address space that handles are mapped into. One
handle may be mapped into many views, and many times into one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagefuzz.harness.memory.arena import DoesNotFitError, round_up
from pagefuzz.harness.memory.driver import GRANULE_BYTES, Driver

#: Left to the subject: local memory, printf, modules.
RESERVE_BYTES = 256 * 2**20

#: Most physical memory that is kept while nothing uses it: other workers need some too.
KEPT_BYTES = 512 * 2**20


def cut(size_bytes: int, sizes: Sequence[int]) -> list[int]:
    """`size_bytes` as a sum of sizes, larger ones first. `sizes` descends to a divisor of it."""
    parts: list[int] = []
    for size in sizes:
        count, size_bytes = divmod(size_bytes, size)
        parts += [size] * count
    assert not size_bytes, "the smallest size divides every size"
    return parts


class DeviceMemory:
    """What one worker holds of a GPU.

    allocated_bytes  physical memory, that kept for later included
    address_bytes    address space, guards included
    reclaim          called when memory is short, before anything is refused: gives back what it can
    """

    def __init__(self, driver: Driver, limit_bytes: int | None = None) -> None:
        """limit_bytes: of physical memory; None is all that the device has free."""
        self.driver, self.limit_bytes = driver, limit_bytes
        self.allocated_bytes = self.address_bytes = 0
        self.reclaim: Callable[[], None] = lambda: None
        self._unused: dict[int, list[int]] = {}  # size -> handles
        self._unused_bytes = 0

    def take(self, sizes: Sequence[int]) -> list[int]:
        """Handles of these sizes, contents undefined; all or none. Raises `DoesNotFitError`."""
        handles: list[int] = []
        try:
            self._make_room(self._missing_bytes(sizes), sum(sizes))
            for size in sizes:
                handles.append(self._take(size))
        except DoesNotFitError:
            self.give(handles, sizes[: len(handles)])
            raise
        return handles

    def _missing_bytes(self, sizes: Sequence[int]) -> int:
        """Of these sizes, what no unused handle serves."""
        return sum(
            size * max(0, sizes.count(size) - len(self._unused.get(size, ())))
            for size in set(sizes)
        )

    def _take(self, size_bytes: int) -> int:
        if unused := self._unused.get(size_bytes):
            self._unused_bytes -= size_bytes
            return unused.pop()
        handle = self.driver.create(size_bytes)
        self.allocated_bytes += size_bytes
        return handle

    def give(self, handles: Sequence[int], sizes: Sequence[int]) -> None:
        """Takes handles back that are mapped nowhere."""
        for handle, size in zip(handles, sizes, strict=True):
            if self._unused_bytes + size <= KEPT_BYTES:
                self._unused.setdefault(size, []).append(handle)
                self._unused_bytes += size
            else:
                self._release(handle, size)

    def _release(self, handle: int, size_bytes: int) -> None:
        self.driver.release(handle)
        self.allocated_bytes -= size_bytes

    def release_unused(self) -> None:
        for size, handles in self._unused.items():
            for handle in handles:
                self._release(handle, size)
        self._unused, self._unused_bytes = {}, 0

    def allocate(self, size_bytes: int) -> int:
        """Plain memory, which no view needs. Raises `DoesNotFitError`."""
        self._make_room(size_bytes, size_bytes)
        address = self.driver.allocate(size_bytes)
        self.allocated_bytes += size_bytes
        return address

    def free(self, address: int, size_bytes: int) -> None:
        self.driver.free(address)
        self.allocated_bytes -= size_bytes

    def _make_room(self, new_bytes: int, wanted_bytes: int) -> None:
        """Sees to it that `new_bytes` more can be allocated, for `wanted_bytes` in all."""
        if not new_bytes or self._fits(new_bytes):
            return
        self.reclaim()
        self.release_unused()
        if self._fits(wanted_bytes):
            return
        # No figure of what is free: runs count their reasons, and it is never the same.
        said = f"needs {wanted_bytes:,} bytes of device memory"
        if self._within_limit(wanted_bytes):
            raise DoesNotFitError(f"{said}, fewer are free")
        raise DoesNotFitError(f"{said}, the limit of {self.limit_bytes:,} leaves fewer")

    def _within_limit(self, new_bytes: int) -> bool:
        return self.limit_bytes is None or self.allocated_bytes + new_bytes <= self.limit_bytes

    def _fits(self, new_bytes: int) -> bool:
        if not self._within_limit(new_bytes):
            return False
        return self.driver.free_bytes() >= new_bytes + RESERVE_BYTES

    def reserve(self, size_bytes: int) -> int:
        """Raises `DoesNotFitError`."""
        address = self.driver.reserve(size_bytes)
        self.address_bytes += size_bytes
        return address

    def unreserve(self, address: int, size_bytes: int) -> None:
        self.driver.unreserve(address, size_bytes)
        self.address_bytes -= size_bytes


class View:
    """Address space that handles are mapped into, one behind another or with gaps, which nobody can
    touch.

    address     of the first byte that can be mapped
    size_bytes  of handles and gaps so far
    """

    def __init__(self, memory: DeviceMemory, size_bytes: int, *, guard_bytes: int = 0) -> None:
        """Room for `size_bytes` between guards that nobody can touch. Raises `DoesNotFitError`."""
        self._memory, self._room_bytes = memory, size_bytes
        self._reserved_bytes = size_bytes + 2 * guard_bytes
        self._start = memory.reserve(self._reserved_bytes)
        self.address = self._start + guard_bytes
        self.size_bytes = 0
        self._runs: list[tuple[int, int]] = []  # (begin, end) of what is mapped without a gap

    def skip(self, size_bytes: int) -> None:
        """Leaves a gap."""
        self.size_bytes += size_bytes

    def append(self, handle: int, size_bytes: int) -> int:
        """Maps all of a handle; `allow` opens it. Returns its address. Raises `DoesNotFitError`."""
        begin, end = self.size_bytes, self.size_bytes + size_bytes
        if end > self._room_bytes:
            raise DoesNotFitError(f"a view of {self._room_bytes:,} bytes has no room left")
        self._memory.driver.map(self.address + begin, size_bytes, handle)
        self.size_bytes = end
        if self._runs and self._runs[-1][1] == begin:
            begin, _ = self._runs.pop()
        self._runs.append((begin, end))
        return self.address + end - size_bytes

    def allow(self, *, writable: bool) -> None:
        """Opens everything that is mapped: cheaper than one by one. Raises `DoesNotFitError`."""
        for begin, end in self._runs:
            self._memory.driver.allow(self.address + begin, end - begin, writable=writable)

    def append_open(self, handle: int, size_bytes: int) -> int:
        """Like `append`, and opens it for reading and writing; nothing is left mapped if it
        fails."""
        address = self.append(handle, size_bytes)
        try:
            self._memory.driver.allow(address, size_bytes, writable=True)
        except DoesNotFitError:
            self._memory.driver.unmap(address, size_bytes)
            self.size_bytes -= size_bytes
            begin, _ = self._runs.pop()
            if begin < self.size_bytes:
                self._runs.append((begin, self.size_bytes))
            raise
        return address

    def close(self) -> None:
        """Handles outlive their mappings."""
        for begin, end in self._runs:
            self._memory.driver.unmap(self.address + begin, end - begin)
        self._memory.unreserve(self._start, self._reserved_bytes)


class Allocation:
    """Plain memory that grows: what it held is lost then."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.address, self.size_bytes = 0, 0

    def at_least(self, size_bytes: int) -> int:
        """Its address. Raises `DoesNotFitError`."""
        if size_bytes > self.size_bytes:
            self.close()
            wanted = round_up(max(size_bytes, GRANULE_BYTES), GRANULE_BYTES)
            self.address, self.size_bytes = self._memory.allocate(wanted), wanted
        return self.address

    def close(self) -> None:
        if self.address:
            self._memory.free(self.address, self.size_bytes)
            self.address, self.size_bytes = 0, 0
