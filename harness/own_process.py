"""What a launch on the host must leave as it found it: the process that it happens in.

A subject shares its process with the harness. What it leaves behind could hide a fault of the next
launch, or change what it is compared with: a handler that swallows faults of memory protection, a
thread that goes on writing when the memory has been compared, another rounding of the floating
point numbers that references are computed with.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cffi

from pagefuzz.harness.errors import CannotCheckError

#: By which a fault of a launch ends its process.
_FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)

#: The kernel counts a thread for a moment after it has been joined.
_THREADS_END_S = 0.2

_TASKS = "/proc/self/task"

#: More than a `struct sigaction` has anywhere, and its first member. Of the mask in it the C
#: library fills in a part.
_ACTION_BYTES, _HANDLER_BYTES = 512, 8

_ffi = cffi.FFI()
_ffi.cdef(
    """
    int sigaction(int number, const void *action, void *old);
    int fesetenv(const void *environment);
    """
)
_libc: Any = _ffi.dlopen(None)
_libm: Any = _ffi.dlopen("libm.so.6")


class SpoiledProcessError(CannotCheckError):
    """Nothing that happens in this process from now on can be judged."""


def restore_arithmetic() -> None:
    """Rounding to nearest, gradual underflow, no traps: what references are computed with."""
    _libm.fesetenv(_ffi.cast("void *", -1))  # FE_DFL_ENV, with glibc and musl


@contextmanager
def kept_intact() -> Iterator[None]:
    """A launch happens within. Arithmetic is restored afterwards.

    Raises `SpoiledProcessError` if the launch has left threads or handlers of faults behind.
    """
    process, actions, threads = os.getpid(), _actions(), _thread_count()
    yield
    if os.getpid() != process:
        os._exit(0)  # the launch has forked: there is one worker, and this is not it
    restore_arithmetic()
    if (changed := _changed(actions)) is not None:
        raise SpoiledProcessError(
            f"the launch has left another handler of {changed.name} behind, which could hide the "
            "faults of every launch that follows; a subject must leave it as it is"
        )
    if _thread_count() > threads and (count := _left_running(threads)):
        raise SpoiledProcessError(
            f"the launch has returned and left {count} more thread{'s' if count > 1 else ''} "
            "running: what they write can come too late to be judged; a subject must end them"
        )


def _actions() -> tuple[bytes, ...]:
    """How each fatal signal is handled."""
    action = _ffi.new("char[]", _ACTION_BYTES)
    out = []
    for number in _FATAL:
        _libc.sigaction(number, _ffi.NULL, action)
        out.append(_ffi.unpack(action, _HANDLER_BYTES))
    return tuple(out)


def _changed(before: tuple[bytes, ...]) -> signal.Signals | None:
    for number, was, now in zip(_FATAL, before, _actions(), strict=True):
        if was != now:
            return number
    return None


def _thread_count() -> int:
    """Threads of this process; the kernel has it in the number of links, which is one call."""
    return os.stat(_TASKS).st_nlink - 2


def _left_running(before: int) -> int:
    """How many threads there are more than before, Python's own aside, once those that are about
    to end have had the time."""
    deadline = time.monotonic() + _THREADS_END_S
    while True:
        # A thread of Python's may have begun meanwhile, where launches are not isolated.
        known = {thread.native_id for thread in threading.enumerate()}
        foreign = sum(int(task) not in known for task in os.listdir(_TASKS))
        more = min(foreign, _thread_count() - before)
        if more <= 0 or time.monotonic() > deadline:
            return max(more, 0)
        time.sleep(0.001)
