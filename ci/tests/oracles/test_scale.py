"""Cases at overflow scale cost what their mapped rows cost."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
import pytest

from pagefuzz.oracles import contents
from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass

OPERATION = operation("cp_gather_cache")
SMALL = {
    "num_requests": 1,
    "num_tokens": 4,
    "page_size_tokens": 4,
    "num_pages": 4,
    "table_width": 4,
    "table_row_stride": 4,
    "page_stride_bytes": 4 * 576,
    "slot_stride_bytes": 576,
    "dst_rows": 4,
    "dst_row_stride_bytes": 576,
    "entry_bytes": 576,
    "element_bytes": 2,
    "has_terminal": 1,
}
IDENTITY = Values("identity")


def case(sizes: dict[str, int], starts: tuple[int, ...], table: Values = IDENTITY) -> Case:
    values = {"block_table": table, "starts": Values.literal(*starts)}
    return Case("cp_gather_cache", {**SMALL, **sizes}, values)


def quickest_ms(function: Callable[[], object]) -> float:
    """The best of five: the machine may be busy, the code may not be slow."""
    times = []
    for _ in range(5):
        begin = perf_counter()
        function()
        times.append(perf_counter() - begin)
    return min(times) * 1000


ROW = {
    "dst_row_stride_bytes": 2304,
    "entry_bytes": 2304,
    "slot_stride_bytes": 2304,
    "page_stride_bytes": 4 * 2304,
}
SCALES = {
    "row 932068 of 2304 bytes": case(
        {**ROW, "num_tokens": 932069, "dst_rows": 932069}, (932068, 932069)
    ),
    "page 2066 of a packed pool": case(
        {"num_pages": 2067, "page_stride_bytes": 1039680},
        (0, 4),
        Values("identity", edits={0: 2066}),
    ),
    "table row stride of 2^31": case({"num_requests": 2, "table_row_stride": 2**31}, (0, 1, 4)),
    "destination of 2^40 bytes": case(
        {"num_tokens": 1024, "dst_rows": 1024, "dst_row_stride_bytes": 2**30}, (1020, 1024)
    ),
    "2^31 - 1 permuted pages": case(
        {"num_pages": 2**31 - 1, "page_stride_bytes": 1024, "slot_stride_bytes": 2},
        (0, 4),
        Values("permuted", {"seed": 7}),
    ),
    "2^31 - 1 columns": case({"table_width": 2**31 - 1}, (0, 4)),
}


@pytest.mark.parametrize("name", SCALES)
def test_scale_cases_expand_in_milliseconds(name: str) -> None:
    """Boundaries of 2^31, 2^32 and 2^40 are planned and expected in a few milliseconds."""
    large = SCALES[name]
    expectation: Expectation = OPERATION.expect(OPERATION.plan(large))
    assert expectation.case_class is CaseClass.IN_CONTRACT
    assert expectation.expected["dst"].offsets.size == expectation.counters["mapped_rows"] > 0
    assert quickest_ms(lambda: OPERATION.expect(OPERATION.plan(large))) < 20


@pytest.mark.parametrize("name", SCALES)
def test_scale_cases_equal_the_loop(name: str) -> None:
    """The loop's integers of any size agree with the vectorised ones there."""
    plan = OPERATION.plan(SCALES[name])
    fast, loop = OPERATION.expect(plan), OPERATION.expect_by_loop(plan)
    assert fast.footprints == loop.footprints
    assert np.array_equal(fast.expected["dst"].offsets, loop.expected["dst"].offsets)
    assert np.array_equal(fast.expected["dst"].values, loop.expected["dst"].values)


def test_first_wrapping_row_is_where_the_report_says() -> None:
    """Row 932068 of 2304 bytes begins just above 2^31, the row below just under it."""
    plan = OPERATION.plan(SCALES["row 932068 of 2304 bytes"])
    (offset,) = OPERATION.expect(plan).expected["dst"].offsets.tolist()
    assert offset == 2147484672
    assert offset - 2304 < 2**31 < offset


def test_first_wrapping_page_is_where_the_report_says() -> None:
    """Page 2066 at a stride of 1039680 bytes is the first above 2^31."""
    plan = OPERATION.plan(SCALES["page 2066 of a packed pool"])
    begin = int(OPERATION.expect(plan).footprint("src").may_read.begin[0])
    assert begin == 2066 * 1039680
    assert begin - 1039680 < 2**31 < begin


