"""Worker processes: however one ends, the case is answered and nothing is left behind."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ci.misbehaving import (
    ABORT,
    BAD_STATUS,
    CLOSE_FILES,
    EXIT_0,
    EXIT_3,
    HARMLESS,
    KILL,
    NAP,
    NOISE_AND_SIGBUS,
    PRINT,
    REFUSE,
    SEGFAULT,
    SLEEPS,
    STRAY_WRITE,
    case_of,
    outcome,
)
from ci.tests.processes import children, is_alive, wait_until_gone

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.running import Answer, Assignment
from pagefuzz.harness.workers import server, worker
from pagefuzz.harness.workers.blackbox import BlackBox, Stage
from pagefuzz.harness.workers.client import Worker, _Running
from pagefuzz.harness.workers.fork_server import ForkServer, close_servers, shared_server
from pagefuzz.harness.workers.journal import Journal, last_entry, left_behind, new_path
from pagefuzz.harness.workers.protocol import Message, send
from pagefuzz.oracles.case import Case, CaseError, Placement
from pagefuzz.oracles.observation import Death
from pagefuzz.oracles.verdict import Outcome

pytestmark = pytest.mark.usefixtures("own_servers")


@pytest.mark.parametrize(
    ("num_pages", "how"),
    [
        (SEGFAULT, "SIGSEGV"),
        (ABORT, "SIGABRT"),
        (EXIT_3, "exit status 3"),
        (EXIT_0, "exit status 0"),
        (NOISE_AND_SIGBUS, "SIGBUS"),
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
        wait_until_it_launches(worker)
        os.kill(pid, signal.SIGKILL)
        assert outcome(answer.result()) is Outcome.CLEAN
    assert worker.deaths == 1
    assert worker.unended_launch_s > 0
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert worker.unended_launch_s == 0


def wait_until_it_launches(worker: Worker) -> None:
    deadline = time.monotonic() + 30
    while worker._running is None or worker._running.box.stage is not Stage.LAUNCHING:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_last_words_of_a_worker_are_kept(worker: Worker) -> None:
    """The end of what a dying worker printed is part of its death, the noise before is not."""
    death = worker.run(case_of(NOISE_AND_SIGBUS))
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
    death = worker.run(case_of(SLEEPS))
    assert isinstance(death, Death)
    assert (death.how, death.detail) == ("hang", "no answer for 0.5 s; the worker was killed")
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    worker.close()


def test_a_hang_that_nobody_waits_for_is_ended_at_once(worker: Worker) -> None:
    """Ctrl-C in the middle of a launch: it cannot come to an orderly end."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    worker.run(case_of(HARMLESS))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            worker.run(case_of(SLEEPS))
    finally:
        signal.signal(signal.SIGALRM, before)
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < 20  # it was half a minute
    wait_until_none_of(shared_server())


def test_the_time_of_a_hang_is_that_of_one_launch(assignment: Assignment) -> None:
    """Two launches that take longer than the limit together, but not each, are no hang."""
    worker = Worker(assignment, timeout_s=2.5)
    assert outcome(worker.run(case_of(NAP))) is Outcome.CLEAN
    worker.close()


def test_a_launch_may_be_given_another_time(worker: Worker) -> None:
    """Less of it makes a hang of the same launch; the longest that came back is known."""
    assert worker.longest_launch_s == 0
    assert outcome(worker.run(case_of(NAP))) is Outcome.CLEAN
    longest_s = worker.longest_launch_s
    assert longest_s >= 1.5
    worker.hang_after_s = 0.2
    death = worker.run(case_of(NAP))
    assert isinstance(death, Death)
    assert (death.how, death.detail) == ("hang", "no answer for 0.2 s; the worker was killed")
    worker.hang_after_s = 30.0
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert worker.longest_launch_s == longest_s


def test_a_subject_that_closes_our_files_is_a_death(worker: Worker) -> None:
    """Losing the socket in a launch counts against the subject."""
    death = worker.run(case_of(CLOSE_FILES))
    assert isinstance(death, Death)
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN


def test_two_hundred_deaths_in_a_row(worker: Worker) -> None:
    """Every death is answered, and leaves no descriptor and no zombie."""
    worker.run(case_of(SEGFAULT))
    worker.run(case_of(HARMLESS))
    files = len(os.listdir("/proc/self/fd"))
    for index in range(200):
        death = worker.run(case_of((SEGFAULT, ABORT, EXIT_3)[index % 3]))
        assert isinstance(death, Death)
    assert worker.deaths == 201
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert len(os.listdir("/proc/self/fd")) <= files
    server = shared_server()
    assert len(children(server.pid)) == 2  # the worker and its spare
    assert worker.pid in children(server.pid)
    worker.close()
    wait_until_none_of(server)


