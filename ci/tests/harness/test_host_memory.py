"""Host memory: layout, contents, and every byte that changed seen at its exact offset."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from pagefuzz.harness.memory import host
from pagefuzz.harness.memory.arena import (
    GUARD_BYTES,
    RED_ZONE_BYTES,
    SMALL_BYTES,
    DoesNotFitError,
    PoolRegion,
)
from pagefuzz.harness.memory.host import PAGE_BYTES, POOL_BYTES, HostArena
from pagefuzz.oracles.case import Case, CaseError, Placement
from pagefuzz.oracles.contents import initial_bytes
from pagefuzz.oracles.expectation import Expectation, Footprint
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Image, Plan, PlannedBuffer, Role
from pagefuzz.oracles.observation import Around
from pagefuzz.oracles.verdict import CaseClass

HUGE = 2**33 + 4096


def buffer(name: str, role: Role, size_bytes: int, **placement: object) -> PlannedBuffer:
    place = Placement(**placement)  # type: ignore[arg-type]
    image = Image.empty()
    return PlannedBuffer(
        name, role, size_bytes, size_bytes + place.slack_bytes, 1, 1, place, False, image
    )


def plan_of(*buffers: PlannedBuffer) -> Plan:
    return Plan(Case("test", {}, seed=3), {}, {b.name: b for b in buffers})


def expectation_of(**footprints: Footprint) -> Expectation:
    return Expectation(CaseClass.IN_CONTRACT, footprints=footprints)


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def read(address: int, size_bytes: int) -> bytes:
    return ctypes.string_at(address, size_bytes)


def changed_offsets(arena: HostArena) -> Mapping[str, list[int]]:
    """Buffer -> offsets of the bytes that differ from what was filled in."""
    return {
        name: [
            chunk.offset_bytes + int(i)
            for chunk in chunks
            for i in np.flatnonzero(chunk.before != chunk.after)
        ]
        for name, chunks in arena.collect().chunks.items()
    }


@pytest.fixture
def arena() -> Iterator[HostArena]:
    made = HostArena()
    yield made
    made.close()


def test_bases_are_misaligned_exactly_as_asked(arena: HostArena) -> None:
    """Without a guard, a base lies `offset_bytes` past a multiple of 256."""
    offsets = (0, 1, 13, 255, 8)
    plan = plan_of(
        *(buffer(f"b{o}", Role.SOURCE, 100 + o, offset_bytes=o, guard="none") for o in offsets)
    )
    addresses = arena.place(plan, expectation_of())
    assert [addresses[f"b{o}"] % 256 for o in offsets] == list(offsets)


@pytest.mark.parametrize("guard", ["end", "start", "none"])
@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_regions_lie_against_their_guard(guard: str, unit: int, offset: int) -> None:
    """Aligned, the buffer's end, or that of its workspace, is less than an element away;
    misaligned, less than 16 bytes; and there is a red zone where there is no guard."""
    for elements, before, after in ((1, 0, 0), (77, 0, 0), (1000, 5, 3), (60_000, 0, 9), (0, 0, 0)):
        made = buffer(
            "b",
            Role.SOURCE,
            elements * unit,
            guard=guard,
            offset_bytes=offset * unit,
            before_bytes=before,
            after_bytes=after,
        )
        one = replace(made, alignment_bytes=unit)
        region = PoolRegion.of(one, POOL_BYTES)
        assert region.base % 256 == one.base_offset_bytes
        assert one.base_offset_bytes % min(unit, 8) == 0
        front = region.base - before
        behind = region.pool_bytes - region.base - one.memory_bytes
        room = 16 if offset else unit
        assert front in range(room) if guard == "start" else front >= RED_ZONE_BYTES
        assert behind in range(room) if guard == "end" else behind >= RED_ZONE_BYTES


def around_of(arena: HostArena, *buffers: PlannedBuffer) -> Around:
    arena.place(plan_of(*buffers), expectation_of())
    arena.fill(0)
    return arena.collect().around


@pytest.mark.parametrize("size_bytes", [100, SMALL_BYTES, SMALL_BYTES + 1, HUGE])
@pytest.mark.parametrize("guard", ["end", "start", "none"])
def test_what_lies_around_a_buffer_is_counted(
    arena: HostArena, guard: str, size_bytes: int
) -> None:
    """Bytes beside a guard, none of them without one; red zones at the other ends."""
    source = around_of(arena, buffer("a", Role.SOURCE, size_bytes, guard=guard, before_bytes=8))
    assert source.guarded_bytes == (0 if guard == "none" else size_bytes + 8)
    assert source.read_only_bytes == size_bytes + 8
    ends = 1 if guard != "none" else 2
    assert source.red_zone_bytes in range(ends * RED_ZONE_BYTES, ends * RED_ZONE_BYTES + 16)
    written = buffer("b", Role.DESTINATION, size_bytes, guard=guard, before_bytes=8)
    assert around_of(arena, written) == replace(source, read_only_bytes=0)


def test_what_lies_around_all_buffers_is_added_up(arena: HostArena) -> None:
    """Small and large ones; what the case before had is not there any more."""
    small, large = buffer("a", Role.SOURCE, 100), buffer("b", Role.DESTINATION, HUGE)
    apart = around_of(arena, small) + around_of(arena, large)
    assert around_of(arena, small, large) == apart
    assert around_of(arena) == Around()


def test_the_mirror_is_flush_at_the_other_end() -> None:
    """Whatever misalignment was asked for; what has no guard stays where it is."""
    plan = plan_of(
        buffer("a", Role.SOURCE, 36, offset_bytes=4),
        buffer("b", Role.SOURCE, 36, guard="start"),
        buffer("c", Role.SOURCE, 36, guard="none", offset_bytes=12),
    )
    mirror = plan.mirrored().buffers
    assert [(b.placement.guard, b.base_offset_bytes) for b in mirror.values()] == [
        ("start", 0),
        ("end", 256 - 36),
        ("none", 12),
    ]


def test_small_buffers_hold_what_the_oracle_says(arena: HostArena) -> None:
    """Memory around a base equals `contents.initial_bytes` of the same offsets, for both fills."""
    readable = IntervalSet([8], [64])
    source = buffer("src", Role.SOURCE, 100, offset_bytes=3, guard="none")
    expectation = expectation_of(src=Footprint(may_read=readable))
    address = arena.place(plan_of(source), expectation)["src"]
    for fill in (0, 1):
        arena.fill(fill)
        want = initial_bytes(source, readable, 3, fill, -200, 300)
        assert read(address - 200, 500) == want.tobytes()
        arena.collect()


@pytest.mark.parametrize("offset", [-RED_ZONE_BYTES, -1, 0, 99, 100, 100 + RED_ZONE_BYTES - 1])
def test_a_write_around_a_small_buffer_is_seen_where_it_fell(arena: HostArena, offset: int) -> None:
    """One changed byte of a buffer or its red zones is reported at its offset and nowhere else."""
    dst = buffer("dst", Role.DESTINATION, 100, offset_bytes=5, guard="none")
    plan = plan_of(buffer("a", Role.SOURCE, 77), dst)
    address = arena.place(plan, expectation_of())["dst"]
    arena.fill(0)
    old = read(address + offset, 1)[0]
    write(address + offset, bytes([old ^ 0x40]))
    assert changed_offsets(arena) == {"dst": [offset]}


def test_a_write_far_from_a_small_buffer_is_seen(arena: HostArena) -> None:
    """Its pool is compared to its ends, far beyond the red zones."""
    plan = plan_of(buffer("dst", Role.DESTINATION, PAGE_BYTES, guard="start"))
    address = arena.place(plan, expectation_of())["dst"]
    arena.fill(1)
    offset = 4 * PAGE_BYTES - 1
    write(address + offset, b"\0")
    assert changed_offsets(arena) == {"dst": [offset]}


def test_an_untouched_source_yields_no_chunk(arena: HostArena) -> None:
    """What did not change is known to be so without a chunk; a destination always has one."""
    plan = plan_of(buffer("src", Role.SOURCE, 100), buffer("dst", Role.DESTINATION, 100))
    arena.place(plan, expectation_of())
    arena.fill(0)
    collected = arena.collect()
    assert set(collected.chunks) == {"dst"}
    assert collected.examined_bytes >= 200 + 4 * RED_ZONE_BYTES


def test_chunks_of_one_launch_survive_the_next_fill(arena: HostArena) -> None:
    """Judgements read both launches at the end: neither may be overwritten by then."""
    arena.place(plan_of(buffer("dst", Role.DESTINATION, 100)), expectation_of())
    arena.fill(0)
    (first,) = arena.collect().chunks["dst"]
    kept = first.before.copy()
    arena.fill(1)
    assert np.array_equal(first.before, kept)
    assert np.array_equal(first.after, kept)


@pytest.mark.parametrize("size_bytes", [100, HUGE])
def test_kept_memory_holds_what_the_launch_before_left(arena: HostArena, size_bytes: int) -> None:
    """Without a fill between them, what is collected tells what all launches changed."""
    dst = buffer("dst", Role.DESTINATION, size_bytes)
    footprint = Footprint(must_write=IntervalSet([0], [64]))
    address = arena.place(plan_of(dst), expectation_of(dst=footprint))["dst"]
    for again, offsets in ((False, [3]), (True, [3, 60]), (False, [9])):
        if again:
            arena.keep()
        else:
            arena.fill(0)
        old = read(address + offsets[-1], 1)[0]
        write(address + offsets[-1], bytes([old ^ 0x40]))
        assert changed_offsets(arena) == {"dst": offsets}


def test_a_huge_buffer_is_filled_around_its_footprint_only(arena: HostArena) -> None:
    """At 2^33 bytes the footprint holds contents, and its untouched rest costs nothing."""
    top = HUGE - 100
    dst = buffer("dst", Role.DESTINATION, HUGE, offset_bytes=9, guard="none")
    footprint = Footprint(must_write=IntervalSet([2**32, top], [2**32 + 64, HUGE]))
    address = arena.place(plan_of(dst), expectation_of(dst=footprint))["dst"]
    assert address % 256 == 9
    arena.fill(1)
    want = initial_bytes(dst, IntervalSet(), 3, 1, top - 256, HUGE + 256)
    assert read(address + top - 256, want.size) == want.tobytes()
    write(address + top, b"\0" * 100)
    start = time.process_time()
    collected = arena.collect()
    assert time.process_time() - start < 0.5
    assert collected.examined_bytes >= HUGE
    covered = sum(chunk.after.size for chunk in collected.chunks["dst"])
    assert covered < 2**20
    last = next(c for c in collected.chunks["dst"] if c.offset_bytes + c.after.size > top)
    assert last.after[top - last.offset_bytes :][:100].tobytes() == b"\0" * 100


def test_all_memory_of_a_large_buffer_is_poisoned(arena: HostArena) -> None:
    """Far from the footprint too, as long as it is memory: in two fills different bytes, none of
    them zero, so that stores of zeros are seen, and reads of what is far have something to show."""
    footprint = Footprint(must_write=IntervalSet([2**32], [2**32 + 64]))
    dst = buffer("dst", Role.DESTINATION, HUGE)
    address = arena.place(plan_of(dst), expectation_of(dst=footprint))["dst"]
    far = 2**32 + 4096 - address % 4096 - 64  # the end of the page that the footprint is in
    seen = set()
    for fill in (0, 1):
        arena.fill(fill)
        assert changed_offsets(arena) == {}
        seen.add(read(address + far, 1))
        write(address + far, b"\0" * 64)
        assert changed_offsets(arena) == {"dst": list(range(far, far + 64))}
    assert len(seen - {b"\0"}) == 2


@pytest.mark.parametrize("offset", [-1, 5_000_000, 2**32 + 12_345, HUGE, HUGE + RED_ZONE_BYTES - 1])
def test_a_stray_write_into_a_huge_buffer_is_seen_where_it_fell(
    arena: HostArena, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte written far from every window of 2^33 bytes is reported at its offset, where a hole
    is one more than are closed."""
    monkeypatch.setattr(host, "MOST_CLOSED", 0)
    dst = buffer("dst", Role.DESTINATION, HUGE, offset_bytes=1, guard="none")
    footprint = Footprint(must_write=IntervalSet([0], [64]))
    address = arena.place(plan_of(dst), expectation_of(dst=footprint))["dst"]
    for fill in (0, 1):
        arena.fill(fill)
        old = read(address + offset, 1)[0]
        write(address + offset, bytes([old ^ 1]))
        assert changed_offsets(arena) == {"dst": [offset]}


