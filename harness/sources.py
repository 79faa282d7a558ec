"""Places in the sources of subjects, as reports name them."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

from pagefuzz.harness.build import KERNELS

_TIMEOUT_S = 10.0


@cache
def source_path(name: str) -> str:
    """Where a source of that name lies, "kernels/operations/x.cu"; the name where that is open."""
    found = list(KERNELS.rglob(name)) if name else []
    return str(Path("kernels") / found[0].relative_to(KERNELS)) if len(found) == 1 else name


@cache
def line_of(built: Path, instruction: int) -> str:
    """The line of a subject that an instruction belongs to: "kernels/operations/x.cu:88".

    built        an object with debug information
    instruction  its address from the object's beginning

    Of a function that was inlined it is the line in the operation's own source. Empty if the
    debug information does not tell, or without addr2line, which comes with the compiler.
    """
    tool = shutil.which("addr2line")
    if tool is None or instruction < 0:
        return ""
    command = [tool, "--inlines", "--exe", str(built), hex(instruction)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    for frame in done.stdout.splitlines():
        path, _, line = frame.split(" ")[0].rpartition(":")
        if Path(path).suffix == ".cu" and line.isdigit() and int(line):
            return f"{source_path(Path(path).name)}:{line}"
    return ""
