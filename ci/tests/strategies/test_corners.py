"""Discovery: generated cases reach every named corner."""

from __future__ import annotations

from collections import Counter

import pytest

from pagefuzz.strategies.registry import corners_for

OPERATION = "cp_gather_cache"


def reached(found) -> Counter[str]:
    """Corner -> how many cases were in it."""
    corners = corners_for(OPERATION)
    counted = Counter(dict.fromkeys(corners, 0))
    for one in found:
        counted.update(name for name, holds in corners.items() if holds(one.plan, one.expectation))
    return counted


def unreached(counted: Counter[str]) -> list[str]:
    return sorted(name for name, count in counted.items() if count == 0)


def test_every_corner_is_reached(draw):
    """4,000 cases are enough for all of them."""
    counted = reached(draw(4000))
    assert unreached(counted) == []


def test_no_corner_is_trivial(draw):
    """The simplest case is in contract and in few corners; no corner holds of every case."""
    counted = reached(draw(4000))
    assert max(counted.values()) < 4000
    simplest = reached(draw(4000)[:1])
    assert simplest["class: in contract"] == 1
    assert not [name for name in simplest if simplest[name] and name.startswith("hostile")]


def test_corners_are_of_the_class_they_name(draw):
    """A hostile corner holds of no case in contract, a boundary corner of no refused one."""
    for one in draw(4000):
        held = reached([one])
        kinds = {name.split(":")[0] for name, count in held.items() if count}
        if held["class: in contract"]:
            assert "hostile" not in kinds
        if held["class: refused"]:
            assert "boundary" not in kinds
        else:
            assert "refused" not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("seed_value", [1, 2, 3])
def test_every_corner_has_its_odds(draw, seed_value):
    """Each is reached about once in 1,500 cases or more often, whatever the seed (6 expected of
    the rarest, give or take two or three)."""
    counted = reached(draw(9000, seed_value=seed_value))
    assert [name for name, count in counted.items() if count < 4] == []
