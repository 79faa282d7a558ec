"""Holes of sparse buffers: stretches in which no byte is legal, and which nobody may touch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from ci.tests.harness.fake_driver import can_read
from ci.tests.harness.test_host_memory import (
    HUGE,
    buffer,
    changed_offsets,
    expectation_of,
    plan_of,
    write,
)

from pagefuzz.harness.check import Checker
from pagefuzz.harness.injection import suitable_cases, with_hole
from pagefuzz.harness.memory import host
from pagefuzz.harness.memory.arena import GUARD_BYTES, RED_ZONE_BYTES
from pagefuzz.harness.memory.host import PAGE_BYTES, HostArena
from pagefuzz.harness.own_process import SpoiledProcessError
from pagefuzz.harness.running import Injection
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.expectation import Footprint
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Plan, Role
from pagefuzz.oracles.verdict import CaseClass

OPERATION, SUBJECT = "cp_gather_cache", "bundled:page"
MIDDLE = 2**31
LEGAL = IntervalSet([0, MIDDLE], [64, MIDDLE + 64])


@pytest.fixture
def arena() -> Iterator[HostArena]:
    made = HostArena()
    yield made
    made.close()


def huge(role: Role) -> Plan:
    return plan_of(buffer("x", role, HUGE))


@pytest.mark.parametrize("role", [Role.SOURCE, Role.DESTINATION, Role.IN_PLACE])
def test_nobody_may_touch_a_hole(arena: HostArena, role: Role) -> None:
    """From its first byte to its last, in both launches and in one more into the same memory; the
    pages beside it can be touched."""
    for fill, plan in ((0, huge(role)), (1, huge(role).mirrored())):
        expectation = expectation_of(x=Footprint(may_read=LEGAL))
        address = arena.place(plan, expectation)["x"]
        closed = arena.closed()["x"]
        assert len(closed) == 2
        assert closed.total_bytes > HUGE - 2**16
        arena.fill(fill)
        arena.synchronise()
        for _ in range(2):
            for begin, end in closed:
                for at in (begin, (begin + end) // 2, end - 1):
                    assert not can_read(address + at)
                assert can_read(address + begin - 1)
                assert can_read(address + end)
            arena.keep()
        arena.collect()


def test_no_legal_byte_is_near_a_hole(arena: HostArena) -> None:
    """Whatever is read, written, contested or lent, and both ends of buffer and workspace, lie more
    than a red zone from any."""
    begins = np.arange(64) * 2**27 + np.arange(64) * 4093
    each = [IntervalSet.of_runs(begins[nth::4], 700) for nth in range(4)]
    footprint = Footprint(*each)
    one = buffer("x", Role.IN_PLACE, int(begins[-1]) + 700, before_bytes=9, after_bytes=2**20)
    edges = IntervalSet([-9, 0, one.memory_bytes - 1], [-8, 1, one.memory_bytes])
    legal = edges.union(footprint.may_read).union(footprint.changeable)
    for plan in (plan_of(one), plan_of(one).mirrored()):
        arena.place(plan, expectation_of(x=footprint))
        closed = arena.closed()["x"]
        assert len(closed) > 60
        assert not closed.intersection(legal.widened(RED_ZONE_BYTES))
        rest = IntervalSet([-9], [one.memory_bytes]).without(closed)
        assert rest.total_bytes <= len(legal) * 4 * PAGE_BYTES


def test_a_buffer_without_holes_has_none_closed(arena: HostArena) -> None:
    """Dense ones cost nothing: small or large."""
    small, large = buffer("a", Role.SOURCE, 100), buffer("b", Role.SOURCE, 2**20)
    dense = Footprint(may_read=IntervalSet([0], [2**20]))
    arena.place(plan_of(small, large), expectation_of(b=dense))
    assert not any(arena.closed().values())


def test_of_too_many_holes_the_largest_are_closed(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are compared as ever."""
    monkeypatch.setattr(host, "MOST_CLOSED", 1)
    address = arena.place(huge(Role.DESTINATION), expectation_of(x=Footprint(must_write=LEGAL)))[
        "x"
    ]
    (end,) = arena.closed()["x"].end.tolist()
    assert end > HUGE - 2**16
    arena.fill(0)
    write(address + MIDDLE // 2, b"\x01")
    assert changed_offsets(arena) == {"x": [MIDDLE // 2]}
    assert not can_read(address + MIDDLE + 2**20)


def test_a_hole_that_was_opened_is_found_out(arena: HostArena) -> None:
    """As an opened guard is: what a launch did there went unseen."""
    address = arena.place(huge(Role.SOURCE), expectation_of(x=Footprint(may_read=LEGAL)))["x"]
    arena.fill(0)
    arena.synchronise()
    begin, end = (int(one[0]) for one in (arena.closed()["x"].begin, arena.closed()["x"].end))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address + begin), ctypes.c_size_t(end - begin), 1) == 0
    with pytest.raises(SpoiledProcessError, match="changed the protection of x"):
        arena.synchronise()


def test_closed_holes_are_not_poisoned(arena: HostArena) -> None:
    """In an ASan build that would take an eighth of them as memory."""
    wide = buffer("x", Role.SOURCE, 100, before_bytes=2**40, after_bytes=2**40)
    address = arena.place(plan_of(wide), expectation_of(x=Footprint(IntervalSet([0], [100]))))["x"]
    first, size = np.array(list(arena._outside())).T
    outside = IntervalSet(first, first + size)
    assert outside.total_bytes < 2**16
    assert not outside.intersection(IntervalSet([address], [address + 100]))
    for at in (-RED_ZONE_BYTES, 104, 2**40 + 99):
        assert outside.contains(address + at, address + at + 1)


# ---- launches ----


@pytest.mark.parametrize("name", [one.name for one in registry.operation(OPERATION).buffers])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_access_in_a_hole_is_named(name: str, kind: str) -> None:
    """In a release build, its value thrown away or not: buffer, byte, stretch and line."""
    (case, *_) = (c for c in suitable_cases(OPERATION, 1) if has_memory(c, name))
    large = with_hole(case, name)
    with Checker(OPERATION, SUBJECT, "host", "inject") as checker:
        (failure,) = checker.check(large, injection=Injection(name, MIDDLE, 1, kind)).failures
        assert checker.check(large).clean
    assert failure.judgement == "death"
    memory_bytes = registry.operation(OPERATION).plan(large).buffers[name].memory_bytes
    said = failure.details["access"]
    head, _, stretch = said.partition(" (bytes ")
    assert head == (
        f"{kind}s {name} at byte {MIDDLE} of {memory_bytes}: SIGSEGV, "
        "a stretch where no byte is legal"
    )
    begin, end = map(int, stretch.rstrip(")").split(".."))
    assert begin <= MIDDLE <= end < memory_bytes
    assert failure.details["where"].startswith("kernels/operations/cp_gather_cache.cu:")


def test_a_hole_far_in_front_of_a_buffer_is_named() -> None:
    """Workspace in front may be wider than a guard."""
    front = 4 * GUARD_BYTES
    case = suitable_cases(OPERATION, 1)[0]
    wide = replace(case, placements={"src": Placement(before_bytes=front)})
    at = 2**20 - front
    with Checker(OPERATION, SUBJECT, "host", "inject") as checker:
        (failure,) = checker.check(wide, injection=Injection("src", at, 1, "read")).failures
    assert failure.title == "read before src"
    assert f"src at byte {at} of " in failure.details["access"]
    assert "a stretch where no byte is legal" in failure.details["access"]


def test_an_access_in_a_hole_is_named_by_asan_too() -> None:
    """It handles faults itself, and says where in a report."""
    cases = [one for one in suitable_cases(OPERATION, 4) if one.sizes["num_pages"] > 1]
    far = cases[0].with_sizes(page_stride_bytes=2**32)
    wrong = Injection("src", MIDDLE, 1, "read")
    with Checker(OPERATION, SUBJECT, "host", "asan,inject") as checker:
        (failure,) = checker.check(far, injection=wrong).failures
        assert checker.check(far).clean
    assert failure.key == ("AddressSanitizer SEGV", "src", "read", "inside")
    said = failure.details["access"]
    assert said.startswith(f"reads src at byte {MIDDLE} of ")
    assert "AddressSanitizer SEGV, a stretch where no byte is legal" in said


def has_memory(case: Case, name: str) -> bool:
    return registry.operation(OPERATION).plan(case).buffers[name].memory_bytes > 0


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["src", "dst"])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_access_in_a_hole_breaks_the_context(name: str, kind: str) -> None:
    """On a GPU, where a fault does not say where it was."""
    large = with_hole(suitable_cases(OPERATION, 1)[0], name)
    with Checker(OPERATION, SUBJECT, "cuda", "inject") as checker:
        assert checker.check(large).clean
        (failure,) = checker.check(large, injection=Injection(name, MIDDLE, 1, kind)).failures
        assert checker.check(large).clean
    assert (failure.judgement, failure.key) == ("death", ("illegal memory access",))


