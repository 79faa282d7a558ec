"""Reported cases of the writers say what the reports say, and the kernels are clean on them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from pagefuzz.harness.check import Checker
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.fp8 import fp8_table
from pagefuzz.oracles.layout import Dtype, Plan
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass, Outcome
from pagefuzz.strategies.reported import examples_for, lies_for

MLA, FLASH = "concat_and_cache_mla", "reshape_and_cache_flash"
CASES = [(name, example) for name in (MLA, FLASH) for example in examples_for(name)]
REPORTS = {
    MLA: {"13", "15", "16", "18", "24", "25", "30"},
    FLASH: {"6", "12", "15", "16", "17", "18", "24", "25", "30", "33"},
}


@cache
def planned(name: str, example: str) -> tuple[Plan, Expectation]:
    asked = operation(name)
    plan = asked.plan(examples_for(name)[example])
    return plan, asked.expect(plan)


def slots(name: str, example: str) -> list[int]:
    found = examples_for(name)[example].values["slot_mapping"].parameters["values"]
    assert isinstance(found, tuple)
    return list(found)


@pytest.mark.parametrize("name", [MLA, FLASH])
def test_every_report_is_there(name):
    """By its number; a case named `good` has a `bad` one beside it."""
    assert {example.split("-")[0] for example in examples_for(name)} == REPORTS[name]
    for example in examples_for(name):
        if example.endswith("-good"):
            before = example.split("-")[0]
            assert any(e.startswith(before) and e.endswith("-bad") for e in examples_for(name))


@pytest.mark.parametrize(("name", "example"), CASES)
def test_is_in_contract(name, example):
    """No report about a writer needs hostile values."""
    assert planned(name, example)[1].case_class is CaseClass.IN_CONTRACT


@pytest.mark.parametrize("name", [MLA, FLASH])
def test_the_kernel_is_clean_and_sees_through_every_lie(name):
    """On each reported case, and on each lie about one; the lies reach every reason at hand."""
    asked, reasons = operation(name), set()
    with Checker(name, "bundled:token") as checker:
        for example, case in examples_for(name).items():
            verdict = checker.check(case)
            assert verdict.outcome is Outcome.CLEAN, (example, verdict.failures)
            assert verdict.checked["output"] > 0
        for case in lies_for(name):
            verdict = checker.check(case)
            assert verdict.outcome is Outcome.CLEAN, (case.dumps(), verdict.failures)
            refusals = asked.refusals(asked.plan(case))
            assert refusals, case.dumps()
            reasons |= {refusal.reason for refusal in refusals}
    assert {"null_scale", "not_nested", "input_rows", "kv_dtype", "overlap"} <= reasons
    assert len(lies_for(name)) > 100


def test_report_6_passes_element_2_to_31():
    """Pages of [32 heads, 128, 16 tokens] fp16: page 32,768 begins at element 2^31."""
    for example, at_least in (("6-fp16-pool-good", False), ("6-fp16-pool-bad", True)):
        sizes = examples_for(FLASH)[example].sizes
        assert sizes["key_page_stride_bytes"] == 2 * 32 * 128 * 16
        (slot,) = slots(FLASH, example)
        element = slot // sizes["page_size_tokens"] * sizes["key_page_stride_bytes"] // 2
        assert (element >= 2**31) == at_least


def test_report_12_wraps_to_a_negative_number_and_to_page_0():
    """A page stride of 2^30 elements: 1, 2 and 4 of them are 2^30, -2^31 and 0 in int32."""
    wrapped = {}
    for page in (1, 2, 4):
        example = next(e for e in examples_for(FLASH) if e.startswith(f"12-page-{page}-"))
        sizes = examples_for(FLASH)[example].sizes
        (slot,) = slots(FLASH, example)
        offset = slot // sizes["page_size_tokens"] * sizes["key_page_stride_bytes"]
        wrapped[page] = (offset + 2**31) % 2**32 - 2**31
    assert wrapped == {1: 2**30, 2: -(2**31), 4: 0}


def test_report_13_passes_byte_2_to_31():
    """Slot 3,728,271 of 576 bytes is the first that begins past 2^31."""
    assert slots(MLA, "13-slot-offset-good")[-1] * 576 < 2**31
    assert slots(MLA, "13-slot-offset-bad")[-1] * 576 >= 2**31
    assert slots(MLA, "13-slot-offset-bad")[-1] == slots(MLA, "13-slot-offset-good")[-1] + 1


@pytest.mark.parametrize("name", [MLA, FLASH])
def test_reports_15_and_16_are_padded(name):
    """The mapping ends in -1, or before the inputs do."""
    assert slots(name, "15-padded-tail")[-1] == -1
    sizes = examples_for(name)["16-longer-inputs"].sizes
    inputs = [size for key, size in sizes.items() if key.endswith("_rows")]
    assert min(inputs) > sizes["num_tokens"]


def test_report_17_has_keys_and_values_in_one_buffer():
    """The values of a page lie behind its keys."""
    plan, _ = planned(FLASH, "17-one-buffer")
    root, begin = plan.base("value_cache")
    assert root == plan.base("key_cache")[0]
    assert 0 < begin - plan.base("key_cache")[1] < plan.arguments["key_page_stride_bytes"]


@pytest.mark.parametrize("side", ["page", "slot", "head"])
def test_report_18_is_about_one_stride_at_a_time(side):
    """The named stride is wider than what lies inside it; the others are dense."""
    sizes = examples_for(FLASH)[f"18-{side}-stride"].sizes
    inside = {
        "head": 2 * sizes["head_elements"],
        "slot": sizes["num_heads"] * sizes["key_head_stride_bytes"],
        "page": sizes["page_size_tokens"] * sizes["key_slot_stride_bytes"],
    }
    wider = {name for name, size in inside.items() if sizes[f"key_{name}_stride_bytes"] > size}
    assert wider == {side}


def stored(name: str, example: str) -> np.ndarray:
    """Finite values that the codes of a case stand for."""
    _, expectation = planned(name, example)
    codes = np.concatenate([part.values.ravel() for part in expectation.expected.values()])
    values = fp8_table(Dtype.E4M3)[codes]
    return np.abs(values[np.isfinite(values)])


@pytest.mark.parametrize("name", [MLA, FLASH])
def test_report_24_has_codes_between_256_and_448(name):
    """Several codes of the largest exponent that are not the largest."""
    values = stored(name, "24-every-magnitude")
    assert len(np.unique(values[(values >= 256) & (values < 448)])) >= 3


def test_report_25_has_scales_that_are_not_one():
    """And values that saturate."""
    for name, example in ((MLA, "25-scale-one-half"), (FLASH, "25-scales-differ")):
        scales = [v for n, v in examples_for(name)[example].values.items() if "scale" in n]
        one = int(np.float32(1).view(np.int32))
        assert all(scale.parameters["values"] != (one,) for scale in scales)
        assert (stored(name, example) == 448).any()


def test_report_30_lies_on_both_sides_of_the_grid():
    """65,535 tokens fit, 65,536 do not; the last one is stored."""
    for name in (MLA, FLASH):
        for tokens in (65_535, 65_536):
            case = examples_for(name)[f"30-{tokens}-tokens"]
            assert case.sizes["num_tokens"] == tokens
            assert case.values["slot_mapping"].edits[tokens - 1] >= 0


def test_report_33_has_heads_first():
    """Head stride 8,192 and token stride 128, in elements."""
    sizes = examples_for(FLASH)["33-heads-first"].sizes
    for side in ("key", "value"):
        strides = [sizes[f"{side}_{part}_stride_bytes"] // 2 for part in ("head", "slot")]
        assert strides == [8192, 128]
