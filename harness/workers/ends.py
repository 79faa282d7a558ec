"""How processes end, in words."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from pagefuzz.harness.sources import line_of, source_path
from pagefuzz.harness.workers.blackbox import BlackBox
from pagefuzz.harness.workers.output import REPORT
from pagefuzz.oracles.judgements.death import reported_place
from pagefuzz.oracles.observation import Death, DeathAccess

UNKNOWN_END = "unknown end"

#: Ends that come from outside of a worker.
BY_OTHERS = ("SIGKILL", UNKNOWN_END)

_SHOWN_LINES = 12

#: Who sent SIGKILL, by whether the kernel has killed for lack of memory meanwhile.
KILLERS = {
    True: "the kernel has ended a process meanwhile, being short of memory: most likely this one",
    False: "the kernel was not short of memory: somebody ended the process, or it did so itself",
    None: "nothing tells whether the kernel was short of memory, or who else ended the process",
}


def bad_end(status: int | None, output: str) -> Death | None:
    """How a process ended that was asked to end in order; None if it did, or if others ended it."""
    if status == 0 or (how := name_of_end(status, output)) in BY_OTHERS:
        return None
    return Death(how, last_words(output), later=True)


def name_of_end(status: int | None, output: str) -> str:
    """The short fixed name of an end."""
    if f"{REPORT}: " in output:
        return "AddressSanitizer " + output.split(f"{REPORT}: ")[1].split()[0]
    if status is None:
        return UNKNOWN_END
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"
    return f"exit status {os.WEXITSTATUS(status)}"


def last_words(output: str) -> str:
    """The lines of a dying process's output that say why: the first of a sanitizer's report, the
    last of anything else."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    for index, line in enumerate(lines):
        if REPORT in line:
            return "\n".join(lines[index : index + _SHOWN_LINES])
    return "\n".join(lines[-_SHOWN_LINES:])


def in_a_line(death: Death) -> str:
    return " ".join(f"{death.how} {death.detail}".split())


def access_of(box: BlackBox, report: str) -> DeathAccess | None:
    """The access that ended a process, in the words of judgements; None if none is known.

    report  the last words of the process: AddressSanitizer handles faults itself, and prints them
    """
    fault, where = box.fault(), ""
    if fault is not None:
        where = line_of(Path(fault.subject), fault.instruction)
    elif (said := _FAULT.search(report)) is not None:
        verb, place = _VERB.search(report), reported_place(report)
        fault = box.fault_at(int(said[1], 16), -1, None if verb is None else verb[1] == "WRITE")
        where = "" if place is None else f"{source_path(place['file'])}:{place['line']}"
    if fault is None:
        return None
    at = (fault.buffer, fault.offset_bytes, fault.memory_bytes)
    return DeathAccess(*at, fault.is_write, where, fault.hole, fault.mapped)


_FAULT = re.compile(rf"{REPORT}: (?:SEGV|BUS) on unknown address (0x[0-9a-f]+)")
_VERB = re.compile(r"caused by a (READ|WRITE) memory access")
