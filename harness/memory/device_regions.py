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

_MOST_POOLS = 512

#: What a pool holds outside the region of its buffer, where a launch has no reason to come.
POOL_BACKGROUND = BACKGROUND[0]


@dataclass
class Pool:
    """A granule that one small buffer at a time lies in.

    address  where the launch sees it, between guards
    own      where the harness does
    used     (begin, end) in it: what may hold anything; the rest is `POOL_BACKGROUND`
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
        self._memory.driver.set_bytes(own, POOL_BACKGROUND, GRANULE_BYTES)
        return Pool(launch.address, own)

    def reset(self) -> None:
        """All of them hold `POOL_BACKGROUND` everywhere again."""
        self._memory.driver.set_bytes(self.address, POOL_BACKGROUND, self.size_bytes)
        for pool in self._pools.values():
            pool.used = (0, 0)

    def close(self) -> None:
        for view in [*self._launch_views, *([self._own] if self._own else [])]:
            view.close()
        self._memory.give(self._handles, [GRANULE_BYTES] * len(self._handles))
        self._pools, self._handles, self._launch_views, self._own = {}, [], [], None


@dataclass(frozen=True)
class LayoutKey:
    """What a layout can serve again.

    size_bytes  of the region, a multiple of the granule
    own         (begin, end) in the region, ascending: its memory; nobody can touch the rest
    writable    by the launch
    """

    size_bytes: int
    own: tuple[tuple[int, int], ...]
    writable: bool

    @classmethod
    def whole(cls, size_bytes: int, *, writable: bool) -> LayoutKey:
        """All of it is memory."""
        return cls(size_bytes, ((0, size_bytes),), writable)

    @classmethod
    def sparse(cls, size_bytes: int, held: IntervalSet, *, writable: bool) -> LayoutKey:
        """The granules that hold something are memory. `held`: offsets in it."""
        first = held.begin - held.begin % GRANULE_BYTES
        last = held.end + -held.end % GRANULE_BYTES
        own = IntervalSet(first, last)
        runs = tuple(own)
        return cls(size_bytes, runs, writable)


class Layout:
    """A large region, mapped.

    address      where the launch sees it, between guards
    own_address  where the harness sees its memory, side by side
    own_bytes    of that
    """

    def __init__(self, memory: DeviceMemory, key: LayoutKey) -> None:
        """Raises `DoesNotFitError`, and leaves nothing behind then."""
        assert key.own, "both ends of a buffer have windows"
        self._memory, self.key = memory, key
        self._begins = np.array([begin for begin, _ in key.own], np.int64)
        sizes = np.array([end - begin for begin, end in key.own], np.int64)
        self._own_begins = np.cumsum(sizes) - sizes  # of each run, in the harness's view
        self.own_bytes = int(sizes.sum())
        self._sizes = [part for size in sizes.tolist() for part in cut(size, _OWN_SIZES)]
        self._handles = memory.take(self._sizes)
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
        parts = iter(zip(self._handles, self._sizes, strict=True))
        for begin, end in self.key.own:
            launch.skip(begin - launch.size_bytes)
            while launch.size_bytes < end:
                handle, size = next(parts)
                launch.append(handle, size)
                own.append(handle, size)
        launch.allow(writable=self.key.writable)
        own.allow(writable=True)

    @property
    def is_whole(self) -> bool:
        return self.own_bytes == self.key.size_bytes

    @property
    def holes(self) -> IntervalSet:
        """Offsets in the region that nobody can touch."""
        begins, ends = zip(*self.key.own, strict=True)
        return IntervalSet([0], [self.key.size_bytes]).without(IntervalSet(begins, ends))

    def own_at(self, offset: int) -> int:
        """Where the harness sees the byte at an offset in the region that has memory."""
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
