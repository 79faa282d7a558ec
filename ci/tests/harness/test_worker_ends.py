"""How workers end, what they leave behind, what they hold; and launches without a worker."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ci.misbehaving import (
    CHILD,
    CHILD_AND_SEGFAULT,
    HARMLESS,
    KILL,
    MISALIGNED,
    REFUSE,
    SEGFAULT,
    SLEEPS,
    case_of,
    outcome,
)
from ci.tests.processes import children, wait_until_gone

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.running import Answer, Assignment
from pagefuzz.harness.workers import client
from pagefuzz.harness.workers.client import Worker, _Running
from pagefuzz.harness.workers.fork_server import ForkServer, close_servers, shared_server
from pagefuzz.harness.workers.journal import Journal, last_entry
from pagefuzz.harness.workers.oom import oom_kills
from pagefuzz.oracles.observation import Death
from pagefuzz.oracles.verdict import Outcome

pytestmark = pytest.mark.usefixtures("own_servers")


@pytest.mark.parametrize("num_pages", [CHILD_AND_SEGFAULT, CHILD])
def test_a_process_that_a_subject_leaves_behind_is_ended(worker: Worker, num_pages: int) -> None:
    """It would hold the worker's socket open, so that a death looks like a hang."""
    worker.run(case_of(HARMLESS))
    began = time.monotonic()
    answer = worker.run(case_of(num_pages))
    if num_pages == CHILD:
        assert outcome(answer) is Outcome.CLEAN
        assert worker.pid is not None
        assert len(children(worker.pid)) == 2  # one a launch
        worker.restart()
    else:
        assert isinstance(answer, Death)
        assert answer.how == "SIGSEGV"
    assert time.monotonic() - began < 15
    deadline = time.monotonic() + 30
    while children(shared_server().pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_outlives_server_and_worker_is_ended(worker: Worker) -> None:
    """Neither does it hide that they are gone."""
    worker.run(case_of(HARMLESS))
    worker.run(case_of(CHILD))
    server, pid = shared_server(), worker.pid
    assert pid is not None
    left = children(pid)
    os.kill(server.pid, signal.SIGKILL)
    wait_until_gone(pid)  # it may answer once more before the kernel ends it
    began = time.monotonic()
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert time.monotonic() - began < 20
    assert len(left) == 2
    wait_until_gone(*left)


def test_a_restart_is_no_death(worker: Worker) -> None:
    """The next case gets a fresh process; without one there is nothing to do."""
    worker.restart()
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    first = worker.pid
    worker.restart()
    assert worker.pid is None
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert worker.pid != first
    assert worker.deaths == 0


def test_what_a_worker_holds_is_known(worker: Worker) -> None:
    """Its arena's address space and memory, and the peak of the process; the most of all."""
    assert worker.memory == MemoryUse()
    worker.run(case_of(HARMLESS))
    held = worker.memory
    assert held.address_bytes > 2**30 > held.resident_bytes > 2**20
    assert 0 < held.arena_bytes < 2**20
    worker.run(case_of(HARMLESS, num_tokens=2**20, dst_rows=2**20, dst_row_stride_bytes=2**10))
    assert worker.memory.address_bytes > held.address_bytes + 2**30
    worker.restart()
    worker.run(case_of(HARMLESS))
    assert worker.memory.address_bytes > held.address_bytes + 2**30


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([3, 4], "the kernel has ended a process meanwhile, being short of memory"),
        ([3, 3], "the kernel was not short of memory"),
        ([None, None], "nothing tells whether the kernel was short of memory"),
    ],
)
def test_a_kill_says_whether_memory_was_short(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, counts: list[int | None], said: str
) -> None:
    """The kernel counts what it ends for lack of memory."""
    before, after = counts
    monkeypatch.setattr(client, "oom_kills", lambda: before)
    worker.run(case_of(HARMLESS))
    monkeypatch.setattr(client, "oom_kills", lambda: after)
    monkeypatch.setattr(_Running, "fork", _forked_with(before))
    death = worker.run(case_of(KILL))
    assert isinstance(death, Death)
    assert death.how == "SIGKILL"
    assert death.detail.startswith(said)


