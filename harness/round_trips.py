"""Runs round trips: a writer, moves of pages and a reader, one after the other on one memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pagefuzz.harness import subjects
from pagefuzz.harness.build import BuildSpec, cache_folder
from pagefuzz.harness.check import TIMEOUT_S, OwnsWorker, assignment_of
from pagefuzz.harness.devices import resolve_device
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.arena import Arena, DoesNotFitError
from pagefuzz.harness.memory.cuda import CudaArena, Scan
from pagefuzz.harness.memory.driver import Driver
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.native import NotAcceptedError
from pagefuzz.harness.objects import LaunchObject
from pagefuzz.harness.round_trip_layers import examined, in_force
from pagefuzz.harness.running import Answer, Assignment, Injection, loaded, second_text
from pagefuzz.harness.workers.blackbox import BlackBox, NotedLaunch, Stage
from pagefuzz.harness.workers.client import worker_for
from pagefuzz.harness.workers.journal import Journal, new_path
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.contents import FILLS
from pagefuzz.oracles.judgements.death import access_text
from pagefuzz.oracles.moved_pages import MOVERS
from pagefuzz.oracles.observation import Death, Launch, Status
from pagefuzz.oracles.round_trip import RoundTrip, pair_name
from pagefuzz.oracles.round_trip_judging import (
    NAME,
    RoundTripLaunch,
    StepLaunch,
    judge_round_trip,
)
from pagefuzz.oracles.round_trip_layout import LaidRoundTrip, lay_out
from pagefuzz.oracles.verdict import Failure, Outcome, Verdict

#: Subject of either operation that moves pages, unless another one is asked for.
MOVER = "bundled:page"


def movers_of(name: str) -> dict[str, subjects.Subject]:
    """By operation, what moves pages: the subject `name` of each that has one, else the default.

    Raises `CannotCheckError` if none has.
    """
    found: dict[str, subjects.Subject] = {}
    errors = []
    for operation in MOVERS:
        try:
            found[operation] = subjects.subject(name, operation)
        except CannotCheckError as error:
            errors.append(error)
    if not found:
        raise CannotCheckError(f"{errors[0]}; a mover is of {' or '.join(MOVERS)}")
    return {one: found.get(one) or subjects.subject(MOVER, one) for one in MOVERS}


@dataclass(frozen=True)
class RoundTripAssignment:
    """What one worker launches on one backend: the two of a pair, and what moves pages."""

    writer: Assignment
    movers: tuple[Assignment, ...]
    reader: Assignment

    @property
    def all(self) -> tuple[Assignment, ...]:
        return (self.writer, *self.movers, self.reader)

    @property
    def source_path(self) -> str:
        """Of the .cu that a fork server parses ahead of its workers."""
        return self.writer.source_path

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the detection layers that its round trips are for."""
        return in_force(
            (registry.operation(one.operation), one.flags) for one in (self.writer, self.reader)
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "source_path": self.source_path,
            "writer": self.writer.to_json(),
            "movers": [mover.to_json() for mover in self.movers],
            "reader": self.reader.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RoundTripAssignment:
        movers = tuple(Assignment(**mover) for mover in data["movers"])
        return cls(Assignment(**data["writer"]), movers, Assignment(**data["reader"]))

    def of(self, operation: str) -> Assignment:
        """Raises `CaseError` if nothing of the operation is launched."""
        for assignment in self.all:
            if assignment.operation == operation:
                return assignment
        raise CaseError(f"nothing here launches {operation}")


class RoundTripRunner:
    """A writer, movers and a reader, loaded, and the memory that all work on.

    device  name of what they run on
    """

    def __init__(self, assignment: RoundTripAssignment, box: BlackBox) -> None:
        """Raises `CannotCheckError`. `box` is told what the worker is about to do."""
        self._assignment, self._box = assignment, box
        self._layers = assignment.layers
        driver: Driver | None = None
        self.device = "host"
        if assignment.writer.backend == "cuda":
            driver = Driver()
            driver.use_device()
            self.device = driver.properties().name
        self._subjects: dict[str, LaunchObject] = {}
        scan: Scan | None = None
        for one in assignment.all:
            subject, found = loaded(one)
            if ("cuda" in subject.flags) != (driver is not None):
                raise CannotCheckError(f"{one.object_path} was not built for {self.device}")
            self._subjects[one.operation] = subject
            scan = scan or found
        assert scan is not None
        self._arena: Arena = (
            HostArena()
            if driver is None
            else CudaArena(driver, scan, assignment.writer.gpu_memory_bytes)
        )

    def parse(self, data: object) -> RoundTrip:
        """Raises `CaseError`."""
        return RoundTrip.from_json(data)

    def run(
        self,
        trip: RoundTrip,
        *,
        with_fixed_bytes: bool = False,
        injection: Injection | None = None,
    ) -> Answer:
        """Launches a trip once with each fill, and judges both.

        Raises `CaseError`, `CannotCheckError` or, when the device is lost, `DeviceFaultError`. A
        trip for which there is no memory is answered as not run.
        """
        if injection is not None:
            raise CannotCheckError("nothing can be injected into a round trip")
        laid = lay_out(trip)
        own = (self._assignment.writer.operation, self._assignment.reader.operation)
        if trip.pair != pair_name(*own):
            raise CaseError(f"the round trip is of {trip.pair}, not of {pair_name(*own)}")
        try:
            launches = self._launches(laid)
        except (DoesNotFitError, MemoryError) as error:
            reason = str(error) or "the round trip does not fit into this machine's memory"
            return Answer(Verdict(Outcome.NOT_RUN, laid.expectation.case_class, not_run=reason))
        launched = {step.operation.name for step in laid.steps}
        contained = all(self._assignment.of(name).promises_containment for name in launched)
        verdict = judge_round_trip(laid, launches, contained=contained)
        found = examined(self._layers, launches, verdict.checked[NAME])
        return Answer(replace(verdict, layers=found))

    def _launches(self, laid: LaidRoundTrip) -> list[RoundTripLaunch]:
        launches: list[RoundTripLaunch] = []
        for fill, plan in zip(FILLS, (laid.plan, laid.plan.mirrored()), strict=True):
            addresses = self._arena.place(plan, laid.expectation)
            self._arena.fill(fill)
            steps = []
            for step in laid.steps:
                which = f"the launch of {step.operation.name}"
                if launches:
                    which += f" in {second_text(mirrored=True)}"
                own = {name: addresses[step.buffer(name)] for name in step.plan.buffers}
                subject = self._subjects[step.operation.name]
                assignment = self._assignment.of(step.operation.name)
                subject.marshal(step.plan, own)
                if subject.keeps_record:
                    subject.begin_check(step.plan, step.expectation, self._arena.store)
                self._box.catch_faults(subject)
                path, arena = assignment.object_path, self._arena
                noted = NotedLaunch(which)
                self._box.note_launch(path, plan, addresses, arena.closed(), arena.mapped(), noted)
                self._box.note_memory(self.memory())
                self._box.enter(Stage.LAUNCHING)
                status, message = subject.launch()
                record = None
                if subject.keeps_record:
                    try:
                        record = subject.end_check(step.plan)
                    except NotAcceptedError:
                        self._arena.synchronise()  # names the fault, if the launch is why
                        raise
                self._arena.synchronise()
                steps.append(StepLaunch(status, message, record))
                if status is not Status.OK:
                    break  # nothing to read, or nothing was read
            self._box.enter(Stage.JUDGING)
            seen = self._arena.collect()
            memory = Launch(
                fill,
                steps[-1].status,
                "",
                seen.chunks,
                seen.examined_bytes,
                around=seen.around,
            )
            launches.append(RoundTripLaunch(tuple(steps), memory))
        return launches

    def memory(self) -> MemoryUse:
        """What this process holds now."""
        return MemoryUse.of(self._arena)

    def close(self) -> None:
        """An orderly end: writes the counters of a coverage build."""
        for subject in self._subjects.values():
            if "coverage" in subject.flags:
                subject.dump_coverage()
        self._arena.close()


def _of_death(death: Death, pair: str) -> Failure:
    title = f"a launch of {pair} ended its process: {death.how}"
    access = death.access
    if access is None or not access.buffer:
        details = {"access": death.detail, "launch": death.launch}
        details = {label: text for label, text in details.items() if text or label == "access"}
        return Failure(NAME, title, ("death", death.how), details)
    details = {
        "access": access_text(death.how, access),
        "launch": death.launch,
        "where": access.where,
    }
    details = {label: text for label, text in details.items() if text}
    return Failure(NAME, title, ("death", death.how, access.buffer), details)


class RoundTripChecker(OwnsWorker):
    """A writer and a reader on one backend, in a worker process. A context manager.

        with RoundTripChecker("concat_and_cache_mla/cp_gather_cache") as checker:
            verdict = checker.check(trip)

    writer, reader  the subjects
    movers          those that move pages, by operation; `mover` is the name that was given
    backend, build, device, deaths  as of a `Checker`
    """

    def __init__(
        self,
        pair: str,
        writer: str = "bundled:token",
        reader: str = "bundled:page",
        device: str = "host",
        build: str = "checked",
        *,
        mover: str = MOVER,
        timeout_s: float | None = None,
        isolate: bool = True,
        gpu_memory_bytes: int | None = None,
    ) -> None:
        """Builds all subjects.

        pair     "WRITER/READER", names of operations
        writer, reader, mover
                 subjects, as `pagefuzz list` shows them, or "twin:<path of a .toml file>"; the
                 mover is one of copy_blocks or swap_blocks; the other is moved by the bundled one
        device   "host", "cuda" or "auto"
        build    build flags, separated by commas; not asan
        timeout_s, isolate, gpu_memory_bytes  as of a `Checker`

        Raises `CannotCheckError` as a `Checker` does.
        """
        writes, _, reads = pair.partition("/")
        self.pair = pair
        self.writer = subjects.subject(writer, writes)
        self.reader = subjects.subject(reader, reads)
        self.mover, self.movers = mover, movers_of(mover)
        self.backend = resolve_device(device)
        spec = BuildSpec.parse(self.backend, build)
        if "asan" in spec.flags:
            raise CannotCheckError("round trips have no AddressSanitizer build; try checked")
        self.build = spec.text
        movers = tuple(self.movers.values())
        for subject in (self.writer, *movers, self.reader):
            subjects.check_binding(registry.operation(subject.operation), subject.source)
        launched = [
            replace(assignment_of(one, spec), gpu_memory_bytes=gpu_memory_bytes)
            for one in (self.writer, *movers, self.reader)
        ]
        self._assignment = RoundTripAssignment(launched[0], tuple(launched[1:-1]), launched[-1])
        about = {"pair": pair, "device": self.backend, "build": self.build}
        journal = Journal(new_path(cache_folder().parent / "journals"), **about)
        self._worker = worker_for(
            self._assignment,
            isolate=isolate,
            timeout_s=TIMEOUT_S if timeout_s is None else timeout_s,
            journal=journal,
        )

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the detection layers in force."""
        return self._assignment.layers

    def check(self, trip: RoundTrip) -> Verdict:
        """Launches a trip twice and judges what was seen.

        Raises `CaseError` for a trip that cannot be laid out or is of another pair, and
        `CannotCheckError` if nothing could be judged; neither is a pass.
        """
        answer = self._worker.run(trip)
        if not isinstance(answer, Death):
            return answer.verdict
        case_class = lay_out(trip).expectation.case_class
        failure = _of_death(answer, self.pair)
        return Verdict(Outcome.FAILED, case_class, (failure,), {NAME: 0}, launches=1)