def test_closeness_grows_towards_the_boundary() -> None:
    """The figure for Hypothesis' target rises as rows come nearer to 2^31."""
    figures = []
    for row in (10, 10_000, 900_000, 932_000, 932_067):
        near = case({**ROW, "num_tokens": row + 1, "dst_rows": row + 1}, (row, row + 1))
        figures.append(OPERATION.expect(OPERATION.plan(near)).counters["destination_closeness"])
    assert figures == sorted(figures)
    assert figures[-1] > figures[0] + 10


@pytest.mark.parametrize("pages", [1, 2, 7, 64, 4096, 65521])
def test_permuted_table_is_a_permutation(pages: int) -> None:
    """As many entries as pages name each page once."""
    sizes = {
        "num_pages": pages,
        "table_width": pages,
        "page_size_tokens": 1,
        "num_tokens": pages,
        "dst_rows": pages,
        "page_stride_bytes": 1,
        "slot_stride_bytes": 1,
        "entry_bytes": 1,
        "element_bytes": 1,
        "dst_row_stride_bytes": 1,
    }
    plan = OPERATION.plan(case(sizes, (0, pages), Values("permuted", {"seed": 11})))
    ids = plan.buffers["block_table"].image.values.view(np.int32).ravel()
    assert sorted(ids.tolist()) == list(range(pages))


@pytest.mark.parametrize(
    ("table", "ids"),
    [
        (Values("identity"), [0, 1, 2, 3, 4, 0]),
        (Values("reversed"), [4, 3, 2, 1, 0, 4]),
        (Values("shared"), [0, 1, 2, 0, 1, 2]),
        (Values.literal(9, 8, 7, 6, 5, 4), [9, 8, 7, 6, 5, 4]),
        (Values("identity", edits={1: -1, 5: 77}), [0, -1, 2, 3, 4, 77]),
    ],
    ids=lambda table: table.recipe if isinstance(table, Values) else "",
)
def test_table_recipes(table: Values, ids: list[int]) -> None:
    """Each recipe gives the pages it says, row by row, modulo the pool."""
    sizes = {
        "num_requests": 2,
        "num_pages": 5,
        "table_width": 3,
        "table_row_stride": 3,
        "page_size_tokens": 1,
        "num_tokens": 6,
        "dst_rows": 6,
    }
    plan = OPERATION.plan(case(sizes, (0, 3, 6), table))
    image = plan.buffers["block_table"].image
    assert image.offsets.tolist() == list(range(0, 24, 4))
    assert image.values.view(np.int32).ravel().tolist() == ids


@pytest.mark.parametrize(
    ("stride", "ids"), [(0, [3, 4, 5]), (1, [0, 3, 4, 5]), (2, [0, 1, 3, 4, 5])]
)
def test_later_table_rows_overwrite_earlier_ones(stride: int, ids: list[int]) -> None:
    """Rows closer than their width overlap, as they do in memory."""
    sizes = {
        "num_requests": 2,
        "num_pages": 6,
        "table_width": 3,
        "table_row_stride": stride,
        "page_size_tokens": 1,
        "num_tokens": 6,
        "dst_rows": 6,
    }
    plan = OPERATION.plan(case(sizes, (0, 3, 6)))
    assert plan.buffers["block_table"].image.values.view(np.int32).ravel().tolist() == ids


def test_unmapped_table_entries_stay_poison() -> None:
    """A column that no row maps is not in the image, whatever its recipe says."""
    plan = OPERATION.plan(case({"table_width": 9}, (0, 4)))
    table = plan.buffers["block_table"]
    assert table.image.offsets.tolist() == [0]
    readable = OPERATION.expect(plan).footprint("block_table").may_read
    raw = contents.initial_bytes(table, readable, 0, 0, 0, table.memory_bytes)
    assert raw.view(np.int32).tolist() == [0] + [2**31 - 1] * 8


def test_empty_launch_may_touch_nothing() -> None:
    """Without rows or without requests not even a start is readable."""
    for sizes, starts in (({"num_tokens": 0}, (0, 0)), ({"num_requests": 0}, ())):
        expectation = OPERATION.expect(OPERATION.plan(case(sizes, starts)))
        assert not expectation.footprints
        assert expectation.case_class is CaseClass.IN_CONTRACT
