"""An object that behaves as a test needs it to, built from C with the ABI of a real operation.

What a launch of it does depends on the number of pages of the case: `tests/harness/misbehaving.c`
says more of each than the names here.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from pagefuzz.harness import subjects
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.running import Answer, Assignment
from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.observation import Death
from pagefuzz.oracles.verdict import Outcome

OPERATION = "cp_gather_cache"

_C_SOURCE = Path(__file__).parent / "tests" / "harness" / "misbehaving.c"
_ABI_SOURCE = subjects.KERNELS / "operations" / f"{OPERATION}.cu"

HARMLESS = 1

# It ends its process, or does not end.
SEGFAULT, ABORT, EXIT_3, SLEEPS, NOISE_AND_SIGBUS, EXIT_0 = range(101, 107)
KILL, CLOSE_FILES = 110, 111
LOOPS, STOPS, CHILD_AND_SEGFAULT = 114, 115, 116
TAKES_ALL_MEMORY, OVERFLOWS_STACK = 118, 119
FPE, TERM, SLEEPS_20_S = 121, 122, 123
ENDLESS_NOISE, REPORT_AND_NOISE, GIBIBYTE_OF_NOISE = 124, 125, 126

# It comes back.
PRINT, BAD_STATUS, REFUSE = 107, 108, 109
STRAY_WRITE = 112
NAP = 113  # 1.5 s a launch, two launches a case
CHILD, MISALIGNED = 117, 120

# It comes back, and its process is not what it was.
STAYS, WRITES_LATE, SWALLOWS, JOINS, OPENS_GUARD, OPENS_SOURCE, ROUNDS_UPWARD, FORKS = range(
    127, 135
)


def case_of(num_pages: int, seed: int = 0, **sizes: int) -> Case:
    """A launch with nothing to do, so that the right thing to do is nothing."""
    return Case(
        OPERATION,
        {
            "num_requests": 0,
            "num_tokens": 0,
            "page_size_tokens": 1,
            "num_pages": num_pages,
            "table_width": 0,
            "table_row_stride": 0,
            "page_stride_bytes": 8,
            "slot_stride_bytes": 8,
            "dst_rows": 0,
            "dst_row_stride_bytes": 8,
            "entry_bytes": 8,
            "element_bytes": 1,
            "has_terminal": 0,
            **sizes,
        },
        {"block_table": Values.literal(), "starts": Values.literal()},
        seed=seed,
    )


def compile_into(folder: Path, *arguments: str) -> Path:
    """The object, with extra compiler arguments. Raises `CannotCheckError` without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise CannotCheckError("there is no C compiler; install gcc")
    (folder / "fragment.h").write_text(subjects.abi_fragment(_ABI_SOURCE))
    path = folder / "misbehaving.so"
    command = [compiler, "-shared", "-fPIC", "-O1", f"-I{subjects.KERNELS}", f"-I{folder}"]
    libraries = ["-lm", "-pthread"]
    subprocess.run([*command, *arguments, "-o", str(path), str(_C_SOURCE), *libraries], check=True)
    return path


def assignment_of(path: Path) -> Assignment:
    """What a worker is given to launch it."""
    return Assignment(
        operation=OPERATION,
        symbol=f"pf_{OPERATION}_page",
        object_path=str(path),
        source_path=str(_ABI_SOURCE),
        backend="host",
        build="release",
        promises_containment=True,
    )


def outcome(answer: Answer | Death) -> Outcome:
    """Of a case that was answered."""
    assert isinstance(answer, Answer), answer
    return answer.verdict.outcome
