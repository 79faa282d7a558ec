"""Which subjects a command is about."""

from __future__ import annotations

from collections.abc import Sequence

from pagefuzz.harness import subjects
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.subjects import Subject
from pagefuzz.oracles import registry


def operation_names(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Those that were asked for, else all. Raises `CannotCheckError` for an unknown one."""
    try:
        return tuple(
            dict.fromkeys(registry.operation(name).name for name in wanted or registry.operations())
        )
    except registry.UnknownNameError as error:
        raise CannotCheckError(str(error)) from None


def _of_every_operation(name: str) -> list[Subject]:
    """Raises `CannotCheckError` if no operation has a subject of that name."""
    return [s for s in subjects.subjects() if s.name == name] or [subjects.subject(name)]


def selected_subjects(
    operations: Sequence[str] | None, names: Sequence[str] | None
) -> tuple[Subject, ...]:
    """Every subject that a command was asked to check.

    operations  names; None: all, or all that have the subjects that were asked for
    names       None: every bundled subject that declares no faults

    Raises `CannotCheckError` for a name that is not there, and if nothing is left to check.
    """
    wanted = operation_names(operations)
    if names is None:
        chosen = [
            subject
            for subject in subjects.bundled().values()
            if subject.operation in wanted and not subject.faults
        ]
        without = [name for name in wanted if name not in {s.operation for s in chosen}]
        if without or not chosen:
            raise CannotCheckError(
                f"no bundled subject of {without[0] if without else 'any operation'} is free of "
                "declared faults; name one with --subject"
            )
        return tuple(chosen)
    if operations is None:
        return tuple(dict.fromkeys(s for name in names for s in _of_every_operation(name)))
    # Each operation must have a subject of each name: a leg that is left out is not a pass.
    return tuple(
        dict.fromkeys(subjects.subject(name, operation) for operation in wanted for name in names)
    )
