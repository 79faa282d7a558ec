"""What a Triton source says of its launchers, read without importing it.

A launcher is a function named `pf_<operation>_<schedule>`. Its docstring holds the lines that a C
launcher's comment holds; its parameters are the fields of a C args struct: `name: Array` for each
buffer, `name: int` for each size, then `stream: int`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pagefuzz.harness.errors import CannotCheckError


@dataclass(frozen=True)
class Launcher:
    """comment: its docstring; parameters: (name, annotation) in order."""

    symbol: str
    comment: str
    parameters: tuple[tuple[str, str], ...]


@cache
def launchers(source: Path) -> tuple[Launcher, ...]:
    """Every launcher of a source, in order.

    Raises `CannotCheckError` if it cannot be read, is no Python or declares none.
    """
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotCheckError(f"{source}: cannot read the kernel: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise CannotCheckError(f"{source}: the kernel is not Python: {error}") from None
    found = tuple(
        Launcher(
            node.name,
            ast.get_docstring(node) or "",
            tuple(
                (one.arg, ast.unparse(one.annotation) if one.annotation else "")
                for one in node.args.args
            ),
        )
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("pf_")
    )
    if not found:
        raise CannotCheckError(f"{source}: it declares no launcher, a function pf_...")
    return found