def _forked_with(count: int | None) -> object:
    fork = _Running.fork

    def forked(server: ForkServer, assignment: Assignment) -> _Running:
        running = fork(server, assignment)
        running.oom_kills = count
        return running

    return forked


@pytest.mark.parametrize("short", [True, False])
def test_a_case_for_which_the_kernel_has_no_memory_is_not_run(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    """Its worker ended twice before it launched: not run if memory is why, else not checked."""
    start = worker.start

    def start_and_kill() -> None:
        start()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)

    monkeypatch.setattr(worker, "start", start_and_kill)
    monkeypatch.setattr(client, "_is_short_of_memory", lambda running: short)
    if not short:
        with pytest.raises(CannotCheckError, match="a worker died twice, not of the launch: SIGK"):
            worker.run(case_of(HARMLESS))
        return
    answer = worker.run(case_of(HARMLESS))
    assert outcome(answer) is Outcome.NOT_RUN
    assert isinstance(answer, Answer)
    assert answer.verdict.not_run == "the kernel ended its worker, twice, being short of memory"


def test_kills_for_lack_of_memory_are_counted(tmp_path: Path) -> None:
    """Of the machine and of the control group, as far as they tell."""
    machine, group = tmp_path / "vmstat", tmp_path / "memory.events"
    assert oom_kills((machine, group)) is None
    machine.write_text("nr_free_pages 12\noom_kill 3\n")
    assert oom_kills((machine, group)) == 3
    group.write_text("low 0\noom 7\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills((machine, group)) == 5


def test_a_misaligned_access_says_where(worker: Worker) -> None:
    """The host emulation's sentence names a line of the source, which is the finding's."""
    answer = worker.run(case_of(MISALIGNED))
    assert isinstance(answer, Answer)
    failure = answer.verdict.failures[0]
    assert failure.judgement == "launch"
    assert failure.details == {
        "access": "returned LAUNCH_FAILED: misaligned address: read of 16 bytes at byte 8 of "
        "buffer 0",
        "where": "kernels/operations/cp_gather_cache.cu:88  block (1,0,0) thread (2,0,0)",
    }


def test_a_case_that_was_half_written_spoils_no_later_one(tmp_path: Path) -> None:
    """A full disk leaves no half line, and one that is left by another is passed over."""
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write(case_of(2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.path.stat().st_size + 9, before[1]))
    try:
        with pytest.raises(CannotCheckError):
            journal.write(case_of(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    entry = last_entry(journal.path)
    assert entry is not None
    assert entry["case"] == case_of(2).to_json()
    journal.write(case_of(4))
    with journal.path.open("a") as file:
        file.write('{"case": {{}\n')
    entry = last_entry(journal.path)
    assert entry is not None
    assert entry["case"] == case_of(4).to_json()
    journal.close()


#: Launches in this process, which is to be another one than that of the tests.
INSIDE = """
import json, sys
from pathlib import Path
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.running import Assignment
from pagefuzz.harness.workers.inside import InsideWorker
from pagefuzz.harness.workers.journal import Journal
from pagefuzz.oracles.case import Case
assignment, journal, *cases = sys.argv[1:]
worker = InsideWorker(Assignment(**json.loads(assignment)), timeout_s=0.6,
                      journal=Journal(Path(journal)))
for case in cases:
    answer = worker.run(Case.from_json(json.loads(case)))
    print(answer.verdict.outcome, flush=True)
assert worker.device == "host" and worker.deaths == 0 and worker.pid is None
assert worker.memory.address_bytes > 0
worker.restart()
worker.close()
"""


def inside(
    assignment: Assignment, journal: Path, *num_pages: int
) -> subprocess.CompletedProcess[str]:
    cases = [case_of(number).dumps() for number in num_pages]
    command = [sys.executable, "-c", INSIDE, json.dumps(assignment.to_json()), str(journal), *cases]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_launches_that_are_not_isolated(assignment: Assignment, tmp_path: Path) -> None:
    """Judged as in a worker; the journal is gone after an orderly end."""
    done = inside(assignment, tmp_path / "journal.jsonl", HARMLESS, REFUSE, HARMLESS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["clean", "failed", "clean"]
    assert not (tmp_path / "journal.jsonl").exists()


@pytest.mark.parametrize(("num_pages", "code"), [(SEGFAULT, -signal.SIGSEGV), (SLEEPS, 2)])
def test_a_death_that_is_not_isolated_is_that_of_the_process(
    assignment: Assignment, tmp_path: Path, num_pages: int, code: int
) -> None:
    """Never a pass; the case is in the journal. A hang ends it with a sentence."""
    journal = tmp_path / "journal.jsonl"
    done = inside(assignment, journal, HARMLESS, num_pages, HARMLESS)
    assert done.returncode == code
    assert done.stdout.split() == ["clean"]
    if num_pages == SLEEPS:
        assert done.stderr == (
            "pagefuzz: a launch did not end within 0.6 s, and was not isolated: this process ends; "
            f"the case is in {journal}\n"
        )
    entry = last_entry(journal)
    assert entry is not None
    assert entry["case"] == case_of(num_pages).to_json()


def open_files() -> set[int]:
    with os.scandir("/proc/self/fd") as entries:
        return {int(one.name) for one in entries if os.path.exists(one.path)}


@pytest.mark.parametrize("left", range(5))
def test_a_limit_of_open_files_is_a_sentence(worker: Worker, left: int) -> None:
    """Not an internal error; and whatever was opened until then is closed."""
    shared_server()
    before = open_files()
    free = [number for number in range(len(before) + 7) if number not in before]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[left], hard))
    try:
        with pytest.raises(CannotCheckError, match="no worker can be started: Too many open files"):
            worker.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_files() == before
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN


#: A server that imports it refuses to fork while it has as many children as a file says.
LIMITED = """
import errno, os, sys
from pathlib import Path
if sys.argv[:1] and "pagefuzz.harness.workers.server" in " ".join(sys.orig_argv):
    fork = os.fork
    def limited():
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if len(listed) >= int(Path(os.environ["MOST_WORKERS"]).read_text()):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()
    os.fork = limited
"""


@pytest.fixture
def limited(assignment: Assignment, tmp_path: Path) -> Iterator[tuple[Worker, Path]]:
    """A worker, and the file that says how many its server may have."""
    (tmp_path / "sitecustomize.py").write_text(LIMITED)
    most = tmp_path / "most"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "MOST_WORKERS": str(most)}
    made = Worker(assignment, timeout_s=30, environment=environment)
    yield made, most
    made.close()
    close_servers()


def test_a_spare_that_cannot_be_forked_is_no_loss(limited: tuple[Worker, Path]) -> None:
    """One process is enough: that one goes on, and there is no spare."""
    worker, most = limited
    most.write_text("1")
    assert isinstance(worker.run(case_of(SEGFAULT)), Death)
    for _ in range(2):
        assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert isinstance(worker.run(case_of(SEGFAULT)), Death)
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert worker.deaths == 2


def test_a_worker_that_cannot_be_forked_is_one_sentence(limited: tuple[Worker, Path]) -> None:
    """The server goes on: it serves who asks when there may be a process again."""
    worker, most = limited
    most.write_text("0")
    for _ in range(2):
        with pytest.raises(
            CannotCheckError, match="no worker can be started: Resource temporarily unavailable"
        ):
            worker.run(case_of(HARMLESS))
    most.write_text("1")
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
