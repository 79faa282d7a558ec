"""Every refusal reason fires alone, and stays silent just inside its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ci.tests.oracles.lies import assert_extent_is_exact, lie, moved, reasons

from pagefuzz.oracles.case import Case, CaseError, Placement, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass

OPERATION = operation("cp_gather_cache")
BUFFERS = ("src", "dst", "block_table", "starts", "seq_starts", "counts")
REASONS = {
    "dtype",
    "rank",
    "element_bytes",
    "entry_bytes",
    "page_size_tokens",
    "size_range",
    "has_terminal",
    "dst_rows",
    "negative_stride",
    "stride_overflow",
    "extent",
    "null_pointer",
    "alignment",
    "not_nested",
    "overlap",
}


# (reason, overrides after the layout); a `__` stands for the dot.
LIES = [
    ("dtype", {"src__dtype": Dtype.F32}),
    ("dtype", {"src__dtype": Dtype.U8, "dst__dtype": Dtype.U8}),
    ("dtype", {"src__dtype": 99, "dst__dtype": 99}),
    ("dtype", {"block_table__dtype": Dtype.I64}),
    ("dtype", {"starts__dtype": Dtype.U32}),
    ("dtype", {"seq_starts__dtype": Dtype.I64}),
    ("dtype", {"counts__dtype": Dtype.I32}),
    *[("rank", {f"{name}__rank": 4}) for name in BUFFERS],
    ("element_bytes", {"element_bytes": 3}),
    ("element_bytes", {"element_bytes": 0}),
    ("entry_bytes", {"entry_bytes": 0}),
    ("entry_bytes", {"entry_bytes": -4}),
    ("entry_bytes", {"entry_bytes": 10}),
    ("page_size_tokens", {"page_size_tokens": 0}),
    ("page_size_tokens", {"page_size_tokens": 4097}),
    ("size_range", {"num_requests": -1}),
    ("size_range", {"num_requests": 2**31}),
    ("size_range", {"num_tokens": -1}),
    ("size_range", {"num_tokens": 2**31, "dst_rows": 2**31}),
    ("size_range", {"num_pages": -1}),
    ("size_range", {"num_pages": 2**31}),
    ("size_range", {"table_width": -1}),
    ("size_range", {"table_width": 2**31}),
    ("has_terminal", {"has_terminal": 2}),
    ("has_terminal", {"has_terminal": -1}),
    ("dst_rows", {"dst_rows": 19}),
    ("dst_rows", {"dst_rows": -1}),
    ("negative_stride", {"table_row_stride": -1}),
    ("negative_stride", {"page_stride_bytes": -72}),
    ("negative_stride", {"slot_stride_bytes": -16}),
    ("negative_stride", {"dst_row_stride_bytes": -16}),
    ("stride_overflow", {"page_stride_bytes": 2**62}),
    ("stride_overflow", {"slot_stride_bytes": 2**62}),
    ("stride_overflow", {"dst_row_stride_bytes": 2**60}),
    ("stride_overflow", {"table_row_stride": 2**62}),
    *[("extent", {f"{name}__extent_bytes": -1}) for name in BUFFERS],
    *[("null_pointer", {f"{name}__data": 0}) for name in BUFFERS],
    ("not_nested", {"dst_row_stride_bytes": 8}),
]


@pytest.mark.parametrize(("reason", "overrides"), LIES, ids=str)
def test_each_lie_is_refused_for_its_reason_alone(
    base_case: Case, reason: str, overrides: dict[str, int]
) -> None:
    """One false argument over a sound layout gives one reason."""
    case = lie(base_case, **overrides)
    assert reasons(case) == {reason}
    expectation = OPERATION.expect(OPERATION.plan(case))
    assert expectation.case_class is CaseClass.REFUSED
    assert not expectation.footprints
    assert not expectation.expected


PLAIN = [
    ("element_bytes", {"element_bytes": 3}),
    ("entry_bytes", {"entry_bytes": 0}),
    ("page_size_tokens", {"page_size_tokens": 0}),
    ("page_size_tokens", {"page_size_tokens": 4097}),
    ("size_range", {"num_requests": 2**31}),
    ("size_range", {"num_tokens": 2**31, "dst_rows": 2**31}),
    ("size_range", {"num_pages": 2**31}),
    ("size_range", {"table_width": -1}),
    ("has_terminal", {"has_terminal": 2}),
    ("dst_rows", {"dst_rows": 19}),
    ("negative_stride", {"page_stride_bytes": -72}),
    ("stride_overflow", {"page_stride_bytes": 2**62}),
    ("alignment", {"slot_stride_bytes": 18}),
    ("alignment", {"page_stride_bytes": 74}),
    ("alignment", {"dst_row_stride_bytes": 18}),
    ("not_nested", {"dst_row_stride_bytes": 8}),
]


@pytest.mark.parametrize(("reason", "sizes"), PLAIN, ids=str)
def test_plain_sizes_are_refused_and_laid_out_small(
    base_case: Case, reason: str, sizes: dict[str, int]
) -> None:
    """Sizes that no launcher may take still give a plan, with little memory."""
    case = base_case.with_sizes(**sizes)
    assert reasons(case) == {reason}
    memory = sum(buffer.memory_bytes for buffer in OPERATION.plan(case).buffers.values())
    assert 0 < memory < 2**24


@pytest.mark.parametrize("name", BUFFERS)
def test_extent_one_byte_short(base_case: Case, name: str) -> None:
    """An extent of what is required passes, one byte less is refused."""
    assert_extent_is_exact(base_case, name)


@pytest.mark.parametrize(
    ("name", "aligned", "odd"),
    [
        ("src", 4, 2),
        ("dst", 4, 2),
        ("block_table", 4, 2),
        ("starts", 4, 1),
        ("seq_starts", 4, 3),
        ("counts", 8, 4),
    ],
)
def test_base_alignment(base_case: Case, name: str, aligned: int, odd: int) -> None:
    """A base at its element's alignment passes, one below it is refused."""
    assert reasons(moved(base_case, **{name: Placement(offset_bytes=aligned)})) == set()
    assert reasons(moved(base_case, **{name: Placement(offset_bytes=odd)})) == {"alignment"}


