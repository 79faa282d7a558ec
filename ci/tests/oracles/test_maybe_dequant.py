"""gather_and_maybe_dequant_cache: three references agree; every refusal has its limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.expectation import Contested, Expected
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, Dtype
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass

OPERATION = operation("gather_and_maybe_dequant_cache")
F16, BF16, F32 = int(Dtype.F16), int(Dtype.BF16), int(Dtype.F32)
SIZE = {F16: 2, BF16: 2, F32: 4}


def bits(scale: float) -> int:
    """An fp32 number as the int32 that a case holds."""
    return int(np.array([scale], np.float32).view(np.int32)[0])


SCALES = [
    *(bits(x) for x in (0.0, -0.0, 1.0, 448.0, 0.3, -2.5, 1e-3, 3e38, np.inf, -np.inf, np.nan)),
    *(1, 0x00300000, 0x7F800001, 0x00800000),
]


def dense_case(
    kind: int = 1, result: int = BF16, elements: int = 6, scale: int | None = bits(0.5)
) -> Case:
    """Three requests over six pages of four, in contract."""
    src = SIZE[result] if kind == 0 else 1
    sizes = {
        "num_requests": 3,
        "num_tokens": 20,
        "page_size_tokens": 4,
        "num_pages": 6,
        "table_width": 4,
        "table_row_stride": 4,
        "page_stride_bytes": 4 * elements * src,
        "slot_stride_bytes": elements * src,
        "dst_rows": 24,
        "dst_row_stride_bytes": elements * SIZE[result],
        "entry_elements": elements,
        "kv_dtype": kind,
        "dst_dtype": result,
        "has_terminal": 1,
    }
    values = {
        "block_table": Values("permuted", {"seed": 1}),
        "starts": Values.literal(1, 7, 7, 18),
        "seq_starts": Values.literal(2, 0, 3),
        "counts": Values.literal(100, 200),
    }
    if scale is not None:
        values["scale"] = Values.literal(scale)
    return Case(OPERATION.name, sizes, values, {}, seed=5)


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Cases with every kind of hostile value, small enough for a loop."""
    kind, result = draw(st.sampled_from([0, 1, 2])), draw(st.sampled_from([F32, F16, BF16]))
    elements = draw(st.integers(1, 6))
    src, dst = (SIZE[result] if kind == 0 else 1), SIZE[result]
    requests, tokens = draw(st.integers(0, 3)), draw(st.integers(0, 10))
    terminal, page_size = draw(st.integers(0, 1)), draw(st.integers(1, 4))
    pages, width = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    start = st.integers(-2, 12)
    starts = draw(st.lists(start, min_size=requests + terminal, max_size=requests + terminal))
    if draw(st.booleans()):
        starts.sort()
    table = st.sampled_from([-1, -2, 9, 0, 1, 2, 3])
    cells = draw(st.lists(table, min_size=requests * width, max_size=requests * width))
    values = {
        "starts": Values.literal(*(starts if requests else [])),
        "block_table": Values.literal(*cells),
    }
    if draw(st.booleans()):
        seq = st.lists(st.integers(-1, 6), min_size=requests, max_size=requests)
        values["seq_starts"] = Values.literal(*draw(seq))
    if kind or draw(st.booleans()):
        any_bits = st.integers(-(2**31), 2**31 - 1)
        values["scale"] = Values.literal(draw(st.sampled_from(SCALES) | any_bits))
    sizes = {
        "num_requests": requests,
        "num_tokens": tokens,
        "page_size_tokens": page_size,
        "num_pages": pages,
        "table_width": width,
        "table_row_stride": width,
        "page_stride_bytes": src * draw(st.integers(0, 30)),
        "slot_stride_bytes": src * draw(st.integers(0, 8)),
        "dst_rows": tokens + draw(st.integers(0, 2)),
        "dst_row_stride_bytes": dst * (elements + draw(st.integers(0, 2))),
        "entry_elements": elements,
        "kv_dtype": kind,
        "dst_dtype": result,
        "has_terminal": terminal,
    }
    return Case(OPERATION.name, sizes, values, {}, seed=draw(st.integers(0, 99)))


