"""The parts that cases are put together from."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis.errors import InvalidArgument

from pagefuzz.oracles.case import BASE_ALIGNMENT_BYTES
from pagefuzz.strategies.batches import SHAPES, Batch, batches
from pagefuzz.strategies.boundaries import Boundary, Crossing, boundaries_within, crossings
from pagefuzz.strategies.destinations import Destination, destinations
from pagefuzz.strategies.hostility import Edit, IndexValues, edits
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.rows import Span, spans
from pagefuzz.strategies.sequences import SequenceStarts, sequence_starts
from pagefuzz.strategies.strides import (
    WIDE_ENTRY_BYTES,
    CacheStrides,
    cache_strides,
    element_sizes,
    entry_sizes,
    page_sizes,
)
from pagefuzz.strategies.tables import BlockTable, block_tables

FEW = settings(
    max_examples=150, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
ALIGNMENTS = {"src": 4, "dst": 4, "block_table": 4, "counts": 8}


@pytest.mark.parametrize(
    ("strategy", "simplest"),
    [
        (batches(), Batch("one", 1, 1, "free")),
        (sequence_starts(), SequenceStarts("absent")),
        (block_tables(), BlockTable()),
        (cache_strides(), CacheStrides()),
        (destinations(), Destination()),
        (page_sizes(), 1),
        (entry_sizes(), 1),
        (element_sizes(), 1),
        (placements(ALIGNMENTS, "dst"), {}),
        (edits(), (Edit("past the table", 0, 0),)),
        (crossings({"dst row": 1, "src page": 1}), Crossing("dst row", 0, False, 0)),
    ],
)
def test_shrinks_towards_what_the_docstring_says(strategy, simplest):
    """With nothing to satisfy, each strategy gives its simplest value."""
    assert find(strategy, lambda value: True) == simplest


@given(batches())
@FEW
def test_batches_have_as_many_lengths_as_requests(batch):
    """No length is negative, and the batch stays within its budget of rows."""
    for page_size in (1, 7, 64):
        lengths = batch.lengths(page_size, 1000)
        assert len(lengths) == batch.request_count
        assert all(length >= 0 for length in lengths)
        if batch.shape != "whole tables":  # as many pages as it says, whatever they hold
            # Each of several requests may be rounded up to a page, and one row past it.
            assert sum(lengths) <= 1000 + (page_size + 1) * batch.request_count


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("empty")])
def test_one_request_is_empty_where_the_shape_says(shape):
    """The first, a middle or the last request has no rows, the others have some."""
    lengths = Batch(shape, 4, 5, "free").lengths(4, 1000)
    at = {"empty first": 0, "empty middle": 2, "empty last": 3}[shape]
    assert [index for index, length in enumerate(lengths) if length == 0] == [at]
    assert 5 in lengths


@pytest.mark.parametrize(
    ("snap", "length"), [("free", 5), ("whole pages", 8), ("one past", 9), ("one short", 7)]
)
def test_lengths_snap_to_pages(snap, length):
    """The longest request ends on a page, a row past it or a row short of it."""
    assert Batch("one", 1, 5, snap).lengths(4, 1000) == [length]


@pytest.mark.parametrize(("tail", "length"), [("one", 61), ("one short", 63), ("full", 64)])
def test_whole_tables_have_exactly_their_pages(tail, length):
    """16 pages of 4 tokens, the last with one token, one short or full; the next request has
    others."""
    lengths = Batch("whole tables", 2, 1, "free", 16, tail).lengths(4, 10)
    assert lengths[0] == length
    assert -(-lengths[1] // 4) == 63


def test_sequences_reach_the_end_of_a_page():
    """A request that is to end on a page does, whatever its length."""
    lengths = [1, 4, 6, 0]
    values = SequenceStarts("to page end", 2).values(lengths, 4, 1000)
    assert values == [7, 4, 6, 4]
    assert all((start + length) % 4 == 0 for start, length in zip(values, lengths, strict=True))


def test_an_absent_vector_has_no_values():
    """Absent and zero are different things."""
    assert SequenceStarts("absent").values([1, 2], 4, 100) is None
    assert SequenceStarts("zero").values([1, 2], 4, 100) == [0, 0]


@given(cache_strides(), page_sizes(), element_sizes())
@FEW
def test_strides_are_whole_elements(strides, page_size, element_bytes):
    """No layout has a negative stride or one that splits an element."""
    page, slot = strides.resolve(24, element_bytes, page_size, 3)
    assert page >= 0 <= slot
    assert page % element_bytes == 0 == slot % element_bytes


@given(page_sizes(), entry_sizes())
@FEW
def test_sizes_keep_their_bounds(page_size, entry_bytes):
    """Page and entry sizes lie where their docstrings say."""
    assert 1 <= page_size <= 4096
    assert 1 <= entry_bytes <= 5000 or entry_bytes in WIDE_ENTRY_BYTES


@given(placements(ALIGNMENTS, "dst"))
@FEW
def test_placements_keep_their_alignment(placed):
    """A base that is off is off by less than 16 bytes, in multiples of its alignment."""
    for name, placement in placed.items():
        assert placement.offset_bytes % ALIGNMENTS[name] == 0
        assert placement.offset_bytes < 16 < BASE_ALIGNMENT_BYTES
        assert placement.over is None


@pytest.mark.parametrize("step", range(1, 16))
def test_every_offset_of_a_byte_buffer_is_reached(step):
    """Buffers of bytes lie at each of 1..15 bytes past alignment."""
    found = find(
        placements({"dst": 1}, "dst"),
        lambda placed: "dst" in placed and placed["dst"].offset_bytes == step,
        settings=settings(max_examples=2000, database=None),
    )
    assert found["dst"].offset_bytes == step


def test_an_unknown_destination_is_refused():
    """The name is part of the message."""
    with pytest.raises(InvalidArgument, match="destination='rows'"):
        find(placements({"dst": 1}, "rows"), lambda placed: True)


def test_edits_are_one_to_three():
    """Any other number is refused with its value."""
    with pytest.raises(InvalidArgument, match="max_count=4"):
        find(edits(max_count=4), lambda found: True)


def test_a_boundary_has_two_sides():
    """The first index at or past a boundary, and strides that put an index on either side."""
    boundary = Boundary(2**31, 1)
    assert boundary.first_index(2304) == 932_068
    assert (boundary.first_index(2304) - 1) * 2304 < 2**31 <= 932_068 * 2304
    stride = boundary.stride_bytes(3, 8)
    assert 3 * stride >= 2**31 > 3 * (stride - 8)
    assert Boundary(2**32, 2).first_index(32_768) == 262_144


def test_boundaries_fit_into_the_limit():
    """Nearest first; an element of one byte has no boundaries of its own."""
    assert boundaries_within(2**31 - 1, 8) == ()
    assert boundaries_within(2**33, 1) == (Boundary(2**31, 1), Boundary(2**32, 1))
    assert [one.offset_bytes for one in boundaries_within(2**36, 8)] == [
        2**31,
        2**32,
        2**34,
        2**35,
    ]


def test_spans_follow_the_row_mapping():
    """Clamped rows, tokens from unclamped starts, the last request up to num_tokens."""
    found = spans([-2, 3, 3, 9], [5, 0, 1], 3, 7)
    assert found == [Span(0, 0, 3, 7), Span(2, 3, 4, 1)]
    assert spans([0, 2], None, 2, 5) == [Span(0, 0, 2, 0), Span(1, 2, 3, 0)]
    assert list(found[0].columns(4)) == [1, 2]


def test_cells_of_overlapping_rows_belong_to_the_later_one():
    """With rows one element apart, column 1 of row 0 is column 0 of row 1."""
    state = IndexValues(3, 0, 1, [0, 0, 0], None, table_width=2, table_row_stride=1)
    assert state.cell(0, 1) == 1 * 2 + 0
    assert state.cell(2, 1) == 2 * 2 + 1
    state.table_row_stride = 0
    assert state.cell(0, 1) == state.cell(2, 1) == 2 * 2 + 1
