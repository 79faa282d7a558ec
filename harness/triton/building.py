"""Makes what a worker loads of a Triton source: a module, and the keys that it is compiled by.

There is nothing to compile ahead: the host interprets, and Triton compiles for a GPU on the first
launch. A twin's source, and the keys, lie in the build cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pagefuzz.harness.build import KERNELS, BuildSpec, cache_folder, load_twin, locked
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.triton.private import require_triton
from pagefuzz.oracles import registry
from pagefuzz.strategies.registry import shapes_for

_KEYS_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class TritonBuild:
    """path of the module; flags of the object; keys_path of what it compiles, where no GPU says
    it; None on a GPU."""

    path: Path
    flags: frozenset[str]
    keys_path: Path | None


def build_triton(
    source: Path, symbol: str, operation: str, spec: BuildSpec, twin: Path | None
) -> TritonBuild:
    """The module of `source`, changed as `twin` says.

    Interpreted it may be checked or not; compiled for a GPU it never is. Raises `CannotCheckError`
    without Triton, for other flags, if the twin does not apply, or if the source does not load.
    """
    version = require_triton(source.name)
    if other := sorted(spec.flags - {"checked"}):
        raise CannotCheckError(
            f"{source.name} is a Triton kernel: it may be built as release or checked, not as "
            f"{other[0]}"
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
                return TritonBuild(path, frozenset({"cuda", "triton"}), None)
            if not keys_path.exists():
                unfinished = folder / "unfinished.json"
                unfinished.write_text(_keys(path, symbol, operation), encoding="utf-8")
                unfinished.replace(keys_path)
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


def _keys(path: Path, symbol: str, operation: str) -> str:
    """What `harness.triton.keys` prints of a module."""
    command = [sys.executable, "-m", "pagefuzz.harness.triton.keys", str(path), symbol, operation]
    environment = {name: one for name, one in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(
            command,
            env={**environment, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_KEYS_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotCheckError(
            f"no compilation keys of {path.name} within {_KEYS_TIMEOUT_S:g} s"
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()[-60:]) or "nothing was printed"
        raise CannotCheckError(f"no compilation keys of {path.name}: {said}")
    return done.stdout
