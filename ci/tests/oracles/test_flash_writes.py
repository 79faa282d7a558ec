"""reshape_and_cache_flash: vectorised expectation, loop and torch say the same of every case."""

from __future__ import annotations

import pytest
from ci.tests.oracles.test_mla_writes import SCALES, bits
from ci.tests.oracles.test_references import assert_same
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.registry import operation

OPERATION = operation("reshape_and_cache_flash")

#: Order of the dimensions by stride, the smallest first.
ORDERS = {
    "tokens first": ("head", "slot", "page"),
    "heads first": ("slot", "head", "page"),
    "slots last": ("head", "page", "slot"),
}


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Every kind of slot, any order of strides, scales of both kinds, caches that interleave."""
    few = st.integers(0, 2)
    dtype = draw(st.sampled_from([Dtype.F32, Dtype.F16, Dtype.BF16]))
    kv_dtype = draw(st.sampled_from([0, 1, 2]))
    unit, out = dtype.size_bytes, 1 if kv_dtype else dtype.size_bytes
    tokens, pages, size = draw(st.integers(0, 5)), draw(few), draw(st.integers(1, 3))
    heads, head = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    counts = {"page": pages, "slot": size, "head": heads}
    sizes = {
        "num_tokens": tokens,
        "key_rows": tokens + draw(few),
        "value_rows": tokens + draw(few),
        "key_row_stride_bytes": unit * draw(st.integers(0, 14)),
        "value_row_stride_bytes": unit * draw(st.integers(0, 14)),
        "num_heads": heads,
        "head_elements": head,
        "scale_count": draw(st.sampled_from([1, heads])),
        "page_size_tokens": size,
        "num_pages": pages,
        "input_dtype": int(dtype),
        "kv_dtype": kv_dtype,
    }
    for side in ("key", "value"):
        inner = head * out
        for dimension in ORDERS[draw(st.sampled_from(sorted(ORDERS)))]:
            inner += out * draw(few)
            sizes[f"{side}_{dimension}_stride_bytes"] = inner
            inner *= max(counts[dimension], 1)
    near = st.integers(-2, pages * size + 1)
    values = {
        "slot_mapping": Values.literal(*draw(st.lists(near, min_size=tokens, max_size=tokens)))
    }
    if kv_dtype or draw(st.booleans()):
        scale = st.sampled_from(SCALES)
        for name in ("k_scale", "v_scale"):
            several = [bits(draw(scale)) for _ in range(sizes["scale_count"])]
            values[name] = Values.literal(*several)
    if draw(st.booleans()):
        values["counts"] = Values.literal(5, 7)
    case = Case(OPERATION.name, sizes, values, seed=draw(st.integers(0, 2**64 - 1)))
    return interleaved(case) if pages and draw(st.booleans()) else case


def interleaved(case: Case) -> Case:
    """The values of each page behind its keys, in one buffer."""
    key = OPERATION.plan(case).buffers["key_cache"].required_bytes
    sizes = dict(case.sizes)
    for dimension in ("slot", "head"):
        sizes[f"value_{dimension}_stride_bytes"] = sizes[f"key_{dimension}_stride_bytes"]
    counts = {"slot": sizes["page_size_tokens"], "head": sizes["num_heads"]}
    part = max(
        [sizes["head_elements"] * 4]
        + [counts[d] * sizes[f"key_{d}_stride_bytes"] for d in counts if counts[d] > 1]
    )
    part += -part % 4
    sizes |= {"key_page_stride_bytes": 2 * part, "value_page_stride_bytes": 2 * part}
    placements = {
        "key_cache": Placement(after_bytes=key + 2 * part),
        "value_cache": Placement(over=("key_cache", part)),
    }
    return Case(case.operation, sizes, case.values, placements, seed=case.seed)


@settings(max_examples=200, deadline=None)
@given(small_cases())
def test_vectorised_equals_loop(case: Case) -> None:
    """The fast expectation is the loop's, byte for byte and set for set."""
    plan = OPERATION.plan(case)
    assert_same(OPERATION.expect(plan), OPERATION.expect_by_loop(plan))


@settings(max_examples=120, deadline=None)
@given(small_cases())
def test_torch_equals_loop(case: Case) -> None:
    """Strided torch tensors, torch's division and its fp8 conversion give the loop's bytes."""
    plan = OPERATION.plan(case)
    by_loop: dict[str, dict[int, bytes]] = {"key_cache": {}, "value_cache": {}}
    for name, runs in OPERATION.expect_by_loop(plan).expected.items():
        pairs = zip(runs.offsets.tolist(), runs.values, strict=True)
        by_loop[name] = {at: value.tobytes() for at, value in pairs}
    assert OPERATION.expected_by_torch(plan) == by_loop


CORNERS = {
    "interleaved": lambda case: (
        "value_cache" in case.placements
        and OPERATION.expect(OPERATION.plan(case)).expected["value_cache"].offsets.size > 0
    ),
    "a scale a head": lambda case: (
        case.sizes["scale_count"] > 1
        and case.sizes["kv_dtype"] > 0
        and OPERATION.expect(OPERATION.plan(case)).expected["key_cache"].offsets.size > 0
    ),
    "contested": lambda case: (
        not OPERATION.refusals(OPERATION.plan(case))
        and OPERATION.expect(OPERATION.plan(case)).expected["key_cache"].contested is not None
    ),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_small_cases_reach_the_corner(corner: str) -> None:
    """The equalities above are worth as much as the cases that they are tried on."""
    quickly = settings(max_examples=500, database=None, phases=[Phase.generate])

    def holds(case: Case) -> bool:
        sound = not OPERATION.refusals(OPERATION.plan(case))
        return sound and bool(CORNERS[corner](case))

    find(small_cases(), holds, settings=quickly)
