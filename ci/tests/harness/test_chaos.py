"""Every way to die or hang, many times: no case is lost, and none passes that should not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ci.chaos import Lanes, Supervisor, drawn
from ci.chaos_lane import CLEAN, DEATH, HARMLESS, KINDS, LANE_KILLED, NOT_RUN, ON_HOST

from pagefuzz.harness.errors import CannotCheckError

SCRIPT = Path(__file__).parents[2] / "chaos.py"


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "injections", [60, pytest.param(1000, marks=pytest.mark.slow)], ids=["60", "1000"]
)
def test_no_case_is_lost(injections: int, tmp_path: Path) -> None:
    """Each kind of death and hang ends in the answer that it should, and a worker is there again
    within 50 ms."""
    path = tmp_path / "chaos.json"
    done = chaos("--injections", str(injections), "--report", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["wrong"] == []
    assert report["cases"] == 2 * injections
    assert set(report["became"]) == {*ON_HOST, HARMLESS}
    assert sum(sum(counts.values()) for counts in report["became"].values()) == 2 * injections
    passed = {kind for kind, counts in report["became"].items() if CLEAN in counts}
    assert passed == {HARMLESS, *(kind for kind in KINDS if KINDS[kind].want == CLEAN)}
    assert report["restarts"] >= injections // 4
    assert report["restart_median_s"] <= 0.05


def test_lanes_side_by_side_lose_no_case(tmp_path: Path) -> None:
    """Each has a share of the cases; together they have answered all."""
    path = tmp_path / "chaos.json"
    done = chaos("--injections", "30", "--jobs", "2", "--report", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert (report["answered"], report["cases"], report["wrong"]) == (60, 60, [])
    assert report["lanes"] >= report["jobs"] == 2


@pytest.mark.parametrize(
    ("number", "jobs"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)], ids=["SIGTERM", "SIGINT"]
)
def test_an_interrupted_run_keeps_what_it_has(
    number: signal.Signals, jobs: int, tmp_path: Path
) -> None:
    """A report of what was answered, and exit 2."""
    path = tmp_path / "chaos.json"
    command = [sys.executable, str(SCRIPT), "--jobs", str(jobs), "--report", str(path)]
    with subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        deadline = time.monotonic() + 120
        while answered_in(tmp_path) < 10:
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(number)
        printed, said = run.communicate(timeout=60)
    assert run.returncode == 2, printed + said
    report = json.loads(path.read_text())
    assert report["wrong"] == []
    assert 10 <= report["answered"] < report["cases"] == 2000
    problem = f"interrupted: {report['answered']:,} of 2,000 cases were answered"
    assert report["problems"] == [problem]
    assert said == f"chaos: {problem}\n"
    assert f"{HARMLESS} " in printed
    assert not list(tmp_path.glob("pagefuzz-chaos-*"))


def answered_in(folder: Path) -> int:
    """How many cases the ledgers below a folder have."""
    return sum(len(path.read_bytes().splitlines()) for path in folder.rglob("ledger-*.jsonl"))


def test_what_is_wrong_counts_when_it_is_interrupted(tmp_path: Path) -> None:
    """Only what was not answered, and the case that was running, are excused."""
    stop = threading.Event()
    stop.set()
    supervisor: Any = Supervisor("host", tmp_path, 0.5, stop)
    supervisor.kinds = {1: HARMLESS, 2: "SIGSEGV", 3: "SIGSEGV", 4: HARMLESS}
    supervisor.answers = [answer(1, CLEAN), answer(2, DEATH, 1)]
    supervisor._unfinished = 3
    (tmp_path / "failing.jsonl").write_text(case_line(2) + case_line(3))
    supervisor.examine()
    assert supervisor.wrong == []
    supervisor.answers[0].update(became=NOT_RUN)
    (tmp_path / "failing.jsonl").write_text(case_line(3) + case_line(4))
    supervisor.examine()
    assert [said.split(":")[0] for said in supervisor.wrong] == [
        "case 1 (harmless)",
        "case 2 failed and is in no journal",
        "case 4 is in a journal for nothing",
    ]


def test_a_lane_that_dies_by_itself_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is a problem; what was answered stays."""

    def run(supervisor: Any, cases: list[tuple[int, str]]) -> None:
        supervisor.kinds = dict(cases)
        if 1 in supervisor.kinds:
            supervisor.answers.append(answer(1, CLEAN))
            raise CannotCheckError("a lane died by itself")
        assert supervisor._stop.wait(30)

    monkeypatch.setattr(Supervisor, "run", run)
    lanes = Lanes("host", tmp_path, 0.5, 2)
    lanes.run([(number, HARMLESS) for number in range(1, 7)])
    assert lanes.problems == ["a lane died by itself"]
    assert [one["number"] for one in lanes.answers] == [1]
    assert lanes.wrong == []


