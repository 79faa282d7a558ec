"""The script that compares two backends: what it counts, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "equality.py"
TWINS = Path(__file__).parent.parent / "twins"
WRONG = f"twin:{TWINS}/wrong-output.toml"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_equal_backends_are_reported_with_what_was_compared(tmp_path: Path) -> None:
    """Exit 0, and a report that says how much stands behind it."""
    path = tmp_path / "report" / "equality.json"
    done = run("--against", "host", "--cases", "12", "--report", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["cases_compared"] == 12
    # Two of each case on both backends, and one more where a relation applies.
    assert report["launches"] in range(48, 48 + 2 * 12 + 1, 2)
    assert report["bytes_compared"] > 0
    assert report["seed"] == 1
    assert not report["differences"]


def test_a_failing_subject_is_a_difference() -> None:
    """Exit 1, with the case."""
    done = run("--against", "host", "--cases", "40", "--subject", WRONG)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERENT  host: a row of dst holds" in done.stdout
    assert '"pagefuzz_case":1' in done.stdout


def test_what_is_missing_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 2 and one sentence: an unknown subject, and a GPU that is not there."""
    done = run("--against", "host", "--subject", "bundled:nothing")
    assert done.returncode == 2
    assert done.stderr.startswith("could not check: unknown subject 'bundled:nothing'")
    done = run("--against", "host", "--report", "/dev/null/x.json")
    assert done.returncode == 2
    assert done.stderr.startswith("could not check: cannot write reports into /dev/null")
    done = run("--against", "host", "--limit", "1")
    assert done.returncode == 2
    assert "--limit 1 must be at least 67108864" in done.stderr
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run()
    assert done.returncode == 2
    assert done.stderr.startswith("could not check: there is no GPU")


@pytest.mark.parametrize(
    ("subject", "code"),
    [pytest.param("bundled:page", 2, marks=pytest.mark.slow), (WRONG, 1)],
)
def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path: Path, subject: str, code: int) -> None:
    """A difference is one; without any it is no pass."""
    path = tmp_path / "equality.json"
    command = [sys.executable, str(SCRIPT), "--against", "host", "--subject", subject]
    command += ["--cases", "1000000", "--report", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        assert it.stderr is not None
        for line in it.stdout:
            if line.startswith("DIFFERENT") or "of 1,000,000 cases" in line:
                break
        it.send_signal(signal.SIGTERM)
        it.stdout.read()
        said = it.stderr.read()
    assert it.returncode == code, said
    report = json.loads(path.read_text())
    assert report["was_interrupted"] or code == 1  # it ends by itself after a few differences
    assert bool(report["differences"]) is (code == 1)
    assert report["cases_compared"] > 0
    assert ("interrupted after" in said) is (code == 2)
