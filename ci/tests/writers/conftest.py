"""Cases of the writers, drawn once and shared by the tests that only look at them."""

from __future__ import annotations

from functools import cache

from ci.tests.strategies.conftest import drawn_from

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.strategies.registry import cases_for

Drawn = tuple[Case, Plan, Expectation]


@cache
def drawn(name: str, count: int, *, hostile: bool = True, refused: bool = True) -> list[Drawn]:
    """`count` cases of an operation, what they are laid out as and what is expected of them."""
    strategy = cases_for(name, hostile=hostile, refused=refused)
    found = drawn_from(strategy, count, 0, name)
    return [(one.case, one.plan, one.expectation) for one in found]
