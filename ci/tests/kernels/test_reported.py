"""The faults that were reported against the published page schedule, as the objects record them."""

from __future__ import annotations

import re

import pytest
from ci.tests.kernels.conftest import (
    BLOCK_TABLE,
    COUNTS,
    CP_GATHER_CACHE,
    DST,
    OK,
    SEQ_STARTS,
    SRC,
    STARTS,
    Case,
    Launch,
    load,
    sparse,
    wanted,
)

from pagefuzz.harness.build import KERNELS

MULTIPLY = 2
SOURCE = CP_GATHER_CACHE.read_text().splitlines()

PAST_THE_ROW = Case(
    starts=[0, 1],
    table=[[0]],
    num_tokens=1,
    page_size_tokens=1,
    num_pages=1,
    entry_bytes=1,
    seq_starts=[1],
)


def line_of(pattern: str) -> int:
    """The one line of the source that matches."""
    (number,) = (n for n, line in enumerate(SOURCE, 1) if re.search(pattern, line))
    return number


def far_row(row: int, entry_bytes: int, loaded) -> Launch:
    """One token whose row is `row`, in a destination of that many rows that takes no memory."""
    case = Case(
        starts=[row, row + 1],
        table=[[0]],
        num_tokens=1,
        page_size_tokens=1,
        num_pages=1,
        entry_bytes=entry_bytes,
    )
    launch = Launch(loaded, case)
    launch.args.num_tokens = launch.args.dst_rows = row + 1
    launch.replace("dst", sparse((row + 1) * entry_bytes))
    row_bytes = (row * entry_bytes, (row + 1) * entry_bytes)
    counters = [(0, 16)]
    loaded.begin(
        {
            SRC: ([(0, entry_bytes)], []),
            DST: ([], [row_bytes]),
            BLOCK_TABLE: ([(0, 4)], []),
            STARTS: ([(0, 8)], []),
            COUNTS: (counters, counters),
        }
    )
    return launch


def test_the_merged_form_reads_the_table_past_the_row():
    """Report 1: R=1 BS=1 W=1 starts=[0, 1] seq_starts=[1] reads block_table[1]."""
    loaded = load(CP_GATHER_CACHE)
    launch = Launch(loaded, PAST_THE_ROW)
    loaded.begin(wanted(launch).permissions)
    assert launch.run("page-as-merged") == OK
    fault, *_ = loaded.end().access_faults
    assert (fault.sequence, fault.buffer, fault.kind) == (1, BLOCK_TABLE, 0)
    assert (fault.offset_bytes, fault.size_bytes) == (4, 4)
    assert (fault.file, fault.block, fault.thread) == ("cp_gather_cache.cu", (0, 0, 0), (0, 0, 0))
    assert fault.line == line_of(r"task\.physical_page = g\.block_table\.load")


@pytest.mark.parametrize("schedule", ["page", "token"])
def test_the_contained_forms_skip_that_page(schedule):
    """The same case is one skipped page, and no access to the table."""
    loaded = load(CP_GATHER_CACHE)
    launch = Launch(loaded, PAST_THE_ROW)
    before = launch.dst.copy()
    loaded.begin(
        {STARTS: ([(0, 8)], []), SEQ_STARTS: ([(0, 4)], []), COUNTS: ([(0, 16)], [(0, 16)])}
    )
    assert launch.run(schedule) == OK
    assert loaded.end().access_faults == ()
    assert launch.counts.tolist() == [0, 1]
    assert (launch.dst == before).all()


@pytest.mark.parametrize(
    ("row", "entry_bytes"), [(932_068, 2304), (1_864_136, 1152), (3_728_271, 576)]
)
def test_the_merged_form_wraps_at_the_reported_row(row, entry_bytes):
    """Report 3: the first row whose byte offset does not fit int32, with both operands."""
    loaded = load(CP_GATHER_CACHE)
    launch = far_row(row, entry_bytes, loaded)
    assert launch.run("page-as-merged") == OK
    record = loaded.end()
    (fault,) = record.index_faults
    assert (fault.sequence, fault.operation, fault.bits, fault.is_signed) == (1, MULTIPLY, 32, 1)
    assert (fault.a, fault.b) == (row, entry_bytes)
    assert fault.result == row * entry_bytes - 2**32
    assert (fault.file, fault.line) == (
        "cp_gather_cache.cu",
        line_of(r"to = task\.row_begin \* pf::narrow"),
    )
    # It goes on with the wrapped value: a store below dst, suppressed.
    access = record.access_faults[0]
    assert (access.buffer, access.kind, access.sequence) == (DST, 1, 2)
    assert access.offset_bytes < 0
    # One row before, nothing wraps.
    launch = far_row(row - 1, entry_bytes, loaded)
    assert launch.run("page-as-merged") == OK
    record = loaded.end()
    assert (record.index_faults, record.access_faults) == ((), ())
    assert (launch.dst[(row - 1) * entry_bytes :] == launch.src).all()


@pytest.mark.parametrize("schedule", ["page", "token"])
def test_the_contained_forms_write_that_row(schedule):
    """64-bit arithmetic: no wrap, and the row is right."""
    loaded = load(CP_GATHER_CACHE)
    launch = far_row(932_068, 2304, loaded)
    assert launch.run(schedule) == OK
    record = loaded.end()
    assert (record.index_faults, record.access_faults) == ((), ())
    assert (launch.dst[932_068 * 2304 :] == launch.src).all()


