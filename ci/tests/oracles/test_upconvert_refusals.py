"""Every reason to refuse an fp8 up-convert fires alone, and is silent just inside its limit."""

from __future__ import annotations

import pytest
from ci.tests.oracles.lies import assert_extent_is_exact, lie, moved, reasons

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.registry import operation

NAME = "cp_gather_and_upconvert_fp8_kv_cache"
OPERATION = operation(NAME)
BUFFERS = ("src", "dst", "block_table", "starts", "seq_starts", "counts")
CASE = Case(
    NAME,
    {
        "num_requests": 3,
        "num_tokens": 8,
        "page_size_tokens": 2,
        "num_pages": 5,
        "table_width": 3,
        "table_row_stride": 4,
        "page_stride_bytes": 1328,
        "slot_stride_bytes": 660,
        "dst_rows": 9,
        "dst_row_stride_bytes": 1154,
        "has_terminal": 1,
    },
    {
        "block_table": Values("permuted", {"seed": 1}),
        "starts": Values.literal(1, 4, 4, 7),
        "seq_starts": Values.literal(2, 0, 3),
        "counts": Values.literal(100, 200),
        "src": Values.literal(0x3F800000, 0x40000000),
    },
    {"dst": Placement(before_bytes=32, slack_bytes=8, after_bytes=32)},
    seed=5,
)


# (reason, overrides after the layout); a `__` stands for the dot.
LIES = [
    ("dtype", {"src__dtype": Dtype.E4M3}),
    ("dtype", {"src__dtype": Dtype.U16}),
    ("dtype", {"dst__dtype": Dtype.F16}),
    ("dtype", {"dst__dtype": Dtype.U16}),
    ("dtype", {"block_table__dtype": Dtype.I64}),
    ("dtype", {"counts__dtype": Dtype.I32}),
    *[("rank", {f"{name}__rank": 4}) for name in BUFFERS],
    ("page_size_tokens", {"page_size_tokens": 0}),
    ("page_size_tokens", {"page_size_tokens": 4097}),
    *[("size_range", {name: 2**31}) for name in ("num_requests", "num_pages", "table_width")],
    ("size_range", {"num_tokens": 2**31, "dst_rows": 2**31}),
    ("size_range", {"num_tokens": -1}),
    ("has_terminal", {"has_terminal": 2}),
    ("dst_rows", {"dst_rows": 7}),
    ("record_stride", {"slot_stride_bytes": 652}),
    ("record_stride", {"slot_stride_bytes": 0}),
    ("record_stride", {"page_stride_bytes": 652}),
    ("negative_stride", {"page_stride_bytes": -1312}),
    ("negative_stride", {"slot_stride_bytes": -656}),
    ("negative_stride", {"dst_row_stride_bytes": -1152}),
    ("negative_stride", {"table_row_stride": -1}),
    ("alignment", {"page_stride_bytes": 1326}),
    ("alignment", {"slot_stride_bytes": 658}),
    ("alignment", {"dst_row_stride_bytes": 1153}),
    ("stride_overflow", {"page_stride_bytes": 2**62}),
    ("stride_overflow", {"dst_row_stride_bytes": 2**61}),
    ("not_nested", {"dst_row_stride_bytes": 1150}),
    *[("extent", {f"{name}__extent_bytes": -1}) for name in BUFFERS],
    *[("null_pointer", {f"{name}__data": 0}) for name in BUFFERS],
]


@pytest.mark.parametrize(("reason", "overrides"), LIES, ids=str)
def test_each_lie_is_refused_for_its_reason_alone(reason: str, overrides: dict[str, int]) -> None:
    """One false argument over a sound layout gives one reason."""
    assert reasons(lie(CASE, **overrides)) == {reason}


@pytest.mark.parametrize(("name", "aligned", "odd"), [("src", 4, 2), ("dst", 2, 1)])
def test_base_alignment(name: str, aligned: int, odd: int) -> None:
    """The cache to 4 bytes, rows to their element of 2."""
    assert reasons(moved(CASE, **{name: Placement(offset_bytes=aligned)})) == set()
    assert reasons(moved(CASE, **{name: Placement(offset_bytes=odd)})) == {"alignment"}


@pytest.mark.parametrize("name", BUFFERS)
def test_extent_one_byte_short(name: str) -> None:
    """An extent of what is required passes, one byte less is refused."""
    assert_extent_is_exact(CASE, name)


def test_required_bytes_end_with_the_last_record_and_row() -> None:
    """The gap behind the last record is nobody's."""
    buffers = OPERATION.plan(CASE).buffers
    assert buffers["src"].required_bytes == 4 * 1328 + 660 + 656
    assert buffers["dst"].required_bytes == 7 * 1154 + 1152


@pytest.mark.parametrize("name", [name for name in BUFFERS if name != "dst"])
def test_destination_meets_a_buffer(name: str) -> None:
    """One shared byte is an overlap."""
    assert reasons(moved(CASE, **{name: Placement(over=("dst", 304))})) == {"overlap"}


INSIDE = [
    {},
    {"slot_stride_bytes": 656},
    {"page_stride_bytes": 656},
    {"dst_row_stride_bytes": 1152},
    {"page_size_tokens": 1, "slot_stride_bytes": -3},
    {"num_pages": 1, "page_stride_bytes": 1},
    {"num_pages": 0, "page_stride_bytes": 1},
    {"num_tokens": 1, "dst_rows": 1, "dst_row_stride_bytes": 7},
    {"counts__data": 0, "counts__extent_bytes": 0, "counts__dtype": 99},
]


@pytest.mark.parametrize("overrides", INSIDE, ids=str)
def test_just_inside_is_accepted(overrides: dict[str, int]) -> None:
    """The nearest legal argument is not refused; ignored strides may be anything."""
    case = lie(CASE, **overrides)
    found = OPERATION.refusals(OPERATION.plan(case))
    assert not found
