"""Judges the launches of a round trip by the composition of its writer and reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.composition import Claim, ExpectedRows
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes
from pagefuzz.oracles.observation import CheckRecord, Launch, Status
from pagefuzz.oracles.round_trip_layout import LaidRoundTrip
from pagefuzz.oracles.runs import before_and_after
from pagefuzz.oracles.verdict import CaseClass, Failure, Outcome, Severity, Verdict
from pagefuzz.oracles.wording import byte_text, count_text, share_text

#: What finds something wrong with a round trip calls itself so in its failures.
NAME = "round trip"

#: Natures in the order in which they name a cause.
_ORDER = ("status", "access", "index", "rows", "untouched")


@dataclass(frozen=True)
class StepLaunch:
    """What one launcher returned, and what a checked build recorded; None from any other."""

    status: Status
    message: str
    record: CheckRecord | None


@dataclass(frozen=True)
class RoundTripLaunch:
    """All launches of a trip with one fill. `memory` is as of one launch, of the whole memory."""

    steps: tuple[StepLaunch, ...]
    memory: Launch


def judge_round_trip(
    laid: LaidRoundTrip, launches: Sequence[RoundTripLaunch], *, contained: bool = True
) -> Verdict:
    """contained: both subjects promise to contain hostile values, such as pages that are none.

    Raises `ValueError` without launches: what was not seen is no pass.
    """
    if not launches:
        raise ValueError("a round trip without launches cannot be judged")
    found: dict[str, Failure] = {}
    checked = 0
    for launch in launches:
        failures = _of_steps(laid, launch)
        if all(step.status is Status.OK for step in launch.steps):
            for expected in laid.composition.rows:
                failures += _of_rows(laid, launch.memory, expected)
                checked += expected.alternatives[0].size
        failures += _of_other_memory(laid, launch.memory)
        for failure in failures:
            found.setdefault(failure.identity, failure)
    failures = sorted(found.values(), key=lambda one: _ORDER.index(one.key[0]))
    case_class = laid.expectation.case_class
    if case_class is CaseClass.HOSTILE and not contained:
        failures = [replace(failure, severity=Severity.NOTE) for failure in failures]
    failed = any(failure.severity is Severity.FAILURE for failure in failures)
    return Verdict(
        Outcome.FAILED if failed else Outcome.CLEAN,
        case_class,
        tuple(failures),
        checked={NAME: checked},
        launches=len(launches) * len(laid.steps),
    )


def _of_steps(laid: LaidRoundTrip, launch: RoundTripLaunch) -> list[Failure]:
    found = []
    for step, seen in zip(laid.steps, launch.steps, strict=False):
        who = step.operation.name
        if seen.status is not Status.OK:
            access = f"the launcher returned {seen.status.name}: {seen.message or 'no message'}"
            title = f"{who} does not run a case that its contract accepts"
            found.append(Failure(NAME, title, ("status", who), {"access": access}))
        if seen.record is None:
            continue
        for fault in seen.record.access_faults[:1]:
            place = step.operation.locate(step.plan, fault.buffer, fault.offset_bytes)
            details = {
                "access": f"{fault.kind}s {fault.size_bytes} bytes at {fault.buffer} {place} "
                f"(offset {fault.offset_bytes})",
                "where": str(fault.site),
            }
            title = f"{who}: {fault.kind} of forbidden bytes of {fault.buffer}"
            key = ("access", who, fault.buffer, fault.kind)
            found.append(Failure(NAME, title, key, details))
        for wrap in seen.record.index_faults[:1]:
            access = f"{wrap.a} {wrap.operation} {wrap.b} gives {wrap.result} in {wrap.type_name}"
            title = f"{who}: index arithmetic wraps"
            details = {"access": access, "where": str(wrap.site)}
            found.append(Failure(NAME, title, ("index", who), details))
    return found


def _of_rows(laid: LaidRoundTrip, memory: Launch, expected: ExpectedRows) -> list[Failure]:
    if not expected.claims:
        return []
    step = laid.readers[expected.gather]
    size_bytes = expected.alternatives[0].shape[1]
    root, begin = laid.plan.base(step.buffer(expected.buffer))
    old, new = before_and_after(
        memory, laid.plan.case.seed, root, expected.offsets + begin, size_bytes
    )
    right = np.zeros((len(new), size_bytes // expected.element_bytes), dtype=np.bool_)
    for values, nans in zip(expected.alternatives, expected.nans, strict=True):
        same = new == values
        if nans is not None:
            same |= nans.pass_bytes(new)
        right |= same.reshape(*right.shape, expected.element_bytes).all(axis=2)
    if right.all():
        return []
    row, element = map(int, np.argwhere(~right)[0])
    byte = element * expected.element_bytes
    claim = expected.claims[row]
    nature, holds = _nature(expected, row, old[row], new[row])
    end = byte + expected.element_bytes
    wanted = [bytes(values[row, byte:end]).hex() for values in expected.alternatives]
    access = (
        f"{step.buffer(expected.buffer)} row {claim.row}, byte {byte}: got "
        f"{bytes(new[row, byte:end]).hex()}, expected {' or '.join(dict.fromkeys(wanted))}"
    )
    rows = int((~right).any(axis=1).sum())
    details = {
        "access": access,
        "means": f"{claim}{f'; the row {holds}' if holds else ''}",
        "effect": f"{rows} of {count_text(len(right), 'row')} wrong, "
        f"{share_text(int((~right).sum()), right.size, 'element')}",
    }
    pair = f"{laid.steps[0].operation.name} and {step.operation.name}"
    return [
        Failure(
            NAME,
            f"{pair} do not compose: a row of {expected.buffer} {nature}",
            ("rows", expected.buffer, nature),
            details,
        )
    ]


def _nature(expected: ExpectedRows, row: int, old: Bytes, new: Bytes) -> tuple[str, str]:
    """In what way a row is wrong, and what it holds, if that is known."""
    if np.array_equal(old, new):
        return "is not written", "holds what the destination held before"
    for values in expected.alternatives:
        same = np.flatnonzero((values == new).all(axis=1))
        if same.size and new.size > 3:
            return "holds another entry", f"holds that of {_owner(expected.claims[int(same[0])])}"
    return "holds wrong values", ""


def _owner(claim: Claim) -> str:
    if claim.tokens:
        return f"row {claim.row}, input token {claim.tokens[0]}"
    return f"row {claim.row}, which no token was written to"


def _of_other_memory(laid: LaidRoundTrip, memory: Launch) -> list[Failure]:
    """Whatever neither writer nor moves may write and no row covers is as it was."""
    allowed: dict[str, IntervalSet] = {}
    for step in laid.writing:
        for own in step.plan.buffers:
            name = step.buffer(own)
            allowed[name] = laid.expectation.footprint(name).changeable
    for expected in laid.composition.rows:
        rows = IntervalSet.of_runs(expected.offsets, expected.alternatives[0].shape[1])
        allowed[laid.readers[expected.gather].buffer(expected.buffer)] = rows
    found = []
    for name, chunks in memory.chunks.items():
        if name.endswith(".counts"):
            continue  # judged where a launch is by itself
        for chunk in chunks:
            changed: npt.NDArray[np.bool_] = chunk.before != chunk.after
            if not changed.any():
                continue
            if (writable := allowed.get(name)) is not None:
                end = chunk.offset_bytes + chunk.before.size
                changed = changed & ~writable.mask(chunk.offset_bytes, end)
            if not (at := np.flatnonzero(changed)).size:
                continue
            first = int(at[0])
            access = (
                f"{name} byte {chunk.offset_bytes + first}: was "
                f"{byte_text(int(chunk.before[first]))}, is {byte_text(int(chunk.after[first]))}"
            )
            effect = f"{count_text(at.size, 'byte')} of {name} changed"
            details = {"access": access, "effect": effect}
            title = f"bytes of {name} changed that no token and no row covers"
            found.append(Failure(NAME, title, ("untouched", name), details))
            break
    return found
