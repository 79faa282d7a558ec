"""Worker processes: however one ends, the case is answered and nothing is left behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from ci.chaos_lane import misbehaving_case as case_of

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.running import Answer, Assignment
from pagefuzz.harness.workers import client
from pagefuzz.harness.workers.blackbox import BlackBox
from pagefuzz.harness.workers.client import (
    ForkServer,
    Worker,
    _Running,
    close_servers,
    shared_server,
)
from pagefuzz.harness.workers.journal import Journal, last_entry, left_behind, new_path
from pagefuzz.harness.workers.oom import oom_kills
from pagefuzz.oracles.case import Case, CaseError, Placement
from pagefuzz.oracles.observation import Death
from pagefuzz.oracles.verdict import Outcome

# What misbehaving.c does at this number of pages.
SEGFAULT, ABORT, EXIT_3, HANG, NOISE, EXIT_0 = 101, 102, 103, 104, 105, 106
PRINT, BAD_STATUS, REFUSE, KILL, CLOSE_FILES, STRAY = 107, 108, 109, 110, 111, 112
NAP = 113  # 0.6 s a launch
CHILD_AND_SEGFAULT, CHILD, MISALIGNED = 116, 117, 120
HARMLESS = 1


def outcome(answer: Answer | Death) -> Outcome:
    assert isinstance(answer, Answer), answer
    return answer.verdict.outcome


@pytest.fixture
def worker(assignment: Assignment) -> Iterator[Worker]:
    made = Worker(assignment, timeout_s=30)
    yield made
    made.close()


@pytest.fixture(autouse=True, scope="module")
def _servers() -> Iterator[None]:
    yield
    close_servers()


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are still there"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("num_pages", "how"),
    [
        (SEGFAULT, "SIGSEGV"),
        (ABORT, "SIGABRT"),
        (EXIT_3, "exit status 3"),
        (EXIT_0, "exit status 0"),
        (NOISE, "SIGBUS"),
    ],
)
def test_a_death_is_named_and_the_next_case_runs(worker: Worker, num_pages: int, how: str) -> None:
    """Signals by name, exits by number; the successor of a dead worker answers."""
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    first = worker.pid
    death = worker.run(case_of(num_pages))
    assert isinstance(death, Death)
    assert death.how == how
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert worker.pid != first
    assert worker.deaths == 1


def test_a_launch_that_is_killed_twice_is_a_death(worker: Worker) -> None:
    """SIGKILL may come from anyone: it counts against the case when it strikes again."""
    death = worker.run(case_of(KILL))
    assert isinstance(death, Death)
    assert death.how == "SIGKILL"
    assert worker.deaths == 2


@pytest.mark.parametrize("whom", ["worker", "server"])
def test_a_launch_that_somebody_else_ends_is_run_again(worker: Worker, whom: str) -> None:
    """A kill from outside in the middle of a launch is no death of the case."""
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    pid = worker.pid if whom == "worker" else shared_server().pid
    assert pid is not None
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(worker.run, case_of(NAP))
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        assert outcome(answer.result()) is Outcome.CLEAN
    assert worker.deaths == 1


def test_the_last_words_of_a_worker_are_kept(worker: Worker) -> None:
    """The end of what a dying worker printed is part of its death, the noise before is not."""
    death = worker.run(case_of(NOISE))
    assert isinstance(death, Death)
    lines = death.detail.splitlines()
    assert lines[-1] == "the last words"
    assert len(lines) <= 12


def test_printing_harms_nothing(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    """What a subject prints neither mixes with messages nor reaches the terminal."""
    assert outcome(worker.run(case_of(PRINT))) is Outcome.CLEAN
    assert capfd.readouterr() == ("", "")


def test_a_hang_is_killed_and_named(assignment: Assignment) -> None:
    """A launch that does not come back is a death called "hang"; the next case runs."""
    worker = Worker(assignment, timeout_s=0.5)
    death = worker.run(case_of(HANG))
    assert isinstance(death, Death)
    assert (death.how, death.detail) == ("hang", "no answer for 0.5 s; the worker was killed")
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    worker.close()


def test_the_time_of_a_hang_is_that_of_one_launch(assignment: Assignment) -> None:
    """Two launches that take longer than the limit together, but not each, are no hang."""
    worker = Worker(assignment, timeout_s=1.0)
    assert outcome(worker.run(case_of(NAP))) is Outcome.CLEAN
    worker.close()


def test_a_subject_that_closes_our_files_is_a_death(worker: Worker) -> None:
    """Losing the socket in a launch counts against the subject."""
    death = worker.run(case_of(CLOSE_FILES))
    assert isinstance(death, Death)
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN


def test_two_hundred_deaths_in_a_row(worker: Worker) -> None:
    """Every death is answered, and leaves no descriptor and no zombie."""
    worker.run(case_of(HARMLESS))
    files = len(os.listdir("/proc/self/fd"))
    for index in range(200):
        death = worker.run(case_of((SEGFAULT, ABORT, EXIT_3)[index % 3]))
        assert isinstance(death, Death)
    assert worker.deaths == 200
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert len(os.listdir("/proc/self/fd")) <= files
    server = shared_server()
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    assert children == [str(worker.pid)]


def test_a_stray_write_reaches_the_verdict(worker: Worker) -> None:
    """What a launch does to memory is judged, not only how it ends."""
    between_red_zones = {"dst": Placement(guard="none")}
    stray = replace(case_of(STRAY), placements=between_red_zones)
    assert outcome(worker.run(stray)) is Outcome.FAILED
    assert outcome(worker.run(case_of(REFUSE))) is Outcome.FAILED


def test_what_cannot_be_checked_is_no_answer(worker: Worker) -> None:
    """A status outside the ABI and a case of other sizes are errors; the worker lives on."""
    with pytest.raises(CannotCheckError, match="returned 77"):
        worker.run(case_of(BAD_STATUS))
    pid = worker.pid
    with pytest.raises(CaseError, match="has unknown 'width'"):
        worker.run(case_of(HARMLESS, width=3))
    assert worker.pid == pid


def test_a_subject_that_cannot_be_loaded_cannot_be_checked(assignment: Assignment) -> None:
    """No object, no launcher: one sentence, and no worker is left."""
    for wrong in (
        replace(assignment, object_path="nowhere.so"),
        replace(assignment, symbol="pf_nothing"),
        replace(assignment, backend="cuda"),
    ):
        worker = Worker(wrong, timeout_s=30)
        with pytest.raises(CannotCheckError):
            worker.run(case_of(HARMLESS))
        assert worker.pid is None


def test_a_worker_killed_between_cases_costs_nothing(worker: Worker) -> None:
    """A death before a launch is not the subject's: the case is run again in a new worker."""
    worker.run(case_of(HARMLESS))
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert worker.deaths == 1


