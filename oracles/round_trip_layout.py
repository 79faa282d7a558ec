"""All launches of a round trip in one memory: copies and readers work on the written cache.

Buffers are called by their launch: "writer.cache", "mover.pairs", "reader.dst", "reader[1].dst".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, CaseError, Placement
from pagefuzz.oracles.composition import Composition, compose, held_before, source_offset
from pagefuzz.oracles.expectation import Expectation, Footprint
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Image, Plan, PlannedBuffer
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.round_trip import RoundTrip
from pagefuzz.oracles.verdict import CaseClass


@dataclass(frozen=True)
class Step:
    """One launch. Its own contract gives its footprint, as permissions of a checked build; what it
    expects of bytes is not asked.

    name  "writer", "mover", "reader", or "reader[1]" of several
    """

    name: str
    operation: Operation
    plan: Plan
    expectation: Expectation

    def buffer(self, name: str) -> str:
        return f"{self.name}.{name}"


@dataclass(frozen=True)
class LaidRoundTrip:
    """steps: the writer, moves, gathers; plan and footprints: of their memory together."""

    trip: RoundTrip
    steps: tuple[Step, ...]
    plan: Plan
    expectation: Expectation
    composition: Composition

    @property
    def readers(self) -> tuple[Step, ...]:
        return self.steps[-len(self.trip.gathers) :]

    @property
    def writing(self) -> tuple[Step, ...]:
        """Those that are not readers."""
        return self.steps[: -len(self.trip.gathers)]


def lay_out(trip: RoundTrip) -> LaidRoundTrip:
    """Raises `CaseError` for a trip whose launches would be refused, or that is none."""
    writer = _step("writer", trip.writer)
    movers = _steps("mover", [move.case for move in trip.moves])
    readers = _steps("reader", [gather.case for gather in trip.gathers])
    steps = (writer, *movers, *readers)
    composition = compose(
        trip,
        writer.plan,
        tuple(step.plan for step in readers),
        tuple(step.plan for step in movers),
    )
    buffers, footprints = _own_memory(steps)
    for step, move in zip(movers, trip.moves, strict=True):
        root, begin = writer.plan.base(move.cache)
        if not writer.plan.buffers[root].memory_bytes:
            continue
        own, cache = step.buffer("cache"), writer.buffer(root)
        placement = Placement(over=(cache, begin))
        buffers[own] = replace(buffers[own], placement=placement, image=Image.empty())
        known, moved = footprints[cache], footprints[own]
        footprints[cache] = replace(
            known,
            may_read=known.may_read.union(_shifted(moved.may_read, begin)),
            must_write=known.must_write.union(_shifted(moved.must_write, begin)),
        )
    for step, gather in zip(readers, trip.gathers, strict=True):
        root, begin = writer.plan.base(gather.cache)
        begin += source_offset(trip, gather)
        if not writer.plan.buffers[root].memory_bytes:
            continue  # a cache without pages has no memory, and src neither
        name = step.buffer("src")
        over = Placement(over=(writer.buffer(root), begin))
        buffers[name] = replace(buffers[name], placement=over, image=Image.empty())
    for cache, offsets in composition.before.items():
        name = writer.buffer(cache)
        held = held_before(trip.writer.seed, offsets)
        buffers[name] = replace(buffers[name], image=Image(offsets, held[:, None]))
        known = footprints.get(name, Footprint())
        reads = known.may_read.union(IntervalSet.of_runs(offsets, 1))
        footprints[name] = replace(known, may_read=reads)
    hostile = any(step.expectation.case_class is CaseClass.HOSTILE for step in steps)
    return LaidRoundTrip(
        trip,
        steps,
        Plan(trip.writer, {}, buffers),
        Expectation(CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT, footprints=footprints),
        composition,
    )


def _shifted(intervals: IntervalSet, by: int) -> IntervalSet:
    return IntervalSet(intervals.begin + by, intervals.end + by)


def _steps(name: str, cases: Sequence[Case]) -> tuple[Step, ...]:
    """Numbered if there are several."""
    several = len(cases) > 1
    return tuple(
        _step(f"{name}[{number}]" if several else name, case) for number, case in enumerate(cases)
    )


def _step(name: str, case: Case) -> Step:
    known = registry.operation(case.operation)
    plan = known.plan(case)
    expectation = known.expect(plan)
    if expectation.refusals:
        raise CaseError(f"the {name} must be refused: {expectation.refusals[0].sentence}")
    return Step(name, known, plan, expectation)


def _own_memory(
    steps: Sequence[Step],
) -> tuple[dict[str, PlannedBuffer], dict[str, Footprint]]:
    """Buffers and footprints of every launch under their new names."""
    buffers: dict[str, PlannedBuffer] = {}
    footprints: dict[str, Footprint] = {}
    for step in steps:
        for name, buffer in step.plan.buffers.items():
            placement = buffer.placement
            if placement.over is not None:
                root, begin = placement.over
                placement = replace(placement, over=(step.buffer(root), begin))
            new = step.buffer(name)
            buffers[new] = replace(buffer, name=new, placement=placement)
            footprints[new] = step.expectation.footprint(name)
    return buffers, footprints
