"""What a runner was checking when it died, and nothing that another one was."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagefuzz.harness.campaign.engine import Campaign
from pagefuzz.harness.campaign.plan import Job, Options, Shard, Unit, running_case_file
from pagefuzz.harness.workers.journal import Journal, left_behind, new_path
from pagefuzz.oracles.case import Case

UNIT = Unit("copy_blocks", "bundled:page", True)
PID = 2**22 + 57  # beyond any process id


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    options = Options("host", "checked", 0, cache=str(tmp_path / "cache"))
    findings = tmp_path / "findings"
    return Campaign([UNIT], options, cases=1, time_s=None, jobs=1, findings=findings)


def runner(campaign: Campaign, case: int | None) -> SimpleNamespace:
    """A runner that died while it checked such a case, or before its first one."""
    job = Job(Shard(UNIT, 0, 1), campaign.options, None)
    if case is not None:
        path = running_case_file(Job.from_json(json.loads(json.dumps(job.to_json()))), PID)
        assert path is not None
        journal = Journal(path)
        journal.write(Case(UNIT.operation, {"num_pairs": case}))
        os.close(journal._file)
    return SimpleNamespace(pid=PID, job=job)


def test_a_runner_that_died_before_its_first_case_has_none(campaign):
    """Though one of the same id has left its own behind."""
    runner(campaign, 1)
    assert campaign._keep_running_case(runner(campaign, None)) == ""


def test_cases_of_two_runners_of_one_id_are_kept(campaign, tmp_path):
    """Each in a file of its own, in a folder of reports that is used again too."""
    for case in (1, 2):
        said = campaign._keep_running_case(runner(campaign, case))
        assert said.startswith(f"is in {tmp_path}/findings/running-{PID}-")
        assert (
            json.loads(Path(said.removeprefix("is in ")).read_text())["sizes"]["num_pairs"] == case
        )
    assert len(list((tmp_path / "findings").iterdir())) == 2
    assert list((tmp_path / "cache" / "journals").iterdir()) == []


def test_what_runners_leave_behind_is_tidied(campaign, tmp_path):
    """As what others do: the newest twenty stay."""
    for case in range(25):
        runner(campaign, case)
    folder = tmp_path / "cache" / "journals"
    assert len(left_behind(folder)) == 25
    new_path(folder)
    assert len(list(folder.iterdir())) == 20


def test_the_case_of_a_runner_that_was_killed(run_campaign, tmp_path):
    """From the process to its case file."""
    cache = tmp_path / "cache"

    def kill(ran: Campaign) -> None:
        for running in ran._running.values():
            path = running_case_file(running.job, running.pid)
            if path is not None and not path.exists():
                Journal(path).write(Case("fake", {"a": 1}))  # as a real checker does
                os.kill(running.pid, signal.SIGKILL)

    ran = run_campaign({"sleep_s": 0.01}, on_tick=kill, cache=str(cache))
    assert ran.result.exit_code == 2
    (said,) = ran.listener.problems
    assert "its runner died before it was done (SIGKILL); the case that it was checking is" in said
    (path,) = (ran.folder / "findings").glob("running-*.json")
    assert said.endswith(str(path))
    assert Case.from_json(json.loads(path.read_text())).sizes == {"a": 1}
