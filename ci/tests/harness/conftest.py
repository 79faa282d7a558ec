"""Objects that behave as a test needs them to, built from C with the ABI of a real operation."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pagefuzz.harness import subjects
from pagefuzz.harness.running import Assignment

OPERATION = "cp_gather_cache"
SOURCE = subjects.KERNELS / "operations" / f"{OPERATION}.cu"

Compile = Callable[..., Path]


@pytest.fixture(scope="session")
def compile_misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles `misbehaving.c` with extra compiler arguments."""

    def compile_(*arguments: str) -> Path:
        compiler = shutil.which("gcc") or shutil.which("cc")
        assert compiler, "the tests of the harness need a C compiler"
        folder = tmp_path_factory.mktemp("object")
        (folder / "fragment.h").write_text(subjects.abi_fragment(SOURCE))
        path = folder / "misbehaving.so"
        source = Path(__file__).parent / "misbehaving.c"
        command = [compiler, "-shared", "-fPIC", "-O1", f"-I{subjects.KERNELS}", f"-I{folder}"]
        subprocess.run([*command, *arguments, "-o", str(path), str(source)], check=True)
        return path

    return compile_


@pytest.fixture(scope="session")
def misbehaving(compile_misbehaving: Compile) -> Path:
    return compile_misbehaving()


@pytest.fixture
def assignment(misbehaving: Path) -> Assignment:
    return Assignment(
        operation=OPERATION,
        symbol=f"pf_{OPERATION}_page",
        object_path=str(misbehaving),
        source_path=str(SOURCE),
        backend="host",
        build="release",
        promises_containment=True,
    )
