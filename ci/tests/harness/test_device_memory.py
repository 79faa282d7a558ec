"""Memory of the cuda backend, over a driver that keeps "device" memory on the host."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ci.tests.harness.fake_driver import FakeDriver, can_read, can_write

from pagefuzz.harness.memory.arena import (
    BACKGROUND,
    GUARD_BYTES,
    RED_ZONE_BYTES,
    SMALL_BYTES,
    DeviceFaultError,
    DoesNotFitError,
)
from pagefuzz.harness.memory.cuda import SCAN_CHUNK_BYTES, WHOLE_BYTES, CudaArena
from pagefuzz.harness.memory.device_memory import KEPT_BYTES
from pagefuzz.harness.memory.driver import GRANULE_BYTES
from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.contents import initial_bytes
from pagefuzz.oracles.expectation import Expectation, Footprint
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Image, Plan, PlannedBuffer, Role
from pagefuzz.oracles.verdict import CaseClass

LARGE = 5 * 2**20 + 3
SPARSE = 3 * 2**30 + 10
EVERY_SIZE = (100, 5000, SMALL_BYTES, SMALL_BYTES + 1, LARGE, SPARSE)


def buffer(name: str, role: Role, size_bytes: int, **placement: Any) -> PlannedBuffer:
    place = Placement(**placement)
    return PlannedBuffer(name, role, size_bytes, size_bytes, 1, 1, place, False, Image.empty())


def plan_of(*buffers: PlannedBuffer) -> Plan:
    return Plan(Case("test", {}, seed=4), {}, {b.name: b for b in buffers})


def expectation_of(**footprints: Footprint) -> Expectation:
    return Expectation(CaseClass.IN_CONTRACT, footprints=footprints)


def flip(address: int) -> None:
    ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ 1, 1)


def changed_offsets(arena: CudaArena) -> dict[str, list[int]]:
    """Buffers in which something changed, and where."""
    changed = {
        name: [
            chunk.offset_bytes + int(i)
            for chunk in chunks
            for i in np.flatnonzero(chunk.before != chunk.after)
        ]
        for name, chunks in arena.collect().chunks.items()
    }
    return {name: offsets for name, offsets in changed.items() if offsets}


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    made = FakeDriver()
    yield made
    made.close()


@pytest.fixture
def arena(driver: FakeDriver) -> CudaArena:
    return arena_on(driver)


def arena_on(driver: FakeDriver, limit_bytes: int | None = None) -> CudaArena:
    return CudaArena(driver, driver.scan, limit_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize("size_bytes", EVERY_SIZE)
@pytest.mark.parametrize("guard", ["end", "start", "none"])
@pytest.mark.parametrize("offset_bytes", [0, 1, 255])
def test_bases_and_contents_are_as_the_oracle_says(
    arena: CudaArena, size_bytes: int, guard: str, offset_bytes: int
) -> None:
    """A base has its misalignment, and its surroundings hold what `initial_bytes` says."""
    readable = IntervalSet([16, size_bytes - 9], [48, size_bytes])
    placement = {"offset_bytes": offset_bytes, "before_bytes": 10, "guard": guard}
    src = buffer("src", Role.SOURCE, size_bytes, **placement)
    address = arena.place(plan_of(src), expectation_of(src=Footprint(may_read=readable)))["src"]
    assert address % 256 == src.base_offset_bytes
    low = -10 - (0 if guard == "start" else 200)
    high = size_bytes + (0 if guard == "end" else 200)
    for fill in (0, 1):
        arena.fill(fill)
        for begin, end in ((low, 80), (size_bytes - 30, high)):
            want = initial_bytes(src, readable, 4, fill, begin, end)
            assert ctypes.string_at(address + begin, end - begin) == want.tobytes()
        assert changed_offsets(arena) == {}


@pytest.mark.parametrize("size_bytes", EVERY_SIZE)
@pytest.mark.parametrize("role", [Role.SOURCE, Role.DESTINATION])
def test_a_buffer_lies_against_its_guard(arena: CudaArena, size_bytes: int, role: Role) -> None:
    """One byte past the end, and in the mirror before the start, nothing can be read or written;
    nor a wrap away."""
    plan = plan_of(buffer("x", role, size_bytes, before_bytes=8))
    for launched, edge, beyond in ((plan, size_bytes - 1, 1), (plan.mirrored(), -8, -1)):
        address = arena.place(launched, expectation_of())["x"]
        arena.fill(0)
        assert can_read(address + edge)
        assert not can_read(address + edge + beyond)
        for distance in (2**31, -(2**31), 2**32, 2**35, -(2**35)):
            if size_bytes < abs(distance):
                assert abs(distance) < GUARD_BYTES + GRANULE_BYTES
                assert not can_read(address + distance)


@pytest.mark.parametrize("size_bytes", EVERY_SIZE)
def test_the_launch_can_write_only_what_it_may(arena: CudaArena, size_bytes: int) -> None:
    """Sources and indices are read-only for it; destinations and counters are not."""
    roles = {role.value: role for role in Role}
    plan = plan_of(*(buffer(name, role, size_bytes) for name, role in roles.items()))
    for launched in (plan, plan.mirrored()):
        addresses = arena.place(launched, expectation_of())
        arena.fill(0)
        for name, role in roles.items():
            for offset in (0, min(size_bytes // 2, GRANULE_BYTES // 2), size_bytes - 1):
                assert can_read(addresses[name] + offset)
                is_written = role.is_destination or role is Role.COUNTERS
                assert can_write(addresses[name] + offset) == is_written


@pytest.mark.parametrize(
    "offset",
    [-RED_ZONE_BYTES, -1, 0, 70, SCAN_CHUNK_BYTES * 3 + 5, LARGE - 1, LARGE + RED_ZONE_BYTES - 1],
)
def test_a_write_into_a_large_buffer_is_seen_where_it_fell(arena: CudaArena, offset: int) -> None:
    """One changed byte is reported at its offset, in windows and between them, in both launches."""
    plan = plan_of(
        buffer("a", Role.SOURCE, 9),
        buffer("dst", Role.DESTINATION, LARGE, offset_bytes=3, guard="none"),
    )
    footprint = Footprint(must_write=IntervalSet([0], [64]))
    address = arena.place(plan, expectation_of(dst=footprint))["dst"]
    for fill in (0, 1):
        arena.fill(fill)
        flip(address + offset)
        assert changed_offsets(arena) == {"dst": [offset]}


def test_writes_far_apart_are_all_seen(arena: CudaArena) -> None:
    """Strays in different chunks, and in a red zone of a small buffer, are all reported."""
    plan = plan_of(buffer("a", Role.COUNTERS, 8), buffer("dst", Role.DESTINATION, LARGE))
    addresses = arena.place(plan, expectation_of())
    arena.fill(0)
    for offset in (100_000, 2_000_000, 4_999_999):
        flip(addresses["dst"] + offset)
    flip(addresses["a"] - 3)
    assert changed_offsets(arena) == {"a": [-3], "dst": [100_000, 2_000_000, 4_999_999]}


@pytest.mark.parametrize(
    ("guard", "offsets"),
    [
        ("end", [-GRANULE_BYTES + 104, -100_000, -4100, -1]),
        ("start", [110, 4096, 1_000_000, GRANULE_BYTES - 1]),
        ("none", [-500_000, -5000, -1, 104, 6000, 700_000]),
    ],
)
def test_a_write_beside_a_small_region_is_seen_and_undone(
    arena: CudaArena, guard: str, offsets: list[int]
) -> None:
    """Anywhere in the granule of its buffer, and not again in the next launch."""
    plan = plan_of(
        buffer("a", Role.DESTINATION, 104, guard=guard),
        buffer("b", Role.DESTINATION, 104, guard=guard),
    )
    addresses = arena.place(plan, expectation_of())
    for fill in (0, 1, 0):
        arena.fill(fill)
        assert changed_offsets(arena) == {}
        arena.fill(fill)
        for offset in offsets:
            flip(addresses["a"] + offset)
        flip(addresses["b"] + offsets[0])
        assert changed_offsets(arena) == {"a": offsets, "b": offsets[:1]}


def test_a_smaller_region_leaves_nothing_of_a_larger_one(arena: CudaArena) -> None:
    """What the last case's region held is background again, at either end of the granule."""
    for size_bytes in (200_000, 100, 5000, SMALL_BYTES, 8):
        plan = plan_of(buffer("a", Role.DESTINATION, size_bytes))
        for launched in (plan, plan.mirrored()):
            arena.place(launched, expectation_of())
            arena.fill(0)
            assert changed_offsets(arena) == {}


