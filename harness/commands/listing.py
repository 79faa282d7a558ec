"""`pagefuzz list`: what there is to check, and what it is checked for."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from pagefuzz.harness import subjects
from pagefuzz.harness.reporters.figures import screen_width
from pagefuzz.oracles import registry


def listing() -> int:
    width = screen_width()
    _print("operations", ((o.name, o.summary) for o in registry.operations().values()), width)
    for operation in registry.operations():
        rows = []
        for subject in subjects.subjects():
            if subject.operation != operation:
                continue
            promise = "promises containment" if subject.promises_containment else "no containment"
            text = subject.summary if subject.twin is None else ""
            faults = f"faults: {subject.faults}" if subject.faults else ""
            rows.append((subject.name, "; ".join(filter(None, (text, promise, faults)))))
        _print(f"subjects of {operation}", rows, width)
    _print(
        "judgements",
        ((j.name, f"{j.summary} (counts {j.unit})") for j in registry.judgements().values()),
        width,
    )
    return 0


def _print(title: str, rows: Iterable[tuple[str, str]], width: int) -> None:
    rows = list(rows)
    print(title)
    column = max((len(name) for name, _ in rows), default=0) + 4
    if column > width // 2:  # the text below the name instead
        for name, text in rows:
            print(f"  {name}")
            print(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    "))
        print()
        return
    for name, text in rows:
        print(
            textwrap.fill(
                text,
                width,
                initial_indent=f"  {name}".ljust(column),
                subsequent_indent=" " * column,
            )
        )
    print()
