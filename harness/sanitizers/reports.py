"""Reads what compute-sanitizer prints.

A report is a block of lines with its prefix: the first says what happened, indented ones where.
Only a few forms are known to this reader. One that it does not know is still a report, and output
without a summary is no result at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pagefuzz.harness.sources import source_path

#: What the program under the tool prints before and after each launch.
MARKER = re.compile(r"\[pagefuzz (?P<what>begin|end) (?P<case>\d+)\]")

_PREFIXED = re.compile(r"={8,10}(?: (?P<text>.*))?$")
_CONTINUED = re.compile(
    r"\s+\S|at |by thread|and |Address |Access |in |of size |Saved host|Host Frame|Device Frame|"
    r"Current Value|(Write|Read) Thread"
)
_SUMMARY = re.compile(r"ERROR SUMMARY: (?P<errors>\d+) errors?(?P<unprinted> were not printed)?")
_RACE_SUMMARY = re.compile(r"RACECHECK SUMMARY: (?P<errors>\d+) hazards? displayed")
#: The tool says that it could not do its work.
_COMPLAINT = re.compile(
    r"((Error|Fatal|Warning): )?"
    r"(internal|target application|no attachable|device not supported|unable|failed|could not|"
    r"cannot|timeout|timed out|unsupported|.*not supported|.*inject|.*connection)",
    re.IGNORECASE,
)
_PLACE = re.compile(r"(?:^|[ /])(?P<file>[^ /:]+\.(?:cu|cuh|h|hpp|py)):(?P<line>\d+)")
_THREAD = re.compile(r"by thread (?P<thread>\([\d,]+\)) in block (?P<block>\([\d,]+\))")
_ADDRESS = re.compile(r"(?:Address|Access to) (?P<address>0x[0-9a-fA-F]+)")
_SIZE = re.compile(r"of size (?P<size>\d+)")
_TAIL_LINES = 8


@dataclass(frozen=True)
class Report:
    """One report.

    lines  as printed, without the prefix; never empty
    case   number of the launch that the program had begun last when the line came; that the two
           are printed in order is usual and not promised. None: outside of all
    """

    lines: tuple[str, ...]
    case: int | None = None

    @property
    def kind(self) -> str:
        """What happened, without where: "Invalid __global__ read of size 4 bytes"."""
        head = re.split(r" at | : ", self.lines[0])[0]
        return re.sub(r"\s*0x[0-9a-fA-F]+", "", head).strip(" .:")

    @property
    def where(self) -> str:
        """The line of source: of a function that was inlined that in a .cu, else in a kernel's
        .py, if there is one."""
        places = [match for line in self.lines for match in _PLACE.finditer(line)]
        if not places:
            return ""
        best = min(places, key=_distance)  # the first of the nearest
        return f"{source_path(best['file'])}:{best['line']}"

    @property
    def thread(self) -> str:
        """block (0,0,0) thread (0,0,0), in the order of other reports; "" if it is not said."""
        found = next((m for line in self.lines if (m := _THREAD.search(line))), None)
        return f"block {found['block']} thread {found['thread']}" if found else ""

    @property
    def address(self) -> int | None:
        """Of the access, if one is named."""
        found = next((m for line in self.lines if (m := _ADDRESS.search(line))), None)
        return int(found["address"], 16) if found else None

    @property
    def size_bytes(self) -> int:
        """Of the access; 1 if it is not said."""
        found = _SIZE.search(self.lines[0])
        return int(found["size"]) if found else 1

    @property
    def tells_of_a_kernel(self) -> bool:
        """Whether a line of source, a thread or an address is named. What a tool says of itself, in
        words that this reader does not know, names none."""
        return bool(self.where or self.thread) or self.address is not None

    @property
    def identity(self) -> tuple[str, str]:
        """What makes two reports of one subject the same fault."""
        return self.kind, self.where


def _distance(place: re.Match[str]) -> int:
    """Of a place from the kernel itself: Triton's own functions are in .py files too."""
    if place["file"].endswith(".cu"):
        return 0
    is_kernel = place["file"].endswith(".py") and source_path(place["file"]) != place["file"]
    return 1 if is_kernel else 2


@dataclass(frozen=True)
class Output:
    """What was printed.

    errors      by the summaries; None if there was none
    complaints  of the tool about itself or about the program
    begun, ended  launches, by the markers
    said        the last lines, for a sentence about a run that failed
    """

    reports: tuple[Report, ...]
    errors: int | None
    complaints: tuple[str, ...]
    begun: tuple[int, ...]
    ended: tuple[int, ...]
    said: str


@dataclass
class _Reader:
    blocks: list[tuple[list[str], int | None]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    errors: int | None = None
    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    is_open: bool = False

    def read(self, lines: Iterable[str]) -> None:
        for line in lines:
            # A marker may stand in a line that the tool had not finished.
            begin = 0
            for marker in MARKER.finditer(line):
                self._text(line[begin : marker.start()])
                self._mark(marker["what"], int(marker["case"]))
                begin = marker.end()
            self._text(line[begin:])

    def _mark(self, what: str, case: int) -> None:
        (self.begun if what == "begin" else self.ended).append(case)

    def _text(self, line: str) -> None:
        match = _PREFIXED.match(line.rstrip())
        if match is None:
            return  # of the program
        text = match["text"] or ""
        if not text.strip() or text.startswith("COMPUTE-SANITIZER"):
            self.is_open = False
        elif found := _SUMMARY.match(text) or _RACE_SUMMARY.match(text):
            self.is_open = False
            if not found.groupdict().get("unprinted"):
                self.errors = (self.errors or 0) + int(found["errors"])
        elif text.startswith("LEAK SUMMARY"):
            self.is_open = False
        elif self.is_open and _CONTINUED.match(text):
            self.blocks[-1][0].append(text.strip())
        elif _COMPLAINT.match(text):
            self.is_open = False
            self.complaints.append(text.strip())
        else:
            self.is_open = True
            self.blocks.append(([text.strip()], self.begun[-1] if self.begun else None))


def parse(output: str) -> Output:
    """Reads what a tool and the program under it printed into one stream."""
    reader = _Reader()
    lines = output.splitlines()
    reader.read(lines)
    reports = tuple(Report(tuple(block), case) for block, case in reader.blocks)
    told = [line for line in lines if line.strip() and not MARKER.fullmatch(line.strip())]
    return Output(
        reports,
        reader.errors,
        tuple(reader.complaints),
        tuple(reader.begun),
        tuple(reader.ended),
        " ".join(" ".join(told[-_TAIL_LINES:]).split()),
    )


def by_identity(reports: Iterable[Report]) -> Mapping[tuple[str, str], list[Report]]:
    """In the order in which each identity was first reported."""
    found: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        found.setdefault(report.identity, []).append(report)
    return found
