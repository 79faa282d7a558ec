"""What is tied to a process ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
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

KILLED_EARLY = """
import os, signal, sys
from pagefuzz.harness import lifeline

def die(pipe, group):
    print(group, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

lifeline._kill_at_hangup = die
with lifeline.tied(["touch", sys.argv[1]]):
    pass
"""

WATCHED = """
import sys
from pagefuzz.harness.sanitizers import watching
watching._run(["sh", "-c", sys.argv[1]], 600.0)
"""


def _wait_for(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("program", [TIED, WATCHED], ids=["tied", "under a sanitizer"])
def test_it_ends_with_a_process_that_is_killed(tmp_path: Path, program: str) -> None:
    """With what it has started itself."""
    flag = tmp_path / "flag"
    holder = subprocess.Popen([sys.executable, "-c", program, ENDLESS.format(flag)])
    try:
        _wait_for(flag.exists)
        started = descendants(holder.pid)
        assert len(started) == 2
    finally:
        holder.kill()
        holder.wait()
    wait_until_gone(*started, timeout_s=20)


def test_it_does_not_begin_before_it_is_tied(tmp_path: Path) -> None:
    """A process that is killed in between has started nothing."""
    flag = tmp_path / "flag"
    command = [sys.executable, "-c", KILLED_EARLY, str(flag)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    wait_until_gone(int(done.stdout), timeout_s=20)
    assert not flag.exists()


def test_it_ends_with_the_block(tmp_path: Path) -> None:
    """However that is left."""
    flag = tmp_path / "flag"
    started: list[int] = []

    def leave() -> None:
        with tied(["sh", "-c", ENDLESS.format(flag)]) as process:
            _wait_for(flag.exists)
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
    assert watching._run(["sh", "-c", "cat; echo x"], 60.0) == (0, "x\n")  # without input
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_what_does_not_run_is_an_error() -> None:
    """Before anything has started."""
    for program, error in (
        ("/nowhere/compiler", FileNotFoundError),
        ("/dev/null", PermissionError),
    ):
        with pytest.raises(error), tied([program]):
            pass