def wait_until_none_of(server: ForkServer) -> None:
    """The server hears of ends a little later than whoever waits for them."""
    deadline = time.monotonic() + 30
    while children(server.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def spare_of(worker: Worker) -> int:
    """The process that gets ready while another works."""
    server = shared_server()
    (spare,) = {*children(server.pid)} - {worker.pid}
    return spare


def test_a_worker_that_has_died_once_has_a_spare(worker: Worker) -> None:
    """None before, which would be for nothing; then the spare takes over, and there is another."""
    worker.run(case_of(HARMLESS))
    assert children(shared_server().pid) == [worker.pid]
    worker.run(case_of(SEGFAULT))
    worker.run(case_of(HARMLESS))
    spare = spare_of(worker)
    assert isinstance(worker.run(case_of(SEGFAULT)), Death)
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert worker.pid == spare
    assert spare_of(worker) != spare
    worker.restart()
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert worker.deaths == 2


@pytest.mark.parametrize("how", ["ended", "has no room"])
def test_a_spare_that_is_of_no_use_is_no_death(
    worker: Worker, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing counts against a case, or against the worker, because of a process in reserve."""
    worker.run(case_of(SEGFAULT))
    worker.run(case_of(HARMLESS))
    spare = spare_of(worker)
    if how == "ended":
        os.kill(spare, signal.SIGKILL)
        wait_until_gone(spare)  # or it takes over, and ends then
    else:
        said = _Running.said

        def no_room(running: _Running, timeout_s: float) -> Message | None:
            message = said(running, timeout_s)
            return {"cannot_check": "no memory"} if running.pid == spare else message

        monkeypatch.setattr(_Running, "said", no_room)
    assert isinstance(worker.run(case_of(SEGFAULT)), Death)
    assert outcome(worker.run(case_of(HARMLESS))) is Outcome.CLEAN
    assert worker.pid != spare
    assert worker.deaths == 2
    wait_until_gone(spare)


def test_a_stray_write_reaches_the_verdict(worker: Worker) -> None:
    """What a launch does to memory is judged, not only how it ends."""
    between_red_zones = {"dst": Placement(guard="none")}
    stray = replace(case_of(STRAY_WRITE), placements=between_red_zones)
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
    wait_until_gone(pid, first.pid)
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
    assert is_alive(pid)
    server.close()
    wait_until_gone(pid, server.pid)
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
from pagefuzz.harness.workers.client import Worker
from pagefuzz.harness.workers.fork_server import shared_server
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
    hang, journal = case_of(SLEEPS), tmp_path / "journal.jsonl"
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
        assert all(is_alive(pid) for pid in pids)
        deadline = time.monotonic() + 30
        while (entry := last_entry(journal)) is None or entry["case"] != hang.to_json():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        parent.kill()
    wait_until_gone(*pids)
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


SAYS_ITS_JOURNAL = """
import os, sys
from pathlib import Path
from pagefuzz.harness.workers.journal import new_path
os.getpid = lambda: 57
print(new_path(Path(sys.argv[1])).name)
"""


def test_processes_of_one_id_do_not_share_a_journal(tmp_path: Path) -> None:
    """Such as two containers, which have one cache."""
    command = [sys.executable, "-c", SAYS_ITS_JOURNAL, str(tmp_path)]
    first, second = (subprocess.check_output(command, text=True) for _ in range(2))
    assert first != second
    assert first.startswith("57-")
    assert second.startswith("57-")


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


def test_a_launch_that_closed_the_channel_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the parent looks: the worker is not idle before its answer is sent."""
    ours, theirs = socket.socketpair()
    file = BlackBox.create()
    seen = BlackBox(file)

    def closing(*_: object) -> dict[str, object]:
        theirs.close()
        return {}

    monkeypatch.setattr(
        worker, "runner_of", lambda *_: SimpleNamespace(device="host", memory=MemoryUse)
    )
    monkeypatch.setattr(worker, "_answer", closing)
    with ours:
        send(ours, {"case": {}})
        with pytest.raises(OSError, match="Bad file descriptor"):
            worker.serve(theirs, file, {})
    assert seen.stage is not Stage.IDLE


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_a_server_outlives_a_torch_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A worker, which needs it, says so; OSError is what one without its libraries raises."""
    asked = []

    def broken(name: str) -> None:
        asked.append(name)
        raise error(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    server._prepare({"source_path": "x.py", "backend": "cuda", "operation": "x"})
    assert asked == ["torch"]
