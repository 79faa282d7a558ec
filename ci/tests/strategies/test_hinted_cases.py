"""Cases of the hinted indexer gather: few rows, right and wrong hints, corners, shrinking."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from ci.tests.strategies.conftest import drawn_from
from hypothesis import find

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.indexer_gathers import REASONS, required_bytes, surface
from pagefuzz.strategies.refusals import lies_by_reason
from pagefuzz.strategies.registry import cases_for, corners_for

NAME = "cp_gather_indexer_k_quant_cache_hinted"
OPERATION = operation(NAME)
Drawn = tuple[Case, Plan, Expectation]


@cache
def drawn(count: int) -> list[Drawn]:
    found = drawn_from(cases_for(NAME, hostile=True, refused=True), count, 0, NAME)
    return [(one.case, one.plan, one.expectation) for one in found]


def unreached(count: int) -> list[str]:
    corners = corners_for(NAME)
    reached = Counter(dict.fromkeys(corners, 0))
    for _, plan, expectation in drawn(count):
        reached.update(name for name, holds in corners.items() if holds(plan, expectation))
    return [name for name, number in reached.items() if number == 0]


@pytest.mark.slow
def test_every_corner_is_reached() -> None:
    """4,000 cases are enough for all of them."""
    assert unreached(4000) == []


def test_corners_of_hints_are_reached() -> None:
    """400 cases: those that a hint is about, and every class."""
    missing = unreached(400)
    assert not [name for name in missing if "hint" in name or name.startswith("class")]


def test_launches_have_few_rows() -> None:
    """A row costs a millisecond or two to interpret, twice."""
    rows = sorted(plan.arguments["num_tokens"] for _, plan, e in drawn(400) if not e.refusals)
    assert rows[len(rows) // 2] <= 12
    assert rows[len(rows) * 9 // 10] <= 24
    assert rows[-1] <= 100


def test_overflow_scale_is_reached_with_few_rows() -> None:
    """By pages, strides of rows and of the table, and columns."""
    large = {
        name
        for _, plan, e in drawn(400)
        for name, buffer in plan.buffers.items()
        if e.case_class is CaseClass.IN_CONTRACT and buffer.required_bytes > 2**31
    }
    assert large >= {"src", "block_table"}
    assert large & {"dst_k", "dst_scale"}


def test_hints_in_contract_are_of_uncovered_rows() -> None:
    """Where a case is not to be hostile, no covered row is misled."""
    for case, plan, expectation in drawn(400):
        if expectation.case_class is CaseClass.HOSTILE:
            continue
        assert not any("token_to_seq" in sentence for sentence in expectation.hostile)
        if expectation.case_class is CaseClass.IN_CONTRACT and plan.arguments["num_requests"]:
            plain = OPERATION.expect_by_loop(plan)
            assert plain.case_class is CaseClass.IN_CONTRACT, case


def test_required_bytes_agree_with_the_oracle() -> None:
    """What the lies believe a buffer needs is what the plan laid out."""
    for case, plan, expectation in drawn(400):
        if expectation.case_class is not CaseClass.REFUSED:
            needed = {name: buffer.required_bytes for name, buffer in plan.buffers.items()}
            assert required_bytes(case) == needed


def test_every_lie_is_refused_for_its_reason() -> None:
    """Each lie about a sound case is seen through; hints are among what is lied about."""
    sound = [
        c for c, _, e in drawn(400) if e.case_class is CaseClass.IN_CONTRACT and not c.overrides
    ]
    told_of_hints = 0
    for case in sound[:5]:
        lies = lies_by_reason(surface(case))
        assert set(lies) == set(REASONS)
        for reason, told in lies.items():
            for lie in told:
                plan = OPERATION.plan(lie.told(case))
                assert reason in {found.reason for found in OPERATION.refusals(plan)}, lie
                told_of_hints += any(name.startswith("token_to_seq") for name in lie.overrides)
    assert told_of_hints > 20


def test_the_simplest_case_is_one_row_of_its_owner() -> None:
    """One request, one row, its hint right."""
    case = find(cases_for(NAME, hostile=True, refused=True), lambda case: True)
    assert case.to_json()["values"] == {
        "block_table": {"recipe": "identity"},
        "token_to_seq": {"recipe": "owners"},
        "starts": {"recipe": "literal", "values": [0, 1]},
    }
    assert case.sizes["num_tokens"] == case.sizes["num_requests"] == 1
    assert not case.placements
