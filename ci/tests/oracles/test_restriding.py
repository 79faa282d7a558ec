"""restriding: which strides are others, and that what lies at them is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ci.tests.oracles.test_judgements import other_byte

from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.cells import Cells
from pagefuzz.oracles.judging import judge
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.nests import Nest
from pagefuzz.oracles.observation import RelatedPlan
from pagefuzz.oracles.relation import relation_judgements
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.reported import related_for

Memory = Mapping[str, Any]
MakeBench = Callable[[Case], Any]

SEEDS = range(40)


def restrided(case: Case) -> RelatedPlan | None:
    operation = registry.operation(case.operation)
    plan = operation.plan(case)
    found = relation_judgements()["restriding"].related(operation, plan, operation.expect(plan))
    return found[0] if found else None


def changed(case: Case) -> dict[str, tuple[int, int]]:
    """Argument -> what it was and is; all arguments of a related plan but these are the same."""
    derived = restrided(case)
    assert derived is not None
    new = derived.plan.arguments
    return {name: (old, new[name]) for name, old in case.sizes.items() if new[name] != old}


def of_flash(*, interleaved: bool) -> Case:
    """Keys and values of two heads in two pages, in one buffer if they interleave."""
    sides = {
        "rows": 3,
        "row_stride_bytes": 32,
        "page_stride_bytes": 128 if interleaved else 64,
        "slot_stride_bytes": 32,
        "head_stride_bytes": 16,
    }
    sizes = {f"{side}_{name}": n for name, n in sides.items() for side in ("key", "value")} | {
        "num_tokens": 3,
        "num_heads": 2,
        "head_elements": 4,
        "scale_count": 1,
        "page_size_tokens": 2,
        "num_pages": 2,
        "input_dtype": int(Dtype.F32),
        "kv_dtype": 0,
    }
    places = {}
    if interleaved:
        places["key_cache"] = Placement(after_bytes=64)
        places["value_cache"] = Placement(over=("key_cache", 64))
    values = {"slot_mapping": Values.literal(3, -1, 0)}
    relations = ("restriding",)
    return Case("reshape_and_cache_flash", sizes, values, places, relations=relations)


# ---- strides -------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("wanted", [{"page"}, {"slot"}, {"head"}, {"page", "slot", "head"}])
def test_other_strides_nest(wanted: set[str], unit: int) -> None:
    """What is wanted is another multiple of the unit; the rest stays where there is room."""
    dimensions = (("page", 3), ("slot", 4), ("head", 2))
    nest = Nest("cache", dimensions, 10)
    for sizes in (
        {"page": 96, "slot": 24, "head": 12},
        {"page": 1000, "slot": 100, "head": 20},
        {"page": 0, "slot": 12, "head": 12},
        {"page": 12, "slot": 36, "head": 144},
    ):
        for nth in range(60):
            found = nest.others(sizes, wanted, unit, lambda _, count, nth=nth: nth % count)  # type: ignore[misc]
            assert Cells("cache", dimensions, 10, unit).nests(found), (sizes, found)
            assert not any(stride % unit for stride in found.values())
            assert all(found[name] != sizes[name] for name in wanted)
            if sizes["page"] == 1000:
                assert {name for name in found if found[name] != sizes[name]} == wanted


def test_one_stride_some_or_all(base_case: Case) -> None:
    """What a kernel keeps may know any part of the strides: all are changed, and each alone."""
    found = [frozenset(changed(replace(base_case, seed=seed))) for seed in range(200)]
    strides = {name for name in base_case.sizes if "stride" in name}
    assert {one for one in found if len(one) == 1} >= {
        frozenset({name}) for name in strides - {"slot_stride_bytes"}
    }
    assert frozenset(strides) in found
    assert set().union(*found) == strides
    assert any(1 < len(one) < len(strides) for one in found)


def test_nothing_has_a_stride_that_counts(base_case: Case) -> None:
    """Ignored strides are no arguments; with one that counts there is a related plan."""
    values = {"block_table": Values.literal(0), "starts": Values.literal(0)}
    one = replace(base_case, values=values, placements={}).with_sizes(
        num_requests=1,
        num_tokens=1,
        page_size_tokens=1,
        num_pages=1,
        has_terminal=0,
        dst_rows=1,
        table_width=1,
    )
    assert restrided(one) is None
    assert set(changed(one.with_sizes(dst_rows=2))) == {"dst_row_stride_bytes"}


@pytest.mark.parametrize("name", registry.operations())
def test_every_operation_has_a_reported_case(name: str) -> None:
    """So that a short campaign has something to compare."""
    (case,) = (one for one in related_for(name) if one.relations == ("restriding",))
    assert changed(case)


def test_pages_at_one_place_are_not_spread_to_any_size(base_case: Case) -> None:
    """A cache of 2^31-1 pages that are one: only other strides change."""
    far = base_case.with_sizes(page_stride_bytes=0, num_pages=2**31 - 1)
    for seed in SEEDS:
        derived = restrided(replace(far, seed=seed))
        assert derived is not None
        assert derived.plan.arguments["page_stride_bytes"] == 0
        assert derived.plan.buffers["src"].memory_bytes < 2**25


# ---- what lies at them ---------------------------------------------------------------------------


def test_entries_that_shared_bytes_lie_apart(base_case: Case) -> None:
    """Each keeps what it held, the shared bytes twice."""
    case = base_case.with_sizes(slot_stride_bytes=8, page_stride_bytes=32)
    operation = registry.operation(case.operation)
    wanted = operation.expect(operation.plan(case)).expected["dst"]
    apart = 0
    for seed in SEEDS:
        derived = restrided(replace(case, seed=seed))
        assert derived is not None
        image = derived.plan.buffers["src"].image
        if image.offsets.size:
            apart += 1
            assert (np.diff(image.offsets) >= 12).all()
            assert len(np.unique(image.values, axis=0)) == len(np.unique(wanted.offsets))
    assert apart


@pytest.mark.parametrize("seed", range(12))
def test_another_byte_of_a_moved_row(base_case: Case, bench: MakeBench, seed: int) -> None:
    """It is found wherever the row lies, and silence is for those that are the same."""
    case = replace(base_case, relations=("restriding",), seed=seed)
    made = bench(case)
    assert judge(made.run()).clean
    derived = restrided(case)
    assert derived is not None
    stride = derived.plan.arguments["dst_row_stride_bytes"]

    def change(after: Memory) -> None:
        after["dst"].put(stride * 9 + 7, other_byte(after["dst"].get(stride * 9 + 7)[0]))

    (failure,) = judge(made.run(related_change=change)).failures
    assert failure.identity == "restriding:dst"
    assert "request 2, row 9 -> token 5 -> page" in failure.details["means"]
    assert ("at row 9, byte 7" in failure.details["access"]) is (stride != 16)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("interleaved", [False, True])
def test_another_byte_of_a_moved_value(bench: MakeBench, seed: int, interleaved: bool) -> None:
    """Caches in one buffer stay in one, and apart."""
    case = replace(of_flash(interleaved=interleaved), seed=seed)
    made = bench(case)
    assert judge(made.run()).clean
    derived = restrided(case)
    assert derived is not None
    root, begin = derived.plan.base("value_cache")
    if interleaved:
        assert begin == 64 * derived.plan.arguments["key_page_stride_bytes"] // 128

    def change(after: Memory) -> None:
        after[root].put(begin, other_byte(after[root].get(begin)[0]))

    (failure,) = judge(made.run(related_change=change)).failures
    assert failure.identity == "restriding:value_cache"
    assert "value_cache page 0 slot 0, byte 0 (offset 0): 0x" in failure.details["access"]


@pytest.mark.parametrize("name", ["copy_blocks", "swap_blocks"])
@pytest.mark.parametrize("seed", range(6))
def test_another_byte_of_a_moved_page(bench: MakeBench, name: str, seed: int) -> None:
    """In place, along a chain, too."""
    counted = {"num_pairs": 2, "page_bytes": 24, "element_bytes": 4}
    sizes = {
        "copy_blocks": {"num_layers": 2, "num_pages": 4}
        | {"layer_stride_bytes": 128, "page_stride_bytes": 32},
        "swap_blocks": {"src_num_pages": 4, "dst_num_pages": 4}
        | {"src_page_stride_bytes": 24, "dst_page_stride_bytes": 32},
    }[name]
    values = {"pairs": Values.literal(2, 1, 1, 3)}
    case = Case(name, counted | sizes, values, relations=("restriding",), seed=seed)
    made = bench(case)
    assert judge(made.run()).clean
    derived = restrided(case)
    assert derived is not None
    cache = "cache" if name == "copy_blocks" else "dst_cache"
    stride = derived.plan.arguments[
        "page_stride_bytes" if name == "copy_blocks" else "dst_page_stride_bytes"
    ]

    def change(after: Memory) -> None:
        after[cache].put(3 * stride, other_byte(after[cache].get(3 * stride)[0]))

    (failure,) = judge(made.run(related_change=change)).failures
    assert failure.identity == f"restriding:{cache}"
    assert "3" in failure.details["access"]


@pytest.mark.parametrize("name", registry.operations())
def test_the_related_launch_is_a_case_of_its_own(name: str) -> None:
    """In contract, with its strides, and without a relation."""
    operation = registry.operation(name)
    judgement = relation_judgements()["restriding"]
    told = 0
    for case in related_for(name):
        plan = operation.plan(case)
        expectation = operation.expect(plan)
        alone = judgement.as_case(operation, plan, expectation)
        derived = restrided(case)
        assert (alone is None) is (derived is None)
        if alone is None or derived is None:
            continue
        told += 1
        own = operation.plan(alone)
        assert alone.relations == ()
        assert own.arguments == derived.plan.arguments
        assert operation.expect(own).case_class is CaseClass.IN_CONTRACT
    assert told


def test_an_interleaved_cache_is_one_as_a_case_too() -> None:
    """Keys and values stay in one buffer, as far apart as in the related launch."""
    case = of_flash(interleaved=True)
    operation = registry.operation(case.operation)
    plan = operation.plan(case)
    alone = relation_judgements()["restriding"].as_case(operation, plan, operation.expect(plan))
    derived = restrided(case)
    assert alone is not None
    assert derived is not None
    assert any(place.over for place in alone.placements.values())
    own = operation.plan(alone)
    for buffer, wanted in derived.plan.buffers.items():
        assert own.buffers[buffer].placement.over == wanted.placement.over
    assert operation.expect(own).case_class is CaseClass.IN_CONTRACT
