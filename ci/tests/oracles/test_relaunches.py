"""Repeats and orders: the same plan launched again must do the same, and nothing else is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ci.tests.oracles.test_judgements import other_byte

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.expectation import Counts
from pagefuzz.oracles.judging import judge
from pagefuzz.oracles.observation import LaunchOrder, OrderKind, Status
from pagefuzz.oracles.relation import relation_judgements
from pagefuzz.oracles.verdict import CaseClass

Memory = Mapping[str, Any]
MakeBench = Callable[[Case], Any]

#: Judgement -> launches of it in a case.
RELAUNCHES = {"order": 5, "repeat": 3}


@pytest.fixture
def hostile_case(base_case: Case) -> Case:
    """With a padding page, and one that does not exist, among those that requests 0 and 2 map."""
    table = Values.literal(-1, 1, 2, 2, 0, 0, 0, 0, 3, 9, 4, 5)
    return replace(base_case, values={**base_case.values, "block_table": table})


def nth(which: int, change: Callable[[Memory], None]) -> Callable[[Memory], None]:
    """Changes what one of the related launches leaves, counted from 1."""
    made = iter(range(1, 99))

    def once(after: Memory) -> None:
        if next(made) == which:
            change(after)

    return once


def flipped(after: Memory) -> None:
    after["dst"].put(16 * 9 + 7, other_byte(after["dst"].get(16 * 9 + 7)[0]))


def test_orders_of_a_case(base_case: Case, bench: MakeBench) -> None:
    """Reversed, warp-interleaved and three different shuffles, each into fresh memory."""
    run = bench(replace(base_case, relations=("order",))).run()
    derived = [one.derived for one in run.observation.related]
    kinds = [one.order.kind for one in derived]
    assert kinds == [OrderKind.REVERSE, OrderKind.WARP_INTERLEAVED, *[OrderKind.SHUFFLED] * 3]
    assert len({one.order for one in derived}) == len({one.change for one in derived}) == 5
    assert {one.in_a_row for one in derived} == {1}
    assert all(one.plan is run.plan for one in derived)


def test_repeats_of_a_case(base_case: Case, bench: MakeBench) -> None:
    """Once more into fresh memory, then twice into the output of the one before."""
    run = bench(replace(base_case, relations=("repeat",))).run()
    derived = [one.derived for one in run.observation.related]
    assert [one.in_a_row for one in derived] == [1, 2, 3]
    assert {one.order for one in derived} == {LaunchOrder()}


@pytest.mark.parametrize(("relation", "count"), RELAUNCHES.items())
def test_any_launch_that_differs_is_named(
    base_case: Case, bench: MakeBench, relation: str, count: int
) -> None:
    """Whichever of them it is: told is what was different about it."""
    made = bench(replace(base_case, relations=(relation,)))
    for which in range(1, count + 1):
        run = made.run(related_change=nth(which, flipped))
        (failure,) = judge(run).failures
        assert failure.identity == f"{relation}:dst"
        assert run.observation.related[which - 1].derived.change in failure.details["means"]


@pytest.mark.parametrize("relation", RELAUNCHES)
def test_hostile_cases_are_launched_again(
    hostile_case: Case, bench: MakeBench, relation: str
) -> None:
    """Rows that must stay untouched stay so each time, and pages are counted each time."""
    made = bench(replace(hostile_case, relations=(relation,)))
    assert made.expectation.case_class is CaseClass.HOSTILE
    assert made.expectation.counts == Counts(1, 1)
    verdict = judge(made.run())
    assert verdict.clean, verdict.failures
    assert verdict.checked[relation] > 0

    def stray(after: Memory) -> None:
        after["dst"].put(16, other_byte(after["dst"].get(16)[0]))

    (failure,) = judge(made.run(related_change=nth(2, stray))).failures
    assert failure.identity == f"{relation}:dst"


@pytest.mark.parametrize("relation", RELAUNCHES)
@pytest.mark.parametrize(("index", "name"), [(0, "padding"), (1, "skipped")])
def test_each_launch_counts_the_same(
    hostile_case: Case, bench: MakeBench, relation: str, index: int, name: str
) -> None:
    """One that does not add what the first did is told, beside how often it was launched."""

    def miscount(after: Memory) -> None:
        pair = np.frombuffer(after["counts"].get(0, 16), dtype=np.int64).copy()
        pair[index] -= 1
        after["counts"].put(0, pair.tobytes())

    made = bench(replace(hostile_case, relations=(relation,)))
    found = judge(made.run(related_change=nth(2, miscount))).failures
    failure = next(one for one in found if one.key[0] == "counts" and len(one.key) == 2)
    assert failure.identity == f"{relation}:counts:{name}"
    times = 2 if relation == "repeat" else 1
    assert f"rose by 1 in one launch, and by {times - 1} in {times} " in failure.details["access"]


@pytest.mark.parametrize("relation", RELAUNCHES)
def test_contested_bytes_may_be_another_claimants(
    base_case: Case, bench: MakeBench, relation: str
) -> None:
    """Which request a row is of where starts decrease is free, and so is what is counted."""
    values = {**base_case.values, "starts": Values.literal(1, 7, 5, 18)}
    made = bench(replace(base_case, values=values, relations=(relation,)))
    at = int(made.expectation.expected["dst"].contested.offsets[0])

    def change(after: Memory) -> None:
        after["dst"].restore(at, 12)
        after["counts"].put(0, b"\x77")

    verdict = judge(made.run(related_change=change))
    assert verdict.clean, verdict.failures
    assert verdict.checked[relation] > 0


def test_a_barrier_fault_in_another_order_is_one_of_the_launch(
    base_case: Case, bench: MakeBench
) -> None:
    """Both say so, and in which order; without it both are silent."""
    made = bench(replace(base_case, relations=("order",)))
    assert judge(made.run()).clean
    found = judge(made.run(related_status=Status.BARRIER_FAULT)).failures
    assert [one.identity for one in found] == ["launch:BARRIER_FAULT", "order:BARRIER_FAULT"]
    assert all("in reverse order" in one.details["means"] for one in found)


@pytest.fixture
def copy_case() -> Case:
    """Four pages in two layers: a chain 0 -> 1 -> 3, a page to itself, and counters."""
    sizes = {
        "num_pairs": 3,
        "num_layers": 2,
        "num_pages": 4,
        "layer_stride_bytes": 80,
        "page_stride_bytes": 20,
        "page_bytes": 16,
        "element_bytes": 4,
    }
    values = {"pairs": Values.literal(0, 1, 1, 3, 2, 2), "counts": Values.literal(5, 7)}
    return Case("copy_blocks", sizes, values, seed=5)


def test_every_operation_is_launched_again() -> None:
    """In another order, and as it is."""
    from pagefuzz.oracles.registry import operations

    assert all(set(RELAUNCHES) <= one.relations for one in operations().values())
    assert set(RELAUNCHES) <= set(relation_judgements())


def test_a_copy_within_a_cache_is_repeated_once(copy_case: Case, bench: MakeBench) -> None:
    """Into fresh memory: a launch into the output of the one before would copy other pages."""
    run = bench(replace(copy_case, relations=("repeat",))).run()
    assert [one.derived.in_a_row for one in run.observation.related] == [1]
    verdict = judge(run)
    assert verdict.clean, verdict.failures
    assert verdict.checked["repeat"] >= 4 * 16


def test_a_repeat_of_a_copy_within_a_cache_that_differs(copy_case: Case, bench: MakeBench) -> None:
    """A page that came too late, or a count that did not come, is told."""

    def late(after: Memory) -> None:
        after["cache"].restore(20 * 3, 16)

    def uncounted(after: Memory) -> None:
        after["counts"].put(0, b"\x99")

    made = bench(replace(copy_case, relations=("repeat",)))
    (failure,) = judge(made.run(related_change=late)).failures
    assert failure.identity == "repeat:cache"
    assert failure.details["means"].startswith("the same launch again")
    found = judge(made.run(related_change=uncounted)).failures
    assert "repeat:counts:padding" in {one.identity for one in found}


def test_a_copy_to_another_cache_is_repeated_in_a_row(bench: MakeBench) -> None:
    """It reads nothing that it writes."""
    sizes = {
        "num_pairs": 1,
        "src_num_pages": 2,
        "dst_num_pages": 2,
        "src_page_stride_bytes": 16,
        "dst_page_stride_bytes": 16,
        "page_bytes": 16,
        "element_bytes": 4,
    }
    case = Case("swap_blocks", sizes, {"pairs": Values.literal(0, 1)}, relations=("repeat",))
    run = bench(case).run()
    assert [one.derived.in_a_row for one in run.observation.related] == [1, 2, 3]
    assert judge(run).clean
