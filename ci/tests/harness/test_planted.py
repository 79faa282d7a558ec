"""Planted faults are found from nothing, as a user would look for them, and by reported cases."""

from __future__ import annotations

import shutil

import pytest
from ci.tests.planted import (
    NAMES,
    TWINS,
    case_of,
    is_slow,
    judgements_of,
    most_work,
    planted,
    twin,
    work_of,
)

from pagefuzz.harness.check import TIMEOUT_S, Checker
from pagefuzz.harness.findings import load_finding
from pagefuzz.oracles.verdict import Outcome
from pagefuzz.strategies.reported import examples_for

CAMPAIGNS = [
    pytest.param(
        name, marks=[] if planted(name).get("fuzz", {}).get("fast") else [pytest.mark.slow]
    )
    for name in NAMES
]


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_finds_it(name, cli, tmp_path):
    """Within 30 seconds on one core, minimising included: one finding, of the judgement that
    should, in a case of at most two requests (pairs, tokens) that fails every time."""
    # What is drawn follows from the subject's name: a path that is the same wherever this runs.
    subject = f"twin:{name}"
    if (TWINS / f"{name}.toml").exists():
        shutil.copy(TWINS / f"{name}.toml", tmp_path)
        subject += ".toml"
    hang_after_s = planted(name).get("timeout_s", TIMEOUT_S)
    done = cli(
        *("fuzz", "--device", "host", "--subject", subject, "--hang-after", f"{hang_after_s:g}s"),
        *("--profile", "gate", "--time", "30s", "--jobs", "1", "--report", "out"),
        timeout=600,  # compiling it is none of the 30 seconds
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (path,) = (tmp_path / "out" / "findings").glob("*.json")
    finding = load_finding(path)
    assert finding.failure.judgement in judgements_of(name), finding.text()
    assert work_of(finding.case) <= most_work(name), finding.text()
    assert finding.repeats == finding.runs > 0


SHOWN = [
    pytest.param(name, marks=[pytest.mark.slow] if is_slow(name) else [])
    for name in NAMES
    if "reported" in planted(name)
]


@pytest.mark.parametrize("name", SHOWN)
def test_the_reported_case_shows_it(name):
    """A twin of a report fails on the report's case, and is clean on the one before."""
    reported, build = planted(name), "checked" if planted(name).get("slow") else "release"
    examples = examples_for(case_of(name).operation)
    with Checker(None, twin(name), "host", build) as checker:
        for example in reported["reported"]:
            verdict = checker.check(examples[example])
            assert verdict.outcome is Outcome.FAILED, example
        for example in reported.get("unshown", ()):
            verdict = checker.check(examples[example])
            assert verdict.outcome is Outcome.CLEAN, (example, verdict.failures)