def far_pages(case: Case) -> Case:
    """The case with 2^32 bytes between pages, and with workspace around each buffer."""
    around = Placement(before_bytes=2**30, after_bytes=2**30)
    names = [buffer.name for buffer in registry.operation(OPERATION).buffers]
    far = case.with_sizes(page_stride_bytes=2**32)
    return replace(far, placements=dict.fromkeys(names, around))


@pytest.mark.parametrize("subject", ["bundled:page", "bundled:token"])
@pytest.mark.parametrize("build", ["release", "checked"])
def test_sound_kernels_touch_no_hole(subject: str, build: str) -> None:
    """In contract and on hostile values: ids out of range, starts that decrease."""
    in_contract = [far_pages(case) for case in suitable_cases(OPERATION, 3)[:6]]
    hostile = []
    for case in in_contract:
        plan = registry.operation(OPERATION).plan(case)
        requests = plan.arguments["num_requests"]
        ids = Values.literal(*[2**31 - 1] * plan.arguments["table_width"] * requests)
        starts = Values.literal(*reversed(range(requests + plan.arguments["has_terminal"])))
        hostile += [
            replace(case, values={**case.values, "block_table": ids}),
            replace(case, values={**case.values, "starts": starts}),
        ]
    classes = set()
    with Checker(OPERATION, subject, "host", build) as checker:
        for case in (*in_contract, *hostile):
            verdict = checker.check(case)
            assert verdict.clean, (case, verdict.failures, verdict.not_run)
            classes.add(verdict.case_class)
        assert checker.deaths == 0
    assert classes == {CaseClass.IN_CONTRACT, CaseClass.HOSTILE}
