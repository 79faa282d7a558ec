"""Single draws with uneven odds: the only place where probabilities are turned into integers.

Both strategies cost one integer draw, whatever they choose from, and shrink towards their first
alternative, so that callers write the simplest thing first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")


def weighted(weights: Mapping[T, int]) -> SearchStrategy[T]:
    """One key of `weights`, with odds in proportion to its value (an integer >= 1).

    Shrinks towards the first key. Raises `InvalidArgument` for no keys or a weight below 1.
    """
    if not weights or min(weights.values()) < 1:
        raise InvalidArgument(f"weights={weights!r} must name something, each at least once")
    return st.sampled_from([key for key, weight in weights.items() for _ in range(weight)])


def skewed(*parts: tuple[int, Sequence[int]]) -> SearchStrategy[int]:
    """An integer: a part `(weight, values)` by its weight, then one of its values evenly.

    Shrinks towards the first value of the first part, then along each part. Parts may overlap, so
    that small values stay likely while every value of a wide range stays possible. Raises
    `InvalidArgument` for an empty part or a weight below 1.
    """
    if not parts or any(weight < 1 or not len(values) for weight, values in parts):
        raise InvalidArgument(f"parts={parts!r} must each have a weight >= 1 and a value")
    # Enough slots that each value of each part has at least one.
    slots_per_weight = max(-(-len(values) // weight) for weight, values in parts)
    ends = list(accumulate(weight * slots_per_weight for weight, _ in parts))

    def value_at(slot: int) -> int:
        part = bisect_right(ends, slot)
        begin = ends[part - 1] if part else 0
        values = parts[part][1]
        return values[(slot - begin) * len(values) // (ends[part] - begin)]

    return st.integers(0, ends[-1] - 1).map(value_at)
