"""Launchers refuse what the contract refuses: a status, one sentence, and nothing touched."""

from __future__ import annotations

import numpy as np
import pytest
from ci.tests.kernels.conftest import (
    CP_GATHER_CACHE,
    F16,
    I32,
    I64,
    OK,
    REFUSED,
    U8,
    U16,
    U32,
    Case,
    Launch,
    load,
)

SCHEDULES = ("page", "token", "page-as-merged")


@pytest.fixture(scope="module")
def loaded():
    return load(CP_GATHER_CACHE)


def sound(loaded, **changes):
    """Two requests of three tokens on pages of two, with every optional buffer."""
    case = Case(
        starts=[0, 3, 6],
        table=[[0, 1, 2], [3, 1, 0]],
        num_tokens=6,
        page_size_tokens=2,
        num_pages=4,
        entry_bytes=8,
        element_bytes=2,
        seq_starts=[1, 2],
        **changes,
    )
    return Launch(loaded, case)


def shifted(name, by):
    def change(launch):
        field = getattr(launch.args, name)
        address = int(launch.object.ffi.cast("uintptr_t", field.data)) + by
        field.data = launch.object.ffi.cast("void *", address)

    return change


def over(name, other, at):
    """`name` begins `at` bytes past the base of `other`."""

    def change(launch):
        ffi = launch.object.ffi
        address = int(ffi.cast("uintptr_t", getattr(launch.args, other).data)) + at
        getattr(launch.args, name).data = ffi.cast("void *", address)

    return change


def setting(**values):
    """Sets arguments; `src__rank=2` is src.rank."""

    def change(launch):
        for name, value in values.items():
            target, _, field = name.rpartition("__")
            setattr(getattr(launch.args, target) if target else launch.args, field, value)

    return change


def null(name):
    def change(launch):
        getattr(launch.args, name).data = launch.object.ffi.NULL

    return change


