"""Cases of the fp8 up-convert: what they reach, and whether the oracle agrees with them."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from ci.tests.strategies.conftest import Drawn, drawn_from
from hypothesis import find
from hypothesis.errors import InvalidArgument

from pagefuzz.oracles.expectation import Counts
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.operations.cp_gather_and_upconvert_fp8_kv_cache import (
    cases,
    required_bytes,
    surface,
)
from pagefuzz.strategies.refusals import lies_by_reason
from pagefuzz.strategies.registry import cases_for, corners_for
from pagefuzz.strategies.reported import examples_for
from pagefuzz.strategies.scales import bits

NAME = "cp_gather_and_upconvert_fp8_kv_cache"


@cache
def drawn(count: int, seed_value: int = 0) -> list[Drawn]:
    return drawn_from(cases(), count, seed_value, NAME)


def reached(found: list[Drawn]) -> Counter[str]:
    corners = corners_for(NAME)
    counted = Counter(dict.fromkeys(corners, 0))
    for one in found:
        counted.update(name for name, holds in corners.items() if holds(one.plan, one.expectation))
    return counted


def test_the_simplest_case_is_one_record() -> None:
    """One request of one row in a pool of one record, any scales."""
    case = find(cases_for(NAME, hostile=True, refused=True), lambda case: True)
    assert case.sizes == {
        "num_requests": 1,
        "num_tokens": 1,
        "page_size_tokens": 1,
        "num_pages": 1,
        "table_width": 1,
        "table_row_stride": 1,
        "page_stride_bytes": 656,
        "slot_stride_bytes": 656,
        "dst_rows": 1,
        "dst_row_stride_bytes": 1152,
        "has_terminal": 1,
    }
    assert set(case.values) == {"block_table", "starts"}


def test_scales_shrink_to_one() -> None:
    """What needs given scales ends with the scale 1."""
    case = find(cases(), lambda case: "src" in case.values)
    assert case.values["src"].parameters["values"] == (bits(1.0),)


@pytest.mark.slow
def test_every_corner_is_reached() -> None:
    """2,500 cases are enough for all of them; none holds of all, the simplest is in contract."""
    counted = reached(drawn(2500))
    assert sorted(name for name, count in counted.items() if count == 0) == []
    assert max(counted.values()) < 2500
    assert reached(drawn(2500)[:1])["class: in contract"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed_value", [1, 2])
def test_every_corner_has_its_odds(seed_value: int) -> None:
    """Each is reached about once in 1,500 cases or more often."""
    counted = reached(drawn(9000, seed_value))
    assert [name for name, count in counted.items() if count < 3] == []


def test_classes_and_scale_have_their_shares() -> None:
    """About three in five in contract, a quarter of them at overflow scale."""
    found = drawn(1000)
    classes = Counter(one.expectation.case_class for one in found)
    assert 0.54 < classes[CaseClass.IN_CONTRACT] / 1000 < 0.72
    assert 0.17 < classes[CaseClass.HOSTILE] / 1000 < 0.30
    sound = [one for one in found if one.expectation.case_class is CaseClass.IN_CONTRACT]
    memory = [sum(b.memory_bytes for b in one.plan.buffers.values()) for one in sound]
    assert 0.15 < sum(size >= 2**31 - 2**20 for size in memory) / len(sound) < 0.35
    assert max(memory) < DEFAULT_LIMIT_BYTES


def test_required_bytes_agree_with_the_oracle() -> None:
    """What the lies believe a buffer needs is what the plan laid out."""
    for one in drawn(1000)[:600]:
        if one.expectation.case_class is not CaseClass.REFUSED:
            needed = {name: buffer.required_bytes for name, buffer in one.plan.buffers.items()}
            assert required_bytes(one.case) == needed


def test_every_lie_is_refused_for_its_reason() -> None:
    """Each lie that can be told about a sound case is seen through, for the reason it names."""
    asked = operation(NAME)
    sound = [
        one.case
        for one in drawn(1000)
        if one.expectation.case_class is CaseClass.IN_CONTRACT and not one.case.overrides
    ]
    for case in sound[:20]:
        for reason, lies in lies_by_reason(surface(case)).items():
            for lie in lies:
                found = {refusal.reason for refusal in asked.refusals(asked.plan(lie.told(case)))}
                assert reason in found, lie


def test_reported_cases_have_the_class_that_they_say() -> None:
    """Reports 2 and 22 are hostile, report 5 is in contract, and empty requests are."""
    asked = operation(NAME)
    found = {name: asked.expect(asked.plan(case)) for name, case in examples_for(NAME).items()}
    assert found["2-past-the-table"].case_class is CaseClass.HOSTILE
    assert found["2-past-the-table"].counts is not None
    assert found["2-past-the-table"].counts.skipped == 1
    assert found["22-rejected-row"].counts == Counts(padding=1, skipped=0)
    hostile = {n for n, one in found.items() if one.case_class is CaseClass.HOSTILE}
    assert hostile == {"2-past-the-table", "22-rejected-row", "production-records-64"}
    others = {one.case_class for n, one in found.items() if n not in hostile}
    assert others == {CaseClass.IN_CONTRACT}


def test_a_limit_below_64_mib_is_refused() -> None:
    """The message holds the argument's name and value, and what would do."""
    with pytest.raises(InvalidArgument, match=r"limit_bytes=1000 .* 67108864"):
        cases(limit_bytes=1000)
