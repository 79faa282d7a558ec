"""What a worker does with one case: plan, expect, launch twice and for each relation, judge."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pagefuzz.harness import layers, subjects
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.arena import Arena, DoesNotFitError
from pagefuzz.harness.memory.cuda import CudaArena, Scan
from pagefuzz.harness.memory.driver import Driver
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.native import BuiltObject, NotAcceptedError
from pagefuzz.harness.objects import LaunchObject
from pagefuzz.harness.workers.blackbox import BlackBox, NotedLaunch, Stage
from pagefuzz.oracles import judging, registry, relation
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.contents import FILLS
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.judgement import Run
from pagefuzz.oracles.layout import Plan, Role
from pagefuzz.oracles.observation import (
    Launch,
    LaunchOrder,
    Observation,
    OrderKind,
    Related,
    flags_of,
)
from pagefuzz.oracles.relation import RelationJudgement
from pagefuzz.oracles.runs import before_and_after
from pagefuzz.oracles.verdict import CaseClass, Outcome, Verdict


@dataclass(frozen=True)
class Assignment:
    """What one worker launches, as it travels to it.

    object_path, source_path  of the built object and of the .cu that holds its ABI fragment; or of
                a Triton module and of the source that it was made of
    build       flags of the object, separated by commas
    keys_path   of what a Triton module compiles, where there is no GPU
    scan_path   of a CUDA object that has `pf_scan`, where the object itself has none
    gpu_memory_bytes  that the arena may take of a GPU; None: what is free
    """

    operation: str
    symbol: str
    object_path: str
    source_path: str
    backend: str
    build: str
    promises_containment: bool
    keys_path: str = ""
    scan_path: str = ""
    gpu_memory_bytes: int | None = None

    @property
    def flags(self) -> frozenset[str]:
        """Of the object, as judgements are asked about them."""
        return flags_of(self.backend, self.build)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Injection:
    """One access more at the end of every launch (builds with "inject"): see `injection`.

    offset_bytes  from the buffer's base
    size_bytes    1, 2, 4 or 8
    kind          "read", whose value is thrown away, or "write"
    """

    buffer: str
    offset_bytes: int
    size_bytes: int
    kind: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class FixedBytes:
    """Everything the contract fixes of a case's results, to compare two backends.

    statuses       of the two launches
    byte_count     must-write bytes, and counters where their values are fixed, of both launches
    digest         of those bytes, in order of buffers and offsets
    """

    statuses: tuple[int, ...]
    byte_count: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FixedBytes:
        return cls(tuple(data["statuses"]), data["byte_count"], data["digest"])


@dataclass(frozen=True)
class Answer:
    verdict: Verdict
    fixed_bytes: FixedBytes | None = None


class Runner:
    """One subject, loaded, and the memory it works on.

    device  name of what it runs on
    """

    def __init__(self, assignment: Assignment, box: BlackBox) -> None:
        """Raises `CannotCheckError`. `box` is told what the worker is about to do."""
        self._assignment, self._box = assignment, box
        self._operation = registry.operation(assignment.operation)
        driver: Driver | None = None
        self.device = "host"
        if assignment.backend == "cuda":
            driver = Driver()
            driver.use_device()
            self.device = driver.properties().name
        self._object, scan = loaded(assignment)
        if ("cuda" in self._object.flags) != (driver is not None):
            raise CannotCheckError(f"{assignment.object_path} was not built for {self.device}")
        box.catch_faults(self._object)
        self._arena: Arena = (
            HostArena(poisons="asan" in self._object.flags)
            if driver is None
            else CudaArena(driver, scan, assignment.gpu_memory_bytes)
        )

    def parse(self, data: object) -> Case:
        """Raises `CaseError`."""
        return Case.from_json(data)

    def run(
        self,
        case: Case,
        *,
        with_fixed_bytes: bool = False,
        injection: Injection | None = None,
    ) -> Answer:
        """Launches a case once with each fill, the second time with every buffer at the other end
        of its memory, again for each relation that it names and that applies, and judges all of
        them.

        Raises `CaseError`, `CannotCheckError` or, when the device is lost, `DeviceFaultError`. A
        case for which there is no memory is answered as not run; so is one of which a related
        launch has none, unless those that were made show a failure.
        """
        relations = relation.asked_for(case, self._operation)
        plan = self._operation.plan(case)
        expectation = self._operation.expect(plan)
        try:
            launches = self._launches(plan, expectation, FILLS, injection)
        except (DoesNotFitError, MemoryError) as error:
            short = _shortage(error)
            return Answer(Verdict(Outcome.NOT_RUN, expectation.case_class, not_run=short))
        related: list[Related] = []
        short = ""
        try:
            for one in self._related(plan, expectation, relations):
                related.append(one)
        except (DoesNotFitError, MemoryError) as error:  # what was launched until then counts
            short = _shortage(error)
        observation = Observation(
            self._assignment.backend,
            self._assignment.build,
            launches,
            related=tuple(related),
            compilations=self._object.compilations(),
        )
        contained = self._assignment.promises_containment
        run = Run(self._operation, plan, expectation, observation, contained=contained)
        verdict = judging.judge(run)
        verdict = replace(verdict, layers=layers.examined(run, verdict.checked))
        if short and verdict.outcome is not Outcome.FAILED:
            return Answer(replace(verdict, outcome=Outcome.NOT_RUN, not_run=short))
        fixed = fixed_bytes(plan, expectation, launches) if with_fixed_bytes else None
        return Answer(verdict, fixed)

    def _related(
        self, plan: Plan, expectation: Expectation, relations: Mapping[str, RelationJudgement]
    ) -> Iterator[Related]:
        for name, judgement in relations.items():
            if not judgement.concerns(self._operation, self._assignment.flags):
                continue
            placed: Plan | None = None
            addresses: Mapping[str, int] = {}
            for derived in judgement.related(self._operation, plan, expectation):
                if derived.plan is not placed:
                    placed, addresses = derived.plan, self._place(derived.plan, derived.expectation)
                if derived.in_a_row == 1:
                    self._arena.fill(relation.FILL)
                else:
                    self._arena.keep()
                with self._ordered(derived.order):
                    noted = NotedLaunch(f"a launch for {name}: {derived.change}", is_own=False)
                    launch = self._launch(
                        placed, derived.expectation, addresses, relation.FILL, noted
                    )
                yield Related(name, derived, launch)

    @contextmanager
    def _ordered(self, order: LaunchOrder) -> Iterator[None]:
        """Launches in between are made in that order."""
        if order.kind is OrderKind.FORWARD:
            yield
            return
        self._object.set_order(order.kind, order.seed)
        try:
            yield
        finally:
            self._object.set_order(OrderKind.FORWARD, 0)

    def _launches(
        self,
        plan: Plan,
        expectation: Expectation,
        fills: Sequence[int],
        injection: Injection | None = None,
    ) -> tuple[Launch, ...]:
        # A refused case may be one for where its buffers lie.
        refused = expectation.case_class is CaseClass.REFUSED
        mirror = plan if refused else plan.mirrored()
        launches: list[Launch] = []
        for fill, placed in zip(fills, (plan, mirror), strict=False):
            addresses = self._place(placed, expectation)
            if injection is not None:
                position = plan.buffer_names().index(injection.buffer)
                self._object.inject(
                    position,
                    addresses[injection.buffer],
                    injection.offset_bytes,
                    injection.size_bytes,
                    injection.kind,
                )
            self._arena.fill(fill)
            noted = NotedLaunch(second_text(mirrored=not refused) if launches else "")
            launches.append(self._launch(placed, expectation, addresses, fill, noted))
        return tuple(launches)

    def _place(self, plan: Plan, expectation: Expectation) -> Mapping[str, int]:
        addresses = self._arena.place(plan, expectation)
        self._object.marshal(plan, addresses)
        return addresses

    def _launch(
        self,
        plan: Plan,
        expectation: Expectation,
        addresses: Mapping[str, int],
        fill: int,
        noted: NotedLaunch,
    ) -> Launch:
        """Of what was placed and filled."""
        subject, arena = self._object, self._arena
        if subject.keeps_record:
            subject.begin_check(plan, expectation, arena.store)
        path, closed, mapped = self._assignment.object_path, arena.closed(), arena.mapped()
        self._box.note_launch(path, plan, addresses, closed, mapped, noted)
        self._box.note_memory(self.memory())
        self._box.enter(Stage.LAUNCHING)
        status, message = subject.launch()
        record = None
        if subject.keeps_record:
            try:
                record = subject.end_check(plan)
            except NotAcceptedError:
                arena.synchronise()  # names the fault, if the launch is why
                raise
        arena.synchronise()
        self._box.enter(Stage.JUDGING)
        collected = arena.collect()
        return Launch(
            fill,
            status,
            message,
            collected.chunks,
            collected.examined_bytes,
            record,
            collected.around,
        )

    def memory(self) -> MemoryUse:
        """What this process holds now."""
        return MemoryUse.of(self._arena)

    def close(self) -> None:
        """An orderly end: writes the counters of a coverage build."""
        if "coverage" in self._object.flags:
            self._object.dump_coverage()
        self._arena.close()


def _shortage(error: DoesNotFitError | MemoryError) -> str:
    return str(error) or "the case does not fit into this machine's memory"


def second_text(*, mirrored: bool) -> str:
    """Which launch the second one is, in words."""
    ends = ", with every buffer at the other end of its memory" if mirrored else ""
    return f"the second launch{ends}"


def loaded(assignment: Assignment) -> tuple[LaunchObject, Scan]:
    """The object of an assignment, and what searches device memory for it."""
    path, source = Path(assignment.object_path), Path(assignment.source_path)
    if source.suffix != ".py":
        built = BuiltObject(path, source, assignment.operation, assignment.symbol)
        return built, built.scan
    # Triton is there in the workers that need it only.
    from pagefuzz.harness.triton.launched import TritonObject

    flags = frozenset(assignment.build.split(","))
    keys_path = Path(assignment.keys_path) if assignment.keys_path else None
    launched = TritonObject(path, source, assignment.operation, assignment.symbol, flags, keys_path)
    if not assignment.scan_path:
        return launched, _no_scan
    scanning = subjects.scanning_subject()
    other = Path(assignment.scan_path)
    built = BuiltObject(other, scanning.source, scanning.operation, scanning.symbol)
    return launched, built.scan


def _no_scan(data: int, size_bytes: int, chunk_bytes: int, value: int, flags: int) -> None:
    raise CannotCheckError("no object that searches device memory was built")


def fixed_bytes(plan: Plan, expectation: Expectation, launches: tuple[Launch, ...]) -> FixedBytes:
    """What the contract fixes: must-write bytes, and counters whose counts it fixes.

    Where any NaN will do, every NaN counts as the same one.
    """
    digest = hashlib.blake2b(digest_size=16)
    byte_count = 0
    for launch in launches:
        for part, expected in expectation.expected.items():
            size_bytes = expected.values.shape[1]
            root, begin = plan.base(expected.buffer or part)
            _, after = before_and_after(
                launch, plan.case.seed, root, expected.offsets + begin, size_bytes
            )
            if expected.free_nans is not None:
                after = expected.free_nans.canonical(after)
            digest.update(after.tobytes())
            byte_count += after.size
        for name, buffer in plan.buffers.items():
            if buffer.role is not Role.COUNTERS or expectation.counts is None:
                continue
            counters = expectation.footprint(name).writable
            byte_count += counters.total_bytes
            for chunk in launch.chunks.get(name, ()):  # in none: unchanged
                end = chunk.offset_bytes + chunk.after.size
                digest.update(chunk.after[counters.mask(chunk.offset_bytes, end)].data)
    statuses = tuple(int(launch.status) for launch in launches)
    return FixedBytes(statuses, byte_count, digest.hexdigest())
