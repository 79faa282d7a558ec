"""Processes as the kernel lists them, for tests of what ends them."""

from __future__ import annotations

import time
from pathlib import Path


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are still there"
        time.sleep(0.01)