REFUSALS = [
    (setting(struct_bytes=8), "struct_bytes is 8, but the args struct of this object has"),
    (setting(element_bytes=3), "element_bytes is 3, it must be 1, 2, 4 or 8"),
    (setting(element_bytes=0), "element_bytes is 0"),
    (setting(element_bytes=16), "element_bytes is 16"),
    (setting(entry_bytes=0), "entry_bytes is 0, it must be a positive multiple of element_bytes"),
    (setting(entry_bytes=7), "entry_bytes is 7"),
    (setting(entry_bytes=-8), "entry_bytes is -8"),
    (setting(page_size_tokens=0), "page_size_tokens is 0, it must lie in 1..4096"),
    (setting(page_size_tokens=4097), "page_size_tokens is 4097"),
    (setting(num_requests=-1), "num_requests is -1, it must lie in 0..2147483647"),
    (setting(num_requests=2**31), "num_requests is 2147483648"),
    (setting(num_tokens=-1), "num_tokens is -1"),
    (setting(num_tokens=2**31, dst_rows=2**31), "num_tokens is 2147483648"),
    (setting(num_pages=-1), "num_pages is -1"),
    (setting(num_pages=2**31), "num_pages is 2147483648"),
    (setting(table_width=-1), "table_width is -1"),
    (setting(table_width=2**31), "table_width is 2147483648"),
    (setting(has_terminal=2), "has_terminal is 2, it must lie in 0..1"),
    (setting(has_terminal=-1), "has_terminal is -1"),
    (setting(dst_rows=5), "num_tokens is 6, dst has only 5 rows"),
    (setting(src__rank=2), "src has rank 2, it must have rank 3"),
    (setting(dst__rank=3), "dst has rank 3, it must have rank 2"),
    (setting(block_table__rank=1), "block_table has rank 1, it must have rank 2"),
    (setting(starts__rank=2), "starts has rank 2"),
    (setting(seq_starts__rank=0), "seq_starts has rank 0"),
    (setting(counts__rank=2), "counts has rank 2"),
    (setting(src__dtype=U32, dst__dtype=U32), "src is u32 (code 3), not a dtype of 2 bytes"),
    (setting(src__dtype=99, dst__dtype=99), "src is an unknown dtype (code 99)"),
    (setting(dst__dtype=F16), "dst is f16 (code 7), it must be u16"),
    (setting(block_table__dtype=I64), "block_table is i64 (code 6), it must be i32"),
    (setting(starts__dtype=U32), "starts is u32 (code 3), it must be i32"),
    (setting(seq_starts__dtype=I64), "seq_starts is i64"),
    (setting(counts__dtype=I32), "counts is i32 (code 5), it must be i64"),
    (setting(table_row_stride=-1), "table_row_stride is -1, it must not be negative"),
    (setting(page_stride_bytes=-16), "page_stride_bytes is -16, it must not be negative"),
    (setting(slot_stride_bytes=-8), "slot_stride_bytes is -8"),
    (setting(dst_row_stride_bytes=-8), "dst_row_stride_bytes is -8"),
    (setting(page_stride_bytes=17), "page_stride_bytes is 17, it must be a multiple of 2"),
    (setting(slot_stride_bytes=9), "slot_stride_bytes is 9"),
    (setting(dst_row_stride_bytes=9), "dst_row_stride_bytes is 9"),
    (setting(dst_row_stride_bytes=6), "dst_row_stride_bytes is 6: rows of 8 bytes would overlap"),
    (setting(page_stride_bytes=2**62), "sizes and strides of src need more bytes than an int64"),
    (setting(slot_stride_bytes=2**63 - 2), "sizes and strides of src need more bytes"),
    (setting(dst_row_stride_bytes=2**62), "sizes and strides of dst need more bytes"),
    (setting(table_row_stride=2**61), "sizes and strides of block_table need more bytes"),
    (setting(src__extent_bytes=63), "src has an extent of 63 bytes, its sizes and strides need 64"),
    (setting(src__extent_bytes=-1), "src has an extent of -1 bytes"),
    (setting(dst__extent_bytes=47), "dst has an extent of 47 bytes, its sizes and strides need 48"),
    (setting(block_table__extent_bytes=23), "block_table has an extent of 23 bytes"),
    (setting(starts__extent_bytes=11), "starts has an extent of 11 bytes"),
    (setting(seq_starts__extent_bytes=7), "seq_starts has an extent of 7 bytes"),
    (setting(counts__extent_bytes=15), "counts has an extent of 15 bytes"),
    (null("src"), "src is a null pointer with an extent of 64 bytes"),
    (null("dst"), "dst is a null pointer"),
    (null("block_table"), "block_table is a null pointer"),
    (null("starts"), "starts is a null pointer"),
    (null("seq_starts"), "seq_starts is a null pointer"),
    (null("counts"), "counts is a null pointer"),
    (shifted("src", 1), "the address of src is not a multiple of 2 bytes"),
    (shifted("dst", 1), "the address of dst is not a multiple of 2 bytes"),
    (shifted("block_table", 2), "the address of block_table is not a multiple of 4 bytes"),
    (shifted("starts", 1), "the address of starts is not a multiple of 4 bytes"),
    (shifted("seq_starts", 3), "the address of seq_starts is not a multiple of 4 bytes"),
    (shifted("counts", 4), "the address of counts is not a multiple of 8 bytes"),
    (over("dst", "src", 62), "the memory of dst overlaps that of src"),
    (over("dst", "src", -46), "the memory of dst overlaps that of src"),
    (over("src", "dst", 0), "the memory of dst overlaps that of src"),
    (over("block_table", "dst", 44), "the memory of dst overlaps that of block_table"),
    (over("starts", "dst", -8), "the memory of dst overlaps that of starts"),
    (over("seq_starts", "dst", 16), "the memory of dst overlaps that of seq_starts"),
    (over("counts", "dst", 40), "the memory of dst overlaps that of counts"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("change", "sentence"), REFUSALS, ids=[s[:48] for _, s in REFUSALS])
def test_each_reason_is_refused_in_one_sentence(loaded, schedule, change, sentence):
    """Nothing is launched, counted or written."""
    launch = sound(loaded)
    change(launch)
    before = launch.dst.copy()
    loaded.begin({})
    assert launch.run(schedule) == REFUSED
    assert sentence in launch.text
    assert (launch.dst == before).all()
    assert launch.counts.tolist() == [0, 0]
    assert loaded.end().accesses == 0


ACCEPTED = [
    setting(),
    setting(page_size_tokens=1, slot_stride_bytes=-3),
    setting(num_requests=1, table_row_stride=-(2**62), starts__extent_bytes=8),
    setting(num_pages=1, page_stride_bytes=-1),
    setting(num_tokens=1, dst_rows=1, dst_row_stride_bytes=-7),
    setting(num_tokens=0, dst__extent_bytes=0),
    setting(num_requests=0, starts__extent_bytes=0, block_table__extent_bytes=0),
    setting(num_pages=0, src__extent_bytes=0),
    setting(table_width=0, block_table__extent_bytes=0),
    setting(table_row_stride=0, block_table__extent_bytes=12),
    setting(has_terminal=0, starts__extent_bytes=8),
    setting(seq_starts__data=0, seq_starts__extent_bytes=0, seq_starts__dtype=77),
    setting(counts__data=0, counts__extent_bytes=0, counts__rank=9),
    setting(src__dtype=F16, dst__dtype=F16),
    setting(dst__extent_bytes=49),
    over("src", "dst", 48),
    over("dst", "src", 64),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("change", ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_is_just_legal_is_accepted(loaded, schedule, change):
    """Ignored strides, absent optionals, empty sizes, neighbours that touch."""
    room = 64 * 3
    backing = np.zeros(room * 2, np.uint8)
    launch = sound(loaded)
    start = -backing.ctypes.data % 64
    launch.args.src.data = loaded.ffi.cast("void *", backing.ctypes.data + start)
    launch.args.dst.data = loaded.ffi.cast("void *", backing.ctypes.data + start + 128)
    for name in ("seq_starts", "counts"):
        getattr(launch.args, name).rank = 1
    try:
        change(launch)
    except TypeError:  # a null pointer
        name = "seq_starts" if change is ACCEPTED[11] else "counts"
        null(name)(launch)
        field = getattr(launch.args, name)
        field.extent_bytes, field.dtype, field.rank = 0, 77, 9
    loaded.begin({})  # every access is suppressed: only the answer counts here
    assert launch.run(schedule) == OK, launch.text
    assert launch.text == ""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("empty", [{"num_tokens": 0}, {"num_requests": 0}])
def test_nothing_to_do_reads_nothing(loaded, schedule, empty):
    """N == 0 or R == 0 succeeds without an access, but only after the refusals."""
    launch = sound(loaded)
    setting(**empty)(launch)
    loaded.begin({})
    assert launch.run(schedule) == OK
    assert loaded.end().accesses == 0
    setting(element_bytes=3)(launch)
    assert launch.run(schedule) == REFUSED


def test_a_message_is_optional(loaded):
    """A caller that passes none still gets the status."""
    launch = sound(loaded)
    setting(has_terminal=2)(launch)
    assert loaded.lib.pf_cp_gather_cache_page(launch.args, loaded.ffi.NULL) == REFUSED


@pytest.mark.parametrize(("element_bytes", "dtype"), [(1, U8), (2, U16), (4, U32)])
def test_element_size_and_dtype_go_together(loaded, element_bytes, dtype):
    """The same dtype code is accepted for its own element size only."""
    for size in (1, 2, 4):
        launch = sound(loaded)
        setting(element_bytes=size, src__dtype=dtype, dst__dtype=dtype)(launch)
        loaded.begin({})
        assert launch.run("page") == (OK if size == element_bytes else REFUSED)
