"""The oracle of cp_gather_indexer_k_quant_cache: its three references agree, refusals, texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from ci.tests.oracles.lies import assert_extent_is_exact, lie, moved, reasons
from ci.tests.oracles.test_references import assert_same
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pagefuzz.oracles import contents
from pagefuzz.oracles.case import Case, CaseError, Placement, Values
from pagefuzz.oracles.layout import Dtype, Plan
from pagefuzz.oracles.origin import OriginKind
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass

NAME = "cp_gather_indexer_k_quant_cache"
OPERATION = operation(NAME)
BUFFERS = ("src", "dst_k", "dst_scale", "block_table", "starts", "seq_starts", "counts")


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Both layouts, padded pages and rows, and every kind of hostile value."""
    small = st.integers(0, 5)
    layout = draw(st.sampled_from([0, 1]))
    head, block = draw(st.sampled_from([(16, 16), (16, 4), (32, 16), (32, 32), (48, 1), (48, 24)]))
    scales = 4 * (head // block)
    requests, tokens = draw(st.integers(0, 4)), draw(st.integers(0, 12))
    size = 16 * draw(st.integers(1, 2)) if layout else draw(st.integers(1, 5))
    pages, width = draw(small), draw(small)
    terminal = draw(st.integers(0, 1))
    count = requests + terminal
    starts = draw(st.lists(st.integers(-3, 15), min_size=count, max_size=count))
    if draw(st.booleans()):
        starts.sort()
    values = {
        "starts": Values.literal(*(starts if requests else [])),
        "block_table": draw(
            st.builds(
                Values,
                st.sampled_from(["identity", "reversed", "shared"]),
                edits=st.dictionaries(
                    st.integers(0, max(requests * width - 1, 0)),
                    st.sampled_from([-1, -2, 7, 0]),
                    max_size=4 if requests * width else 0,
                ),
            )
        ),
    }
    if draw(st.booleans()):
        seq_starts = st.lists(st.integers(-1, 2 * size), min_size=requests, max_size=requests)
        values["seq_starts"] = Values.literal(*draw(seq_starts))
    if draw(st.booleans()):
        values["counts"] = Values.literal(5, 7)
    sizes = {
        "num_requests": requests,
        "num_tokens": tokens,
        "page_size_tokens": size,
        "num_pages": pages,
        "table_width": width,
        "table_row_stride": draw(st.integers(0, 8)),
        "page_stride_bytes": size * (head + scales) + 4 * draw(small),
        "dst_k_rows": tokens + draw(small),
        "dst_k_row_stride_bytes": head + draw(small),
        "dst_scale_rows": tokens + draw(small),
        "dst_scale_row_stride_bytes": scales + 4 * draw(st.integers(0, 2)),
        "head_dim": head,
        "quant_block": block,
        "page_layout": layout,
        "has_terminal": terminal,
    }
    return Case(NAME, sizes, values, seed=draw(st.integers(0, 2**64 - 1)))


@settings(max_examples=250, deadline=None)
@given(small_cases())
def test_vectorised_equals_loop(case: Case) -> None:
    """The fast expectation is the loop's, byte for byte and set for set."""
    plan = OPERATION.plan(case)
    assert_same(OPERATION.expect(plan), OPERATION.expect_by_loop(plan))


@settings(max_examples=200, deadline=None)
@given(small_cases())
def test_torch_equals_loop(case: Case) -> None:
    """Tensors whose tiles are transposed gather the bytes that the loop gathers."""
    assert_torch_equals_loop(OPERATION.plan(case))


def assert_torch_equals_loop(plan: Plan) -> None:
    found = operation(plan.case.operation)
    by_loop = {
        name: {
            at: value.tobytes()
            for at, value in zip(runs.offsets.tolist(), runs.values, strict=True)
        }
        for name, runs in found.expect_by_loop(plan).expected.items()
    }
    assert found.expected_by_torch(plan) == by_loop


CORNERS: dict[str, Callable[[Case], bool]] = {
    "padding page": lambda case: (
        (counts := OPERATION.expect(OPERATION.plan(case)).counts) is not None and counts.padding > 0
    ),
    "two claimants": lambda case: _contested(case) > 1,
    "tiled with rows": lambda case: case.sizes["page_layout"] == 1 and _rows(case) > 3,
    "flat with rows": lambda case: case.sizes["page_layout"] == 0 and _rows(case) > 3,
    "second tile": lambda case: case.sizes["page_size_tokens"] == 32 and _rows(case) > 2,
}


def _rows(case: Case) -> int:
    expectation = OPERATION.expect(OPERATION.plan(case))
    sound = expectation.case_class is CaseClass.IN_CONTRACT
    return expectation.expected["dst_k"].offsets.size if sound else 0


def _contested(case: Case) -> int:
    contested = OPERATION.expect(OPERATION.plan(case)).expected["dst_scale"].contested
    if contested is None:
        return 0
    return int(np.unique(contested.offsets, return_counts=True)[1].max(initial=0))


@pytest.mark.parametrize("corner", CORNERS)
def test_small_cases_reach_the_corner(corner: str) -> None:
    """The equalities above are worth as much as the cases that they are tried on."""
    quickly = settings(max_examples=500, database=None, phases=[Phase.generate])
    find(small_cases(), CORNERS[corner], settings=quickly)


# ---- by hand -------------------------------------------------------------------------------------


@pytest.fixture
def base_case() -> Case:
    """Three requests over six padded pages of 16 tokens of 32 + 8 bytes, everything present."""
    sizes = {
        "num_requests": 3,
        "num_tokens": 20,
        "page_size_tokens": 16,
        "num_pages": 6,
        "table_width": 4,
        "table_row_stride": 5,
        "page_stride_bytes": 672,
        "dst_k_rows": 24,
        "dst_k_row_stride_bytes": 33,
        "dst_scale_rows": 22,
        "dst_scale_row_stride_bytes": 12,
        "head_dim": 32,
        "quant_block": 16,
        "page_layout": 1,
        "has_terminal": 1,
    }
    values = {
        "block_table": Values("permuted", {"seed": 1}),
        "starts": Values.literal(1, 7, 7, 18),
        "seq_starts": Values.literal(2, 0, 19),
        "counts": Values.literal(100, 200),
    }
    placements = {"dst_k": Placement(before_bytes=32, slack_bytes=8, after_bytes=32)}
    return Case(NAME, sizes, values, placements, seed=5)


def one_row(layout: int, slot: int) -> Case:
    """Row 0 is slot `slot` of page 2 of three; pages of 32 tokens, D 32, Q 16, 8 bytes behind."""
    sizes = {
        "num_requests": 1,
        "num_tokens": 1,
        "page_size_tokens": 32,
        "num_pages": 3,
        "table_width": 1,
        "table_row_stride": 1,
        "page_stride_bytes": 1288,
        "dst_k_rows": 1,
        "dst_k_row_stride_bytes": 32,
        "dst_scale_rows": 1,
        "dst_scale_row_stride_bytes": 8,
        "head_dim": 32,
        "quant_block": 16,
        "page_layout": layout,
        "has_terminal": 1,
    }
    values = {
        "block_table": Values.literal(2),
        "starts": Values.literal(0, 1),
        "seq_starts": Values.literal(slot),
    }
    return Case(NAME, sizes, values, seed=9)


@pytest.mark.parametrize(
    ("layout", "slot", "keys"),
    [(0, 19, [(608, 640)]), (1, 3, [(48, 64), (304, 320)]), (1, 19, [(560, 576), (816, 832)])],
)
def test_a_row_by_hand(layout: int, slot: int, keys: list[tuple[int, int]]) -> None:
    """Offsets of contracts.md worked out with a pencil: keys in their tiles, scales behind all."""
    plan = OPERATION.plan(one_row(layout, slot))
    expectation = OPERATION.expect(plan)
    base, scale = 2 * 1288, 2 * 1288 + 1024 + 8 * slot
    wanted = [contents.payload(9, base + begin, base + end) for begin, end in keys]
    assert np.array_equal(expectation.expected["dst_k"].values[0], np.concatenate(wanted))
    words = contents.payload(9, scale, scale + 8)
    assert np.array_equal(expectation.expected["dst_scale"].values[0], words)
    read = expectation.footprint("src").may_read
    pieces = [(base + begin, base + end) for begin, end in keys] + [(scale, scale + 8)]
    assert list(zip(read.begin.tolist(), read.end.tolist(), strict=True)) == pieces


def test_a_skipped_page_leaves_both_destinations_and_counts_once(base_case: Case) -> None:
    """Request 2 has 11 rows on two pages; without the second, those of one page are missing."""
    whole = OPERATION.expect(OPERATION.plan(base_case))
    narrow = OPERATION.expect(OPERATION.plan(base_case.with_sizes(table_width=1)))
    assert whole.counts is not None
    assert (whole.counts.padding, whole.counts.skipped) == (0, 0)
    assert narrow.counts is not None
    assert (narrow.counts.padding, narrow.counts.skipped) == (0, 1)
    for name in ("dst_k", "dst_scale"):
        assert whole.expected[name].offsets.size == 17
        assert narrow.expected[name].offsets.size == 6


# ---- refusals ------------------------------------------------------------------------------------


# (reason, overrides after the layout); a `__` stands for the dot.
LIES = [
    ("dtype", {"src__dtype": Dtype.E4M3}),
    ("dtype", {"dst_k__dtype": Dtype.F32}),
    ("dtype", {"dst_scale__dtype": Dtype.U32}),
    ("dtype", {"block_table__dtype": Dtype.I64}),
    ("dtype", {"counts__dtype": Dtype.I32}),
    *[("rank", {f"{name}__rank": 4}) for name in BUFFERS],
    ("head_dim", {"head_dim": 0}),
    ("head_dim", {"head_dim": -16}),
    ("head_dim", {"head_dim": 24}),
    ("head_dim", {"head_dim": 1040}),
    ("quant_block", {"quant_block": 0}),
    ("quant_block", {"quant_block": -16}),
    ("quant_block", {"quant_block": 12}),
    ("quant_block", {"quant_block": 64}),
    ("page_layout", {"page_layout": 2}),
    ("page_layout", {"page_layout": -1}),
    ("page_size_tokens", {"page_size_tokens": 8}),
    ("page_size_tokens", {"page_size_tokens": 0}),
    ("size_range", {"num_requests": -1}),
    ("size_range", {"num_tokens": 2**31, "dst_k_rows": 2**31, "dst_scale_rows": 2**31}),
    ("size_range", {"num_pages": 2**31}),
    ("size_range", {"table_width": 2**31}),
    ("has_terminal", {"has_terminal": 2}),
    ("dst_rows", {"dst_k_rows": 19}),
    ("dst_rows", {"dst_scale_rows": 19}),
    ("negative_stride", {"table_row_stride": -1}),
    ("negative_stride", {"page_stride_bytes": -672}),
    ("negative_stride", {"dst_k_row_stride_bytes": -33}),
    ("negative_stride", {"dst_scale_row_stride_bytes": -12}),
    ("stride_overflow", {"page_stride_bytes": 2**62}),
    ("stride_overflow", {"dst_k_row_stride_bytes": 2**60}),
    ("stride_overflow", {"dst_scale_row_stride_bytes": 2**60}),
    *[("extent", {f"{name}__extent_bytes": -1}) for name in BUFFERS],
    *[("null_pointer", {f"{name}__data": 0}) for name in BUFFERS],
    ("alignment", {"page_stride_bytes": 670}),
    ("alignment", {"dst_scale_row_stride_bytes": 10}),
    ("page_stride", {"page_stride_bytes": 636}),
    ("page_stride", {"page_stride_bytes": 0}),
    ("not_nested", {"dst_k_row_stride_bytes": 31}),
    ("not_nested", {"dst_scale_row_stride_bytes": 4}),
]


@pytest.mark.parametrize(("reason", "overrides"), LIES, ids=str)
def test_each_lie_is_refused_for_its_reason_alone(
    base_case: Case, reason: str, overrides: dict[str, int]
) -> None:
    """One false argument over a sound layout gives one reason; as a plain size it is laid out."""
    case = lie(base_case, **overrides)
    assert reasons(case) == {reason}
    assert OPERATION.expect(OPERATION.plan(case)).case_class is CaseClass.REFUSED
    if set(overrides) <= set(base_case.sizes) and reason != "size_range":
        plain = base_case.with_sizes(**overrides)
        assert reasons(plain) == {reason}
        memory = sum(buffer.memory_bytes for buffer in OPERATION.plan(plain).buffers.values())
        assert 0 < memory < 2**24


INSIDE = [
    {"dst_k__dtype": Dtype.E4M3},
    {"dst_k__dtype": Dtype.E5M2},
    {"head_dim": 16},
    {"quant_block": 32},
    {"page_layout": 0},
    {"page_layout": 0, "page_size_tokens": 15},
    {"num_tokens": 19},
    {"dst_k_rows": 20},
    {"dst_scale_rows": 20},
    {"page_stride_bytes": 640},
    {"dst_k_row_stride_bytes": 32},
    {"dst_scale_row_stride_bytes": 8},
    {"table_row_stride": 0},
    {"seq_starts__data": 0, "seq_starts__extent_bytes": 0, "seq_starts__rank": 9},
    {"counts__data": 0, "counts__extent_bytes": 0, "counts__dtype": 99},
]


@pytest.mark.parametrize("overrides", INSIDE, ids=str)
def test_just_inside_is_accepted(base_case: Case, overrides: dict[str, int]) -> None:
    """The nearest legal argument is not refused."""
    assert reasons(lie(base_case, **overrides)) == set()


@pytest.mark.parametrize("head_dim", [16, 1024])
def test_the_smallest_and_the_largest_head_are_accepted(base_case: Case, head_dim: int) -> None:
    """With a scale for every byte, too."""
    case = base_case.with_sizes(
        head_dim=head_dim,
        quant_block=1,
        page_stride_bytes=16 * 5 * head_dim,
        dst_k_row_stride_bytes=head_dim,
        dst_scale_row_stride_bytes=4 * head_dim,
    )
    assert reasons(case) == set()
    assert reasons(case.with_sizes(page_stride_bytes=80 * head_dim - 4)) == {"page_stride"}


@pytest.mark.parametrize(
    ("count", "stride"),
    [
        ({"num_requests": 1}, "table_row_stride"),
        ({"num_pages": 1}, "page_stride_bytes"),
        ({"num_tokens": 1, "dst_k_rows": 1}, "dst_k_row_stride_bytes"),
        ({"num_tokens": 1, "dst_scale_rows": 1}, "dst_scale_row_stride_bytes"),
    ],
    ids=str,
)
@pytest.mark.parametrize("value", [-3, 2**63 - 1])
def test_strides_of_single_dimensions_are_ignored(
    base_case: Case, count: dict[str, int], stride: str, value: int
) -> None:
    """The stride of a dimension of one element may be anything."""
    case = base_case.with_sizes(**count, **{stride: value})
    starts = (0, 1) if count == {"num_requests": 1} else (0, 0, 0, 1)
    values = {"block_table": case.values["block_table"], "starts": Values.literal(*starts)}
    assert reasons(replace(case, values=values)) == set()


@pytest.mark.parametrize("name", BUFFERS)
def test_extent_one_byte_short(base_case: Case, name: str) -> None:
    """An extent of what is required passes, one byte less is refused."""
    assert_extent_is_exact(base_case, name)


@pytest.mark.parametrize("name", BUFFERS)
def test_base_alignment(base_case: Case, name: str) -> None:
    """4 for the cache and the scales, none for the keys."""
    aligned, odd = {"counts": (8, 4), "dst_k": (1, None)}.get(name, (4, 2))
    assert reasons(moved(base_case, **{name: Placement(offset_bytes=aligned)})) == set()
    if odd is not None:
        assert reasons(moved(base_case, **{name: Placement(offset_bytes=odd)})) == {"alignment"}


@pytest.mark.parametrize("name", ["src", "block_table", "starts", "seq_starts", "counts"])
@pytest.mark.parametrize("destination", ["dst_k", "dst_scale"])
def test_each_destination_meets_a_buffer(base_case: Case, destination: str, name: str) -> None:
    """One shared byte is an overlap, in either direction of who lies over whom."""
    over = moved(base_case, **{name: Placement(over=(destination, 200))})
    assert reasons(over) == {"overlap"}
    end = OPERATION.plan(base_case).buffers[name].extent_bytes
    under = moved(base_case, **{destination: Placement(over=(name, (end - 4) // 8 * 8))})
    assert reasons(under) == {"overlap"}


def test_destinations_that_meet_are_no_reason(base_case: Case) -> None:
    """That they share no byte is the caller's duty; a case of it cannot be laid out."""
    with pytest.raises(CaseError, match="only a case that must be refused"):
        OPERATION.plan(moved(base_case, dst_scale=Placement(over=("dst_k", 0))))


def test_every_reason_is_reached_here() -> None:
    """The tables above and the tests below them name every reason of the operation."""
    assert {reason for reason, _ in LIES} | {"overlap"} == {
        *("dtype", "rank", "head_dim", "quant_block", "page_layout", "page_size_tokens"),
        *("size_range", "has_terminal", "dst_rows", "negative_stride", "stride_overflow"),
        *("extent", "null_pointer", "alignment", "page_stride", "not_nested", "overlap"),
    }


# ---- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [0, 1])
def test_every_byte_of_a_page_has_its_name(layout: int) -> None:
    """What a byte is called is where the contract finds it."""
    plan = OPERATION.plan(one_row(layout, 19))
    for byte in (0, 15, 16, 31):
        at = 2 * 1288
        at += 19 * 32 + byte if layout == 0 else 512 + byte // 16 * 256 + 3 * 16 + byte % 16
        assert OPERATION.locate(plan, "src", at) == f"page 2 slot 19, key byte {byte}"
        assert OPERATION.mapping(plan, "src", at) == (
            "request 0, row 0 -> token 19 -> page 2 slot 19"
        )
    assert OPERATION.locate(plan, "src", 1024 + 8 * 31 + 6) == "page 0 slot 31, scale 1, byte 2"
    assert OPERATION.locate(plan, "src", 1283) == "page 0, byte 3 behind its 1280"
    assert OPERATION.locate(plan, "src", 3 * 1288 - 8) == "past its 3856 bytes"
    assert OPERATION.locate(plan, "dst_k", 31) == "row 0, byte 31"
    assert OPERATION.locate(plan, "dst_scale", 8) == "row 0, byte 8 of an entry of 8"


def test_the_origin_of_a_wrong_tile_is_told(base_case: Case) -> None:
    """Keys of another slot, and scales of another slot, are traced to it."""
    plan = OPERATION.plan(base_case)
    rows = OPERATION.expect(plan).expected
    keys, scales = rows["dst_k"], rows["dst_scale"]
    other = OPERATION.origin(plan, "dst_k", int(keys.offsets[0]) + 4, keys.values[7, 4:])
    assert other is not None
    assert other.kind is OriginKind.ENTRY
    assert other.text.endswith("key byte 4")
    other = OPERATION.origin(plan, "dst_scale", int(scales.offsets[0]), scales.values[7])
    assert other is not None
    assert other.kind is OriginKind.ENTRY
    assert other.text.endswith("scale 0, byte 0")
    old = contents.destination_poison_at(5, 0, scales.offsets[:1], 8)[0]
    kept = OPERATION.origin(plan, "dst_scale", int(scales.offsets[0]), old)
    assert kept is not None
    assert kept.kind is OriginKind.OLD


def test_a_case_on_one_line(base_case: Case) -> None:
    """The sizes that make this operation, and what is not dense."""
    text = OPERATION.describe(OPERATION.plan(base_case))
    assert "D=32 Q=16 tiled16, cb=672 d0(k)=33 d0(scale)=12, seed 5" in text
