"""From a case to a verdict on the host: each planted fault is named by the right judgement."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from ci.tests.planted import NAMES, case_of, checked_on_its_case, is_slow, planted, twin

from pagefuzz import check
from pagefuzz.harness import subjects
from pagefuzz.harness.check import Checker
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.oracles.case import CaseError, Placement
from pagefuzz.oracles.verdict import Outcome

# Compiling a checked build takes seconds: the fast tests make one where it must say something else
# than the release build does, and neither of what is slow.
BUILDS = [
    pytest.param(name, build, marks=[pytest.mark.slow] if slow else [])
    for name in NAMES
    for build in ("checked", "release")
    for same in [planted(name)["checked"] == planted(name)["release"]]
    for slow in [is_slow(name) or (same and build == "checked")]
]


@pytest.mark.parametrize(("name", "build"), BUILDS)
def test_a_planted_fault_is_named_by_its_judgement(name: str, build: str) -> None:
    """The first failure is the judgement that describes the cause."""
    verdict = checked_on_its_case(name, "host", build)
    assert verdict.outcome is Outcome.FAILED
    assert verdict.failures[0].judgement == planted(name)[build]
    if build == "release":
        also = set(planted(name).get("also", ()))
        assert also <= {failure.judgement for failure in verdict.failures}


SOUND = [
    (operation, subject.name)
    for (operation, _), subject in subjects.bundled().items()
    if not subject.faults and any(planted(name)["case"]["operation"] == operation for name in NAMES)
]


@pytest.mark.parametrize("build", ["checked", pytest.param("release", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("operation", "subject"), SOUND)
def test_correct_kernels_are_silent_on_the_same_cases(
    operation: str, subject: str, build: str
) -> None:
    """What shows a planted fault shows nothing on the kernels without it."""
    with Checker(operation, subject, "host", build) as checker:
        for name in (name for name in NAMES if case_of(name).operation == operation):
            verdict = checker.check(case_of(name))
            assert verdict.outcome is Outcome.CLEAN, (name, verdict.failures)
            again = {"order": 5, "repeat": 3}
            assert verdict.launches == 2 + sum(again.get(n, 1) for n in case_of(name).relations)
        assert checker.deaths == 0


def test_every_judgement_has_a_planted_fault() -> None:
    """The planted faults cover the registry, so that no judgement is never seen to fire."""
    from pagefuzz.oracles.registry import judgements

    named = {planted(name)[build] for name in NAMES for build in ("checked", "release")}
    named |= {also for name in NAMES for also in planted(name).get("also", ())}
    assert named == set(judgements())


def test_a_fault_shows_on_its_own_case_only() -> None:
    """A twin is silent on a case that does not reach its fault."""
    four_pages = case_of("null-dereference").with_sizes(num_pages=4)
    verdict = check(four_pages, twin("null-dereference"), build="release")
    assert verdict.outcome is Outcome.CLEAN, verdict.failures


def test_the_next_case_runs_after_a_death() -> None:
    """One checker, a case that kills the worker, and one that is judged as if nothing was."""
    deadly = case_of("null-dereference")
    with Checker(None, twin("null-dereference"), build="release") as checker:
        for _ in range(3):
            verdict = checker.check(deadly)
            assert [failure.judgement for failure in verdict.failures] == ["death"]
            assert verdict.failures[0].key == ("SIGSEGV",)
            assert checker.check(deadly.with_sizes(num_pages=4)).clean
        assert checker.deaths == 3


def test_address_sanitizer_is_a_second_opinion() -> None:
    """In an ASan build a store behind the buffer ends the worker with the sanitizer's report."""
    # The last row's gap lies behind the destination, unless its extent is said to be larger.
    case = case_of("gap-store")
    inside = replace(case, placements={"dst": Placement(slack_bytes=64)})
    with Checker(None, twin("gap-store"), "host", "asan") as checker:
        (failure,) = checker.check(case).failures
        assert failure.judgement == "death"
        assert failure.key == ("AddressSanitizer use-after-poison",)
        assert re.search(
            r": writes 1 byte in gather_pages\S*, kernels/operations/cp_gather_cache\.cu:\d+$",
            failure.details["access"],
        )
        assert {f.judgement for f in checker.check(inside).failures} == {"untouched"}
        assert checker.deaths == 1


def test_a_coverage_build_writes_its_counters_when_its_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orderly end of the worker leaves gcov's data beside the object."""
    monkeypatch.setenv("PAGEFUZZ_CACHE", str(tmp_path))
    assert check(case_of("gap-store"), "bundled:page", "host", "coverage").clean
    assert list(tmp_path.rglob("*.gcda"))


def test_both_backends_can_compare_the_fixed_bytes() -> None:
    """The digest covers exactly the bytes that the contract fixes, and depends on them."""
    case = case_of("wrong-output")
    digests = []
    for subject in ("bundled:page", "bundled:token", twin("wrong-output")):
        with Checker("cp_gather_cache", subject, build="release") as checker:
            _, fixed = checker.check_fixed_bytes(case)
        assert fixed is not None
        assert fixed.statuses == (0, 0)
        assert fixed.byte_count == 2 * 4 * 64
        digests.append(fixed.digest)
    assert digests[0] == digests[1] != digests[2]


def test_counters_are_among_the_fixed_bytes() -> None:
    """Where the contract fixes the counts, a lost count changes the digest."""
    case = case_of("missing-count")
    right = Checker("cp_gather_cache", "bundled:page", build="release")
    wrong = Checker(None, twin("missing-count"), build="release")
    with right, wrong:
        _, good = right.check_fixed_bytes(case)
        _, bad = wrong.check_fixed_bytes(case)
    assert good is not None
    assert bad is not None
    assert good.byte_count == bad.byte_count == 2 * (3 * 64 + 16)
    assert good.digest != bad.digest


def test_what_cannot_be_checked_raises_at_once() -> None:
    """Unknown names and impossible builds are one sentence each, before anything runs."""
    case = case_of("wrong-output")
    with pytest.raises(CannotCheckError, match="unknown subject 'bundled:nothing'"):
        check(case, "bundled:nothing")
    with pytest.raises(CannotCheckError, match="unknown device 'tpu'"):
        check(case, device="tpu")
    with pytest.raises(CannotCheckError, match="unknown build flag 'fast'"):
        check(case, build="fast")
    with pytest.raises(CannotCheckError, match=r"is one of .*cp_gather_cache.*, not of nothing"):
        check(replace(case, operation="nothing"))
    with pytest.raises(CaseError, match="unknown 'width'"):
        check(case.with_sizes(width=1))


def test_address_sanitizer_needs_isolation() -> None:
    """Its library must be the first of its process: one sentence, before anything is built."""
    with pytest.raises(CannotCheckError, match="needs a process of its own"):
        Checker("cp_gather_cache", "bundled:page", build="asan", isolate=False)


def test_the_journal_of_a_checker_is_gone_after_it(tmp_path: Path) -> None:
    """The running case lies in the journal that was asked for, and only while it may be needed."""
    path = tmp_path / "journal.jsonl"
    with Checker("cp_gather_cache", "bundled:page", journal=path) as checker:
        checker.check(case_of("wrong-output"))
        assert case_of("wrong-output").to_json() == json.loads(path.read_text())["case"]
    assert not path.exists()


def test_registered_subjects_all_load() -> None:
    """Every bundled subject is built, loaded and bound."""
    for (operation, schedule), subject in subjects.bundled().items():
        with Checker(operation, subject.name) as checker:
            checker.start()
            assert checker.device == "host", schedule