INSIDE = [
    {"src__dtype": Dtype.F32, "dst__dtype": Dtype.F32},
    {"entry_bytes": 8},
    {"num_tokens": 19},
    {"dst_rows": 20},
    {"dst_row_stride_bytes": 12},
    {"table_row_stride": 0},
    {"page_stride_bytes": 0},
    {"seq_starts__data": 0, "seq_starts__extent_bytes": 0, "seq_starts__rank": 9},
    {"counts__data": 0, "counts__extent_bytes": 0, "counts__dtype": 99},
]


@pytest.mark.parametrize("overrides", INSIDE, ids=str)
def test_just_inside_is_accepted(base_case: Case, overrides: dict[str, int]) -> None:
    """The nearest legal argument is not refused."""
    assert reasons(lie(base_case, **overrides)) == set()


@pytest.mark.parametrize(
    ("sizes", "starts"),
    [
        ({"page_size_tokens": 4096}, (1, 7, 7, 18)),
        ({"num_pages": 2**31 - 1}, (1, 7, 7, 18)),
        ({"num_tokens": 2**31 - 1, "dst_rows": 2**31 - 1}, (1, 7, 7, 18)),
        ({"table_width": 2**31 - 1, "table_row_stride": 2**31 - 1}, (1, 7, 7, 18)),
        ({"element_bytes": 1}, (1, 7, 7, 18)),
        ({"has_terminal": 0}, (1, 7, 7)),
    ],
    ids=str,
)
def test_largest_sizes_are_accepted(
    base_case: Case, sizes: dict[str, int], starts: tuple[int, ...]
) -> None:
    """The last legal size is not refused, however large it is."""
    case = base_case.with_sizes(**sizes)
    case = replace(case, values={**case.values, "starts": Values.literal(*starts)})
    assert reasons(case) == set()


@pytest.mark.parametrize(
    ("count", "stride"),
    [
        ({"num_requests": 1}, "table_row_stride"),
        ({"num_pages": 1}, "page_stride_bytes"),
        ({"page_size_tokens": 1}, "slot_stride_bytes"),
        ({"num_tokens": 1, "dst_rows": 1}, "dst_row_stride_bytes"),
    ],
    ids=str,
)
@pytest.mark.parametrize("value", [-3, 2**63 - 1])
def test_strides_of_single_dimensions_are_ignored(
    base_case: Case, count: dict[str, int], stride: str, value: int
) -> None:
    """The stride of a dimension of one element may be anything."""
    case = base_case.with_sizes(**count, **{stride: value})
    values = {"starts": Values.literal(0, 1), "seq_starts": Values.literal(0)}
    if count != {"num_requests": 1}:
        values = {"starts": Values.literal(0, 0, 0, 1)}
    case = replace(case, values={"block_table": case.values["block_table"], **values})
    assert reasons(case) == set()


@pytest.mark.parametrize("name", ["src", "block_table", "starts", "seq_starts", "counts"])
def test_destination_meets_a_buffer(base_case: Case, name: str) -> None:
    """One shared byte is an overlap, in either direction of who lies over whom."""
    over = moved(base_case, **{name: Placement(over=("dst", 304))})
    assert reasons(over) == {"overlap"}
    end = OPERATION.plan(base_case).buffers[name].extent_bytes
    # The last four or eight bytes of the other buffer: aligned, and still inside.
    under = moved(base_case, dst=Placement(over=(name, (end - 4) // 8 * 8)))
    assert reasons(under) == {"overlap"}


def test_touching_is_no_overlap(base_case: Case) -> None:
    """A destination that begins where another buffer ends is legal, and cannot be laid out."""
    end = OPERATION.plan(base_case).buffers["src"].extent_bytes
    with pytest.raises(CaseError, match="only a case that must be refused"):
        OPERATION.plan(moved(base_case, dst=Placement(over=("src", end))))


def test_read_only_buffers_may_share_memory_in_a_refused_case(base_case: Case) -> None:
    """Sources that overlap each other are no reason of their own."""
    case = lie(moved(base_case, starts=Placement(over=("src", 0))), src__rank=7)
    assert reasons(case) == {"rank"}


def test_absent_buffer_with_an_extent_is_null(base_case: Case) -> None:
    """An optional buffer that is left out but has an extent is a null pointer, not absent."""
    values = {k: v for k, v in base_case.values.items() if k != "seq_starts"}
    case = lie(replace(base_case, values=values), seq_starts__extent_bytes=12)
    assert reasons(case) == {"null_pointer"}


def test_every_reason_is_reached_here() -> None:
    """The tables above and the tests below them name every reason of the operation."""
    elsewhere = {"alignment", "overlap"}
    assert {reason for reason, _ in LIES} | elsewhere == REASONS
