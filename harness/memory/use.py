"""How much memory a process that launches takes."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import reduce
from typing import Protocol, Self


class Holds(Protocol):
    """An arena, as far as its size goes. Figures as of `MemoryUse`."""

    @property
    def address_bytes(self) -> int: ...

    @property
    def allocated_bytes(self) -> int: ...


@dataclass(frozen=True)
class MemoryUse:
    """Bytes; of several processes, or moments, the most of each.

    address_bytes   address space of the arena, guards included
    arena_bytes     memory behind it, of the device that launches: on a GPU not all that a process
                    takes of it, as contexts, modules and local memory are not counted
    resident_bytes  host memory of the whole process, at its peak
    """

    address_bytes: int = 0
    arena_bytes: int = 0
    resident_bytes: int = 0

    def most(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(*map(max, astuple(self), astuple(other)))

    @classmethod
    def most_of(cls, several: Iterable[MemoryUse]) -> MemoryUse:
        """Nothing of none."""
        return reduce(MemoryUse.most, several, MemoryUse())

    def to_json(self) -> list[int]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, data: Sequence[int]) -> Self:
        return cls(*data)

    @classmethod
    def of(cls, arena: Holds) -> Self:
        """Of this process and the arena in it."""
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return cls(arena.address_bytes, arena.allocated_bytes, resident)
