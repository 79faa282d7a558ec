"""The script that times launches between guards: what it measures, what it says, how it ends."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ci import bench_guards
from ci.tests.harness.fake_driver import FakeDriver

from pagefuzz.harness import devices
from pagefuzz.harness.build import BuildSpec, build
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.native import BuiltObject
from pagefuzz.harness.subjects import subject


@pytest.fixture
def natives() -> dict[str, BuiltObject]:
    page = subject(bench_guards.SUBJECT, bench_guards.OPERATION)
    path = build(page.source, BuildSpec.parse("host", "release"))
    return {
        kind: BuiltObject(path, page.source, page.operation, page.symbol)
        for kind in bench_guards.KINDS
    }


def measured(driver: FakeDriver, natives: dict[str, BuiltObject]) -> Any:
    case = bench_guards.the_case(3, 7)
    return bench_guards.measure(driver, natives, driver.scan, case, 2, 4)  # type: ignore[arg-type]


@pytest.mark.slow
def test_both_kinds_are_launched_equally_often(natives: dict[str, BuiltObject]) -> None:
    """In every round; the report has medians, ratios and how many launches stand behind them."""
    driver = FakeDriver()
    rounds = measured(driver, natives)
    assert [len(one[kind].host_us) for one in rounds for kind in one] == [4] * 4
    report = bench_guards.report(rounds)
    assert report["launches_of_each"] == 8
    assert len(report["ratio_of_each_round"]) == report["rounds"] == 2
    medians = report["medians"]
    for unit in ("device_us", "host_us"):
        assert 0 < medians["plain"][unit] < 1e6
        want = medians["guarded"][unit] / medians["plain"][unit]
        assert report["ratio"][unit] == pytest.approx(want, rel=1e-3)
    assert not driver.reservations
    assert driver.free_bytes() == driver.memory_bytes


def test_launches_that_leave_different_rows_are_not_compared(
    natives: dict[str, BuiltObject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of a launch that does something else say nothing."""
    plain = natives[bench_guards.PLAIN]
    launch = plain.launch

    def spoiled() -> Any:
        done = launch()
        data = plain.marshalled()["dst"]
        assert isinstance(data, tuple)
        ctypes.memset(data[0], 1, 1)
        return done

    monkeypatch.setattr(plain, "launch", spoiled)
    with pytest.raises(CannotCheckError, match="left different rows"):
        measured(FakeDriver(), natives)


def test_without_a_gpu_nothing_is_measured() -> None:
    """Exit 2 and one sentence."""
    if devices.machine().gpu is not None:
        pytest.skip("this machine has a GPU")
    script = Path(bench_guards.__file__)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("could not measure: there is no GPU to check on")
