"""Who may import whom, read from the source of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Folder -> what it may import beside the standard library and itself. None: anything.
MAY_IMPORT = {
    "kernels": frozenset({"triton"}),
    "oracles": frozenset({"numpy", "torch"}),
    "strategies": frozenset({"pagefuzz.oracles", "hypothesis", "numpy"}),
    "harness": None,
}


def _imports(path: Path, root: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, as an absolute name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["pagefuzz", *path.relative_to(root).parent.parts]
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from pagefuzz import kernels` imports a folder; `from pagefuzz import check` a name.
            if module == "pagefuzz":
                yield from (f"pagefuzz.{alias.name}" for alias in node.names)
            else:
                yield module


def _forbidden(path: Path, root: Path) -> list[str]:
    folder = path.relative_to(root).parts[0]
    allowed = MAY_IMPORT[folder]
    if allowed is None:
        return []
    found = []
    for name in _imports(path, root):
        first = name.split(".")[0]
        own = ".".join(name.split(".")[:2])
        if first in sys.stdlib_module_names or own == f"pagefuzz.{folder}":
            continue
        if first not in allowed and own not in allowed:
            found.append(f"{path.relative_to(root)} imports {name}")
    return found


def _modules(root: Path) -> list[Path]:
    return [path for folder in MAY_IMPORT for path in sorted((root / folder).rglob("*.py"))]


def test_imports_go_one_way(root):
    """kernels <- Triton; oracles <- numpy, torch; strategies <- oracles; harness <- all."""
    modules = _modules(root)
    assert len(modules) > 30
    assert [line for path in modules for line in _forbidden(path, root)] == []


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("kernels/x.py", "import numpy"),
        ("kernels/x.py", "from pagefuzz.oracles import case"),
        ("oracles/x.py", "from pagefuzz import strategies"),
        ("oracles/operations/x.py", "def f():\n    from pagefuzz.harness.build import build"),
        ("oracles/judgements/x.py", "from ...harness import build"),
        ("oracles/x.py", "import hypothesis"),
        ("strategies/x.py", "from pagefuzz.harness import check"),
        ("strategies/x.py", "import pagefuzz.kernels"),
    ],
)
def test_a_forbidden_import_is_seen(tmp_path, where, line):
    """The rule fires on each way to write an import."""
    path = tmp_path / where
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert len(_forbidden(path, tmp_path)) == 1


@pytest.mark.parametrize("line", ["import pagefuzz", "import pagefuzz.harness.cli as cli"])
def test_a_light_import_stays_light(line):
    """Importing the package or the command line loads none of the heavy packages."""
    heavy = ("torch", "numpy", "cffi", "hypothesis", "rich")
    program = f"{line}\nimport sys\nprint([n for n in {heavy!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["fuzz", "--help"]])
def test_a_light_command_stays_light(arguments):
    """--version and --help start as fast as Python does."""
    program = (
        "import sys, atexit\n"
        "from pagefuzz.harness.cli import main\n"
        "names = ('torch', 'numpy', 'cffi', 'hypothesis', 'rich')\n"
        "atexit.register(lambda: print([n for n in names if n in sys.modules], file=sys.stderr))\n"
        f"main({arguments!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_no_generic_top_level_module(root, folder):
    """Each folder refuses to be imported under its bare name, as other people have one too."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"ImportError: import pagefuzz.{folder}, not {folder}" in done.stderr
