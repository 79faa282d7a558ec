"""Cases of copy_blocks and swap_blocks, and the kernels on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ci.tests.strategies.test_writing_operations import FEW, plain, strategy
from ci.tests.writers.conftest import drawn

from pagefuzz import check
from pagefuzz.harness.check import Checker
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.layout import Dtype, Plan
from pagefuzz.oracles.page_copies import PageCopyOperation
from pagefuzz.oracles.registry import operation, operations
from pagefuzz.oracles.verdict import CaseClass, Outcome
from pagefuzz.strategies.refusals import lies_by_reason
from pagefuzz.strategies.registry import corners_for
from pagefuzz.strategies.reported import examples_for

COPIES = [name for name, one in operations().items() if isinstance(one, PageCopyOperation)]
LAUNCHED = 150
PAYLOAD = ("src_cache", "dst_cache", "cache", "scratch")


def test_there_are_two() -> None:
    """Both operations are found by being there."""
    assert COPIES == ["copy_blocks", "swap_blocks"]


@pytest.mark.parametrize("name", COPIES)
def test_the_simplest_case_is_one_page(name: str) -> None:
    """Page 0 goes to page 1, one byte, in contract."""
    case, plan, expectation = drawn(name, LAUNCHED)[0]
    assert expectation.case_class is CaseClass.IN_CONTRACT
    assert case.values["pairs"].to_json() == {"recipe": "literal", "values": [0, 1]}
    assert case.sizes["page_bytes"] == 1
    assert max(buffer.memory_bytes for buffer in plan.buffers.values()) == 16


def small(name: str) -> Case:
    """A reported case of few pairs."""
    return min(examples_for(name).values(), key=lambda case: case.sizes["num_pairs"])


@pytest.mark.parametrize("name", COPIES)
def test_pairs_lie_on_both_sides_of_the_grid(name: str) -> None:
    """Report 30: 65,535 pairs fit on its y axis; as 65,536 pages are copied, they do not. Both are
    right here."""
    with Checker(name, "bundled:page") as checker:
        for pairs, copied in ((65_535, 2), (65_536, 65_536)):
            case = examples_for(name)[f"30-{pairs}-pairs"]
            assert case.sizes["num_pairs"] == pairs
            verdict = checker.check(case)
            assert verdict.outcome is Outcome.CLEAN, (verdict.failures, verdict.not_run)
            assert verdict.checked["output"] == 2 * copied


@pytest.mark.parametrize("name", COPIES)
def test_large_pages_are_copied_alone(name: str) -> None:
    """Pages of more than 256 KiB are drawn; one or two of them, so that a launch stays short."""
    large = [
        case
        for case, plan, expectation in drawn(name, FEW)
        if corners_for(name)["page: above 256 KiB"](plan, expectation)
    ]
    assert large
    for case in large:
        assert case.sizes["num_pairs"] - case.values["pairs"].parameters["values"].count(-1) < 10
        assert case.sizes["page_bytes"] * case.sizes.get("num_layers", 1) <= 2**19


@pytest.mark.parametrize("name", COPIES)
def test_the_kernel_refuses_every_lie_and_nothing_else(name: str) -> None:
    """Each lie about a reported case and two drawn ones is turned down; the cases are not."""
    sound = [case for case, _, _ in drawn(name, 200, hostile=False, refused=False) if plain(case)]
    several = [case for case in sound if case.sizes["num_pairs"] in range(2, 20)]
    with Checker(name, "bundled:page") as checker:
        for case in [small(name), *several[:2]]:
            verdict = checker.check(case)
            assert verdict.outcome is Outcome.CLEAN, (case.dumps(), verdict.failures)
            for lies in lies_by_reason(strategy(name).surface(case)).values():
                for lie in lies:
                    verdict = checker.check(lie.told(case))
                    assert verdict.outcome is Outcome.CLEAN, (lie, verdict.failures)
                    assert verdict.checked["refusal"] > 0


@pytest.mark.parametrize("build", ["checked", "release"])
@pytest.mark.parametrize("name", COPIES)
def test_the_kernel_is_silent(name: str, build: str) -> None:
    """No judgement fires on drawn cases of every class."""
    with Checker(name, "bundled:page", "host", build) as checker:
        for case, _, _ in drawn(name, LAUNCHED):
            verdict = checker.check(case)
            assert verdict.outcome is Outcome.CLEAN, (case.dumps(), verdict.failures)
        assert checker.deaths == 0


def far(name: str) -> Case:
    """A reported case with strides that put pages at 2^40 bytes; copy_blocks in two layers."""
    case = small(name)
    if name == "swap_blocks":
        return case.with_sizes(src_page_stride_bytes=2**39 - 2, dst_page_stride_bytes=2**39 + 2)
    return case.with_sizes(num_layers=2, layer_stride_bytes=2**40 - 8, page_stride_bytes=2**32)


@pytest.mark.parametrize("name", COPIES)
def test_pages_at_2_to_the_40_are_copied(name: str) -> None:
    """Sparse memory of more than a tebibyte."""
    plan = operation(name).plan(far(name))
    assert max(buffer.memory_bytes for buffer in plan.buffers.values()) > 2**40
    with Checker(name, "bundled:page") as checker:
        verdict = checker.check(far(name))
        assert verdict.outcome is Outcome.CLEAN, (verdict.failures, verdict.not_run)
        assert verdict.checked["output"] == 2 * 16 * (4 if name == "copy_blocks" else 2)


@pytest.mark.parametrize("name", COPIES)
def test_each_cache_may_have_any_dtype_of_the_elements_size(name: str) -> None:
    """Pages are moved as bytes: only the size is examined, by the oracle and by the kernel."""
    case = small(name)
    case = replace(case, sizes={**case.sizes, "element_bytes": 2})
    two, four = [Dtype.U16, Dtype.F16, Dtype.BF16], Dtype.F32
    payload = [one.name for one in operation(name).buffers if one.name in PAYLOAD]
    mixed = {f"{one}.dtype": int(dtype) for one, dtype in zip(payload, two, strict=False)}
    wrong = {**mixed, f"{payload[-1]}.dtype": int(four)}
    with Checker(name, "bundled:page") as checker:
        for told, expected in ((mixed, CaseClass.IN_CONTRACT), (wrong, CaseClass.REFUSED)):
            verdict = checker.check(replace(case, overrides=told))
            assert verdict.clean, verdict.failures
            assert verdict.case_class is expected


THIRD_LAUNCH_MOVES_NOTHING = """operation = "copy_blocks"
schedule = "page"
breaks = "the third launch of a process moves no page"

