"""Processes as the kernel lists them, for tests of what ends them."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Of each of its threads."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found += map(int, (thread / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """As far as they are there while this looks."""
    try:
        own = children(pid)
    except FileNotFoundError:
        return []
    return [*own, *(one for child in own for one in descendants(child))]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: gone since it was opened
        return False


def wait_until_gone(*pids: int, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are still there"
        time.sleep(0.01)
