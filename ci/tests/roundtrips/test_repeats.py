"""A round trip that fails is run again in fresh workers; one that hangs, with little patience."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ci.tests.roundtrips.trips import COPY, MLA

from pagefuzz.harness.cli import main
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.round_trip_search import Search
from pagefuzz.harness.round_trips import RoundTripChecker, _of_death
from pagefuzz.oracles.observation import Death
from pagefuzz.oracles.round_trip import RoundTrip
from pagefuzz.oracles.verdict import CaseClass, Outcome, Verdict

TWINS = Path(__file__).parent.parent / "twins"
PAIR = f"{MLA}/{COPY}"
ON_THE_HOST = ("--pair", PAIR, "--device", "host", "--build", "release")
ONE = (*ON_THE_HOST, "--reader", "bundled:page", "--seed", "1")
EVER = 1e9


def judged(how: str) -> Verdict:
    """As after such a death; "" of none."""
    if not how:
        return Verdict(Outcome.CLEAN, CaseClass.IN_CONTRACT, checked={"round trip": 1})
    failure = _of_death(Death(how), PAIR)
    return Verdict(Outcome.FAILED, CaseClass.IN_CONTRACT, (failure,), {"round trip": 0}, launches=1)


@pytest.fixture
def subject(monkeypatch):
    """Replaces what launches: `subject(how)` with how a round trip ends, or how many seconds it
    takes, of its number of tokens and of the runs since the last restart. The restarts."""
    restarts: list[int] = []
    runs = [0]

    def install(how):
        def check(checker: RoundTripChecker, trip: RoundTrip) -> Verdict:
            runs[0] += 1
            end = how(trip.writer.sizes["num_tokens"], runs[0])
            if isinstance(end, str):
                return judged(end)
            return judged("hang" if end > checker.hang_after_s else "")

        def restart(checker: RoundTripChecker) -> None:
            restarts.append(runs[0])
            runs[0] = 0

        monkeypatch.setattr(RoundTripChecker, "check", check)
        monkeypatch.setattr(RoundTripChecker, "restart", restart)
        return restarts

    return install


def searched():
    with RoundTripChecker(PAIR, device="host", build="release") as checker:
        return Search(checker, seed=1, limit_bytes=2**26).run(cases=50)


def test_what_fails_is_on_disk_before_it_is_minimised(subject, monkeypatch, tmp_path, capsys):
    """Whatever ends the command then."""
    subject(lambda tokens, run: "SIGSEGV")
    into = ("--report", str(tmp_path))

    def killed(search: Search) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Search, "_finding", killed)
        assert main(["roundtrip", *ONE, *into, "--cases", "50"]) != 0
    (path,) = (tmp_path / "findings").iterdir()
    first = json.loads(path.read_text())
    assert (first["minimised"], first["runs"]) == (False, 0)
    assert first["not_minimised"] == "it was killed before that"
    assert main(["roundtrip", *ONE, *into, "--cases", "50"]) == 1
    assert json.loads(path.read_text())["runs"] == 10
    assert list((tmp_path / "findings").iterdir()) == [path]


def tokens_of(finding) -> int:
    return finding.trip.writer.sizes["num_tokens"]


def test_a_finding_is_repeated_in_fresh_workers(subject):
    """Ten times, whatever the worker has done before."""
    restarts = subject(lambda tokens, runs: "SIGSEGV" if tokens >= 2 else "")
    finding = searched().finding
    assert tokens_of(finding) == 2
    assert (finding.minimised, finding.repeats, finding.runs) == (True, 10, 10)
    assert finding.repeats_hang_after_s is None
    assert restarts[1:] == [1] * 9
    assert "10 of 10 further runs failed the same way" in finding.text(width=300)


def test_one_that_needs_what_was_left_behind_says_so(subject):
    """It is a finding all the same."""
    subject(lambda tokens, runs: "SIGSEGV" if runs > 5 else "")
    searched_ = searched()
    assert (searched_.finding.repeats, searched_.finding.runs) == (0, 10)
    assert "0 of 10 further runs failed the same way" in searched_.finding.text(width=300)


def test_a_hang_is_minimised_and_repeated_with_little_patience(subject):
    """Its smallest round trip was given all of it once."""
    given: list[float] = []
    subject(lambda tokens, runs: EVER if tokens >= 2 else 0.0)
    inside = RoundTripChecker.check

    def check(checker: RoundTripChecker, trip: RoundTrip) -> Verdict:
        given.append(checker.hang_after_s)
        return inside(checker, trip)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundTripChecker, "check", check)
        finding = searched().finding
    assert tokens_of(finding) == 2
    assert (finding.minimised, finding.repeats, finding.runs) == (True, 10, 10)
    little_s = finding.repeats_hang_after_s
    assert little_s < 60.0
    assert given[-11:] == [60.0] + [little_s] * 10
    assert f"each launch given {little_s:g} s" in finding.text(width=300)


def test_a_slow_launch_is_no_hang(subject):
    """A smaller one that comes back after a while is not the finding."""
    subject(lambda tokens, runs: EVER if tokens >= 4 else 20.0 * (tokens >= 1))
    finding = searched().finding
    assert tokens_of(finding) >= 4
    assert (finding.minimised, finding.repeats, finding.runs) == (False, 10, 10)
    reason = "a simpler case that seemed to hang came back when it was given 60 s"
    assert f"not fully minimised, {reason}" in finding.text(width=300)
    assert finding.to_json()["not_minimised"] == reason


@pytest.mark.parametrize("when", [1, 2, 30])
def test_what_was_found_is_not_lost(subject, when):
    """Where nothing can be checked any more, it is told without what is missing."""
    failed = [0]

    def how(tokens, runs):
        failed[0] += tokens >= 2
        if failed[0] > when:
            raise CannotCheckError("there is no worker any more")
        return "SIGSEGV" if tokens >= 2 else ""

    subject(how)
    found = searched()
    assert found.finding is not None
    assert "there is no worker any more" in found.problem
    assert found.finding.runs == 0 or found.finding.runs < 10


def test_the_patience_is_asked_for_and_kept(subject, capsys, tmp_path):
    """By --hang-after; again, with that of the finding, or with another one."""
    subject(lambda tokens, runs: 5.0 if tokens >= 2 else 0.0)
    assert main(["roundtrip", *ONE, "--hang-after", "3s", "--report", str(tmp_path)]) == 1
    (path,) = (tmp_path / "findings").iterdir()
    assert f"again   pagefuzz roundtrip {path} --hang-after 3s\n" in capsys.readouterr().out
    stored = json.loads(path.read_text())
    assert (stored["hang_after_s"], stored["repeats"], stored["runs"]) == (3.0, 10, 10)
    assert stored["minimised"]
    assert main(["roundtrip", str(path)]) == 1
    assert "--hang-after 3s" in capsys.readouterr().out
    assert main(["roundtrip", str(path), "--hang-after", "6s"]) == 0
    stored["hang_after_s"] = "soon"
    path.write_text(json.dumps(stored))
    capsys.readouterr()
    assert main(["roundtrip", str(path)]) == 2
    assert "hang_after_s must be seconds from 1 to 86400" in capsys.readouterr().err


def test_patience_is_enough_for_what_ends(subject, capsys):
    """No finding."""
    subject(lambda tokens, runs: 5.0)
    main(["roundtrip", *ONE, "--hang-after", "6s", "--cases", "5"])
    assert ", agree\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_that_hangs(cli, tmp_path):
    """In real workers: found, repeated and stored."""
    only = ("--reader", f"twin:{TWINS / 'hang-on-padding.toml'}", "--hang-after", "3s")
    done = cli("roundtrip", *ON_THE_HOST, *only, "--time", "60s", "--report", "out", timeout=400)
    assert done.returncode == 1, done.stdout + done.stderr
    (path,) = (tmp_path / "out" / "findings").iterdir()
    stored = json.loads(path.read_text())
    assert stored["identity"].endswith(":death:hang")
    assert stored["repeats"] == stored["runs"] > 0
