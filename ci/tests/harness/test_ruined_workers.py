"""A worker that a launch has ruined dies later: the case that ruined it does not pass."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from ci.misbehaving import HARMLESS, REFUSE, SEGFAULT, case_of, outcome
from ci.tests.planted import case_of as planted_case
from ci.tests.planted import twin
from ci.tests.processes import wait_until_gone

from pagefuzz.harness.check import Checker
from pagefuzz.harness.check import check as check_one
from pagefuzz.harness.errors import RuinedProcessError
from pagefuzz.harness.running import Assignment
from pagefuzz.harness.workers.client import Worker, _Running
from pagefuzz.harness.workers.protocol import Message
from pagefuzz.oracles.observation import Death
from pagefuzz.oracles.verdict import Outcome

pytestmark = pytest.mark.usefixtures("own_servers")

RUINED, OTHER = case_of(HARMLESS, 7), case_of(HARMLESS, 8)


@pytest.fixture
def worker(assignment: Assignment) -> Iterator[Worker]:
    """Whose tests look themselves at how it ends."""
    made = Worker(assignment, timeout_s=30)
    yield made
    with contextlib.suppress(RuinedProcessError):
        made.close()


def end(worker: Worker, number: signal.Signals = signal.SIGABRT) -> None:
    """As a damaged heap does, between cases, or whoever kills."""
    assert worker.pid is not None
    pid = worker.pid
    os.kill(pid, number)
    wait_until_gone(pid)


def test_a_worker_that_dies_between_cases_makes_the_one_before_no_pass(worker: Worker) -> None:
    """It is named, and how the process ended; every further case that passes says it again, and so
    does the end, once everything is closed."""
    assert outcome(worker.run(RUINED)) is Outcome.CLEAN
    end(worker)
    for _ in range(2):
        with pytest.raises(RuinedProcessError, match="in order: SIGABRT; the last case") as raised:
            worker.run(OTHER)
        assert '"num_pages":1' in str(raised.value)
        assert '"seed":7' in str(raised.value)
    with pytest.raises(RuinedProcessError, match='"seed":7'):
        worker.close()
    assert worker.pid is None
    worker.close()


@pytest.mark.parametrize("when", ["closed", "restarted"])
def test_the_last_case_of_a_worker_is_no_exception(worker: Worker, when: str) -> None:
    """Its process is closed, or replaced, and has died instead."""
    worker.run(RUINED)
    end(worker)
    if when == "restarted":
        worker.restart()  # which is for the case that follows
    with pytest.raises(RuinedProcessError, match='"seed":7'):
        worker.close()


def test_who_ends_a_worker_from_outside_makes_no_finding(worker: Worker) -> None:
    """SIGKILL of an idle one, before the next case, a restart or the end: ci/chaos does so."""
    worker.run(RUINED)
    end(worker, signal.SIGKILL)
    assert outcome(worker.run(OTHER)) is Outcome.CLEAN
    end(worker, signal.SIGKILL)
    worker.restart()
    assert outcome(worker.run(OTHER)) is Outcome.CLEAN
    end(worker, signal.SIGKILL)
    worker.close()
    assert not worker.watches_ends


@pytest.mark.parametrize("before", ["nothing", "a failure"])
def test_only_a_case_that_has_passed_can_be_why(worker: Worker, before: str) -> None:
    """A process that has launched nothing was not ruined by a launch; and what has failed is a
    finding already."""
    worker.start()
    if before == "a failure":
        assert outcome(worker.run(case_of(REFUSE))) is Outcome.FAILED
    end(worker)
    assert outcome(worker.run(OTHER)) is Outcome.CLEAN
    worker.close()


def test_a_death_that_follows_says_enough(worker: Worker) -> None:
    """It is a finding; cases that pass after it may be right."""
    worker.run(RUINED)
    end(worker)
    assert isinstance(worker.run(case_of(SEGFAULT)), Death)
    assert outcome(worker.run(OTHER)) is Outcome.CLEAN
    worker.close()


def test_what_a_death_has_shown_is_not_said_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finding is made simpler by way of cases that pass and ruin the worker too."""
    monkeypatch.setattr(Worker, "_ask", _asking_later(Worker._ask))
    death = worker.run(case_of(SEGFAULT))
    assert isinstance(death, Death)
    assert death.later
    assert worker.watches_ends
    worker.watches_ends = False  # as it was when this one was asked
    worker.run(RUINED)
    end(worker)
    assert outcome(worker.run(OTHER)) is Outcome.CLEAN
    assert worker.watches_ends
    worker.close()


