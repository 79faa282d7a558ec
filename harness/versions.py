"""What a run depended on: versions of everything that may change its outcome."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pagefuzz

_PACKAGES = ("hypothesis", "torch", "numpy", "cffi")


def versions() -> dict[str, str]:
    """Name -> version: Python, pagefuzz, packages, compilers, the GPU's driver and CUDA."""
    from pagefuzz.harness.devices import machine

    found = {"pagefuzz": pagefuzz.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    here = machine()
    found.update({compiler.name: compiler.version for compiler in here.compilers})
    if here.gpu is not None:
        found |= {"gpu": here.gpu.name, "driver": here.gpu.driver, "cuda": here.gpu.cuda}
    return found


def commit() -> str | None:
    """The commit of pagefuzz' own source tree; None where it is installed from a wheel."""
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
    return done.stdout.strip() or None
