"""Checks one case on one subject: the whole chain as a function.

    from pagefuzz import check, load_case

    verdict = check(load_case("case.json"), subject="bundled:page-as-merged")
    for failure in verdict.failures:
        print(failure.title)

`check` is for one case; a `Checker` keeps the worker process for many.
"""

from __future__ import annotations

import platform
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pagefuzz.harness import subjects
from pagefuzz.harness.build import BuildSpec, cache_folder, compiler
from pagefuzz.harness.build import build as build_object
from pagefuzz.harness.devices import resolve_device
from pagefuzz.harness.errors import CannotCheckError, RuinedProcessError
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.running import Assignment, FixedBytes, Injection
from pagefuzz.harness.workers.client import Worker, worker_for
from pagefuzz.harness.workers.journal import Journal, new_path
from pagefuzz.oracles import judging, registry
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.judgement import Run
from pagefuzz.oracles.observation import Death, Observation
from pagefuzz.oracles.verdict import Verdict

if TYPE_CHECKING:
    from pagefuzz.harness.workers.inside import InsideWorker

#: Seconds after which a launch that has not come back is taken for a hang. A case takes
#: milliseconds; the largest that the arenas accept, a few seconds.
TIMEOUT_S = 60.0


class OwnsWorker:
    """What launches through one worker, and ends it. A context manager."""

    _worker: Worker | InsideWorker

    @property
    def device(self) -> str:
        return self._worker.device

    @property
    def deaths(self) -> int:
        return self._worker.deaths

    @property
    def memory(self) -> MemoryUse:
        """The most that a worker has held so far."""
        return self._worker.memory

    @property
    def worker_pid(self) -> int | None:
        """Of the process that launches; None before the first case, after a death, and where
        launches are not isolated."""
        return self._worker.pid

    @property
    def hang_after_s(self) -> float:
        """Seconds after which a launch is a hang; may be changed between cases."""
        return self._worker.hang_after_s

    @hang_after_s.setter
    def hang_after_s(self, seconds: float) -> None:
        self._worker.hang_after_s = seconds

    @property
    def longest_launch_s(self) -> float:
        """Of those that have come back; 0 before the first."""
        return self._worker.longest_launch_s

    @property
    def unended_launch_s(self) -> float:
        """How long a launch of the last case had lasted when its worker was ended; 0 if it was
        not."""
        return self._worker.unended_launch_s

    def restart(self) -> None:
        """Ends the worker: the next case gets a fresh one."""
        self._worker.restart()

    def watch_ends(self) -> None:
        """From now on each case that passes is run again in the same worker, which then ends: if it
        dies meanwhile, that is a death of the case. For a few cases: the last one of many is
        watched by `close`."""
        self._worker.watches_ends = True

    def close(self) -> None:
        """Ends the worker. The fork server stays for other checkers until this process exits.

        Raises `RuinedProcessError` if a worker has died after a case that had passed.
        """
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RuinedProcessError:
            if error is None:
                raise


