"""Single draws with uneven odds: the only place where probabilities are turned into choices.

All of it is `sampled_from`, one integer draw each, for a reason beside brevity: strategies over
different elements have different labels. Hypothesis spends five in six generated examples on
copying one draw over another of the same label, which between, say, a seed and a page size only
makes near-duplicates; with no label twice in a case it draws a new case each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

#: Hypothesis draws integers evenly up to here.
_EVEN_SLOTS = 256


def weighted(weights: Mapping[T, int]) -> SearchStrategy[T]:
    """One key of `weights`, with odds in proportion to its value (an integer >= 1).

    Shrinks towards the first key. Raises `InvalidArgument` for no keys or a weight below 1.
    """
    if not weights or min(weights.values()) < 1:
        raise InvalidArgument(f"weights={weights!r} must name something, each at least once")
    return st.sampled_from(tuple(key for key, weight in weights.items() for _ in range(weight)))


def skewed(*parts: tuple[int, Sequence[int]]) -> SearchStrategy[int]:
    """An integer: a part `(weight, values)` by its weight, then one of its values evenly.

    Of a part with more values than its share of 256 slots, evenly spaced ones are taken, the first
    among them: from there on Hypothesis would draw mostly small indices. Shrinks towards the first
    value of the first part, then along each part. Raises `InvalidArgument` for an empty part or a
    weight below 1.
    """
    if not parts or any(weight < 1 or not len(values) for weight, values in parts):
        raise InvalidArgument(f"parts={parts!r} must each have a weight >= 1 and a value")
    total = sum(weight for weight, _ in parts)
    slots: list[int] = []
    for weight, values in parts:
        count = max(1, _EVEN_SLOTS * weight // total)
        slots += [values[slot * len(values) // count] for slot in range(count)]
    return st.sampled_from(tuple(slots))
