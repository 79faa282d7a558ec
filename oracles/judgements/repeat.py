"""repeat: the same launch does the same, in fresh memory and into what it has left itself."""

from __future__ import annotations

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan, Role
from pagefuzz.oracles.observation import RelatedPlan
from pagefuzz.oracles.relaunch import RelaunchJudgement

#: Further launches: one after a fill, the others in a row into the output of the one before. Those
#: do something else where a launch reads what it writes, and are then left out: pages move on.
LAUNCHES = 3


class RepeatJudgement(RelaunchJudgement):
    name = "repeat"
    summary = "no output changes when the same launch is made again, also into what it has left"
    when = "when launched again"

    def launches(self, plan: Plan, expectation: Expectation) -> tuple[RelatedPlan, ...]:
        in_place = any(buffer.role is Role.IN_PLACE for buffer in plan.buffers.values())
        changes = ["the same launch again"]
        changes += [
            f"the same launch again, number {nth} in a row into one output"
            for nth in range(2, 1 if in_place else LAUNCHES + 1)
        ]
        return tuple(
            RelatedPlan(plan, expectation, change, in_a_row=nth)
            for nth, change in enumerate(changes, 1)
        )
