"""How long a launch may take before it counts as a hang: what people may ask for, and how they
write it.

Light: the command line and the files of findings ask.
"""

from __future__ import annotations

#: Seconds. Sooner a busy machine looks like a hang, and the system cannot wait for just any time.
SHORTEST_S, LONGEST_S = 1.0, 24 * 3600.0


def is_patience(seconds: float) -> bool:
    """Whether it may be asked for; NaN may not."""
    return SHORTEST_S <= seconds <= LONGEST_S


def argument(seconds: float) -> str:
    """For a command line, no digit lost: "--hang-after 1.5s"."""
    return f"--hang-after {int(seconds) if seconds == int(seconds) else seconds!r}s"
