"""One case on several subjects: whatever becomes of one of them, what another shows counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ci.tests.roundtrips.trips import COPY, MLA, copied, mla

from pagefuzz.harness.check import Checker
from pagefuzz.harness.cli import main
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import Finding
from pagefuzz.harness.round_trips import RoundTripChecker, _of_death
from pagefuzz.oracles.case import load_case
from pagefuzz.oracles.observation import Death
from pagefuzz.oracles.verdict import CaseClass, Failure, Outcome, Verdict
from pagefuzz.strategies.reported import examples_for

OPERATION = "cp_gather_cache"
FAILURE = Failure("output", "row 0 differs", ("dst",))
CLEAN = Verdict(Outcome.CLEAN, CaseClass.IN_CONTRACT, checked={"output": 1}, launches=2)
FAILED = Verdict(Outcome.FAILED, CaseClass.IN_CONTRACT, (FAILURE,), {"output": 1}, launches=2)
THREAD = CannotCheckError("a launch left a thread running")


@pytest.fixture
def case_file(tmp_path: Path) -> Path:
    case = next(iter(examples_for(OPERATION).values()))
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case.to_json()))
    return path


@pytest.fixture
def trip_file(tmp_path: Path) -> Path:
    path = tmp_path / "trip.json"
    path.write_text(copied(mla([0]), [[0]], [0, 1], [0]).dumps())
    return path


@pytest.fixture
def ends(monkeypatch):
    """Replaces what checks: subject after subject ends like that, and the last ones as the last."""

    def install(of: type, *how: Verdict | BaseException) -> list[object]:
        left, made = list(how), []

        def check(checker: object, case: object) -> Verdict:
            one = left.pop(0) if len(left) > 1 else left[0]
            made.append(one)
            if isinstance(one, BaseException):
                raise one
            return one

        monkeypatch.setattr(of, "check", check)
        return made

    return install


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ((FAILED, THREAD), 1, "bundled:token: a launch left a thread running\n"),
        ((THREAD, FAILED), 1, "bundled:page: a launch left a thread running\n"),
        ((THREAD, CLEAN), 2, "bundled:page: a launch left a thread running\n"),
        ((FAILED, KeyboardInterrupt()), 1, "interrupted before every subject was checked\n"),
        ((CLEAN, KeyboardInterrupt()), 2, "interrupted before every subject was checked\n"),
        ((KeyboardInterrupt(),), 2, "pagefuzz: interrupted before anything was checked\n"),
        ((FAILED, CLEAN), 1, ""),
        ((CLEAN,), 0, ""),
    ],
)
def test_replays(ends, capsys, case_file, how, code, said):
    """A finding that was printed is exit 1; short of one, a subject that was not checked is 2."""
    made = ends(Checker, *how)
    assert main(["replay", str(case_file), "--device", "host", "--build", "release"]) == code
    told = capsys.readouterr()
    assert told.err.endswith(said)
    assert bool(told.err) == bool(said)
    assert ("row 0 differs" in told.out) == (code == 1)
    assert not told.out or len(made) > 1


def test_the_only_subject_that_cannot_be_checked(ends, capsys, case_file):
    """One sentence, as of every command."""
    ends(Checker, THREAD)
    only = ("--subject", "bundled:page", "--device", "host", "--build", "release")
    assert main(["replay", str(case_file), *only]) == 2
    assert capsys.readouterr().err == "pagefuzz: a launch left a thread running\n"


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("", 2, f"{MLA}/{COPY} (bundled:token -> bundled:page): a launch left a thread running\n"),
        ("SIGSEGV", 1, "bundled:token -> bundled:token): a launch left a thread running\n"),
    ],
)
def test_round_trips(ends, capsys, trip_file, how, code, said):
    """So it is of writers and readers."""
    failure = _of_death(Death("SIGSEGV"), f"{MLA}/{COPY}")
    failed = Verdict(Outcome.FAILED, CaseClass.IN_CONTRACT, (failure,), {"round trip": 0})
    agrees = Verdict(Outcome.CLEAN, CaseClass.IN_CONTRACT, checked={"round trip": 1})
    ends(RoundTripChecker, *((failed, THREAD) if how else (THREAD, agrees)))
    arguments = ["roundtrip", str(trip_file), "--device", "host", "--build", "release"]
    assert main(arguments) == code
    told = capsys.readouterr()
    assert told.err.endswith(said)
    assert told.err.count("\n") == 1
    assert ("do not compose" in told.out or "SIGSEGV" in told.out) == (code == 1)
    ends(RoundTripChecker, failed if how else agrees, KeyboardInterrupt())
    assert main(arguments) == code
    assert capsys.readouterr().err == "pagefuzz: interrupted before every subject was checked\n"


def test_a_replay_tells_of_one_run(ends, capsys, tmp_path, case_file, trip_file):
    """What it does not know, whether the case is minimal and how often it fails, it does not say;
    the file does."""
    ends(Checker, FAILED)
    case = load_case(case_file)
    options = {"build": "release", "minimised": True, "repeats": 10, "runs": 10}
    known = Finding(OPERATION, "bundled:page", "host", "host", case=case, verdict=FAILED, **options)
    assert "10 of 10 further runs failed the same way" in known.text(300)
    on = ("--device", "host", "--build", "release", "--subject", "bundled:page")
    for path in (known.save(tmp_path), case_file):
        assert main(["replay", str(path), *on]) == 1
        said = " ".join(capsys.readouterr().out.split())
        assert "seen output (two fills against the reference); blind" in said
        assert not re.search("repeated|minimised|further runs", said)
    failure = _of_death(Death("SIGSEGV"), f"{MLA}/{COPY}")
    ends(RoundTripChecker, Verdict(Outcome.FAILED, CaseClass.IN_CONTRACT, (failure,)))
    assert main(["roundtrip", str(trip_file), *on[:4], "--reader", "bundled:page"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "seen round trip (composition of contracts) again" in said
    assert not re.search("repeated|minimised|further runs", said)
