"""pagefuzz: correctness fuzzing and verification of paged KV-cache CUDA kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pagefuzz.harness.check import check as check
    from pagefuzz.oracles.case import Case as Case
    from pagefuzz.oracles.case import load_case as load_case
    from pagefuzz.oracles.verdict import Verdict as Verdict

__all__ = ["Case", "Verdict", "__version__", "check", "load_case"]

# Public names are imported on first use, so that the pytest plugin and `pagefuzz --version`
# need neither NumPy nor torch.
_LAZY = {
    "Case": "pagefuzz.oracles.case",
    "Verdict": "pagefuzz.oracles.verdict",
    "check": "pagefuzz.harness.check",
    "load_case": "pagefuzz.oracles.case",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'pagefuzz' has no attribute {name!r}")
