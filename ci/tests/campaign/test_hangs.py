"""Launches that do not end: found with the patience that was asked for, made simpler with less."""

from __future__ import annotations

import subprocess
import time

import pytest

from pagefuzz.harness.campaign.again import REPEATS, Repeated, Timed, is_hang
from pagefuzz.harness.campaign.journal import read_journal
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import load_finding
from pagefuzz.oracles.case import load_case
from pagefuzz.oracles.verdict import Outcome, Verdict

EVER = 1e9
CLEAN = Verdict(Outcome.CLEAN, None)
NOT_RUN = Verdict(Outcome.NOT_RUN, None, not_run="there is no GPU memory")


def found_by(ran):
    """The one finding, as it was stored."""
    (path,) = (ran.folder / "findings").glob("hang-*.json")
    return load_finding(path)


@pytest.mark.parametrize(("longest_s", "given_s"), [(0.001, 1.0), (0.2, 4.0), (0.0, 5.0)])
def test_a_hang_is_minimised_and_repeated_with_little_patience(run_campaign, longest_s, given_s):
    """Its simplest case was given all of it once, and is told with that."""
    ran = run_campaign({"takes": [["a", 100, EVER]], "longest_launch_s": longest_s})
    finding = found_by(ran)
    assert finding.case.sizes == {"a": 100, "b": 1, "c": 0}
    assert finding.failure.details["access"] == "no answer for 60 s"
    assert (finding.minimised, finding.repeats, finding.runs) == (True, 10, 10)
    assert (finding.hang_after_s, finding.repeats_hang_after_s) == (None, given_s)
    said = f"10 of 10 further runs failed the same way, each launch given {given_s:g} s"
    assert said in finding.text(width=200)
    assert ran.result.exit_code == 1


@pytest.mark.parametrize("longest_s", [0.001, 3.0])
def test_a_hang_has_no_less_patience_than_there_is(run_campaign, longest_s):
    """Where little was asked for, or launches are slow, all runs are given what was asked for."""
    subject = {"takes": [["a", 100, EVER]], "longest_launch_s": longest_s}
    finding = found_by(run_campaign(subject, hang_after_s=1.0))
    assert finding.case.sizes["a"] == 100
    assert finding.failure.details["access"] == "no answer for 1 s"
    assert (finding.minimised, finding.repeats, finding.runs) == (True, 10, 10)
    assert (finding.hang_after_s, finding.repeats_hang_after_s) == (1.0, None)


@pytest.mark.parametrize(
    ("lasted_s", "longest_s", "code"),
    [(7.0, 0.1, 2), (7.0, 0.4, 0), pytest.param(4.0, 0.1, 0, marks=pytest.mark.slow)],
)
def test_a_launch_that_lasts_until_the_end_is_no_pass(run_campaign, lasted_s, longest_s, code):
    """Time is up before a hang can be told: unless others have come near it, no launch takes so
    long, and the case is kept."""
    subject = {"stalls_from": 1000, "unended_launch_s": lasted_s, "longest_launch_s": longest_s}
    ran = run_campaign(subject, time_s=3.0)
    assert ran.result.exit_code == code
    assert ran.identities == set()
    files = sorted((ran.folder / "findings").glob("unended-*.json"))
    if code == 0:
        assert (files, ran.listener.problems) == ([], [])
        return
    assert 0 < len(files) == len(ran.listener.problems)
    for said in ran.listener.problems:
        assert "a launch had not ended after 7 s, when time was up; it may hang: give " in said
    assert all(load_case(path).sizes["a"] >= 1000 for path in files)
    assert all(any(str(path) in said for said in ran.listener.problems) for path in files)


def test_a_slow_launch_is_no_hang(run_campaign):
    """A simpler case that comes back after a while is neither told nor stored: the finding is a
    case that was given all of the patience, and says why it is no simpler."""
    subject = {"takes": [["a", 100, 5.0], ["a", 1000, EVER]]}
    ran = run_campaign(subject)
    finding = found_by(ran)
    assert finding.case.sizes["a"] >= 1000
    assert (finding.minimised, finding.repeats, finding.runs) == (False, 10, 10)
    assert finding.failure.details["access"] == "no answer for 60 s"
    reason = "a simpler case that seemed to hang came back when it was given 60 s"
    assert f"not fully minimised, {reason}" in finding.text(width=300)
    journaled = read_journal(ran.folder / "journal.jsonl")
    assert min(entry["case"]["sizes"]["a"] for entry in journaled) >= 1000


def test_a_slow_launch_in_contract_does_not_replace_a_hang(run_campaign):
    """Nor where minimising has gone on to it."""
    subject = {
        "takes": [["a", 100, 5.0], ["c", 1, EVER]],
        "reported": {"c": 3, "b": 9, "a": 1999},  # in the order in which they are made smaller
    }
    ran = run_campaign(subject)
    assert ran.identities == {"hang:hang:hostile"}
    finding = found_by(ran)
    assert finding.case.sizes["c"] >= 1
    assert not finding.minimised


def test_only_slow_launches_are_clean(run_campaign):
    """Whatever little patience would make of them."""
    assert run_campaign({"takes": [["a", 0, 5.0]]}).result.exit_code == 0


