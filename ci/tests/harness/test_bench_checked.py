"""The script that times checked builds: what it measures, what it says, how it ends."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ci import bench_checked, timing
from ci.tests.harness.fake_driver import FakeDriver

from pagefuzz.harness.build import BuildSpec, build
from pagefuzz.harness.memory.cuda import CudaArena
from pagefuzz.harness.native import BuiltObject
from pagefuzz.harness.subjects import subject
from pagefuzz.oracles import registry
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import Status
from pagefuzz.oracles.verdict import CaseClass

UNIT = ["--op", "cp_gather_cache", "--subject", "bundled:page"]
FEW = ["--launches", "4", "--rounds", "2", "--cases", "20"]
SCRIPT = Path(bench_checked.__file__)


@pytest.fixture(autouse=True)
def _no_permissions_are_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An object may stay loaded for whoever opens it next in this process: none keeps permissions
    that lay in memory of an arena which is gone."""
    begin, begun = BuiltObject.begin_check, {}

    def noted(native: BuiltObject, plan: Plan, *others: Any) -> None:
        begun[id(native)] = (native, plan)
        begin(native, plan, *others)

    monkeypatch.setattr(BuiltObject, "begin_check", noted)
    yield
    for native, plan in begun.values():
        begin(native, plan, Expectation(CaseClass.IN_CONTRACT), lambda _: 0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the script in this process; its exit code."""

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ci/bench_checked", *arguments])
        return bench_checked.main()

    return call


def require_figures(report: dict[str, Any]) -> None:
    """Both cases of every unit have positive medians, and ratios that are theirs."""
    for unit in report["units"]:
        typical, large = unit["cases"]["typical"], unit["cases"]["large"]
        assert 0 < typical["written_bytes"] <= large["written_bytes"]
        for case in (typical, large):
            assert case["recorded"]["accesses"] > 0
            assert case["recorded"]["operations"] > 0
            for figure in ("launch_us", "with_record_us"):
                release, checked = (case["medians"][kind][figure] for kind in bench_checked.BUILDS)
                assert release > 0
                assert checked > 0
                assert case["ratio"][figure] == pytest.approx(checked / release, abs=1e-3)
            assert len(case["ratio_of_each_round"]) == report["rounds"]
            for kind in bench_checked.BUILDS:
                medians = case["medians"][kind]
                assert medians["launch_us"] <= medians["with_record_us"]


def test_two_units_on_the_host(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table and a report; the Triton unit is left out, and that is said."""
    operations = [
        *("--op", "cp_gather_cache", "--op", "copy_blocks", "--subject", "bundled:page"),
        *("--device", "host", "--report", str(tmp_path / "new" / "report.json")),
    ]
    assert run(*operations, *FEW) == 0
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert report["pagefuzz_bench_checked"] == bench_checked.SCHEMA
    assert report["device"] == "host"
    assert report["cpu"]
    assert report["compiler"]
    assert (report["launches_of_each"], report["rounds"]) == (4, 2)
    names = [(unit["operation"], unit["subject"]) for unit in report["units"]]
    assert names == [("cp_gather_cache", "bundled:page"), ("copy_blocks", "bundled:page")]
    require_figures(report)
    for size in ("typical", "large"):
        spread = report["ratios"][size]["launch_us"]
        ratios = [unit["cases"][size]["ratio"]["launch_us"] for unit in report["units"]]
        assert (spread["least"], spread["most"]) == (min(ratios), max(ratios))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("  typical") for line in lines) == 2
    assert sum(line.startswith("  large") for line in lines) == 2


