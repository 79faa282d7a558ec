"""The parts of a large region that are filled and compared.

A large buffer is gigabytes of address space of which a case touches a few thousand places. Around
each lies a window; a window holds the oracle's contents in blocks near the footprint and the
background in the rest. All windows of a region are handled as one array: a
case with thousands of them must not cost thousands of Python calls for each thing done to them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pagefuzz.harness.memory.arena import BACKGROUND, RED_ZONE_BYTES, DoesNotFitError
from pagefuzz.oracles.case import BASE_ALIGNMENT_BYTES
from pagefuzz.oracles.contents import initial_blocks
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, PlannedBuffer, Role
from pagefuzz.oracles.observation import Chunk

_BLOCK_BYTES = BASE_ALIGNMENT_BYTES

#: Most bytes of windows in one region, whatever memory the machine has: enough for the benchmark
#: scenario whose offsets wrap (1.16 M rows of 2304 bytes).
LIMIT_BYTES = 4 * 2**30

#: Of the machine's free memory, the part that the windows of one region may take: what they hold
#: exists several times while it is compared.
_SHARE_OF_MEMORY = 1 / 8

#: Compared at once.
_PIECE_BYTES = 2**20


def limit_bytes() -> int:
    """Most bytes of windows in one region. Beyond, a case is not run."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(LIMIT_BYTES, int(free * _SHARE_OF_MEMORY))


class Windows:
    """The windows of one region; all offsets are from the buffer's base, in bytes.

    spans   where they lie: multiples of the granularity from the start of the region
    holes   the rest of the region: no byte of it is legal
    before  uint8, their contents one after another, as `fill` made them
    """

    def __init__(
        self,
        buffer: PlannedBuffer,
        expectation: Expectation,
        *,
        begin: int,
        end: int,
        granularity: int,
    ) -> None:
        """Windows of the region [begin, end) around the footprint and around both ends of the
        buffer and of its workspace.

        granularity  a multiple of 256. Raises `DoesNotFitError` if they are too many bytes.
        """
        self._buffer = buffer
        footprint = expectation.footprint(buffer.name)
        self._readable = footprint.may_read
        touched = footprint.may_read.union(footprint.changeable)
        # An edge is an empty interval, which no IntervalSet keeps: widened as plain arrays.
        edges = [-buffer.placement.before_bytes, 0, buffer.memory_bytes]
        low = np.append(touched.begin, edges) - RED_ZONE_BYTES
        high = np.append(touched.end, edges) + RED_ZONE_BYTES

        def rounded(unit: int) -> IntervalSet:
            first = np.clip(low, begin, end) - begin
            last = np.clip(high, begin, end) - begin
            return IntervalSet(
                first - first % unit + begin, np.minimum(last + -last % unit + begin, end)
            )

        self.spans = rounded(granularity)
        self.holes = IntervalSet([begin], [end]).without(self.spans)
        if self.spans.total_bytes > (limit := limit_bytes()):
            raise DoesNotFitError(
                f"{buffer.name} has {self.spans.total_bytes:,} bytes to fill and compare, "
                f"more than the {limit:,} that this machine has to spare"
            )
        sizes = self.spans.end - self.spans.begin
        self._starts = np.cumsum(sizes) - sizes  # of each window in `before`
        blocks = rounded(_BLOCK_BYTES)
        counts = (blocks.end - blocks.begin) // _BLOCK_BYTES
        nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        self._blocks = np.repeat(blocks.begin, counts) + nth * _BLOCK_BYTES
        window = np.searchsorted(self.spans.begin, self._blocks, side="right") - 1
        in_before = self._starts[window] + self._blocks - self.spans.begin[window]
        self._block_indices = in_before // _BLOCK_BYTES
        self.before: Bytes = np.empty(0, np.uint8)

    def fill(self, seed: int, fill: int) -> None:
        """Makes `before` anew; chunks of the last launch keep theirs."""
        self.before = np.full(self.spans.total_bytes, BACKGROUND[fill], np.uint8)
        self.before.reshape(-1, _BLOCK_BYTES)[self._block_indices] = initial_blocks(
            self._buffer, self._readable, seed, fill, self._blocks, _BLOCK_BYTES
        )

    def slices(self, data: Bytes) -> Iterator[tuple[int, Bytes]]:
        """(begin, view) of each window in an array laid out like `before`."""
        stops = (self._starts + self.spans.end - self.spans.begin).tolist()
        starts, begins = self._starts.tolist(), self.spans.begin.tolist()
        for begin, start, stop in zip(begins, starts, stops, strict=True):
            yield begin, data[start:stop]

    def changed(self, after: Bytes) -> list[Chunk]:
        """The windows in which `after` differs from `before`; all of a buffer that is written in
        place: what it held is more than a function of the fill."""
        if self._buffer.role is Role.IN_PLACE:
            windows = np.arange(self._starts.size)
        else:
            windows = self._different(after)
        chunks = []
        for window in windows.tolist():
            begin, end = int(self.spans.begin[window]), int(self.spans.end[window])
            start = int(self._starts[window])
            part = slice(start, start + end - begin)
            chunks.append(Chunk(begin, self.before[part], after[part]))
        return chunks

    def _different(self, after: Bytes) -> npt.NDArray[np.int64]:
        """int64 [n]: indices of the windows in which `after` differs. Compared piece by piece: a
        destination may be written throughout, and nothing here may be as large again."""
        found = np.zeros(self._starts.size, np.bool_)
        for begin in range(0, self.before.size, _PIECE_BYTES):
            end = min(begin + _PIECE_BYTES, self.before.size)
            different = self.before[begin:end] != after[begin:end]
            first = int(np.searchsorted(self._starts, begin, side="right")) - 1
            last = int(np.searchsorted(self._starts, end))
            starts = np.maximum(self._starts[first:last] - begin, 0)
            found[first:last] |= np.logical_or.reduceat(different, starts)
        return np.flatnonzero(found)