[[replace]]
find = "const int status = make_moves(a, order, message);"
with = "static int n = 0; const int status = ++n == 3 ? PF_OK : make_moves(a, order, message);"
"""


def test_a_copy_within_a_cache_is_repeated(tmp_path: Path) -> None:
    """Once, into fresh memory: what changes from launch to launch is seen, and nothing else."""
    twin = tmp_path / "third.toml"
    twin.write_text(THIRD_LAUNCH_MOVES_NOTHING)
    case = small("copy_blocks")
    repeated = replace(case, relations=("repeat",))
    verdict = check(repeated, "bundled:page", build="release")
    assert verdict.clean, verdict.failures
    assert verdict.launches == 3
    assert verdict.checked["repeat"] > 0
    verdict = check(repeated, f"twin:{twin}", build="release")
    assert [failure.identity for failure in verdict.failures] == ["repeat:cache"]
    with Checker("copy_blocks", f"twin:{twin}", build="release") as checker:
        assert checker.check(case).clean  # two launches; `check` makes them again


def moved(plan: Plan, buffer: str, at: int) -> str:
    return operation(plan.case.operation).mapping(plan, buffer, at) or ""


@pytest.mark.parametrize("name", COPIES)
def test_texts_and_json(name: str) -> None:
    """Every case can be described, survives JSON, and has a place for each of its bytes."""
    asked = operation(name)
    for case, plan, expectation in drawn(name, LAUNCHED):
        assert Case.from_json(json.loads(case.dumps())) == case
        assert f"P={plan.arguments['num_pairs']}" in asked.describe(plan)
        for buffer in plan.buffers:
            footprint = expectation.footprint(buffer)
            for at in [-1, 0, *footprint.writable.begin[:2].tolist()]:
                assert asked.locate(plan, buffer, at)
            for at in footprint.must_write.begin[:2].tolist():
                assert "writes it" in moved(plan, buffer, at)
