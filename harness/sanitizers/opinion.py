"""A second opinion on one unit: its cases under one sanitizer, and findings with the case attached.

compute-sanitizer watches a process with all cases. Its output says only roughly which case a report
is of, so that each fault is looked for again with one case a process: what is reported then is of
that case. Sanitizers of the host compiler end the process at the first fault: there the ordinary
workers do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pagefuzz.harness.campaign.again import Repeated, Timed, is_hang
from pagefuzz.harness.campaign.candidate import CLASS_RANK, Candidate
from pagefuzz.harness.campaign.events import Progress
from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.campaign.simplify import simplify, weight
from pagefuzz.harness.check import Checker
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import ITS_TIME_WAS_UP, Finding, cause, identity_of
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.sanitizers.failures import verdict_of
from pagefuzz.harness.sanitizers.reports import Report, by_identity
from pagefuzz.harness.sanitizers.tools import layer_of
from pagefuzz.harness.sanitizers.watched import Launched
from pagefuzz.harness.sanitizers.watching import (
    Interrupted,
    UnfinishedError,
    Watched,
    Watcher,
    prove,
)
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, CaseError
from pagefuzz.oracles.observation import Status
from pagefuzz.oracles.verdict import CaseClass, Failure, Outcome, Severity, Verdict
from pagefuzz.oracles.wording import count_text

#: Cases that are launched without the tool too, to say how much slower they are under it.
COMPARED = 20

#: Cases of one fault that are launched by themselves before others are.
_HINTED = 3

#: Time for making a case that fails on the host simpler.
_SIMPLIFY_S = 10.0

#: Of a report of compute-sanitizer, which takes seconds for each process: no case is made simpler.
_AS_DRAWN = "as it was drawn, not minimised"

#: Is told a case and its verdict.
OnFailing = Callable[[Case, Verdict], None]


@dataclass
class Opinion:
    """What a sanitizer said of a unit.

    cases      that it was shown
    launches   that it watched
    layers     detection layer -> (launches, amount) that it examined: its own, (0, 0) of one that
               did nothing, and on the host those that looked beside it
    findings   one for each distinct fault; the first only, unless asked to keep going
    others     faults beyond those
    notes      what hostile values do to a subject that promises no containment
    not_run    reasons, by number of cases
    turned_down  cases that the launcher turned down
    slowdown   time of a launch under the tool, as a multiple; None if it was not compared, as with
               a kernel at fault, or where each launch had a kernel compiled
    memory     the most that a process which launches held
    was_interrupted  by Ctrl-C and the like: what failed until then is in findings
    problems   why findings were not repeated as often as they should have been, or why not all
               cases were watched: what had been reported by then is in findings
    """

    unit: Unit
    cases: int = 0
    launches: int = 0
    layers: dict[str, tuple[int, int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    others: int = 0
    notes: list[Failure] = field(default_factory=list)
    not_run: dict[str, int] = field(default_factory=dict)
    turned_down: int = 0
    slowdown: float | None = None
    device: str = ""
    seconds: float = 0.0
    memory: MemoryUse = field(default_factory=MemoryUse)
    was_interrupted: bool = False
    problems: list[str] = field(default_factory=list)

    def count_not_run(self, reason: str) -> None:
        self.not_run[reason] = self.not_run.get(reason, 0) + 1


def opinion(
    tool: str,
    unit: Unit,
    cases: Sequence[Case],
    *,
    backend: str,
    build: str,
    keep_going: bool = False,
    minimise: bool = False,
    versions: Mapping[str, str] | None = None,
    on_failing: OnFailing | None = None,
) -> Opinion:
    """Shows the cases to a sanitizer.

    tool     one of `tools.TOOLS`
    build    flags of the object: of a tool of compute-sanitizer without "checked", of a sanitizer
             of the host compiler with its name
    minimise  makes a case that fails on the host simpler, and repeats it
    on_failing  is told each failing case as soon as it is known, before anything else is done with
             it: the first of its identity, and better ones

    Raises `CannotCheckError` if the sanitizer gave no account of all of them, and reported nothing
    until then.
    """
    began = time.monotonic()
    with Checker(unit.operation, unit.subject, backend, build) as checker:
        if tool in checker.build.split(","):
            host = _OnTheHost(tool, unit, checker, keep_going, versions or {}, on_failing)
            found = host.watch(cases, minimise=minimise)
        else:
            under = _UnderATool(tool, unit, checker, keep_going, versions or {}, on_failing)
            found = under.watch(cases)
    says_why = found.findings or found.problems or found.was_interrupted
    if not found.launches and not says_why:
        reasons = ", ".join(found.not_run) or "no case led to a launch"
        raise CannotCheckError(f"{unit.name}: {tool} watched nothing: {reasons}")
    found.seconds = time.monotonic() - began
    return found


def again(finding: Finding) -> Opinion:
    """Shows the case of a tool's finding to the same tool, as `opinion` does."""
    prove(finding.sanitizer)
    return opinion(
        finding.sanitizer,
        Unit(finding.operation, finding.subject, hostile=True),
        [finding.case],
        backend=finding.backend,
        build=finding.build,
    )


