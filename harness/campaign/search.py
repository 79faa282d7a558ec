"""The search of one shard: draws cases, has them checked, minimises what fails.

Hypothesis draws and shrinks; what counts as *failing* is decided here. In one round at most one
identity fails, the first one seen: every other failing case is kept and journaled, but passes as
far as Hypothesis can tell, so that shrinking cannot slip from one fault to another. Later rounds
look for other identities. Time is up by an exception that Hypothesis lets through at any point, so
that it bounds minimising too, and nothing has to be called flaky.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pagefuzz.harness.campaign.again import Timed, is_hang, longest_repeats_s
from pagefuzz.harness.campaign.candidate import CLASS_RANK, Candidate
from pagefuzz.harness.campaign.direct import directly
from pagefuzz.harness.campaign.drawing import Drawing, Flaky, feed, use_cache
from pagefuzz.harness.campaign.events import (
    Claim,
    Done,
    Event,
    Failing,
    Note,
    Problem,
    Progress,
    Settled,
    Unended,
)
from pagefuzz.harness.campaign.journal import Journal, entry_of
from pagefuzz.harness.campaign.plan import Job
from pagefuzz.harness.campaign.simplify import simplify
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import ITS_TIME_WAS_UP, STOPPED, TIME_WAS_UP, cause, identity_of
from pagefuzz.harness.profiles import SHARD_CASES
from pagefuzz.oracles.case import Case, CaseError
from pagefuzz.oracles.verdict import CaseClass, Outcome, Verdict

if TYPE_CHECKING:
    from pagefuzz.harness.campaign.parts import CaseChecker

#: A finding is repeated for at most so long once time is up, by backend; and all findings together,
#: well before `GRACE_S`.
REPEAT_GRACE_S = {"host": 2.0, "cuda": 5.0}
REPEAT_GRACES_S = 10.0

#: A case that is running when time is up may go on for so long.
LAST_CASE_S = 1.0

#: A candidate for a simpler case is given up after this and three times what the best one takes.
CANDIDATE_S = 1.0

#: Hypothesis' part of the time for minimising; the rest is for `simplify`, which takes requests and
#: tokens away in far fewer steps.
HYPOTHESIS_SHARE = 0.4

PROGRESS_EVERY_S = 0.25


_TOO_SLOW = Verdict(Outcome.NOT_RUN, None, not_run="it took too long")


class _Stop(KeyboardInterrupt):
    """Ends a run of Hypothesis wherever it is; it handles no other exception that way."""


class _EndOfTime(_Stop):
    """The shard's time is up, or it was asked to stop."""


class _EndOfShrinking(_Stop):
    """Enough time was spent on minimising this finding."""


