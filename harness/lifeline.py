"""Processes that do not outlive this one, however it ends.

The kernel sees to it: the process group of what is started is killed once nobody is left who could
write into a pipe, and only this process could. That asks nothing of what is started, such as a
compiler or somebody else's tool, and works where this process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

#: The command waits until it is tied; if nobody is left to do that, it ends.
_GATE = 'read -r _ && exec "$@" < /dev/null'


@contextmanager
def tied(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, without input; all of its group ends with the block.

    options  of `subprocess.Popen`

    Raises `OSError` if it does not run.
    """
    _require(command[0])
    theirs, ours = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                ["sh", "-c", _GATE, "sh", *command],
                stdin=subprocess.PIPE,
                pass_fds=(theirs,),
                start_new_session=True,
                **options,
            )
            _kill_at_hangup(theirs, process.pid)
            _open_gate(process)
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


def _require(program: str) -> None:
    if shutil.which(program) is None:
        why = errno.EACCES if os.path.exists(program) else errno.ENOENT
        raise OSError(why, os.strerror(why), program)


def _open_gate(process: subprocess.Popen[bytes]) -> None:
    gate, process.stdin = process.stdin, None  # nobody has anything else to say to it
    assert gate is not None
    with suppress(BrokenPipeError), gate:  # somebody has ended it
        gate.write(b"\n")


def _kill_at_hangup(pipe: int, group: int) -> None:
    """The descriptor is shared with the group, and with it what is set here."""
    with suppress(OSError):  # a sandbox without it: nothing is wrong until somebody kills this
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -group)
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
