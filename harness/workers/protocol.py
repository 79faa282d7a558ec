"""Messages between client, fork server and worker: a length and JSON. Never a pickle."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("<I")
_MOST_BYTES = 256 * 2**20
_MOST_DESCRIPTORS = 8

Message = dict[str, Any]


class ProtocolError(Exception):
    """The other side sent something that is no message."""


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Raises `OSError` (usually `BrokenPipeError`) if nobody listens any more."""
    data = json.dumps(message, separators=(",", ":")).encode()
    data = _LENGTH.pack(len(data)) + data
    if descriptors:
        sent = socket.send_fds(channel, [data], descriptors)
        data = data[sent:]
    channel.sendall(data)


def receive(channel: socket.socket, timeout_s: float | None = None) -> Message | None:
    """The next message; None at the end of the stream. Raises `TimeoutError`."""
    message, _ = receive_with_descriptors(channel, timeout_s, expect_descriptors=False)
    return message


def receive_with_descriptors(
    channel: socket.socket, timeout_s: float | None = None, *, expect_descriptors: bool = True
) -> tuple[Message | None, list[int]]:
    """The next message and the file descriptors that came with it."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    descriptors: list[int] = []
    head = _read(channel, _LENGTH.size, deadline, descriptors if expect_descriptors else None)
    if head is None:
        return None, descriptors
    (size_bytes,) = _LENGTH.unpack(head)
    if size_bytes > _MOST_BYTES:
        raise ProtocolError(f"a message of {size_bytes:,} bytes")
    body = _read(channel, size_bytes, deadline, None)
    if body is None:
        return None, descriptors
    try:
        message = json.loads(body)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    if not isinstance(message, dict):
        raise ProtocolError(f"not a message: {message!r:.60}")
    return message, descriptors


def _read(
    channel: socket.socket, size_bytes: int, deadline: float | None, descriptors: list[int] | None
) -> bytes | None:
    data = bytearray()
    while len(data) < size_bytes:
        if deadline is not None:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([channel], [], [], left_s)[0]:
                raise TimeoutError
        wanted = size_bytes - len(data)
        try:
            if descriptors is None:
                part = channel.recv(wanted)
            else:
                part, received, _, _ = socket.recv_fds(channel, wanted, _MOST_DESCRIPTORS)
                descriptors.extend(received)
        except ConnectionResetError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)
