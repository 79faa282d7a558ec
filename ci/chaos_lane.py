"""A lane of `ci/chaos`: runs one case after the other, as a runner of a campaign does.

The running case is in a journal, a failing one in another, each answer in a ledger: a lane may be
killed at any moment.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagefuzz.harness import subjects
from pagefuzz.harness.campaign.journal import Journal as FailingJournal
from pagefuzz.harness.check import Checker
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.running import Assignment
from pagefuzz.harness.workers.client import Worker
from pagefuzz.harness.workers.fork_server import close_servers, shared_server
from pagefuzz.harness.workers.journal import Journal
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.verdict import Outcome, Verdict

sys.path.append(str(Path(__file__).parents[1]))  # last: folders of ours are named like packages

from ci import misbehaving as does

TESTS = Path(__file__).parent / "tests"
DEADLY_TWIN = TESTS / "twins" / "null-dereference"
PAGE_BYTES = resource.getpagesize()

#: Kinds after which something must be started that takes seconds.
SLOW_KINDS = ("lane killed", "fork server killed by others")

HARMLESS = "harmless"


@dataclass(frozen=True)
class Kind:
    """What is injected into a case.

    num_pages  makes the misbehaving object do it
    want       what must become of the case
    """

    num_pages: int
    want: str


DEATH, HANG, CLEAN = "failed: death", "failed: hang", "clean"
NOT_RUN, NOT_CHECKED, LANE_KILLED = "not run", "could not check", "its lane was killed"

KINDS: Mapping[str, Kind] = {
    "SIGSEGV": Kind(does.SEGFAULT, DEATH),
    "SIGABRT": Kind(does.ABORT, DEATH),
    "SIGBUS": Kind(does.NOISE_AND_SIGBUS, DEATH),
    "SIGFPE": Kind(does.FPE, DEATH),
    "SIGTERM": Kind(does.TERM, DEATH),
    "SIGKILL, each time": Kind(does.KILL, DEATH),
    "exit status 0": Kind(does.EXIT_0, DEATH),
    "exit status 3": Kind(does.EXIT_3, DEATH),
    "stack overflow": Kind(does.OVERFLOWS_STACK, DEATH),
    "no memory left for the launch": Kind(does.TAKES_ALL_MEMORY, DEATH),
    "closes every file": Kind(does.CLOSE_FILES, DEATH),
    "SIGSEGV, a process left behind": Kind(does.CHILD_AND_SEGFAULT, DEATH),
    "endless loop": Kind(does.LOOPS, HANG),
    "endless sleep": Kind(does.SLEEPS, HANG),
    "SIGSTOP": Kind(does.STOPS, HANG),
    "stray write": Kind(does.STRAY_WRITE, "failed: untouched"),
    "a status of its own": Kind(does.BAD_STATUS, NOT_CHECKED),
    "a process left behind": Kind(does.CHILD, CLEAN),
    "worker killed by others": Kind(does.HARMLESS, CLEAN),
    "fork server killed by others": Kind(does.HARMLESS, CLEAN),
    "more than there is": Kind(does.HARMLESS, NOT_RUN),
    "no memory left for the worker": Kind(does.HARMLESS, NOT_RUN),
    "full disk for the running case": Kind(does.HARMLESS, NOT_CHECKED),
    "full disk for failing cases": Kind(does.SEGFAULT, DEATH),
    "lane killed": Kind(does.SLEEPS_20_S, LANE_KILLED),
    "sticky CUDA error": Kind(0, DEATH),
}
ON_CUDA = ["sticky CUDA error"]
ON_HOST = [name for name in KINDS if name not in ON_CUDA]


class MisbehavingChecker(Checker):
    """A `Checker` of an object that is no subject."""

    def __init__(self, assignment: Assignment, *, timeout_s: float, journal: Path) -> None:
        self.subject = subjects.subject("bundled:page", does.OPERATION)
        self._operation = registry.operation(does.OPERATION)
        self.backend, self.build = assignment.backend, assignment.build
        self._assignment = assignment
        self._worker = Worker(assignment, timeout_s=timeout_s, journal=Journal(journal))


# ---- a lane --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaneJob:
    """What a lane is given, as JSON on its command line.

    cases      [number, kind] of each, in order
    path       of the misbehaving object
    ledger     one JSON line for each case that was answered, and one at the end
    running    journal of the running case
    failing    journal of failing cases
    """

    cases: list[tuple[int, str]]
    backend: str
    path: str
    ledger: str
    running: str
    failing: str
    timeout_s: float

    @classmethod
    def load(cls, path: Path) -> LaneJob:
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**data, "cases": [(number, kind) for number, kind in data["cases"]]})


class Lane:
    """Runs cases. Everything it knows is in files, as it may be killed at any moment."""

    def __init__(self, job: LaneJob) -> None:
        self._job = job
        self._files = _open_files()
        self._checker = self._made()
        self._worker: Worker = self._checker._worker  # type: ignore[assignment]
        self._failing = FailingJournal(Path(job.failing))
        self._ledger = os.open(job.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def _made(self) -> Checker:
        job = self._job
        if job.backend == "host":
            assignment = does.assignment_of(Path(job.path))
            return MisbehavingChecker(
                assignment, timeout_s=job.timeout_s, journal=Path(job.running)
            )
        twin = f"twin:{DEADLY_TWIN}.toml"
        return Checker(does.OPERATION, twin, job.backend, "release", journal=Path(job.running))

    def run(self) -> None:
        self._checker.start()
        server = shared_server().pid
        files = _open_files(server)
        for number, kind in self._job.cases:
            restart_s = self._started()
            began = time.monotonic()
            case = case_of(number, kind, self._job.backend)
            became, said, launches = self._one(case, kind)
            self._write(
                number=number,
                became=became,
                said=said,
                launches=launches,
                restart_s=restart_s,
                seconds=time.monotonic() - began,
            )
        kept = {} if shared_server().pid != server else {"server_files": _open_files(server)}
        self._checker.close()
        self._failing.close()
        close_servers()
        os.close(self._ledger)
        self._ledger = -1
        left = {
            "files": _open_files() - self._files,
            "mappings": Path("/proc/self/maps").read_text().count("memfd:pagefuzz"),
            "server_files": kept.get("server_files", files) - files,
        }
        with Path(self._job.ledger).open("a", encoding="utf-8") as ledger:
            ledger.write(json.dumps({"left": left}) + "\n")

    def _started(self) -> float | None:
        """Seconds that a new worker took; None if there was one."""
        if self._checker.worker_pid is not None:
            return None
        began = time.monotonic()
        self._checker.start()
        return time.monotonic() - began

    def _write(self, **line: Any) -> None:
        os.write(self._ledger, json.dumps(line).encode() + b"\n")

    def _one(self, case: Case, kind: str) -> tuple[str, str, int]:
        """What became of a case, in a word and a sentence; and how many launches were judged."""
        try:
            with self._injected(kind):
                verdict = self._checker.check(case)
        except CannotCheckError as error:
            return NOT_CHECKED, str(error), 0
        said = verdict.not_run
        if verdict.outcome is Outcome.FAILED:
            said = self._keep(case, verdict, kind)
        return _word(verdict), said, verdict.launches

    def _keep(self, case: Case, verdict: Verdict, kind: str) -> str:
        """Into the journal of failing cases; what there is to say."""
        failure = verdict.failures[0]
        said = f"{failure.title}: {failure.details['access']}"
        try:
            if kind == "full disk for failing cases":
                with _file_limit(Path(self._job.failing), 10):
                    self._failing.append({"case": case.to_json()})
            else:
                self._failing.append({"case": case.to_json()})
        except CannotCheckError as error:
            said += f"; {error}"
        return said

    @contextmanager
    def _injected(self, kind: str) -> Iterator[None]:
        pid = self._checker.worker_pid
        assert pid is not None
        # Whoever kills the lane must come before its worker is taken for one that hangs.
        self._worker._timeout_s = 60.0 if kind == "lane killed" else self._job.timeout_s
        if kind == "worker killed by others":
            os.kill(pid, signal.SIGKILL)
        elif kind == "fork server killed by others":
            os.kill(shared_server().pid, signal.SIGKILL)
        elif kind == "no memory left for the worker":
            # It must be one without pools.
            self._checker.restart()
            self._checker.start()
            _limit_address_space(self._checker.worker_pid, 2**26)
        elif kind in ("no memory left for the launch", "more than there is"):
            _limit_address_space(pid, 2**40)
        if kind == "full disk for the running case":
            with _file_limit(Path(self._job.running), 10):
                yield
            return
        yield
        if kind in ("no memory left for the worker", "more than there is"):
            self._checker.restart()  # it lives on


def _word(verdict: Verdict) -> str:
    if verdict.outcome is Outcome.FAILED:
        return f"failed: {verdict.failures[0].judgement}"
    return CLEAN if verdict.outcome is Outcome.CLEAN else NOT_RUN


def case_of(number: int, kind: str, backend: str) -> Case:
    """The case of that number: no two are the same."""
    if backend == "cuda":
        deadly = json.loads(DEADLY_TWIN.with_suffix(".json").read_text())["case"]
        case = Case.from_json({**deadly, "seed": number})
        return case if kind in ON_CUDA else case.with_sizes(num_pages=4)
    sizes = {}
    if kind == "more than there is":
        sizes = {"num_tokens": 2**20, "dst_rows": 2**20, "dst_row_stride_bytes": 2**21}
    num_pages = KINDS[kind].num_pages if kind != HARMLESS else does.HARMLESS
    case = does.case_of(num_pages, number, **sizes)
    if kind == "stray write":  # into a red zone
        return replace(case, placements={"dst": Placement(guard="none")})
    return case


def _limit_address_space(pid: int | None, more_bytes: int) -> None:
    assert pid is not None
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * PAGE_BYTES + more_bytes
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


@contextmanager
def _file_limit(path: Path, more_bytes: int) -> Iterator[None]:
    """This process can write only so much more to a file, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size_bytes = path.stat().st_size if path.exists() else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _open_files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


if __name__ == "__main__":
    Lane(LaneJob.load(Path(sys.argv[1]))).run()
