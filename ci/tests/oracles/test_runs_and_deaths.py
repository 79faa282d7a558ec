"""What judgements share: runs cut out of chunks, and the text of a death."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.judgements.death import access_text
from pagefuzz.oracles.judgements.hang import HANG
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
    ("at", "page"),
    [
        (-73, "nobody may touch"),
        (-72, "mapped read-only"),
        (-8, "mapped read-only"),
        (8, "mapped read-only"),
        (4095 - 72, "mapped read-only"),
        (4096 - 72, "nobody may touch"),
    ],
)
def test_the_workspace_and_the_red_zone_of_a_source_are_read_only_too(at: int, page: str) -> None:
    """What its region holds is mapped as the buffer is; what lies beyond may nobody touch."""
    access = DeathAccess("src", at, 64, True, "", mapped=(-72, 4096 - 72))
    assert access_text("SIGSEGV", access).endswith(page)


def test_a_death_says_in_which_launch(base_case: Case, bench: MakeBench) -> None:
    """And nothing in the words of the case's own plan of a launch of another one."""
    access = DeathAccess("src", 0, 64, False, "x.cu:1")
    died = Death("SIGSEGV", access=access, launch="a launch for widening: x", is_own=False)
    for death in (died, replace(died, access=None)):
        (failure,) = judge(bench(base_case).run(death=death)).failures
        assert failure.details["launch"] == "a launch for widening: x"
        assert ("means" in failure.details) is (death.access is None)
    (failure,) = judge(bench(base_case).run(death=Death("SIGSEGV", access=access))).failures
    assert "launch" not in failure.details
    assert "means" in failure.details
    hang = Death(HANG, launch="the second launch")
    (failure,) = judge(bench(base_case).run(death=hang)).failures
    assert failure.details["means"] == "the second launch did not end"


def test_an_address_that_is_not_known_is_not_told(base_case: Case, bench: MakeBench) -> None:
    """Neither as 0 nor as a read, which it need not be."""
    death = Death("SIGSEGV", access=DeathAccess("", None, 0, None, "x.cu:1"))
    (failure,) = judge(bench(base_case).run(death=death)).failures
    assert "0x" not in failure.details["access"]
    assert "read" not in failure.details["access"]
    assert "does not tell" in failure.details["access"]
    assert failure.details["where"] == "x.cu:1"


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
