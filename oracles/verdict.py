"""What was judged of one case: failures, and how much each judgement looked at."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    CLEAN = "clean"
    FAILED = "failed"
    NOT_RUN = "not run"  # e.g. the case does not fit into memory; never a pass


class CaseClass(StrEnum):
    IN_CONTRACT = "in contract"
    HOSTILE = "hostile"
    REFUSED = "refused"


class Severity(StrEnum):
    FAILURE = "failure"
    NOTE = "hardening note"  # hostile values against a subject that promises no containment


@dataclass(frozen=True)
class Failure:
    """One thing a judgement found wrong.

    judgement  its name
    title      what happened, in a few words: "read past block_table"
    key        what makes two failures the same finding, beside judgement, operation and subject
    sequence   when in the launch it happened, if known: the lowest is the cause of the others
    details    the lines of the report by label, in design.md's order: access, where, means, effect;
               a judgement fills the ones it knows
    """

    judgement: str
    title: str
    key: tuple[str, ...]
    details: Mapping[str, str] = field(default_factory=dict)
    severity: Severity = Severity.FAILURE
    sequence: int | None = None

    @property
    def identity(self) -> str:
        """The de-duplication key as text."""
        return ":".join((self.judgement, *self.key))

    @property
    def digest(self) -> str:
        """Four hex digits of the identity, for file names."""
        return hashlib.sha256(self.identity.encode()).hexdigest()[:4]

    def to_json(self) -> dict[str, Any]:
        return {
            "judgement": self.judgement,
            "title": self.title,
            "key": list(self.key),
            "details": dict(self.details),
            "severity": str(self.severity),
            "sequence": self.sequence,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Failure:
        return cls(
            judgement=data["judgement"],
            title=data["title"],
            key=tuple(data["key"]),
            details=dict(data["details"]),
            severity=Severity(data["severity"]),
            sequence=data["sequence"],
        )


@dataclass(frozen=True)
class Verdict:
    """What was judged of one case on one subject.

    failures    the cause first (see `cause_first`)
    checked     judgement -> amount it examined, in that judgement's unit; a judgement that did not
                apply is missing
    launches    how many launches were made
    not_run     why nothing was judged, or not every launch that was to be made, if so
    counters    figures for Hypothesis' statistics, such as the distance to an overflow boundary
    layers      detection layer -> (launches, amount) that it examined; the harness knows
    """

    outcome: Outcome
    case_class: CaseClass | None
    failures: tuple[Failure, ...] = ()
    checked: Mapping[str, int] = field(default_factory=dict)
    launches: int = 0
    not_run: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return self.outcome is Outcome.CLEAN

    def to_json(self) -> dict[str, Any]:
        return {
            "outcome": str(self.outcome),
            "case_class": None if self.case_class is None else str(self.case_class),
            "failures": [failure.to_json() for failure in self.failures],
            "checked": dict(self.checked),
            "launches": self.launches,
            "not_run": self.not_run,
            "counters": dict(self.counters),
            "layers": {name: list(examined) for name, examined in self.layers.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        return cls(
            outcome=Outcome(data["outcome"]),
            case_class=None if data["case_class"] is None else CaseClass(data["case_class"]),
            failures=tuple(Failure.from_json(f) for f in data["failures"]),
            checked=dict(data["checked"]),
            launches=data["launches"],
            not_run=data["not_run"],
            counters=dict(data["counters"]),
            # Files of findings from before there was such a field are read, too.
            layers={name: (one[0], one[1]) for name, one in data.get("layers", {}).items()},
        )


#: Judgements in the order in which they name a cause when the time of the fault is not known.
CAUSE_ORDER = (
    "refusal",
    "overflow",
    "bounds",
    "launch",
    "death",
    "hang",
    "untouched",
    "output",
    "poison",
    "repeat",
    "order",
    "renaming",
    "splitting",
    "widening",
    "workspace",
    "rebasing",
    "restriding",
    "counts",
    "recompile",
)


def cause_first(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Orders failures so that the first is the best name for what went wrong.

    A launcher that accepted what it must refuse is to blame for all that follows. A fault that the
    checked build timed precedes its consequences: an overflow before the wild store it leads to, an
    over-read of the table before the wrong rows, either before the death of the process.
    """

    def rank(failure: Failure) -> tuple[int, int, int, str]:
        order = (
            CAUSE_ORDER.index(failure.judgement)
            if failure.judgement in CAUSE_ORDER
            else len(CAUSE_ORDER)
        )
        timed = failure.sequence is not None
        return (
            0 if failure.judgement == "refusal" else 1 if timed else 2,
            failure.sequence or 0,
            order,
            failure.identity,
        )

    return tuple(sorted(failures, key=rank))
