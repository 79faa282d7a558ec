"""The runner process: works off one job, and tells what happens in lines of JSON.

Started as `python -P -m pagefuzz.harness.campaign.runner FD` with the job as the first line of
standard input and claims of other runners as the following ones; events go to the open file
descriptor FD. It draws and minimises but never loads a subject: the checker it
opens has workers for that.

It does not outlive the command line: once standard input has ended it has a second to come to an
end by itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from pagefuzz.harness.campaign.events import Claim, Done, Event, Problem, encode
from pagefuzz.harness.campaign.journal import Journal
from pagefuzz.harness.campaign.plan import GRACE_S, Job
from pagefuzz.harness.campaign.search import Search
from pagefuzz.harness.errors import CannotCheckError

#: So long a runner takes at most to end once its command line is gone, and then its fork server.
LAST_S = 1.0


class Inbox:
    """Lines of JSON from a file descriptor."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._unread = b""

    def job(self) -> Job:
        """Waits for it."""
        while b"\n" not in self._unread:
            chunk = os.read(self._handle, 1 << 16)
            if not chunk:
                raise EOFError("standard input ended before the job")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        os.set_blocking(self._handle, False)
        return Job.from_json(json.loads(line))

    def claims(self) -> list[Claim]:
        """Those that have arrived."""
        with contextlib.suppress(BlockingIOError):
            self._unread += os.read(self._handle, 1 << 16)
        *lines, self._unread = self._unread.split(b"\n")
        return [Claim(**json.loads(line)) for line in lines]


class Runner:
    """One job, from its text to `Done`."""

    def __init__(self, inbox: Inbox, handle: int) -> None:
        self._inbox = inbox
        self._job = inbox.job()
        self._handle = handle
        self._search: Search | None = None
        self._stop_requested = False

    def stop(self, *_: object) -> None:
        """Signal handler: ends the search at the next case; what was found is still reported."""
        self._stop_requested = True
        if self._search is not None:
            self._search.stop()

    def emit(self, event: Event) -> None:
        try:
            unsent = memoryview(encode(event))
            while unsent:
                unsent = unsent[os.write(self._handle, unsent) :]
        except BrokenPipeError:
            self.stop()  # nobody listens any more; the journal keeps what is found until then

    def run(self) -> None:
        options, deadline = self._job.options, self._job.deadline
        if deadline is not None:  # says what it was doing, before it is killed for that
            late_s = deadline - time.monotonic() + GRACE_S - 2.0
            faulthandler.dump_traceback_later(max(late_s, GRACE_S - 2.0))
        journal = Journal(Path(options.journal) if options.journal else None)
        try:
            parts = importlib.import_module(options.parts)
            with parts.open_checker(self._job) as checker:
                self._search = Search(
                    self._job, parts, checker, self.emit, journal, self._inbox.claims
                )
                self._search.stop_requested = self._stop_requested
                self._search.run()
        except CannotCheckError as error:
            self._give_up(Problem(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not pass for a clean run
            last = traceback.extract_tb(error.__traceback__)[-1]
            self._give_up(
                Problem(
                    f"internal error while checking {self._job.shard.unit.name}: "
                    f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})",
                    traceback.format_exc(),
                )
            )
        finally:
            journal.close()

    def _give_up(self, problem: Problem) -> None:
        self.emit(problem)
        self.emit(Done("a problem"))


def _outlive_nobody(runner: Runner, lifeline: int) -> None:
    """In a thread of its own: ends this process, and what it has started, after the command line.
    The case that runs may hang for a long time yet."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they interrupt the runner
    watch = select.poll()
    watch.register(lifeline, 0)  # its end alone: what can be read is not for this thread
    watch.poll()
    runner.stop()
    time.sleep(LAST_S)
    if servers := sys.modules.get("pagefuzz.harness.workers.fork_server"):  # else there is none
        servers.drop_servers(LAST_S)
    if os.getpgrp() == os.getpid():  # as the command line starts it
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    runner = Runner(Inbox(sys.stdin.fileno()), int(sys.argv[1]))
    signal.signal(signal.SIGTERM, runner.stop)
    signal.signal(signal.SIGINT, runner.stop)
    lifeline = sys.stdin.fileno()
    threading.Thread(target=_outlive_nobody, args=(runner, lifeline), daemon=True).start()
    runner.run()


if __name__ == "__main__":
    main()
