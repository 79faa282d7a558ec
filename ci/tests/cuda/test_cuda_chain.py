"""The whole chain on a GPU. CUDA is touched in worker processes only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagefuzz import check
from pagefuzz.harness import subjects
from pagefuzz.harness.check import Checker
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import Outcome

pytestmark = pytest.mark.cuda

TWINS = Path(__file__).parent.parent / "twins"
NAMES = sorted(path.stem for path in TWINS.glob("*.toml"))
#: In a release build the int32 wrap writes 2 GiB below the destination: what is mapped there
#: decides whether the launch faults or lands silently, and it must be found either way.
EITHER_WAY = {("int32-row-offset", "release"): {"death", "untouched", "output"}}
TRITON = {o for (o, _), subject in subjects.bundled().items() if subject.source.suffix == ".py"}


def planted(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((TWINS / f"{name}.json").read_text())
    return loaded


def case_of(name: str) -> Case:
    return Case.from_json(planted(name)["case"])


def twin(name: str) -> str:
    return f"twin:{TWINS / name}.toml"


@pytest.mark.parametrize("build", ["checked", "release"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if planted(name).get("slow") else [])
        for name in NAMES
    ],
)
def test_a_planted_fault_is_named_by_its_judgement(name: str, build: str) -> None:
    """As on the host, the first failure describes the cause."""
    verdict = check(case_of(name), twin(name), "cuda", build)
    assert verdict.outcome is Outcome.FAILED
    named = verdict.failures[0].judgement
    if case_of(name).operation in TRITON:
        build = "release"  # there is no checked one
    assert named in EITHER_WAY.get((name, build), {planted(name)[build]})


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
            assert verdict.launches == 2 + len(case_of(name).relations)
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
