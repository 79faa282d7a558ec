"""What a runner is made of: a checker, a strategy, and cases to begin with.

A campaign names the module that supplies them, so that the tests can put another in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import Verdict

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from pagefuzz.harness.campaign.plan import Job


class CaseChecker(Protocol):
    """What a campaign needs of `harness.check.Checker`."""

    def check(self, case: Case) -> Verdict: ...


def open_checker(job: Job) -> AbstractContextManager[CaseChecker]:
    """Raises `CannotCheckError` if the subject cannot be built or the device is not there."""
    from pagefuzz.harness.check import Checker

    unit = job.shard.unit
    return Checker(unit.operation, unit.subject, job.options.backend, job.options.build)


def strategy(job: Job) -> SearchStrategy[Case]:
    from pagefuzz.strategies.registry import cases_for

    unit = job.shard.unit
    return cases_for(unit.operation, hostile=unit.hostile, refused=True)


def reported(job: Job) -> Sequence[Case]:
    """Cases that are run before any is drawn, by the first shard of a unit."""
    from pagefuzz.strategies.reported import examples_for

    return tuple(examples_for(job.shard.unit.operation))
