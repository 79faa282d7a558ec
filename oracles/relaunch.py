"""Relations that launch the same plan again: nothing that the contract fixes may be otherwise.

Hostile cases are launched again too: what they fix is fixed however often, and in whatever order,
it is done. Contested bytes, results that may be any NaN and unspecified counts are left alone.
"""

from __future__ import annotations

from abc import abstractmethod

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.judgement import Judged, Run
from pagefuzz.oracles.judgements.counts import NAMES, has_counts, rises
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import Launch, Related, RelatedPlan, Status
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.relation import RelationJudgement, writes
from pagefuzz.oracles.verdict import CaseClass, Failure


class RelaunchJudgement(RelationJudgement):
    """Compares a launch with others of the same plan: every byte, and what each counts."""

    @abstractmethod
    def launches(self, plan: Plan, expectation: Expectation) -> tuple[RelatedPlan, ...]:
        """The plan again, once for each further launch."""

    def derive(
        self, operation: Operation, plan: Plan, expectation: Expectation
    ) -> RelatedPlan | None:
        return next(iter(self.launches(plan, expectation)), None)

    def related(
        self, operation: Operation, plan: Plan, expectation: Expectation
    ) -> tuple[RelatedPlan, ...]:
        """`launches` of any case; none if it is refused, or in contract and writes nothing."""
        match expectation.case_class:
            case CaseClass.REFUSED:
                return ()
            case CaseClass.IN_CONTRACT if not writes(plan, expectation):
                return ()
        return self.launches(plan, expectation)

    def judge(self, run: Run) -> Judged:
        judged = super().judge(run)
        first = self._first(run)
        assert first is not None
        failures = list(judged.failures)
        for related in self._second(run):
            if has_counts(run.plan, run.expectation) and related.launch.status is Status.OK:
                failures += self._miscounts(first, related)
        return Judged(tuple(failures), judged.checked)

    def _miscounts(self, first: Launch, related: Related) -> list[Failure]:
        """Each of several launches in a row has to count what the first did."""
        times, change = related.derived.in_a_row, related.derived.change
        found = zip(NAMES, rises(first), rises(related.launch), strict=True)
        return [
            Failure(
                self.name,
                f"the {name} counter rises otherwise {self.when}",
                ("counts", name),
                {
                    "access": f"counts[{index}] ({name}) rose by {once} in one launch, and by "
                    f"{rise} in {times} {self.when}",
                    "means": change,
                },
            )
            for index, (name, once, rise) in enumerate(found)
            if (rise - times * once) % 2**64
        ]
