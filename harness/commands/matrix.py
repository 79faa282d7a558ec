"""`pagefuzz matrix`: which layer of detection sees which wrong access, shown by injecting them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pagefuzz.harness.commands.fuzz import make_folder
from pagefuzz.harness.commands.selection import selected_subjects
from pagefuzz.harness.devices import machine, resolve_device
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.injection import KINDS, LAYERS, Cell, Matrix, examine
from pagefuzz.harness.subjects import Subject
from pagefuzz.harness.versions import commit, versions

_LEGEND = """\
One access that the contract forbids, at the end of each launch of a sound
kernel; the value that a read brings is thrown away. Who saw it, every time:
  G  guard pages and read-only memory; checked build off
  D  red zones and the byte diff of whole buffers; checked build off
  C  the checked build
  .  not seen, as that layer promises no more   !  not as promised
  -  there is no such place
"""
_LETTERS = {"guard": "G", "diff": "D", "checked": "C"}
_COLUMN = 8


def matrix(options: argparse.Namespace) -> int:
    """Returns the exit code: 1 if a layer does not see what it promises, or sees what is not there.
    Raises `CannotCheckError`."""
    backend = resolve_device(options.device)
    chosen = selected_subjects(options.op, options.subject)
    if options.subject is None:  # one subject an operation: the access is not the subject's
        chosen = tuple({subject.operation: subject for subject in chosen}.values())
    if options.report is not None:
        make_folder(options.report)
    gpu = machine().gpu
    print(
        f"device  {gpu.name if backend == 'cuda' and gpu else 'host'}; {options.tries} tries each"
    )
    print(_LEGEND)
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [
            (subject, pool.submit(examine, subject.operation, subject.name, backend,
                                  tries=options.tries, gpu_memory_bytes=options.gpu_memory))
            for subject in chosen
        ]  # fmt: skip
        found = []
        for subject, future in running:
            print(f"{subject.operation} · {subject.name}")
            cells = future.result()
            print(_table(cells), flush=True)
            found.append((subject, cells))
    all_cells = [cell for _, one in found for cell in one.values()]
    wrong = [said for cell in all_cells for said in cell.wrong]
    print(
        f"{sum(cell.tries for cell in all_cells):,} injected accesses in {len(all_cells):,} cells, "
        f"{sum(not cell.kept for cell in all_cells)} cells not as promised"
    )
    if options.report is not None:
        report = _report(options, backend, found)
        path = options.report / "matrix.json"
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for said in wrong[:20]:
        print(f"pagefuzz: not as promised: {said}", file=sys.stderr)
    if not all_cells:
        raise CannotCheckError("nothing was injected")
    return 1 if wrong else 0


def _table(cells: Matrix) -> str:
    buffers = list(dict.fromkeys(buffer for buffer, _, _ in cells))
    first = max(map(len, buffers)) + 2
    lines = [
        " " * first + "".join(f"{getattr(kind, part):<{_COLUMN}}" for kind in KINDS).rstrip()
        for part in ("access", "where")
    ]
    for buffer in buffers:
        row = f"{buffer:<{first}}"
        for kind in KINDS:
            marks = "".join(_mark(cells.get((buffer, kind, layer.name)), layer.name)
                            for layer in LAYERS)  # fmt: skip
            row += f"{marks:<{_COLUMN}}"
        lines.append(row.rstrip())
    return "\n".join(lines) + "\n"


def _mark(cell: Cell | None, layer: str) -> str:
    if cell is None:
        return "-"
    if not cell.kept:
        return "!"
    return _LETTERS[layer] if cell.promised else "."


def _report(
    options: argparse.Namespace, backend: str, found: Sequence[tuple[Subject, Matrix]]
) -> dict[str, Any]:
    gpu = machine().gpu if backend == "cuda" else None
    return {
        "pagefuzz_matrix": 1,
        "commit": commit() or "unknown",
        "versions": dict(versions()),
        "device": gpu.name if gpu else "host",
        "driver": gpu.driver if gpu else None,
        "tries": options.tries,
        "cells": [
            {
                "operation": subject.operation,
                "subject": subject.name,
                "buffer": buffer,
                "access": kind.name,
                "layer": layer,
                "promised": cell.promised,
                "seen": cell.seen,
                "tries": cell.tries,
                "as_promised": cell.kept,
            }
            for subject, one in found
            for (buffer, kind, layer), cell in one.items()
        ],
    }
