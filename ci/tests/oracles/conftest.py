"""A launch in pure Python: memory as the contents say, and a kernel that does what is expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pagefuzz.oracles import contents
from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.expectation import Expectation, Expected
from pagefuzz.oracles.judgement import Run
from pagefuzz.oracles.layout import Bytes, Plan
from pagefuzz.oracles.observation import (
    CheckRecord,
    Chunk,
    Death,
    Launch,
    Moved,
    Observation,
    Related,
    RelatedPlan,
    Status,
)
from pagefuzz.oracles.refusals import is_absent
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.relation import FILL, asked_for
from pagefuzz.oracles.writes import WriteOperation

RED_ZONE_BYTES = 64


@dataclass
class Memory:
    """Bytes of one buffer from `begin` on, red zones included; `old` is before the launch."""

    begin: int
    data: Bytes
    old: Bytes

    def put(self, offset_bytes: int, values: bytes | Bytes) -> None:
        raw = np.frombuffer(bytes(values), dtype=np.uint8)
        at = offset_bytes - self.begin
        self.data[at : at + raw.size] = raw

    def restore(self, offset_bytes: int, size_bytes: int) -> None:
        """Undoes what the kernel wrote."""
        at = offset_bytes - self.begin
        self.data[at : at + size_bytes] = self.old[at : at + size_bytes]

    def get(self, offset_bytes: int, size_bytes: int = 1) -> bytes:
        at = offset_bytes - self.begin
        return self.data[at : at + size_bytes].tobytes()


Change = Callable[[Mapping[str, Memory]], None]


class Bench:
    """One case, launched twice by a kernel that keeps the contract, then changed by the test; again
    for each relation that it names."""

    def __init__(self, case: Case) -> None:
        self.operation = operation(case.operation)
        self.plan: Plan = self.operation.plan(case)
        self.expectation: Expectation = self.operation.expect(self.plan)

    def run(
        self,
        change: Change | None = None,
        *,
        status: Status | None = None,
        message: str | None = None,
        record: CheckRecord | None = None,
        death: Death | None = None,
        build: str = "release",
        contained: bool = True,
        related_change: Change | None = None,
        related_status: Status = Status.OK,
        related_record: CheckRecord | None = None,
    ) -> Run:
        refused = bool(self.expectation.refusals)
        status = status if status is not None else Status.REFUSED if refused else Status.OK
        message = message if message is not None else "no" if status is not Status.OK else ""
        own = self.plan, self.expectation
        launches = [
            self._launch(*own, fill, status, message, record, change) for fill in contents.FILLS
        ]
        if death is not None:
            launches = launches[:1]
        related = [
            Related(name, derived, self._relaunch(derived, related_status, told, related_change))
            for name, judgement in asked_for(self.plan.case, self.operation).items()
            for derived in judgement.related(self.operation, *own)
            for told in [related_record or record]
        ]
        observation = Observation("host", build, tuple(launches), death, related=tuple(related))
        return Run(self.operation, self.plan, self.expectation, observation, contained)

    def _relaunch(
        self,
        derived: RelatedPlan,
        status: Status,
        record: CheckRecord | None,
        change: Change | None,
    ) -> Launch:
        """A writer writes what goes to the cells of the plan, all others what they do anyway, to
        where it is moved."""
        expectation = derived.expectation
        if not (derived.moved and isinstance(self.operation, WriteOperation)):
            expected = {
                name: self._moved(one, derived.moved.get(name, ()))
                for name, one in self.expectation.expected.items()
            }
            expectation = replace(expectation, expected=expected)
        times = derived.in_a_row
        return self._launch(derived.plan, expectation, FILL, status, "", record, change, times)

    def _moved(self, expected: Expected, moved: tuple[Moved, ...]) -> Expected:
        """Of one run a row, or page."""
        for runs in moved:
            order = np.argsort(runs.begins)
            at = order[np.searchsorted(runs.begins[order], expected.offsets)]
            expected = replace(expected, offsets=runs.new_begins[at])
        return expected

    def _launch(
        self,
        plan: Plan,
        expectation: Expectation,
        fill: int,
        status: Status,
        message: str,
        record: CheckRecord | None,
        change: Change | None,
        times: int = 1,
    ) -> Launch:
        """times: how often in a row, of which the last may be changed."""
        memory = {}
        for name, buffer in plan.buffers.items():
            if is_absent(buffer) or buffer.placement.over is not None:
                continue
            begin = -buffer.placement.before_bytes - RED_ZONE_BYTES
            end = buffer.memory_bytes + RED_ZONE_BYTES
            readable = expectation.footprint(name).may_read
            data = contents.initial_bytes(buffer, readable, plan.case.seed, fill, begin, end)
            memory[name] = Memory(begin, data.copy(), data)
        for _ in range(times if status is Status.OK else 0):
            self._apply(memory, plan, expectation)
        if change is not None:
            change(memory)
        return Launch(
            fill=fill,
            status=status,
            message=message,
            chunks={name: (Chunk(m.begin, m.old, m.data),) for name, m in memory.items()},
            examined_bytes=sum(m.data.size for m in memory.values()),
            record=record,
        )

    def _apply(self, memory: Mapping[str, Memory], plan: Plan, expectation: Expectation) -> None:
        for part, expected in expectation.expected.items():
            name, begin = plan.base(expected.buffer or part)
            for at, values in zip(expected.offsets.tolist(), expected.values, strict=True):
                memory[name].put(at + begin, values)
            if expected.contested is not None:
                runs = expected.contested
                for at, values in zip(runs.offsets.tolist(), runs.values, strict=True):
                    memory[name].put(at + begin, values)
        counts = expectation.counts
        if counts is not None and "counts" in memory:
            pair = np.frombuffer(memory["counts"].get(0, 16), dtype=np.int64)
            pair = pair + np.array([counts.padding, counts.skipped])
            memory["counts"].put(0, pair.view(np.uint8))


@pytest.fixture
def bench() -> Callable[[Case], Bench]:
    """Makes a bench of a case."""
    return Bench


@pytest.fixture
def base_case() -> Case:
    """Three requests over six padded pages, everything present, in contract."""
    sizes = {
        "num_requests": 3,
        "num_tokens": 20,
        "page_size_tokens": 4,
        "num_pages": 6,
        "table_width": 4,
        "table_row_stride": 5,
        "page_stride_bytes": 72,
        "slot_stride_bytes": 16,
        "dst_rows": 24,
        "dst_row_stride_bytes": 16,
        "entry_bytes": 12,
        "element_bytes": 4,
        "has_terminal": 1,
    }
    values = {
        "block_table": Values("permuted", {"seed": 1}),
        "starts": Values.literal(1, 7, 7, 18),
        "seq_starts": Values.literal(2, 0, 3),
        "counts": Values.literal(100, 200),
    }
    placements = {"dst": Placement(before_bytes=32, slack_bytes=8, after_bytes=32)}
    return Case("cp_gather_cache", sizes, values, placements, seed=5)
