"""Weighted draws."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from pagefuzz.strategies.choices import skewed, weighted

QUIET = settings(
    max_examples=1000,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def shares(strategy: SearchStrategy[int]) -> Counter[int]:
    found: Counter[int] = Counter()

    @seed(0)
    @QUIET
    @given(strategy, weighted(dict.fromkeys(range(200), 1)))
    def count(value: int, _: int) -> None:
        found[value] += 1

    count()
    return found


def test_odds_follow_weights():
    """A weight of three is drawn about three times as often as a weight of one."""
    found = shares(weighted({7: 3, 8: 1}))
    assert 0.68 < found[7] / found.total() < 0.82


def test_parts_of_a_skewed_draw_have_their_odds():
    """A wide part does not crowd out a narrow one."""
    found = shares(skewed((60, (0,)), (40, range(1, 4097))))
    assert 0.5 < found[0] / found.total() < 0.7
    assert len(found) > 60
    assert max(found) > 3500


def test_shrinks_towards_the_first_value():
    """The first alternative is the simplest one, however likely."""
    assert find(weighted({5: 1, 3: 90}), lambda value: True) == 5
    assert find(skewed((1, (9,)), (90, range(3, 20))), lambda value: True) == 9


def test_shrinks_along_a_part():
    """A bound on a value is met by the smallest one that is."""
    assert find(skewed((10, (0,)), (90, range(1, 100))), lambda value: value >= 41) == 41


@pytest.mark.parametrize("weights", [{}, {1: 0}, {1: 3, 2: -1}])
def test_weights_must_be_positive(weights):
    """No keys and weights below one are refused with the argument's name and value."""
    with pytest.raises(InvalidArgument, match="weights="):
        weighted(weights)


@pytest.mark.parametrize("parts", [(), ((0, (1,)),), ((1, ()),)])
def test_parts_must_hold_something(parts):
    """Empty parts are refused with the argument's name and value."""
    with pytest.raises(InvalidArgument, match="parts="):
        skewed(*parts)
