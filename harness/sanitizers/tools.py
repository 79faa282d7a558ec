"""Which sanitizers there are, and how compute-sanitizer is called.

Light: the command line asks for the names. The options are those of NVIDIA's Compute Sanitizer
manual.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from pagefuzz.harness.errors import CannotCheckError

#: Tools of compute-sanitizer, each with what it sees.
COMPUTE = {
    "memcheck": "accesses outside of allocations, misaligned ones",
    "racecheck": "races in shared memory",
    "initcheck": "reads of global memory that nobody has written",
    "synccheck": "barriers that not all threads reach",
}

#: Sanitizers of the host compiler: build flags of the same name.
HOST = {
    "asan": "accesses outside of buffers, on the host",
    "ubsan": "signed overflow, on the host",
}

TOOLS = (*COMPUTE, *HOST)


def layer_of(tool: str) -> str:
    """Name of the detection layer (`harness.layers`) that a tool is."""
    return {"asan": "AddressSanitizer", "ubsan": "UBSan"}.get(tool, "compute-sanitizer")


#: What compute-sanitizer returns when it has reported something and the program has ended well.
ERROR_EXIT_CODE = 86

#: Seconds for the program under it to begin with CUDA; the default of 10 is less than some imports
#: of torch take.
_LAUNCH_TIMEOUT_S = 300

#: Behind every allocation memcheck keeps so many bytes in which nothing lies.
_PADDING_BYTES = 65_536


def find_compute_sanitizer() -> str | None:
    """On PATH, in the default toolkit, or of the package nvidia-cuda-sanitizer-api."""
    if found := shutil.which("compute-sanitizer"):
        return found
    candidates = [Path("/usr/local/cuda/bin/compute-sanitizer")]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in ("cu*/bin", "cu*/compute-sanitizer", "cuda_sanitizer_api/bin"):
            candidates += [path / "compute-sanitizer" for path in Path(folder).glob(pattern)]
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), None)


def watched_command(tool: str, program: Sequence[str]) -> list[str]:
    """The command line that runs a program under a tool of compute-sanitizer.

    Raises `CannotCheckError` where there is no compute-sanitizer.
    """
    found = find_compute_sanitizer()
    if found is None:
        raise CannotCheckError(
            f"no compute-sanitizer to run {tool} with: put it on PATH (it comes with the CUDA "
            "toolkit) or install pagefuzz[cuda]"
        )
    options = [
        *("--tool", tool),
        *("--target-processes", "application-only"),  # not compilers that it starts
        *("--error-exitcode", str(ERROR_EXIT_CODE)),
        *("--launch-timeout", str(_LAUNCH_TIMEOUT_S)),
        *("--print-limit", "0"),  # none
        *("--show-backtrace", "device"),
    ]
    if tool == "memcheck":
        options += [
            *("--padding", str(_PADDING_BYTES)),
            # What a faulty launch does to later calls is not a second fault.
            *("--report-api-errors", "no"),
            *("--destroy-on-device-error", "kernel"),
        ]
    return [found, *options, *program]
