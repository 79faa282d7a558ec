"""Shrink quality: what a failing case looks like when Hypothesis is done with it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, find, settings

from pagefuzz.oracles.registry import operation
from pagefuzz.strategies.corners import Facts
from pagefuzz.strategies.registry import cases_for, corners_for

OPERATION = "cp_gather_cache"
#: Calls of the predicate, those that found the first failing case included.
MOST_CALLS = 1500


def at(name):
    """Whether a case is in a corner."""
    holds = corners_for(OPERATION)[name]
    return lambda f: holds(f.plan, f.expectation)


def last_row_offset(f):
    """Bytes up to the last mapped row, on a dense destination."""
    return max((s.first_row + s.row_count - 1) * f.sizes["entry_bytes"] for s in f.spans)


def last_page_offset(f):
    """Bytes up to the last mapped page; -1 without one."""
    offsets = f.page_id * f.stride("page_stride_bytes", "num_pages")
    return int(offsets.max(initial=-1))


def minimal(generator, predicate):
    """The simplest case that has rows and satisfies `predicate` (on its facts)."""
    asked = operation(OPERATION)
    calls = 0

    def satisfies(case):
        nonlocal calls
        calls += 1
        plan = asked.plan(case)
        facts = Facts(plan, asked.expect(plan))
        return not facts.refused and bool(facts.spans) and bool(predicate(facts))

    case = find(
        cases_for(OPERATION, hostile=True, refused=True),
        satisfies,
        settings=settings(
            max_examples=4000,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
        random=generator,
    )
    assert calls <= MOST_CALLS
    return case


def values_of(case, buffer):
    return case.values[buffer].parameters["values"]


def assert_small(case):
    """At most 2 requests and 2 pages, dense, unplaced."""
    sizes = case.sizes
    assert sizes["num_requests"] <= 2
    assert sizes["table_width"] <= 2
    assert sizes["page_size_tokens"] == 1
    assert sizes["element_bytes"] == 1
    assert sizes["slot_stride_bytes"] == sizes["entry_bytes"] == sizes["dst_row_stride_bytes"]
    assert case.placements == {}
    assert case.overrides == {}
    assert case.seed == 0
    assert "counts" not in case.values


def test_a_table_over_read(generator):
    """R=1, BS=1, W=1, starts [0, 1], seq_starts [1], one byte an entry."""
    case = minimal(generator, at("hostile: column past the table"))
    assert_small(case)
    assert case.sizes["num_requests"] == case.sizes["table_width"] == case.sizes["num_tokens"] == 1
    assert case.sizes["entry_bytes"] == 1
    assert values_of(case, "starts") == (0, 1)
    assert values_of(case, "seq_starts") == (1,)


def test_an_int32_wrap_of_row_times_entry(generator):
    """One request of one row, just past the boundary, page size 1."""
    case = minimal(generator, lambda f: last_row_offset(f) >= 2**31)
    assert_small(case)
    first, end = values_of(case, "starts")
    assert end == first + 1 == case.sizes["num_tokens"]
    assert first * case.sizes["entry_bytes"] >= 2**31
    assert (first - 1) * case.sizes["entry_bytes"] < 2**31


def test_a_packed_pool_past_2_to_31(generator):
    """One request of one row whose page is the first to wrap: 2,066 of 1,039,680 bytes."""
    packed = at("cache: packed pool")
    case = minimal(generator, lambda f: packed(f) and last_page_offset(f) >= 2**31)
    assert_small(case)
    assert case.sizes["num_requests"] == case.sizes["table_width"] == case.sizes["num_tokens"] == 1
    assert case.sizes["page_stride_bytes"] == 1_039_680
    assert case.sizes["num_pages"] == 2067


@pytest.mark.parametrize(
    ("corner", "pages"),
    [
        ("hostile: page -1", 1),
        pytest.param("hostile: page -2^31", 1, marks=pytest.mark.slow),
        pytest.param("hostile: page num_pages", 2, marks=pytest.mark.slow),
    ],
)
def test_an_illegal_page_id(generator, corner, pages):
    """One request; one edit of the table, in its first columns."""
    case = minimal(generator, at(corner))
    assert_small(case)
    assert case.sizes["num_requests"] == 1
    assert case.sizes["table_width"] <= pages
    assert case.sizes["entry_bytes"] == 1
    assert len(case.values["block_table"].edits) == 1


@pytest.mark.slow
def test_decreasing_starts(generator):
    """Two requests of a row each."""
    case = minimal(generator, at("hostile: starts fall"))
    assert_small(case)
    assert case.sizes["num_requests"] == 2
    assert case.sizes["num_tokens"] <= 2
    assert case.sizes["entry_bytes"] == 1


@pytest.mark.slow
def test_a_negative_start(generator):
    """One request of one row that begins one row too early."""
    case = minimal(generator, at("hostile: first start negative"))
    assert_small(case)
    assert values_of(case, "starts") == (-1, 1)
    assert case.sizes["entry_bytes"] == 1


def test_a_negative_sequence_start(generator):
    """One request of one row at token -1."""
    case = minimal(generator, at("hostile: seq_start negative"))
    assert_small(case)
    assert values_of(case, "starts") == (0, 1)
    assert values_of(case, "seq_starts") == (-1,)


@pytest.mark.slow
def test_a_table_offset_past_2_to_31(generator):
    """Two requests of one row, as far apart as the boundary asks."""
    case = minimal(generator, at("boundary: table row past 2^31 bytes"))
    assert_small(case)
    assert case.sizes["table_row_stride"] == 2**29
    assert values_of(case, "starts") == (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [2, 5, 16, 64])
def test_the_smallest_page_size_that_shows_it(generator, page_size):
    """A fault that needs pages of some size shrinks to that size."""
    case = minimal(generator, lambda f: f.page_size >= page_size and len(f.columns) > 1)
    assert case.sizes["page_size_tokens"] == page_size
    assert case.sizes["num_requests"] <= 2
    assert case.sizes["table_width"] <= 2
    assert case.sizes["entry_bytes"] == 1


def test_an_empty_request_between_others(generator):
    """Three requests, or one more, of hardly any rows, page size 1."""
    case = minimal(generator, lambda f: f.sound and at("batch: middle empty")(f))
    assert case.sizes["page_size_tokens"] == case.sizes["entry_bytes"] == 1
    assert 3 <= case.sizes["num_requests"] <= 4
    assert case.sizes["num_tokens"] <= 4
