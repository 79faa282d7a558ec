"""`pagefuzz matrix`: which layer of detection sees which wrong access, shown by injecting them."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pagefuzz.harness.campaign.drawing import leave_the_folder_alone
from pagefuzz.harness.check import Checker
from pagefuzz.harness.commands.fuzz import make_folder
from pagefuzz.harness.commands.selection import selected_subjects
from pagefuzz.harness.devices import machine, resolve_device
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import write_whole
from pagefuzz.harness.injection import (
    KINDS,
    LAYERS,
    Cell,
    Key,
    Kind,
    Layer,
    Matrix,
    Wrong,
    examine,
)
from pagefuzz.harness.matrix_report import MatrixReport
from pagefuzz.harness.reporters.figures import plural
from pagefuzz.harness.subjects import Subject
from pagefuzz.oracles.wording import count_text, unknown_text

_LEGEND = """\
One access that the contract forbids, at the end of each launch of a sound
kernel; the value that a read brings is thrown away. Who saw it, every time:
  G  guard pages and read-only memory; checked build off
  D  red zones and the byte diff of whole buffers; checked build off
  C  the checked build
  .  not seen, as that layer promises no more   !  not as promised
  -  there is no such place, or it was not asked for
"""
_LETTERS = {"guard": "G", "diff": "D", "checked": "C"}
_MOST_SAID = 20
_WRITE_EVERY_S = 5
_One = TypeVar("_One", Kind, Layer)


def matrix(options: argparse.Namespace) -> int:
    """Returns the exit code: 1 if a layer does not see what it promises, or sees what is not there.
    Raises `CannotCheckError`."""
    if options.skip >= options.tries:
        raise CannotCheckError(
            f"--skip {options.skip} leaves none of {count_text(options.tries, 'case')} for each "
            "cell; give more --tries"
        )
    if options.resume and options.report is None:
        raise CannotCheckError("--resume goes on with what is in a folder; name it with --report")
    backend = resolve_device(options.device)
    layers, kinds = _named("layer", LAYERS, options.layer), _named("kind", KINDS, options.kind)
    chosen = selected_subjects(options.op, options.subject)
    if options.subject is None:  # one subject an operation: the access is not the subject's
        chosen = tuple({subject.operation: subject for subject in chosen}.values())
    with contextlib.ExitStack() as stack:
        if options.report is not None:
            make_folder(options.report)
            stack.enter_context(_alone_in(options.report))
        return _examine(options, backend, layers, kinds, chosen)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two runs would each write what the other does not know. Raises `CannotCheckError`."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotCheckError(
                f"another run writes its report into {folder}; give another folder with --report"
            ) from None
        yield
    finally:
        os.close(held)


def _object(subject: Subject, backend: str, layer: Layer) -> str:
    """Of which a launch is, by its name in the build cache. Raises `CannotCheckError`."""
    with Checker(subject.operation, subject.name, backend, layer.build) as checker:
        return Path(checker.assignment.object_path).parent.name


def _examine(
    options: argparse.Namespace,
    backend: str,
    layers: Sequence[Layer],
    kinds: Sequence[Kind],
    chosen: Sequence[Subject],
) -> int:
    """As `matrix`."""
    gpu = machine().gpu
    report = _Report(options, gpu.name if backend == "cuda" and gpu else "host")
    tries = f"{options.tries} {'try' if options.tries == 1 else 'tries'} each"
    print(f"device  {report.data.device}; {tries}")
    if report.data.earlier:
        before = plural(report.data.accesses_before, "accesses")
        commits = dict.fromkeys(str(run.get("commit"))[:8] for run in report.data.earlier)
        print(f"resumed  {before} were made before, by commit {', '.join(commits)}")
    print(_LEGEND)
    leave_the_folder_alone()
    found: list[tuple[Subject, Matrix]] = []
    problems = report.data.problems
    was_interrupted = False
    for subject in chosen:
        print(f"{subject.operation} · {subject.name}", flush=True)
        cells: dict[Key, Cell] = {}
        try:
            objects = {layer.name: _object(subject, backend, layer) for layer in layers}
            cells = report.data.cells_of(subject.operation, subject.name, objects)
            examine(
                *(subject.operation, subject.name, backend),
                tries=options.tries,
                skip=options.skip,
                layers=layers,
                kinds=kinds,
                jobs=options.jobs,
                gpu_memory_bytes=options.gpu_memory,
                cells=cells,
                on_entry=report.write_now_and_then,
            )
        except KeyboardInterrupt:
            was_interrupted = True
        except CannotCheckError as error:  # what the others show is kept
            if str(error) not in problems:
                problems.append(str(error))
        found.append((subject, cells))
        report.write_now_and_then(at_once=True)
        if cells:
            print(table(cells, kinds), flush=True)
        if was_interrupted:
            break
    all_cells = [cell for _, one in found for cell in one.values()]
    wrong = [
        _Entry(subject, key, cell, one)
        for subject, cells in found
        for key, cell in cells.items()
        for one in cell.wrong
    ]
    print(
        f"{plural(sum(cell.tries for cell in all_cells), 'injected accesses')} in "
        f"{plural(len(all_cells), 'cells')}, "
        f"{plural(sum(not cell.kept for cell in all_cells), 'cells')} not as promised",
        flush=True,
    )
    few = sum(
        sum(number > options.skip for number in cell.tried) < options.tries - options.skip
        for _, cells in found
        for (_, kind, layer), cell in cells.items()
        if kind in kinds and layer in {one.name for one in layers}
    )
    if few and not was_interrupted and not problems:
        print(f"{plural(few, 'cells')} of fewer tries: no more cases have such a place", flush=True)
    _say(wrong, options, backend, problems)
    report.data.was_interrupted = was_interrupted
    try:
        report.write()
    except CannotCheckError as error:
        problems.append(str(error))
    if was_interrupted:
        what = "what is above was examined, and nothing else"
        problems.append(f"interrupted: {what if all_cells else 'nothing was injected'}")
    elif not all_cells and not problems:
        problems.append("nothing was injected")
    if wrong:  # as in a campaign: it counts whatever else happened
        for problem in problems:
            print(f"pagefuzz: {problem}", file=sys.stderr)
        return 1
    if problems:
        raise CannotCheckError("; ".join(problems))
    return 0


class _Report:
    """What is found, and the file that it is in, if one was asked for."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        """Raises `CannotCheckError` if there is a file that this run cannot go on with."""
        self._path = options.report / "matrix.json" if options.report else None
        self._written = 0.0  # the first try is written at once
        if options.resume and self._path is not None:
            self.data = MatrixReport.read(self._path, device, options.tries)
        else:
            self.data = MatrixReport(device, options.tries)
        self.data.was_interrupted = True  # until it has come to its end

    def write(self) -> None:
        """Raises `CannotCheckError`."""
        if self._path is not None:
            self.data.write(self._path)

    def write_now_and_then(self, *, at_once: bool = False) -> None:
        """So that little is lost, whatever ends this process. A full disk is said at the end."""
        if at_once or time.monotonic() - self._written > _WRITE_EVERY_S:
            with contextlib.suppress(CannotCheckError):
                self.write()
            self._written = time.monotonic()


@dataclass(frozen=True)
class _Entry:
    """One try that was not as promised, with the cell that it is of."""

    subject: Subject
    key: Key
    cell: Cell
    wrong: Wrong

    @property
    def text(self) -> str:
        buffer, kind, layer = self.key
        promise = "promises to see it" if self.cell.promised else "promises to see nothing"
        return (
            f"{self.subject.operation}/{self.subject.name}: {kind.name} {buffer}, try "
            f"{self.wrong.number}: the layer {layer} {promise}; seen: {self.wrong.seen}"
        )

    @property
    def file_name(self) -> str:
        """Differs for each try of each subject."""
        buffer, kind, layer = self.key
        of = hashlib.sha256(self.subject.name.encode()).hexdigest()[:8]
        words = (self.subject.operation, layer, kind.access, kind.where, buffer)
        return f"matrix-{'-'.join(words)}-{self.wrong.number}-{of}.json"

    def again(self, backend: str, tries: int) -> str:
        """The command that makes this access again before any other of its cell. Which cases there
        are follows from the number of tries."""
        _, kind, layer = self.key
        words = ["pagefuzz", "matrix", "--device", backend, "--op", self.subject.operation]
        words += ["--subject", self.subject.name, "--layer", layer, "--kind", kind.name]
        words += ["--tries", str(tries), "--skip", str(self.wrong.number - 1)]
        return shlex.join(words)


def _say(
    wrong: Sequence[_Entry], options: argparse.Namespace, backend: str, problems: list[str]
) -> None:
    """A sentence for each, its case in a file of its own: of the first ones, if there are many."""
    folder = (options.report or Path()) / "findings"
    for entry in wrong[:_MOST_SAID]:
        path = folder / entry.file_name
        where = f"the case is in {path}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(entry.wrong.case.to_json(), indent=1) + "\n")
        except OSError as error:
            where = "the case is not stored"
            problem = f"cannot store cases in {folder}: {error.strerror or error}"
            if problem not in problems:
                problems.append(problem)
        print(f"pagefuzz: not as promised: {entry.text}; {where}", file=sys.stderr)
        print(f"  again: {entry.again(backend, options.tries)}", file=sys.stderr)
    if (more := len(wrong) - _MOST_SAID) > 0:
        kept = "in matrix.json" if options.report else "--report keeps them in matrix.json"
        print(f"pagefuzz: not as promised: {more:,} more; {kept}", file=sys.stderr)


def _named(what: str, there_are: Sequence[_One], asked_for: Sequence[str] | None) -> list[_One]:
    """All of them if none is asked for."""
    names = [one.name for one in there_are]
    if unknown := sorted(set(asked_for or ()) - set(names)):
        raise CannotCheckError(unknown_text(what, unknown[0], names))
    return [one for one in there_are if one.name in (asked_for or names)]


def table(cells: Matrix, kinds: Sequence[Kind]) -> str:
    """A line a buffer, a column a kind; a letter for each layer, see `_LEGEND`."""
    buffers = list(dict.fromkeys(buffer for buffer, _, _ in cells))
    widths = [max(len(kind.access), len(kind.where), len(LAYERS)) + 1 for kind in kinds]
    first = max(map(len, buffers)) + 2

    def line(name: str, texts: Iterable[str]) -> str:
        columns = "".join(f"{text:<{width}}" for text, width in zip(texts, widths, strict=True))
        return f"{name:<{first}}{columns}".rstrip()

    lines = [line("", (kind.access for kind in kinds)), line("", (kind.where for kind in kinds))]
    for buffer in buffers:
        lines.append(line(buffer, (_marks(cells, buffer, kind) for kind in kinds)))
    return "\n".join(lines) + "\n"


def _marks(cells: Matrix, buffer: str, kind: Kind) -> str:
    return "".join(_mark(cells.get((buffer, kind, layer.name)), layer.name) for layer in LAYERS)


def _mark(cell: Cell | None, layer: str) -> str:
    if cell is None:
        return "-"
    if not cell.kept:
        return "!"
    return _LETTERS[layer] if cell.promised else "."
