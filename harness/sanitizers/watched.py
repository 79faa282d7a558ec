"""The program that a sanitizer watches: launches each case of a file once, and says when.

    python -m pagefuzz.harness.sanitizers.watched JOB.json

It prints a marker before and after each launch, into the stream that the tool prints its reports
into, and appends a line of JSON for each to the file of results. It ends early where a launch has
broken the device's context; whoever started it starts another for the rest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

import cffi

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.arena import DeviceFaultError, DoesNotFitError
from pagefuzz.harness.memory.driver import Driver
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.harness.memory.plain import PlainArena
from pagefuzz.harness.memory.use import Holds, MemoryUse
from pagefuzz.harness.objects import LaunchObject
from pagefuzz.harness.running import Assignment, loaded
from pagefuzz.harness.sanitizers.tools import COMPUTE
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.contents import FILLS
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import Status
from pagefuzz.oracles.operation import Operation

CANARY_WORDS = 64


@dataclass(frozen=True)
class Job:
    """What the program reads.

    tool        that watches; "" for none
    assignment  what is launched, as JSON; None: the tool's canary
    canary      path of its object
    cases       number -> case as JSON
    results     file to which a line is appended for each
    """

    tool: str
    results: str
    assignment: Mapping[str, Any] | None = None
    canary: str = ""
    cases: Mapping[int, Any] = field(default_factory=dict)

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Job:
        data = json.loads(text)
        cases = {int(number): case for number, case in data.pop("cases").items()}
        return cls(**data, cases=cases)


@dataclass(frozen=True)
class Launched:
    """What became of one case.

    status   that the launcher returned; None if nothing was launched or the device broke
    message  its sentence, why nothing was launched, or how the device broke
    not_run  whether nothing was launched
    seconds  of the launch, waiting for it included
    compiled  whether it had to compile a kernel, or to look one up in files: that is in `seconds`
    buffers  name -> (address of the base, bytes from there), as far as they have memory
    device   name of what it ran on
    memory   that the process held then
    """

    case: int
    device: str
    status: int | None = None
    message: str = ""
    not_run: bool = False
    seconds: float = 0.0
    compiled: bool = False
    buffers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    memory: MemoryUse = field(default_factory=MemoryUse)

    @property
    def is_watched(self) -> bool:
        """Whether a kernel was launched: neither left out nor turned down by the launcher."""
        return not self.not_run and self.status in (None, Status.OK)

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, line: str) -> Launched:
        data = json.loads(line)
        buffers = {name: (one[0], one[1]) for name, one in data.pop("buffers").items()}
        memory = MemoryUse(**data.pop("memory"))
        return cls(**data, buffers=buffers, memory=memory)


class _Memory(Holds, Protocol):
    def place(self, plan: Plan, expectation: Expectation) -> Mapping[str, int]: ...

    def fill(self, fill: int) -> None: ...

    def synchronise(self) -> None: ...


def main() -> int:
    """The exit code; a `CannotCheckError` is printed."""
    job = Job.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        if job.assignment is None:
            _sing(job)
        else:
            _launch_all(job, Assignment(**job.assignment))
    except CannotCheckError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _mark(what: str, case: int) -> None:
    """Straight to the descriptor: nothing may be kept back while the tool prints."""
    os.write(1, f"[pagefuzz {what} {case}]\n".encode())


def _sing(job: Job) -> None:
    """Launches the tool's canary, in an allocation that ends where it reads."""
    ffi = cffi.FFI()
    ffi.cdef("int pf_canary(int32_t tool, void *memory, int32_t words);")
    library = ffi.dlopen(job.canary)
    driver = Driver()
    driver.use_device()
    memory = driver.allocate(4 * CANARY_WORDS)
    number = tuple(COMPUTE).index(job.tool)
    _mark("begin", 0)
    error = library.pf_canary(number, ffi.cast("void *", memory), CANARY_WORDS)
    with suppress(DeviceFaultError):  # it is a fault
        driver.synchronise()
    _mark("end", 0)
    if error:
        raise CannotCheckError(
            f"the canary of {job.tool} could not be launched: CUDA error {error}"
        )


def _launch_all(job: Job, assignment: Assignment) -> None:
    operation = registry.operation(assignment.operation)
    if "triton" in assignment.flags and assignment.backend != "cuda":
        raise CannotCheckError(
            f"{assignment.operation} would be launched by Triton's interpreter: there is no kernel "
            "that a tool could watch"
        )
    memory: _Memory = HostArena()
    device = "host"
    if assignment.backend == "cuda":
        driver = Driver()
        driver.use_device()
        device = driver.properties().name
        memory = PlainArena(driver, readable_only=job.tool == "initcheck")
    subject, _ = loaded(assignment)
    if ("cuda" in subject.flags) != (assignment.backend == "cuda"):
        raise CannotCheckError(f"{assignment.object_path} was not built for {device}")
    with open(job.results, "a", encoding="utf-8") as results:
        for number, data in job.cases.items():
            launched = _launch(number, Case.from_json(data), operation, subject, memory, device)
            _note(results, replace(launched, memory=MemoryUse.of(memory)))
            if launched.status is None and not launched.not_run:
                return  # nothing more can be launched from here


def _note(results: TextIO, launched: Launched) -> None:
    results.write(launched.dumps() + "\n")
    results.flush()


def _launch(
    number: int,
    case: Case,
    operation: Operation,
    subject: LaunchObject,
    memory: _Memory,
    device: str,
) -> Launched:
    plan = operation.plan(case)
    expectation = operation.expect(plan)
    try:
        addresses = memory.place(plan, expectation)
        memory.fill(FILLS[0])
    except (DoesNotFitError, MemoryError) as error:
        return Launched(number, device, message=str(error) or "no memory", not_run=True)
    subject.marshal(plan, addresses)
    buffers = {
        name: (addresses[name], buffer.memory_bytes)
        for name, buffer in plan.buffers.items()
        if addresses[name] and not buffer.host and buffer.placement.over is None
    }
    memory.synchronise()
    known = len(subject.compilations())
    _mark("begin", number)
    began = time.perf_counter()
    try:
        status, message = subject.launch()
        memory.synchronise()
    except DeviceFaultError as error:
        _mark("end", number)
        return Launched(number, device, message=f"{error.name}: {error}", buffers=buffers)
    seconds = time.perf_counter() - began
    _mark("end", number)
    return Launched(
        number,
        device,
        int(status),
        message,
        seconds=seconds,
        compiled=len(subject.compilations()) > known,
        buffers=buffers,
    )


if __name__ == "__main__":
    sys.exit(main())
