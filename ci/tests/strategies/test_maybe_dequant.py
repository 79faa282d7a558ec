"""Cases of gather_and_maybe_dequant_cache: classes, corners, refusals, what they shrink to."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from ci.tests.strategies.conftest import Drawn, drawn_from
from hypothesis import find

from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.operations.gather_and_maybe_dequant_cache import required_bytes, surface
from pagefuzz.strategies.refusals import lies_by_reason
from pagefuzz.strategies.registry import cases_for, corners_for

OPERATION = "gather_and_maybe_dequant_cache"


@cache
def drawn(
    count: int, hostile: bool = True, refused: bool = True, limit: int = DEFAULT_LIMIT_BYTES
) -> list[Drawn]:
    """Generated cases; the first is the simplest."""
    strategy = cases_for(OPERATION, hostile=hostile, refused=refused, limit_bytes=limit)
    return drawn_from(strategy, count, 0, OPERATION)


@pytest.mark.slow
def test_every_corner_is_reached() -> None:
    """2,500 cases are enough for all but the rarest shared corners, which (a)'s tests reach."""
    corners = corners_for(OPERATION)
    counted = Counter(dict.fromkeys(corners, 0))
    for one in drawn(2500):
        counted.update(name for name, holds in corners.items() if holds(one.plan, one.expectation))
    missed = sorted(name for name, count in counted.items() if count == 0)
    shared = [name for name in missed if name in corners_for("cp_gather_cache")]
    assert missed == shared
    assert len(shared) <= 3
    assert max(counted.values()) < 2500


def test_classes_are_those_asked_for() -> None:
    """In contract alone, and the shares of all three."""
    assert {one.expectation.case_class for one in drawn(200, False, False)} == {
        CaseClass.IN_CONTRACT
    }
    shares = Counter(one.expectation.case_class for one in drawn(1000))
    assert shares[CaseClass.IN_CONTRACT] > 500
    assert shares[CaseClass.HOSTILE] > 150
    assert shares[CaseClass.REFUSED] > 100


def test_memory_stays_below_the_limit() -> None:
    """Whatever the types, with the least limit too."""
    for limit in (2**26, 2**31, DEFAULT_LIMIT_BYTES):
        for one in drawn(150, True, False, limit):
            total = sum(buffer.memory_bytes for buffer in one.plan.buffers.values())
            assert total <= limit


def test_lies_are_refused_for_their_reason() -> None:
    """Every lie about every kind of case gives the reason it is told for."""
    for one in drawn(12, True, False):
        if one.case.overrides:
            continue
        told = surface(one.case)
        for reason, lies in lies_by_reason(told).items():
            for lie in lies:
                plan = operation(OPERATION).plan(lie.told(one.case))
                found = {refusal.reason for refusal in operation(OPERATION).refusals(plan)}
                assert reason in found, lie


def test_required_bytes_are_the_oracles() -> None:
    """The two computations agree."""
    for one in drawn(150, True, False):
        needed = required_bytes(one.case)
        assert needed == {name: b.required_bytes for name, b in one.plan.buffers.items()}


def test_the_simplest_case_is_a_copy_of_one_element() -> None:
    """One row of one bf16, and with codes one code at scale 1."""
    anything = cases_for(OPERATION, hostile=True, refused=True)
    simplest = find(anything, lambda case: True).sizes
    assert simplest["kv_dtype"] == 0
    assert simplest["num_tokens"] == simplest["entry_elements"] == 1
    codes = find(anything, lambda case: case.sizes["kv_dtype"] == 1)
    assert codes.values["scale"].parameters["values"] == (0x3F800000,)
    assert codes.sizes["num_tokens"] == codes.sizes["entry_elements"] == 1
