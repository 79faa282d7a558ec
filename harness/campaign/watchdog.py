"""Ends a case that takes too long, by ending the worker that runs it."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pagefuzz.harness.campaign.parts import CaseChecker

#: It barks again this often: a checker gives a case whose worker died early to a second one.
_AGAIN_S = 0.2

_SHORTEST_S = 0.001


class Watchdog:
    """A context in which the checker's worker is killed after `limit_s`; None: never.

    In the main thread only, as it takes the process' alarm clock. `barked` says whether it had to;
    the checker then reports a death that is not the subject's doing.
    """

    def __init__(self, checker: CaseChecker, limit_s: float | None) -> None:
        self._checker = checker
        self._limit_s = limit_s
        self.barked = False

    def __enter__(self) -> Self:
        if self._limit_s is not None:
            signal.signal(signal.SIGALRM, self._bark)
            signal.setitimer(signal.ITIMER_REAL, max(self._limit_s, _SHORTEST_S), _AGAIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._limit_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _bark(self, *_: object) -> None:
        if (pid := self._checker.worker_pid) is not None:
            self.barked = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
