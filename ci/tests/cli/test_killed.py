"""kill -9 on the command: nothing that it has started outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from ci.tests.processes import descendants, wait_until_gone

from pagefuzz.harness.build import cache_folder

TWINS = Path(__file__).parent.parent / "twins"
HANG = f"twin:{TWINS / 'hang-on-padding.toml'}"
HOST = ("--device", "host")
PAIR = "concat_and_cache_mla/cp_gather_cache"

#: A launch is taken to hang when no case has begun for so long.
STILL_S = 2.0

#: Far below what these launches are waited for.
GONE_S = 20.0

#: A compiler that does not come to an end, and has started something that does not either.
SLOW_COMPILER = """#!/bin/sh
case "$*" in
*" -c "*) sleep 600 & : > "$FLAG"; wait ;;
*) exec g++ "$@" ;;
esac
"""


@contextmanager
def _started(
    folder: Path, *arguments: str, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "pagefuzz", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _until(happens: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not happens():
        assert process.poll() is None, "the command has ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _journals(pids: Sequence[int]) -> list[Path]:
    """Of the cases that these processes check."""
    folder = cache_folder().parent / "journals"
    return [path for pid in pids for path in folder.glob(f"{pid}-*.jsonl")]


def _hangs(pid: int) -> bool:
    """Whether it, or a process of it, waits for a launch: a case was begun a while ago."""
    for journal in _journals([pid, *descendants(pid)]):
        with contextlib.suppress(FileNotFoundError):
            about = journal.stat()
            if about.st_size and time.time() - about.st_mtime > STILL_S:
                return True
    return False


def _killed(process: subprocess.Popen[bytes]) -> None:
    """All of its descendants are gone soon."""
    started = descendants(process.pid)
    assert started
    process.kill()
    wait_until_gone(*started, timeout_s=GONE_S)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("fuzz", "--time", "10m", "--jobs", "2"), id="fuzz"),
        pytest.param(("fuzz", "--time", "10m", "--no-isolate"), id="fuzz --no-isolate"),
        pytest.param(("replay", "case.json"), id="replay"),
    ],
)
def test_a_launch_that_hangs_is_ended(tmp_path, arguments):
    """Nobody would wait for it any more."""
    case = json.loads((TWINS / "hang-on-padding.json").read_text())["case"]
    (tmp_path / "case.json").write_text(json.dumps(case))
    hostile = [] if arguments[0] == "replay" else ["--hostile"]
    command = (*arguments, *hostile, *HOST, "--subject", HANG, "--hang-after", "5m")
    with _started(tmp_path, *command) as process:
        _until(lambda: _hangs(process.pid), process)
        _killed(process)


@pytest.mark.slow
def test_a_round_trip_that_hangs_is_ended(tmp_path):
    """As others, by the fork server."""
    subjects = ("--writer", "bundled:token", "--reader", HANG)
    with _started(tmp_path, "roundtrip", *HOST, "--pair", PAIR, *subjects) as process:
        _until(lambda: _hangs(process.pid), process)
        _killed(process)


def test_a_matrix_is_ended(tmp_path):
    """In the middle of its cells, several at a time."""
    command = ("matrix", *HOST, "--op", "copy_blocks", "--tries", "100", "--jobs", "2")
    with _started(tmp_path, *command) as process:
        _until(lambda: len(descendants(process.pid)) >= 3, process)  # a server and its workers
        _killed(process)


def test_a_compiler_is_ended(tmp_path):
    """And what it has started itself."""
    compiler, flag = tmp_path / "compiler", tmp_path / "flag"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    case = json.loads((TWINS / "hang-on-padding.json").read_text())["case"]
    (tmp_path / "case.json").write_text(json.dumps(case))
    environment = {
        "PAGEFUZZ_CXX": str(compiler),
        "PAGEFUZZ_CACHE": str(tmp_path / "cache"),
        "FLAG": str(flag),
    }
    with _started(tmp_path, "replay", "case.json", *HOST, **environment) as process:
        _until(flag.exists, process)
        assert len(descendants(process.pid)) == 2
        _killed(process)


def test_what_was_found_is_kept(tmp_path):
    """The journal has it."""
    command = ("fuzz", "--time", "10m", *HOST, "--subject", "bundled:page-as-merged")
    journal = tmp_path / "findings" / "journal.jsonl"
    with _started(tmp_path, *command, "--op", "cp_gather_cache", "--keep-going") as process:
        _until(lambda: journal.exists() and bool(journal.read_bytes()), process)
        _killed(process)
    first = json.loads(journal.read_bytes().splitlines()[0])
    assert first["case"]["operation"] == "cp_gather_cache"