def test_pools_that_a_case_does_not_use_are_not_judged(arena: CudaArena) -> None:
    """The second buffer's pool keeps what it held while cases have one buffer."""
    one, two = buffer("a", Role.DESTINATION, 8), buffer("b", Role.DESTINATION, 8)
    for buffers in ((one, two), (one,), (two,), (one, two)):
        arena.place(plan_of(*buffers), expectation_of())
        arena.fill(1)
        assert changed_offsets(arena) == {}


def test_a_small_destination_always_has_its_chunk(arena: CudaArena) -> None:
    """Judgements read what a destination holds even where nothing changed."""
    arena.place(plan_of(buffer("dst", Role.DESTINATION, 100)), expectation_of())
    arena.fill(0)
    collected = arena.collect()
    assert set(collected.chunks) == {"dst"}
    assert collected.examined_bytes == GRANULE_BYTES


@pytest.mark.parametrize("size_bytes", EVERY_SIZE)
def test_what_lies_around_a_buffer_is_counted(arena: CudaArena, size_bytes: int) -> None:
    """As on the host, which keeps the buffers that the launcher itself reads."""
    for guard in ("end", "start", "none"):
        one = buffer("a", Role.SOURCE, size_bytes, guard=guard)
        for plan in (plan_of(one), plan_of(replace(one, host=True))):
            arena.place(plan, expectation_of())
            arena.fill(0)
            around = arena.collect().around
            assert around.guarded_bytes == (0 if guard == "none" else size_bytes)
            assert around.read_only_bytes == size_bytes
            assert around.red_zone_bytes >= RED_ZONE_BYTES


