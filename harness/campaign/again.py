"""Checks that are given a time, and the repeats of a finding.

A hang that was seen with the patience that was asked for is made simpler and repeated with less of
it: else there would be time for neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagefuzz.harness.campaign.watchdog import HasWorker, Watchdog
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import TIME_WAS_UP
from pagefuzz.harness.patience import SHORTEST_S
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.judgements.hang import HANG
from pagefuzz.oracles.verdict import Outcome, Verdict

#: Further runs of a minimised case.
REPEATS = 10

#: A settled finding is not repeated for longer than this: a fresh worker takes 20 ms on the host,
#: 0.4 s on a GPU and 1.3 s in Triton's interpreter. Each run of a hang is waited for.
_REPEAT_S, _REPEAT_HANG_S = 20.0, 60.0

#: Little patience is so many times the longest launch that has come back: a busy machine makes one
#: a few times slower.
_TIMES_THE_LONGEST = 20

#: Little patience while no launch has come back.
_UNKNOWN_S = 5.0


class Launches(HasWorker, Protocol):
    """What is needed of a checker (`check.OwnsWorker`)."""

    hang_after_s: float

    @property
    def longest_launch_s(self) -> float: ...

    @property
    def unended_launch_s(self) -> float: ...

    def restart(self) -> None: ...


def is_hang(identity: str) -> bool:
    """Whether the failure of that identity is a launch that does not end."""
    return HANG in identity.split(":")


def longest_repeats_s(*, hang: bool) -> float:
    """For so long a finding is repeated at most."""
    return _REPEAT_HANG_S if hang else _REPEAT_S


@dataclass(frozen=True)
class Repeated:
    """How often a case failed again.

    repeats  how many of `runs` further runs failed in the same way
    hang_after_s  after which a launch of them was a hang, if that is less than was asked for
    problem  why there was not one more; "" if that were enough, or there was no time for it
    """

    repeats: int = 0
    runs: int = 0
    hang_after_s: float | None = None
    problem: str = ""


class Timed:
    """Has cases checked by one checker, each in the time that it is given. In the main thread only.

    asked_s  what a launch is given by whoever opened the checker
    """

    def __init__(self, checker: Launches) -> None:
        self._checker = checker
        self._watchdog: Watchdog | None = None
        self.asked_s = checker.hang_after_s

    @property
    def little_s(self) -> float:
        """What a launch is given once a hang was seen with `asked_s`: a launch that ends has not
        come near it so far."""
        longest_s = self._checker.longest_launch_s
        enough_s = max(SHORTEST_S, _TIMES_THE_LONGEST * longest_s) if longest_s else _UNKNOWN_S
        return min(self.asked_s, enough_s)

    @property
    def doubtful_s(self) -> float:
        """How long the last launch had lasted when it was ended, if that is so long that it may
        hang: else 0."""
        lasted_s = self._checker.unended_launch_s
        return lasted_s if lasted_s > max(self.little_s, _UNKNOWN_S) else 0.0

    def verdict(
        self, check: Callable[[], Verdict], limit_s: float | None, hang_after_s: float
    ) -> Verdict | None:
        """What `check` says of a case; None if that takes longer than `limit_s`: its worker is
        ended then. Raises what `check` raises.

        hang_after_s  after which a launch is a hang
        """
        self._checker.hang_after_s = hang_after_s
        self._watchdog = watchdog = Watchdog(self._checker, limit_s)
        try:
            with watchdog:
                verdict = check()
        except CannotCheckError:
            if not watchdog.barked:
                raise
            return None
        finally:
            self._watchdog = None
            self._checker.hang_after_s = self.asked_s
        return None if watchdog.barked else verdict

    def confirmed(
        self,
        check: Callable[[], Verdict],
        is_same: Callable[[Verdict], bool],
        limit_s: float | None = None,
    ) -> tuple[Verdict | None, str]:
        """What `check` says, with all of the patience, of a hang that little of it has shown; None
        and why not, in words, if it does not fail in the same way."""
        verdict = self.verdict(check, limit_s, self.asked_s)
        if verdict is None:
            return None, TIME_WAS_UP
        if is_same(verdict):
            return verdict, ""
        if verdict.outcome is Outcome.NOT_RUN:
            return None, f"a simpler case that seemed to hang was not run again: {verdict.not_run}"
        given = f"when it was given {self.asked_s:g} s"
        return None, f"a simpler case that seemed to hang came back {given}"

    def hurry(self, limit_s: float) -> None:
        """What is being checked gets no more than that from now on. For signal handlers."""
        if self._watchdog is not None:
            self._watchdog.hurry(limit_s)

    def repeat(
        self,
        check: Callable[[], Verdict],
        is_same: Callable[[Verdict], bool],
        left_s: Callable[[], float] | None = None,
        *,
        hang: bool,
    ) -> Repeated:
        """Runs a case again, each time in a fresh worker: what others have left behind must not be
        the reason.

        is_same  whether it failed in the same way
        left_s   for all runs that are still to come; one that takes longer is not counted. None:
                 `longest_repeats_s` in all
        hang     whether that is a hang
        """
        left_s = left_s or seconds_left(longest_repeats_s(hang=hang))
        repeats = runs = not_run = 0
        given_s = self.little_s if hang else self.asked_s
        problem = why_not = ""
        while runs + not_run < REPEATS and (limit_s := left_s()) > 0:
            try:
                self._checker.restart()
                verdict = self.verdict(check, limit_s, given_s)
            except (CannotCheckError, CaseError) as error:
                problem = f"a finding was repeated {runs} times only: {error}"
                break
            if verdict is None:
                break
            if verdict.outcome is Outcome.NOT_RUN:  # neither failed nor passed
                not_run, why_not = not_run + 1, verdict.not_run
                continue
            runs += 1
            repeats += is_same(verdict)
        if not_run and not problem:
            problem = f"a finding was repeated {runs} times only: {not_run} not run: {why_not}"
        less = given_s if given_s < self.asked_s else None
        return Repeated(repeats, runs, less, problem)


def seconds_left(limit_s: float) -> Callable[[], float]:
    """From now on."""
    until = time.monotonic() + limit_s
    return lambda: until - time.monotonic()
