"""A compute-sanitizer that needs no GPU: it watches launches on the host."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SetUp = Callable[..., None]


@pytest.fixture
def fake_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """Puts the stand-in on PATH: `fake_sanitizer(faulty='"num_pages": 2', way="late")`."""

    def set_up(faulty: str, way: str = "") -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "compute-sanitizer"
        fake = Path(__file__).with_name("fake_compute_sanitizer.py")
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake}" "$@"\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("FAKE_SANITIZER", json.dumps({"faulty": faulty, "way": way}))

    return set_up
