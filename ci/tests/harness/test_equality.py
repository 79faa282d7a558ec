"""The script that compares two backends: what it counts, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "equality.py"
TWINS = Path(__file__).parent.parent / "twins"


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
    done = run("--against", "host", "--cases", "40", "--subject", f"twin:{TWINS}/wrong-output.toml")
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
