"""Loads the module of a Triton kernel, and hands a launcher its arguments."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.triton.private import require_triton, set_mode
from pagefuzz.kernels.triton.common.launching import Array
from pagefuzz.oracles.layout import Plan

Launcher = Callable[..., tuple[int, str]]


def load_launcher(path: Path, symbol: str, *, interpreted: bool) -> Launcher:
    """The launcher called `symbol` of the module at `path`, of which a process loads one only.

    Raises `CannotCheckError` without Triton, and if the module fails.
    """
    require_triton(path.name)
    set_mode(interpreted=interpreted)
    name = f"pagefuzz_triton_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CannotCheckError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        launcher: Launcher = getattr(module, symbol)
    except Exception as error:  # noqa: BLE001 - it is the subject's code
        raise CannotCheckError(
            f"cannot load {path}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from None
    return launcher


def launcher_arguments(plan: Plan, addresses: Mapping[str, int], stream: int = 0) -> dict[str, Any]:
    """A launcher's arguments by name. `addresses` holds the base of every buffer."""
    arrays = {
        name: Array(
            0 if buffer.is_null else addresses[name], buffer.extent_bytes, buffer.dtype, buffer.rank
        )
        for name, buffer in plan.buffers.items()
    }
    return {**arrays, **plan.arguments, "stream": stream}