class _Broken(_Stop):
    """The case could not be judged at all; `error` says why."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _CaseFailedError(Exception):
    """What Hypothesis sees of a failing case."""


@dataclass(frozen=True)
class Target:
    """What is being minimised: a case fails if its first failure is this one and its class too."""

    identity: str
    case_class: CaseClass | None

    @classmethod
    def of(cls, verdict: Verdict) -> Target:
        """With an empty identity if the verdict did not fail."""
        return cls(identity_of(verdict), verdict.case_class)


class Search:
    """Works off one job.

    emit       takes each event
    claimed    what other runners of the unit have claimed since it was last asked
    stop_requested  set by `stop`; looked at before each case
    """

    def __init__(
        self,
        job: Job,
        parts: ModuleType,
        checker: CaseChecker,
        emit: Callable[[Event], None],
        journal: Journal,
        claimed: Callable[[], Iterable[Claim]] = tuple,
    ) -> None:
        self.stop_requested = False
        self._job = job
        self._parts = parts
        self._checker = checker
        self._timed = Timed(checker)
        self._emit = emit
        self._journal = journal
        self._claimed = claimed
        self._progress = Progress()
        self._progress_sent = time.monotonic()
        self._generated = 0
        self._candidates: dict[str, Candidate] = {}
        self._sure: dict[str, Candidate] = {}  # the best of those
        self._settled: dict[str, int] = {}  # identity -> class rank
        self._target: Target | None = None
        self._shrink_ends: float | None = None  # None: not minimising
        self._minimising = ""  # the identity
        self._best_s = 0.0  # that the best case of it took
        self._complained = False
        self._case_began = 0.0
        self._case_s = self._given_s = 0.0  # of the last case: what it took, a launch's patience
        self._last_repeat_ends: float | None = None  # once time is up

    def stop(self) -> None:
        """Ends the search at the next case, and soon. For signal handlers."""
        self.stop_requested = True
        self._timed.hurry(LAST_CASE_S)

    # ---- the course of a shard ----------------------------------------------------------------

    def run(self) -> None:
        """Emits `Done` last. A `CannotCheckError` ends the shard as a `Problem`."""
        if self._job.options.cache is not None:
            use_cache(Path(self._job.options.cache) / "hypothesis")
        reason = "finished"
        try:
            if self._job.shard.index == 0:
                self._run_reported()
            self._run_rounds()
        except _EndOfTime:
            reason = "stopped" if self.stop_requested else "time is up"
        except CannotCheckError as error:
            reason = "a problem"
            self._emit(Problem(str(error)))
        if reason != "a problem":
            self._settle_the_rest()
        if self._ended_early and reason == "finished":
            reason = "a finding"
        self._send_progress()
        self._emit(Done(reason))

    @property
    def _ended_early(self) -> bool:
        """Whether a finding ended the search, as it does without `--keep-going`."""
        return bool(self._settled) and not self._job.options.keep_going

    def _run_reported(self) -> None:
        for case in self._parts.reported(self._job):
            self._case_began = time.monotonic()
            case, verdict = directly(case, self._check(case), self._judge_alone)
            if self._is_new(verdict):
                self._keep(case, verdict)
                self._settle(identity_of(verdict))
                if self._ended_early:
                    return

    def _run_rounds(self) -> None:
        strategy = self._parts.strategy(self._job)
        round_index = 0
        while not self._ended_early:
            wanted = SHARD_CASES
            if self._job.shard.cases is not None:
                wanted = min(wanted, self._job.shard.cases - self._generated)
            if wanted <= 0:
                return
            before = self._generated
            self._run_round(strategy, round_index, wanted)
            target, self._target = self._target, None
            if target is not None:
                self._settle(target.identity)
            elif self._job.shard.cases is not None and self._generated < before + wanted:
                return  # Hypothesis has seen all there is
            elif self._generated == before:
                raise CannotCheckError(
                    f"the strategy of {self._job.shard.unit.operation} drew no case in a whole "
                    "round; it must be able to draw one"
                )
            round_index += 1

    def _run_round(self, strategy: Any, round_index: int, wanted: int) -> None:
        shard, options = self._job.shard, self._job.options
        database = None
        if options.database is not None:
            database = Path(options.database, *re.split(r"[^\w.-]+", shard.unit.name))
        drawing = Drawing(
            seed=shard.seed(options.seed, round_index),
            count=wanted,
            database=database,
            # Later, examples of findings that are known by then would pass, and be deleted.
            reuse=round_index == 0 and shard.index == 0,
        )

        def body(case: Case) -> None:
            try:
                self._examine(case)
            except _CaseFailedError:
                raise
            except Exception as error:
                raise _Broken(error) from error

        statistics = (lambda text: self._emit(Note(text))) if options.statistics else None
        self._case_began = time.monotonic()
        try:
            drawing.run(strategy, body, statistics)
        except _EndOfShrinking:
            pass
        except _Broken as broken:
            raise broken.error from None
        except (_CaseFailedError, Flaky):
            # How often the minimised case fails again is found out by `_settle`.
            if self._target is None:
                raise

    # ---- one case -----------------------------------------------------------------------------

    def _examine(self, case: Case) -> None:
        """The body of the property. Raises if the case fails as far as Hypothesis may know."""
        shrinking = self._target is not None
        case, verdict = directly(case, self._check(case), self._judge_alone)
        if not shrinking:
            self._generated += 1
            feed(f"class: {verdict.case_class or verdict.outcome}", verdict.counters)
        if self._is_new(verdict):
            self._keep(case, verdict)
            if self._target is None:
                self._target = Target.of(verdict)
                # Of a hang each step takes long: `simplify` has all the time, and fewer steps.
                hang = is_hang(self._target.identity)
                share = 0.0 if hang else self._hypothesis_share
                self._begin_shrinking(self._target.identity, share)
        if self._target is not None and Target.of(verdict) == self._target:
            raise _CaseFailedError(self._target.identity)

    def _judge_alone(self, case: Case) -> Verdict:
        self._checker.restart()  # nothing that other launches have left is to be why
        return self._judge(case, self._limit_s(time.monotonic()), self._patience_s)

    def _check(self, case: Case) -> Verdict:
        """Has the case judged, and counts it: as a case, or towards minimising."""
        self._heed_claims()
        self._raise_if_over()
        began = time.monotonic()
        verdict = self._judge(case, self._limit_s(began), self._patience_s)
        now = time.monotonic()
        self._case_s = now - began
        progress = self._progress
        progress.launches += verdict.launches
        for name, amount in verdict.checked.items():
            progress.checked[name] = progress.checked.get(name, 0) + amount
        progress.add_layers(verdict.layers)
        if self._shrink_ends is not None:
            progress.shrinks += 1
        elif verdict.outcome is Outcome.NOT_RUN:
            progress.not_run += 1
            progress.reasons[verdict.not_run] = progress.reasons.get(verdict.not_run, 0) + 1
        else:
            progress.cases += 1
            progress.seconds += now - self._case_began
            name = str(verdict.case_class)
            progress.classes[name] = progress.classes.get(name, 0) + 1
        if self._job.options.verbose:
            self._emit(Note(_describe(case, verdict)))
        if now - self._progress_sent >= PROGRESS_EVERY_S:
            self._send_progress()
        self._case_began = time.monotonic()
        return verdict

    def _limit_s(self, now: float) -> float | None:
        """How long a case may take that begins now; None: as long as the checker lets it."""
        limits = []
        if self._job.deadline is not None:
            limits.append(self._job.deadline - now + LAST_CASE_S)
        if self._shrink_ends is not None:
            usual_s = self._best_s
            if is_hang(self._minimising):
                usual_s = max(usual_s, self._patience_s)
            limits += [3 * usual_s + CANDIDATE_S, self._shrink_ends - now + CANDIDATE_S]
        return min(limits, default=None)

    @property
    def _patience_s(self) -> float:
        """What a launch is given: little while a hang is made simpler."""
        is_minimising = self._shrink_ends is not None
        in_short = is_minimising and is_hang(self._minimising)
        return self._timed.little_s if in_short else self._timed.asked_s

    def _judge(self, case: Case, limit_s: float | None, hang_after_s: float) -> Verdict:
        """The verdict; "not run" if the case took too long, or is none of its operation."""
        self._given_s = hang_after_s
        try:
            verdict = self._timed.verdict(lambda: self._checker.check(case), limit_s, hang_after_s)
        except CaseError as error:
            if self._shrink_ends is None:  # else a step too far, in making the case smaller
                self._complain(f"a case was drawn that is none: {error}: {case.dumps()}")
            return Verdict(Outcome.NOT_RUN, None, not_run="malformed")
        if verdict is not None:
            return verdict
        if self._shrink_ends is None and not self.stop_requested and self._timed.doubtful_s:
            self._emit(Unended(case, self._timed.doubtful_s))
        return _TOO_SLOW

    def _complain(self, sentence: str) -> None:
        """Of what is no reason to stop; once, as the first is usually the cause of the others."""
        if not self._complained:
            self._complained = True
            self._emit(Problem(sentence, fatal=False))

    def _heed_claims(self) -> None:
        """Leaves alone what another runner of the unit has found first."""
        for claim in self._claimed():
            self._settled[claim.identity] = min(
                claim.rank, self._settled.get(claim.identity, claim.rank)
            )
            candidate = self._candidates.get(claim.identity)
            if candidate is not None and candidate.rank >= claim.rank:
                del self._candidates[claim.identity]
                self._sure.pop(claim.identity, None)
            if self._shrink_ends is not None and self._minimising == claim.identity:
                self._shrink_ends = 0.0

    def _raise_if_over(self) -> None:
        if self._time_is_up:
            raise _EndOfTime
        if self._shrink_ends is not None and time.monotonic() >= self._shrink_ends:
            raise _EndOfShrinking

    @property
    def _time_is_up(self) -> bool:
        deadline = self._job.deadline
        return self.stop_requested or (deadline is not None and time.monotonic() >= deadline)

    def _is_new(self, verdict: Verdict) -> bool:
        """Whether it failed in a way that is not settled, or only in a class that says less."""
        identity = identity_of(verdict)
        settled = self._settled.get(identity)
        return bool(identity) and (settled is None or CLASS_RANK[verdict.case_class] < settled)

    def _keep(self, case: Case, verdict: Verdict) -> None:
        """Stores the case if it is the first of its identity or better than the one stored. What
        is not sure is told to nobody: it may be a slow launch on a busy machine."""
        identity = identity_of(verdict)
        is_sure = self._given_s >= self._timed.asked_s or not is_hang(identity)
        candidate = Candidate(case, verdict, is_sure)
        best, sure = self._candidates.get(identity), self._sure.get(identity)
        if best is None or candidate.better_than(best):
            self._candidates[identity] = candidate
            self._best_s = self._case_s
        if not is_sure or not (sure is None or candidate.better_than(sure)):
            return
        self._sure[identity] = candidate
        self._emit(Failing(case, verdict))
        unit, options = self._job.shard.unit, self._job.options
        try:
            entry = entry_of(unit, options.backend, options.build, identity, case)
            self._journal.append(entry)
        except CannotCheckError as error:
            self._complain(str(error))  # the finding itself goes on to the terminal

    # ---- minimising ---------------------------------------------------------------------------

    def _begin_shrinking(self, identity: str, share: float) -> None:
        self._minimising = identity
        self._shrink_ends = time.monotonic() + self._job.options.shrink_s * share
        if is_hang(identity) and self._job.deadline is not None:
            # What comes of it is confirmed, or else of no use.
            confirm_s = self._timed.asked_s if self._timed.little_s < self._timed.asked_s else 0.0
            self._shrink_ends = min(self._shrink_ends, self._job.deadline - confirm_s)
        self._send_progress()

    @property
    def _hypothesis_share(self) -> float:
        """Smaller near the end of the run, so that `simplify` has its part of what is left."""
        if self._job.deadline is None:
            return HYPOTHESIS_SHARE
        left_s = max(self._job.deadline - time.monotonic(), 0.0)
        return HYPOTHESIS_SHARE * min(1.0, left_s / self._job.options.shrink_s)

    def _settle(self, identity: str) -> None:
        """Minimises the best case of `identity`, repeats it, and makes it a finding.

        If minimising comes across the same failure in a class that says more, it goes on from
        there; but not to a finding of its own, unless the first one ends the unit.
        """
        best = self._candidates.get(identity)
        if best is None:  # another runner has claimed it meanwhile
            self._shrink_ends = None
            return
        why_not = ""
        first = best.verdict
        target = Target.of(first)
        self._begin_shrinking(identity, 1.0 if is_hang(identity) else 1.0 - HYPOTHESIS_SHARE)

        def still_fails(case: Case) -> bool:
            nonlocal target
            verdict = self._check(case)
            if self._is_new(verdict):
                self._keep(case, verdict)
                if _says_more(verdict, target, first):
                    found = Target.of(verdict)
                    if found.identity == target.identity or not self._job.options.keep_going:
                        target = found
                        self._minimising = found.identity
            return Target.of(verdict) == target

        try:
            simplify(best.case, still_fails)
        except _Stop:
            why_not = self._why_it_ended
        self._minimising = target.identity
        best, not_confirmed = self._confirmed(target.identity, identity)
        if best is not None:
            self._report(best, not_confirmed or why_not)
        self._shrink_ends = None
        self._raise_if_over()

    @property
    def _why_it_ended(self) -> str:
        if self.stop_requested:
            return STOPPED
        return TIME_WAS_UP if self._time_is_up else ITS_TIME_WAS_UP

    def _confirmed(self, identity: str, first: str) -> tuple[Candidate | None, str]:
        """What is reported: the best case of `identity`; but of a hang that little patience has
        shown only what all of the patience shows too, else the best that this has shown, of
        `identity` or else of `first`. And why that is not the simplest, in words; "" if it is. None
        if nothing is left to be reported."""
        best = self._candidates.get(identity)
        if best is None or best.is_sure:
            return best, ""
        not_minimised = self._why_it_ended
        if not self._time_is_up:
            deadline = self._job.deadline
            verdict, not_minimised = self._timed.confirmed(
                lambda: self._checker.check(best.case),
                lambda verdict: identity_of(verdict) == identity,
                None if deadline is None else deadline - time.monotonic() + LAST_CASE_S,
            )
            if verdict is not None:
                return Candidate(best.case, verdict), ""
        del self._candidates[identity]
        known = self._sure.get(identity) or self._sure.get(first)
        if known is not None:
            self._candidates[identity_of(known.verdict)] = known
        return known, not_minimised

    def _report(self, best: Candidate, not_minimised: str) -> None:
        """Repeats the case and makes it a finding. `not_minimised`: why it is not; "" if it is."""
        identity = identity_of(best.verdict)
        began, hang = time.monotonic(), is_hang(identity)
        repeated = self._timed.repeat(
            lambda: self._checker.check(best.case),
            lambda verdict: identity_of(verdict) == identity,
            lambda: self._repeats_end(began, hang) - time.monotonic(),
            hang=hang,
        )
        if repeated.problem:
            self._complain(repeated.problem)
        self._emit(
            Settled(
                best.case,
                best.verdict,
                not not_minimised,
                repeated.repeats,
                repeated.runs,
                repeated.hang_after_s,
                not_minimised,
            )
        )
        self._settled[identity] = best.rank

    def _repeats_end(self, began: float, hang: bool) -> float:
        """Until when a finding may be repeated."""
        grace_s = REPEAT_GRACE_S[self._job.options.backend]
        if not self._time_is_up:
            ends = began + longest_repeats_s(hang=hang)
            deadline = self._job.deadline
            return ends if deadline is None else min(ends, deadline + grace_s)
        if self._last_repeat_ends is None:
            self._last_repeat_ends = time.monotonic() + REPEAT_GRACES_S
        return min(began + grace_s, self._last_repeat_ends)

    def _settle_the_rest(self) -> None:
        """Failing cases that no round has minimised: reported as they are, never dropped."""
        rest = [identity for identity in self._candidates if identity not in self._settled]
        for identity in rest:
            if self._ended_early:
                return
            try:
                self._settle(identity)
            except _Stop:
                continue

    def _send_progress(self) -> None:
        progress, self._progress = self._progress, Progress()
        self._progress_sent = time.monotonic()
        if progress != Progress():
            progress.memory = self._checker.memory
            self._emit(progress)


def _says_more(verdict: Verdict, target: Target, first: Verdict) -> bool:
    """Whether it is the failure of `first`, in a class that says more than the target's."""
    failure, wanted = cause(verdict), cause(first)
    if failure is None or wanted is None or failure.identity != wanted.identity:
        return False
    return CLASS_RANK[verdict.case_class] < CLASS_RANK[target.case_class]


def _describe(case: Case, verdict: Verdict) -> str:
    what = identity_of(verdict) or verdict.not_run or str(verdict.outcome)
    return f"{verdict.case_class or '?'}: {what}: {case.dumps()}"
