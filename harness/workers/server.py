"""The fork server: imports once what workers need, then forks one on request in milliseconds.

It loads no subject and touches no CUDA, so whatever a worker does to itself, the next one starts
clean. It ends, and its workers with it, when its client's end of the socket closes.

    python -m pagefuzz.harness.workers.server <socket descriptor> [module to import ...]
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.native import parse_types
from pagefuzz.harness.workers import worker
from pagefuzz.harness.workers.protocol import receive_with_descriptors, send
from pagefuzz.oracles import registry

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: set[int] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._libc = ctypes.CDLL(None)
        # Whatever a subject starts becomes a child of this process when its worker ends.
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        send(self._channel, {"ready": os.getpid()})
        try:
            while True:
                ready, _, _ = select.select([self._channel.fileno(), self._wake_read], [], [])
                if self._wake_read in ready:
                    self._reap()
                if self._channel.fileno() in ready and not self._answer():
                    return
        except OSError:
            return  # the client is gone
        finally:
            self._end_children()

    def _answer(self) -> bool:
        message, descriptors = receive_with_descriptors(self._channel)
        if message is None:
            return False
        if "kill" in message:
            # Only a child that has not been reaped: its number cannot belong to anyone else.
            if message["kill"] in self._children:
                os.kill(message["kill"], signal.SIGKILL)
        else:
            self._fork(message["fork"], descriptors)
        return True

    def _fork(self, assignment: dict[str, Any], descriptors: list[int]) -> None:
        """Answers with the number of a new worker, or why there is none: processes and memory may
        be limited, and that is no reason to end those that there are."""
        _prepare(assignment)
        try:
            child = os.fork()
        except OSError as error:
            answer: dict[str, Any] = {"cannot_fork": error.strerror}
        else:
            if child == 0:
                self._become_worker(assignment, descriptors)
            self._children.add(child)
            answer = {"forked": child}
        for descriptor in descriptors:
            os.close(descriptor)
        send(self._channel, answer)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 512):
                pass
        with contextlib.suppress(ChildProcessError):  # no child is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                child, status = ended
                if child in self._children:
                    self._children.discard(child)
                    # It may hold the worker's channel open, so that nobody would notice the end.
                    self._kill(self._orphans())
                    send(self._channel, {"ended": child, "status": status})

    def _orphans(self) -> list[int]:
        """What workers that have ended left behind."""
        try:
            listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
            return []
        return [pid for pid in map(int, listed.split()) if pid not in self._children]

    def _kill(self, processes: Iterable[int]) -> None:
        for process in processes:
            os.kill(process, signal.SIGKILL)

    def _end_children(self) -> None:
        self._kill(self._children)
        for child in self._children:
            os.waitpid(child, 0)
        self._children.clear()
        while orphans := self._orphans():  # each may leave some in turn
            self._kill(orphans)
            for orphan in orphans:
                os.waitpid(orphan, 0)

    def _become_worker(self, assignment: dict[str, object], descriptors: list[int]) -> NoReturn:
        """The rest of a worker's life, in the forked child."""
        code = 70
        server = os.getppid()
        try:
            # A core of a process with terabytes of address space would take minutes.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(0)  # the server ended before the line above
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            channel, output, box = descriptors
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            code = worker.serve(socket.socket(fileno=channel), box, assignment)
        except BaseException:  # noqa: BLE001 - nothing may run on into the server's code
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(assignment: dict[str, Any]) -> None:
    """Does once what every worker would have to do: tens of milliseconds, for Triton seconds."""
    halves = [assignment[half] for half in ("writer", "reader") if half in assignment]
    for one in halves or [assignment]:
        source = Path(one["source_path"])
        if source.suffix == ".py":
            if one["backend"] == "cuda":  # Triton's driver asks it; the interpreter does without
                # A worker reports it: one that lacks a library raises OSError, for instance.
                with contextlib.suppress(Exception):
                    importlib.import_module("torch")
        else:
            with contextlib.suppress(CannotCheckError):  # a worker reports it
                parse_types(source, one["operation"])


def main() -> None:
    # Ctrl-C reaches the whole terminal group; the client decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    registry.operations()
    registry.judgements()
    gc.freeze()  # a collection in a worker would otherwise copy every page it looks at
    _Server(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
