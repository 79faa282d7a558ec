"""Draws round trips of a pair until one fails, minimises it, and says what is wrong."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pagefuzz.harness.campaign.drawing import Drawing, Flaky
from pagefuzz.harness.campaign.events import Progress
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import (
    cause,
    ordered,
    report_lines,
    shown_path,
    write_whole,
)
from pagefuzz.harness.round_trips import RoundTripChecker
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, CaseError
from pagefuzz.oracles.round_trip import RoundTrip
from pagefuzz.oracles.round_trip_judging import NAME
from pagefuzz.oracles.round_trip_layout import lay_out
from pagefuzz.oracles.verdict import Outcome, Verdict
from pagefuzz.strategies.round_trips import round_trips

T = TypeVar("T")

FINDING_SCHEMA = 1

#: Round trips that are drawn from one seed.
SHARD = 200

#: At most so long is spent on minimising one finding.
SHRINK_S = 20.0

#: How a report says which way pages move.
_WAYS = {"": "of", "out": "out of", "in": "back into"}


@dataclass(frozen=True)
class RoundTripFinding:
    """A minimised round trip that fails, and on what.

    writer, mover, reader  subjects, by name; a trip without moves has a mover too
    movers                 the subject of each operation that moves pages: `mover` is one of them
    """

    trip: RoundTrip
    verdict: Verdict
    writer: str
    mover: str
    movers: Mapping[str, str]
    reader: str
    backend: str
    build: str

    @classmethod
    def of(cls, checker: RoundTripChecker, trip: RoundTrip, verdict: Verdict) -> RoundTripFinding:
        """What a checker saw."""
        return cls(
            trip,
            verdict,
            checker.writer.name,
            checker.mover,
            {operation: subject.name for operation, subject in checker.movers.items()},
            checker.reader.name,
            checker.backend,
            checker.build,
        )

    @property
    def identity(self) -> str:
        return _identity(self.verdict)

    def text(self, width: int = 80, path: Path | None = None) -> str:
        """The report, its fields in the order of every finding's."""
        failure = cause(self.verdict)
        assert failure is not None, "a finding is of a verdict that failed"
        left = f"{failure.judgement.upper()}  {failure.title}"
        right = f"{self.writer} -> {self.reader} · {self.backend} · {self.build} build"
        fields = [("case", f"writer  {_described(self.trip.writer)}")]
        for move in self.trip.moves:
            who = self.movers[move.case.operation]
            of = f"{_WAYS[move.way]} {move.cache}"
            fields.append(("", f"mover   {who}, {of}  {_described(move.case)}"))
        for gather in self.trip.gathers:
            which = "the second " if gather.second else ""
            of = f"{which}{gather.cache} from byte {gather.first_byte}"
            fields.append(("", f"reader  of {of}  {_described(gather.case)}"))
        fields.append(("", f"class: {self.verdict.case_class}"))
        fields += ordered(failure.details)
        others = [f.title for f in self.verdict.failures if f is not failure]
        fields.append(("seen", "; ".join([f"{NAME} (composition of contracts)", *others])))
        lines = report_lines(left, right, fields, width)
        if path is not None:
            lines.append(f"again   pagefuzz roundtrip {shlex.quote(str(shown_path(path)))}")
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "pagefuzz_round_trip_finding": FINDING_SCHEMA,
            "identity": self.identity,
            "pair": self.trip.pair,
            "writer": self.writer,
            "mover": self.mover,
            "reader": self.reader,
            "backend": self.backend,
            "build": self.build,
            "round_trip": self.trip.to_json(),
            "verdict": self.verdict.to_json(),
        }

    def save(self, folder: Path) -> Path:
        """Returns the path of the JSON file. Raises `CannotCheckError` if it cannot be written."""
        about = (
            self.trip.pair,
            self.writer,
            self.mover,
            self.reader,
            self.backend,
            self.build,
            self.identity,
        )
        digest = hashlib.sha256("/".join(about).encode()).hexdigest()[:12]
        path = folder / f"roundtrip-{self.trip.writer.operation}-{digest}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            raise CannotCheckError(
                f"cannot store a finding in {folder}: {error.strerror or error}; "
                "free space there or choose another folder with --report"
            ) from error
        return path


def _identity(verdict: Verdict) -> str:
    """Of the failure alone: a page of padding in the table does not make another fault."""
    failure = cause(verdict)
    return failure.identity if failure is not None else ""


def _described(case: Case) -> str:
    operation = registry.operation(case.operation)
    return operation.describe(operation.plan(case))


