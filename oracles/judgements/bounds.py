"""bounds: every access of a checked build lies in the footprint, at one-byte precision."""

from __future__ import annotations

from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.layout import Dtype, Role
from pagefuzz.oracles.observation import AccessFault
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.verdict import Failure
from pagefuzz.oracles.wording import count_text, nearest_legal_text, range_text

_VERBS = {"read": "reads", "write": "writes", "atomic": "updates"}
_VECTOR_ROLES = (Role.INDEX, Role.COUNTERS)
_ELEMENT_BYTES = {int(dtype): dtype.size_bytes for dtype in Dtype}
_SIDES = {"before": "in front of", "past": "past", "inside": "of forbidden bytes of"}


class BoundsJudgement(Judgement):
    name = "bounds"
    unit = "bytes"
    summary = "no load, store or atomic of a checked build touches a forbidden byte"

    def concerns(self, operation: Operation, flags: frozenset[str]) -> bool:
        return "checked" in flags

    def applies(self, run: Run) -> bool:
        return any(launch.record is not None for launch in run.observation.launches)

    def judge(self, run: Run) -> Judged:
        records = [x.record for x in run.observation.launches if x.record is not None]
        failures = [
            self._failure(run, fault, record.access_fault_count)
            for record in records
            for fault in record.access_faults
        ]
        if not failures and any(record.access_fault_count for record in records):
            failures.append(
                Failure(self.name, "forbidden accesses, none recorded", ("unrecorded",))
            )
        return Judged(tuple(failures), sum(record.accessed_bytes for record in records))

    def _failure(self, run: Run, fault: AccessFault, fault_count: int) -> Failure:
        footprint = run.expectation.footprint(fault.buffer)
        allowed = footprint.may_read if fault.kind == "read" else footprint.writable
        begin, end = fault.offset_bytes, fault.offset_bytes + fault.size_bytes
        buffer = run.plan.buffers[fault.buffer]
        required_bytes = buffer.required_bytes
        side = "before" if begin < 0 else "past" if end > required_bytes else "inside"
        wrong = _first_outside(allowed, begin, end)
        what = f"{_VERBS[fault.kind]} {count_text(fault.size_bytes, 'byte')}"
        at = f"{_element_text(run, fault)} ({range_text(begin, end)} of {required_bytes})"
        parts = [f"{what} at {at}", run.operation.locate(run.plan, fault.buffer, wrong)]
        if wrong != begin:
            parts.append(f"the first forbidden one is byte {wrong}")
        parts.append(nearest_legal_text(allowed, wrong))
        details = {"access": "; ".join(parts), "where": str(fault.site)}
        if means := run.operation.mapping(run.plan, fault.buffer, wrong):
            details["means"] = means
        return Failure(
            self.name,
            f"{fault.kind} {_SIDES[side]} {fault.buffer}",
            (fault.kind, fault.buffer, side, f"{fault.site.file}:{fault.site.line}"),
            details,
            sequence=fault.sequence,
        )


def _first_outside(allowed: IntervalSet, begin: int, end: int) -> int:
    """The first byte of [begin, end) that is not allowed; `begin` if all are."""
    outside = IntervalSet([begin], [end]).without(allowed)
    return int(outside.begin[0]) if outside else begin


def _element_text(run: Run, fault: AccessFault) -> str:
    """ "block_table[1]", or "block_table byte 5" where it is no whole element."""
    buffer = run.plan.buffers[fault.buffer]
    size_bytes = _ELEMENT_BYTES.get(buffer.dtype, 1)
    if buffer.role in _VECTOR_ROLES and fault.offset_bytes % size_bytes == 0:
        return f"{fault.buffer}[{fault.offset_bytes // size_bytes}]"
    return f"{fault.buffer} byte {fault.offset_bytes}"
