"""Runs of a destination as a launch left them, cut out of an observation's chunks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles import contents
from pagefuzz.oracles.layout import Bytes
from pagefuzz.oracles.observation import Chunk, Launch


def before_and_after(
    launch: Launch, seed: int, buffer: str, offsets: npt.NDArray[np.int64], size_bytes: int
) -> tuple[Bytes, Bytes]:
    """uint8 [n, size_bytes] twice: the runs at `offsets` of a destination, before and after.

    Bytes in no chunk are unchanged; they are what the fill says.
    """
    if not offsets.size:
        nothing = np.empty((0, size_bytes), dtype=np.uint8)
        return nothing, nothing
    low, high = int(offsets.min()), int(offsets.max()) + size_bytes
    chunks = _within(launch.chunks.get(buffer, ()), low, high)
    for chunk in chunks:
        if chunk.offset_bytes <= low and high <= _end(chunk):
            at = offsets - chunk.offset_bytes
            return _windows(chunk.before, at, size_bytes), _windows(chunk.after, at, size_bytes)
    before = contents.destination_poison_at(seed, launch.fill, offsets, size_bytes).copy()
    after = before.copy()
    for chunk in chunks:
        first = np.searchsorted(offsets, chunk.offset_bytes - size_bytes, side="right")
        last = np.searchsorted(offsets, _end(chunk))
        for i in range(int(first), int(last)):
            begin = max(int(offsets[i]), chunk.offset_bytes)
            end = min(int(offsets[i]) + size_bytes, _end(chunk))
            here = slice(begin - int(offsets[i]), end - int(offsets[i]))
            there = slice(begin - chunk.offset_bytes, end - chunk.offset_bytes)
            before[i, here] = chunk.before[there]
            after[i, here] = chunk.after[there]
    return before, after


def _within(chunks: Sequence[Chunk], low: int, high: int) -> Sequence[Chunk]:
    """Those that may hold a byte of [low, high). Runs are asked for one by one, and a sparse buffer
    has thousands of chunks: nothing here may look at all of them."""
    first = bisect_right(chunks, low, key=_end)
    return chunks[first : bisect_left(chunks, high, lo=first, key=lambda one: one.offset_bytes)]


def _end(chunk: Chunk) -> int:
    return chunk.offset_bytes + chunk.before.size


def _windows(data: Bytes, at: npt.NDArray[np.int64], size_bytes: int) -> Bytes:
    """uint8 [n, size_bytes]: data[at[i] : at[i] + size_bytes]."""
    view = np.lib.stride_tricks.sliding_window_view(data, size_bytes)
    windows: Bytes = view[at]
    return windows
