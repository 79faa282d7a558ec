"""The checked form of an interpreted launch: each lane of each access against the footprint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagefuzz.harness.triton.private import Addresses, Mask
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import AccessFault, CheckRecord, Site

#: Kept, as a checked object keeps them: the first of each line and kind.
_MOST_FAULTS = 64


class _Permitted:
    """Runs of addresses that may be read, or written; of all buffers together."""

    def __init__(self, sets: Mapping[str, IntervalSet], addresses: Mapping[str, int]) -> None:
        runs = [
            np.stack((one.begin, one.end), axis=1) + addresses[name]
            for name, one in sets.items()
            if len(one)
        ]
        all_runs: npt.NDArray[np.int64] = np.concatenate(runs or [np.empty((0, 2), np.int64)])
        all_runs = all_runs[np.argsort(all_runs[:, 0])]
        self._begin, self._end = (all_runs[:, i].astype(np.uint64) for i in (0, 1))

    def holds(self, at: Addresses, size_bytes: int) -> Mask:
        """Whether all bytes of each access lie in one run."""
        run = np.searchsorted(self._begin, at, side="right") - 1
        if not self._begin.size:
            return np.zeros(at.size, dtype=np.bool_)
        left = self._end[np.maximum(run, 0)] - at  # wraps where `at` is past the run
        inside: Mask = (run >= 0) & (at < self._end[np.maximum(run, 0)])
        return inside & (left >= np.uint64(size_bytes))


class FootprintWatcher:
    """Permissions of one launch, and the record of it.

    source     file whose lines are named, as it was loaded; `shown` is what it is called
    program    ids of the running program
    """

    def __init__(
        self,
        plan: Plan,
        expectation: Expectation,
        addresses: Mapping[str, int],
        source: Path,
        shown: str,
        program: Callable[[], tuple[int, int, int]],
    ) -> None:
        self._addresses = {name: addresses[name] for name in plan.buffers if addresses[name]}
        footprints = {name: expectation.footprint(name) for name in self._addresses}
        reads = {name: one.may_read for name, one in footprints.items()}
        writes = {name: one.writable for name, one in footprints.items()}
        self._read = _Permitted(reads, self._addresses)
        self._write = _Permitted(writes, self._addresses)
        self._source, self._shown, self._program = str(source), shown, program
        self._accesses = self._accessed_bytes = self._fault_count = 0
        self._faults: dict[tuple[str, int], AccessFault] = {}

    def see(self, kind: str, buffer: str | None, at: Addresses, size_bytes: int) -> Mask:
        permitted = self._read if kind == "read" else self._write
        good = permitted.holds(at, size_bytes)
        self._accesses += at.size
        self._accessed_bytes += at.size * size_bytes
        if not good.all():
            self._fault_count += int(good.size - np.count_nonzero(good))
            self._record(kind, buffer, int(at[int(np.argmin(good))]), size_bytes)
        return good

    def record(self) -> CheckRecord:
        return CheckRecord(
            accesses=self._accesses,
            accessed_bytes=self._accessed_bytes,
            operations=0,
            access_fault_count=self._fault_count,
            index_fault_count=0,
            access_faults=tuple(self._faults.values()),
        )

    def _record(self, kind: str, buffer: str | None, address: int, size_bytes: int) -> None:
        line = self._line()
        if (kind, line) in self._faults or len(self._faults) >= _MOST_FAULTS:
            return
        if buffer is None:
            buffer = min(self._addresses, key=lambda name: abs(self._addresses[name] - address))
        offset = address - self._addresses.get(buffer, 0)
        self._faults[kind, line] = AccessFault(
            sequence=self._fault_count,
            buffer=buffer,
            offset_bytes=offset if offset < 2**63 else offset - 2**64,
            size_bytes=size_bytes,
            kind=kind,
            site=Site(self._shown, line, self._program(), (0, 0, 0)),
        )

    def _line(self) -> int:
        """The line of the kernel that runs; 0 if it is not in this source."""
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == self._source:
                return frame.f_lineno
            if frame.f_back is None:
                break
            frame = frame.f_back
        return 0
