"""A runner process as the command line sees it: started, listened to, stopped, buried."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict

from pagefuzz.harness.campaign.events import Claim, Done, Event, decode
from pagefuzz.harness.campaign.plan import GRACE_S, Job


class RunnerProcess:
    """`handle` is readable when events have arrived."""

    def __init__(self, job: Job) -> None:
        """Raises `OSError` if the machine does not let it start."""
        self.job = job
        self.done: Done | None = None
        self._unread = b""
        self._kill_at = None if job.deadline is None else job.deadline + GRACE_S
        self._killed = self._overdue = self._stopped = False
        with contextlib.ExitStack() as unless_started:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `bury`
            unless_started.enter_context(self._stderr)
            self.handle, theirs = os.pipe()
            unless_started.callback(os.close, self.handle)
            try:
                os.set_blocking(self.handle, False)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "pagefuzz.harness.campaign.runner", str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=self._stderr,
                    stderr=self._stderr,
                    pass_fds=(theirs,),
                    start_new_session=True,  # Ctrl-C is for the command line: it stops its runners
                )
            finally:
                os.close(theirs)
            unless_started.pop_all()
        self._write(json.dumps(job.to_json()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, claim: Claim) -> None:
        """What it may leave to another runner."""
        self._write(json.dumps(asdict(claim)))

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone: `ended` will notice
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def read(self) -> list[Event]:
        """Events that have arrived. A runner that was killed may leave a torn last line."""
        chunks = [self._unread]
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.handle, 1 << 16):
                chunks.append(chunk)
        *lines, self._unread = b"".join(chunks).split(b"\n")
        events = [decode(line) for line in lines]
        for event in events:
            if isinstance(event, Done):
                self.done = event
        return events

    def ended(self) -> bool:
        """Whether the process is gone. Kills it if it should have been gone for long."""
        if self._process.poll() is not None:
            return True
        if self._kill_at is not None and time.monotonic() >= self._kill_at and not self._killed:
            self._overdue = True
            self.kill()
        return False

    def stop(self) -> None:
        """Asks it to end at the next case."""
        self._stopped = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        self._kill_at = min(self._kill_at or float("inf"), time.monotonic() + GRACE_S)

    def kill(self) -> None:
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def bury(self) -> tuple[str, str] | None:
        """Frees what the ended process held. Returns how it died and the end of what it printed;
        None if it ended as it should."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its workers, if it left any behind
        os.close(self.handle)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with self._stderr:
            self._stderr.seek(0)
            tail = self._stderr.read()[-2000:].decode(errors="replace").strip()
        code = self._process.returncode
        if self.done is not None or (self._stopped and code == -signal.SIGTERM):
            return None  # or it was stopped before it had begun
        if self._overdue:
            return f"it did not end within {GRACE_S:.0f} s of being due and was killed", tail
        if self._killed:
            return "it was killed, as asked", tail
        return signal.Signals(-code).name if code < 0 else f"exit status {code}", tail
