"""Compares the destinations of two launches that must have written the same, without a reference.

A byte agrees if both launches left the same there, or if neither changed it. Exempt is only what
the contract leaves free: contested bytes, and the bits of a result that may be any NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.free_nans import FreeNans, Mask, nans
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, Plan
from pagefuzz.oracles.observation import Launch, Moved
from pagefuzz.oracles.runs import before_and_after


@dataclass(frozen=True)
class Difference:
    """What differs of one destination.

    offset_bytes  of the first byte that differs, from the destination's base; first and second
                  launch may hold it at different places
    found         uint8: what the first launch left from there on, as far as it differs
    first, second  that byte after either launch
    count         bytes that differ
    """

    buffer: str
    offset_bytes: int
    second_offset_bytes: int
    found: Bytes
    first: int
    second: int
    count: int


@dataclass(frozen=True)
class Compared:
    differences: tuple[Difference, ...]
    checked_bytes: int


def compare(
    plan: Plan,
    expectation: Expectation,
    launches: tuple[Launch, Launch],
    second: Plan,
    moved: Mapping[str, tuple[Moved, ...]],
) -> Compared:
    """Compares every destination byte that either launch may have changed.

    plan, expectation  of the first launch
    second             the plan of the second one
    moved              where destinations are written that lie elsewhere in the second plan
    """
    differences: dict[str, Difference] = {}
    checked = 0
    for name, runs in _to_compare(plan, expectation, launches, second, moved):
        checked += runs.begins.size * runs.size_bytes
        difference = _of_runs(plan, expectation, launches, second, name, runs)
        if difference is not None:
            differences.setdefault(difference.buffer, difference)
    return Compared(tuple(differences.values()), checked)


def _to_compare(
    plan: Plan,
    expectation: Expectation,
    launches: tuple[Launch, Launch],
    second: Plan,
    moved: Mapping[str, tuple[Moved, ...]],
) -> Iterator[tuple[str, Moved]]:
    expected = {one.buffer or part for part, one in expectation.expected.items()}
    for name, buffer in plan.buffers.items():
        if not buffer.role.is_destination:
            continue
        if name in moved:
            yield from ((name, runs) for runs in moved[name])
        elif buffer.placement.over is None:
            end = min(buffer.memory_bytes, second.buffers[name].memory_bytes)
            seen = IntervalSet(
                [chunk.offset_bytes for x in launches for chunk in x.chunks.get(name, ())],
                [
                    chunk.offset_bytes + chunk.after.size
                    for x in launches
                    for chunk in x.chunks.get(name, ())
                ],
            ).clipped(0, end)
            if name not in expected:  # scratch memory: what is left there is free
                seen = seen.without(expectation.footprint(name).may_write)
            for begin, stop in seen:
                at = np.array([begin], dtype=np.int64)
                yield name, Moved(at, at, stop - begin)


def _of_runs(
    plan: Plan,
    expectation: Expectation,
    launches: tuple[Launch, Launch],
    second: Plan,
    name: str,
    runs: Moved,
) -> Difference | None:
    root, begin = plan.base(name)
    before, after = _held(launches[0], plan, name, runs.begins, runs.size_bytes)
    new_before, new_after = _held(launches[1], second, name, runs.new_begins, runs.size_bytes)
    differ = after != new_after
    if not differ.any():
        return None
    differ &= (after != before) | (new_after != new_before)
    if not differ.any():
        return None
    row, column = np.nonzero(differ)
    excused = _excused(
        plan, expectation, root, runs.begins + begin, (after, new_after), (row, column)
    )
    differ[row[excused], column[excused]] = False
    row, column = row[~excused], column[~excused]
    if not row.size:
        return None
    i, j = int(row[0]), int(column[0])
    stop = j + int(np.argmin(differ[i, j:])) if not differ[i, j:].all() else differ.shape[1]
    offset_bytes = int(runs.begins[i]) + j
    owner = _owner(plan, expectation, root, offset_bytes + begin) or name
    shift = begin - plan.base(owner)[1]
    return Difference(
        owner,
        offset_bytes + shift,
        int(runs.new_begins[i]) + j + shift,
        after[i, j:stop],
        int(after[i, j]),
        int(new_after[i, j]),
        row.size,
    )


def _held(
    launch: Launch, plan: Plan, name: str, begins: npt.NDArray[np.int64], size_bytes: int
) -> tuple[Bytes, Bytes]:
    root, begin = plan.base(name)
    order = np.argsort(begins, kind="stable")
    sorted_ = before_and_after(launch, plan.case.seed, root, begins[order] + begin, size_bytes)
    if begins.size < 2:
        return sorted_
    back = np.argsort(order, kind="stable")
    return sorted_[0][back], sorted_[1][back]


def _owner(plan: Plan, expectation: Expectation, root: str, offset_bytes: int) -> str | None:
    """The destination with memory in `root` that may write a byte of it."""
    for name, buffer in plan.buffers.items():
        base, begin = plan.base(name)
        at = offset_bytes - begin
        if (
            buffer.role.is_destination
            and base == root
            and expectation.footprint(name).writable.contains(at, at + 1)
        ):
            return name
    return None


def _excused(
    plan: Plan,
    expectation: Expectation,
    root: str,
    begins: npt.NDArray[np.int64],
    after: tuple[Bytes, Bytes],
    where: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> Mask:
    """bool [n]: which of the bytes at (run, byte) `where` the contract leaves free.

    begins, after  of the runs: offsets in `root`, and what both launches left
    """
    row, column = where
    excused = np.zeros(row.size, dtype=np.bool_)
    for part, expected in expectation.expected.items():
        name = expected.buffer or part
        base, begin = plan.base(name)
        if base != root:
            continue
        at = begins[row] + column - begin
        contested = expectation.footprint(name).may_write
        if contested:
            nth = np.searchsorted(contested.begin, at, side="right") - 1
            excused |= (nth >= 0) & (at < contested.end[nth])
        if expected.free_nans is not None:
            excused |= _free(
                expected.offsets, expected.values.shape[1], expected.free_nans, at, after, where
            )
    return excused


def _free(
    offsets: npt.NDArray[np.int64],
    run_bytes: int,
    free: FreeNans,
    at: npt.NDArray[np.int64],
    after: tuple[Bytes, Bytes],
    where: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> Mask:
    """bool [n]: bytes of elements that may be any NaN, and are one after both launches.

    at  their offsets from the base of the buffer that has runs of `run_bytes` at `offsets`
    """
    row, column = where
    nth = np.searchsorted(offsets, at, side="right") - 1
    within = at - offsets[nth]
    size = free.dtype.size_bytes
    first = column - within % size
    known = (nth >= 0) & (within < run_bytes) & (first >= 0) & (first + size <= after[0].shape[1])
    out = np.zeros(row.size, dtype=np.bool_)
    known[known] = free.mask[nth[known], within[known] // size]
    if known.any():
        element = first[known, None] + np.arange(size)
        both = [nans(held[row[known, None], element], free.dtype)[:, 0] for held in after]
        out[known] = both[0] & both[1]
    return out
