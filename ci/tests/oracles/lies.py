"""Lies about a case's layout, and what its operation's oracle refuses it for."""

from __future__ import annotations

from dataclasses import replace

from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.registry import operation


def reasons(case: Case) -> set[str]:
    found = operation(case.operation)
    return {refusal.reason for refusal in found.refusals(found.plan(case))}


def lie(case: Case, **overrides: int) -> Case:
    """Other arguments after the layout; a `__` stands for the dot."""
    return replace(case, overrides={k.replace("__", "."): v for k, v in overrides.items()})


def moved(case: Case, **placements: Placement) -> Case:
    return replace(case, placements={**case.placements, **placements})


def assert_extent_is_exact(case: Case, name: str) -> None:
    """An extent of what is required passes, one byte less is refused."""
    required = operation(case.operation).plan(case).buffers[name].required_bytes
    assert reasons(lie(case, **{f"{name}__extent_bytes": required})) == set()
    assert reasons(lie(case, **{f"{name}__extent_bytes": required - 1})) == {"extent"}
