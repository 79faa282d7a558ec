"""The cases that a sanitizer is shown: those that were reported, then drawn ones, all of them
small enough for plain memory."""

from __future__ import annotations

from pagefuzz.harness.campaign.drawing import Drawing
from pagefuzz.harness.campaign.plan import Shard, Unit
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.registry import cases_for
from pagefuzz.strategies.reported import examples_for

#: Memory of all buffers of a case together; the least that strategies accept.
LIMIT_BYTES = 2**26

#: Cases that are drawn from one seed.
_SHARD = 200


def cases_of(unit: Unit, count: int, seed: int) -> list[Case]:
    """Cases that a launcher must accept: every reported one that is small enough, and `count` drawn
    ones; hostile ones where the unit has them. The same ones for the same seed."""
    classes = {CaseClass.IN_CONTRACT, *([CaseClass.HOSTILE] if unit.hostile else [])}
    operation = registry.operation(unit.operation)
    found = []
    for case in examples_for(unit.operation).values():
        plan = operation.plan(case)
        size_bytes = sum(buffer.memory_bytes for buffer in plan.buffers.values())
        if size_bytes <= LIMIT_BYTES and operation.expect(plan).case_class in classes:
            found.append(case)
    strategy = cases_for(
        unit.operation, hostile=unit.hostile, refused=False, limit_bytes=LIMIT_BYTES
    )
    drawn: list[Case] = []
    for index, begin in enumerate(range(0, count, _SHARD)):
        size = min(_SHARD, count - begin)
        shard = Shard(unit, index, size)
        Drawing(shard.seed(seed), size, None, reuse=False).run(strategy, drawn.append)
    return found + drawn