def test_a_server_that_was_killed_is_replaced(worker: Worker) -> None:
    """Workers die with their server, and the next case gets both anew."""
    worker.run(case_of(HARMLESS))
    first, pid = shared_server(), worker.pid
    assert pid is not None
    os.kill(first.pid, signal.SIGKILL)
    wait_until_gone([pid, first.pid])
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert shared_server().pid != first.pid


def test_closing_a_server_ends_its_workers(assignment: Assignment) -> None:
    """A worker in an endless launch ends with its server."""
    server = ForkServer()
    import socket

    ours, theirs = socket.socketpair()
    output, box = os.memfd_create("output"), BlackBox.create()
    pid = server.fork(assignment, (theirs.fileno(), output, box))
    theirs.close()
    assert alive(pid)
    server.close()
    wait_until_gone([pid, server.pid])
    for descriptor in (output, box):
        os.close(descriptor)
    ours.close()


def test_a_server_that_cannot_start_says_why() -> None:
    """An import that fails in the server is the sentence of the error here."""
    with pytest.raises(CannotCheckError, match=r"did not start: .*No module named 'nowhere'"):
        ForkServer(preload=["nowhere"])


PARENT = """
import sys, time
from pagefuzz.harness.running import Assignment
from pagefuzz.harness.workers.client import Worker, shared_server
from pagefuzz.harness.workers.journal import Journal
from pagefuzz.oracles.case import Case
import json
from pathlib import Path
assignment, journal, harmless, hang = sys.argv[1:]
worker = Worker(Assignment(**json.loads(assignment)), timeout_s=600,
                journal=Journal(Path(journal), subject="x"))
worker.run(Case.from_json(json.loads(harmless)))
print(shared_server().pid, worker.pid, flush=True)
worker.run(Case.from_json(json.loads(hang)))
"""


def test_killing_the_parent_leaves_no_process_and_the_case(
    assignment: Assignment, tmp_path: Path
) -> None:
    """kill -9 in the middle of a launch: server and worker end, the journal holds the case."""
    hang, journal = case_of(HANG), tmp_path / "journal.jsonl"
    arguments = [
        json.dumps(assignment.to_json()),
        str(journal),
        case_of(HARMLESS).dumps(),
        hang.dumps(),
    ]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        deadline = time.monotonic() + 10
        while (entry := last_entry(journal)) is None or entry["case"] != hang.to_json():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        parent.kill()
    wait_until_gone(pids)
    entry = last_entry(journal)
    assert entry is not None
    assert Case.from_json(entry["case"]) == hang
    assert entry["subject"] == "x"


