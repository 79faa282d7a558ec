"""What a run depended on: versions of everything that may change its outcome."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pagefuzz
from pagefuzz.harness.errors import CannotCheckError

_PACKAGES = ("hypothesis", "torch", "numpy", "cffi")


def versions() -> dict[str, str]:
    """Name -> version: Python, pagefuzz, packages, compilers, the GPU's driver and CUDA."""
    from pagefuzz.harness.build import compiler_version
    from pagefuzz.harness.devices import machine

    found = {"pagefuzz": pagefuzz.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    with contextlib.suppress(metadata.PackageNotFoundError):  # optional
        found["triton"] = metadata.version("triton")
    for target, name in (("host", "host compiler"), ("cuda", "nvcc")):
        with contextlib.suppress(CannotCheckError):  # not there: then nothing was built with it
            found[name] = compiler_version(target)
    if (gpu := machine().gpu) is not None:
        found |= {"gpu": gpu.name, "driver": gpu.driver, "cuda": gpu.cuda}
    return found


def commit() -> str | None:
    """The commit of pagefuzz' own source tree; None where it is installed from a wheel.

    PAGEFUZZ_COMMIT says it for a tree that travelled without its history.
    """
    if given := os.environ.get("PAGEFUZZ_COMMIT"):
        return given
    root = Path(__file__).resolve().parent.parent
    if not (root / "harness" / "_root" / "__init__.py").is_file():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
