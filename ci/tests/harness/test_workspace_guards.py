"""Guards beside buffers that are slices of workspaces, or whose extents are longer than needed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from ci.tests.harness.fake_driver import FakeDriver, can_read, can_write

from pagefuzz.harness.campaign.drawing import Drawing
from pagefuzz.harness.check import Checker
from pagefuzz.harness.injection import suitable_cases
from pagefuzz.harness.memory.arena import SMALL_BYTES, Arena
from pagefuzz.harness.memory.cuda import CudaArena
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.harness.running import Injection
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import BASE_ALIGNMENT_BYTES, Case, Placement
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Dtype, Image, Plan, PlannedBuffer, Role
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.registry import cases_for

OPERATION = "cp_gather_cache"
SIZES = (64, SMALL_BYTES + 64, 3 * 2**30)

#: Bytes in front, of slack and behind: the ends of some fall between two elements.
ROOMS = ((0, 4, 0), (0, 0, 4), (12, 0, 0), (4, 4, 12), (5, 0, 3), (1, 2, 3), (0, 0, 0))


@contextmanager
def arena_of(backend: str) -> Iterator[Arena]:
    """The CUDA one over a driver on the host."""
    if backend == "host":
        arena: Arena = HostArena()
        yield arena
        arena.close()
        return
    driver = FakeDriver()
    yield CudaArena(driver, driver.scan)  # type: ignore[arg-type]
    driver.close()


def buffer(
    role: Role, dtype: Dtype, size_bytes: int, room: tuple[int, int, int], alignment: int
) -> PlannedBuffer:
    before, slack, after = room
    place = Placement(before_bytes=before, slack_bytes=slack, after_bytes=after)
    told = size_bytes + slack
    image = Image.empty()
    return PlannedBuffer(
        "x", role, size_bytes, told, dtype, 1, place, False, image, alignment_bytes=alignment
    )


def plan_of(one: PlannedBuffer) -> Plan:
    return Plan(Case("test", {}, seed=3), {}, {"x": one})


NOTHING = Expectation(CaseClass.IN_CONTRACT)


@pytest.mark.parametrize("backend", ["host", "cuda"])
@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("dtype", [Dtype.U8, Dtype.BF16, Dtype.I32, Dtype.I64])
def test_one_element_off_a_workspace_faults(backend: str, size_bytes: int, dtype: Dtype) -> None:
    """The first element of which no byte belongs to the workspace, at either end, can be neither
    read nor written; the first and the last byte of the workspace can be read."""
    unit = dtype.size_bytes
    for room in ROOMS:
        before, slack, after = room
        plan = plan_of(buffer(Role.DESTINATION, dtype, size_bytes, room, unit))
        end = -(-(size_bytes + slack + after) // unit) * unit
        start = -(-before // unit) * unit
        with arena_of(backend) as arena:
            address = arena.place(plan, NOTHING)["x"]
            arena.fill(0)
            assert address % unit == 0
            assert can_read(address + size_bytes + slack + after - 1), room
            assert not can_read(address + end), room
            assert not can_write(address + end), room
            arena.collect()
            address = arena.place(plan.mirrored(), NOTHING)["x"]
            arena.fill(1)
            assert address % unit == 0
            assert can_read(address - before), room
            assert not can_read(address - start - 1), room


@pytest.mark.parametrize("backend", ["host", "cuda"])
@pytest.mark.parametrize("size_bytes", SIZES)
def test_what_alignment_leaves_before_a_guard_is_a_red_zone(backend: str, size_bytes: int) -> None:
    """Of a buffer of bytes whose base must be a multiple of 4, and of one that is asked to lie off
    alignment: a write to any byte up to the guard is seen, and without one nothing is."""
    off = buffer(Role.DESTINATION, Dtype.U8, size_bytes, (0, 0, 3), 1)
    off = replace(off, placement=replace(off.placement, offset_bytes=7))
    for one in (buffer(Role.DESTINATION, Dtype.U8, size_bytes, (0, 0, 3), 4), off):
        with arena_of(backend) as arena:
            address = arena.place(plan_of(one), NOTHING)["x"]
            last = one.memory_bytes
            gap = -(address + last) % BASE_ALIGNMENT_BYTES
            assert 0 < gap < 16
            assert not can_read(address + last + gap)
            for offsets in ([], list(range(last, last + gap))):
                arena.fill(0)
                for at in offsets:
                    _flip(address + at)
                assert _changed(arena) == offsets


def _flip(address: int) -> None:
    ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ 1, 1)


def _changed(arena: Arena) -> list[int]:
    return [
        chunk.offset_bytes + int(at)
        for chunk in arena.collect().chunks.get("x", ())
        for at in np.flatnonzero(chunk.before != chunk.after)
    ]


# ---- operations ----

#: Buffers of bytes whose base the contract wants at a multiple of 4: records and indexer pages.
WORDS = {
    "cp_gather_and_upconvert_fp8_kv_cache": "src",
    "cp_gather_indexer_k_quant_cache": "src",
    "cp_gather_indexer_k_quant_cache_hinted": "src",
    "concat_and_cache_ds_mla": "cache",
    "indexer_k_quant_and_cache": "cache",
}


def step_bytes(operation: str, buffer: PlannedBuffer) -> int:
    """What README says a buffer's end is nearer to its guard than."""
    word = 4 if WORDS.get(operation) == buffer.name else 1
    return max(Dtype(buffer.dtype).size_bytes, word)


