"""What this machine can check, what it cannot, and why: the facts behind `pagefuzz doctor`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagefuzz.harness.devices import Machine, machine
from pagefuzz.harness.versions import versions

HOST, CUDA = "host", "cuda"


@dataclass(frozen=True)
class Layer:
    """A detection layer of this version. backends: where it exists; needs: the build it takes."""

    name: str
    sees: str
    backends: Sequence[str]
    needs: str = ""


#: What this version has. A layer is listed once it exists, not before.
LAYERS = (
    Layer("reference, bit-exact", "wrong values", (HOST, CUDA)),
    Layer("whole-buffer byte diff", "writes to any forbidden byte", (HOST, CUDA)),
    Layer("red zones", "writes just outside a buffer", (HOST, CUDA)),
    Layer("two fills", "forbidden reads that reach the output", (HOST, CUDA)),
    Layer("counters", "lost or wrongly counted pages", (HOST, CUDA)),
    Layer("launch limits", "launches that CUDA refuses", (HOST, CUDA)),
    Layer("worker deaths", "crashes, aborts, poisoned contexts", (HOST, CUDA)),
    Layer("checked build", "every forbidden access, with its line", (HOST, CUDA), "checked"),
    Layer("checked index type", "wrap and lossy narrowing, with its line", (HOST, CUDA), "checked"),
    Layer("UBSan", "signed overflow, a second opinion", (HOST,), "ubsan"),
    Layer("AddressSanitizer", "a second opinion on accesses", (HOST,), "asan"),
)


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
        """ "yes", the build it needs, or why not, in a few characters."""
        if backend not in layer.backends:
            return "-"
        if self.unusable[backend]:
            return "no"
        if layer.needs == "asan" and not self._has("AddressSanitizer"):
            return "no"
        return f"yes ({layer.needs})" if layer.needs else "yes"

    def _has(self, name: str) -> bool:
        return any(fact.there for fact in self.facts if fact.name == name)


def examine() -> Examination:
    here = machine()
    found = versions()
    compilers = {compiler.name: compiler for compiler in here.compilers}
    facts = [
        Fact(name, found.get(name, "unknown") != "unknown", found.get(name, "unknown"))
        for name in ("python", "pagefuzz", "hypothesis", "torch", "numpy", "cffi")
    ]
    for name, purpose in (
        ("g++", "the host backend needs it (or clang++)"),
        ("clang++", "optional: a second compiler for the host backend"),
        ("nvcc", "the cuda backend needs it: pip install 'pagefuzz[cuda]'"),
    ):
        compiler = compilers.get(name)
        facts.append(
            Fact(name, compiler is not None, compiler.version if compiler else f"none; {purpose}")
        )
    facts += [_gpu(here), _asan(compilers), _sanitizer()]
    has_host = "g++" in compilers or "clang++" in compilers
    unusable = {
        HOST: "" if has_host else "there is no C++ compiler; install g++",
        CUDA: here.no_gpu
        or ("" if "nvcc" in compilers else "there is no nvcc; pip install 'pagefuzz[cuda]'"),
    }
    return Examination(tuple(facts), unusable)


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


def _asan(compilers: Mapping[str, object]) -> Fact:
    name = "AddressSanitizer"
    compiler = os.environ.get("CXX", "g++")
    if "g++" not in compilers:
        return Fact(name, False, "none; its runtime comes with g++")
    try:
        done = subprocess.run(
            [compiler, "-print-file-name=libasan.so"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Fact(name, False, f"cannot ask {compiler}: {error}")
    library = Path(done.stdout.strip())
    there = library.is_absolute()
    return Fact(name, there, library.name if there else f"none; {compiler} comes without it")


def _sanitizer() -> Fact:
    there = shutil.which("compute-sanitizer") is not None
    text = "found" if there else "none"
    return Fact("compute-sanitizer", there, f"{text}; this version does not run it")
