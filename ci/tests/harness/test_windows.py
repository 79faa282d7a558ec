"""Windows of large regions, and the pools of small ones: compared in little memory, moved whole,
and given back where they cannot be had."""

from __future__ import annotations

import ctypes
import mmap
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ci.tests.harness.test_host_memory import buffer, changed_offsets, expectation_of, plan_of

from pagefuzz.harness.memory import windows
from pagefuzz.harness.memory.arena import GUARD_BYTES, SMALL_BYTES, DoesNotFitError
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.harness.memory.windows import Windows
from pagefuzz.oracles.contents import initial_bytes
from pagefuzz.oracles.expectation import Footprint
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Role

MEBIBYTE = 2**20


def windows_of(size_bytes: int, touched: IntervalSet, role: Role = Role.DESTINATION) -> Windows:
    """In pages, with one more at either end; filled."""
    expectation = expectation_of(dst=Footprint(must_write=touched))
    made = Windows(
        buffer("dst", role, size_bytes),
        expectation,
        begin=-4096,
        end=size_bytes + 4096,
        granularity=4096,
    )
    made.fill(1, 0)
    return made


def test_a_destination_written_throughout_is_compared_in_little_memory() -> None:
    """Less than a quarter of it more, where an index of each changed byte takes eight times it."""
    size_bytes = 16 * MEBIBYTE
    made = windows_of(size_bytes, IntervalSet([0], [size_bytes]))
    after = ~made.before
    tracemalloc.start()
    try:
        (chunk,) = made.changed(after)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert chunk.after.size == size_bytes + 2 * 4096
    assert most < size_bytes / 4


@pytest.mark.parametrize("piece_bytes", [4096, 5000, 3 * 4096 + 1, MEBIBYTE])
def test_windows_that_differ_are_found(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Each by any byte, its first and last ones too, wherever the pieces that are compared begin;
    the others are not, and none is where nothing differs."""
    monkeypatch.setattr(windows, "_PIECE_BYTES", piece_bytes)
    places = np.arange(5) * 2**17
    made = windows_of(2**20, IntervalSet(places, places + np.array([9, 5000, 1, 20_000, 4096])))
    begins = [begin for begin, _ in made.slices(made.before)]
    assert len(begins) == 6
    assert made.changed(made.before.copy()) == []
    for nth, (begin, data) in enumerate(made.slices(made.before)):
        for at in (0, data.size // 2, data.size - 1):
            after = made.before.copy()
            for other in (nth, (nth + 2) % 6):
                list(made.slices(after))[other][1][at % 4096] ^= 1
            dict(made.slices(after))[begin][at] ^= 2
            found = [chunk.offset_bytes for chunk in made.changed(after)]
            assert found == sorted({begin, begins[(nth + 2) % 6]})


def test_a_window_is_moved_in_as_many_pieces_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One system call moves 2 GiB at most; here, some thousand bytes."""
    write, read = os.pwrite, os.preadv
    calls: list[int] = []

    def pwrite(file: int, data: Any, offset: int) -> int:
        calls.append(len(data))
        return write(file, data[:70_001], offset)

    def preadv(file: int, out: list[Any], offset: int) -> int:
        (one,) = out
        calls.append(len(one))
        return read(file, [one[:50_001]], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "preadv", preadv)
    size_bytes = 2 * SMALL_BYTES
    everything = IntervalSet([0], [size_bytes])
    src = buffer("src", Role.IN_PLACE, size_bytes)
    footprint = Footprint(may_read=everything, must_write=everything)
    arena = HostArena()
    address = arena.place(plan_of(src), expectation_of(src=footprint))["src"]
    arena.fill(1)
    want = initial_bytes(src, everything, 3, 1, 0, size_bytes)
    assert ctypes.string_at(address, size_bytes) == want.tobytes()
    assert changed_offsets(arena) == {"src": []}
    changed = [0, 50_000, 50_001, 70_001, size_bytes - 1]
    for at in changed:
        ctypes.memset(address + at, ctypes.string_at(address + at, 1)[0] ^ 1, 1)
    assert changed_offsets(arena) == {"src": changed}
    assert len(calls) > 10
    arena.close()


def address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * mmap.PAGESIZE


@pytest.mark.parametrize(
    ("module", "call"), [(os, "memfd_create"), (os, "ftruncate"), (mmap, "mmap")]
)
def test_a_pool_that_cannot_be_had_leaves_no_reservation(
    monkeypatch: pytest.MonkeyPatch, module: Any, call: str
) -> None:
    """Of 68 GiB; with files again, the next case finds its place."""
    arena = HostArena()
    plan = plan_of(buffer("src", Role.SOURCE, 64))
    before = address_space_bytes()

    def refuse(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as without:
        without.setattr(module, call, refuse)
        for _ in range(3):
            with pytest.raises(DoesNotFitError, match=r"no memory for a pool.*Too many open files"):
                arena.place(plan, expectation_of())
    assert address_space_bytes() - before < GUARD_BYTES
    assert arena.address_bytes == 0
    assert arena.place(plan, expectation_of())["src"]
    arena.close()
