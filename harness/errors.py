"""Errors that end a command."""

from __future__ import annotations


class CannotCheckError(Exception):
    """Something that was asked for could not be checked: exit code 2, never a pass.

    The message is one clear sentence: what is wrong, and what would be right.
    """


class RuinedProcessError(CannotCheckError):
    """A case passed, and then the process died that had launched it: it was no pass."""


class MissingPackageError(CannotCheckError):
    """An optional package, or the version of it that is needed, is not installed."""
