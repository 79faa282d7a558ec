"""Contents of memory: the same from any window, different between fills, traceable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefuzz.oracles import contents
from pagefuzz.oracles.case import Placement
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Dtype, Image, PlannedBuffer, Role

seeds = st.integers(0, 2**64 - 1)
offsets = st.integers(-100, 100) | st.integers(2**41, 2**41 + 100)


def buffer(role: Role, image: Image | None = None) -> PlannedBuffer:
    return PlannedBuffer("b", role, 64, 64, Dtype.U8, 1, Placement(), False, image or Image.empty())


@given(seeds, offsets, st.integers(0, 40), st.integers(0, 40))
def test_windows_agree(seed: int, begin: int, skip: int, size: int) -> None:
    """A window's bytes do not depend on where the window begins."""
    whole = contents.payload(seed, begin, begin + skip + size)
    assert np.array_equal(whole[skip:], contents.payload(seed, begin + skip, begin + skip + size))


@given(seeds, st.lists(offsets, min_size=1, max_size=5), st.integers(1, 40))
def test_runs_agree_with_windows(seed: int, begins: list[int], size: int) -> None:
    """Payload at many offsets, aligned or not, is that of one window at each."""
    runs = contents.payload_at(seed, np.array(begins, dtype=np.int64), size)
    for begin, run in zip(begins, runs, strict=True):
        assert np.array_equal(run, contents.payload(seed, begin, begin + size))


@given(seeds, offsets)
def test_destination_fills_are_complements(seed: int, begin: int) -> None:
    """A byte nobody writes differs between the fills, workspace and red zones included."""
    first, second = (
        contents.initial_bytes(
            buffer(Role.DESTINATION), IntervalSet(), seed, fill, begin, begin + 50
        )
        for fill in contents.FILLS
    )
    assert np.array_equal(first, ~second)
    at = contents.destination_poison_at(seed, 1, np.array([begin + 3], dtype=np.int64), 9)
    assert np.array_equal(at[0], second[3:12])


@pytest.mark.parametrize("runs", [1, 2, 100])
def test_source_holds_payload_where_readable_only(runs: int) -> None:
    """Readable bytes are the same in both fills and equal the payload; others differ."""
    readable = IntervalSet.of_runs(np.arange(runs) * 40 - 8, 17)
    first, second = (
        contents.initial_bytes(buffer(Role.SOURCE), readable, 3, fill, 0, 4096)
        for fill in contents.FILLS
    )
    mask = readable.mask(0, 4096)
    assert np.array_equal(first[mask], contents.payload(3, 0, 4096)[mask])
    assert np.array_equal(first[mask], second[mask])
    assert np.count_nonzero(first[~mask] == second[~mask]) < 100  # 1 in 256 by chance
    assert np.count_nonzero(first[~mask] == contents.payload(3, 0, 4096)[~mask]) < 100


@pytest.mark.parametrize("fill", contents.FILLS)
def test_index_poison_is_illegal_at_any_size(fill: int) -> None:
    """No unused table entry can be a page, a token or the padding id, aligned from any window."""
    image = Image.of_elements([2], np.array([5], dtype=np.int32))
    raw = contents.initial_bytes(buffer(Role.INDEX, image), IntervalSet(), 0, fill, -4, 24)
    elements = raw.view(np.int32).tolist()
    assert elements[3] == 5
    for element in elements[:3] + elements[4:]:
        assert not 0 <= element < 2**31 - 1
        assert element != -1
    odd = contents.initial_bytes(buffer(Role.INDEX, image), IntervalSet(), 0, fill, 3, 14)
    assert np.array_equal(odd, raw[7:18])


@given(seeds, offsets, st.integers(15, 40))
def test_payload_is_traced_to_its_offset(seed: int, begin: int, size: int) -> None:
    """Fifteen bytes of payload say where they come from, at any alignment."""
    traced = contents.trace(seed, contents.payload(seed, begin, begin + size))
    assert traced == contents.Trace(Role.SOURCE, is_payload=True, offset_bytes=begin)


@pytest.mark.parametrize("role", [Role.SOURCE, Role.DESTINATION])
@pytest.mark.parametrize("fill", contents.FILLS)
def test_poison_is_traced_to_its_offset(role: Role, fill: int) -> None:
    """Poison of either fill is recognised as such."""
    traced = contents.trace(9, contents.poison(role, 9, fill, 1001, 1020))
    assert traced == contents.Trace(role, is_payload=False, offset_bytes=1001)


@given(st.binary(max_size=24))
def test_other_bytes_are_not_traced(raw: bytes) -> None:
    """Bytes of no stream have no origin."""
    assert contents.trace(0, np.frombuffer(raw, dtype=np.uint8)) is None


def test_seeds_differ_in_every_bit() -> None:
    """A case's seed counts in full: none of its 64 bits is dropped."""
    drawn = {contents.payload(1 << bit, 0, 8).tobytes() for bit in range(64)}
    assert len(drawn) == 64
