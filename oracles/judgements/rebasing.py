"""rebasing: buffers may lie anywhere that their alignment allows, at any distance."""

from __future__ import annotations

from dataclasses import replace

from pagefuzz.oracles.case import BASE_ALIGNMENT_BYTES
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Dtype, Plan, PlannedBuffer
from pagefuzz.oracles.observation import RelatedPlan
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.relation import RelationJudgement, choose

#: Bytes that a base may have to be a multiple of, beside those of its element.
_COARSER = (4, 8, 16)
#: Further bytes in front of a buffer, in multiples of the alignment of offsets.
_MOST_STEPS = 8


class RebasingJudgement(RelationJudgement):
    name = "rebasing"
    summary = "no output changes when base addresses and the distances between them do"
    when = "when base addresses are others"

    def derive(
        self, operation: Operation, plan: Plan, expectation: Expectation
    ) -> RelatedPlan | None:
        """Each base gets another offset within the alignment that the operation demands of it."""
        derived, moves = plan, []
        for name, buffer in plan.buffers.items():
            if buffer.is_null or buffer.placement.over is not None:
                continue
            for unit in dict.fromkeys((Dtype(buffer.dtype).size_bytes, *_COARSER)):
                moved = self._moved(plan, buffer, unit)
                candidate = Plan(plan.case, plan.arguments, {**derived.buffers, name: moved})
                # Coarser until neither the buffer nor what lies in its memory is misaligned.
                if not operation.refusals(candidate):
                    derived = candidate
                    old, new = (x.placement.offset_bytes for x in (buffer, moved))
                    moves += [f"{name} +{old} -> +{new} B"] if old != new else []
                    break
        change = f"bases moved: {', '.join(moves) or 'only apart'}"
        return RelatedPlan(derived, operation.expect(derived), change)

    def _moved(self, plan: Plan, buffer: PlannedBuffer, unit: int) -> PlannedBuffer:
        steps = BASE_ALIGNMENT_BYTES // unit
        offset = unit * choose(plan, self.name, f"{buffer.name} offset", steps)
        apart = choose(plan, self.name, f"{buffer.name} distance", _MOST_STEPS)
        place = replace(
            buffer.placement,
            offset_bytes=offset,
            before_bytes=buffer.placement.before_bytes + apart * BASE_ALIGNMENT_BYTES,
        )
        return replace(buffer, placement=place)