@pytest.mark.parametrize("operation", list(registry.operations()))
def test_workspaces_of_every_operation_lie_against_guards(operation: str) -> None:
    """Whatever their lengths, and at both ends: less than an element away, and no base is one that
    a launcher would refuse."""
    one = registry.operation(operation)
    names = [buffer.name for buffer in one.buffers]
    seen: set[str] = set()

    def look(case: Case) -> None:
        if case.overrides:  # null pointers, which may have no slack
            return
        for before, slack, after in ROOMS:
            place = Placement(before_bytes=before, slack_bytes=slack, after_bytes=after)
            plan = one.plan(replace(case, placements=dict.fromkeys(names, place)))
            for placed in (plan, plan.mirrored()):
                assert not one.refusals(placed)
                for buffer in placed.buffers.values():
                    if not buffer.memory_bytes:
                        continue
                    seen.add(buffer.name)
                    base, front = buffer.base_offset_bytes, buffer.placement.before_bytes
                    gap = base - front if placed is not plan else -(base + buffer.memory_bytes)
                    assert gap % BASE_ALIGNMENT_BYTES < step_bytes(operation, buffer), buffer

    drawn = cases_for(operation, hostile=False, refused=False)
    Drawing(1, 60, None, reuse=False).run(drawn, look)
    assert seen == set(names)


def workspace_case() -> tuple[Case, int]:
    """A case whose table has an even number of entries and 4 bytes of slack; bytes of both."""
    one = registry.operation(OPERATION)
    for case in suitable_cases(OPERATION, 8):
        table = one.plan(case).buffers["block_table"]
        if table.memory_bytes and table.memory_bytes % 8 == 0:
            placed = replace(case, placements={"block_table": Placement(slack_bytes=4)})
            return placed, table.memory_bytes + 4
    raise AssertionError("no such case was drawn")


@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_access_past_slack_is_named(kind: str) -> None:
    """One element behind the extent, its value thrown away; the guard sees none of the extent."""
    case, size_bytes = workspace_case()
    with Checker(OPERATION, "bundled:token", "host", "inject") as checker:
        past = Injection("block_table", size_bytes, 4, kind)
        (failure,) = checker.check(case, injection=past).failures
        assert (failure.judgement, failure.title) == ("death", f"{kind} past block_table")
        inside = Injection("block_table", size_bytes - 4, 4, "read")
        assert checker.check(case, injection=inside).clean
