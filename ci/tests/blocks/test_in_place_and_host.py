"""Buffers that are read and written in place, and buffers that the launcher itself reads."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from ci.tests.harness.fake_driver import FakeDriver, can_read, can_write
from ci.tests.harness.test_device_memory import changed_offsets, plan_of
from ci.tests.oracles.conftest import Bench

from pagefuzz.harness.memory.arena import SMALL_BYTES, is_written
from pagefuzz.harness.memory.cuda import CudaArena
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.harness.memory.windows import Windows
from pagefuzz.oracles import contents
from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.expectation import Expectation, Footprint
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.judging import judge
from pagefuzz.oracles.layout import Image, PlannedBuffer, Role
from pagefuzz.oracles.observation import AccessFault, CheckRecord, Site
from pagefuzz.oracles.registry import operations
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.reported import examples_for

READABLE = IntervalSet([16], [48])
WRITABLE = IntervalSet([32], [80])
TOUCHED = Expectation(
    CaseClass.IN_CONTRACT, footprints={"cache": Footprint(READABLE, must_write=WRITABLE)}
)


def in_place(size_bytes: int = 96) -> PlannedBuffer:
    place = Placement()
    return PlannedBuffer(
        "cache", Role.IN_PLACE, size_bytes, size_bytes, 1, 1, place, False, Image.empty()
    )


def on_host(size_bytes: int = 48, **placement: int) -> PlannedBuffer:
    place, image = Placement(**placement), Image.empty()
    return PlannedBuffer(
        "pairs", Role.INDEX, size_bytes, size_bytes, 6, 2, place, False, image, host=True
    )


def test_payload_where_it_is_read_and_a_destination_elsewhere() -> None:
    """Readable bytes are the payload in both fills, all others complements."""
    first, second = (
        contents.initial_bytes(in_place(), READABLE, 5, fill, -8, 104) for fill in contents.FILLS
    )
    mask = READABLE.mask(-8, 104)
    assert np.array_equal(first[mask], contents.payload(5, 16, 48))
    assert np.array_equal(second[mask], first[mask])
    assert np.array_equal(second[~mask], ~first[~mask])


def test_all_windows_of_a_large_one_are_reported() -> None:
    """What it held is more than a function of the fill: judgements need its bytes."""
    assert is_written(in_place())
    source = replace(in_place(2**22), role=Role.SOURCE)
    for buffer, chunks in ((in_place(2**22), 2), (source, 0)):
        windows = Windows(buffer, TOUCHED, begin=-4096, end=2**22 + 4096, granularity=4096)
        windows.fill(5, 1)
        found = windows.changed(windows.before.copy())
        assert len(found) == chunks


def far_cycle() -> Case:
    """The reported cycle with 2^22 bytes between pages: a large buffer."""
    case = examples_for("copy_blocks")["34-cycle"]
    return case.with_sizes(page_stride_bytes=2**22)


def test_a_large_cache_that_is_not_written_is_seen() -> None:
    """Its old bytes are payload, not poison, and must not pass for what was to be written."""
    bench = Bench(far_cycle())
    arena = HostArena()
    arena.place(bench.plan, bench.expectation)
    run = bench.run()
    launches = []
    for fill, launch in zip(contents.FILLS, run.observation.launches, strict=True):
        arena.fill(fill)
        launches.append(replace(launch, chunks=arena.collect().chunks))
    arena.close()
    verdict = judge(replace(run, observation=replace(run.observation, launches=tuple(launches))))
    (failure,) = verdict.failures
    assert failure.title == "a row of cache is not written"
    assert failure.details["effect"].startswith("2 of 2 rows wrong")


def test_judgements_of_a_cache_that_is_written_in_place() -> None:
    """Silent on what is right; a byte between pages, of a source, a wrong page: each is seen."""
    case = examples_for("copy_blocks")["34-cycle"]
    case = replace(
        case.with_sizes(num_pages=4, page_stride_bytes=20, layer_stride_bytes=80),
        values={**case.values, "pairs": Values.literal(0, 2, 2, 1)},
    )
    bench = Bench(case)
    assert judge(bench.run()).clean
    for at, judgement in ((18, "untouched"), (3, "untouched"), (70, "untouched"), (41, "output")):
        verdict = judge(bench.run(lambda m, at=at: m["cache"].put(at, b"\x00\x01")))  # type: ignore[misc]
        assert judgement in {failure.judgement for failure in verdict.failures}, at
    stale = judge(bench.run(lambda m: m["cache"].put(20, m["cache"].get(40, 16))))
    (failure,) = stale.failures
    assert failure.title == "a row of cache holds another entry"
    assert "it holds cache page 0, layer 0, byte 0" in failure.details["means"]


def test_a_forbidden_read_is_named_by_page() -> None:
    """bounds says which page, and that no pair copies it."""
    case = examples_for("copy_blocks")["34-cycle"]
    site = Site("copy_blocks.cu", 1, (0, 0, 0), (0, 0, 0))
    fault = AccessFault(1, "cache", 0, 16, "read", site)
    record = CheckRecord(1, 16, 1, 1, 0, (fault,))
    verdict = judge(Bench(case).run(record=record, build="checked"))
    assert verdict.failures[0].judgement == "bounds"
    assert "page 0, layer 0, byte 0" in verdict.failures[0].details["access"]
    assert verdict.failures[0].details["means"] == "no pair copies page 0"


# ---- host memory ---------------------------------------------------------------------------------


def test_only_the_pairs_of_page_copies_are_host_memory() -> None:
    """Everything else lies where kernels can read it."""
    found = {(o.name, role.name) for o in operations().values() for role in o.buffers if role.host}
    assert found == {("copy_blocks", "pairs"), ("swap_blocks", "pairs")}


@pytest.mark.parametrize("size_bytes", [48, 2 * SMALL_BYTES])
def test_a_host_buffer_never_reaches_the_device(size_bytes: int) -> None:
    """It lies in host memory, guarded and read-only like anything that is not written."""
    driver = FakeDriver()
    arena = CudaArena(driver, driver.scan)  # type: ignore[arg-type]
    arena.place(plan_of(in_place()), TOUCHED)
    on_the_device = arena.allocated_bytes
    pairs = on_host(size_bytes)
    address = arena.place(plan_of(pairs, in_place()), TOUCHED)["pairs"]
    assert arena.allocated_bytes == on_the_device
    assert address % 256 == pairs.base_offset_bytes
    for fill in contents.FILLS:
        arena.fill(fill)
        want = contents.initial_bytes(pairs, IntervalSet(), 4, fill, size_bytes - 48, size_bytes)
        assert ctypes.string_at(address + size_bytes - 48, 48) == want.tobytes()
        assert not can_read(address + size_bytes)
        assert not can_write(address)
        assert changed_offsets(arena) == {}


def test_a_host_buffer_may_lie_over_one_of_the_device() -> None:
    """In a case that must be refused for that: nobody reads it, the launcher compares addresses."""
    driver = FakeDriver()
    arena = CudaArena(driver, driver.scan)  # type: ignore[arg-type]
    pairs = replace(on_host(16), placement=Placement(over=("cache", 8)))
    addresses = arena.place(plan_of(pairs, in_place()), TOUCHED)
    assert addresses["pairs"] == addresses["cache"] + 8