def test_kinds_are_drawn_evenly() -> None:
    """All of them, those that take seconds less often; the same ones for the same seed."""
    cases = drawn(1000, ON_HOST, 7)
    counts = {kind: sum(kind == other for _, other in cases) for kind in (*ON_HOST, HARMLESS)}
    assert counts.pop(HARMLESS) == sum(counts.values()) == 1000
    assert counts["lane killed"] == 20
    assert min(counts.values()) == 20
    assert max(counts.values()) < 50
    assert drawn(1000, ON_HOST, 7) == cases != drawn(1000, ON_HOST, 8)


def answer(number: int, became: str, launches: int = 2, said: str = "so") -> dict[str, Any]:
    return {"number": number, "became": became, "launches": launches, "said": said}


def case_line(seed: int) -> str:
    return json.dumps({"case": {"seed": seed}}) + "\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: None, None),
        (lambda s: s.answers.pop(0), r"case 1 \(harmless\) was answered 0 times"),
        (lambda s: s.answers.append(answer(3, NOT_RUN)), r"case 3 .* was answered 2 times"),
        (lambda s: s.answers[1].update(became=CLEAN), r"case 2 \(SIGSEGV\): clean, not failed"),
        (lambda s: s.answers[0].update(became=NOT_RUN), r"case 1 \(harmless\): not run, not clean"),
        (lambda s: s.answers[0].update(launches=1), r"case 1 \(harmless\) passed half launched"),
        (lambda s: s.answers[2].update(said=""), r"case 3 .* was not run for no reason"),
        (lambda s: s.failing.unlink(), r"case 2 failed and is in no journal"),
        (lambda s: s.failing.write_text(case_line(2) + case_line(1)), r"case 1 is in a journal"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, change: Any, said: str | None) -> None:
    """A lost case, one answered twice, one that passed: each is a sentence; and nothing else is."""
    supervisor: Any = Supervisor("host", tmp_path, 0.5)
    supervisor.kinds = {
        1: HARMLESS,
        2: "SIGSEGV",
        3: "more than there is",
        4: "lane killed",
    }
    supervisor.answers = [
        answer(1, CLEAN),
        answer(2, DEATH, 1),
        answer(3, NOT_RUN, 0),
        answer(4, LANE_KILLED, 0),
    ]
    supervisor.failing = tmp_path / "failing.jsonl"
    supervisor.failing.write_text(case_line(2))
    change(supervisor)
    supervisor.examine()
    if said is None:
        assert supervisor.wrong == []
    else:
        assert any(re.search(said, wrong) for wrong in supervisor.wrong), supervisor.wrong


def test_processes_and_files_that_are_left_are_seen(tmp_path: Path) -> None:
    """A process of a lane's session that goes on is ended, and said."""
    supervisor = Supervisor("host", tmp_path, 0.5)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as left:
        supervisor._expect_no_process_of(left.pid, timeout_s=0.1)
    assert supervisor.wrong == [f"processes [{left.pid}] are left of a lane"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kind", "nothing"], "no kind 'nothing' on host; there is SIGSEGV, "),
        (["--injections", "0"], "there must be at least one injection"),
        (["--jobs", "0"], "there must be at least one job"),
        (["--timeout", "-1"], "--timeout -1 must be more than 0 seconds"),
        (["--timeout", "nan"], "--timeout nan must be more than 0 seconds"),
        (["--report", "/dev/null/x.json"], "cannot write reports into /dev/null"),
        (["--report", "/"], "cannot write the report /: it is a folder; name a file"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: list[str], said: str) -> None:
    """Exit 2, and nothing has run."""
    done = chaos(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"chaos: {said}")
    assert done.stdout == ""
