"""What a machine does not let a campaign do, in the middle of it, costs neither findings nor the
end."""

from __future__ import annotations

import errno
import os

import pytest

from pagefuzz.harness.campaign import engine, process
from pagefuzz.harness.campaign.plan import Job, Options, Shard, Unit

FAULT = {"faults": {"bounds:a": ["a", 100]}}
TWO = ("bundled:fake", "bundled:other")


def failed(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture
def only_so_many(monkeypatch):
    """Lets the machine start so many runners; the next ones fail."""

    def install(count: int) -> list[str]:
        started: list[str] = []
        start = engine.RunnerProcess

        def runner(job: Job) -> process.RunnerProcess:
            if len(started) == count:
                raise failed(errno.EAGAIN)
            started.append(job.shard.unit.name)
            return start(job)

        monkeypatch.setattr(engine, "RunnerProcess", runner)
        return started

    return install


@pytest.mark.parametrize(
    ("number", "exit_code"), [(errno.EPIPE, 2), (errno.ENOSPC, 2), (errno.EIO, 0)]
)
@pytest.mark.parametrize("subject", [{}, FAULT])
def test_output_that_cannot_be_written(run_campaign, subject, number, exit_code):
    """The run goes on to its end; no pass, unless it was a terminal that was closed."""
    ends = []

    def lost(campaign):
        ends.append(campaign.elapsed_s)
        raise failed(number)

    ran = run_campaign(subject, on_tick=lost)
    assert len(ends) > 1
    assert ran.result.exit_code == (1 if subject else exit_code)
    assert len(ran.result.findings) == bool(subject)
    said = [f"cannot write the output: {os.strerror(number)}"] if exit_code else []
    assert ran.listener.problems == ran.result.all_problems == said
    if not subject:
        assert ran.result.totals.cases == 200
    assert ran.result.seconds > 0


def test_a_runner_that_cannot_be_started_loses_no_finding(run_campaign, only_so_many):
    """Its unit is no pass; what the others have found is one, and the run comes to its end."""
    assert only_so_many(1) == []
    ran = run_campaign(FAULT, subjects=TWO)
    assert ran.result.exit_code == 1
    assert [finding.subject for finding in ran.result.findings] == ["bundled:fake"]
    why = f"a runner could not be started: {os.strerror(errno.EAGAIN)}"
    assert ran.result.units["fake/bundled:other"].problems == [f"fake/bundled:other: {why}"]
    assert ran.listener.problems == [f"fake/bundled:other: {why}"]
    assert ran.result.seconds > 0


@pytest.mark.parametrize("bound", [{"cases": 1200}, {"cases": None, "time_s": 5.0}])
def test_fewer_runners_than_were_asked_for(run_campaign, only_so_many, bound):
    """The one that runs goes on; one problem says that a part was left out."""
    started = only_so_many(1)
    ran = run_campaign({"sleep_s": 0.001}, jobs=2, **bound)
    assert started == ["fake/bundled:fake"]
    assert ran.result.exit_code == 2
    assert ran.result.totals.cases > 0
    (said,) = ran.listener.problems
    assert said.startswith("fake/bundled:fake: a runner could not be started")


def test_no_runner_at_all(run_campaign, only_so_many):
    """A problem of each unit, and an end."""
    only_so_many(0)
    ran = run_campaign({}, subjects=TWO, jobs=3)
    assert ran.result.exit_code == 2
    assert [said.split(":")[1].split("/")[-1] for said in ran.listener.problems] == [
        "fake",
        "other",
    ]


def test_a_runner_that_did_not_start_keeps_nothing_open(monkeypatch):
    """Neither its pipe nor its file."""

    def fork(*arguments, **options):
        raise failed(errno.EAGAIN)

    monkeypatch.setattr(process.subprocess, "Popen", fork)
    job = Job(Shard(Unit("fake", "bundled:fake", True), 0, 1), Options("host", "checked", 0), None)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            process.RunnerProcess(job)
    assert os.listdir("/proc/self/fd") == before
