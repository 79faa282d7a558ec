"""The references of the fp8 up-convert say the same of every case, and of every code and scale."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, CaseError, Values
from pagefuzz.oracles.expectation import Contested, Expected
from pagefuzz.oracles.fp8 import dequantise_fp8, to_bf16
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.operations.cp_gather_and_upconvert_fp8_kv_cache import (
    RECORD_BYTES,
    ROW_BYTES,
    CpGatherAndUpconvertFp8KvCache,
)
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.scales import SPECIAL, scales

NAME = "cp_gather_and_upconvert_fp8_kv_cache"
OPERATION = operation(NAME)
assert isinstance(OPERATION, CpGatherAndUpconvertFp8KvCache)


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Cases with every kind of hostile value and any legal strides, small enough for a loop."""
    requests, tokens = draw(st.integers(0, 3)), draw(st.integers(0, 8))
    page_size = draw(st.integers(1, 3))
    pages, width = draw(st.sampled_from([3, 2, 1, 0])), draw(st.sampled_from([5, 3, 2, 1, 0]))
    terminal = draw(st.integers(0, 1))
    count = requests + terminal if requests else 0
    starts = draw(st.lists(st.integers(-3, 10), min_size=count, max_size=count))
    if draw(st.booleans()):
        starts.sort()
    edits = st.dictionaries(
        st.integers(0, max(requests * width - 1, 0)), st.sampled_from([-1, -2, 7, 0]), max_size=3
    )
    values = {
        "starts": Values.literal(*starts),
        "block_table": Values(
            draw(st.sampled_from(["identity", "reversed", "shared"])),
            edits=draw(edits) if requests * width else {},
        ),
    }
    if draw(st.booleans()):
        seq_starts = st.lists(st.integers(-1, 6), min_size=requests, max_size=requests)
        values["seq_starts"] = Values.literal(*draw(seq_starts))
    if draw(st.booleans()):
        values["counts"] = Values.literal(5, 7)
    if (words := draw(scales())) is not None:
        values["src"] = Values.literal(*words)
    sizes = {
        "num_requests": requests,
        "num_tokens": tokens,
        "page_size_tokens": page_size,
        "num_pages": pages,
        "table_width": width,
        "table_row_stride": draw(st.integers(0, 5)),
        "page_stride_bytes": RECORD_BYTES + 4 * draw(st.integers(0, 400)),
        "slot_stride_bytes": RECORD_BYTES + 4 * draw(st.sampled_from([0, 0, 1, 40])),
        "dst_rows": tokens + draw(st.integers(0, 2)),
        "dst_row_stride_bytes": ROW_BYTES + 2 * draw(st.integers(0, 3)),
        "has_terminal": terminal,
    }
    return Case(NAME, sizes, values, seed=draw(st.integers(0, 2**64 - 1)))


def assert_same_runs(fast: Expected | Contested, loop: Expected | Contested) -> None:
    assert np.array_equal(fast.offsets, loop.offsets)
    assert np.array_equal(fast.values, loop.values)
    assert (fast.free_nans is None) == (loop.free_nans is None)
    if fast.free_nans is not None and loop.free_nans is not None:
        assert np.array_equal(fast.free_nans.mask, loop.free_nans.mask)


@settings(max_examples=100, deadline=None)
@given(small_cases())
def test_vectorised_equals_loop(case: Case) -> None:
    """The fast expectation is the loop's, byte for byte and set for set."""
    plan = OPERATION.plan(case)
    fast, loop = OPERATION.expect(plan), OPERATION.expect_by_loop(plan)
    assert fast.case_class == loop.case_class
    assert fast.footprints == loop.footprints
    assert fast.counts == loop.counts
    assert bool(fast.hostile) == (fast.case_class is CaseClass.HOSTILE)
    assert fast.expected.keys() == loop.expected.keys() == {"dst"}
    assert_same_runs(fast.expected["dst"], loop.expected["dst"])
    mine, theirs = fast.expected["dst"].contested, loop.expected["dst"].contested
    assert (mine is None) == (theirs is None)
    if mine is not None and theirs is not None:
        assert mine.element_bytes == theirs.element_bytes == 2
        assert_same_runs(mine, theirs)


@settings(max_examples=60, deadline=None)
@given(small_cases())
def test_torch_equals_vectorised(case: Case) -> None:
    """torch's own fp8 and bf16 give the same rows; where a NaN is wanted it gives one."""
    plan = OPERATION.plan(case)
    expected = OPERATION.expect(plan).expected["dst"]
    by_torch = OPERATION.expected_by_torch(plan)["dst"]
    assert list(by_torch) == expected.offsets.tolist()
    if not by_torch:
        return
    rows = np.frombuffer(b"".join(by_torch.values()), dtype=np.uint8).reshape(-1, ROW_BYTES)
    same = rows == expected.values
    if expected.free_nans is not None:
        same |= expected.free_nans.pass_bytes(rows)
    assert same.all()


