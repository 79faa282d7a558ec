"""The journal: every new or simpler failing case, on disk before anything else is done with it.

One JSON object a line, appended whole and synced, by any number of processes at once. Whatever
dies afterwards (the worker, the runner, the command line, the machine), the case is there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.oracles.case import Case


def entry_of(unit: Unit, backend: str, build: str, identity: str, case: Case) -> dict[str, Any]:
    """A failing case, and what it fails on.

    identity  of its failure (`findings.identity_of`)
    """
    return {
        "operation": unit.operation,
        "subject": unit.subject,
        "backend": backend,
        "build": build,
        "identity": identity,
        "case": case.to_json(),
    }


class Journal:
    """Appends to `path`, or does nothing if it is None. Creates the folder."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._handle: int | None = None

    def append(self, entry: dict[str, Any]) -> None:
        """Raises `CannotCheckError` if the entry cannot be stored: a run that would lose its
        findings must not go on as if it kept them."""
        if self._path is None:
            return
        try:
            if self._handle is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            line = json.dumps(entry).encode() + b"\n"
            if _is_torn(self._handle):  # by a crash or a full disk: the rest of it is not ours
                line = b"\n" + line
            written = os.write(self._handle, line)
            if written < len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
            os.fsync(self._handle)
        except OSError as error:
            raise CannotCheckError(
                f"cannot store a failing case in {self._path}: {error.strerror or error}; "
                "free space there or choose another folder with --report"
            ) from error

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _is_torn(handle: int) -> bool:
    """Whether the last line of a file has no end."""
    size_bytes = os.fstat(handle).st_size
    return size_bytes > 0 and os.pread(handle, 1, size_bytes - 1) != b"\n"


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Every whole entry; lines torn by a crash or a full disk are left out. Empty if there is no
    journal."""
    entries = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries
