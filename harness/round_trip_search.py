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

from pagefuzz.harness.campaign.again import Repeated, Timed, is_hang
from pagefuzz.harness.campaign.drawing import Drawing, Flaky
from pagefuzz.harness.campaign.events import Progress
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import (
    ITS_TIME_WAS_UP,
    STOPPED,
    cause,
    ordered,
    patience_of,
    repeated_text,
    report_lines,
    shown_path,
    write_whole,
)
from pagefuzz.harness.patience import argument
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

#: At most so long is spent on minimising one finding, by Hypothesis and then by hand.
SHRINK_S, BY_HAND_S = 20.0, 10.0

#: A round trip that is running when that time is up may go on for so long.
LAST_TRIP_S = 1.0

#: How a report says which way pages move.
_WAYS = {"": "of", "out": "out of", "in": "back into"}


@dataclass(frozen=True)
class RoundTripFinding:
    """A minimised round trip that fails, and on what.

    writer, mover, reader  subjects, by name; a trip without moves has a mover too
    movers                 the subject of each operation that moves pages: `mover` is one of them
    minimised, repeats, runs, hang_after_s, repeats_hang_after_s, not_minimised  as of a `Finding`
    """

    trip: RoundTrip
    verdict: Verdict
    writer: str
    mover: str
    movers: Mapping[str, str]
    reader: str
    backend: str
    build: str
    minimised: bool = False
    repeats: int = 0
    runs: int = 0
    hang_after_s: float | None = None
    repeats_hang_after_s: float | None = None
    not_minimised: str = ""

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

    def text(self, width: int = 80, path: Path | None = None, *, is_replay: bool = False) -> str:
        """The report, its fields in the order of every finding's. is_replay: as of a `Finding`."""
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
        seen = [f"{NAME} (composition of contracts)", *others]
        seen += [] if is_replay else [repeated_text(self)]
        fields.append(("seen", "; ".join(seen)))
        lines = report_lines(left, right, fields, width)
        if path is not None:
            waits = "" if self.hang_after_s is None else f" {argument(self.hang_after_s)}"
            lines.append(f"again   pagefuzz roundtrip {shlex.quote(str(shown_path(path)))}{waits}")
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
            "minimised": self.minimised,
            "repeats": self.repeats,
            "runs": self.runs,
            "hang_after_s": self.hang_after_s,
            "repeats_hang_after_s": self.repeats_hang_after_s,
            "not_minimised": self.not_minimised,
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


@dataclass(frozen=True)
class Known:
    """What a finding's file says of the run that found it."""

    writer: str
    mover: str
    reader: str
    backend: str
    build: str
    hang_after_s: float | None