SIMPLE = Case(
    NAME,
    {
        "num_requests": 2,
        "num_tokens": 4,
        "page_size_tokens": 2,
        "num_pages": 2,
        "table_width": 1,
        "table_row_stride": 1,
        "page_stride_bytes": 1320,
        "slot_stride_bytes": 660,
        "dst_rows": 4,
        "dst_row_stride_bytes": 1152,
        "has_terminal": 1,
    },
    {
        "starts": Values.literal(0, 2, 4),
        "block_table": Values("identity"),
        "src": Values.literal(1, 2, 3, 4, 5),
    },
)
PLAN = OPERATION.plan(SIMPLE)


def record(scale_bits: int) -> bytes:
    """All codes twice, one scale."""
    return bytes(range(256)) * 2 + struct.pack("<4I", *[scale_bits] * 4) + bytes(range(128))


SCALES = (*SPECIAL, 0x3F800000, 0x3F400000, 0x3DCCCCCD, 0x00012345, 0x807FFFFF, 0x7E9A1234)


@pytest.mark.parametrize("scale_bits", SCALES, ids=hex)
def test_every_code_under_a_scale(scale_bits: int) -> None:
    """Three writings of the product agree on all 256 codes, NaN by NaN-ness, the fourth being the
    conversion that other operations use."""
    import torch

    one = record(scale_bits)
    entries = np.frombuffer(one, dtype=np.uint8).reshape(1, RECORD_BYTES)
    fast = OPERATION.converted(PLAN, entries)
    alone = np.frombuffer(OPERATION.converted_alone(PLAN, one), dtype=np.uint8)
    by_torch = OPERATION.converted_by_torch(PLAN, torch.from_numpy(entries.copy())).numpy()
    scale = np.array([scale_bits], dtype=np.uint32).view(np.float32)
    shared = to_bf16(dequantise_fp8(entries[:, :512], scale, Dtype.E4M3)).view(np.uint8)
    assert np.array_equal(fast[0], alone)
    free = OPERATION.free_nans(PLAN, fast)
    assert free is not None
    assert free.mask.sum() >= 4  # the NaN codes
    assert (free.pass_bytes(by_torch) | (fast == by_torch)).all()
    whole = np.concatenate((shared, entries[:, 528:]), axis=1)
    assert (free.pass_bytes(whole) | (fast == whole)).all()
    assert bytes(fast[0, 1024:]) == one[528:]


def test_rope_keeps_the_payload_of_a_nan() -> None:
    """Raw values are no NaNs that may be any: their mask ends with the codes."""
    one = np.frombuffer(record(0x3F800000)[:528] + b"\x01\x7f\x81\xff" * 32, dtype=np.uint8)
    free = OPERATION.free_nans(PLAN, OPERATION.converted(PLAN, one.reshape(1, -1)))
    assert free is not None
    assert free.mask[0].tolist() == [j % 256 in (127, 255) and j < 512 for j in range(576)]


def test_given_scales_lie_at_the_records_and_nowhere_else() -> None:
    """The words of mapped records, a function of their place alone."""
    plan, bits = PLAN, (1, 2, 3, 4, 5)
    image = plan.buffers["src"].image
    readable = OPERATION.expect(plan).footprint("src").may_read
    assert len(image.offsets) == 4 * len(readable)
    for begin in readable.begin.tolist():
        for g in range(4):
            at = begin + 512 + 4 * g
            (word,) = image.values[image.offsets == at].view(np.uint32).ravel()
            assert word == bits[at // 4 % len(bits)]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (Values.literal(), "src has 0 scales"),
        (Values.literal(-1), "a scale -1; scales are fp32 bits"),
        (Values.literal(2**32), "a scale 4294967296"),
        (Values("identity"), "src holds payload; its values are 'literal' scales"),
        (Values("literal", {"values": (1,)}, {0: 1}), "without edits"),
    ],
)
def test_scales_that_cannot_be_given(values: Values, complaint: str) -> None:
    """Each is said in one sentence."""
    wrong = Case(NAME, SIMPLE.sizes, {**SIMPLE.values, "src": values})
    with pytest.raises(CaseError, match=complaint):
        OPERATION.plan(wrong)


CORNERS = {
    "two claimants": lambda case: len(_contested(case)) > len(set(_contested(case))),
    "overlapping records with given scales": lambda case: (
        "src" in case.values
        and len(OPERATION.expect(OPERATION.plan(case)).footprint("src").may_read)
        < OPERATION.expect(OPERATION.plan(case)).counters["mapped_rows"] - 1
    ),
    "hostile and exact": lambda case: (
        OPERATION.expect(OPERATION.plan(case)).case_class is CaseClass.HOSTILE
        and OPERATION.expect(OPERATION.plan(case)).expected["dst"].offsets.size > 1
    ),
}


def _contested(case: Case) -> list[int]:
    contested = OPERATION.expect(OPERATION.plan(case)).expected["dst"].contested
    return [] if contested is None else contested.offsets.tolist()


@pytest.mark.parametrize("corner", CORNERS)
def test_small_cases_reach_the_corner(corner: str) -> None:
    """The equalities above are worth as much as the cases that they are tried on."""
    quickly = settings(max_examples=500, database=None, phases=[Phase.generate])
    find(small_cases(), CORNERS[corner], settings=quickly)
