"""Fork servers of this process: `server` is the program that they run."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.workers.output import OutputFile
from pagefuzz.harness.workers.protocol import Message, receive, send

START_TIMEOUT_S = 120.0
REAP_TIMEOUT_S = 30.0

_LOOK_EVERY_S = 0.02


class Assigned(Protocol):
    """What a worker is given to launch; the worker knows it by its JSON."""

    def to_json(self) -> dict[str, Any]: ...


class ForkServer:
    """A fork server process, for any number of workers of this process. Threads may share it."""

    def __init__(
        self, environment: Mapping[str, str] | None = None, preload: Sequence[str] = ()
    ) -> None:
        """`environment` is added to this process's, `preload` names modules to import.

        Raises `CannotCheckError` with what the process printed, if it does not come up.
        """
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        self._channel, theirs = socket.socketpair()
        command = [sys.executable, "-m", "pagefuzz.harness.workers.server", str(theirs.fileno())]
        with OutputFile() as output:
            self._process = subprocess.Popen(
                [*command, *preload],
                # One thread: a fork of a process with more is asking for a deadlock. And the
                # current folder must not be on the path: ours has folders named like packages.
                # One queue: a context of one takes half the time, and launches are on one stream.
                env={
                    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTHONSAFEPATH": "1",
                    **(environment or {}),
                },
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output.descriptor,
                stderr=output.descriptor,
            )
            theirs.close()
            try:
                message = receive(self._channel, START_TIMEOUT_S)
            except TimeoutError:
                message = None
            if message is None:
                self.close()
                said = (
                    " ".join(output.text().split()[-40:])
                    or f"it ended with {self._process.returncode}"
                )
                raise CannotCheckError(f"the fork server did not start: {said}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, assignment: Assigned, descriptors: Sequence[int]) -> int:
        """Starts a worker with these descriptors (socket, output, stage); its process id. Raises
        `CannotCheckError` if there can be no further process, or the server is gone."""
        with self._lock:
            try:
                send(self._channel, {"fork": assignment.to_json()}, descriptors)
                while True:
                    message = self._receive(START_TIMEOUT_S)
                    if "forked" in message:
                        return int(message["forked"])
                    if "cannot_fork" in message:
                        raise CannotCheckError(
                            f"no worker can be started: {message['cannot_fork']}"
                        )
            except OSError as error:
                raise CannotCheckError(f"the fork server is gone: {error}") from None

    def end_status(self, pid: int, timeout_s: float = REAP_TIMEOUT_S) -> int | None:
        """The wait status of a worker that has ended, or is about to; None if that takes longer."""
        with self._lock:
            try:
                while pid not in self._ended:
                    self._receive(timeout_s)
            except (TimeoutError, CannotCheckError):
                return None
            return self._ended.pop(pid)

    def kill(self, pid: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            send(self._channel, {"kill": pid})

    def _receive(self, timeout_s: float) -> Message:
        is_closed = self._channel.fileno() < 0  # another took its place
        message = None if is_closed else receive(self._channel, timeout_s)
        if message is None:
            raise CannotCheckError("the fork server ended unexpectedly")
        if "ended" in message:
            self._ended[message["ended"]] = message["status"]
        return message

    def close(self) -> None:
        """Ends the server and every worker of it."""
        self._channel.close()
        try:
            self._process.wait(timeout=REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def hang_up(self) -> None:
        """Lets it end its workers and itself, though another thread may be waiting for it."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)


_servers: dict[tuple[object, ...], ForkServer] = {}
_servers_lock = threading.Lock()


def shared_server(
    environment: Mapping[str, str] | None = None, preload: Sequence[str] = ()
) -> ForkServer:
    """This process's server with that environment, started on first use."""
    # A forked copy of this process must not talk into its parent's socket: hence the process id.
    key = (os.getpid(), tuple(sorted((environment or {}).items())), tuple(preload))
    with _servers_lock:
        server = _servers.get(key)
        if server is None or not server.alive:
            if server is not None:
                server.close()
            elif not _servers:
                atexit.register(close_servers)
            server = _servers[key] = ForkServer(environment, preload)
        return server


def close_servers() -> None:
    """Ends every fork server of this process; also done when it exits."""
    with _servers_lock:
        for key in list(_servers):
            server = _servers.pop(key)
            if key[0] == os.getpid():
                server.close()


def drop_servers(timeout_s: float) -> None:
    """As `close_servers`, from any thread, for a process that ends at once: waits no longer than
    that, for whatever they are doing."""
    servers = list(_servers.values())  # no lock: who has it may be waiting for a worker
    for server in servers:
        server.hang_up()
    deadline = time.monotonic() + timeout_s
    while any(server.alive for server in servers) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
