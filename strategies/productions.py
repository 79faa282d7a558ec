"""Productions: shapes that are in use, drawn together.

A kernel often has a path of its own for them. Drawn one by one, page size, entry and types hardly
ever meet in such a shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from hypothesis import event
from hypothesis.strategies import SearchStrategy

from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.gathers import GatherChoices

T = TypeVar("T")

#: One case in so many is of such a shape.
ONE_IN = 16


@dataclass(frozen=True)
class Production:
    """element_bytes: 0 where the operation draws it, or has no choice."""

    page_size_tokens: int
    entry_bytes: int
    element_bytes: int = 0

    def of(self, choices: GatherChoices) -> GatherChoices:
        """The choices with these sizes; whatever else was drawn stays."""
        event(f"production: {self.entry_bytes} bytes in pages of {self.page_size_tokens}")
        return replace(
            choices,
            page_size_tokens=self.page_size_tokens,
            entry_bytes=self.entry_bytes,
            element_bytes=self.element_bytes or choices.element_bytes,
            is_production=True,
        )


def productions(shapes: Mapping[T, int]) -> SearchStrategy[T | None]:
    """None, or in one case of `ONE_IN` one of `shapes` by its weight; 1 draw. Shrinks towards
    None."""
    weights: dict[T | None, int] = {None: (ONE_IN - 1) * sum(shapes.values())}
    for shape, weight in shapes.items():
        weights[shape] = weight
    return weighted(weights)