@pytest.mark.parametrize("size_bytes", EVERY_SIZE)
def test_kept_memory_holds_what_the_launch_before_left(arena: CudaArena, size_bytes: int) -> None:
    """Without a fill between them, what is collected tells what all launches changed."""
    footprint = Footprint(must_write=IntervalSet([0], [64]))
    plan = plan_of(buffer("dst", Role.DESTINATION, size_bytes))
    address = arena.place(plan, expectation_of(dst=footprint))["dst"]
    for again, offsets in ((False, [3]), (True, [3, 60]), (False, [9])):
        if again:
            arena.keep()
        else:
            arena.fill(0)
        flip(address + offsets[-1])
        assert changed_offsets(arena) == {"dst": offsets}


def test_a_steady_state_maps_nothing(arena: CudaArena, driver: FakeDriver) -> None:
    """Twenty cases, each launched with its mirror, map and create no more than the first."""
    plan = plan_of(
        buffer("a", Role.SOURCE, 300),
        buffer("b", Role.DESTINATION, 70_000),
        buffer("c", Role.SOURCE, LARGE),
        buffer("d", Role.DESTINATION, SPARSE),
    )
    counts = set()
    for _ in range(20):
        for fill, launched in ((0, plan), (1, plan.mirrored())):
            arena.place(launched, expectation_of())
            arena.fill(fill)
            assert changed_offsets(arena) == {}
        counts.add((driver.mapped, driver.created, len(driver.reservations)))
    assert len(counts) == 1


# ---- sparse regions ----


@pytest.mark.parametrize("offset", [2**31 - 1, 2**31, SPARSE - 1, 0])
def test_a_write_into_a_window_of_a_sparse_buffer_is_seen_where_it_fell(
    arena: CudaArena, offset: int
) -> None:
    """Windows have memory of their own, and nothing else shows."""
    footprint = Footprint(must_write=IntervalSet([2**31 - 100], [2**31 + 100]))
    plan = plan_of(buffer("dst", Role.DESTINATION, SPARSE))
    for launched in (plan, plan.mirrored()):
        address = arena.place(launched, expectation_of(dst=footprint))["dst"]
        arena.fill(1)
        flip(address + offset)
        assert changed_offsets(arena) == {"dst": [offset]}


