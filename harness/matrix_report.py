"""matrix.json: what `pagefuzz matrix` has found, for people and for a later run that goes on."""

from __future__ import annotations

import hashlib
import json
import re
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
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, CaseError

VERSION = 2

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")

Of = tuple[str, str]
"""(operation, name of the subject)."""


def _this_run() -> dict[str, Any]:
    return {"commit": commit() or "unknown", "versions": dict(versions())}


@dataclass
class MatrixReport:
    """What one run has found, or several of which each went on where the last one was stopped.

    device   on which all of them ran: "host", or the GPU's name
    tries    that they were asked for, of each cell: which cases there are follows from it
    cells    of each subject
    cases    operation -> digest of its cases
    objects  what was launched: operation, subject and layer -> name of the object in the build
             cache, which follows from its sources and compiler
    earlier  what each run before this one was: its commit, versions and number of accesses
    this     the same of this run, from its beginning; but for the accesses
    problems, was_interrupted  of this run
    """

    device: str
    tries: int
    cells: dict[Of, dict[Key, Cell]] = field(default_factory=dict)
    cases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    earlier: list[dict[str, Any]] = field(default_factory=list)
    this: dict[str, Any] = field(default_factory=_this_run)
    problems: list[str] = field(default_factory=list)
    was_interrupted: bool = False

    @property
    def accesses(self) -> int:
        return sum(cell.tries for cells in self.cells.values() for cell in cells.values())

    @property
    def accesses_before(self) -> int:
        return sum(run["accesses"] for run in self.earlier)

    def cells_of(self, operation: str, subject: str, objects: Mapping[str, str]) -> dict[Key, Cell]:
        """Those there are already, for more to be filled in.

        objects  layer -> what is launched

        Raises `CannotCheckError` if they are of another object, or of other cases than are drawn
        today.
        """
        for layer, name in objects.items():
            if self.objects.setdefault(f"{operation}/{subject}/{layer}", name) != name:
                raise CannotCheckError(
                    f"{operation}/{subject}: its sources or its compiler are others than when the "
                    "report was begun, so that nothing can be added to it; give another folder, "
                    "or leave out --resume"
                )
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
        this = {**self.this, "accesses": self.accesses - self.accesses_before}
        return {
            "pagefuzz_matrix": VERSION,
            "device": self.device,
            "tries": self.tries,
            "runs": [*self.earlier, this] if this["accesses"] else self.earlier,
            "was_interrupted": self.was_interrupted,
            "problems": self.problems,
            "cases": self.cases,
            "objects": self.objects,
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
                raise ValueError(f"it is of another format than {VERSION}")
            report = cls._from_json(data)
        except FileNotFoundError:
            return cls(device, tries)
        except OSError as error:
            raise CannotCheckError(f"cannot read {path}: {error.strerror or error}") from None
        except KeyError as error:
            raise CannotCheckError(
                f"{path} is no report of `pagefuzz matrix` to go on with: it lacks {error}"
            ) from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            is_ours = type(error) is ValueError
            what = str(error) if is_ours else "something in it is of another type than it must be"
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
        report.objects = {str(name): str(one) for name, one in data["objects"].items()}
        for run in data["runs"]:
            _count(run["accesses"], "accesses")
            report.earlier.append(dict(run))
        for one in data["cells"]:
            of, key, cell = _cell(one, report.tries)
            if of[0] not in report.cases or f"{of[0]}/{of[1]}/{key[2]}" not in report.objects:
                raise ValueError(f"it does not say of which cases and object {of[0]} is")
            if key in report.cells.setdefault(of, {}):
                raise ValueError(f"it has a cell twice: {of[0]}, {', '.join(_names(key))}")
            report.cells[of][key] = cell
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


def _cell(data: Mapping[str, Any], tries: int) -> tuple[Of, Key, Cell]:
    """Raises `ValueError`, `TypeError` or `KeyError`."""
    operation, kinds = str(data["operation"]), {kind.name: kind for kind in KINDS}
    if data["access"] not in kinds or data["layer"] not in {layer.name for layer in LAYERS}:
        raise ValueError(f"there is no {data['access']!r:.40} in a layer {data['layer']!r:.40}")
    known = registry.operations().get(operation)
    if known is None or data["buffer"] not in {buffer.name for buffer in known.buffers}:
        raise ValueError(f"{operation!r:.40} has no buffer {data['buffer']!r:.40}")
    key: Key = (data["buffer"], kinds[data["access"]], data["layer"])
    cell = Cell(data["promised"] is True, _count(data["seen"], "seen"))
    cell.tried = _numbers(data["tried"], tries)
    cell.wrong = [_wrong(one, operation, key[0]) for one in list(data["wrong"])]
    numbers = {one.number for one in cell.wrong}
    seen = cell.tries - len(numbers) if cell.promised else len(numbers)
    if (
        (cell.tries, cell.seen, cell.kept) != (data["tries"], seen, data["as_promised"])
        or len(numbers) != len(cell.wrong)
        or not numbers <= cell.tried
    ):
        raise ValueError(f"{operation}, {', '.join(_names(key))}: its tries do not add up")
    return (operation, str(data["subject"])), key, cell


def _wrong(data: Mapping[str, Any], operation: str, buffer: str) -> Wrong:
    try:
        case = Case.from_json(data["case"])
    except CaseError as error:
        raise ValueError(f"a case of it is none: {error}") from None
    made = Injection(**data["injection"])
    whole = (made.offset_bytes, made.size_bytes)
    if made.buffer != buffer or case.operation != operation or {*map(type, whole)} != {int}:
        raise ValueError(f"a try of {operation} is of another operation, buffer or place")
    return Wrong(_count(data["try"], "a try"), case, made, str(data["seen"]))


def _names(key: Key) -> tuple[str, str, str]:
    buffer, kind, layer = key
    return buffer, kind.name, layer


def _numbers_text(numbers: Iterable[int]) -> str:
    """Such as "1-30, 32"."""
    groups = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)


def _numbers(text: str, tries: int) -> set[int]:
    """Raises `ValueError`."""
    found: set[int] = set()
    for part in text.split(", ") if text else ():
        match = _RANGE.fullmatch(part)
        first, last = match.groups() if match else ("0", "0")
        if not 1 <= int(first) <= int(last or first) <= tries:
            raise ValueError(f"{part!r:.40} are no numbers of {tries} tries")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _count(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"{what} must be a number from 0, got {value!r:.40}")
    return value
