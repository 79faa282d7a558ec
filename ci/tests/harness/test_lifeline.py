"""What is tied to a process ends with it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from ci.tests.processes import descendants, is_alive, wait_until_gone

from pagefuzz.harness.lifeline import tied
from pagefuzz.harness.sanitizers import watching

#: Two processes that do not end; they are there once the file is.
ENDLESS = 'sh -c "while :; do :; done" & : > {0}; while :; do :; done'

TIED = """
import sys
from pagefuzz.harness.lifeline import tied
with tied(["sh", "-c", sys.argv[1]]) as process:
    process.wait()
"""

WATCHED = """
import sys
from pagefuzz.harness.sanitizers import watching
watching._run(["sh", "-c", sys.argv[1]], 600.0)
"""


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("program", [TIED, WATCHED], ids=["tied", "under a sanitizer"])
def test_it_ends_with_a_process_that_is_killed(tmp_path: Path, program: str) -> None:
    """With what it has started itself."""
    flag = tmp_path / "flag"
    holder = subprocess.Popen([sys.executable, "-c", program, ENDLESS.format(flag)])
    try:
        _wait_for(flag)
        started = descendants(holder.pid)
        assert len(started) == 2
    finally:
        holder.kill()
        holder.wait()
    wait_until_gone(*started, timeout_s=20)


def test_it_ends_with_the_block(tmp_path: Path) -> None:
    """However that is left."""
    flag = tmp_path / "flag"
    started: list[int] = []

    def leave() -> None:
        with tied(["sh", "-c", ENDLESS.format(flag)]) as process:
            _wait_for(flag)
            started.extend((process.pid, *descendants(process.pid)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    assert len(started) == 2
    wait_until_gone(*started, timeout_s=20)


def test_what_it_leaves_behind_ends_too(tmp_path: Path) -> None:
    """It has an exit code of its own by then."""
    with tied(["sh", "-c", "sleep 600 & echo $!"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
        assert process.wait() == 0
        assert is_alive(left)
    wait_until_gone(left, timeout_s=20)


def test_it_may_end_by_itself() -> None:
    """Exit code and output are its own, and no descriptor stays open."""
    before = set(Path("/proc/self/fd").iterdir())
    for code in (0, 3):
        with tied(["sh", "-c", f"echo x; exit {code}"], stdout=subprocess.PIPE) as process:
            assert process.communicate() == (b"x\n", None)
        assert process.returncode == code
    assert watching._run(["sh", "-c", "echo x"], 60.0) == (0, "x\n")
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_what_does_not_run_is_an_error() -> None:
    """Here, not in the child."""
    with pytest.raises(FileNotFoundError), tied(["/nowhere/compiler"]):
        pass