def known_of(path: Path) -> Known | None:
    """What a finding's file says; None of a bare round trip.

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
    counts = [data.get("repeats", 0), data.get("runs", 0)]
    if not all(type(count) is int for count in counts) or not 0 <= counts[0] <= counts[1]:
        raise CaseError(
            f"{path}: the finding says that {counts[0]!r:.20} of {counts[1]!r:.20} runs failed"
        )
    try:
        return Known(**{name: data[name] for name in names}, hang_after_s=patience_of(data))
    except ValueError as error:
        raise CaseError(f"{path}: the finding is malformed: {error}") from None


@dataclass
class Searched:
    """What came of a search.

    trips    that were checked while nothing failed
    checked  bytes of rows that were compared
    not_run  reasons, by number of trips
    was_interrupted  by Ctrl-C and the like
    problem  why the finding is not as sure or as simple as it should be; "" if it is
    totals   of them: cases, those not run, classes and what each detection layer examined
    """

    trips: int
    checked: int
    not_run: dict[str, int]
    totals: Progress = field(default_factory=Progress)
    finding: RoundTripFinding | None = None
    was_interrupted: bool = False
    problem: str = ""


class _FailedError(Exception):
    pass


class _TimeIsUp(KeyboardInterrupt):
    pass


@dataclass(frozen=True)
class _Failed:
    """A trip that fails. is_sure: False of a hang that was seen with little patience."""

    trip: RoundTrip
    verdict: Verdict
    is_sure: bool

    @property
    def identity(self) -> str:
        return _identity(self.verdict)


class Search:
    """Of one pair of subjects. In the main thread only."""

    def __init__(
        self,
        checker: RoundTripChecker,
        *,
        seed: int,
        limit_bytes: int,
        on_first: Callable[[RoundTripFinding], None] = lambda _: None,
    ) -> None:
        """on_first: takes what fails the moment it is seen, before it is minimised."""
        self._checker, self._seed, self._on_first = checker, seed, on_first
        self._timed = Timed(checker)
        self._strategy = round_trips(checker.pair, limit_bytes=limit_bytes)
        self._result = Searched(0, 0, {})
        self._smallest: _Failed | None = None
        self._sure: _Failed | None = None  # the smallest that is
        self._until: float | None = None
        self._in_time = True

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
        except (_FailedError, Flaky):
            pass
        except _TimeIsUp:
            self._in_time = False
        except KeyboardInterrupt:  # what failed until now stays found
            self._result.was_interrupted = True
        except CannotCheckError as error:
            self._give_up(error)
        if self._smallest is not None:
            self._result.finding = self._finding()
        return self._result

    def _give_up(self, error: CannotCheckError) -> None:
        """Keeps what was found; raises the error if nothing was."""
        if self._smallest is None:
            raise error
        self._in_time = False
        self._result.problem = f"the finding is not minimised: {error}"

    def _body(self, trip: RoundTrip) -> None:
        if self._until is not None and time.monotonic() > self._until:
            raise _TimeIsUp
        failed, verdict = self._checked(trip)
        if self._smallest is None:
            self._result.trips += 1
            self._result.checked += verdict.checked.get(NAME, 0)
            self._result.totals.add(_progress(verdict))
        if verdict.outcome is Outcome.NOT_RUN:
            seen = self._result.not_run
            seen[verdict.not_run] = seen.get(verdict.not_run, 0) + 1
        if failed is None:
            return
        if self._smallest is None:
            seen_first = RoundTripFinding.of(self._checker, trip, verdict)
            self._on_first(replace(seen_first, not_minimised="it was killed before that"))
            self._until = time.monotonic() + SHRINK_S
        elif failed.identity != self._smallest.identity:
            return  # another fault: it is not what is being minimised
        # Whatever Hypothesis tries next is smaller, as long as it fails.
        if self._smallest is None or len(trip.dumps()) <= len(self._smallest.trip.dumps()):
            self._keep(failed)
        raise _FailedError

    def _keep(self, failed: _Failed) -> None:
        self._smallest = failed
        if failed.is_sure:
            self._sure = failed

    def _checked(self, trip: RoundTrip) -> tuple[_Failed | None, Verdict]:
        """In the time that there is, once something is being minimised; with little patience if
        that is a hang."""
        timed, smallest = self._timed, self._smallest
        given_s, limit_s = timed.asked_s, None
        if smallest is not None:
            assert self._until is not None
            limit_s = max(self._until - time.monotonic(), 0.0) + LAST_TRIP_S
            given_s = timed.little_s if is_hang(smallest.identity) else given_s
        verdict = timed.verdict(lambda: self._checker.check(trip), limit_s, given_s)
        if verdict is None:
            raise _TimeIsUp
        if cause(verdict) is None:
            return None, verdict
        is_sure = given_s >= timed.asked_s or not is_hang(_identity(verdict))
        return _Failed(trip, verdict, is_sure), verdict

    def _finding(self) -> RoundTripFinding:
        """Made simpler by hand, confirmed if it needs to be, and repeated; as long as nobody wants
        an end."""
        found, not_minimised = self._smallest, ""
        assert found is not None
        repeated = Repeated()
        try:
            if not self._result.was_interrupted and not self._result.problem:
                self._drop_parts()
                found, not_minimised = self._confirmed()
                repeated = self._repeated(found)
        except KeyboardInterrupt:
            self._result.was_interrupted = True
        except CannotCheckError as error:
            self._give_up(error)
        if not found.is_sure and self._sure is not None:
            found, not_minimised = self._sure, ITS_TIME_WAS_UP
        if self._result.was_interrupted:
            not_minimised = STOPPED
        elif not self._in_time:
            not_minimised = not_minimised or ITS_TIME_WAS_UP
        self._result.problem = self._result.problem or repeated.problem
        return replace(
            RoundTripFinding.of(self._checker, found.trip, found.verdict),
            minimised=not not_minimised,
            repeats=repeated.repeats,
            runs=repeated.runs,
            repeats_hang_after_s=repeated.hang_after_s,
            not_minimised=not_minimised,
        )

    def _drop_parts(self) -> None:
        """The moves and gathers that the failure does not need: a writer of several heads is drawn
        with one gather for each."""
        self._until = time.monotonic() + BY_HAND_S
        try:
            for without in (_without_move, _without_gather):
                while self._dropped_one(without):
                    pass
        except _TimeIsUp:
            self._in_time = False

    def _dropped_one(self, without: Callable[[RoundTrip], list[RoundTrip]]) -> bool:
        smallest = self._smallest
        assert smallest is not None
        for one in without(smallest.trip):
            if self._until is not None and time.monotonic() > self._until:
                raise _TimeIsUp
            failed, _ = self._checked(one)
            if failed is not None and failed.identity == smallest.identity:
                self._keep(failed)
                return True
        return False

    def _confirmed(self) -> tuple[_Failed, str]:
        """What is reported, and why that is not the smallest, in words; "" if it is."""
        smallest, sure = self._smallest, self._sure
        assert smallest is not None
        assert sure is not None
        if smallest.is_sure:
            return smallest, ""
        verdict, why_not = self._timed.confirmed(
            lambda: self._checker.check(smallest.trip),
            lambda verdict: _identity(verdict) == smallest.identity,
        )
        return (sure, why_not) if verdict is None else (_Failed(smallest.trip, verdict, True), "")

    def _repeated(self, found: _Failed) -> Repeated:
        return self._timed.repeat(
            lambda: self._checker.check(found.trip),
            lambda verdict: _identity(verdict) == found.identity,
            hang=is_hang(found.identity),
        )


def _progress(verdict: Verdict) -> Progress:
    if verdict.outcome is Outcome.NOT_RUN:  # drawn all the same: layers had enough to examine
        return Progress(not_run=1, reasons={verdict.not_run: 1})
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
