"""What a launch leaves behind in its process must not hide what it, or a later one, has done."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest
from ci.misbehaving import (
    FORKS,
    HARMLESS,
    JOINS,
    OPENS_GUARD,
    OPENS_SOURCE,
    ROUNDS_UPWARD,
    STAYS,
    SWALLOWS,
    WRITES_LATE,
    case_of,
)
from ci.tests.processes import children, wait_until_gone

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.own_process import SpoiledProcessError, kept_intact
from pagefuzz.harness.running import Answer, Assignment
from pagefuzz.harness.workers import client
from pagefuzz.harness.workers.client import Worker, worker_for
from pagefuzz.oracles.observation import Death
from pagefuzz.oracles.verdict import Outcome

pytestmark = pytest.mark.usefixtures("own_servers")

#: FE_UPWARD.
_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}


def outcome(worker: Worker, num_pages: int) -> Outcome:
    answer = worker.run(case_of(num_pages))
    assert isinstance(answer, Answer), answer
    return answer.verdict.outcome


@pytest.mark.parametrize(
    ("num_pages", "said"),
    [
        (STAYS, "left 1 more thread running"),
        (SWALLOWS, "another handler of SIGSEGV"),
        (OPENS_GUARD, "changed the protection of src, or of the memory beside it"),
        (OPENS_SOURCE, "changed the protection of src"),
    ],
)
def test_a_spoiled_process_judges_nothing_more(worker: Worker, num_pages: int, said: str) -> None:
    """What was left behind is named, and the next case runs in another process."""
    assert outcome(worker, HARMLESS) is Outcome.CLEAN
    spoiled = worker.pid
    with pytest.raises(CannotCheckError, match=said):
        worker.run(case_of(num_pages))
    assert worker.pid is None
    assert outcome(worker, HARMLESS) is Outcome.CLEAN
    assert worker.pid not in (None, spoiled)


def test_a_write_that_comes_after_the_return_is_seen(worker: Worker) -> None:
    """At one of its ends the buffer is flush: there the write is a fault, at the other a change."""
    answer = worker.run(case_of(WRITES_LATE))
    assert isinstance(answer, Death) or answer.verdict.outcome is Outcome.FAILED


@pytest.mark.parametrize("num_pages", [JOINS, ROUNDS_UPWARD])
def test_what_is_over_when_the_launch_is_does_no_harm(worker: Worker, num_pages: int) -> None:
    """Threads that are joined, and another rounding while the kernel runs."""
    for _ in range(20):
        assert outcome(worker, num_pages) is Outcome.CLEAN


def test_a_launch_that_forks_does_not_make_a_second_worker(worker: Worker) -> None:
    """The copy ends as soon as the launch returns in it."""
    for _ in range(3):
        assert outcome(worker, FORKS) is Outcome.CLEAN
    assert worker.pid is not None
    wait_until_gone(*children(worker.pid))
    assert outcome(worker, HARMLESS) is Outcome.CLEAN


def test_an_answer_to_another_question_is_none(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the second one of a process that was forked in the middle of a case."""
    worker.start()
    receive = client.receive
    with monkeypatch.context() as patched:
        patched.setattr(client, "receive", lambda *said: {**(receive(*said) or {}), "number": 0})
        with pytest.raises(CannotCheckError, match="not of the case that was asked about"):
            worker.run(case_of(HARMLESS))
    assert outcome(worker, HARMLESS) is Outcome.CLEAN


def test_without_isolation_nothing_runs_in_a_spoiled_process(assignment: Assignment) -> None:
    """In a process of its own: it is spoiled afterwards."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            worker = worker_for(assignment, isolate=False, timeout_s=30)
            for num_pages in (SWALLOWS, HARMLESS):
                with pytest.raises(SpoiledProcessError, match="SIGSEGV"):
                    worker.run(case_of(num_pages))
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


#: In a process of its own, in which nothing else has loaded the object. argv: the case.
SIGNALLED = """
import gc, json, signal, sys
from pathlib import Path
from pagefuzz.harness.check import Checker
from pagefuzz.harness.own_process import _actions
from pagefuzz.harness.subjects import parse_abi
from pagefuzz.oracles.case import Case
before, seen = _actions(), []
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
with Checker("cp_gather_cache", "bundled:page", "host", isolate=False) as checker:
    print(checker.check(Case.from_json(json.loads(sys.argv[1]))).outcome)
    assert _actions() == before
del checker
parse_abi.cache_clear()  # which keeps what it has loaded
gc.collect()
assert "cp_gather_cache.so" not in Path("/proc/self/maps").read_text()
signal.raise_signal(signal.SIGALRM)
assert seen
"""


def test_without_isolation_this_process_keeps_its_signals() -> None:
    """Its own handlers, also once the object is gone: Python's are called on whatever stack is the
    last one that was set, and that must not have been the object's."""
    command = [sys.executable, "-c", SIGNALLED, case_of(HARMLESS).dumps()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr


@pytest.mark.skipif(platform.machine() not in _UPWARD, reason="its FE_UPWARD is not known here")
def test_references_are_computed_with_the_usual_rounding() -> None:
    """Whatever a launch has set."""
    libm = ctypes.CDLL("libm.so.6")
    least = [float("1e-30")]  # not folded by the compiler
    with kept_intact():
        assert libm.fesetround(_UPWARD[platform.machine()]) == 0
        assert 1.0 + least[0] > 1.0
    assert 1.0 + least[0] == 1.0
