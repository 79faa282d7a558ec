"""concat_and_cache_mla: vectorised expectation, loop and torch say the same of every case."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from ci.tests.oracles.test_references import assert_same
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.oracles.writes import WriteOperation

OPERATION = operation("concat_and_cache_mla")
SCALES = (1.0, 0.5, 3.0, 0.01, 1e-40, 0.0, float("inf"), float("nan"), -2.0)


def bits(scale: float) -> int:
    """The bits of a float32 as an int32."""
    return int(struct.unpack("<i", struct.pack("<f", scale))[0])


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Every kind of slot and any strides, small enough for a loop."""
    few = st.integers(0, 3)
    dtype = draw(st.sampled_from([Dtype.F32, Dtype.F16, Dtype.BF16]))
    kv_dtype = draw(st.sampled_from([0, 1, 2]))
    unit, out = dtype.size_bytes, 1 if kv_dtype else dtype.size_bytes
    tokens, pages, size = draw(st.integers(0, 6)), draw(few), draw(st.integers(1, 4))
    latent, rope = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    entry = (latent + rope) * out
    slot_stride, page_stride = entry + out * draw(few), size * (entry + 4 * out)
    if draw(st.booleans()):
        page_stride, slot_stride = slot_stride, max(pages, 1) * slot_stride
    near = st.integers(-3, pages * size + 2)
    slots = draw(st.lists(near, min_size=tokens, max_size=tokens))
    values = {"slot_mapping": Values.literal(*slots)}
    if kv_dtype or draw(st.booleans()):
        values["scale"] = Values.literal(bits(draw(st.sampled_from(SCALES))))
    if draw(st.booleans()):
        values["counts"] = Values.literal(5, 7)
    sizes = {
        "num_tokens": tokens,
        "kv_c_rows": tokens + draw(few),
        "k_pe_rows": tokens + draw(few),
        "kv_c_row_stride_bytes": unit * draw(st.integers(0, 8)),
        "k_pe_row_stride_bytes": unit * draw(st.integers(0, 8)),
        "kv_c_elements": latent,
        "k_pe_elements": rope,
        "page_size_tokens": size,
        "num_pages": pages,
        "page_stride_bytes": page_stride,
        "slot_stride_bytes": slot_stride,
        "input_dtype": int(dtype),
        "kv_dtype": kv_dtype,
    }
    return Case(OPERATION.name, sizes, values, seed=draw(st.integers(0, 2**64 - 1)))


@settings(max_examples=200, deadline=None)
@given(small_cases())
def test_vectorised_equals_loop(case: Case) -> None:
    """The fast expectation is the loop's, byte for byte and set for set."""
    plan = OPERATION.plan(case)
    fast, loop = OPERATION.expect(plan), OPERATION.expect_by_loop(plan)
    assert_same(fast, loop)
    for name in loop.expected:
        mine, theirs = fast.expected[name].free_nans, loop.expected[name].free_nans
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or np.array_equal(mine.mask, theirs.mask)


@settings(max_examples=150, deadline=None)
@given(small_cases())
def test_torch_equals_loop(case: Case) -> None:
    """Strided torch tensors, torch's division and its fp8 conversion give the loop's bytes."""
    plan = OPERATION.plan(case)
    runs = OPERATION.expect_by_loop(plan).expected.get("cache")
    by_loop = (
        {}
        if runs is None
        else {
            at: value.tobytes()
            for at, value in zip(runs.offsets.tolist(), runs.values, strict=True)
        }
    )
    assert OPERATION.expected_by_torch(plan) == {"cache": by_loop}


def _slots(case: Case) -> list[int]:
    assert isinstance(OPERATION, WriteOperation)
    slots: list[int] = OPERATION.slots(OPERATION.plan(case)).slot.tolist()
    return slots


def _stored(case: Case, code: int) -> bool:
    values = OPERATION.expect(OPERATION.plan(case)).expected["cache"].values
    return case.sizes["kv_dtype"] != 0 and bool((values == code).any())


CORNERS: dict[str, Callable[[Case], bool]] = {
    "padding": lambda case: -1 in _slots(case),
    "negative": lambda case: -2 in _slots(case),
    "past the cache": lambda case: (
        case.sizes["num_pages"] * case.sizes["page_size_tokens"] in _slots(case)
    ),
    "contested": lambda case: (
        OPERATION.expect(OPERATION.plan(case)).expected["cache"].contested is not None
    ),
    "agreeing duplicates": lambda case: (
        len(set(_slots(case))) < len(_slots(case))
        and OPERATION.expect(OPERATION.plan(case)).case_class is CaseClass.IN_CONTRACT
        and OPERATION.expect(OPERATION.plan(case)).expected["cache"].contested is None
        and OPERATION.expect(OPERATION.plan(case)).expected["cache"].offsets.size > 0
        and min(_slots(case)) >= 0
    ),
    "saturated": lambda case: _stored(case, 0x7E) or _stored(case, 0x7B),
    "negative zero": lambda case: _stored(case, 0x80),
    "NaN": lambda case: _stored(case, 0x7F),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_small_cases_reach_the_corner(corner: str) -> None:
    """The equalities above are worth as much as the cases that they are tried on."""
    quickly = settings(max_examples=500, database=None, phases=[Phase.generate])
    find(small_cases(), CORNERS[corner], settings=quickly)