@pytest.mark.parametrize("asked_s", [2.0, 3600.0])
def test_a_hang_near_the_end_of_the_run(run_campaign, asked_s):
    """What cannot be confirmed in time is not minimised; the run still ends."""
    began = time.monotonic()
    subject = {"takes": [["a", 100, EVER]]}
    ran = run_campaign(subject, time_s=6.0, hang_after_s=asked_s)
    assert time.monotonic() - began < 60
    finding = found_by(ran)
    assert finding.minimised == (asked_s == 2.0)
    assert finding.failure.details["access"] == f"no answer for {asked_s:g} s"
    assert ("not fully minimised, " in finding.text(width=200)) != finding.minimised


class Sleeper:
    """A checker whose worker sleeps in each check."""

    hang_after_s, longest_launch_s = 60.0, 0.001

    def __init__(self):
        self.worker, self.restarts, self.given_s = None, 0, []

    @property
    def worker_pid(self):
        return self.worker and self.worker.pid

    def restart(self):
        self.restarts += 1

    def quick(self):
        self.given_s.append(self.hang_after_s)
        return CLEAN

    def slow(self, meanwhile=lambda: None):
        self.worker = subprocess.Popen(["sleep", "600"])
        meanwhile()
        self.worker.wait()
        self.worker = None
        return CLEAN


def test_a_check_has_its_time():
    """One that takes longer has no verdict; the patience is the old one afterwards."""
    checker = Sleeper()
    timed = Timed(checker)
    assert timed.verdict(checker.quick, None, 2.0) is CLEAN
    assert (checker.given_s, checker.hang_after_s) == ([2.0], 60.0)
    assert timed.verdict(checker.slow, 0.1, 2.0) is None
    assert checker.hang_after_s == 60.0


@pytest.mark.parametrize("limit_s", [None, 500.0])
def test_a_check_can_be_hurried(limit_s):
    """Whether it had a time or not; before and after it there is nothing to be hurried."""
    checker = Sleeper()
    timed = Timed(checker)
    timed.hurry(0.001)
    assert timed.verdict(checker.quick, None, 60.0) is CLEAN
    hurried = timed.verdict(lambda: checker.slow(lambda: timed.hurry(0.1)), limit_s, 60.0)
    assert hurried is None
    timed.hurry(0.001)
    assert timed.verdict(checker.quick, None, 60.0) is CLEAN


def test_repeats_are_counted():
    """Each in a fresh worker; none without time, none that takes too long, none that fails."""
    checker = Sleeper()
    timed = Timed(checker)

    def repeated(check, left_s=lambda: 1.0, hang=False):
        return timed.repeat(check, lambda verdict: verdict is CLEAN, left_s, hang=hang)

    assert repeated(checker.quick) == Repeated(10, 10)
    assert checker.restarts == REPEATS
    assert repeated(checker.quick, hang=True) == Repeated(10, 10, 1.0)
    assert checker.given_s == [60.0] * 10 + [1.0] * 10
    assert repeated(checker.quick, left_s=lambda: 0.0) == Repeated()
    assert repeated(checker.slow, left_s=lambda: 0.1) == Repeated()

    def broken():
        raise CannotCheckError("there is no compiler")

    problem = "a finding was repeated 0 times only: there is no compiler"
    assert repeated(broken) == Repeated(problem=problem)


def test_what_is_not_run_is_no_repeat():
    """It neither failed nor passed: it is not counted, and the reason is told."""
    verdicts = iter([CLEAN, NOT_RUN, NOT_RUN, CLEAN, *[NOT_RUN] * 3, CLEAN, NOT_RUN, NOT_RUN])
    again = Timed(Sleeper()).repeat(
        lambda: next(verdicts), lambda verdict: verdict is CLEAN, lambda: 1.0, hang=False
    )
    problem = "a finding was repeated 3 times only: 7 not run: there is no GPU memory"
    assert again == Repeated(3, 3, problem=problem)
    never = Timed(Sleeper()).repeat(
        lambda: NOT_RUN, lambda verdict: verdict is CLEAN, lambda: 1.0, hang=False
    )
    assert (never.repeats, never.runs) == (0, 0)
    assert "10 not run" in never.problem


def test_what_is_not_run_has_not_come_back():
    """A hang that cannot be confirmed says why."""
    timed = Timed(Sleeper())
    confirmed = timed.confirmed(lambda: NOT_RUN, lambda verdict: verdict is CLEAN)
    reason = "a simpler case that seemed to hang was not run again: there is no GPU memory"
    assert confirmed == (None, reason)
    assert timed.confirmed(lambda: CLEAN, lambda verdict: verdict is CLEAN) == (CLEAN, "")
    came_back = timed.confirmed(lambda: CLEAN, lambda verdict: verdict is NOT_RUN)[1]
    assert "came back when it was given 60 s" in came_back


def test_what_a_hang_is():
    """Of a case and of a round trip; a buffer's name is none."""
    assert is_hang("hang:hang:hostile")
    assert is_hang("round trip:death:hang")
    assert not is_hang("death:SIGSEGV:change")
    assert not is_hang("")
