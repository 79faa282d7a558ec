"""Processes that do not outlive this one, however it ends.

The kernel sees to it: the process group of what is started is killed once nobody is left who could
write into a pipe, and only this process could. That asks nothing of what is started, such as a
compiler or somebody else's tool, and works where this process is killed.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def tied(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; all of its group ends with the block.

    options  of `subprocess.Popen`

    Raises `OSError` if it does not run.
    """
    theirs, ours = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                command, pass_fds=(theirs,), start_new_session=True, **options
            )
            _kill_at_hangup(theirs, process.pid)
        finally:
            os.close(theirs)
        with process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
    finally:
        os.close(ours)  # which ends what it has left behind


def _kill_at_hangup(pipe: int, group: int) -> None:
    """The descriptor is shared with the group, and with it what is set here."""
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -group)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
