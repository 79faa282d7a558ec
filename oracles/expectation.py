"""What the contract says of one plan: class, footprint, expected bytes, counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.free_nans import FreeNans
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes
from pagefuzz.oracles.verdict import CaseClass


@dataclass(frozen=True)
class Refusal:
    """Why a launcher must refuse. `reason` is a short fixed tag, `sentence` the details."""

    reason: str
    sentence: str


@dataclass(frozen=True)
class Footprint:
    """Byte sets of one buffer, as offsets from its base. What is in none of them is forbidden."""

    may_read: IntervalSet = field(default_factory=IntervalSet)
    must_write: IntervalSet = field(default_factory=IntervalSet)
    may_write: IntervalSet = field(default_factory=IntervalSet)  # contested bytes; counters
    lent: IntervalSet = field(default_factory=IntervalSet)  # written by way of a buffer over it

    @property
    def writable(self) -> IntervalSet:
        return self.must_write.union(self.may_write)

    @property
    def changeable(self) -> IntervalSet:
        """What may change of the buffer's memory, whoever writes it."""
        return self.writable.union(self.lent) if self.lent else self.writable


@dataclass(frozen=True)
class Contested:
    """Elements that several writers claim: each must hold one claimant's, or its old value.

    offsets   int64 [n], byte offsets of claimed runs in the buffer; an offset may repeat
    values    uint8 [n, run_bytes], what that claimant writes there
    element_bytes  the unit that may not be torn; divides run_bytes
    old_allowed    whether an element may be left as it was
    free_nans      elements of `values` whose bits are free, if any; elements of element_bytes
    """

    offsets: npt.NDArray[np.int64]
    values: Bytes
    element_bytes: int
    old_allowed: bool = True
    free_nans: FreeNans | None = None


@dataclass(frozen=True)
class Expected:
    """Bytes one destination, or one part of it, must hold afterwards.

    offsets   int64 [n], ascending and disjoint runs; those of all parts are `Footprint.must_write`
    values    uint8 [n, run_bytes]
    free_nans  elements of `values` whose bits are free, if any
    buffer    the destination, where this is a part of it with a name of its own
    """

    offsets: npt.NDArray[np.int64]
    values: Bytes
    contested: Contested | None = None
    free_nans: FreeNans | None = None
    buffer: str = ""


@dataclass(frozen=True)
class Counts:
    """What a launch adds to the counter pair."""

    padding: int
    skipped: int


@dataclass(frozen=True)
class Expectation:
    """case_class  refused, hostile or in contract
    refusals    every reason that holds, if refused; the rest is then empty (nothing may change)
    hostile     why it is hostile, one sentence a kind of value; empty otherwise
    footprints  for every buffer of the plan
    expected    for every destination; by part where one has elements of several sizes
    counts      None where the contract leaves them unspecified
    counters    figures for Hypothesis' statistics (distance to 2^31, pages touched, ...)
    """

    case_class: CaseClass
    refusals: tuple[Refusal, ...] = ()
    hostile: tuple[str, ...] = ()
    footprints: Mapping[str, Footprint] = field(default_factory=dict)
    expected: Mapping[str, Expected] = field(default_factory=dict)
    counts: Counts | None = None
    counters: Mapping[str, int] = field(default_factory=dict)

    def footprint(self, buffer: str) -> Footprint:
        return self.footprints.get(buffer, _NOTHING)


_NOTHING = Footprint()
