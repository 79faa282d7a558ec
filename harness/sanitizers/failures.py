"""What compute-sanitizer reports, in the words of findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagefuzz.harness.sanitizers.reports import Report, by_identity
from pagefuzz.harness.sanitizers.watched import Launched
from pagefuzz.oracles.verdict import CaseClass, Failure, Outcome, Severity, Verdict

#: An access so far from a buffer is of another one, or of none.
_NEAR_BYTES = 65_536

_SHOWN_LINES = 8


def verdict_of(
    tool: str,
    reports: Sequence[Report],
    launched: Launched,
    case_class: CaseClass | None,
    *,
    contained: bool,
) -> Verdict:
    """The verdict on one case that was launched by itself: a failure for each identity that was
    reported, a note for a hostile case of a subject that promises no containment."""
    note = case_class is CaseClass.HOSTILE and not contained
    severity = Severity.NOTE if note else Severity.FAILURE
    failures = tuple(
        failure_of(tool, same, launched.buffers, severity) for same in by_identity(reports).values()
    )
    return Verdict(
        outcome=Outcome.FAILED if failures and not note else Outcome.CLEAN,
        case_class=case_class,
        failures=failures,
        checked={tool: int(launched.is_watched)},
        launches=int(launched.is_watched),
    )


def failure_of(
    tool: str,
    reports: Sequence[Report],
    buffers: Mapping[str, tuple[int, int]],
    severity: Severity = Severity.FAILURE,
) -> Failure:
    """Of reports of one identity, the first of which is shown.

    buffers  name -> (address of the base, bytes from there) during the launch
    """
    first = reports[0]
    title, key = first.kind, list(first.identity)
    details: dict[str, str] = {}
    if (near := _nearest(first, buffers)) is not None:
        buffer, side, access = near
        title = f"{first.kind}, {side} {buffer}"
        key += [buffer, side]
        details["access"] = access
    if first.where:
        details["where"] = f"{first.where}  {first.thread}".rstrip()
    details["said"] = "\n".join(first.lines[:_SHOWN_LINES])
    if len(reports) > 1:
        details["seen"] = f"{len(reports):,} reports of the kind from this launch"
    return Failure(tool, title, tuple(filter(None, key)), details, severity)


def _nearest(report: Report, buffers: Mapping[str, tuple[int, int]]) -> tuple[str, str, str] | None:
    """Buffer, side of it ("past") and a sentence; None if no address is named, or none is near."""
    address = report.address
    if address is None or not buffers:
        return None

    def distance(name: str) -> int:
        base, size_bytes = buffers[name]
        return max(base - address, address - (base + size_bytes) + 1, 0)

    name = min(buffers, key=distance)
    if distance(name) > _NEAR_BYTES:
        return None
    base, size_bytes = buffers[name]
    at, end = address - base, address - base + report.size_bytes
    side = "before" if at < 0 else "past" if end > size_bytes else "inside"
    return name, side, f"{report.size_bytes} bytes at {name}, byte {at} of {size_bytes}"