def subjects_of(path: Path) -> Mapping[str, str] | None:
    """writer, mover, reader, backend and build of a finding's file; None of a bare round trip.

    Raises `CaseError` for a finding that does not say. The file is one that could be read.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or "pagefuzz_round_trip_finding" not in data:
        return None
    if (schema := data["pagefuzz_round_trip_finding"]) != FINDING_SCHEMA:
        raise CaseError(f"{path}: a finding of schema {schema!r}, not {FINDING_SCHEMA}")
    names = ("writer", "mover", "reader", "backend", "build")
    if missing := [name for name in names if not isinstance(data.get(name), str)]:
        raise CaseError(f"{path}: the finding does not say its {missing[0]}")
    return {name: data[name] for name in names}


@dataclass
class Searched:
    """What came of a search.

    trips    that were checked while nothing failed
    checked  bytes of rows that were compared
    not_run  reasons, by number of trips
    was_interrupted  by Ctrl-C and the like
    totals   of those that were judged: cases, classes and what each detection layer examined
    """

    trips: int
    checked: int
    not_run: dict[str, int]
    totals: Progress = field(default_factory=Progress)
    finding: RoundTripFinding | None = None
    was_interrupted: bool = False


class _FailedError(Exception):
    pass


class _TimeIsUp(KeyboardInterrupt):
    pass


class Search:
    """Of one pair of subjects."""

    def __init__(self, checker: RoundTripChecker, *, seed: int, limit_bytes: int) -> None:
        self._checker, self._seed = checker, seed
        self._strategy = round_trips(checker.pair, limit_bytes=limit_bytes)
        self._result = Searched(0, 0, {})
        self._smallest: tuple[RoundTrip, Verdict] | None = None
        self._until: float | None = None

    def run(self, *, cases: int | None = None, time_s: float | None = None) -> Searched:
        """Until something fails, or so many trips have been checked, or so long."""
        if time_s is not None:
            self._until = time.monotonic() + time_s
        shard = 0
        try:
            while cases is None or self._result.trips < cases:
                count = SHARD if cases is None else min(SHARD, cases - self._result.trips)
                Drawing(self._seed * 1_000_003 + shard, count, None, reuse=False).run(
                    self._strategy, self._body
                )
                shard += 1
        except (_FailedError, _TimeIsUp, Flaky):
            pass
        except KeyboardInterrupt:  # what failed until now stays found
            self._result.was_interrupted = True
        if self._smallest is not None:
            self._result.finding = self._finding(*self._smallest)
        return self._result

    def _body(self, trip: RoundTrip) -> None:
        if self._until is not None and time.monotonic() > self._until:
            raise _TimeIsUp
        verdict = self._checker.check(trip)
        if self._smallest is None:
            self._result.trips += 1
            self._result.checked += verdict.checked.get(NAME, 0)
            if verdict.outcome is not Outcome.NOT_RUN:
                self._result.totals.add(_progress(verdict))
        if verdict.outcome is Outcome.NOT_RUN:
            seen = self._result.not_run
            seen[verdict.not_run] = seen.get(verdict.not_run, 0) + 1
        if cause(verdict) is None:
            return
        if self._smallest is None:
            self._until = time.monotonic() + SHRINK_S
        elif _identity(verdict) != _identity(self._smallest[1]):
            return  # another fault: it is not what is being minimised
        # Whatever Hypothesis tries next is smaller, as long as it fails.
        if self._smallest is None or len(trip.dumps()) <= len(self._smallest[0].dumps()):
            self._smallest = trip, verdict
        raise _FailedError

    def _finding(self, trip: RoundTrip, verdict: Verdict) -> RoundTripFinding:
        """Without the moves and gathers that the failure does not need: a writer of several heads
        is drawn with one gather for each."""
        try:
            for without in (_without_move, _without_gather):
                while not self._result.was_interrupted:
                    if (fewer := self._fewer(trip, verdict, without)) is None:
                        break
                    trip, verdict = fewer
        except KeyboardInterrupt:
            self._result.was_interrupted = True
        return RoundTripFinding.of(self._checker, trip, verdict)

    def _fewer(
        self,
        trip: RoundTrip,
        verdict: Verdict,
        without: Callable[[RoundTrip], list[RoundTrip]],
    ) -> tuple[RoundTrip, Verdict] | None:
        for one in without(trip):
            seen = self._checker.check(one)
            if cause(seen) is not None and _identity(seen) == _identity(verdict):
                return one, seen
        return None


def _progress(verdict: Verdict) -> Progress:
    return Progress(
        cases=1,
        launches=verdict.launches,
        classes={str(verdict.case_class): 1},
        layers=dict(verdict.layers),
    )


def _without_move(trip: RoundTrip) -> list[RoundTrip]:
    """Those that are left: who reads a second cache needs a move to it."""
    fewer = [replace(trip, moves=_others(trip.moves, at)) for at in range(len(trip.moves))]
    return [one for one in fewer if _is_sound(one)]


def _is_sound(trip: RoundTrip) -> bool:
    try:
        lay_out(trip)
    except CaseError:
        return False
    return True


def _without_gather(trip: RoundTrip) -> list[RoundTrip]:
    if len(trip.gathers) == 1:
        return []
    return [replace(trip, gathers=_others(trip.gathers, at)) for at in range(len(trip.gathers))]


def _others(items: tuple[T, ...], at: int) -> tuple[T, ...]:
    return items[:at] + items[at + 1 :]
