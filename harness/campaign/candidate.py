"""Which of two failing cases of one identity is the better finding."""

from __future__ import annotations

from dataclasses import dataclass

from pagefuzz.harness.campaign.simplify import weight
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import CaseClass, Verdict

#: A fault that shows in contract says more than one that needs hostile values.
CLASS_RANK = {CaseClass.IN_CONTRACT: 0, CaseClass.HOSTILE: 1, CaseClass.REFUSED: 2, None: 3}


@dataclass(frozen=True)
class Candidate:
    """A failing case.

    is_sure  False of a hang that was seen with less patience than was asked for
    """

    case: Case
    verdict: Verdict
    is_sure: bool = True

    @property
    def rank(self) -> int:
        return CLASS_RANK[self.verdict.case_class]

    def better_than(self, other: Candidate) -> bool:
        return (self.rank, weight(self.case)) < (other.rank, weight(other.case))
