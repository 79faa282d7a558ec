"""Interval sets obey the laws of sets of integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefuzz.oracles.intervals import IntervalSet

pairs = st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 9)), max_size=6)


def interval_set(items: list[tuple[int, int]]) -> IntervalSet:
    return IntervalSet([b for b, _ in items], [b + size for b, size in items])


def integers(items: list[tuple[int, int]]) -> set[int]:
    return {x for b, size in items for x in range(b, b + size)}


def members(intervals: IntervalSet) -> set[int]:
    return set(intervals.offsets().tolist())


@given(pairs)
def test_holds_what_it_was_given_in_normal_form(items: list[tuple[int, int]]) -> None:
    """Runs come out sorted, disjoint, not adjacent, not empty, and cover the same offsets."""
    made = interval_set(items)
    assert members(made) == integers(items)
    assert made.total_bytes == len(integers(items))
    assert bool(made) == bool(integers(items))
    assert all(made.begin < made.end)
    assert all(made.end[:-1] < made.begin[1:])


@given(pairs, pairs)
def test_union_intersection_difference(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    """The three operations are those of sets, and equality is that of their members."""
    a, b = interval_set(left), interval_set(right)
    assert members(a.union(b)) == integers(left) | integers(right)
    assert members(a.intersection(b)) == integers(left) & integers(right)
    assert members(a.without(b)) == integers(left) - integers(right)
    assert (a == b) == (integers(left) == integers(right))


@given(pairs, st.integers(-25, 25), st.integers(0, 20))
def test_clip_mask_and_containment(items: list[tuple[int, int]], begin: int, size: int) -> None:
    """A window of a set holds the members that lie in it."""
    made, window = interval_set(items), set(range(begin, begin + size))
    assert members(made.clipped(begin, begin + size)) == integers(items) & window
    mask = made.mask(begin, begin + size)
    assert {begin + i for i in mask.nonzero()[0].tolist()} == integers(items) & window
    assert made.contains(begin, begin + size) == (window <= integers(items))


def test_widened_intervals_merge() -> None:
    """A margin joins intervals that come to touch."""
    assert IntervalSet([0, 10], [4, 12]).widened(3) == IntervalSet([-3], [15])


def test_end_before_begin_is_an_error() -> None:
    """An interval that ends before it begins is a mistake, not an empty one."""
    with pytest.raises(ValueError, match="none before its begin"):
        IntervalSet([4], [3])


def test_intervals_come_as_pairs_of_int():
    """Merged and ascending; plain numbers, as JSON takes them."""
    pairs = list(IntervalSet([30, 2**40, 10, 15], [31, 2**40 + 1, 15, 20]))
    assert pairs == [(10, 20), (30, 31), (2**40, 2**40 + 1)]
    assert {type(number) for pair in pairs for number in pair} == {int}
    assert list(IntervalSet()) == []
