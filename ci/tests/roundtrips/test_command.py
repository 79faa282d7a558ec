"""`pagefuzz roundtrip` as it is used."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from ci.tests.roundtrips.trips import COPY, DEQUANT, FLASH, MLA, copied, mla

from pagefuzz.harness.cli import main
from pagefuzz.harness.round_trips import RoundTripChecker
from pagefuzz.oracles.round_trip import RoundTrip
from pagefuzz.oracles.verdict import CaseClass, Outcome, Verdict

TWINS = Path(__file__).parent.parent / "twins"
UPSIDE_DOWN = f"twin:{TWINS / 'mla-scale-upside-down.toml'}"
PAIR = ("--pair", f"{MLA}/{COPY}", "--device", "host", "--build", "release")


def test_pairs_that_agree(cli, tmp_path):
    """One line for each subject of the pair, exit 0, and nothing is left behind."""
    done = cli("roundtrip", *PAIR, "--cases", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith(f"2 units of 1 pair\n{MLA}/{COPY}\n")
    units = re.findall(
        r"^  bundled:token -> bundled:(\w+): 10 round trips, [\d,]+ .*, agree$", done.stdout, re.M
    )
    assert units == ["page", "token"]
    for layer in ("reference, bit-exact", "guard pages", "read-only sources", "red zones"):
        assert re.search(rf"^{layer} +[1-9][\d,]* +[1-9]", done.stdout, re.M), layer
    assert "checked build" not in done.stdout
    assert re.search(r"^memory at most: buffers .* worker .* MB$", done.stdout, re.M)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert list(tmp_path.iterdir()) == []


def test_a_finding_and_again(cli, capsys, tmp_path):
    """A faulty writer: exit 1, the report, a file that fails again and is fixed by a sound one."""
    only = ("--writer", UPSIDE_DOWN, "--reader", "bundled:page", "--seed", "1")
    done = cli("roundtrip", *PAIR, *only, "--time", "60s", "--report", "out")
    assert done.returncode == 1, done.stdout + done.stderr
    report = done.stdout[done.stdout.index("ROUND") : done.stdout.index("\nlayer  ")]
    labels = re.findall(r"^(\w+)  +\S", report, re.M)
    assert labels == ["case", "access", "means", "effect", "seen", "again"]
    line = done.stdout.splitlines()[2:4]
    assert line[0] == "  twin:.../mla-scale-upside-down.toml -> bundled:page:"
    assert re.fullmatch(r"    \d+ round trips?, [\d,]+ .*, do not agree", line[1])
    title = f"ROUND TRIP  {MLA} and {COPY} do not compose"
    assert title in done.stdout
    assert "written by input token 0" in " ".join(done.stdout.split())
    (path,) = (tmp_path / "out" / "findings").iterdir()
    found = json.loads(path.read_text())
    assert found["round_trip"]["writer"]["sizes"]["num_tokens"] == 1
    assert (found["repeats"], found["runs"]) == (10, 10)
    assert "10 of 10 further runs failed the same way" in " ".join(done.stdout.split())
    assert main(["roundtrip", str(path)]) == 1
    again = capsys.readouterr().out
    assert title in again
    assert f"again   pagefuzz roundtrip {path}" in again
    assert main(["roundtrip", str(path), "--writer", "bundled:token"]) == 0
    agrees = " -> bundled:page) · host · release build: agree\n"
    assert capsys.readouterr().out.endswith(agrees)


def test_a_layer_that_examined_nothing_is_no_pass(monkeypatch, capsys):
    """Exit 2 and its name, though all trips agree; the others are not named."""
    inside = RoundTripChecker.check

    def check(checker: RoundTripChecker, trip: RoundTrip) -> Verdict:
        verdict = inside(checker, trip)
        return replace(verdict, layers={**verdict.layers, "guard pages": (0, 0)})

    monkeypatch.setattr(RoundTripChecker, "check", check)
    assert main(["roundtrip", *PAIR, "--reader", "bundled:page", "--cases", "40"]) == 2
    said = capsys.readouterr()
    assert ", agree\n" in said.out
    assert re.search("^guard pages +nothing$", said.out, re.M)
    assert re.fullmatch(r"pagefuzz: .*: guard pages examined nothing in 40 cases\n", said.err)


@pytest.mark.parametrize(("idle", "code"), [("reference, bit-exact", 2), ("", 0)])
def test_a_trip_that_was_not_run_excuses_no_layer(monkeypatch, capsys, idle, code):
    """It was drawn: all that were drawn are enough for every layer to have examined something."""
    inside = RoundTripChecker.check
    first: list[Verdict] = []
    runs = [0]

    def check(checker: RoundTripChecker, trip: RoundTrip) -> Verdict:
        runs[0] += 1
        if runs[0] == 1:
            return Verdict(Outcome.NOT_RUN, CaseClass.IN_CONTRACT, not_run="no memory")
        if not first:
            first.append(inside(checker, trip))
        return replace(first[0], layers={name: (1, 1) for name in checker.layers if name != idle})

    monkeypatch.setattr(RoundTripChecker, "check", check)
    assert main(["roundtrip", *PAIR, "--reader", "bundled:page"]) == code
    said = capsys.readouterr()
    assert "1 not run: no memory" in said.err
    assert ("bit-exact (output) examined nothing in 99 cases" in said.err) == bool(idle)


def test_help_lists_what_is_taken(cli):
    """There is no AddressSanitizer build of a round trip."""
    said = " ".join(cli("roundtrip", "--help").stdout.split())
    assert "--build FLAGS checked, release, ubsan, coverage, or several" in said
    assert "ubsan, asan, coverage" in " ".join(cli("fuzz", "--help").stdout.split())


def test_what_cannot_be_checked_is_no_pass(capsys, tmp_path):
    """Unknown pairs and subjects, malformed files, and nothing compared: exit 2, one sentence."""
    trip, bare, odd = (tmp_path / name for name in ("trip.json", "bare.json", "odd.json"))
    bare.write_text("{}")
    trip.write_text(copied(mla([0]), [[0]], [0, 1], [0]).dumps())
    odd.write_text(
        json.dumps({"pagefuzz_round_trip_finding": 1, "round_trip": json.loads(trip.read_text())})
    )
    for arguments, sentence in (
        (("--pair", "a/b"), f"unknown pair 'a/b'; there is {MLA}/{COPY}"),
        (("--pair", f"{FLASH}/{DEQUANT}", "--writer", "bundled:page"), f"not of {FLASH}"),
        (("--writer", "bundled:nothing"), "no pair has the subjects bundled:nothing"),
        ((str(bare),), 'needs "pagefuzz_round_trip": 1'),
        ((str(tmp_path / "none.json"),), "cannot read the round trip"),
        ((str(odd),), "the finding does not say its writer"),
        ((*PAIR, "--build", "asan"), "no AddressSanitizer build"),
        ((*PAIR, "--mover", "bundled:token"), "a mover is of copy_blocks or swap_blocks"),
    ):
        assert main(["roundtrip", *arguments]) == 2, arguments
        said = capsys.readouterr().err
        assert sentence in said
        assert said.count("\n") == 1
    bare_trip = ["roundtrip", str(trip), "--device", "host", "--reader", "bundled:token"]
    assert main(bare_trip) == 0
    assert capsys.readouterr().out.endswith(": agree\n")


@pytest.mark.parametrize(("writer", "code"), [("bundled:token", 2), (UPSIDE_DOWN, 1)])
def test_interrupted(monkeypatch, capsys, tmp_path, writer, code):
    """What was compared is said, what failed until then is stored, and the rest is no pass."""
    inside = RoundTripChecker.check
    seen: list[Verdict] = []

    def check(checker: RoundTripChecker, trip: RoundTrip) -> Verdict:
        if len(seen) == 20 or any(not verdict.clean for verdict in seen):
            raise KeyboardInterrupt
        seen.append(inside(checker, trip))
        return seen[-1]

    monkeypatch.setattr(RoundTripChecker, "check", check)
    monkeypatch.chdir(tmp_path)
    only = ("--reader", "bundled:page", "--writer", writer, "--seed", "1")
    assert main(["roundtrip", *PAIR, *only]) == code
    said = capsys.readouterr()
    assert said.err == "pagefuzz: interrupted before every unit was checked\n"
    assert re.search(r"\d+ round trips?, [\d,]+ bytes compared, (agree so far|do not)", said.out)
    assert ("not repeated" in said.out) == (code == 1)
    assert re.search("^guard pages +[1-9]", said.out, re.M)
    stored = ["findings"] if code == 1 else []
    assert [path.name for path in tmp_path.iterdir()] == stored  # and no .hypothesis


def test_a_finding_that_cannot_be_stored(monkeypatch, capsys, tmp_path):
    """It is printed, and it is exit 1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "findings").write_text("a file is in the way")
    only = ("--reader", "bundled:page", "--writer", UPSIDE_DOWN, "--seed", "1")
    assert main(["roundtrip", *PAIR, *only]) == 1
    said = capsys.readouterr()
    assert "do not compose" in " ".join(said.out.split())
    assert said.err.startswith("pagefuzz: cannot store a finding in findings: File exists")
