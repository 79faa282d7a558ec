"""The case that is running, on disk before it runs, so that no end of any process loses it."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any, Protocol

from pagefuzz.harness.errors import CannotCheckError

_LIMIT_BYTES = 2**20
_KEPT = 20
_LONG_AGO = "0"  # as when the process began: it has ended
_numbers = itertools.count(1)


class Recorded(Protocol):
    """A case or a round trip."""

    def to_json(self) -> dict[str, Any]: ...


class Journal:
    """An append-only file with one JSON line a case: the last one is running, or was when its
    process ended. Cut back to nothing now and then, and removed by `close`.
    """

    def __init__(self, path: Path, **about: str) -> None:
        """`about` (subject, device, build) goes into every line. What a process that was killed has
        left at that path is moved aside: see `left_behind`.

        Raises `CannotCheckError` if the file cannot be written.
        """
        self.path = path
        self._about = about
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                path.rename(_unused(path.parent, _LONG_AGO))
            self._file = os.open(path, flags, 0o644)
        except OSError as error:
            raise self._unwritable(error) from None
        self._size_bytes = os.fstat(self._file).st_size

    def write(self, case: Recorded) -> None:
        """Survives the death of this process; not that of the machine, which would cost a sync.

        Raises `CannotCheckError` if it does not: what runs next could be lost.
        """
        line = json.dumps({**self._about, "case": case.to_json()}, separators=(",", ":")) + "\n"
        data = line.encode()
        try:
            if self._size_bytes + len(data) > _LIMIT_BYTES:
                os.ftruncate(self._file, 0)
                self._size_bytes = 0
            written = os.write(self._file, data)
            if written < len(data):
                os.ftruncate(self._file, self._size_bytes)  # half a line would spoil the next
                raise OSError(f"only {written} of {len(data)} bytes were written")
            self._size_bytes += written
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> CannotCheckError:
        return CannotCheckError(
            f"cannot keep a journal in {self.path}: {error.strerror or error}; PAGEFUZZ_CACHE may "
            "name another folder for it"
        )

    def close(self) -> None:
        """An orderly end: nothing was running."""
        os.close(self._file)
        self.path.unlink(missing_ok=True)


def last_entry(path: Path) -> dict[str, Any] | None:
    """The last whole line of a journal that was left behind; None if it has none."""
    for line in reversed(path.read_bytes().splitlines(keepends=True)):
        if line.endswith(b"\n"):
            try:
                entry = json.loads(line)
            except ValueError:  # an older line that was torn
                continue
            return entry if isinstance(entry, dict) else None
    return None


def new_path(folder: Path) -> Path:
    """For a journal of this process, which nobody else has or has had; of those that others left
    behind only the newest are kept."""
    for old in sorted(left_behind(folder), key=_changed_at, reverse=True)[_KEPT:]:
        old.unlink(missing_ok=True)
    return _unused(folder, _began("self"))


def _unused(folder: Path, began: str | None) -> Path:
    while (path := folder / f"{os.getpid()}-{began}-{next(_numbers)}.jsonl").exists():
        pass  # of a machine that was started anew
    return path


def left_behind(folder: Path) -> list[Path]:
    """Journals in a folder whose process has ended without an orderly end. Another one may have
    its number by now, in a container soon."""
    found = []
    for path in folder.glob("*-*.jsonl"):
        number, began, *rest = path.stem.split("-")
        if number.isdecimal():  # two numbers: of a version that did not tell when it began
            now = _began(number)
            if now is None or (rest and now != began):
                found.append(path)
    return found


def _began(process: str) -> str | None:
    """When a process was started, in ticks since the machine was; None if it has ended."""
    try:
        text = Path("/proc", process, "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]  # its name, in parentheses, may hold anything


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process was tidying too
        return 0.0
