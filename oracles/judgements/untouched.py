"""untouched: no forbidden byte of any buffer, its workspace or its red zones changes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.layout import PlannedBuffer
from pagefuzz.oracles.observation import Chunk, Launch
from pagefuzz.oracles.verdict import Failure
from pagefuzz.oracles.wording import byte_text, count_text, range_text

#: With more writable runs than this, one mask is faster than a comparison a gap between them.
_FEW_RUNS = 64


class UntouchedJudgement(Judgement):
    name = "untouched"
    unit = "bytes"
    summary = "no forbidden byte of any buffer, workspace or red zone changes"

    def applies(self, run: Run) -> bool:
        return not run.refused and bool(run.observation.launches)

    def judge(self, run: Run) -> Judged:
        writable = {name: run.expectation.footprint(name).changeable for name in run.plan.buffers}
        writable_bytes = sum(allowed.total_bytes for allowed in writable.values())
        failures: list[Failure] = []
        checked = 0
        for launch in run.observation.launches:
            checked += max(launch.examined_bytes - writable_bytes, 0)
            for name, buffer in run.plan.buffers.items():
                failures += self._of_buffer(run, launch, buffer, writable[name])
        return Judged(tuple(failures), checked)

    def _of_buffer(
        self, run: Run, launch: Launch, buffer: PlannedBuffer, writable: IntervalSet
    ) -> list[Failure]:
        changed: dict[str, list[tuple[Chunk, npt.NDArray[np.int64]]]] = {}
        for chunk in launch.chunks.get(buffer.name, ()):
            at = _forbidden_changes(chunk, writable)
            if not at.size:
                continue
            regions = _regions(buffer, at)
            for region in sorted(set(regions.tolist())):
                changed.setdefault(_REGIONS[region], []).append((chunk, at[regions == region]))
        return [self._failure(run, buffer, *item) for item in changed.items()]

    def _failure(
        self,
        run: Run,
        buffer: PlannedBuffer,
        region: str,
        changes: list[tuple[Chunk, npt.NDArray[np.int64]]],
    ) -> Failure:
        chunk, at = changes[0]
        offset_bytes = int(at[0])
        index = offset_bytes - chunk.offset_bytes
        gap = np.flatnonzero(np.diff(at) != 1)
        run_bytes = int(gap[0]) + 1 if gap.size else at.size
        found = chunk.after[index : index + run_bytes]
        place = f"{buffer.name} byte {offset_bytes}, {region}"
        if region == "inside":
            place = (
                f"{buffer.name} byte {offset_bytes}, "
                f"{run.operation.locate(run.plan, buffer.name, offset_bytes)}"
            )
        means = []
        if region == "inside":
            means.append(
                run.operation.mapping(run.plan, buffer.name, offset_bytes)
                or "no request maps it for writing"
            )
        origin = run.operation.origin(run.plan, buffer.name, offset_bytes, found)
        if origin is not None:
            means.append(f"it now holds {origin.text}")
        total = sum(offsets.size for _, offsets in changes)
        last = int(changes[-1][1][-1])
        details = {
            "access": f"{place}: was {byte_text(int(chunk.before[index]))}, "
            f"is {byte_text(int(chunk.after[index]))}",
            "effect": f"{count_text(total, 'forbidden byte')} of {buffer.name} changed, "
            f"among {range_text(offset_bytes, last + 1)}",
        }
        if means:
            details["means"] = "; ".join(means)
        where = region if region == "inside" else f"the {region}"
        title = f"changed forbidden bytes of {buffer.name}" + (
            "" if region == "inside" else f" ({where})"
        )
        return Failure(self.name, title, (buffer.name, region), details)


_REGIONS = (
    "red zone in front",
    "workspace in front",
    "inside",
    "workspace behind",
    "red zone behind",
)


def _regions(buffer: PlannedBuffer, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 [n]: index into `_REGIONS` of each offset."""
    inside_bytes = buffer.required_bytes + buffer.placement.slack_bytes
    bounds = [-buffer.placement.before_bytes, 0, inside_bytes, buffer.memory_bytes]
    return np.searchsorted(np.array(bounds, dtype=np.int64), at, side="right")


def _forbidden_changes(chunk: Chunk, writable: IntervalSet) -> npt.NDArray[np.int64]:
    """Offsets, from the buffer's base, of changed bytes that are not writable."""
    begin, end = chunk.offset_bytes, chunk.offset_bytes + chunk.before.size
    if len(writable) <= _FEW_RUNS:
        at = begin
        for b, e in [*writable, (end, end)]:
            gap = slice(max(at, begin) - begin, max(min(b, end) - begin, 0))
            if not (chunk.before[gap] == chunk.after[gap]).all():
                break
            at = e
        else:
            return np.empty(0, dtype=np.int64)
    changed = chunk.before != chunk.after
    changed &= ~writable.mask(begin, end)
    return np.flatnonzero(changed) + begin
