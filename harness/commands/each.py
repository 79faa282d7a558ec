"""One case on several subjects: what one of them shows is not lost to how another one ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from pagefuzz.harness.errors import CannotCheckError


def exit_code_of_each(runs: Mapping[str, Callable[[], int]]) -> int:
    """Makes every run and returns their exit code: 1 if one of them found something, else 2 if one
    could not be checked.

    runs  by name of what is checked; at least one

    Raises `CannotCheckError` if there is only one and it does, and `KeyboardInterrupt` before any
    has ended.
    """
    codes: list[int] = []
    try:
        for name, run in runs.items():
            try:
                codes.append(run())
            except CannotCheckError as error:  # the others may still fail
                if len(runs) == 1:
                    raise
                print(f"pagefuzz: {name}: {error}", file=sys.stderr, flush=True)
                codes.append(2)
    except KeyboardInterrupt:
        if not codes:
            raise
        print("pagefuzz: interrupted before every subject was checked", file=sys.stderr)
        codes.append(2)
    return 1 if 1 in codes else max(codes)
