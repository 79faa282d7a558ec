"""Whether the kernel, short of memory, has ended processes."""

from __future__ import annotations

from pathlib import Path

#: Of the machine and of this process's control group; either may be missing.
_COUNTS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))


def oom_kills(files: tuple[Path, ...] = _COUNTS) -> int | None:
    """How many processes it has ended so far, to compare with later; None if nothing tells."""
    found = None
    for path in files:
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdecimal():
                found = (found or 0) + int(number)
    return found
