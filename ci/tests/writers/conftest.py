"""Cases of the writers, drawn once and shared by the tests that only look at them."""

from __future__ import annotations

from functools import cache

from hypothesis import HealthCheck, Phase, given, seed, settings

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.registry import operation
from pagefuzz.strategies.registry import cases_for

Drawn = tuple[Case, Plan, Expectation]


@cache
def drawn(name: str, count: int, *, hostile: bool = True, refused: bool = True) -> list[Drawn]:
    """`count` cases of an operation, what they are laid out as and what is expected of them."""
    found: list[Drawn] = []
    asked = operation(name)

    @seed(0)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases_for(name, hostile=hostile, refused=refused))
    def collect(case: Case) -> None:
        plan = asked.plan(case)
        found.append((case, plan, asked.expect(plan)))

    collect()
    return found
