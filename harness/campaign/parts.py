"""What a runner is made of: a checker, a strategy, and cases to begin with.

A campaign names the module that supplies them, so that the tests can put another in its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from pagefuzz.harness.campaign.again import Launches
from pagefuzz.harness.campaign.plan import running_case_file
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import CaseClass, Verdict

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from pagefuzz.harness.campaign.plan import Job


class CaseChecker(Launches, Protocol):
    """What a campaign needs of `harness.check.Checker`."""

    @property
    def memory(self) -> MemoryUse: ...

    def check(self, case: Case) -> Verdict: ...


@contextmanager
def open_checker(job: Job) -> Iterator[CaseChecker]:
    """Raises `CannotCheckError` if the subject cannot be built or the device is not there."""
    from pagefuzz.harness.check import Checker

    unit, options = job.shard.unit, job.options
    with Checker(
        unit.operation,
        unit.subject,
        options.backend,
        options.build,
        timeout_s=options.hang_after_s,
        journal=running_case_file(job, os.getpid()),
        isolate=options.isolate,
        gpu_memory_bytes=options.gpu_memory_bytes,
    ) as checker:
        checker.start()  # its seconds are not those of the first case
        yield checker


def strategy(job: Job) -> SearchStrategy[Case]:
    from pagefuzz.strategies.registry import cases_for

    unit = job.shard.unit
    return cases_for(unit.operation, hostile=unit.hostile, refused=True)


def reported(job: Job) -> Sequence[Case]:
    """Cases that are run before any is drawn, by the first shard of a unit: a reported one for
    each relation, then all of them, hostile ones only where hostile cases are drawn, and every lie
    about one of them."""
    from pagefuzz.oracles import registry
    from pagefuzz.strategies.reported import examples_for, lies_for, related_for

    unit = job.shard.unit
    cases = tuple(examples_for(unit.operation, job.options.backend).values())
    related, lies = related_for(unit.operation), lies_for(unit.operation)
    if unit.hostile:
        return [*related, *cases, *lies]
    operation = registry.operation(unit.operation)
    classes = [operation.expect(operation.plan(case)).case_class for case in cases]
    sound = [
        case
        for case, case_class in zip(cases, classes, strict=True)
        if case_class is not CaseClass.HOSTILE
    ]
    return [*related, *sound, *lies]