def test_nobody_can_touch_a_hole(arena: CudaArena) -> None:
    """From its first byte to its last, whoever writes the buffer; the granules beside it are
    memory, and what strays there is seen where it fell."""
    footprint = Footprint(may_read=IntervalSet([2**30], [2**30 + 64]))
    for role in (Role.SOURCE, Role.DESTINATION):
        plan = plan_of(buffer("x", role, SPARSE))
        for launched in (plan, plan.mirrored()):
            address = arena.place(launched, expectation_of(x=footprint))["x"]
            arena.fill(0)
            closed = arena.closed()["x"]
            assert len(closed) == 2
            assert closed.total_bytes > SPARSE - 8 * GRANULE_BYTES
            assert not closed.intersection(footprint.may_read.widened(RED_ZONE_BYTES))
            for begin, end in closed:
                for at in (begin, (begin + end) // 2, end - 1):
                    assert not can_read(address + at)
                assert can_read(address + begin - 1)
                assert can_read(address + end)
            strays = [int(closed.begin[0]) - 1, int(closed.end[0])]
            if role is Role.DESTINATION:
                for stray in strays:
                    flip(address + stray)
                assert changed_offsets(arena) == {"x": strays}


def test_a_buffer_that_is_memory_everywhere_has_no_hole(arena: CudaArena) -> None:
    """Nor has a small one."""
    plan = plan_of(buffer("a", Role.SOURCE, 8), buffer("b", Role.DESTINATION, LARGE))
    arena.place(plan, expectation_of())
    assert not any(arena.closed().values())


@pytest.mark.parametrize("size_bytes", [LARGE, SPARSE])
def test_all_memory_of_a_large_buffer_is_poisoned(arena: CudaArena, size_bytes: int) -> None:
    """Far from the footprint too: in two fills different bytes, none of them zero, so that stores
    of zeros are seen, and reads of what is far have something to show."""
    address = arena.place(plan_of(buffer("x", Role.DESTINATION, size_bytes)), expectation_of())["x"]
    far = 150_000  # no window, but memory
    seen = set()
    for fill in (0, 1):
        arena.fill(fill)
        assert changed_offsets(arena) == {}
        seen.add(ctypes.string_at(address + far, 1))
        ctypes.memset(address + far, 0, 64)
        assert changed_offsets(arena) == {"x": list(range(far, far + 64))}
    assert len(seen - {b"\0"}) == 2


def test_a_stray_is_reported_for_the_buffer_that_it_hit(arena: CudaArena) -> None:
    """Sparse buffers share no memory."""
    plan = plan_of(
        buffer("src", Role.SOURCE, SPARSE),
        buffer("one", Role.DESTINATION, SPARSE),
        buffer("two", Role.DESTINATION, SPARSE),
    )
    addresses = arena.place(plan, expectation_of())
    arena.fill(0)
    flip(addresses["two"] + 100_005)
    assert ctypes.string_at(addresses["src"] + 100_000, 16) == bytes([BACKGROUND[0]] * 16)
    assert changed_offsets(arena) == {"two": [100_005]}


def test_a_tebibyte_needs_little_memory(arena: CudaArena, driver: FakeDriver) -> None:
    """A destination of 2^40 bytes works, with windows at its ends and at 2^39, in both launches."""
    top = 2**40
    footprint = Footprint(must_write=IntervalSet([2**39, top - 64], [2**39 + 64, top]))
    plan = plan_of(buffer("dst", Role.DESTINATION, top))
    start = time.process_time()
    for launched in (plan, plan.mirrored()):
        address = arena.place(launched, expectation_of(dst=footprint))["dst"]
        arena.fill(0)
        flip(address + top - 1)
        flip(address + 2**39)
        assert changed_offsets(arena) == {"dst": [2**39, top - 1]}
    assert not can_read(address - 1)
    assert arena.allocated_bytes < 400 * 2**20
    assert arena.address_bytes > top
    assert time.process_time() - start < 5


def test_a_sparse_buffer_whose_every_granule_is_written_has_memory_everywhere(
    arena: CudaArena,
) -> None:
    """Windows in every granule: what strays is seen exactly where it fell."""
    begins = np.arange(0, WHOLE_BYTES + 2**24, GRANULE_BYTES)
    footprint = Footprint(must_write=IntervalSet.of_runs(begins, 64))
    size_bytes = int(begins[-1]) + 64
    plan = plan_of(buffer("dst", Role.DESTINATION, size_bytes))
    address = arena.place(plan, expectation_of(dst=footprint))["dst"]
    assert arena.allocated_bytes > WHOLE_BYTES
    arena.fill(0)
    strays = [1_000_000, 2**29 + 1_000_001]
    for stray in strays:
        flip(address + stray)
    assert changed_offsets(arena) == {"dst": strays}


def test_strays_of_a_launch_that_was_not_collected_are_nobody_elses(arena: CudaArena) -> None:
    """Whatever kept the harness from comparing, the next case begins clean."""
    plan = plan_of(buffer("a", Role.DESTINATION, 8), buffer("dst", Role.DESTINATION, SPARSE))
    addresses = arena.place(plan, expectation_of())
    arena.fill(0)
    flip(addresses["a"] - 100_000)
    flip(addresses["dst"] + 100_000)
    arena.place(plan, expectation_of())
    arena.fill(0)
    assert changed_offsets(arena) == {}


def test_a_large_layout_serves_both_launches(arena: CudaArena, driver: FakeDriver) -> None:
    """However much memory it has of its own: more than is kept for later cases."""
    driver.memory_bytes = 2**31
    begins = np.arange(0, KEPT_BYTES + 2**24, GRANULE_BYTES)
    footprint = Footprint(must_write=IntervalSet.of_runs(begins, 64))
    plan = plan_of(buffer("dst", Role.DESTINATION, int(begins[-1]) + 64))
    arena.place(plan, expectation_of(dst=footprint))
    mapped = driver.mapped
    arena.place(plan.mirrored(), expectation_of(dst=footprint))
    assert driver.mapped == mapped
    arena.place(plan_of(buffer("a", Role.SOURCE, 8)), expectation_of())
    assert arena.allocated_bytes <= KEPT_BYTES + 2**24


# ---- limits ----


def test_kept_memory_makes_room_for_others(driver: FakeDriver) -> None:
    """Memory kept for layouts that are not asked for any more is given back when it is short."""
    driver.memory_bytes = 720 * 2**20
    arena = arena_on(driver)
    for size_bytes in (200 * 2**20, 210 * 2**20, 220 * 2**20):
        arena.place(plan_of(buffer("src", Role.SOURCE, size_bytes)), expectation_of())
        assert driver.free_bytes() >= 256 * 2**20
    assert arena.allocated_bytes < 720 * 2**20


def test_more_than_the_device_has_does_not_fit(arena: CudaArena, driver: FakeDriver) -> None:
    """Windows beyond the device's memory are refused by name, and the next case fits."""
    driver.memory_bytes = 300 * 2**20
    everything = Footprint(may_read=IntervalSet([0], [100 * 2**20]))
    with pytest.raises(
        DoesNotFitError, match=r"^src: needs .* bytes of device memory, fewer are free$"
    ):
        arena.place(
            plan_of(buffer("src", Role.SOURCE, 100 * 2**20)), expectation_of(src=everything)
        )
    arena.place(plan_of(buffer("src", Role.SOURCE, LARGE)), expectation_of())


def test_more_address_space_than_there_is_does_not_fit(arena: CudaArena) -> None:
    """Refused by name, and nothing stays behind."""
    arena.place(plan_of(buffer("a", Role.SOURCE, 8)), expectation_of())
    before = arena.allocated_bytes, arena.address_bytes
    with pytest.raises(DoesNotFitError, match=r"^src: no device address space for .* bytes$"):
        arena.place(plan_of(buffer("src", Role.SOURCE, 2**47)), expectation_of())
    arena.place(plan_of(buffer("a", Role.SOURCE, 8)), expectation_of())
    assert arena.address_bytes == before[1]
    assert arena.allocated_bytes - before[0] < 2**24  # kept


def test_a_limit_bounds_what_an_arena_takes(driver: FakeDriver) -> None:
    """A buffer that would be whole is sparse within it; more windows than that do not fit."""
    limit = 128 * 2**20
    arena = arena_on(driver, limit)
    plan = plan_of(buffer("dst", Role.DESTINATION, 300 * 2**20))
    for launched in (plan, plan.mirrored()):
        arena.place(launched, expectation_of())
        arena.fill(0)
        assert changed_offsets(arena) == {}
    assert arena.allocated_bytes <= limit
    everything = Footprint(must_write=IntervalSet([0], [200 * 2**20]))
    with pytest.raises(DoesNotFitError, match=r"^dst: needs .*, the limit of 134,217,728 leaves"):
        arena.place(plan, expectation_of(dst=everything))
    assert arena.allocated_bytes <= limit


def test_an_arena_gives_everything_back(arena: CudaArena, driver: FakeDriver) -> None:
    """No reservation, no handle and no allocation outlives it; it can be used again."""
    for _ in range(2):
        for size_bytes in EVERY_SIZE:
            plan = plan_of(*(buffer(role.value, role, size_bytes) for role in Role))
            arena.place(plan, expectation_of())
            arena.store(np.arange(3))
            arena.fill(0)
            arena.collect()
        arena.close()
        assert arena.allocated_bytes == arena.address_bytes == 0
        assert driver.free_bytes() == driver.memory_bytes
        assert not driver.reservations


def test_a_failure_midway_leaves_nothing_behind(arena: CudaArena, driver: FakeDriver) -> None:
    """Page tables that do not fit, at each of the first calls that need them."""
    real_map, real_allow = driver.map, driver.allow
    plan = plan_of(
        buffer("a", Role.SOURCE, 8),
        buffer("b", Role.DESTINATION, LARGE),
        buffer("c", Role.DESTINATION, SPARSE),
    )
    messages: list[str] = []

    def refuse(real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise DoesNotFitError("no device memory for page tables is free")
            real(*arguments, **named)

        return call

    driver.map, driver.allow = refuse(real_map), refuse(real_allow)  # type: ignore[method-assign]
    for nth in range(1, 30):
        left = nth
        try:
            arena.place(plan, expectation_of())
        except DoesNotFitError as error:
            messages.append(str(error))
        left = 0
        addresses = arena.place(plan, expectation_of())
        arena.fill(0)
        flip(addresses["b"] + 9)
        assert changed_offsets(arena) == {"b": [9]}
        arena.close()
        assert driver.free_bytes() == driver.memory_bytes
        assert not driver.reservations
    # b falls back to windows: one failure never refuses it.
    assert {message.partition(":")[0] for message in messages} == {"a", "c"}


# ---- the rest ----


def test_a_fault_of_the_launch_is_named(arena: CudaArena, driver: FakeDriver) -> None:
    """A lost context is an error of its own, with the fault in words."""
    arena.place(plan_of(buffer("src", Role.SOURCE, LARGE)), expectation_of())
    arena.fill(0)
    driver.fault = "illegal memory access"
    for call in (arena.synchronise, arena.collect):
        with pytest.raises(DeviceFaultError) as caught:
            call()
        assert caught.value.name == "illegal memory access"


def test_permissions_are_copied_to_the_device(arena: CudaArena) -> None:
    """Stored values can be read at the address, which may grow."""
    for count in (0, 2, 600_000):
        values = np.arange(count, dtype=np.int64)
        address = arena.store(values)
        assert ctypes.string_at(address, values.nbytes) == values.tobytes()


def test_a_store_past_the_guard_kills() -> None:
    """The fake's guards are real: the process that stores there dies of it."""
    child = os.fork()
    if not child:
        ctypes.CDLL(None).signal(11, 0)  # the default, whatever handler the tests have
        fake = FakeDriver()
        address = arena_on(fake).place(
            plan_of(buffer("dst", Role.DESTINATION, 8)), expectation_of()
        )["dst"]
        ctypes.memset(address + 8, 0, 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 11