class _Watching:
    def __init__(
        self,
        tool: str,
        unit: Unit,
        checker: Checker,
        keep_going: bool,
        versions: Mapping[str, str],
        on_failing: OnFailing | None = None,
    ) -> None:
        self._tool, self._unit, self._checker = tool, unit, checker
        self._keep_going, self._versions = keep_going, versions
        self._operation = registry.operation(unit.operation)
        self._contained = checker.subject.promises_containment
        self._found = Opinion(unit)
        self._on_failing: OnFailing = on_failing or (lambda case, verdict: None)

    def _add(
        self,
        case: Case,
        verdict: Verdict,
        repeated: Repeated | None = None,
        not_minimised: str = "",
        *,
        minimised: bool = False,
    ) -> None:
        """A finding, if its verdict failed and it is wanted; a note, or one of the others, else."""
        found, repeated = self._found, repeated or Repeated()
        if cause(verdict) is None:
            found.notes += [f for f in verdict.failures if f.severity is Severity.NOTE]
        elif any(one.identity == identity_of(verdict) for one in found.findings):
            pass
        elif found.findings and not self._keep_going:
            found.others += 1
        else:
            found.findings.append(
                Finding(
                    operation=self._unit.operation,
                    subject=self._unit.subject,
                    backend=self._checker.backend,
                    device=found.device,
                    build=self._checker.build,
                    flags=tuple(sorted(self._checker.flags)),
                    case=case,
                    verdict=verdict,
                    minimised=minimised,
                    repeats=repeated.repeats,
                    runs=repeated.runs,
                    versions=self._versions,
                    repeats_hang_after_s=repeated.hang_after_s,
                    not_minimised=not_minimised,
                )
            )


