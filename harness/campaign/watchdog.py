"""Ends a case that takes too long, by ending the worker that runs it."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Protocol, Self

#: It barks again this often: a checker gives a case whose worker died early to a second one.
_AGAIN_S = 0.2

_SHORTEST_S = 0.001


class HasWorker(Protocol):
    @property
    def worker_pid(self) -> int | None: ...


class Watchdog:
    """A context in which the checker's worker is killed after `limit_s`; None: never, unless
    `hurry` is called.

    In the main thread only, as it takes the process' alarm clock. `barked` says whether it had to;
    the checker then reports a death that is not the subject's doing.
    """

    def __init__(self, checker: HasWorker, limit_s: float | None) -> None:
        self._checker = checker
        self._limit_s = limit_s
        self._is_on_duty = False
        self.barked = False

    def __enter__(self) -> Self:
        signal.signal(signal.SIGALRM, self._bark)
        if self._limit_s is not None:
            self._set(self._limit_s)
        self._is_on_duty = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on_duty = False  # first: a signal that comes in between must not set it again
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def hurry(self, limit_s: float) -> None:
        """At most so long from now on. For signal handlers: it may come at any moment."""
        left_s, _ = signal.getitimer(signal.ITIMER_REAL)
        if self._is_on_duty and not 0.0 < left_s < limit_s:
            self._set(limit_s)

    @staticmethod
    def _set(limit_s: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(limit_s, _SHORTEST_S), _AGAIN_S)

    def _bark(self, *_: object) -> None:
        if (pid := self._checker.worker_pid) is not None:
            self.barked = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
