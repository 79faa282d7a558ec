"""death: a worker answered, instead of being killed by what it launched."""

from __future__ import annotations

import re

from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.judgements.hang import HANG
from pagefuzz.oracles.observation import Death, DeathAccess
from pagefuzz.oracles.verdict import Failure
from pagefuzz.oracles.wording import count_text


class DeathJudgement(Judgement):
    name = "death"
    unit = "launches"
    summary = "the launch does not kill its process or its CUDA context"

    def applies(self, run: Run) -> bool:
        return True

    def judge(self, run: Run) -> Judged:
        survived = len(run.observation.launches)
        death = run.observation.death
        if death is None or death.how == HANG:
            return Judged((), survived)
        if death.access is not None and death.access.buffer:
            return Judged((self._at_a_buffer(run, death, death.access),), survived + 1)
        detail = reported_access(death.detail) or death.detail
        access = f"{death.how}: {detail}" if detail else death.how
        if death.access is not None:
            access = f"{access}: {_elsewhere(death.access)}"
        details = {
            "access": access,
            "launch": death.launch,
            "where": death.access.where if death.access is not None else "",
            "means": _LATER if death.later else means_of(death.how),
        }
        details = {label: text for label, text in details.items() if text}
        title = f"{death.how} {'after' if death.later else 'during'} the launch"
        failure = Failure(self.name, title, (death.how,), details)
        return Judged((failure,), survived + 1)

    def _at_a_buffer(self, run: Run, death: Death, access: DeathAccess) -> Failure:
        """A fault of memory protection, which happens beside a buffer, in a hole of it or on one
        that is only read."""
        how, buffer, at = death.how, access.buffer, access.offset_bytes
        assert at is not None
        verb = _VERBS[access.is_write]
        inside = 0 <= at < access.memory_bytes
        side = "inside" if inside else "before" if at < 0 else "past"
        details = {
            "access": access_text(how, access),
            "launch": death.launch,
            "where": access.where,
            "means": _mapping(run, buffer, at) if death.is_own else "",
        }
        details = {label: text for label, text in details.items() if text}
        return Failure(self.name, f"{verb} {side} {buffer}", (how, buffer, verb, side), details)


def access_text(how: str, access: DeathAccess) -> str:
    """What was accessed of which buffer, and why that ended the process, on one line."""
    verb = {True: "writes", False: "reads", None: "accesses"}[access.is_write]
    at = access.offset_bytes
    assert at is not None
    begin, end = access.mapped or (0, access.memory_bytes)
    page = "a page mapped read-only" if begin <= at < end else "a page that nobody may touch"
    if access.hole is not None:
        begin, end = access.hole
        page = f"a stretch where no byte is legal (bytes {begin}..{end - 1})"
    return f"{verb} {access.buffer} at byte {at} of {access.memory_bytes}: {how}, {page}"


def _elsewhere(access: DeathAccess) -> str:
    """Where an access was that was at no buffer."""
    if access.offset_bytes is None:
        return (
            "access at an address that the processor does not tell: one that no memory can have, "
            "or misaligned for its instruction"
        )
    return f"{_VERBS[access.is_write]} at address {access.offset_bytes:#x}, no buffer's"


def _mapping(run: Run, name: str, offset_bytes: int) -> str:
    """How the contract comes to a byte; empty in workspace, with which it has nothing to do."""
    buffer = run.plan.buffers[name]
    if not 0 <= offset_bytes < buffer.required_bytes + buffer.placement.slack_bytes:
        return ""
    return run.operation.mapping(run.plan, name, offset_bytes) or ""


def reported_access(report: str) -> str:
    """What AddressSanitizer's report says, in a line: the access, and the first place in a kernel's
    own source. Empty if the report does not say where, or is none."""
    place = reported_place(report)
    if place is None:
        return ""
    said = _ACCESS.search(report)
    verb = "" if said is None else "reads " if "READ" in said[0] else "writes "
    count = "" if said is None else said["bytes"] or ""
    size = f"{count_text(int(count), 'byte')} " if count else ""
    return f"{verb}{size}in {place['function']}, {_FOLDER}/{place['file']}:{place['line']}"


def reported_place(report: str) -> re.Match[str] | None:
    """The first frame in an operation's source: `function`, `file` without folders and `line`."""
    return _PLACE.search(report)


def means_of(how: str) -> str:
    """What an end of this name is, in a sentence; of `Death.how`."""
    if (known := _MEANS.get(how)) is not None:
        return known
    if how.startswith("exit status "):
        return "the launch ended its process by exit, as no library may"
    if how.startswith("AddressSanitizer "):
        return "AddressSanitizer saw a forbidden access and ended the process"
    return "the process that launched ended instead of answering"


#: Signals (signal(7)), errors of a CUDA context (cuda.h), and ends that the harness names.
_MEANS = {
    "SIGSEGV": "the launch touched memory that nobody may touch, or that it may only read",
    "SIGBUS": "the launch touched memory behind which there is none, such as a file cut short",
    "SIGABRT": "the launch called abort: a failed assertion, a damaged heap or an exception that "
    "nobody caught",
    "SIGFPE": "the launch divided an integer by zero, or by -1 with an overflow",
    "SIGILL": "the launch ran an instruction that this processor does not have",
    "SIGTRAP": "the launch ran into a breakpoint or a trap that its compiler has put there",
    "SIGSYS": "the launch made a system call that is forbidden to it",
    "SIGTERM": "the launch, or somebody else, asked the process to end",
    "SIGKILL": "the process was killed in this launch, and again when it was repeated",
    "illegal memory access": "a thread touched device memory that is mapped nowhere, or wrote "
    "where it may only read; the context is lost",
    "misaligned address": "a thread made an access at an address that is no multiple of its size; "
    "the context is lost",
    "launch failure": "the kernel failed on the device, such as by a fault in shared memory or a "
    "stack that overflowed; the context is lost",
    "launch timeout": "the kernel ran for longer than the device lets it; the context is lost",
    "device assertion": "an assertion failed on the device; the context is lost",
    "hardware stack error": "a thread's call stack was damaged or overflowed; the context is lost",
    "illegal instruction": "a thread ran an instruction that the device does not have; the context "
    "is lost",
    "invalid address space": "a thread made an access to another kind of memory than its "
    "instruction is for; the context is lost",
    "invalid program counter": "a thread jumped to where there is no code; the context is lost",
}

_LATER = (
    "the launch came back, and its process died later: the launch has damaged the heap, or left "
    "behind a timer, or work that failed"
)

#: Of operations' sources. A twin is compiled from a changed copy elsewhere; its lines are the same.
_FOLDER = "kernels/operations"
_ACCESS = re.compile(r"(READ|WRITE) (of size (?P<bytes>\d+)|memory access)")
_PLACE = re.compile(
    r"^ *#\d+ \S+ in (?P<function>.+) \S*/(?P<file>[^/\s]+\.cu):(?P<line>\d+)", re.M
)

_VERBS = {True: "write", False: "read", None: "access"}
