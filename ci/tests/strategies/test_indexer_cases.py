"""Cases of cp_gather_indexer_k_quant_cache: corners, limits, shrinking, reports."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from ci.tests.strategies.conftest import drawn_from
from hypothesis import find
from hypothesis.errors import InvalidArgument

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.facts import Facts
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.indexer_gathers import REASONS, required_bytes, surface
from pagefuzz.strategies.refusals import lies_by_reason
from pagefuzz.strategies.registry import cases_for, corners_for
from pagefuzz.strategies.reported import examples_for

NAME = "cp_gather_indexer_k_quant_cache"
OPERATION = operation(NAME)
Drawn = tuple[Case, Plan, Expectation]


@cache
def drawn(
    count: int,
    hostile: bool = True,
    refused: bool = True,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    seed_value: int = 0,
) -> list[Drawn]:
    strategy = cases_for(NAME, hostile=hostile, refused=refused, limit_bytes=limit_bytes)
    found = drawn_from(strategy, count, seed_value, NAME)
    return [(one.case, one.plan, one.expectation) for one in found]


def memory_bytes(case: Case, plan: Plan) -> int:
    """Bytes of all buffers with their workspaces."""
    return sum(
        buffer.memory_bytes + case.placement(name).before_bytes
        for name, buffer in plan.buffers.items()
    )


def reached(found: list[Drawn]) -> Counter[str]:
    """Corner -> how many cases were in it."""
    corners = corners_for(NAME)
    counted = Counter(dict.fromkeys(corners, 0))
    for _, plan, expectation in found:
        counted.update(name for name, holds in corners.items() if holds(plan, expectation))
    return counted


@pytest.mark.slow
def test_every_corner_is_reached() -> None:
    """3,000 cases are enough for all of them, and none holds of every case."""
    counted = reached(drawn(3000))
    assert sorted(name for name, count in counted.items() if count == 0) == []
    assert max(counted.values()) < 3000


@pytest.mark.slow
@pytest.mark.parametrize("seed_value", [1, 2, 3])
def test_every_corner_has_its_odds(seed_value: int) -> None:
    """Whatever the seed."""
    counted = reached(drawn(9000, seed_value=seed_value))
    assert [name for name, count in counted.items() if count < 2] == []


def test_classes_have_their_shares() -> None:
    """About three in five in contract, one in four hostile, the others refused."""
    found = Counter(expectation.case_class for _, _, expectation in drawn(3000))
    assert 0.54 < found[CaseClass.IN_CONTRACT] / 3000 < 0.72
    assert 0.17 < found[CaseClass.HOSTILE] / 3000 < 0.30
    assert 0.10 < found[CaseClass.REFUSED] / 3000 < 0.20


@pytest.mark.parametrize(("hostile", "refused"), [(False, False), (False, True), (True, False)])
def test_classes_can_be_left_out(hostile: bool, refused: bool) -> None:
    """No case of a class that was not asked for."""
    found = {expectation.case_class for _, _, expectation in drawn(300, hostile, refused)}
    wanted = {CaseClass.IN_CONTRACT}
    wanted |= {CaseClass.HOSTILE} if hostile else set()
    wanted |= {CaseClass.REFUSED} if refused else set()
    assert found == wanted


@pytest.mark.parametrize("limit_bytes", [2**26, 2**31 + 2**28, 2**33 + 2**30])
def test_memory_stays_within_the_limit(limit_bytes: int) -> None:
    """All buffers of a case together, workspaces included, and it is used."""
    largest = max(memory_bytes(case, plan) for case, plan, _ in drawn(400, limit_bytes=limit_bytes))
    assert largest <= limit_bytes
    if limit_bytes > 2**31:
        assert largest >= 2**31


def test_few_bytes_are_touched() -> None:
    """Up to 256 KiB of rows, almost always."""
    touched = [
        sum(expectation.footprint(name).writable.total_bytes for name in ("dst_k", "dst_scale"))
        for _, _, expectation in drawn(3000)
    ]
    assert sum(size <= 2**18 for size in touched) / len(touched) > 0.99
    assert max(memory_bytes(case, plan) for case, plan, _ in drawn(3000)) < DEFAULT_LIMIT_BYTES


def test_the_simplest_case_is_one_row() -> None:
    """One request, one row, one flat page of one slot of 16 keys and a scale."""
    case = find(cases_for(NAME, hostile=True, refused=True), lambda case: True)
    assert case.to_json()["values"] == {
        "block_table": {"recipe": "identity"},
        "starts": {"recipe": "literal", "values": [0, 1]},
    }
    assert case.sizes == {
        "num_requests": 1,
        "num_tokens": 1,
        "page_size_tokens": 1,
        "num_pages": 1,
        "table_width": 1,
        "table_row_stride": 1,
        "page_stride_bytes": 20,
        "dst_k_rows": 1,
        "dst_k_row_stride_bytes": 16,
        "dst_scale_rows": 1,
        "dst_scale_row_stride_bytes": 4,
        "head_dim": 16,
        "quant_block": 16,
        "page_layout": 0,
        "has_terminal": 1,
    }
    assert not case.placements


def test_required_bytes_agree_with_the_oracle() -> None:
    """What the lies believe a buffer needs is what the plan laid out."""
    for case, plan, _ in drawn(300, False, False):
        needed = {name: buffer.required_bytes for name, buffer in plan.buffers.items()}
        assert required_bytes(case) == needed


def test_every_lie_is_refused_for_its_reason() -> None:
    """Each lie about a sound case is seen through; there are some for every reason."""
    sound = [case for case, _, _ in drawn(300, False, False) if not case.overrides]
    for case in sound[:15]:
        lies = lies_by_reason(surface(case))
        assert set(lies) == set(REASONS)
        for reason, told in lies.items():
            for lie in told:
                plan = OPERATION.plan(lie.told(case))
                assert reason in {found.reason for found in OPERATION.refusals(plan)}, lie


def test_a_limit_below_64_mib_is_refused() -> None:
    """The message holds the argument's name and value, and what would do."""
    with pytest.raises(InvalidArgument, match=r"limit_bytes=1000 .* 67108864"):
        cases_for(NAME, hostile=False, refused=False, limit_bytes=1000)


# ---- reports -------------------------------------------------------------------------------------

REPORTS = examples_for(NAME)


def test_every_report_for_this_operation_is_there() -> None:
    """Reports 8, 9, 10, 14, 19, 28, 29 and 35, all in contract; and what nobody reported."""
    reports = {"8", "9", "10", "14", "19", "28", "29", "35"}
    assert {name.split("-")[0] for name in REPORTS} == {*reports, "many", "production"}
    for name, case in REPORTS.items():
        plan = OPERATION.plan(case)
        hostile = name.startswith("production-")
        expected = CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT
        assert OPERATION.expect(plan).case_class is expected


@pytest.mark.parametrize(
    ("name", "limit", "page"),
    [
        ("8-packed-pool", 2**31, 2066),
        ("9-packed-pool", 2**31, 2143),
        ("10-scale-offset", 2**33, 8192),
    ],
)
def test_pools_lie_on_both_sides(name: str, limit: int, page: int) -> None:
    """The good page begins below the boundary, the bad one does not."""
    for side, expected in (("good", page - 1), ("bad", page)):
        plan = OPERATION.plan(REPORTS[f"{name}-{side}"])
        facts = Facts(plan, OPERATION.expect(plan))
        assert facts.page_id.tolist() == [expected]
        offset = expected * facts.sizes["page_stride_bytes"]
        assert (offset >= limit) == (side == "bad")
