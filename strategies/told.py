"""What an oracle says of a case, in the words that corners are written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.verdict import CaseClass


class Told:
    """The base of what corners look at."""

    def __init__(self, plan: Plan, expectation: Expectation) -> None:
        self.plan, self.expectation, self.sizes = plan, expectation, plan.arguments
        self.refused = expectation.case_class is CaseClass.REFUSED
        self.hostile = expectation.case_class is CaseClass.HOSTILE


Kind = TypeVar("Kind", bound=Told)
_memo: list[Told] = []


def _about(kind: type[Kind], plan: Plan, expectation: Expectation) -> Kind:
    """That of the plan last asked about is kept: corners are asked one after another."""
    kept = _memo[0] if _memo else None
    if isinstance(kept, kind) and kept.plan is plan:
        return kept
    found = kind(plan, expectation)
    _memo[:] = [found]
    return found


def corners_of(
    kind: type[Kind], predicates: Mapping[str, Callable[[Kind], bool]]
) -> dict[str, Callable[[Plan, Expectation], bool]]:
    """Name -> whether a case is in that corner."""

    def corner(predicate: Callable[[Kind], bool]) -> Callable[[Plan, Expectation], bool]:
        return lambda plan, expectation: bool(predicate(_about(kind, plan, expectation)))

    return {name: corner(predicate) for name, predicate in predicates.items()}


def refused_for(*reasons: str) -> dict[str, Callable[[Told], bool]]:
    """The corner of each reason for a refusal."""

    def corner(reason: str) -> Callable[[Told], bool]:
        return lambda told: any(one.reason == reason for one in told.expectation.refusals)

    return {f"refused: {reason}": corner(reason) for reason in reasons}
