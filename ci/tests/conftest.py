"""Fixtures that several areas of the tests use."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """Of the repository."""
    return ROOT


Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs the installed command (`python -m pagefuzz` where it is not installed) in a folder of
    its own: `cli("fuzz", "--op", "nope", env={...})`."""
    script = Path(sysconfig.get_path("scripts"), "pagefuzz")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "pagefuzz"]

    def run(
        *arguments: str, env: dict[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "80", **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
