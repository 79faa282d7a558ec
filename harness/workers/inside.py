"""Launches without a worker: in the process that asks for them, which may die of it.

For a debugger or a profiler, and for kernels that are known not to fault: nothing is forked and no
message travels. What a worker's death would be is the death of this process; what it was checking
is in the journal.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.arena import DeviceFaultError, DoesNotFitError
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.own_process import SpoiledProcessError
from pagefuzz.harness.running import Answer, Injection
from pagefuzz.harness.workers.blackbox import BlackBox, Stage
from pagefuzz.harness.workers.fork_server import Assigned
from pagefuzz.harness.workers.journal import Journal, Recorded
from pagefuzz.harness.workers.worker import Runs, runner_of
from pagefuzz.oracles.observation import Death

_LOOK_EVERY_S = 0.5


class InsideWorker:
    """As `client.Worker`, in this process. A launch that hangs ends it, with exit status 2.

    deaths  lost device contexts: 0 or 1, after which nothing can be launched
    hang_after_s  after which a launch ends the process
    watches_ends  of no use: what a launch ruins is this process
    """

    def __init__(
        self, assignment: Assigned, *, timeout_s: float, journal: Journal | None = None
    ) -> None:
        self._assignment, self.hang_after_s, self._journal = assignment, timeout_s, journal
        self._runner: Runs[Any] | None = None
        self._box: BlackBox | None = None
        self._closed = threading.Event()
        self._spoiled: SpoiledProcessError | None = None
        self.pid: int | None = None  # nobody may kill it
        self.deaths = 0
        self.device = ""
        self.memory = MemoryUse()
        self.watches_ends = False

    def start(self) -> None:
        """Loads the subject. Raises `CannotCheckError`."""
        if self._runner is not None:
            return
        file = BlackBox.create()
        self._box = BlackBox(file)
        os.close(file)
        try:
            self._runner = runner_of(self._assignment.to_json(), self._box)
        except (DeviceFaultError, DoesNotFitError, MemoryError) as error:
            said = str(error) or "there is not enough memory to start"
            raise CannotCheckError(said) from None
        self.device = self._runner.device
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def longest_launch_s(self) -> float:
        return 0.0 if self._box is None else self._box.longest_launch_s()

    @property
    def unended_launch_s(self) -> float:
        return 0.0  # nobody ends one

    def restart(self) -> None:
        """There is no process to end: what comes next finds what was left behind."""

    def run(
        self,
        case: Recorded,
        *,
        with_fixed_bytes: bool = False,
        injection: Injection | None = None,
    ) -> Answer | Death:
        """One case. Raises `CaseError` and `CannotCheckError`."""
        if self.deaths:
            raise CannotCheckError(
                "an earlier launch has broken the device's context, and it was not isolated: "
                "nothing more can be launched from this process"
            )
        if self._spoiled is not None:
            raise self._spoiled
        self.start()
        assert self._runner is not None
        assert self._box is not None
        if self._journal is not None:
            self._journal.write(case)
        self._box.enter(Stage.PREPARING)
        try:
            return self._runner.run(
                self._runner.parse(case.to_json()),
                with_fixed_bytes=with_fixed_bytes,
                injection=injection,
            )
        except DeviceFaultError as error:
            self.deaths = 1
            return Death(error.name, str(error))
        except SpoiledProcessError as error:
            self._spoiled = error
            raise
        finally:
            self._box.enter(Stage.IDLE)
            self.memory = self.memory.most(self._runner.memory())

    def _watch(self) -> None:
        """Ends this process if a launch does not end: nothing else can."""
        box = self._box
        assert box is not None
        entered, since = box.entered, time.monotonic()
        while not self._closed.wait(min(_LOOK_EVERY_S, self.hang_after_s)):
            now = box.entered
            if now != entered:
                entered, since = now, time.monotonic()
            elif now[0] == Stage.LAUNCHING and time.monotonic() - since > self.hang_after_s:
                where = f"; the case is in {self._journal.path}" if self._journal else ""
                print(
                    f"pagefuzz: a launch did not end within {self.hang_after_s:g} s, and was not "
                    f"isolated: this process ends{where}",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(2)

    def close(self) -> None:
        """An orderly end, unless the device is lost."""
        self._closed.set()
        if self._runner is not None and not self.deaths:
            self._runner.close()
        self._runner = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None
