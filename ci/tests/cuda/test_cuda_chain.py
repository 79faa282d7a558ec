"""The whole chain on a GPU. CUDA is touched in worker processes only."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ci.tests.planted import NAMES, case_of, checked_on_its_case, is_slow, planted, twin

from pagefuzz import check
from pagefuzz.harness import subjects
from pagefuzz.harness.check import Checker
from pagefuzz.oracles.verdict import Outcome

pytestmark = pytest.mark.cuda

SCRIPT = Path(__file__).parents[2] / "chaos.py"
TRITON = {o for (o, _), subject in subjects.bundled().items() if subject.source.suffix == ".py"}


@pytest.mark.parametrize("build", ["checked", "release"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if is_slow(name) else []) for name in NAMES],
)
def test_a_planted_fault_is_named_by_its_judgement(name: str, build: str) -> None:
    """As on the host, the first failure describes the cause."""
    verdict = checked_on_its_case(name, "cuda", build)
    assert verdict.outcome is Outcome.FAILED
    if case_of(name).operation in TRITON:
        build = "release"  # there is no checked one
    one = planted(name)
    assert verdict.failures[0].judgement == one.get("cuda", one[build])


SOUND = [
    (operation, subject.name)
    for (operation, _), subject in subjects.bundled().items()
    if not subject.faults and any(case_of(name).operation == operation for name in NAMES)
]


@pytest.mark.parametrize("build", ["checked", "release"])
@pytest.mark.parametrize(("operation", "subject"), SOUND)
def test_correct_kernels_are_silent_on_the_same_cases(
    operation: str, subject: str, build: str
) -> None:
    """What shows a planted fault shows nothing on the kernels without it."""
    with Checker(operation, subject, "cuda", build) as checker:
        for name in (name for name in NAMES if case_of(name).operation == operation):
            verdict = checker.check(case_of(name))
            assert verdict.outcome is Outcome.CLEAN, (name, verdict.failures)
            assert verdict.launches >= 2  # and some for each relation; orders are the host's
        assert checker.deaths == 0
        assert checker.device != "host"


@pytest.mark.parametrize("build", ["checked", "release"])
def test_a_lost_context_is_a_death_by_name(build: str) -> None:
    """An illegal access ends the worker, by the name of the fault; the next case runs."""
    deadly = case_of("null-dereference")
    with Checker("cp_gather_cache", twin("null-dereference"), "cuda", build) as checker:
        for _ in range(2):
            verdict = checker.check(deadly)
            assert [failure.judgement for failure in verdict.failures] == ["death"]
            assert verdict.failures[0].key == ("illegal memory access",)
            assert checker.check(deadly.with_sizes(num_pages=4)).clean
        assert checker.deaths == 2


def test_sticky_errors_lose_no_case(tmp_path: Path) -> None:
    """Twenty lost contexts among harmless cases: each a death, none of these; and a worker is there
    again within 2 s."""
    path = tmp_path / "chaos.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, *("--device", "cuda", "--injections", "20", "--report", path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["became"] == {
        "harmless": {"clean": 20},
        "sticky CUDA error": {"failed: death": 20},
    }
    assert report["restarts"] >= 10
    assert report["restart_median_s"] <= 2.0


def test_a_case_beyond_the_limit_is_not_run() -> None:
    """Of device memory, by name; the same case passes where there is enough of it."""
    case = case_of("gap-store")
    for limit_bytes in (2**20, 2**30):
        with Checker(
            "cp_gather_cache", "bundled:page", "cuda", gpu_memory_bytes=limit_bytes
        ) as checker:
            verdict = checker.check(case)
            if limit_bytes == 2**20:
                assert verdict.outcome is Outcome.NOT_RUN
                assert "bytes of device memory, the limit of 1,048,576" in verdict.not_run
            else:
                assert verdict.clean
                assert 0 < checker.memory.arena_bytes <= limit_bytes
                assert checker.memory.address_bytes > 2**30
            assert checker.deaths == 0


@pytest.mark.parametrize("name", ["gap-store", "wrong-output", "missing-count"])
def test_fixed_bytes_are_those_of_the_host(name: str) -> None:
    """The page schedule leaves the same bytes on both backends; a twin does not."""
    case = case_of(name)
    digests = {}
    for device in ("host", "cuda"):
        with Checker("cp_gather_cache", "bundled:page", device) as checker:
            digests[device] = checker.check_fixed_bytes(case)[1]
    assert digests["host"] == digests["cuda"]
    assert digests["cuda"] is not None
    assert digests["cuda"].byte_count > 0


def test_pages_a_tebibyte_apart_are_gathered() -> None:
    """A source of 3 TiB is sparse memory."""
    far = case_of("gap-store").with_sizes(page_stride_bytes=2**40)
    assert check(far, "bundled:page", "cuda").clean


def test_every_layer_in_force_examines_something() -> None:
    """As on the host, but for the orders of threads, which nobody chooses here."""
    case = replace(case_of("missing-barrier"), relations=("repeat",))
    verdict = check(case, "bundled:page", device="cuda")
    assert verdict.clean, verdict.failures
    assert verdict.launches == 2 + 3
    launches = {name: one[0] for name, one in verdict.layers.items()}
    for name in ("red zones", "guard pages", "read-only sources"):
        assert launches[name] == 5, name
        assert verdict.layers[name][1] > 0, name
    assert launches["repeats"] == 3
    for name in ("reference, bit-exact", "whole-buffer byte diff", "two fills"):
        assert launches[name] == 2, name
    assert launches["checked build"] == launches["checked index type"] == 2
    assert "orders of threads" not in launches
