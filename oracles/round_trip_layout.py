"""All launches of a round trip in one memory: moves and readers work on the written cache.

Buffers are called by their launch: "writer.cache", "mover.pairs", "reader.dst", "reader[1].dst". A
second cache is that of the first launch that writes it, "mover.dst_cache".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, CaseError, Placement
from pagefuzz.oracles.composition import Composition, compose, held_before, source_base
from pagefuzz.oracles.expectation import Expectation, Footprint
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Image, Plan, PlannedBuffer
from pagefuzz.oracles.moved_pages import FIRST, SECOND, SWAP, WAYS
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.round_trip import Move, RoundTrip
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
    seconds = _second_caches(trip, movers)
    for step, move in zip(movers, trip.moves, strict=True):
        root, begin = writer.plan.base(move.cache)
        for own, which in _caches_of(move).items():
            if which == SECOND:
                _share(buffers, footprints, step, own, seconds[move.cache], 0)
            elif writer.plan.buffers[root].memory_bytes:
                _share(buffers, footprints, step, own, writer.buffer(root), begin)
    for step, gather, second in zip(readers, trip.gathers, composition.reads, strict=True):
        key, begin = source_base(trip, writer.plan, gather, second)
        cache = writer.buffer(key) if second is None else seconds[key]
        if not buffers[cache].memory_bytes:
            continue  # a cache without pages has no memory, and src neither
        _lay_over(buffers, step.buffer("src"), cache, begin)
    for (key, which), offsets in composition.before.items():
        name = writer.buffer(key) if which == FIRST else seconds[key]
        held = held_before(trip.writer.seed, offsets, which)
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


def _caches_of(move: Move) -> dict[str, int]:
    """Buffer of the move -> which cache it is."""
    reads, writes = WAYS[move.case.operation][move.way]
    if move.case.operation == SWAP:
        return {"src_cache": reads, "dst_cache": writes}
    return {"cache": reads}


def _second_caches(trip: RoundTrip, movers: Sequence[Step]) -> dict[str, str]:
    """Cache of the writer -> buffer that is its second cache: one that may be written, if any."""
    found: dict[str, str] = {}
    for way in ("out", "in"):
        for step, move in zip(movers, trip.moves, strict=True):
            own = "dst_cache" if way == "out" else "src_cache"
            if move.way == way:
                found.setdefault(move.cache, step.buffer(own))
    return found


def _share(
    buffers: dict[str, PlannedBuffer],
    footprints: dict[str, Footprint],
    step: Step,
    own: str,
    cache: str,
    begin: int,
) -> None:
    """Lays a move's buffer over a cache, from byte `begin` on: what it does there is legal."""
    name = step.buffer(own)
    if name == cache:
        return
    _lay_over(buffers, name, cache, begin)
    known, used = footprints.get(cache, Footprint()), footprints[name]
    footprints[cache] = replace(
        known,
        may_read=known.may_read.union(_shifted(used.may_read, begin)),
        must_write=known.must_write.union(_shifted(used.must_write, begin)),
    )


def _lay_over(buffers: dict[str, PlannedBuffer], name: str, cache: str, begin: int) -> None:
    """From byte `begin` of a cache on, whose base then is aligned as both need it."""
    alignment = max(buffers[name].alignment_bytes, buffers[cache].alignment_bytes)
    buffers[cache] = replace(buffers[cache], alignment_bytes=alignment)
    placement = Placement(over=(cache, begin))
    buffers[name] = replace(buffers[name], placement=placement, image=Image.empty())


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
