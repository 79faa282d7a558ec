"""Makes what a worker loads of a Triton source: a module, and a place for its compilation keys.

There is nothing to compile ahead: the host interprets, and Triton compiles for a GPU on the first
launch. A twin's source, and the keys once they are known, lie in the build cache.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pagefuzz.harness.build import KERNELS, BuildSpec, cache_folder, load_twin, locked
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.triton.private import require_triton
from pagefuzz.oracles import registry
from pagefuzz.strategies.registry import shapes_for


@dataclass(frozen=True)
class TritonBuild:
    """path of the module; flags of the object; keys_path for what it compiles, where no GPU says
    it; None on a GPU."""

    path: Path
    flags: frozenset[str]
    keys_path: Path | None


def build_triton(
    source: Path, symbol: str, operation: str, spec: BuildSpec, twin: Path | None
) -> TritonBuild:
    """The module of `source`, changed as `twin` says.

    Interpreted it may be checked or not; compiled for a GPU it never is. With "inject" an access
    can be added to each launch, by a kernel of its own. Raises `CannotCheckError`
    without Triton, for other flags, or if the twin does not apply.
    """
    version = require_triton(source.name)
    if other := sorted(spec.flags - {"checked", "inject"}):
        raise CannotCheckError(
            f"{source.name} is a Triton kernel: it may be built as release, checked or inject, "
            f"not as {other[0]}"
        )
    try:
        text = original = source.read_text(encoding="utf-8")
    except OSError as error:
        raise CannotCheckError(f"cannot read the kernel {source}: {error.strerror}") from None
    if twin is not None:
        text = load_twin(twin).apply(text)
    folder = cache_folder() / _digest(text, symbol, operation, version)
    keys_path = folder / "keys.json"
    path = source if text == original else folder / source.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            if text != original:
                path.write_text(text, encoding="utf-8")
            if spec.target == "cuda":
                return TritonBuild(path, spec.flags - {"checked"} | {"cuda", "triton"}, None)
    except OSError as error:
        raise CannotCheckError(
            f"cannot keep objects in {folder}: {error.strerror}; PAGEFUZZ_CACHE may name another "
            "folder"
        ) from None
    return TritonBuild(path, spec.flags | {"triton"}, keys_path)


def _digest(text: str, symbol: str, operation: str, version: str) -> str:
    """Of all that a module and its keys are made of."""
    here = Path(__file__).parent
    parts = [text, symbol, version, *registry.operation(operation).run_time]
    parts += [case.dumps() for case in shapes_for(operation)]
    ours = [*(KERNELS / "triton" / "common").glob("*.py"), here / "keys.py", here / "private.py"]
    parts += [path.read_text(encoding="utf-8") for path in sorted(ours)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
