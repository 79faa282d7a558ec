"""House rules, tested over the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

LONGEST_FILE_LINES = 550
TOP_LEVEL = {
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "ci",
    "conftest.py",
    "harness",
    "kernels",
    "oracles",
    "pyproject.toml",
    "strategies",
}
MARKERS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.$}~:/*-])/(work|home|root|mnt|farm)/\w")


def _files(root: Path) -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [root / name for name in done.stdout.splitlines() if (root / name).is_file()]


def _lines(root: Path) -> list[tuple[str, str]]:
    """(place, line) of every text file of ours."""
    found = []
    for path in _files(root):
        if path.name == "LICENSE" or path.is_symlink() or path == Path(__file__):
            continue  # this file names what it looks for
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        place = path.relative_to(root)
        found += [(f"{place}:{n}", line) for n, line in enumerate(text.splitlines(), 1)]
    return found


def test_top_level(root):
    """The folders and files that design and packaging agree on, and dot-files."""
    names = {path.relative_to(root).parts[0] for path in _files(root)}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


def test_no_paths_of_one_machine(root):
    """Nothing refers to where somebody's checkout lies."""
    assert [place for place, line in _lines(root) if MACHINE_PATHS.search(line)] == []


def test_no_markers_of_unfinished_work(root):
    """What is not done is an issue, not a comment; no function body is a stub."""
    assert [place for place, line in _lines(root) if MARKERS.search(line)] == []
    stubs = []
    for path in _files(root):
        if path.suffix != ".py" or "tests" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
                stubs.append(f"{path.relative_to(root)}:{node.lineno}")
    assert stubs == []


def test_files_stay_readable(root):
    """No source file grows past what can be read in one go."""
    suffixes = {".py", ".cu", ".h", ".toml", ""}
    long = [
        f"{path.relative_to(root)}: {count} lines"
        for path in _files(root)
        if path.suffix in suffixes
        and path.name != "LICENSE"
        and (count := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE_LINES
    ]
    assert long == []


def test_every_module_says_what_it_is(root):
    """Each module, ours and the tests', begins with a sentence."""
    silent = [
        str(path.relative_to(root))
        for path in _files(root)
        if path.suffix == ".py" and not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert silent == []


def test_every_test_says_what_it_tests(root):
    """Each test has a docstring."""
    silent = []
    for path in (root / "ci" / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.FunctionDef)
                and node.name.startswith("test_")
                and not ast.get_docstring(node)
            ):
                silent.append(f"{path.relative_to(root)}:{node.lineno} {node.name}")
    assert silent == []


def test_licence(root):
    """Apache-2.0, in the file and in the metadata."""
    assert "Apache License" in (root / "LICENSE").read_text(encoding="utf-8")
    assert 'license = "Apache-2.0"' in (root / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["ci/test", "ci/fuzz", ".ci/run"])
def test_scripts_can_be_run(root, script):
    """Each is executable and is bash without syntax errors."""
    path = root / script
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("script", ["ci/test", "ci/fuzz", "ci/environment", ".ci/run"])
def test_scripts_name_no_host(root, script):
    """Where packages come from is the machine's business."""
    assert not re.search(r"https?://|index-url", (root / script).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (MACHINE_PATHS, "see /work/main/x.py"),
        (MACHINE_PATHS, "cd '/home/somebody'"),
        (MARKERS, "# TODO: later"),
    ],
)
def test_the_rules_fire(rule, line):
    """Each rule finds what it is for."""
    assert rule.search(line)
