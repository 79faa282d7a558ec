"""Runs round trips: a writer and a reader, one after the other in a worker, on one memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pagefuzz.harness import subjects
from pagefuzz.harness.build import BuildSpec, cache_folder
from pagefuzz.harness.build import build as build_object
from pagefuzz.harness.devices import resolve_device
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.arena import Arena, DoesNotFitError
from pagefuzz.harness.memory.cuda import CudaArena
from pagefuzz.harness.memory.driver import Driver
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.native import BuiltObject, NotAcceptedError
from pagefuzz.harness.running import Answer, Assignment, Injection
from pagefuzz.harness.subjects import Subject
from pagefuzz.harness.workers.blackbox import BlackBox, Stage
from pagefuzz.harness.workers.client import worker_for
from pagefuzz.harness.workers.journal import Journal, new_path
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.contents import FILLS
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

#: Seconds after which a launch that has not come back is taken for a hang.
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RoundTripAssignment:
    """What one worker launches: the two of a pair, on one backend."""

    writer: Assignment
    reader: Assignment

    @property
    def source_path(self) -> str:
        """Of the .cu that a fork server parses ahead of its workers."""
        return self.writer.source_path

    def to_json(self) -> dict[str, Any]:
        return {
            "source_path": self.source_path,
            "writer": self.writer.to_json(),
            "reader": self.reader.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RoundTripAssignment:
        return cls(Assignment(**data["writer"]), Assignment(**data["reader"]))


class RoundTripRunner:
    """A writer and a reader, loaded, and the memory that both work on.

    device  name of what they run on
    """

    def __init__(self, assignment: RoundTripAssignment, box: BlackBox) -> None:
        """Raises `CannotCheckError`. `box` is told what the worker is about to do."""
        self._assignment, self._box = assignment, box
        driver: Driver | None = None
        self.device = "host"
        if assignment.writer.backend == "cuda":
            driver = Driver()
            driver.use_device()
            self.device = driver.properties().name
        self._writer, self._reader = _loaded(assignment.writer), _loaded(assignment.reader)
        asan = "asan" in self._writer.flags
        self._arena: Arena = (
            HostArena(poisons=asan)
            if driver is None
            else CudaArena(driver, self._writer.scan, assignment.writer.gpu_memory_bytes)
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
        both = (self._assignment.writer, self._assignment.reader)
        contained = all(assignment.promises_containment for assignment in both)
        return Answer(judge_round_trip(laid, launches, contained=contained))

    def _launches(self, laid: LaidRoundTrip) -> list[RoundTripLaunch]:
        launches = []
        for fill, plan in zip(FILLS, (laid.plan, laid.plan.mirrored()), strict=True):
            addresses = self._arena.place(plan, laid.expectation)
            self._arena.fill(fill)
            steps = []
            for index, step in enumerate(laid.steps):
                own = {name: addresses[step.buffer(name)] for name in step.plan.buffers}
                subject = self._reader if index else self._writer
                assignment = self._assignment.reader if index else self._assignment.writer
                subject.marshal(step.plan, own)
                if subject.keeps_record:
                    subject.begin_check(step.plan, step.expectation, self._arena.store)
                subject.catch_faults(self._box.fault_address())
                self._box.note_launch(assignment.object_path, plan, addresses)
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
            memory = Launch(fill, steps[-1].status, "", seen.chunks, seen.examined_bytes)
            launches.append(RoundTripLaunch(tuple(steps), memory))
        return launches

    def memory(self) -> MemoryUse:
        """What this process holds now."""
        return MemoryUse.of(self._arena)

    def close(self) -> None:
        """An orderly end: writes the counters of a coverage build."""
        for subject in (self._writer, self._reader):
            if "coverage" in subject.flags:
                subject.dump_coverage()
        self._arena.close()


def _loaded(assignment: Assignment) -> BuiltObject:
    built = BuiltObject(
        Path(assignment.object_path),
        Path(assignment.source_path),
        assignment.operation,
        assignment.symbol,
    )
    if ("cuda" in built.flags) != (assignment.backend == "cuda"):
        raise CannotCheckError(f"{assignment.object_path} was not built for {assignment.backend}")
    return built


class RoundTripChecker:
    """A writer and a reader on one backend, in a worker process. A context manager.

        with RoundTripChecker("concat_and_cache_mla/cp_gather_cache") as checker:
            verdict = checker.check(trip)

    writer, reader  the subjects
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
        timeout_s: float = TIMEOUT_S,
        isolate: bool = True,
        gpu_memory_bytes: int | None = None,
    ) -> None:
        """Builds both subjects.

        pair            "WRITER/READER", names of operations
        writer, reader  subjects, as `pagefuzz list` shows them, or "twin:<path of a .toml file>"
        device          "host", "cuda" or "auto"
        build           build flags, separated by commas; not asan
        isolate, gpu_memory_bytes  as of a `Checker`

        Raises `CannotCheckError` as a `Checker` does.
        """
        writes, _, reads = pair.partition("/")
        self.pair = pair
        self.writer = subjects.subject(writer, writes)
        self.reader = subjects.subject(reader, reads)
        self.backend = resolve_device(device)
        spec = BuildSpec.parse(self.backend, build)
        if "asan" in spec.flags:
            raise CannotCheckError("round trips have no AddressSanitizer build; try checked")
        self.build = spec.text
        assignment = RoundTripAssignment(
            self._assign(self.writer, spec, gpu_memory_bytes),
            self._assign(self.reader, spec, gpu_memory_bytes),
        )
        about = {"pair": pair, "device": self.backend, "build": self.build}
        journal = Journal(new_path(cache_folder().parent / "journals"), **about)
        self._worker = worker_for(assignment, isolate=isolate, timeout_s=timeout_s, journal=journal)

    def _assign(
        self, subject: Subject, spec: BuildSpec, gpu_memory_bytes: int | None
    ) -> Assignment:
        subjects.check_binding(registry.operation(subject.operation), subject.source)
        return Assignment(
            operation=subject.operation,
            symbol=subject.symbol,
            object_path=str(build_object(subject.source, spec, twin=subject.twin)),
            source_path=str(subject.source),
            backend=self.backend,
            build=self.build,
            promises_containment=subject.promises_containment,
            gpu_memory_bytes=gpu_memory_bytes,
        )

    @property
    def device(self) -> str:
        return self._worker.device

    @property
    def deaths(self) -> int:
        return self._worker.deaths

    def check(self, trip: RoundTrip) -> Verdict:
        """Launches a trip twice and judges what was seen.

        Raises `CaseError` for a trip that cannot be laid out or is of another pair, and
        `CannotCheckError` if nothing could be judged; neither is a pass.
        """
        answer = self._worker.run(trip)
        if not isinstance(answer, Death):
            return answer.verdict
        title = f"a launch of {self.pair} ended its process: {answer.how}"
        failure = Failure(NAME, title, ("death", answer.how), {"access": answer.detail})
        case_class = lay_out(trip).expectation.case_class
        return Verdict(Outcome.FAILED, case_class, (failure,), {NAME: 0}, launches=1)

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
