"""matrix.json: what `pagefuzz matrix` has found, for people and for a later run that goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import write_whole
from pagefuzz.harness.injection import KINDS, LAYERS, Cell, Key, Wrong, suitable_cases
from pagefuzz.harness.running import Injection
from pagefuzz.harness.versions import commit, versions
from pagefuzz.oracles.case import Case, CaseError

VERSION = 2

_MOST_TRIES = 2**20  # of a cell, in a file that makes sense

Of = tuple[str, str]
"""(operation, name of the subject)."""


@dataclass
class MatrixReport:
    """What one run has found, or several of which each went on where the last one was stopped.

    device   on which all of them ran: "host", or the GPU's name
    tries    that they were asked for, of each cell: which cases there are follows from it
    cells    of each subject
    cases    operation -> digest of its cases
    earlier  what each run before this one was: its commit, versions and number of accesses
    problems, was_interrupted  of this run
    """

    device: str
    tries: int
    cells: dict[Of, dict[Key, Cell]] = field(default_factory=dict)
    cases: dict[str, str] = field(default_factory=dict)
    earlier: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    was_interrupted: bool = False

    @property
    def accesses(self) -> int:
        return sum(cell.tries for cells in self.cells.values() for cell in cells.values())

    @property
    def accesses_before(self) -> int:
        return sum(run["accesses"] for run in self.earlier)

    def cells_of(self, operation: str, subject: str) -> dict[Key, Cell]:
        """Those there are already, for more to be filled in.

        Raises `CannotCheckError` if they are of other cases than are drawn today.
        """
        digest = _digest(suitable_cases(operation, self.tries))
        if self.cases.setdefault(operation, digest) != digest:
            raise CannotCheckError(
                f"{operation}: the report is of other cases than this pagefuzz draws, so that "
                "nothing can be added to it; give another folder, or leave out --resume"
            )
        return self.cells.setdefault((operation, subject), {})

    def write(self, path: Path) -> None:
        """Raises `CannotCheckError` with the reason."""
        try:
            write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            raise CannotCheckError(f"cannot write {path}: {error.strerror or error}") from None

    def to_json(self) -> dict[str, Any]:
        this = {
            "commit": commit() or "unknown",
            "versions": dict(versions()),
            "accesses": self.accesses - self.accesses_before,
        }
        return {
            "pagefuzz_matrix": VERSION,
            "device": self.device,
            "tries": self.tries,
            "runs": [*self.earlier, this] if this["accesses"] else self.earlier,
            "was_interrupted": self.was_interrupted,
            "problems": self.problems,
            "cases": self.cases,
            "cells": [
                _cell_json(of, key, cell)
                for of, cells in self.cells.items()
                for key, cell in cells.items()
            ],
        }

    @classmethod
    def read(cls, path: Path, device: str, tries: int) -> MatrixReport:
        """That of an earlier run on that device, with as many tries; an empty one if there is none.

        Raises `CannotCheckError` if this run cannot go on from there.
        """
        try:
            data = json.loads(path.read_bytes())
            if not isinstance(data, dict) or "pagefuzz_matrix" not in data:
                raise ValueError("it has no pagefuzz_matrix")
            if data["pagefuzz_matrix"] != VERSION:
                raise ValueError(f"it is of format {data['pagefuzz_matrix']!r:.20}, not {VERSION}")
            report = cls._from_json(data)
        except FileNotFoundError:
            return cls(device, tries)
        except OSError as error:
            raise CannotCheckError(f"cannot read {path}: {error.strerror or error}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise CannotCheckError(
                f"{path} is no report of `pagefuzz matrix` to go on with: {what:.200}"
            ) from None
        if report.device != device:
            raise CannotCheckError(
                f"{path} is of another device, {report.device}; this one is {device}"
            )
        if report.tries != tries:
            raise CannotCheckError(
                f"{path} is of a run with --tries {report.tries}; to go on give as many, as which "
                "cases there are follows from it"
            )
        return report

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> MatrixReport:
        report = cls(str(data["device"]), _count(data["tries"], "tries"))
        report.cases = {str(name): str(digest) for name, digest in data["cases"].items()}
        for run in data["runs"]:
            _count(run["accesses"], "accesses")
            report.earlier.append(dict(run))
        for one in data["cells"]:
            of, key, cell = _cell(one)
            report.cells.setdefault(of, {})[key] = cell
        if report.accesses != report.accesses_before:
            raise ValueError(
                f"its cells have {report.accesses:,} accesses, its runs {report.accesses_before:,}"
            )
        return report


def _digest(cases: Iterable[Case]) -> str:
    whole = hashlib.sha256()
    for case in cases:
        whole.update(case.dumps().encode())
    return whole.hexdigest()[:16]


def _cell_json(of: Of, key: Key, cell: Cell) -> dict[str, Any]:
    buffer, kind, layer = key
    return {
        "operation": of[0],
        "subject": of[1],
        "buffer": buffer,
        "access": kind.name,
        "layer": layer,
        "promised": cell.promised,
        "seen": cell.seen,
        "tries": cell.tries,
        "tried": _numbers_text(cell.tried),
        "as_promised": cell.kept,
        "wrong": [
            {
                "try": one.number,
                "seen": one.seen,
                "injection": one.injection.to_json(),
                "case": one.case.to_json(),
            }
            for one in cell.wrong
        ],
    }


def _cell(data: Mapping[str, Any]) -> tuple[Of, Key, Cell]:
    """Raises `ValueError`, `TypeError` or `KeyError`."""
    kinds = {kind.name: kind for kind in KINDS}
    if data["access"] not in kinds or data["layer"] not in {layer.name for layer in LAYERS}:
        raise ValueError(f"there is no {data['access']!r:.40} in a layer {data['layer']!r:.40}")
    key = (str(data["buffer"]), kinds[data["access"]], str(data["layer"]))
    cell = Cell(data["promised"] is True, _count(data["seen"], "seen"))
    cell.tried = _numbers(data["tried"])
    for one in data["wrong"]:
        try:
            case = Case.from_json(one["case"])
        except CaseError as error:
            raise ValueError(f"a case of it is none: {error}") from None
        made = Injection(**one["injection"])
        cell.wrong.append(Wrong(_count(one["try"], "a try"), case, made, str(one["seen"])))
    if cell.tries != data["tries"] or cell.seen > cell.tries:
        raise ValueError(f"{', '.join(key[::2])}: its tries do not add up")
    return (str(data["operation"]), str(data["subject"])), key, cell


def _numbers_text(numbers: Iterable[int]) -> str:
    """Such as "1-30, 32"."""
    groups = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)


def _numbers(text: str) -> set[int]:
    """Raises `ValueError`."""
    found: set[int] = set()
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition("-")
        if not 1 <= int(first) <= int(last or first) <= _MOST_TRIES:
            raise ValueError(f"{part!r:.40} are no numbers of tries")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _count(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"{what} must be a number from 0, got {value!r:.40}")
    return value