class Checker(OwnsWorker):
    """One subject on one backend, in a worker process of its own. A context manager.

        with Checker("cp_gather_cache", "bundled:page") as checker:
            for case in cases:
                verdict = checker.check(case)

    The subject is built if no object of it is in the build cache, and loaded in a worker process
    only; a launch that kills the worker is a `death` failure of that case, and the next case gets
    a new worker. Not for several threads at once; processes and threads may each have their own.

    subject   what is checked (`subjects.Subject`)
    backend   "host" or "cuda"
    build     flags that were asked for, e.g. "checked", "release", "checked,coverage"
    flags     those of the object: a Triton kernel has "triton", and is never checked on a GPU
    device    name of what it runs on, once a worker has started
    deaths    how many workers have died so far
    """

    def __init__(
        self,
        operation: str | None,
        subject: str = "bundled:page",
        device: str = "host",
        build: str = "checked",
        *,
        timeout_s: float | None = None,
        journal: Path | None = None,
        isolate: bool = True,
        gpu_memory_bytes: int | None = None,
    ) -> None:
        """Builds the subject.

        operation  its name; None if the subject's name leaves no choice
        subject    as `pagefuzz list` shows it, or "twin:<path of a .toml file>"
        device     "host", "cuda" or "auto" (cuda where there is a GPU)
        build      build flags, separated by commas
        timeout_s  after which a launch counts as a hang; None: `TIMEOUT_S`
        journal    file that holds the running case, so that it survives the death of this process;
                   one in the cache's folder `journals` by default, removed by `close`
        isolate    whether launches have a worker process; else they happen in this one, which
                   dies of what a worker would die of, and ends if one hangs
        gpu_memory_bytes  that a GPU's buffers may take; a case that needs more is not run. None:
                   what is free

        Raises `CannotCheckError`: an unknown name, no GPU, no compiler, a kernel that does not
        compile, or an operation whose arguments do not match its kernel's.
        """
        self.subject = subjects.subject(subject, operation)
        self._operation = registry.operation(self.subject.operation)
        subjects.check_binding(self._operation, self.subject.source)
        self.backend = resolve_device(device)
        spec = BuildSpec.parse(self.backend, build)
        self.build = spec.text
        if "asan" in spec.flags and not isolate:
            raise CannotCheckError(
                "an AddressSanitizer build needs a process of its own; leave --no-isolate out"
            )
        self._assignment = replace(
            assignment_of(self.subject, spec), gpu_memory_bytes=gpu_memory_bytes
        )
        self.flags = self._assignment.flags
        about = {"subject": subject, "device": self.backend, "build": self.build}
        self._worker = worker_for(
            self._assignment,
            isolate=isolate,
            timeout_s=TIMEOUT_S if timeout_s is None else timeout_s,
            environment=_asan_environment() if "asan" in spec.flags else None,
            journal=Journal(journal or new_path(cache_folder().parent / "journals"), **about),
        )

    @property
    def assignment(self) -> Assignment:
        """What its worker is told to launch."""
        return self._assignment

    def start(self) -> None:
        """Starts the worker, which `check` does by itself; fails early with `CannotCheckError`."""
        self._worker.start()

    def check(self, case: Case, *, injection: Injection | None = None) -> Verdict:
        """Launches a case twice and judges what was seen.

        injection  an access that each launch makes at its end (builds with "inject")

        Returns a verdict that is clean, failed (the cause first) or, with the reason, not run.
        Raises `CaseError` for a case that the operation cannot lay out, and `CannotCheckError`
        if nothing could be judged; neither is a pass.
        """
        answer = self._worker.run(case, injection=injection)
        return self._judge_death(case, answer) if isinstance(answer, Death) else answer.verdict

    def check_fixed_bytes(self, case: Case) -> tuple[Verdict, FixedBytes | None]:
        """As `check`, with a digest of every byte that the contract fixes, to compare backends;
        None if nothing was launched or the worker died."""
        answer = self._worker.run(case, with_fixed_bytes=True)
        if isinstance(answer, Death):
            return self._judge_death(case, answer), None
        return answer.verdict, answer.fixed_bytes

    def _judge_death(self, case: Case, death: Death) -> Verdict:
        """Nothing came back from the worker, so its death is judged here."""
        plan = self._operation.plan(case)
        expectation = self._operation.expect(plan)
        observation = Observation(self.backend, self._assignment.build, death=death)
        contained = self.subject.promises_containment
        return judging.judge(
            Run(self._operation, plan, expectation, observation, contained=contained)
        )


def check(
    case: Case, subject: str = "bundled:page", device: str = "host", build: str = "checked"
) -> Verdict:
    """Checks one case on one subject.

    case     what to launch; `load_case` reads one from a file
    subject  as `pagefuzz list` shows it, or "twin:<path of a .toml file>"
    device   "host", "cuda" or "auto" (cuda where there is a GPU)
    build    "checked" (default: every access and index operation is tested, and a fault comes with
             its source line), "release", or other flags, separated by commas

    Returns a `Verdict`; the subject may crash or hang without harm to this process. Raises
    `CaseError` for a malformed case and `CannotCheckError` if the case could not be checked.

    The first call compiles the subject and starts a fork server (seconds), later ones take
    milliseconds on the host and a third of a second on a GPU. Use a `Checker` for many cases.
    """
    with Checker(case.operation, subject, device, build) as checker:
        checker.watch_ends()
        return checker.check(case)


def assignment_of(subject: subjects.Subject, spec: BuildSpec) -> Assignment:
    """Builds a subject. Raises `CannotCheckError`."""
    build, keys_path, scan_path = spec.text, "", ""
    if subject.source.suffix == ".py":
        from pagefuzz.harness.triton.building import build_triton

        made = build_triton(subject.source, subject.symbol, subject.operation, spec, subject.twin)
        path = made.path
        build = ",".join(sorted(made.flags))
        if made.keys_path is not None:
            keys_path = str(made.keys_path)
        if spec.target == "cuda":
            scanning = subjects.scanning_subject().source
            scan_path = str(build_object(scanning, BuildSpec("cuda", frozenset())))
    else:
        path = build_object(subject.source, spec, twin=subject.twin)
    return Assignment(
        operation=subject.operation,
        symbol=subject.symbol,
        object_path=str(path),
        source_path=str(subject.source),
        backend=spec.target,
        build=build,
        promises_containment=subject.promises_containment,
        keys_path=keys_path,
        scan_path=scan_path,
    )


def _asan_environment() -> dict[str, str]:
    """What a process needs to load an AddressSanitizer object: the runtime comes first."""
    words = compiler("host")
    library = Path()
    # g++'s name for it, then clang++'s.
    for name in ("libasan.so", f"libclang_rt.asan-{platform.machine()}.so"):
        command = [*words, f"-print-file-name={name}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CannotCheckError(f"{shlex.join(command)} failed: {error}") from None
        library = Path(done.stdout.strip())
        if library.is_absolute():
            break
    else:
        raise CannotCheckError(f"{words[0]} comes without AddressSanitizer's runtime library")
    return {
        "LD_PRELOAD": str(library.resolve()),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
    }