def test_the_strided_path_of_the_merged_form_does_not_wrap():
    """As published, only the dense path multiplies in 32 bits."""
    loaded = load(CP_GATHER_CACHE)
    launch = far_row(932_068, 2304, loaded)
    stride = 2304 + 64
    launch.replace("dst", sparse(932_068 * stride + 2304))
    launch.args.dst_row_stride_bytes = stride
    loaded.begin({buffer: ([(0, 2**40)], [(0, 2**40)]) for buffer in range(6)})
    assert launch.run("page-as-merged") == OK
    assert loaded.end().index_faults == ()
    assert (launch.dst[932_068 * stride :] == launch.src).all()


def test_ubsan_names_the_same_wrap():
    """The second opinion: no index type, no runtime library, the same line and operands."""
    loaded = load(CP_GATHER_CACHE, "ubsan")
    launch = far_row(932_068, 2304, loaded)
    # The wrapped address lies below dst: there must be memory for it to land in.
    room = sparse(2**33)
    launch.replace("dst", room[2**32 : 2**32 + 932_069 * 2304])
    assert launch.run("page-as-merged") == OK, launch.text
    record = loaded.end()
    (fault,) = record.index_faults
    assert record.index_fault_count == 256  # each thread multiplies
    assert (fault.operation, fault.bits, fault.is_signed) == (MULTIPLY, 32, 1)
    assert {fault.a, fault.b} == {932_068, 2304}  # a compiler may swap the factors
    assert fault.result == 932_068 * 2304 - 2**32
    assert fault.line == line_of(r"to = task\.row_begin \* pf::narrow")
    landed = 2**32 + fault.result
    assert (room[landed : landed + 2304] == launch.src).all()


@pytest.mark.parametrize(
    "flags",
    [
        "release",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("ubsan", "checked,ubsan")),
        pytest.param("checked,coverage", marks=pytest.mark.slow),
    ],
)
def test_every_flavour_gathers_the_same(flags):
    """Flavours differ in what they see, not in what they do."""
    loaded = load(CP_GATHER_CACHE, flags)
    for schedule in ("page", "token", "page-as-merged"):
        case = Case(
            starts=[1, 6, 6, 13],
            table=[[3, 0, 1], [0, 0, 0], [2, 1, 0]],
            num_tokens=14,
            page_size_tokens=4,
            num_pages=4,
            entry_bytes=12,
            element_bytes=4,
            seq_starts=[3, 1, 0],
        )
        launch = Launch(loaded, case, seed=3)
        want = wanted(launch)
        if flags != "release":
            loaded.begin(want.permissions)
        assert launch.run(schedule) == OK
        assert (launch.dst == want.dst).all()
        if flags != "release":
            record = loaded.end()
            assert (record.index_fault_count, record.access_fault_count) == (0, 0)
            assert (record.accesses > 0) == ("checked" in flags)


def twin(name):
    """The checked object of a bundled twin."""
    return load(CP_GATHER_CACHE, twin=KERNELS / "twins" / f"{name}.toml")


@pytest.mark.slow
def test_the_twin_without_a_width_guard_reads_past_the_row():
    """As the merged form does, in the schedule that is otherwise correct."""
    loaded = twin("table-width-unguarded")
    launch = Launch(loaded, PAST_THE_ROW)
    loaded.begin(wanted(launch).permissions)
    assert launch.run("page") == OK
    fault = loaded.end().access_faults[0]
    assert (fault.buffer, fault.offset_bytes) == (BLOCK_TABLE, 4)


@pytest.mark.slow
def test_the_twin_that_takes_the_table_pitch_from_its_width_reads_another_column():
    """Report 14: the second row of a column slice."""
    loaded = twin("table-pitch-from-width")
    case = Case(
        starts=[0, 1, 2],
        table=[[0], [1]],
        num_tokens=2,
        page_size_tokens=1,
        num_pages=2,
        entry_bytes=1,
        table_row_stride=3,
    )
    launch = Launch(loaded, case)
    loaded.begin(wanted(launch).permissions)
    assert launch.run("page") == OK
    (fault,) = loaded.end().access_faults
    assert (fault.buffer, fault.offset_bytes) == (BLOCK_TABLE, 4)


@pytest.mark.slow
def test_the_twin_with_unsigned_page_offsets_wraps_at_two_to_the_32():
    """Report 11: a wrap that a sanitizer for signed overflow cannot see."""
    loaded = twin("page-offset-unsigned-32")
    for page, wraps in ((4095, False), (4096, True)):
        case = Case(
            starts=[0, 1],
            table=[[page]],
            num_tokens=1,
            page_size_tokens=1,
            num_pages=1,
            entry_bytes=16,
            page_stride_bytes=2**20,
        )
        launch = Launch(loaded, case)
        launch.args.num_pages = 4097
        launch.replace("src", sparse(4096 * 2**20 + 16))
        source = (page * 2**20, page * 2**20 + 16)
        loaded.begin({**wanted(launch).permissions, SRC: ([source], []), DST: ([], [(0, 16)])})
        assert launch.run("page") == OK
        record = loaded.end()
        assert [(f.a, f.b, f.is_signed) for f in record.index_faults] == [(4096, 2**20, 0)] * wraps
        assert [f.offset_bytes for f in record.access_faults] == [0] * wraps
