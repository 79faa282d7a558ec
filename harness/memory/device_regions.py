"""Where regions lie on a GPU: small ones in pools, large ones in layouts.

The launch sees each of them between guards, read-only unless it may write there. The harness fills
and compares the same memory through a view of its own, in which pieces of one kind lie side by
side, so that one search covers them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagefuzz.harness.memory.arena import BACKGROUND, GUARD_BYTES, DoesNotFitError
from pagefuzz.harness.memory.device_memory import DeviceMemory, View, cut
from pagefuzz.harness.memory.driver import GRANULE_BYTES
from pagefuzz.oracles.intervals import IntervalSet, Offsets

_MEBIBYTE = 2**20
_OWN_SIZES = tuple(n * _MEBIBYTE for n in (64, 16, 4, 2))

#: Each mapping costs about 35 us, whatever its size, and few sizes cost little memory.
_PIECE_SIZES = tuple(n * _MEBIBYTE for n in (256, 64, 16, 4, 2))

#: The largest piece serves only regions above this size.
_LARGEST_PIECE_ABOVE = 64 * 2**30

_MOST_POOLS = 512


@dataclass
class Pool:
    """A granule that one small buffer at a time lies in.

    address  where the launch sees it, between guards
    own      where the harness does
    used     (begin, end) in it: what may hold anything; the rest is `BACKGROUND`
    """

    address: int
    own: int
    used: tuple[int, int] = (0, 0)


class Pools:
    """All pools, made as they are asked for. In the harness's view they lie side by side.

    address, size_bytes  of that view, as far as there are pools
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._handles: list[int] = []
        self._launch_views: list[View] = []
        self._own: View | None = None

    @property
    def address(self) -> int:
        return self._own.address if self._own else 0

    @property
    def size_bytes(self) -> int:
        return len(self._handles) * GRANULE_BYTES

    def pool(self, nth: int, *, writable: bool) -> Pool:
        """For the nth small buffer of a case. Raises `DoesNotFitError`."""
        key = (nth, writable)
        if key not in self._pools:
            self._pools[key] = self._made(writable=writable)
        return self._pools[key]

    def _made(self, *, writable: bool) -> Pool:
        if self._own is None:
            self._own = View(self._memory, _MOST_POOLS * GRANULE_BYTES)
        (handle,) = self._memory.take([GRANULE_BYTES])
        launch: View | None = None
        try:
            launch = View(self._memory, GRANULE_BYTES, guard_bytes=GUARD_BYTES)
            launch.append(handle, GRANULE_BYTES)
            launch.allow(writable=writable)
            own = self._own.append_open(handle, GRANULE_BYTES)
        except DoesNotFitError:
            if launch is not None:
                launch.close()
            self._memory.give([handle], [GRANULE_BYTES])
            raise
        self._handles.append(handle)
        self._launch_views.append(launch)
        self._memory.driver.set_bytes(own, BACKGROUND, GRANULE_BYTES)
        return Pool(launch.address, own)

    def reset(self) -> None:
        """All of them hold `BACKGROUND` everywhere again."""
        self._memory.driver.set_bytes(self.address, BACKGROUND, self.size_bytes)
        for pool in self._pools.values():
            pool.used = (0, 0)

    def close(self) -> None:
        for view in [*self._launch_views, *([self._own] if self._own else [])]:
            view.close()
        self._memory.give(self._handles, [GRANULE_BYTES] * len(self._handles))
        self._pools, self._handles, self._launch_views, self._own = {}, [], [], None


