"""Cases drawn once and shared by the tests that only look at them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.control import current_build_context
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.registry import operation
from pagefuzz.strategies.registry import cases_for

OPERATION = "cp_gather_cache"
Draw = Callable[..., list["Drawn"]]


@dataclass(frozen=True)
class Drawn:
    """A case, what the oracle says of it, and how many draws it took."""

    case: Case
    plan: Plan
    expectation: Expectation
    draws: int


def drawn_from(
    strategy: SearchStrategy[Case], count: int, seed_value: int, name: str = OPERATION
) -> list[Drawn]:
    """`count` generated cases of the operation `name`; the first is the simplest one."""
    found: list[Drawn] = []
    asked = operation(name)

    @seed(seed_value)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: Case) -> None:
        draws = len(current_build_context().data.choices)
        plan = asked.plan(case)
        found.append(Drawn(case, plan, asked.expect(plan), draws))

    collect()
    return found


@cache
def _draw(
    count: int, hostile: bool, refused: bool, limit_bytes: int | None, seed_value: int
) -> list[Drawn]:
    limit = {} if limit_bytes is None else {"limit_bytes": limit_bytes}
    strategy = cases_for(OPERATION, hostile=hostile, refused=refused, **limit)
    return drawn_from(strategy, count, seed_value)


@pytest.fixture(scope="session")
def draw() -> Draw:
    """Draws cases of every class unless told otherwise; equal calls share their cases."""

    def drawn(
        count: int,
        *,
        hostile: bool = True,
        refused: bool = True,
        limit_bytes: int | None = None,
        seed_value: int = 0,
    ) -> list[Drawn]:
        return _draw(count, hostile, refused, limit_bytes, seed_value)

    return drawn


@pytest.fixture
def generator() -> random.Random:
    """The randomness of a search."""
    return random.Random(0)
