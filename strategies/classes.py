"""What every operation's `cases` begins with: which class a case is of, and the limit on memory."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.gathers import LEAST_LIMIT_BYTES


def class_strategies(
    weights: Mapping[str, int],
) -> Mapping[tuple[bool, bool], SearchStrategy[str]]:
    """(hostile, refused) -> a class by its weight, those two only where they are asked for."""
    return {
        (hostile, refused): weighted(
            {
                name: weight
                for name, weight in weights.items()
                if (hostile or name != "hostile") and (refused or name != "refused")
            }
        )
        for hostile in (False, True)
        for refused in (False, True)
    }


def check_limit(limit_bytes: int) -> None:
    """Raises `InvalidArgument` for a limit on a case's memory below 64 MiB."""
    if limit_bytes < LEAST_LIMIT_BYTES:
        raise InvalidArgument(
            f"limit_bytes={limit_bytes!r} must be at least {LEAST_LIMIT_BYTES} (64 MiB)"
        )
