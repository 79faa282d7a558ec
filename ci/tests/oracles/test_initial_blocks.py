"""Contents of many blocks at once equal contents block by block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefuzz.oracles.case import Placement
from pagefuzz.oracles.contents import initial_blocks, initial_bytes
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Image, PlannedBuffer, Role


@pytest.mark.parametrize("role", list(Role))
@given(
    first=st.integers(-300, 2**41),
    gaps=st.lists(st.sampled_from([0, 0, 1, 256, 5000, 2**33]), min_size=0, max_size=6),
    size_bytes=st.sampled_from([1, 8, 100, 256]),
    fill=st.sampled_from([0, 1]),
    runs=st.lists(st.tuples(st.integers(-10, 2000), st.integers(1, 300)), max_size=4),
    elements=st.sets(st.integers(0, 200), max_size=6),
)
def test_blocks_hold_what_windows_hold(
    role: Role,
    first: int,
    gaps: list[int],
    size_bytes: int,
    fill: int,
    runs: list[tuple[int, int]],
    elements: set[int],
) -> None:
    """Whatever the role, the alignment, the readable runs and the image."""
    steps = np.array(gaps, dtype=np.int64) + size_bytes
    begins = first + np.concatenate(([0], np.cumsum(steps)))
    readable = IntervalSet([first + at for at, _ in runs], [first + at + n for at, n in runs])
    indices = np.array(sorted(elements), dtype=np.int64) + first // 4
    image = Image.of_elements(indices, np.arange(len(indices), dtype=np.int32))
    buffer = PlannedBuffer("b", role, 1, 1, 1, 1, Placement(), False, image)
    got = initial_blocks(buffer, readable, 7, fill, begins, size_bytes)
    assert got.shape == (len(begins), size_bytes)
    for row, begin in zip(got, begins.tolist(), strict=True):
        want = initial_bytes(buffer, readable, 7, fill, begin, begin + size_bytes)
        assert row.tobytes() == want.tobytes()


def test_no_blocks_hold_nothing() -> None:
    """An empty request is an empty answer."""
    buffer = PlannedBuffer("b", Role.SOURCE, 1, 1, 1, 1, Placement(), False, Image.empty())
    none = np.empty(0, np.int64)
    assert initial_blocks(buffer, IntervalSet([0], [9]), 0, 0, none, 8).shape == (0, 8)