class _UnderATool(_Watching):
    """compute-sanitizer."""

    def watch(self, cases: Sequence[Case]) -> Opinion:
        found = self._found
        self._cases = dict(enumerate(cases))
        self._watcher = Watcher(self._tool, self._checker.assignment)
        self._gave_up = False  # looking for cases: a launch that hangs takes minutes each time
        self._sound: Watched | None = None
        seen = self._seen()
        is_part = found.was_interrupted or found.problems
        known = {*seen.launched, *(one.case for one in seen.reports if one.case is not None)}
        found.cases = len(known) if is_part else len(cases)
        found.launches, found.memory = seen.launches, seen.memory
        found.layers[layer_of(self._tool)] = seen.launches, seen.watched_bytes
        for one in seen.launched.values():
            found.device = one.device
            if one.not_run:
                found.count_not_run(one.message)
            elif one.status == Status.LAUNCH_FAILED:
                found.count_not_run(f"the launch failed: {one.message or 'for no reason'}")
            elif one.status not in (None, Status.OK):
                found.turned_down += 1
        faults = by_identity(seen.reports)
        for reports in faults.values():
            _, case, verdict = self._as_reported(reports, seen)
            self._on_failing(case, verdict)
        for identity, reports in faults.items():
            if found.findings and not self._keep_going:
                found.others += 1
            else:
                self._add(*self._settled(identity, reports, seen))
        if not seen.reports:  # a kernel at fault is not launched where nobody watches
            found.slowdown = self._slowdown(seen)
        return found

    def _seen(self) -> Watched:
        try:
            return self._watcher.watch(self._cases)
        except Interrupted as stopped:
            if not stopped.watched.reports:
                raise
            self._found.was_interrupted = True
            return stopped.watched
        except UnfinishedError as error:
            if not error.watched.reports:
                raise
            self._found.problems.append(str(error))
            return error.watched

    def _again(self, numbers: Iterable[int]) -> Watched:
        """Launches cases to look for one; what was seen until then of a run that comes to no good
        end, after which no other one is made."""
        try:
            return self._watcher.watch({number: self._cases[number] for number in numbers})
        except UnfinishedError as error:
            self._gave_up = True
            self._found.problems.append(f"a case could not be launched again by itself: {error}")
            return error.watched

    def _settled(
        self, identity: tuple[str, str], reports: Sequence[Report], seen: Watched
    ) -> tuple[Case, Verdict, Repeated, str]:
        """As `_by_itself`, without looking for the case where somebody wants an end, or where that
        has failed before."""
        if not (self._found.was_interrupted or self._gave_up):
            try:
                return self._by_itself(identity, reports, seen)
            except KeyboardInterrupt:
                self._found.was_interrupted = True
        _, case, verdict = self._as_reported(reports, seen)
        return case, verdict, Repeated(), _AS_DRAWN

    def _as_reported(self, reports: Sequence[Report], seen: Watched) -> tuple[int, Case, Verdict]:
        """The case that the output makes it one of, in contract if there is one, and its number."""
        numbers = [report.case for report in reports if report.case is not None]
        number = min(numbers, key=self._rank, default=max(seen.launched, default=0))
        unfinished = Launched(number, self._found.device)
        return number, *self._judged(number, reports, seen.launched.get(number, unfinished))

    def _by_itself(
        self, identity: tuple[str, str], reports: Sequence[Report], seen: Watched
    ) -> tuple[Case, Verdict, Repeated, str]:
        """A case of which the fault is reported when it is launched alone, as it is once: case,
        verdict, how often it was reported when it was, and why it is no simpler.

        A hostile case of which it is a note only must not hide that cases in contract show it."""
        if len(self._cases) == 1:
            _, case, verdict = self._as_reported(seen.reports, seen)
            return case, verdict, Repeated(), ""
        settled = self._looked_for(identity, reports, seen)
        _, verdict, _, _ = settled
        if cause(verdict) is None and not self._gave_up:
            sound = self._in_contract(seen)
            if same := [report for report in sound.reports if report.identity == identity]:
                return self._looked_for(identity, same, sound)
        return settled

    def _in_contract(self, seen: Watched) -> Watched:
        """What the tool sees of the cases that came to an end and are not hostile, without the
        others. They are launched once, whatever faults there are."""
        if self._sound is None:
            numbers = [n for n in seen.launched if self._class(n) is not CaseClass.HOSTILE]
            self._sound = self._again(numbers) if numbers else Watched()
        return self._sound

    def _looked_for(
        self, identity: tuple[str, str], reports: Sequence[Report], seen: Watched
    ) -> tuple[Case, Verdict, Repeated, str]:
        tried: set[int] = set()
        for number in () if self._gave_up else self._suspects(reports, seen):
            alone = self._again([number])
            same = [report for report in alone.reports if report.identity == identity]
            if same:
                others = [report for report in alone.reports if report.identity != identity]
                launched = alone.launched.get(number, Launched(number, self._found.device))
                judged = self._judged(number, [*same, *others], launched)
                return *judged, Repeated(1, 1), _AS_DRAWN
            if self._gave_up:
                break
            tried.add(number)
        # It does not repeat; it was reported all the same.
        number, case, verdict = self._as_reported(reports, seen)
        others_tried = len(tried - {number})
        said = f"nor was it reported of {count_text(others_tried, 'other case')} launched alone"
        alone_once = Repeated(0, int(number in tried))
        return case, verdict, alone_once, f"{said}; {_AS_DRAWN}" if others_tried else _AS_DRAWN

    def _suspects(self, reports: Sequence[Report], seen: Watched) -> Iterator[int]:
        """Numbers of cases, the most suspicious first, of those that the output blames the ones in
        contract: a report is printed after its launch has begun, perhaps long after."""
        hinted = sorted(
            {report.case for report in reports if report.case is not None},
            key=lambda number: (self._rank(number), weight(self._cases[number])),
        )
        yield from hinted[:_HINTED]
        if hinted:
            yield from (number for number in (min(hinted) - 1,) if number in self._cases)
        rest = [number for number in seen.launched if number not in hinted[:_HINTED]]
        identity = reports[0].identity
        while len(rest) > 1:
            half = rest[: len(rest) // 2]
            again = self._again(half)
            if self._gave_up:
                return
            reported = any(report.identity == identity for report in again.reports)
            rest = half if reported else rest[len(half) :]
        yield from rest

    def _judged(
        self, number: int, reports: Sequence[Report], launched: Launched
    ) -> tuple[Case, Verdict]:
        case_class, contained = self._class(number), self._contained
        verdict = verdict_of(self._tool, reports, launched, case_class, contained=contained)
        return self._cases[number], verdict

    def _class(self, number: int) -> CaseClass | None:
        return self._operation.expect(self._operation.plan(self._cases[number])).case_class

    def _rank(self, number: int) -> int:
        return CLASS_RANK[self._class(number)]

    def _slowdown(self, seen: Watched) -> float | None:
        """Of the median launch; None where there is none to compare, or not without the tool."""
        numbers = [n for n, one in seen.launched.items() if _is_comparable(one)][:COMPARED]
        if not numbers:
            return None
        # A kernel that launches share is compiled for the first of them, which is not compared.
        first = [n for n, one in seen.launched.items() if one.compiled and one.status == Status.OK]
        cases = {n: self._cases[n] for n in sorted({*numbers, *first})}
        try:
            plain = Watcher("", self._checker.assignment).watch(cases)
        except CannotCheckError:
            return None  # the tool has watched all there is to watch
        compared = [n for n in numbers if n in plain.launched and _is_comparable(plain.launched[n])]
        if not compared:
            return None
        under = statistics.median(seen.launched[n].seconds for n in compared)
        return under / statistics.median(plain.launched[n].seconds for n in compared)


def _is_comparable(launched: Launched) -> bool:
    return launched.status == Status.OK and launched.seconds > 0 and not launched.compiled


class _OnTheHost(_Watching):
    """Sanitizers that are compiled into the object."""

    def watch(self, cases: Sequence[Case], *, minimise: bool) -> Opinion:
        found, checker = self._found, self._checker
        checker.start()  # without the sanitizer's runtime there is nothing to watch with
        found.device = checker.device
        looked = Progress()
        best: dict[str, Candidate] = {}
        try:
            for case in cases:
                self._look(case, looked, best)
        except CannotCheckError as error:
            if not best:
                raise
            watched = f"{found.cases:,} of {count_text(len(cases), 'case')}"
            found.problems.append(f"{self._tool} watched {watched}: {error}")
        except KeyboardInterrupt:
            if not best:
                raise
            found.was_interrupted = True
        own = layer_of(self._tool)
        found.layers = {own: (0, 0)} | {n: one for n, one in looked.layers.items() if one[0]}
        if not best and not found.layers[own][0]:
            raise CannotCheckError(f"{self._unit.name}: {self._tool} examined nothing")
        for identity, one in best.items():
            is_one_of_many = found.findings and not self._keep_going
            is_finding = cause(one.verdict) is not None and not is_one_of_many
            if not (is_finding and minimise and self._settle(identity, one)):
                self._add(one.case, one.verdict)
        found.memory = checker.memory
        return found

    def _look(self, case: Case, looked: Progress, best: dict[str, Candidate]) -> None:
        """Adds what the layers examined to `looked`, and a case that fails to `best`, by identity,
        if it is better than the one there."""
        verdict = self._checker.check(case)
        self._found.cases += 1
        self._found.launches += verdict.launches
        looked.add_layers(verdict.layers)
        if verdict.outcome is Outcome.NOT_RUN:
            self._found.count_not_run(verdict.not_run)
        if not verdict.failures:
            return
        identity = identity_of(verdict) or verdict.failures[0].identity
        candidate = Candidate(case, verdict)
        if identity not in best or candidate.better_than(best[identity]):
            best[identity] = candidate
            self._on_failing(case, verdict)

    def _settle(self, identity: str, one: Candidate) -> bool:
        """Adds the finding, minimised and repeated; False if there is no time for it any more."""
        if self._found.was_interrupted:
            return False
        try:
            simplest, in_time = self._simplest(one, identity)
            repeated = self._repeated(simplest.case, identity)
        except KeyboardInterrupt:
            self._found.was_interrupted = True
            return False
        except CannotCheckError as error:
            self._found.problems.append(f"a finding was neither minimised nor repeated: {error}")
            return False
        if repeated.problem:
            self._found.problems.append(repeated.problem)
        why_not = "" if in_time else ITS_TIME_WAS_UP
        self._add(simplest.case, simplest.verdict, repeated, why_not, minimised=in_time)
        return True

    def _repeated(self, case: Case, identity: str) -> Repeated:
        return Timed(self._checker).repeat(
            lambda: self._checker.check(case),
            lambda verdict: identity_of(verdict) == identity,
            hang=is_hang(identity),
        )

    def _simplest(self, one: Candidate, identity: str) -> tuple[Candidate, bool]:
        """The simplest case that fails in the same way, and whether nothing simpler was left to be
        tried when time was up."""
        until = time.monotonic() + _SIMPLIFY_S
        in_time = True
        simplest = one

        def still_fails(smaller: Case) -> bool:
            nonlocal in_time, simplest
            if time.monotonic() > until:
                in_time = False
                return False
            try:
                verdict = self._checker.check(smaller)
            except CaseError:
                return False  # a step too far
            if identity_of(verdict) != identity:
                return False
            simplest = Candidate(smaller, verdict)
            return True

        simplify(one.case, still_fails)
        return simplest, in_time
