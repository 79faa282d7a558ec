"""What judgements share: runs cut out of chunks, and the text of a death."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.judging import judge
from pagefuzz.oracles.observation import Chunk, Death, DeathAccess
from pagefuzz.oracles.runs import before_and_after

MakeBench = Callable[[Case], Any]


class Counted(tuple[Chunk, ...]):
    """Chunks that count how many of them were looked at."""

    looked = 0

    def __getitem__(self, which: Any) -> Any:
        found = super().__getitem__(which)
        Counted.looked += len(found) if isinstance(which, slice) else 1
        return found

    def __iter__(self) -> Any:
        raise AssertionError("all chunks were looked at")


def test_a_run_is_cut_out_of_the_chunks_near_it(base_case: Case, bench: MakeBench) -> None:
    """Of a sparse buffer's thousands: runs are asked for one by one."""
    (launch, *_) = bench(base_case).run().observation.launches
    held = np.arange(64, dtype=np.uint8)
    chunks = Counted(Chunk(nth * 2**24, held, held + 1) for nth in range(4096))
    large = replace(launch, chunks={"dst": chunks})
    for nth in (0, 1, 2048, 4095):
        begin = np.array([nth * 2**24 + 60], dtype=np.int64)
        before, after = before_and_after(large, base_case.seed, "dst", begin, 8)
        assert before[0, :4].tolist() == [60, 61, 62, 63]
        assert after[0, :4].tolist() == [61, 62, 63, 64]
        assert (before[0, 4:] == after[0, 4:]).all()
    assert 4 < Counted.looked < 4 * 40


@pytest.mark.parametrize(
    ("is_write", "verb"), [(True, "writes"), (False, "reads"), (None, "accesses")]
)
def test_a_death_beside_a_buffer_is_a_line(
    base_case: Case, bench: MakeBench, is_write: bool | None, verb: str
) -> None:
    """What the contract says of a byte is told where it says something: not in workspace."""
    wide = replace(base_case, placements={"src": Placement(after_bytes=2**16)})
    size = bench(base_case).plan.buffers["src"].memory_bytes
    for at, means in ((0, True), (size + 2**15, False), (-1, False)):
        access = DeathAccess("src", at, size + 2**16, is_write, "x.cu:1")
        run = bench(wide).run(death=Death("SIGSEGV", access=access))
        (failure,) = judge(run).failures
        assert failure.details["access"].startswith(f"{verb} src at byte {at} of ")
        assert ("means" in failure.details) is means
