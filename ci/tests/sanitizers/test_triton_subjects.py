"""Triton kernels under a sanitizer: what an interpreter runs is never taken for watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pagefuzz.harness import subjects
from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.check import Checker
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.harness.running import Assignment
from pagefuzz.harness.sanitizers import opinion as opinions
from pagefuzz.harness.sanitizers import watched
from pagefuzz.harness.sanitizers.cases import cases_of
from pagefuzz.harness.sanitizers.reports import parse
from pagefuzz.harness.sanitizers.watched import Job, Launched
from pagefuzz.harness.sanitizers.watching import Watched, Watcher
from pagefuzz.oracles.observation import Status
from pagefuzz.oracles.registry import operation
from pagefuzz.strategies.registry import shapes_for

OPERATION = "cp_gather_indexer_k_quant_cache_hinted"
UNIT = Unit(OPERATION, "bundled:triton", hostile=True)
SOURCE = subjects.KERNELS / "triton" / f"{OPERATION}.py"
ON_A_GPU = Assignment(
    OPERATION, "", "", str(SOURCE), "cuda", "cuda,triton", promises_containment=True
)

REPORT = f"""\
[pagefuzz begin 4]
========= Invalid __global__ read of size 4 bytes
=========     at minimum+0x1d0 in standard.py:71
=========     by thread (0,0,0) in block (3,0,0)
=========     Address 0x7f3c7ec00110 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3c7ec00100 of size 16 bytes
=========         Device Frame: _gather_row+0x90 in {SOURCE}:58
=========
[pagefuzz end 4]
========= ERROR SUMMARY: 1 error
"""

#: What a process under a tool does before it launches, in an environment that asks for the
#: interpreter. Prints whether triton was there too early, and how many keys the compiler has.
STARTED = f"""
import json, os, sys
from pathlib import Path
import pagefuzz.harness.sanitizers.watched
import pagefuzz.harness.triton.launched
early = "triton" in sys.modules or "torch" in sys.modules
from pagefuzz.harness.triton import keys, private
from pagefuzz.harness.triton.loading import load_launcher
from pagefuzz.oracles.registry import operation
from pagefuzz.strategies.registry import shapes_for
launcher = load_launcher(Path(sys.argv[1]), "pf_{OPERATION}_triton", interpreted=False)
private.use_offline_target(90)
found = keys.compilations(launcher, operation({OPERATION!r}), shapes_for({OPERATION!r}))
print(json.dumps([early, os.environ.get("TRITON_INTERPRET"), len(found)]))
"""


def test_an_interpreted_launch_is_not_watched(fake_sanitizer):
    """A tool would be silent about it, whatever it does."""
    fake_sanitizer("no case holds this")
    cases = shapes_for(OPERATION)[:2]
    with pytest.raises(CannotCheckError, match="launched by Triton's interpreter: there is no ker"):
        opinions.opinion("memcheck", UNIT, cases, backend="host", build="release")


def test_without_a_tool_it_is_not_compared_either():
    """The process that is only timed refuses it too."""
    with Checker(OPERATION, "bundled:triton", "host", "release") as checker:
        watcher = Watcher("", checker.assignment)
        with pytest.raises(CannotCheckError, match="launched by Triton's interpreter"):
            watcher.watch({0: shapes_for(OPERATION)[0]})


def test_an_object_for_the_host_is_not_launched_for_a_gpu(monkeypatch, tmp_path):
    """Whatever an assignment says of it."""
    driver = SimpleNamespace(
        use_device=lambda: None, properties=lambda: SimpleNamespace(name="a GPU")
    )
    monkeypatch.setattr(watched, "Driver", lambda: driver)
    loaded = SimpleNamespace(flags=frozenset({"triton"}))
    monkeypatch.setattr(watched, "loaded", lambda _: (loaded, None))
    job = Job("memcheck", str(tmp_path / "results"), cases={0: shapes_for(OPERATION)[0].to_json()})
    with pytest.raises(CannotCheckError, match="was not built for a GPU"):
        watched._launch_all(job, ON_A_GPU)
    assert not (tmp_path / "results").exists()


def test_an_environment_that_asks_for_the_interpreter_is_not_heard(tmp_path):
    """Nothing imports Triton too early, and kernels are those that a compiler compiles."""
    done = subprocess.run(
        [sys.executable, "-c", STARTED, str(SOURCE)],
        env={**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    early, asked, keys = json.loads(done.stdout)
    assert (early, asked) == (False, None)
    assert keys > 80


def test_a_report_names_the_line_of_the_kernel():
    """Not that of a function of Triton's that was inlined there."""
    (report,) = parse(REPORT).reports
    assert report.where == f"kernels/triton/{SOURCE.name}:58"
    assert (report.kind, report.case) == ("Invalid __global__ read of size 4 bytes", 4)
    elsewhere = REPORT.replace(str(SOURCE), "/somewhere/else.py")
    assert parse(elsewhere).reports[0].where == "standard.py:71"


