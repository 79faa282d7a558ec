"""Drawn cases in which one buffer lies between red zones: one launch watches both its ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ci.tests.strategies.conftest import drawn_from

from pagefuzz.harness.check import Checker
from pagefuzz.harness.running import Injection
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.registry import cases_for

OPERATION = "cp_gather_cache"
BUFFER = "dst"
COUNT = 3


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Drawn ones that write, with the destination between red zones."""
    found = drawn_from(cases_for(OPERATION, hostile=False, refused=False), 600, 4, OPERATION)
    chosen = [
        one.case
        for one in found
        if one.case.placement(BUFFER).guard == "none"
        and one.expectation.case_class is CaseClass.IN_CONTRACT
        and one.expectation.footprint(BUFFER).must_write
    ][:COUNT]
    assert len(chosen) == COUNT
    return chosen


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    with Checker(OPERATION, "bundled:token", "host", "inject") as found:
        yield found


def test_a_sound_kernel_is_clean(cases: list[Case], checker: Checker) -> None:
    """Nothing is found, and red zones have been looked at."""
    for case in cases:
        verdict = checker.check(case)
        assert verdict.clean, verdict
        assert "untouched" in verdict.checked


@pytest.mark.parametrize("side", ["before", "past"])
def test_a_stray_byte_beside_the_buffer_is_seen(
    cases: list[Case], checker: Checker, side: str
) -> None:
    """The byte in front of the buffer, and the one behind it: no guard, no checked build."""
    for case in cases:
        buffer = registry.operation(OPERATION).plan(case).buffers[BUFFER]
        offset = -1 if side == "before" else buffer.memory_bytes
        verdict = checker.check(case, injection=Injection(BUFFER, offset, 1, "write"))
        assert {failure.judgement for failure in verdict.failures} == {"untouched"}
