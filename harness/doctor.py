"""What this machine can check, what it cannot, and why: the facts behind `pagefuzz doctor`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from pagefuzz.harness.build import compiler, compiler_version
from pagefuzz.harness.devices import Machine, machine
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.layers import CUDA, HOST, Layer
from pagefuzz.harness.sanitizers.tools import find_compute_sanitizer
from pagefuzz.harness.triton.private import require_triton
from pagefuzz.harness.versions import versions


@dataclass(frozen=True)
class Fact:
    """One line: what it is, whether it is there, and its version or the reason it is not."""

    name: str
    there: bool
    text: str


@dataclass(frozen=True)
class Examination:
    """facts, and for each backend why it cannot be used (empty: it can)."""

    facts: tuple[Fact, ...]
    unusable: dict[str, str]

    def layer_on(self, layer: Layer, backend: str) -> str:
        """Whether it is there: "yes", "no" (not on this machine) or "-" (no such thing)."""
        if backend not in layer.backends:
            return "-"
        return "no" if self.why_not(layer, backend) else "yes"

    def why_not(self, layer: Layer, backend: str) -> str:
        """Why a layer that the backend could have is not there; "" if it is."""
        needed = "triton" if layer.needs == "triton" else layer.name
        lacks = [fact.text for fact in self.facts if fact.name == needed and not fact.there]
        return self.unusable[backend] or "; ".join(lacks)


def examine() -> Examination:
    here = machine()
    found = versions()
    facts = [
        Fact(name, found.get(name, "unknown") != "unknown", found.get(name, "unknown"))
        for name in ("python", "pagefuzz", "hypothesis", "torch", "numpy", "cffi")
    ]
    host, cuda = _compiler("host compiler", "host"), _compiler("nvcc", "cuda")
    clang = next((c.version for c in here.compilers if c.name == "clang++"), "")
    facts += [
        host,
        Fact("clang++", bool(clang), clang or "none; optional, for a second host build"),
        cuda,
        _triton(),
        _gpu(here),
        _asan(),
        _sanitizer(),
    ]
    unusable = {
        HOST: "" if host.there else host.text,
        CUDA: here.no_gpu or ("" if cuda.there else cuda.text),
    }
    return Examination(tuple(facts), unusable)


def _compiler(name: str, target: str) -> Fact:
    try:
        return Fact(name, True, compiler_version(target))
    except CannotCheckError as error:
        return Fact(name, False, str(error))


def _triton() -> Fact:
    try:
        return Fact("triton", True, require_triton("a Triton kernel"))
    except CannotCheckError as error:
        return Fact("triton", False, str(error))


def _gpu(here: Machine) -> Fact:
    gpu = here.gpu
    if gpu is None:
        return Fact("GPU", False, here.no_gpu)
    memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
    return Fact(
        "GPU",
        True,
        f"{gpu.name}, {memory}, {gpu.architecture}, driver {gpu.driver}, CUDA {gpu.cuda}",
    )


def _asan() -> Fact:
    name = "AddressSanitizer"
    try:
        command = [*compiler("host"), "-print-file-name=libasan.so"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (CannotCheckError, OSError, subprocess.TimeoutExpired):
        return Fact(name, False, "none; its runtime comes with the host compiler")
    library = Path(done.stdout.strip())
    if not library.is_absolute():
        return Fact(name, False, f"none; {command[0]} comes without libasan.so")
    return Fact(name, True, library.name)


def _sanitizer() -> Fact:
    name = "compute-sanitizer"
    if (found := find_compute_sanitizer()) is None:
        return Fact(name, False, "none; it comes with the CUDA toolkit or pagefuzz[cuda]")
    try:
        done = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Fact(name, False, f"{found} does not run: {error}")
    version = next((line for line in done.stdout.splitlines() if "ersion" in line), "found")
    return Fact(name, done.returncode == 0, version.strip())
