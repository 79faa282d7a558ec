"""What this machine can check on. CUDA is only ever touched in a child process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pagefuzz.harness.errors import CannotCheckError

Backend = Literal["host", "cuda"]

DEVICES = ("auto", "host", "cuda")
_PROBE_TIMEOUT_S = 60.0
_COMPILERS = ("g++", "clang++", "nvcc")


@dataclass(frozen=True)
class Gpu:
    """driver is the driver's version where it can be told, cuda the CUDA version it supports."""

    name: str
    driver: str
    cuda: str
    compute_capability: tuple[int, int]
    memory_bytes: int

    @property
    def architecture(self) -> str:
        """As nvcc names it: "sm_90"."""
        return f"sm_{self.compute_capability[0]}{self.compute_capability[1]}"


@dataclass(frozen=True)
class Compiler:
    """version is the first line that names one."""

    name: str
    path: str
    version: str


@dataclass(frozen=True)
class Machine:
    """gpu is None where there is none; `no_gpu` is then the sentence that says why."""

    gpu: Gpu | None
    no_gpu: str
    compilers: tuple[Compiler, ...]


@cache
def machine() -> Machine:
    """What is here; probed once a process."""
    gpu, why = _probe_gpu()
    return Machine(gpu, why, tuple(c for name in _COMPILERS if (c := _compiler(name))))


def resolve_device(wanted: str) -> Backend:
    """The backend to run on: "auto" is cuda where there is a GPU.

    Raises `CannotCheckError` if cuda is asked for and there is no GPU, with the reason.
    """
    if wanted == "host":
        return "host"
    if wanted not in DEVICES:
        raise CannotCheckError(f"unknown device {wanted!r}; there is {', '.join(DEVICES)}")
    here = machine()
    if here.gpu is not None:
        return "cuda"
    if wanted == "cuda":
        raise CannotCheckError(here.no_gpu)
    return "host"


def _probe_gpu() -> tuple[Gpu | None, str]:
    """Asks the driver in a process of its own: initialising it here would spoil every fork."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pagefuzz.harness.devices"],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            check=False,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return None, f"the GPU driver did not answer within {_PROBE_TIMEOUT_S:g} s"
    except ValueError:
        said = " ".join(done.stderr.split()[-30:]) or f"exit status {done.returncode}"
        return None, f"the probe for a GPU failed: {said}"
    if "no_gpu" in answer:
        return None, answer["no_gpu"]
    return (
        Gpu(
            name=answer["name"],
            driver=_driver_version(),
            cuda=answer["cuda"],
            compute_capability=tuple(answer["compute_capability"]),
            memory_bytes=answer["memory_bytes"],
        ),
        "",
    )


def _driver_version() -> str:
    """From nvidia-smi; "unknown" without it."""
    if not (tool := shutil.which("nvidia-smi")):
        return "unknown"
    done = subprocess.run(
        [tool, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        timeout=_PROBE_TIMEOUT_S,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _compiler(name: str) -> Compiler | None:
    if not (path := shutil.which(name)):
        return None
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
    )
    lines = done.stdout.splitlines() or ["unknown version"]
    # nvcc begins with its name and copyright; its release stands further down.
    version = next((line for line in lines if "release" in line), lines[0])
    return Compiler(name, path, version.strip())


def _main() -> None:
    """The probe: prints what the driver says of its first device, as JSON."""
    from pagefuzz.harness.memory.driver import Driver

    try:
        found = Driver().properties()
    except CannotCheckError as error:
        print(json.dumps({"no_gpu": str(error)}))
        return
    answer = {
        "name": found.name,
        "cuda": found.driver_cuda_version,
        "compute_capability": found.compute_capability,
        "memory_bytes": found.memory_bytes,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
