"""What a judgement is. Each lives in one file of `oracles/judgements/`, which registers it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import Launch, Observation, Status
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.verdict import CaseClass, Failure


@dataclass(frozen=True)
class Run:
    """Everything a judgement may look at.

    contained   the subject promises to contain hostile values
    """

    operation: Operation
    plan: Plan
    expectation: Expectation
    observation: Observation
    contained: bool = True

    @property
    def refused(self) -> bool:
        """Whether the launcher must refuse the case."""
        return self.expectation.case_class is CaseClass.REFUSED

    @property
    def finished(self) -> tuple[Launch, ...]:
        """The launches that ran to their end."""
        return tuple(x for x in self.observation.launches if x.status is Status.OK)


@dataclass(frozen=True)
class Judged:
    """checked: how much was examined, in the judgement's unit (0: it looked at nothing)."""

    failures: tuple[Failure, ...]
    checked: int


class Judgement(ABC):
    """Judges one aspect of a run.

    name     as in design.md's table of words
    unit     of what it counts: "bytes", "accesses", "operations", "cases", "launches", "counters"
    summary  one line for `pagefuzz list`
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    summary: ClassVar[str]

    def concerns(self, operation: Operation, flags: frozenset[str]) -> bool:
        """Whether cases of that operation give it something to examine, when launched by an object
        of these build flags. A campaign in which it then examined nothing is no pass."""
        return True

    @abstractmethod
    def applies(self, run: Run) -> bool:
        """Whether it has anything to examine in this run (counters, a launch that finished, ...);
        asked only where it `concerns`."""

    @abstractmethod
    def judge(self, run: Run) -> Judged: ...