class Pieces:
    """Zeros, one piece of each size, that sparse regions are mapped to where they hold no windows.

    A store there lands in a piece, and thereby at every address that is mapped to it.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        """Raises `DoesNotFitError`."""
        self._memory = memory
        self._view = View(memory, sum(_PIECE_SIZES))
        self._handles: dict[int, int] = {}  # size -> handle
        self.addresses: dict[int, int] = {}  # size -> where the harness sees that piece

    def handle(self, size_bytes: int) -> int:
        """Raises `DoesNotFitError`."""
        if size_bytes not in self._handles:
            (handle,) = self._memory.take([size_bytes])
            try:
                address = self._view.append_open(handle, size_bytes)
            except DoesNotFitError:
                self._memory.give([handle], [size_bytes])
                raise
            self._handles[size_bytes] = handle
            self._memory.driver.set_bytes(address, 0, size_bytes)
            self.addresses[size_bytes] = address
        return self._handles[size_bytes]

    def reset(self) -> None:
        """All of them hold zeros again."""
        for size_bytes, address in self.addresses.items():
            self._memory.driver.set_bytes(address, 0, size_bytes)

    def close(self) -> None:
        self._view.close()
        self._memory.give(list(self._handles.values()), list(self._handles))
        self._handles, self.addresses = {}, {}


@dataclass(frozen=True)
class LayoutKey:
    """What a layout can serve again.

    size_bytes  of the region, a multiple of the granule
    own         (begin, end) in the region, ascending: where it has memory of its own
    writable    by the launch
    pieces      number of the set of pieces behind the rest
    """

    size_bytes: int
    own: tuple[tuple[int, int], ...]
    writable: bool
    pieces: int

    @classmethod
    def whole(cls, size_bytes: int, *, writable: bool, pieces: int) -> LayoutKey:
        """All of it is memory of its own."""
        return cls(size_bytes, ((0, size_bytes),), writable, pieces)

    @classmethod
    def sparse(
        cls, size_bytes: int, held: IntervalSet, *, writable: bool, pieces: int
    ) -> LayoutKey:
        """The granules that hold something have memory of their own. `held`: offsets in it."""
        first = held.begin - held.begin % GRANULE_BYTES
        last = held.end + -held.end % GRANULE_BYTES
        own = IntervalSet(first, last)
        runs = tuple(zip(own.begin.tolist(), own.end.tolist(), strict=True))
        return cls(size_bytes, runs, writable, pieces)


class Layout:
    """A large region, mapped.

    address      where the launch sees it, between guards
    own_address  where the harness sees the memory of its own, side by side
    own_bytes    of that
    pieces       what the rest is mapped to
    first_uses   size of a piece -> the lowest offset in the region that is mapped to it
    """

    def __init__(self, memory: DeviceMemory, key: LayoutKey, pieces: Pieces) -> None:
        """Raises `DoesNotFitError`, and leaves nothing behind then."""
        assert key.own, "both ends of a buffer have windows"
        self._memory, self.key, self.pieces = memory, key, pieces
        self._begins = np.array([begin for begin, _ in key.own], np.int64)
        sizes = np.array([end - begin for begin, end in key.own], np.int64)
        self._own_begins = np.cumsum(sizes) - sizes  # of each run, in the harness's view
        self.own_bytes = int(sizes.sum())
        self._sizes = [part for size in sizes.tolist() for part in cut(size, _OWN_SIZES)]
        self._handles = memory.take(self._sizes)
        self.first_uses: dict[int, int] = {}
        self._views: list[View] = []
        try:
            launch = View(memory, key.size_bytes, guard_bytes=GUARD_BYTES)
            self._views.append(launch)
            own = View(memory, self.own_bytes)
            self._views.append(own)
            self._map(launch, own)
        except DoesNotFitError:
            self.close()
            raise
        self.address, self.own_address = launch.address, own.address

    def _map(self, launch: View, own: View) -> None:
        size_bytes = self.key.size_bytes
        piece_sizes = _PIECE_SIZES[0 if size_bytes > _LARGEST_PIECE_ABOVE else 1 :]
        parts = iter(zip(self._handles, self._sizes, strict=True))
        for begin, end in (*self.key.own, (size_bytes, size_bytes)):
            for size in cut(begin - launch.mapped_bytes, piece_sizes):
                self.first_uses.setdefault(size, launch.mapped_bytes)
                launch.append(self.pieces.handle(size), size)
            while launch.mapped_bytes < end:
                handle, size = next(parts)
                launch.append(handle, size)
                own.append(handle, size)
        launch.allow(writable=self.key.writable)
        own.allow(writable=True)

    @property
    def is_whole(self) -> bool:
        return self.own_bytes == self.key.size_bytes

    def own_at(self, offset: int) -> int:
        """Where the harness sees the byte at an offset in the region that has its own memory."""
        run = int(np.searchsorted(self._begins, offset, side="right")) - 1
        return self.own_address + int(self._own_begins[run] + offset - self._begins[run])

    def in_region(self, own_offsets: Offsets) -> Offsets:
        """int64 [n]: offsets in the region of bytes at offsets in the harness's view."""
        run = np.searchsorted(self._own_begins, own_offsets, side="right") - 1
        return self._begins[run] + own_offsets - self._own_begins[run]

    def close(self) -> None:
        """No launch that uses it may be under way."""
        for view in self._views:
            view.close()
        self._memory.give(self._handles, self._sizes)
        self._views, self._handles, self._sizes = [], [], []