def test_triton_is_not_timed(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside others it is left out, and that is said; alone there is nothing to measure."""
    hinted = "cp_gather_indexer_k_quant_cache_hinted"
    whole = bench_checked.selected_subjects([hinted, "copy_blocks"], None)
    chosen, others = bench_checked.timeable(whole)
    assert [one.operation for one in chosen] == ["copy_blocks"]
    assert others == [f"{hinted}/bundled:triton"]
    assert run("--device", "host", "--op", hinted) == 2
    assert capsys.readouterr().err.startswith(
        f"could not measure: {hinted}/bundled:triton: Triton compiles"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "nope"], "unknown operation 'nope'"),
        (["--op", "copy_blocks", "--subject", "bundled:nope"], "unknown subject 'bundled:nope'"),
    ],
)
def test_unknown_names(
    run: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """Exit 2 and one sentence."""
    assert run("--device", "host", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"could not measure: {said}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--launches", "0"], "--launches 0 must be at least 1"),
        (["--launches", "3", "--rounds", "4"], "--rounds 4 must be at least 1 and at most"),
    ],
)
def test_no_launches(
    run: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """A median of nothing is not asked for."""
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_without_a_compiler(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 and one sentence."""
    monkeypatch.setenv("PAGEFUZZ_CXX", "no-such-compiler")
    assert run("--device", "host", *UNIT, *FEW) == 2
    assert "PAGEFUZZ_CXX names 'no-such-compiler'" in capsys.readouterr().err


@pytest.mark.parametrize("status", [Status.REFUSED, Status.LAUNCH_FAILED])
@pytest.mark.parametrize("good", [0, 4])
def test_a_launch_that_fails(
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: Status,
    good: int,
) -> None:
    """Exit 2 that names the unit and what the launcher said, whether the first one fails or one
    that is timed."""
    launch, count = BuiltObject.launch, iter(range(1000))

    def failing(native: BuiltObject) -> tuple[Status, str]:
        return launch(native) if next(count) < good else (status, "grid.x is 0")

    monkeypatch.setattr(BuiltObject, "launch", failing)
    assert run("--device", "host", *UNIT, *FEW) == 2
    said = "could not measure: cp_gather_cache/bundled:page: a launch failed: grid.x is 0\n"
    assert capsys.readouterr().err == said


def test_builds_that_disagree(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times of a launch that does something else say nothing: exit 2."""
    launch = BuiltObject.launch

    def spoiled(native: BuiltObject) -> tuple[Status, str]:
        done = launch(native)
        if native.keeps_record:
            destination = native.marshalled()["dst"]
            assert isinstance(destination, tuple)
            first = ctypes.c_uint8.from_address(destination[0])
            first.value ^= 0xFF
        return done

    monkeypatch.setattr(BuiltObject, "launch", spoiled)
    assert run("--device", "host", *UNIT, *FEW) == 2
    assert "release and of the checked build left other bytes" in capsys.readouterr().err


def test_a_checked_build_that_checks_nothing(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two release objects would be equally fast: exit 2."""
    parse = BuildSpec.parse
    monkeypatch.setattr(BuildSpec, "parse", lambda target, text: parse(target, "release"))
    assert run("--device", "host", *UNIT, *FEW) == 2
    assert "the checked build recorded no access" in capsys.readouterr().err


def test_a_launch_that_crashes(tmp_path: Path) -> None:
    """It ends the process that measures: the script says so, with exit 2."""
    python = tmp_path / "python"
    python.write_text(
        f"""#!/usr/bin/env bash
if [[ $1 == ci/bench_checked.py ]]; then kill -SEGV $$; fi
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    done = subprocess.run(
        [SCRIPT.with_suffix("")],
        env={**os.environ, "PAGEFUZZ_PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "could not measure: signal 11 ended the process that launches" in done.stderr


def test_events_of_a_driver() -> None:
    """What runs on a GPU, over a driver that maps memory of this process."""
    page = subject("bundled:page", "cp_gather_cache")
    natives = {
        kind: BuiltObject(
            build(page.source, BuildSpec.parse("host", kind)),
            page.source,
            page.operation,
            page.symbol,
        )
        for kind in bench_checked.BUILDS
    }
    driver: Any = FakeDriver()
    arena, clock = CudaArena(driver, driver.scan), timing.DeviceClock(driver)
    case = bench_checked.sized_cases(page, 20, 1)["typical"]
    rounds = [bench_checked.measure(arena, clock, natives, case, 3) for _ in range(2)]
    assert [len(one.times[kind].host_us) for one in rounds for kind in one.times] == [3] * 4
    figures = bench_checked.figures_of(rounds)
    assert figures["compared_bytes"] >= figures["written_bytes"] > 0
    for medians in figures["medians"].values():
        assert 0 < medians["launch_us"] <= medians["with_record_us"]
    arena.close()
    assert not driver.reservations


def test_sizes_are_those_of_the_seed() -> None:
    """The same cases for the same seed, in contract, and the large one is the largest."""
    page = subject("bundled:page", "copy_blocks")
    sized = bench_checked.sized_cases(page, 30, 7)
    assert sized == bench_checked.sized_cases(page, 30, 7)
    operation = registry.operation("copy_blocks")
    for case in sized.values():
        assert str(operation.expect(operation.plan(case)).case_class) == "in contract"
    typical, large = (bench_checked.written_bytes(case) for case in sized.values())
    assert 0 < typical <= large


@pytest.mark.cuda
def test_a_unit_on_a_gpu(tmp_path: Path) -> None:
    """The script in a process of its own, because CUDA never starts in this one."""
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--device",
        "cuda",
        *UNIT,
        *FEW,
        "--report",
        str(report),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines()[1:])) <= 80
    found = json.loads(report.read_text())
    assert found["backend"] == "cuda"
    assert found["device"] != "host"
    assert found["driver"]
    require_figures(found)