def test_a_journal_ends_with_its_worker(assignment: Assignment, tmp_path: Path) -> None:
    """After an orderly end nothing was running, and no journal is left."""
    path = tmp_path / "journals" / "one.jsonl"
    worker = Worker(assignment, timeout_s=30, journal=Journal(path))
    worker.run(case_of(HARMLESS))
    assert path.exists()
    worker.close()
    assert not path.exists()


def test_a_journal_stays_small_and_ignores_a_torn_line(tmp_path: Path) -> None:
    """Tens of thousands of cases fit into a megabyte; half a line is not an entry."""
    journal = Journal(tmp_path / "journal.jsonl")
    for num_pages in range(10_000):
        journal.write(case_of(num_pages))
    assert journal.path.stat().st_size <= 2**20
    with journal.path.open("a") as file:
        file.write('{"case": {')
    entry = last_entry(journal.path)
    assert entry is not None
    assert entry["case"]["sizes"]["num_pages"] == 9_999
    journal.close()


def test_journals_of_ended_processes_are_found_and_not_hoarded(tmp_path: Path) -> None:
    """Those of live processes are left alone; of the others the newest twenty stay."""
    mine = Journal(new_path(tmp_path))
    for number in range(30):
        path = tmp_path / f"{2**22 + number + 1}-1.jsonl"  # beyond any process id
        path.write_text("{}\n")
        os.utime(path, (number, number))
    assert len(left_behind(tmp_path)) == 30
    assert new_path(tmp_path) != mine.path
    kept = left_behind(tmp_path)
    assert len(kept) == 20
    assert min(path.stat().st_mtime for path in kept) == 10
    assert mine.path.exists()
    mine.close()


def test_a_journal_that_cannot_be_written_cannot_be_checked(tmp_path: Path) -> None:
    """A folder that is a file is one sentence, before anything runs."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotCheckError, match=r"cannot keep a journal in .*PAGEFUZZ_CACHE"):
        Journal(tmp_path / "file" / "journal.jsonl")


def test_a_journal_on_a_full_disk_cannot_be_checked(tmp_path: Path) -> None:
    """A case that cannot be kept is not run: one sentence, whether all or a part was refused."""
    journal = Journal(tmp_path / "journal.jsonl")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for _ in range(2):
            with pytest.raises(
                CannotCheckError, match=r"cannot keep a journal in .*PAGEFUZZ_CACHE"
            ):
                journal.write(case_of(HARMLESS))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal.close()


def test_a_worker_without_memory_cannot_check(assignment: Assignment) -> None:
    """Too little address space for a worker's buffers: the case is not run, which is said."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    server = shared_server()
    size_bytes = int(Path(f"/proc/{server.pid}/statm").read_text().split()[0]) * 4096
    resource.prlimit(server.pid, resource.RLIMIT_AS, (size_bytes + 2**27, before[1]))
    worker = Worker(assignment, timeout_s=30)
    try:
        answer = worker.run(case_of(HARMLESS))
        assert isinstance(answer, Answer)
        assert answer.verdict.outcome is Outcome.NOT_RUN
        assert "no address space" in answer.verdict.not_run
    finally:
        worker.close()
        close_servers()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


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
    deadline = time.monotonic() + 5
    while children(shared_server().pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


@pytest.mark.parametrize(("num_pages", "code"), [(SEGFAULT, -signal.SIGSEGV), (HANG, 2)])
def test_a_death_that_is_not_isolated_is_that_of_the_process(
    assignment: Assignment, tmp_path: Path, num_pages: int, code: int
) -> None:
    """Never a pass; the case is in the journal. A hang ends it with a sentence."""
    journal = tmp_path / "journal.jsonl"
    done = inside(assignment, journal, HARMLESS, num_pages, HARMLESS)
    assert done.returncode == code
    assert done.stdout.split() == ["clean"]
    if num_pages == HANG:
        assert done.stderr == (
            "pagefuzz: a launch did not end within 0.6 s, and was not isolated: this process ends; "
            f"the case is in {journal}\n"
        )
    entry = last_entry(journal)
    assert entry is not None
    assert entry["case"] == case_of(num_pages).to_json()