def canonical(runs: Expected | Contested) -> Bytes:
    return runs.values if runs.free_nans is None else runs.free_nans.canonical(runs.values)


@settings(max_examples=150, deadline=None)
@given(small_cases())
def test_references_agree(case: Case) -> None:
    """Vectorised, loop and torch: the same rows, footprints, counts and class."""
    plan = OPERATION.plan(case)
    fast, loop = OPERATION.expect(plan), OPERATION.expect_by_loop(plan)
    assert fast.case_class is loop.case_class
    assert fast.counts == loop.counts
    for name in plan.buffers:
        assert fast.footprint(name) == loop.footprint(name), name
    wanted, plain = fast.expected["dst"], loop.expected["dst"]
    assert np.array_equal(wanted.offsets, plain.offsets)
    assert np.array_equal(canonical(wanted), canonical(plain))
    assert (wanted.contested is None) == (plain.contested is None)
    if wanted.contested is not None and plain.contested is not None:
        assert np.array_equal(wanted.contested.offsets, plain.contested.offsets)
        assert np.array_equal(canonical(wanted.contested), canonical(plain.contested))
    by_torch = OPERATION.expected_by_torch(plan)["dst"]
    assert sorted(by_torch) == wanted.offsets.tolist()
    rows = np.frombuffer(b"".join(by_torch[at] for at in sorted(by_torch)), np.uint8)
    rows = rows.reshape(wanted.values.shape)
    free = wanted.free_nans
    assert np.array_equal(rows if free is None else free.canonical(rows), canonical(wanted))


@pytest.mark.parametrize("result", [F32, F16, BF16])
@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("scale", SCALES)
def test_every_code_is_in_the_payload(kind: int, result: int, scale: int) -> None:
    """All 256 codes, every special scale: vectorised against the loop, NaNs where they belong."""
    case = dense_case(kind, result, elements=320, scale=scale)
    plan = OPERATION.plan(case)
    wanted = OPERATION.expect(plan).expected["dst"]
    codes = np.arange(256, dtype=np.uint8)
    rows = OPERATION.converted(plan, codes[None, :])
    alone = np.frombuffer(OPERATION.converted_alone(plan, codes.tobytes()), np.uint8)[None, :]
    free, also = OPERATION.free_nans(plan, rows), OPERATION.free_nans(plan, alone)
    assert free is not None
    assert also is not None
    assert np.array_equal(free.canonical(rows), also.canonical(alone))
    assert wanted.values.shape == (17, 320 * SIZE[result])
    assert wanted.free_nans is not None


def test_raw_rows_have_no_free_bits() -> None:
    """`auto` copies: the scale is neither needed nor readable."""
    for scale in (None, bits(2.0)):
        plan = OPERATION.plan(dense_case(0, F16, scale=scale))
        expectation = OPERATION.expect(plan)
        assert expectation.case_class is CaseClass.IN_CONTRACT
        assert expectation.expected["dst"].free_nans is None
        assert expectation.footprint("scale").may_read == IntervalSet()
    assert OPERATION.expect(OPERATION.plan(dense_case())).footprint(
        "scale"
    ).may_read == IntervalSet([0], [4])


REFUSED = [
    ("kv_dtype", {"kv_dtype": 3}),
    ("kv_dtype", {"kv_dtype": -1}),
    ("dst_dtype", {"dst_dtype": int(Dtype.U16)}),
    ("dst_dtype", {"dst_dtype": 0}),
    ("entry_elements", {"entry_elements": 0}),
    ("entry_elements", {"entry_elements": 2**31}),
    ("null_scale", {"scale.data": 0, "scale.extent_bytes": 0}),
    ("null_pointer", {"scale.data": 0}),
    ("extent", {"scale.extent_bytes": 3}),
    ("dtype", {"scale.dtype": int(Dtype.I32)}),
    ("rank", {"scale.rank": 0}),
    ("dtype", {"src.dtype": int(Dtype.E5M2)}),
    ("dtype", {"src.dtype": BF16}),
    ("dtype", {"dst.dtype": F16}),
    ("rank", {"src.rank": 2}),
    ("rank", {"dst.rank": 3}),
    ("dst_rows", {"dst_rows": 19}),
    ("not_nested", {"dst_row_stride_bytes": 10}),
    ("alignment", {"dst_row_stride_bytes": 13}),
    ("extent", {"dst.extent_bytes": 20 * 12 - 1}),
    ("extent", {"src.extent_bytes": 6 * 4 * 6 - 1}),
    ("negative_stride", {"slot_stride_bytes": -6}),
    ("page_size_tokens", {"page_size_tokens": 4097}),
    ("stride_overflow", {"page_stride_bytes": 2**62}),
]


