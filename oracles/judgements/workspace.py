"""workspace: buffers may be slices of workspaces of any length, and extents longer than needed."""

from __future__ import annotations

from dataclasses import replace

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import RelatedPlan
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.planning import MAX_MEMORY_BYTES
from pagefuzz.oracles.relation import RelationJudgement, choose

_STEP_BYTES = 40
_MOST_STEPS = 32


class WorkspaceJudgement(RelationJudgement):
    name = "workspace"
    summary = "no output changes when buffers lie in longer workspaces and have longer extents"
    when = "when workspaces are longer"

    def derive(
        self, operation: Operation, plan: Plan, expectation: Expectation
    ) -> RelatedPlan | None:
        before, after, slack = (
            _STEP_BYTES * (1 + choose(plan, self.name, what, _MOST_STEPS))
            for what in ("before", "after", "slack")
        )
        buffers = {}
        for name, buffer in plan.buffers.items():
            if not buffer.is_null and buffer.placement.over is None:
                place = buffer.placement
                buffer = replace(
                    buffer,
                    extent_bytes=buffer.extent_bytes + slack,
                    placement=replace(
                        place,
                        before_bytes=place.before_bytes + before,
                        slack_bytes=place.slack_bytes + slack,
                        after_bytes=place.after_bytes + after,
                    ),
                )
            buffers[name] = buffer
        if sum(buffer.memory_bytes for buffer in buffers.values()) > 2 * MAX_MEMORY_BYTES:
            return None
        derived = Plan(plan.case, plan.arguments, buffers)
        change = (
            f"every workspace is {before} B longer in front and {after} B behind, "
            f"every extent {slack} B"
        )
        return RelatedPlan(derived, operation.expect(derived), change)