class Compiling:
    """A launch object that compiles for its first launch."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def marshal(self, *_: Any) -> None: ...

    def compilations(self) -> tuple[int, ...]:
        return tuple(self.keys)

    def launch(self) -> tuple[Status, str]:
        self.keys = [1]
        return Status.OK, ""


def test_a_launch_says_that_it_compiled():
    """What Triton's hook told while it was made."""
    case, memory, subject = shapes_for(OPERATION)[0], HostArena(), Compiling()
    try:
        launched = [
            watched._launch(n, case, operation(OPERATION), subject, memory, "a GPU")  # type: ignore[arg-type]
            for n in range(2)
        ]
    finally:
        memory.close()
    assert [one.compiled for one in launched] == [True, False]
    assert [Launched.loads(one.dumps()) for one in launched] == launched


def watched_by(monkeypatch: pytest.MonkeyPatch, **by_tool: list[Launched]) -> list[list[int]]:
    """Watchers find these; the numbers of the cases that each was given."""
    given: list[list[int]] = []

    def watch(watcher: Watcher, cases: dict[int, Any]) -> Watched:
        given.append(list(cases))
        found = by_tool[watcher.tool or "nobody"]
        return Watched({one.case: one for one in found if one.case in cases})

    monkeypatch.setattr(Watcher, "watch", watch)
    return given


def test_the_time_of_a_compiler_is_not_compared(monkeypatch):
    """Nor that of a launch which loads what the other process has compiled."""
    cases = list(shapes_for(OPERATION)[:4])
    ok = [Launched(n, "a GPU", 0, seconds=0.4) for n in range(4)]
    slow = [replace(ok[0], seconds=90.0, compiled=True), *ok[1:]]
    quick = [replace(one, seconds=one.seconds / 8) for one in slow]
    given = watched_by(monkeypatch, memcheck=slow, nobody=quick)
    found = opinions.opinion("memcheck", UNIT, cases, backend="host", build="release")
    assert found.slowdown == pytest.approx(8)
    assert given == [[0, 1, 2, 3], [0, 1, 2, 3]]
    every = [replace(one, compiled=True) for one in ok]
    given = watched_by(monkeypatch, memcheck=every, nobody=every)
    assert opinions.opinion(
        "memcheck", UNIT, cases, backend="host", build="release"
    ).slowdown is None  # fmt: skip
    assert len(given) == 1


def test_a_failed_launch_is_not_watched_and_says_why(monkeypatch):
    """As where Triton cannot compile: alone it is no opinion."""
    failed = Launched(0, "a GPU", int(Status.LAUNCH_FAILED), "RuntimeError: no ptxas")
    watched_by(monkeypatch, memcheck=[failed], nobody=[])
    cases = list(shapes_for(OPERATION)[:1])
    with pytest.raises(CannotCheckError, match=r"watched nothing: the launch failed: .* no ptxas"):
        opinions.opinion("memcheck", UNIT, cases, backend="host", build="release")


def test_there_are_cases_for_it():
    """Of the seed, reported ones first."""
    drawn = cases_of(UNIT, 20, 3)
    assert drawn == cases_of(UNIT, 20, 3)
    assert len(drawn) > 20