@pytest.mark.parametrize(("reason", "overrides"), REFUSED)
def test_refusals(reason: str, overrides: dict[str, int]) -> None:
    """Each reason is given, to a launch without rows as well."""
    case = replace(dense_case(), overrides=overrides)
    for one in (case, case.with_sizes(num_tokens=0) if "extent" not in reason else case):
        if one.sizes["num_tokens"] == 0 and "dst" in str(overrides):
            continue
        found = {refusal.reason for refusal in OPERATION.refusals(OPERATION.plan(one))}
        if reason != "stride_overflow" or one is case:
            assert reason in found


ACCEPTED = [
    dense_case().with_sizes(entry_elements=1),
    dense_case().with_sizes(num_tokens=24),
    dense_case().with_sizes(dst_rows=20),
    replace(dense_case(), overrides={"src.dtype": int(Dtype.U8)}),
    replace(dense_case(2), overrides={"src.dtype": int(Dtype.U8)}),
    replace(dense_case(), placements={"src": Placement(offset_bytes=1)}),
    replace(dense_case(), placements={"dst": Placement(offset_bytes=2)}),
    replace(dense_case(result=F32), placements={"dst": Placement(offset_bytes=4)}),
    dense_case(0, F32, scale=None),
]


@pytest.mark.parametrize("case", ACCEPTED)
def test_limits_are_accepted(case: Case) -> None:
    """What lies just inside each limit is not refused."""
    assert OPERATION.refusals(OPERATION.plan(case)) == ()


def test_misaligned_bases_are_refused() -> None:
    """Bases are multiples of their own element."""
    for kind, buffer, offset in ((1, "dst", 1), (0, "src", 1), (1, "scale", 2)):
        case = replace(dense_case(kind), placements={buffer: Placement(offset_bytes=offset)})
        found = {refusal.reason for refusal in OPERATION.refusals(OPERATION.plan(case))}
        assert found == {"alignment"}


def test_description_tells_types_and_scale() -> None:
    """A case on one line."""
    text = OPERATION.describe(OPERATION.plan(dense_case(1, F16, scale=bits(0.25))))
    assert "entry 6 B of E4M3 to F16, scale 0.25, dense" in text
    assert " of F32, dense" in OPERATION.describe(OPERATION.plan(dense_case(0, F32, scale=None)))


def test_a_run_of_several_rows_is_found_by_its_first() -> None:
    """Where bytes come from is asked of a row, however far what was found goes on."""
    plan = OPERATION.plan(dense_case())
    rows = OPERATION.expect(plan).expected["dst"]
    found = np.concatenate([rows.values[0], rows.values[1], rows.values[2]])
    offset = int(rows.offsets[0])
    origin = OPERATION.origin(plan, "dst", offset, found)
    assert origin is not None
    assert origin.text == OPERATION.origin(plan, "dst", offset, rows.values[0]).text
    wider = dense_case().with_sizes(dst_row_stride_bytes=64)
    in_the_gap = OPERATION.origin(OPERATION.plan(wider), "dst", 64 + 40, found)
    assert in_the_gap is None


def test_the_scale_has_a_place() -> None:
    """A read of it can be reported, given or not."""
    for case, count in ((dense_case(), 1), (dense_case(0, scale=None), 0)):
        assert OPERATION.locate(OPERATION.plan(case), "scale", 0) == f"element 0 of {count}"
