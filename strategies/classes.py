"""What every operation's `cases` begins with: which class a case is of, and the limit on memory."""

from __future__ import annotations

from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.gathers import LEAST_LIMIT_BYTES

#: Weight of each class.
CLASSES = {"in contract": 60, "hostile": 25, "refused": 15}


def classes(*, hostile: bool, refused: bool) -> SearchStrategy[str]:
    """A class by its weight, those two only where they are asked for; 1 draw. Shrinks towards "in
    contract"."""
    return _CLASSES[hostile, refused]


_CLASSES = {
    (hostile, refused): weighted(
        {
            name: weight
            for name, weight in CLASSES.items()
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