def test_reading_a_huge_buffer_changes_nothing(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of an open hole that a launch only read exists afterwards, but is no change."""
    monkeypatch.setattr(host, "MOST_CLOSED", 0)
    src = buffer("src", Role.SOURCE, HUGE)
    address = arena.place(plan_of(src), expectation_of())["src"]
    arena.fill(0)
    assert read(address + 2**31, 8) == b"\0" * 8
    assert changed_offsets(arena) == {}


def test_a_tebibyte_costs_milliseconds(arena: HostArena) -> None:
    """Placing, filling and comparing an untouched buffer of 2^40 bytes is cheap."""
    plan = plan_of(buffer("src", Role.SOURCE, 2**40))
    start = time.process_time()
    arena.place(plan, expectation_of())
    for fill in (0, 1):
        arena.fill(fill)
        assert not arena.collect().chunks
    assert time.process_time() - start < 0.2


def test_memory_of_one_case_does_not_outlive_it(arena: HostArena) -> None:
    """A hundred huge cases leave no mapping and no file behind."""
    arena.place(plan_of(buffer("src", Role.SOURCE, 100)), expectation_of())
    files, maps = len(os.listdir("/proc/self/fd")), mapping_count()
    for _ in range(100):
        arena.place(plan_of(buffer("src", Role.SOURCE, HUGE)), expectation_of())
        arena.fill(0)
    arena.place(plan_of(buffer("src", Role.SOURCE, 100)), expectation_of())
    assert len(os.listdir("/proc/self/fd")) == files
    assert mapping_count() <= maps + 4


def mapping_count() -> int:
    with open("/proc/self/maps", encoding="ascii") as maps:
        return sum(1 for _ in maps)


def test_what_an_arena_holds_is_known(arena: HostArena) -> None:
    """Address space with its guards; memory as far as it exists."""
    assert (arena.address_bytes, arena.allocated_bytes) == (0, 0)
    arena.place(plan_of(buffer("a", Role.SOURCE, 8)), expectation_of())
    assert arena.address_bytes == 2 * GUARD_BYTES + arena.allocated_bytes
    assert arena.allocated_bytes == POOL_BYTES[0]
    arena.place(plan_of(buffer("a", Role.DESTINATION, 2**40)), expectation_of())
    assert arena.address_bytes > 2**40
    assert arena.allocated_bytes < 2**20
    arena.fill(0)
    held = arena.allocated_bytes
    arena.close()
    assert held < 2**22
    assert (arena.address_bytes, arena.allocated_bytes) == (0, 0)


def test_more_than_there_is_does_not_fit(arena: HostArena) -> None:
    """A buffer beyond the address space is refused with a reason, by name."""
    with pytest.raises(DoesNotFitError, match="src: no"):
        arena.place(plan_of(buffer("src", Role.SOURCE, 2**47)), expectation_of())
    everything = Footprint(may_read=IntervalSet([0], [HUGE]))
    with pytest.raises(DoesNotFitError, match="bytes to fill and compare"):
        arena.place(plan_of(buffer("src", Role.SOURCE, HUGE)), expectation_of(src=everything))


def test_pools_of_earlier_cases_make_room(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where address space is limited: to three pools here."""

    class Pool(host._Pool):
        def __init__(self, size_bytes: int, *, writable: bool) -> None:
            if len(arena._pools) == 3:
                raise DoesNotFitError("no address space")
            super().__init__(size_bytes, writable=writable)

    monkeypatch.setattr(host, "_Pool", Pool)
    for sizes in ((100, 100, 100), (50_000, 100, 5_000), (100, 5_000)):
        names = [f"b{nth}" for nth in range(len(sizes))]
        buffers = [buffer(*one) for one in zip(names, [Role.DESTINATION] * 3, sizes)]  # noqa: B905
        addresses = arena.place(plan_of(*buffers), expectation_of())
        arena.fill(0)
        for name in names:
            write(addresses[name], bytes([read(addresses[name], 1)[0] ^ 1]))
        assert changed_offsets(arena) == {name: [0] for name in names}
    four = [buffer(f"b{nth}", Role.DESTINATION, 100) for nth in range(4)]
    with pytest.raises(DoesNotFitError):
        arena.place(plan_of(*four), expectation_of())


def test_a_buffer_over_another_lies_inside_it(arena: HostArena) -> None:
    """`placement.over` gives an address in the other's memory; over an absent one is an error."""
    src = buffer("src", Role.SOURCE, 100)
    over = replace(buffer("dst", Role.DESTINATION, 10), placement=Placement(over=("src", 40)))
    addresses = arena.place(plan_of(over, src), expectation_of())
    assert addresses["dst"] == addresses["src"] + 40
    absent = replace(buffer("src", Role.SOURCE, 0), is_null=True)
    assert arena.place(plan_of(absent), expectation_of()) == {"src": 0}
    with pytest.raises(CaseError, match="no memory of its own"):
        arena.place(plan_of(over, absent), expectation_of())


@pytest.mark.parametrize("distance", [2**31, -(2**31), 2**32 - 1, 2**35, -(2**35)])
@pytest.mark.parametrize("size_bytes", [100, SMALL_BYTES + 1])
def test_a_wrapped_offset_faults_between_the_guards(distance: int, size_bytes: int) -> None:
    """An access a wrap away from any buffer kills the process instead of landing in its heap."""
    assert abs(distance) < GUARD_BYTES
    script = f"""
import ctypes
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Image, Plan, PlannedBuffer, Role
from pagefuzz.oracles.verdict import CaseClass
one = PlannedBuffer("src", Role.SOURCE, {size_bytes}, {size_bytes}, 1, 1, Placement(), False,
                    Image.empty())
arena = HostArena()
address = arena.place(Plan(Case("test", {{}}), {{}}, {{"src": one}}),
                      Expectation(CaseClass.REFUSED))["src"]
arena.fill(0)
ctypes.string_at(address, 1)
ctypes.string_at(address + {distance}, 1)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert done.returncode == -11, done.stderr.decode()


@pytest.mark.parametrize("size_bytes", [36, SMALL_BYTES + 36, HUGE + 36])
@pytest.mark.parametrize(
    ("guard", "role", "access"),
    [
        ("end", Role.SOURCE, "string_at(address + size, 1)"),
        ("start", Role.SOURCE, "string_at(address - 1, 1)"),
        ("end", Role.DESTINATION, "memset(address + size, 0, 1)"),
        ("start", Role.DESTINATION, "memset(address - 1, 0, 1)"),
        ("end", Role.SOURCE, "memset(address, 0, 1)"),
        ("start", Role.INDEX, "memset(address + size - 1, 0, 1)"),
    ],
)
def test_one_byte_off_a_buffer_faults(guard: str, role: Role, access: str, size_bytes: int) -> None:
    """At its guard, and for a write to what is only read: at full speed, by the processor."""
    script = f"""
import ctypes
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Image, Plan, PlannedBuffer, Role
from pagefuzz.oracles.verdict import CaseClass
size = {size_bytes}
one = PlannedBuffer("src", Role("{role}"), size, size, 1, 1, Placement(guard="{guard}"), False,
                    Image.empty())
arena = HostArena()
address = arena.place(Plan(Case("test", {{}}), {{}}, {{"src": one}}),
                      Expectation(CaseClass.REFUSED))["src"]
arena.fill(0)
ctypes.string_at(address, 1)
ctypes.string_at(address + size - 1, 1)
print("so far", flush=True)
ctypes.{access}
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert done.stdout == b"so far\n", done.stderr.decode()
    assert done.returncode == -11
