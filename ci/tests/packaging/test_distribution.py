"""What is in the wheel and in the source distribution."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

FOLDERS = ("harness", "kernels", "oracles", "strategies")


def _tracked(root: Path) -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in done.stdout.splitlines() if (root / name).is_file()]


def _in_wheel(name: str) -> str:
    """Where a file of the repository lies in the wheel."""
    return "pagefuzz/" + name.removeprefix("harness/_root/")


@pytest.fixture(scope="module")
def distributions(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of the files in each distribution, built from a copy of the tree."""
    import shutil

    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in _tracked(root):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target, follow_symlinks=False)
    program = (
        "from setuptools import build_meta as b\n"
        f"b.build_wheel({str(out)!r})\nb.build_sdist({str(out)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as tar:
        in_sdist = {n.partition("/")[2] for n in tar.getnames()}
    return {"wheel": in_wheel, "sdist": in_sdist}


def test_top_level_names(distributions):
    """The wheel installs `pagefuzz` and its own metadata, nothing else."""
    top = {name.split("/")[0] for name in distributions["wheel"]}
    assert {name for name in top if not name.endswith(".dist-info")} == {"pagefuzz"}
    assert len(top) == 2


def test_every_file_of_the_packages_is_in_the_wheel(root, distributions):
    """Modules, kernels, headers, twins: all of them, and nothing from ci/."""
    expected = {
        _in_wheel(name)
        for name in _tracked(root)
        if name.startswith(tuple(f"{folder}/" for folder in FOLDERS))
    }
    installed = {name for name in distributions["wheel"] if name.startswith("pagefuzz/")}
    assert installed == expected
    assert any(name.endswith(".cu") for name in installed)


def test_the_source_distribution_is_complete(root, distributions):
    """Everything that is in the repository, so that its tests run from it too."""
    wanted = {name for name in _tracked(root) if not name.startswith((".ci/", ".git"))}
    assert wanted - distributions["sdist"] == set()


def test_every_subpackage_is_listed(root):
    """A package that is not listed works in an editable installation and is missing elsewhere."""
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    listed = data["tool"]["setuptools"]["packages"]
    there = {"pagefuzz"}
    for folder in FOLDERS:
        for init in (root / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(root).parts
            if parts != ("harness", "_root"):
                there.add(".".join(("pagefuzz", *parts)))
    assert sorted(listed) == sorted(there)


def test_type_checkers_see_what_is_installed(root):
    """ci/typing links to the four folders and to every file of the parent package."""
    links = root / "ci" / "typing" / "pagefuzz"
    for folder in FOLDERS:
        assert (links / folder).resolve() == root / folder
    parent = {p.name for p in (root / "harness" / "_root").iterdir() if p.is_file()}
    assert {p.name for p in links.iterdir()} == parent | set(FOLDERS)
    assert all(p.is_symlink() and not str(p.readlink()).startswith("/") for p in links.iterdir())
