"""Figures as people read them: amounts, durations, plain tables."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence

#: Columns. On a narrower terminal a text would be broken at every letter.
LEAST_WIDTH = 40


def duration(seconds: float) -> str:
    """8 s, 1 min 05 s, 2 h 03 min."""
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def amount(number: int, unit: str) -> str:
    """12 cases, 1 launch, 3.2 GB."""
    if unit == "bytes" and number >= 10_000:
        power = min((len(str(number)) - 1) // 3, 5)
        return f"{number / 1000**power:.1f} {' kMGTP'[power]}B"
    return plural(number, unit)


def plural(number: int, nouns: str) -> str:
    """`nouns` is the regular plural of what is counted."""
    if number != 1:
        return f"{number:,} {nouns}"
    return f"1 {nouns.removesuffix('es' if nouns.endswith(('ches', 'sses')) else 's')}"


def beside(left: str, right: str, width: int) -> list[str]:
    """Both on one line if they fit, else the second below the first."""
    line = f"{left}  {right}"
    return [line] if len(line) <= width else [left, f"  {right}"]


def screen_width() -> int:
    """Columns that there are for a text, at least `LEAST_WIDTH`."""
    return max(LEAST_WIDTH, shutil.get_terminal_size().columns)


def shown_subjects(names: Sequence[str]) -> list[str]:
    """Names of subjects for a table: of a path its file, and as many folders as tell it from the
    others. "twin:.../x.toml" cannot be given to a command; the name itself can."""
    parts = [name.split("/") for name in names]
    shown = []
    for name, own in zip(names, parts, strict=True):
        kept = 1
        while any(other != own and other[-kept:] == own[-kept:] for other in parts):
            kept += 1
        short = f"{name.partition(':')[0]}:.../{'/'.join(own[-kept:])}"
        shown.append(short if len(own) > kept and len(short) < len(name) else name)
    return shown


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)
) -> list[str]:
    """Lines of a table: the columns in `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if position in left else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