def _asking_later(ask: Any) -> Any:
    """As if each death came when the launch was judged."""

    def asked(*about: Any) -> Any:
        answer = ask(*about)
        return replace(answer, later=True) if isinstance(answer, Death) else answer

    return asked


def test_a_device_that_is_lost_between_cases_is_lost_by_the_one_before(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next case cannot be prepared; it is not the one that fails."""
    worker.run(RUINED)
    awaited, launched = Worker._awaited, _Running.has_launched

    def lost(worker: Worker, running: _Running) -> Message | None:
        monkeypatch.setattr(Worker, "_awaited", awaited)
        assert awaited(worker, running) is not None
        running.server.kill(running.pid)
        monkeypatch.setattr(_Running, "has_launched", property(lambda _: False))
        return {
            "number": worker._asked,
            "death": {"how": "illegal memory access", "detail": "x"},
        }

    def start() -> None:
        if worker._running is None:
            monkeypatch.setattr(_Running, "has_launched", launched)
        started()

    started = worker.start
    monkeypatch.setattr(worker, "start", start)
    monkeypatch.setattr(Worker, "_awaited", lost)
    with pytest.raises(RuinedProcessError, match=r'order: illegal memory access x\b.*"seed":7'):
        worker.run(OTHER)


def test_watched_ends_of_sound_launches_are_in_order(worker: Worker) -> None:
    """Each passes, in a process of its own that runs it twice."""
    worker.watches_ends = True
    worker.start()
    pids = []
    for seed in range(3):
        worker.start()
        pids.append(worker.pid)
        assert outcome(worker.run(case_of(HARMLESS, seed))) is Outcome.CLEAN
        assert worker.pid is None
    assert len(set(pids)) == 3
    assert isinstance(worker.run(case_of(SEGFAULT)), Death)
    assert outcome(worker.run(case_of(REFUSE))) is Outcome.FAILED
    worker.close()
    assert worker.deaths == 1


def test_a_launch_that_damages_the_heap_fails() -> None:
    """Before it can answer, since the worker uses the heap; or else with the next case, at the end,
    and by itself where the end is watched, as that of a case that is replayed."""
    subject, case = twin("heap-after-free"), planted_case("heap-after-free")
    verdict = check_one(case, subject, "host", "release")
    assert verdict.outcome is Outcome.FAILED
    assert verdict.failures[0].judgement == "death"
    with Checker(None, subject, "host", "release") as checker:
        outcomes = [checker.check(case).outcome for _ in range(4)]
    assert outcomes[1:] == [Outcome.FAILED] * 3
    checker = Checker(None, subject, "host", "release")
    outcome_alone, said = checker.check(case).outcome, ""
    try:
        checker.close()
    except RuinedProcessError as error:
        said = str(error)
    assert said or outcome_alone is Outcome.FAILED  # before it could answer


def leave(checker: Checker, error: Exception | None) -> None:
    """The process dies before, as after a launch that has ruined it."""
    with checker:
        checker.check(case_of(2))
        assert checker.worker_pid is not None
        os.kill(checker.worker_pid, signal.SIGABRT)
        wait_until_gone(checker.worker_pid)
        if error is not None:
            raise error


def test_the_end_of_a_worker_is_looked_at_and_hides_no_other_error() -> None:
    """What was raised before it is closed is what is raised."""
    made = [Checker("cp_gather_cache", "bundled:page", "host", "release") for _ in range(2)]
    with pytest.raises(RuinedProcessError):
        leave(made[0], None)
    with pytest.raises(ZeroDivisionError):
        leave(made[1], ZeroDivisionError())
