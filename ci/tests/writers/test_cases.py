"""Cases of the writers, and the kernels on them."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from ci.tests.strategies.test_writing_operations import FEW, plain, strategy
from ci.tests.writers.conftest import drawn
from hypothesis import Phase, given, seed, settings

from pagefuzz.harness.check import Checker
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.registry import operation, operations
from pagefuzz.oracles.verdict import CaseClass, Outcome
from pagefuzz.oracles.writes import WriteOperation
from pagefuzz.strategies.refusals import lies_by_reason
from pagefuzz.strategies.registry import corners_for, reported_for
from pagefuzz.strategies.reported import examples_for
from pagefuzz.strategies.slots import SlotMapping, slot_mappings

WRITERS = [name for name, one in operations().items() if isinstance(one, WriteOperation)]
LAUNCHED = 250

#: Of every writer, of those with two inputs, and of one alone: corner -> how often at least.
REACHED = {
    "page: more than 2^18 bytes": 5,
    "production: in contract": 3,
}
OF_TWO_INPUTS = {
    "inputs: the first is longer": 20,
    "inputs: the second is longer": 20,
    "inputs: only the first is padded": 8,
    "inputs: only the second is padded": 8,
    "inputs: padded, and not alike": 3,
}
OF_ONE = {
    "indexer_k_quant_and_cache": {"production: in contract": 8},
    "reshape_and_cache_flash": {"heads: more than 32": 10, "heads: more than 256 elements": 5},
    "concat_and_cache_ds_mla": {"record: 512 codes, more than 512 in a page": 2},
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_never_drawn_is_reached(name: str) -> None:
    """Inputs that differ, large pages, wide heads and shapes of production."""
    wanted = {**REACHED, **OF_ONE.get(name, {})}
    if "inputs: the second is longer" in corners_for(name):
        wanted |= OF_TWO_INPUTS
    counted = Counter(
        corner
        for _, plan, expectation in drawn(name, FEW)
        for corner in wanted
        if corners_for(name)[corner](plan, expectation)
    )
    assert {corner: counted[corner] for corner in wanted if counted[corner] < wanted[corner]} == {}


def test_a_thousand_tokens_are_reached() -> None:
    """Few mappings, each of which an operation may cut."""
    found: list[int] = []

    @seed(0)
    @settings(max_examples=300, database=None, phases=[Phase.generate])
    @given(slot_mappings(hostile=False))
    def collect(mapping: SlotMapping) -> None:
        found.append(mapping.num_tokens)

    collect()
    assert 0 < sum(tokens > 1000 for tokens in found) < 30


@pytest.mark.parametrize("name", WRITERS)
def test_reported_tokens_lie_on_both_sides_of_the_grid(name: str) -> None:
    """Report 30: 65,535 fit, 65,536 do not; the last one is stored. Its inputs stay small."""
    for tokens in (65_535, 65_536):
        case = examples_for(name)[f"30-{tokens}-tokens"]
        assert case.sizes["num_tokens"] == tokens
        assert case.values["slot_mapping"].edits[tokens - 1] >= 0
        buffers = operation(name).plan(case).buffers.values()
        assert sum(buffer.memory_bytes for buffer in buffers) < 2**21


@pytest.mark.parametrize("name", WRITERS)
def test_the_simplest_case_is_one_token(name: str) -> None:
    """One token in slot 0 of one page of one slot, in contract."""
    case, _, expectation = drawn(name, LAUNCHED)[0]
    assert expectation.case_class is CaseClass.IN_CONTRACT
    sizes = case.sizes
    assert [sizes[n] for n in ("num_tokens", "num_pages", "page_size_tokens")] == [1, 1, 1]
    assert case.values["slot_mapping"].to_json() == {"recipe": "literal", "values": [0]}


@pytest.mark.parametrize("name", WRITERS)
def test_the_kernel_refuses_every_lie_and_nothing_else(name: str) -> None:
    """Each lie about a few sound cases is turned down; the case itself is not."""
    sound = [
        case
        for case, _, _ in drawn(name, 200, hostile=False, refused=False)
        if plain(case) and case.sizes["num_tokens"] in range(1, 20)
    ]
    kind = "kv_dtype" if "kv_dtype" in sound[0].sizes else "scale_kind"
    chosen = [case for case in sound if case.sizes[kind] == 0][:2]
    chosen += [case for case in sound if case.sizes[kind] != 0][:2]
    with Checker(name, "bundled:token") as checker:
        for case in chosen:
            verdict = checker.check(case)
            assert verdict.outcome is Outcome.CLEAN, (case.dumps(), verdict.failures)
            for lies in lies_by_reason(strategy(name).surface(case)).values():
                for lie in lies:
                    verdict = checker.check(lie.told(case))
                    assert verdict.outcome is Outcome.CLEAN, (lie, verdict.failures)
                    assert verdict.checked["refusal"] > 0


@pytest.mark.parametrize("name", WRITERS)
def test_reported_cases_are_right_here(name: str) -> None:
    """What others got wrong; each case says which report it restates."""
    for label in reported_for(name):
        assert label.split("-")[0].isdigit(), label
    with Checker(name, "bundled:token") as checker:
        for label, reported in examples_for(name).items():
            verdict = checker.check(reported)
            assert verdict.case_class is CaseClass.IN_CONTRACT
            assert verdict.outcome is Outcome.CLEAN, (label, verdict.failures)


@pytest.mark.parametrize("build", [pytest.param("checked", marks=pytest.mark.slow), "release"])
@pytest.mark.parametrize("name", WRITERS)
def test_the_kernel_is_silent(name: str, build: str) -> None:
    """No judgement fires on drawn cases of every class."""
    with Checker(name, "bundled:token", "host", build) as checker:
        for case, _, _ in drawn(name, LAUNCHED):
            verdict = checker.check(case)
            assert verdict.outcome is Outcome.CLEAN, (case.dumps(), verdict.failures)
        assert checker.deaths == 0


@pytest.mark.parametrize("name", WRITERS)
def test_texts_and_json(name: str) -> None:
    """Every case can be described, survives JSON, and has a place for each of its bytes."""
    asked = operation(name)
    for case, plan, expectation in drawn(name, LAUNCHED)[:200]:
        assert Case.from_json(json.loads(case.dumps())) == case
        assert f"T={plan.arguments['num_tokens']}" in asked.describe(plan)
        for buffer in plan.buffers:
            footprint = expectation.footprint(buffer)
            for at in [-1, 0, *footprint.writable.begin[:2].tolist()]:
                assert asked.locate(plan, buffer, at)
            for at in footprint.must_write.begin[:2].tolist():
                assert "token" in (asked.mapping(plan, buffer, at) or "")
