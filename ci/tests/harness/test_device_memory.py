"""Memory of the cuda backend, over a driver that keeps "device" memory on the host."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from pagefuzz.harness.memory.arena import (
    RED_ZONE_BYTES,
    SLAB_REGION_BYTES,
    DeviceFaultError,
    DoesNotFitError,
)
from pagefuzz.harness.memory.cuda import SCAN_CHUNK_BYTES, CudaArena
from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.contents import initial_bytes
from pagefuzz.oracles.expectation import Expectation, Footprint
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Image, Plan, PlannedBuffer, Role
from pagefuzz.oracles.verdict import CaseClass

LARGE = 5 * 2**20 + 3


class FakeDriver:
    """The driver's memory functions, over host memory."""

    def __init__(self, memory_bytes: int = 2**30) -> None:
        self.memory_bytes = memory_bytes
        self.allocations: dict[int, Any] = {}
        self.total_allocated = 0
        self.fault = ""

    def allocate(self, size_bytes: int) -> int:
        if size_bytes > self.free_bytes():
            raise DoesNotFitError(f"no {size_bytes:,} bytes of device memory are free")
        memory = ctypes.create_string_buffer(size_bytes + 512)
        address = -(-ctypes.addressof(memory) // 512) * 512
        self.allocations[address] = memory
        self.total_allocated += 1
        return address

    def free(self, pointer: int) -> None:
        del self.allocations[pointer]

    def free_bytes(self) -> int:
        return self.memory_bytes - sum(map(len, self.allocations.values()))

    def copy_in(self, target: int, source: Any) -> None:
        ctypes.memmove(target, source.ctypes.data, source.nbytes)

    def copy_out(self, target: Any, source: int) -> None:
        ctypes.memmove(target.ctypes.data, source, target.nbytes)

    def zero(self, target: int, size_bytes: int) -> None:
        ctypes.memset(target, 0, size_bytes)

    def synchronise(self) -> None:
        if self.fault:
            raise DeviceFaultError(self.fault, "cuCtxSynchronize says so")


def scan(data: int, size_bytes: int, chunk_bytes: int, flags: int) -> None:
    for index in range(-(-size_bytes // chunk_bytes)):
        size = min(chunk_bytes, size_bytes - index * chunk_bytes)
        chunk = np.frombuffer(ctypes.string_at(data + index * chunk_bytes, size), np.uint8)
        if chunk.any():
            ctypes.memset(flags + index, 1, 1)


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
    return {
        name: [
            chunk.offset_bytes + int(i)
            for chunk in chunks
            for i in np.flatnonzero(chunk.before != chunk.after)
        ]
        for name, chunks in arena.collect().chunks.items()
    }


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def arena(driver: FakeDriver) -> CudaArena:
    return CudaArena(driver, scan)  # type: ignore[arg-type]


@pytest.mark.parametrize("size_bytes", [100, SLAB_REGION_BYTES, SLAB_REGION_BYTES + 1, LARGE])
@pytest.mark.parametrize("offset_bytes", [0, 1, 255])
def test_bases_and_contents_are_as_the_oracle_says(
    arena: CudaArena, size_bytes: int, offset_bytes: int
) -> None:
    """A base has its misalignment, and its surroundings hold what `initial_bytes` says."""
    readable = IntervalSet([16, size_bytes - 9], [48, size_bytes])
    src = buffer("src", Role.SOURCE, size_bytes, offset_bytes=offset_bytes, before_bytes=10)
    address = arena.place(plan_of(src), expectation_of(src=Footprint(may_read=readable)))["src"]
    assert address % 256 == offset_bytes
    for fill in (0, 1):
        arena.fill(fill)
        for begin, end in ((-200, 80), (size_bytes - 30, size_bytes + 200)):
            want = initial_bytes(src, readable, 4, fill, begin, end)
            assert ctypes.string_at(address + begin, end - begin) == want.tobytes()
        assert changed_offsets(arena) == {}


@pytest.mark.parametrize(
    "offset",
    [-RED_ZONE_BYTES, -1, 0, 70, SCAN_CHUNK_BYTES * 3 + 5, LARGE - 1, LARGE + RED_ZONE_BYTES - 1],
)
def test_a_write_into_a_large_buffer_is_seen_where_it_fell(arena: CudaArena, offset: int) -> None:
    """One changed byte is reported at its offset, in windows and between them, in both launches."""
    plan = plan_of(buffer("a", Role.SOURCE, 9), buffer("src", Role.SOURCE, LARGE, offset_bytes=3))
    footprint = Footprint(may_read=IntervalSet([0], [64]))
    address = arena.place(plan, expectation_of(src=footprint))["src"]
    for fill in (0, 1):
        arena.fill(fill)
        flip(address + offset)
        assert changed_offsets(arena) == {"src": [offset]}


def test_two_writes_far_apart_are_both_seen(arena: CudaArena) -> None:
    """Strays in different chunks, and in a red zone of a small buffer, are all reported."""
    plan = plan_of(buffer("a", Role.SOURCE, 9), buffer("src", Role.SOURCE, LARGE))
    addresses = arena.place(plan, expectation_of())
    arena.fill(0)
    for offset in (100_000, 2_000_000, 4_999_999):
        flip(addresses["src"] + offset)
    flip(addresses["a"] - 3)
    assert changed_offsets(arena) == {"a": [-3], "src": [100_000, 2_000_000, 4_999_999]}


def test_a_small_destination_always_has_its_chunk(arena: CudaArena) -> None:
    """Judgements read what a destination holds even where nothing changed."""
    arena.place(plan_of(buffer("dst", Role.DESTINATION, 100)), expectation_of())
    arena.fill(0)
    collected = arena.collect()
    assert set(collected.chunks) == {"dst"}
    assert collected.examined_bytes >= 100 + 2 * RED_ZONE_BYTES


def test_large_allocations_are_used_again(arena: CudaArena, driver: FakeDriver) -> None:
    """Twenty cases of one size cost one allocation."""
    plan = plan_of(buffer("src", Role.SOURCE, LARGE))
    for _ in range(20):
        arena.place(plan, expectation_of())
        arena.fill(0)
        assert changed_offsets(arena) == {}
    assert driver.total_allocated <= 4  # slab, flags, permissions, and the buffer


def test_kept_allocations_make_room_for_others() -> None:
    """Memory kept for a size that is not asked for any more is given back when it is short."""
    driver = FakeDriver(memory_bytes=600 * 2**20)
    arena = CudaArena(driver, scan)  # type: ignore[arg-type]
    for size_bytes in (200 * 2**20, 210 * 2**20, 220 * 2**20):
        arena.place(plan_of(buffer("src", Role.SOURCE, size_bytes)), expectation_of())
    assert driver.free_bytes() > 300 * 2**20


def test_more_than_the_device_has_does_not_fit(arena: CudaArena) -> None:
    """A buffer beyond the device's memory is refused by name, and the next case fits."""
    with pytest.raises(
        DoesNotFitError, match=r"src: needs .* bytes of device memory, fewer are free"
    ):
        arena.place(plan_of(buffer("src", Role.SOURCE, 2**40)), expectation_of())
    arena.place(plan_of(buffer("src", Role.SOURCE, LARGE)), expectation_of())


def test_a_fault_of_the_launch_is_named(arena: CudaArena, driver: FakeDriver) -> None:
    """A lost context is an error of its own, with the fault in words."""
    arena.place(plan_of(buffer("src", Role.SOURCE, LARGE)), expectation_of())
    arena.fill(0)
    driver.fault = "illegal memory access"
    with pytest.raises(DeviceFaultError) as caught:
        arena.synchronise()
    assert caught.value.name == "illegal memory access"


def test_permissions_are_copied_to_the_device(arena: CudaArena) -> None:
    """Stored values can be read at the address, which may grow."""
    for count in (0, 2, 600_000):
        values = np.arange(count, dtype=np.int64)
        address = arena.store(values)
        assert ctypes.string_at(address, values.nbytes) == values.tobytes()
