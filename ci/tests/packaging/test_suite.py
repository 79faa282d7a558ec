"""The test-suite's own rules: GPU tests that are not run, slow ones, the scripts' interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.cuda
def test_on_a_gpu():
    pass

@pytest.mark.cuda
def test_on_a_gpu_too():
    pass

@pytest.mark.slow
def test_slow():
    pass

def test_plain():
    pass
"""

INI = """
[pytest]
markers =
    cuda: needs a GPU
    slow: takes long
"""


@pytest.fixture
def suite(root: Path, tmp_path: Path):
    """Runs pytest on four tests under the repository's conftest.py, on a machine without a GPU."""
    shutil.copy(root / "conftest.py", tmp_path)
    (tmp_path / "test_four.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(INI)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path,
            # Not even a GPU that is there can be seen.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_cuda_tests_without_a_gpu_are_not_run(suite):
    """They are neither passed nor failed, and their number is in the summary."""
    done = suite()
    assert "2 cuda tests NOT RUN: no GPU" in done.stdout
    assert "1 passed, 2 skipped, 1 deselected" in done.stdout
    assert done.returncode == 0


def test_cuda_tests_that_were_asked_for_fail_the_session(suite):
    """-m cuda without a GPU is no pass."""
    done = suite("-m", "cuda")
    assert "2 cuda tests NOT RUN: no GPU" in done.stdout
    assert done.returncode == 1


def test_cuda_tests_that_were_not_wanted_are_no_news(suite):
    """-m 'not cuda' says nothing of them."""
    done = suite("-m", "not cuda")
    assert "NOT RUN" not in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("arguments", [["--all"], ["-m", "slow or not slow"]])
def test_slow_tests_run_when_asked_for(suite, arguments):
    """--all, or an expression that speaks of them."""
    assert "2 passed, 2 skipped" in suite(*arguments).stdout


def test_the_rules_hold_under_xdist(suite):
    """With worker processes the summary and the exit code are the same."""
    pytest.importorskip("xdist")
    done = suite("-n", "2", "-m", "cuda")
    assert "2 cuda tests NOT RUN: no GPU" in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize("script", ["ci/test", "ci/fuzz"])
def test_scripts_refuse_an_interpreter_that_is_none(root, script):
    """PAGEFUZZ_PYTHON must name a Python of 3.11 or newer: exit 2 and one sentence."""
    done = subprocess.run(
        [str(root / script)],
        env={**os.environ, "PAGEFUZZ_PYTHON": "/bin/false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "PAGEFUZZ_PYTHON=/bin/false is not a Python of version 3.11 or newer" in done.stderr


def test_scripts_use_the_interpreter_they_are_given(root, tmp_path):
    """PAGEFUZZ_PYTHON: nothing is installed, and this tree is what runs, from any folder."""
    done = subprocess.run(
        [str(root / "ci" / "fuzz"), "--op", "nope"],
        cwd=tmp_path,
        env={**os.environ, "PAGEFUZZ_PYTHON": sys.executable, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "unknown operation 'nope'" in done.stderr
