"""Memory in which each buffer is an allocation of its own, over a driver on the host."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from ci.tests.harness.fake_driver import FakeDriver

from pagefuzz.harness.memory.arena import BACKGROUND, SMALL_BYTES, DoesNotFitError
from pagefuzz.harness.memory.plain import MOST_RUNS, PlainArena
from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.contents import initial_bytes
from pagefuzz.oracles.expectation import Expectation, Footprint
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Image, Plan, PlannedBuffer, Role
from pagefuzz.oracles.verdict import CaseClass


def buffer(
    name: str, role: Role, size_bytes: int, extent: int | None = None, **place: Any
) -> PlannedBuffer:
    told = size_bytes if extent is None else extent
    return PlannedBuffer(
        name, role, size_bytes, told, 1, 1, Placement(**place), False, Image.empty()
    )


def plan_of(*buffers: PlannedBuffer) -> Plan:
    return Plan(Case("test", {}, seed=4), {}, {b.name: b for b in buffers})


def expectation_of(**footprints: Footprint) -> Expectation:
    return Expectation(CaseClass.IN_CONTRACT, footprints=footprints)


def end_of_allocation(driver: FakeDriver, address: int) -> int:
    """Of the one that holds the byte before it."""
    return next(
        start + len(memory)
        for start, memory in driver.allocations.items()
        if start < address <= start + len(memory)
    )


@pytest.fixture
def driver():
    made = FakeDriver()
    yield made
    made.close()


@pytest.mark.parametrize("size_bytes", [1, 100, SMALL_BYTES + 7])
@pytest.mark.parametrize("offset_bytes", [0, 8, 255])
def test_an_allocation_ends_with_its_buffer(driver, size_bytes, offset_bytes):
    """No byte more than is needed; the base has its misalignment; contents are the oracle's."""
    readable = IntervalSet([0], [size_bytes])
    src = buffer("src", Role.SOURCE, size_bytes, offset_bytes=offset_bytes, guard="none")
    arena = PlainArena(driver)
    address = arena.place(plan_of(src), expectation_of(src=Footprint(may_read=readable)))["src"]
    arena.fill(0)
    assert address % 256 == offset_bytes
    assert end_of_allocation(driver, address + size_bytes) == address + size_bytes
    want = initial_bytes(src, readable, 4, 0, 0, size_bytes)
    assert ctypes.string_at(address, size_bytes) == want.tobytes()


def test_a_workspace_is_not_allocated(driver):
    """Nothing behind what the launcher is told belongs to the buffer."""
    src = buffer("src", Role.SOURCE, 200, extent=120, guard="none")
    address = PlainArena(driver).place(plan_of(src), expectation_of())["src"]
    assert end_of_allocation(driver, address + 120) == address + 120


def test_an_empty_buffer_lies_behind_an_allocation(driver):
    """It has an address, and no byte there is anybody's."""
    empty = buffer("src", Role.SOURCE, 0, guard="none", offset_bytes=4)
    address = PlainArena(driver).place(plan_of(empty), expectation_of())["src"]
    assert address % 256 == 4
    assert not any(start <= address < start + 256 for start in driver.allocations)


def test_only_readable_bytes_are_written(driver):
    """The rest stays as it was allocated; counters are read by what adds to them."""
    src = buffer("src", Role.SOURCE, 64, guard="none")
    counts = buffer("counts", Role.COUNTERS, 8, guard="none")
    arena = PlainArena(driver, readable_only=True)
    footprints = {
        "src": Footprint(may_read=IntervalSet([8], [24])),
        "counts": Footprint(may_write=IntervalSet([0], [8])),
    }
    addresses = arena.place(plan_of(src, counts), expectation_of(**footprints))
    arena.fill(0)
    held = ctypes.string_at(addresses["src"], 64)
    assert held[:8] == bytes(8)
    assert held[24:] == bytes(40)
    assert held[8:24] != bytes(16)
    assert ctypes.string_at(addresses["counts"], 8) != bytes(8)


def test_far_from_what_is_legal_a_large_buffer_holds_poison(driver):
    """Other bytes in each fill, none of them zero, as in memory with guards."""
    dst = buffer("dst", Role.DESTINATION, 4 * SMALL_BYTES, guard="none")
    arena = PlainArena(driver)
    address = arena.place(plan_of(dst), expectation_of())["dst"]
    for fill in (0, 1):
        arena.fill(fill)
        held = set(ctypes.string_at(address + 2 * SMALL_BYTES, SMALL_BYTES))
        assert held == {BACKGROUND[fill]}


def test_too_many_pieces_are_not_run(driver):
    """Rather than written in another way, which would show less."""
    begins = [2 * n for n in range(MOST_RUNS + 1)]
    runs = IntervalSet(begins, [n + 1 for n in begins])
    src = buffer("src", Role.SOURCE, 2 * MOST_RUNS + 2, guard="none")
    arena = PlainArena(driver, readable_only=True)
    arena.place(plan_of(src), expectation_of(src=Footprint(may_read=runs)))
    with pytest.raises(DoesNotFitError, match=r"src may be read in 4,097 pieces"):
        arena.fill(0)


def test_the_previous_case_is_given_back(driver):
    """One case at a time; `close` leaves nothing."""
    arena = PlainArena(driver)
    for _ in range(3):
        arena.place(plan_of(buffer("src", Role.SOURCE, 64)), expectation_of())
    assert len(driver.allocations) == 1
    assert (
        arena.allocated_bytes == arena.address_bytes == sum(map(len, driver.allocations.values()))
    )
    assert arena.allocated_bytes >= 64
    arena.close()
    assert driver.allocations == {}
    assert arena.allocated_bytes == 0


def test_what_does_not_fit_says_which_buffer(driver):
    """The case is not run then."""
    huge = buffer("dst", Role.DESTINATION, 2**40)
    with pytest.raises(DoesNotFitError, match="dst: no "):
        PlainArena(driver).place(plan_of(huge), expectation_of())
