"""Runs cases under a tool of compute-sanitizer, in a process of their own, and reads what it says.

Fails closed: a run is a result only if the tool printed its summary, every case came to its end,
and nothing in the output says that the tool could not do its work. What was reported until then is
not lost with it: the error has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pagefuzz.kernels
from pagefuzz.harness.build import BuildSpec, build
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.lifeline import tied
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.running import Assignment
from pagefuzz.harness.sanitizers.reports import Output, Report, parse
from pagefuzz.harness.sanitizers.tools import ERROR_EXIT_CODE, watched_command
from pagefuzz.harness.sanitizers.watched import Job, Launched
from pagefuzz.oracles.case import Case

#: A process under a tool may take so long to start, and this much more for each case.
START_TIMEOUT_S = 300.0
CASE_TIMEOUT_S = 10.0

#: A process under a tool may print so much, reports and all: it is read into memory.
MOST_PRINTED_BYTES = 2**30

#: So much is read of what prints more than that: some ten thousand reports.
_READ_OF_A_FLOOD_BYTES = 2**24

_LOOK_EVERY_S = 0.1

CANARIES = Path(pagefuzz.kernels.__file__).parent / "sanitizers" / "canaries.cu"


@dataclass
class Watched:
    """What a tool saw of a set of cases.

    launched  by the number of the case
    reports   in order; `Report.case` is the number, as far as the order of the output can be
              trusted
    """

    launched: dict[int, Launched] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)

    @property
    def launches(self) -> int:
        """Kernels that were launched while the tool watched."""
        return sum(one.is_watched for one in self.launched.values())

    @property
    def watched_bytes(self) -> int:
        """Of the buffers of these launches."""
        watched = [one for one in self.launched.values() if one.is_watched]
        return sum(size for one in watched for _, size in one.buffers.values())

    @property
    def memory(self) -> MemoryUse:
        """The most that a process held."""
        return MemoryUse.most_of(one.memory for one in self.launched.values())


class UnfinishedError(CannotCheckError):
    """The tool gave no account of all of it; with what it had seen until then."""

    def __init__(self, sentence: str, watched: Watched) -> None:
        super().__init__(sentence)
        self.watched = watched


class _UnaccountedError(CannotCheckError):
    """The same, of one process: reports that tell of a kernel, not what the tool says of its own
    end."""

    def __init__(self, sentence: str, output: Output) -> None:
        super().__init__(sentence)
        self.output = _evidence(output)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C and the like, with what the tool had seen until then."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.watched = watched


class _Stopped(KeyboardInterrupt):
    """The same, of one process, with what it had printed."""

    def __init__(self, printed: str) -> None:
        super().__init__()
        self.printed = printed


class Watcher:
    """A tool, or none, and what is launched.

    tool  "" launches without any tool, to compare the speed
    """

    def __init__(
        self, tool: str, assignment: Assignment, *, timeout_s: float | None = None
    ) -> None:
        """timeout_s  for a process, in place of what its number of cases asks for"""
        self.tool = tool
        self._assignment, self._timeout_s = assignment, timeout_s

    def watch(self, cases: Mapping[int, Case]) -> Watched:
        """Launches each case once; in more than one process where a launch breaks the device's
        context. Raises `UnfinishedError` and `Interrupted`."""
        watched = Watched()
        left = dict(cases)
        while left:
            try:
                self._one_process(left, watched)
            except CannotCheckError as error:
                raise UnfinishedError(str(error), watched) from None
            ended = left.keys() & watched.launched.keys()
            if not ended:
                raise UnfinishedError(
                    f"{self._name} came to the end of no case, without a word", watched
                )
            for number in ended:
                del left[number]
        return watched

    @property
    def _name(self) -> str:
        return self.tool or "the launching process"

    def _one_process(self, cases: Mapping[int, Case], watched: Watched) -> None:
        """Adds the cases that it got through, and their reports."""
        job = {number: case.to_json() for number, case in cases.items()}
        with tempfile.TemporaryDirectory(prefix="pagefuzz-") as folder:
            results = Path(folder) / "results.jsonl"
            results.touch()
            try:
                output = run(
                    Job(self.tool, str(results), self._assignment.to_json(), cases=job),
                    Path(folder),
                    self._timeout_s or START_TIMEOUT_S + CASE_TIMEOUT_S * len(cases),
                )
            except _Stopped as stopped:
                _add(watched, _evidence(parse(stopped.printed)), results)
                raise Interrupted(watched) from None
            except _UnaccountedError as error:
                _add(watched, error.output, results)
                raise
            _add(watched, output, results)


def _evidence(output: Output) -> Output:
    """Without the reports that do not tell of a kernel: a tool that ends early says that in forms
    of which only a few are known."""
    reports = tuple(report for report in output.reports if report.tells_of_a_kernel)
    return replace(output, reports=reports)


def _add(watched: Watched, output: Output, results: Path) -> None:
    whole, _, _ = results.read_text(encoding="utf-8").rpartition("\n")
    watched.reports += output.reports
    for one in map(Launched.loads, whole.splitlines()):
        watched.launched[one.case] = one
        broke = one.status is None and not one.not_run
        if broke and not output.complaints and not _blamed(output, one.case):
            # The device says that the launch broke it, and the tool has no word for it; one that
            # could not do its work may have broken it itself.
            watched.reports.append(Report((f"the device reports {one.message}",), one.case))


def _blamed(output: Output, case: int) -> bool:
    return any(report.case == case for report in output.reports)


def prove(tool: str) -> int:
    """Lets the tool watch its canary; how many reports there were.

    Raises `CannotCheckError` if the tool does not report the canary's fault: it sees nothing then.
    """
    canary = build(CANARIES, BuildSpec("cuda", frozenset()))
    with tempfile.TemporaryDirectory(prefix="pagefuzz-") as folder:
        job = Job(tool, str(Path(folder) / "results.jsonl"), canary=str(canary))
        output = run(job, Path(folder), START_TIMEOUT_S)
    if not output.reports:
        raise CannotCheckError(
            f"{tool} did not report the deliberate fault of {CANARIES.name}: it is blind here; it "
            f"said: {output.said}"
        )
    return len(output.reports)


def run(job: Job, folder: Path, timeout_s: float) -> Output:
    """One process. Raises `CannotCheckError` if the tool gave no account of all of it, with what
    it reported unless the account contradicts it."""
    name = job.tool or "the launching process"
    path = folder / "job.json"
    path.write_text(job.dumps(), encoding="utf-8")
    program = [sys.executable, "-m", "pagefuzz.harness.sanitizers.watched", str(path)]
    command = watched_command(job.tool, program) if job.tool else program
    code, text = _run(command, timeout_s)
    output = parse(text)

    def unaccounted(sentence: str) -> _UnaccountedError:
        return _UnaccountedError(sentence, output)

    said = f"; the end of its output: {output.said}" if output.said else "; it printed nothing"
    during = ""
    if unfinished := [case for case in output.begun if case not in output.ended]:
        during = f" in the launch of {json.dumps(job.cases.get(unfinished[-1], 'the canary'))}"
    if code is None:
        raise unaccounted(f"{name} did not come to an end within {timeout_s:g} s{during}")
    if output.complaints:
        raise unaccounted(f"{name} says: {output.complaints[0]}{said}")
    if unfinished:
        raise unaccounted(f"the process under {name} died{during} ({_how(code)}){said}")
    if not job.tool:
        if code:
            raise unaccounted(f"{name} failed ({_how(code)}){said}")
        return output
    if output.errors is None:
        raise unaccounted(f"{name} ended without a summary ({_how(code)}){said}")
    if code not in (0, ERROR_EXIT_CODE):
        raise unaccounted(f"the process under {name} failed ({_how(code)}){said}")
    if bool(output.errors) is not bool(output.reports):
        raise CannotCheckError(
            f"{name} counts {output.errors} errors and describes {len(output.reports)}{said}"
        )
    if code and not output.errors:
        raise CannotCheckError(f"{name} counts no errors and returns {code}{said}")
    return output


def _run(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit code, None if it had to be ended, and output of a process in a group of its own, which
    ends with this call. Raises `CannotCheckError` if it does not run, or prints without end, and
    `_Stopped`. Of a process that had to be ended only whole lines count."""
    with tempfile.TemporaryFile() as output, contextlib.ExitStack() as stack:
        try:
            process = stack.enter_context(
                tied(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    # The current folder must not be on the path: ours has folders named like
                    # packages.
                    env={**os.environ, "PYTHONSAFEPATH": "1"},
                )
            )
        except OSError as error:
            raise CannotCheckError(f"{command[0]} does not run: {error.strerror}") from None

        def printed(limit_bytes: int = MOST_PRINTED_BYTES) -> str:
            # Not through a position, which is also that of who still prints, and would write there.
            size_bytes = min(limit_bytes, os.fstat(output.fileno()).st_size)
            return os.pread(output.fileno(), size_bytes, 0).decode("utf-8", "replace")

        code: int | None = None
        try:
            deadline = time.monotonic() + timeout_s
            while code is None and (left_s := deadline - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(left_s, _LOOK_EVERY_S))
                if os.fstat(output.fileno()).st_size > MOST_PRINTED_BYTES:
                    raise _UnaccountedError(
                        f"{command[0]} and what it watched printed more than "
                        f"{MOST_PRINTED_BYTES / 2**20:,.0f} MiB",
                        parse(
                            _whole_lines(printed(min(_READ_OF_A_FLOOD_BYTES, MOST_PRINTED_BYTES)))
                        ),
                    )
        except KeyboardInterrupt:
            raise _Stopped(_whole_lines(printed())) from None
        stack.close()  # nobody prints any more
        return code, printed() if code is not None else _whole_lines(printed())


def _whole_lines(printed: str) -> str:
    """Half a line of a report would be another fault."""
    return printed[: printed.rfind("\n") + 1]


def _how(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"ended by signal {-code}"
