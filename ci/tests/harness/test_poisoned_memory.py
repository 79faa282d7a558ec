"""What AddressSanitizer is told that nobody may touch: all that belongs to no buffer's extent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ci.tests.harness.test_host_memory import buffer, expectation_of, plan_of

from pagefuzz.harness.check import Checker
from pagefuzz.harness.memory import host
from pagefuzz.harness.memory.arena import RED_ZONE_BYTES
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.layout import Plan, PlannedBuffer, Role
from pagefuzz.strategies.operations.reshape_and_cache_flash import REPORTED

#: Reads the byte behind the keys that came in, and throws it away.
PAST_THE_KEYS = r'''
operation = "reshape_and_cache_flash"
schedule = "token"
breaks = "reads past the keys, and throws the value away"

[[replace]]
find = """    store_token<Codec>(w, w.key, token, slot);"""
with = """    store_token<Codec>(w, w.key, token, slot); \
if (token == 0) { volatile uint8_t thrown_away = w.key.input.template \
load<uint8_t>(w.map.num_tokens * w.key.row_stride_bytes); (void)thrown_away; }"""
'''


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses that are poisoned now, by an arena whose process has no AddressSanitizer."""
    now: set[int] = set()

    def add(address: int, size_bytes: int) -> None:
        now.update(range(address, address + size_bytes))

    def drop(address: int, size_bytes: int) -> None:
        now.difference_update(range(address, address + size_bytes))

    monkeypatch.setattr(host, "_poison", add)
    monkeypatch.setattr(host, "_unpoison", drop)
    return now


@pytest.fixture
def arena(poisoned: set[int]) -> Iterator[HostArena]:
    made = HostArena(poisons=True)
    yield made
    made.close()


def lying_over(name: str, size_bytes: int, over: tuple[str, int]) -> PlannedBuffer:
    return replace(buffer(name, Role.DESTINATION, size_bytes), placement=Placement(over=over))


def overlaid() -> Plan:
    """`b` lies in the workspace behind `a`; no byte of 96..159 and 180..295 is of either."""
    a = buffer("a", Role.DESTINATION, 96, after_bytes=200)
    return plan_of(buffer("src", Role.SOURCE, 64), a, lying_over("b", 20, ("a", 160)))


def test_beside_buffers_of_one_memory_everything_is_poisoned(
    arena: HostArena, poisoned: set[int]
) -> None:
    """What neither of them has; of the other buffers both ends, as in any case."""
    addresses = arena.place(overlaid(), expectation_of())
    arena.fill(0)
    source, both = addresses["src"], addresses["a"]
    beside = range(-RED_ZONE_BYTES, 0)
    assert {source + at for at in (*beside, *range(64, 64 + RED_ZONE_BYTES))} <= poisoned
    assert {both + at for at in (*beside, *range(96, 160), *range(180, 296))} <= poisoned
    legal = {source + at for at in range(64)} | {both + at for at in range(96)}
    legal |= {both + at for at in range(160, 180)}
    assert not poisoned & legal
    arena.collect()
    assert not poisoned


def test_what_is_poisoned_is_counted(arena: HostArena, poisoned: set[int]) -> None:
    """Those bytes and no others; none of an arena that does not poison."""
    for plan in (overlaid(), plan_of(buffer("a", Role.SOURCE, 77, before_bytes=3)), plan_of()):
        arena.place(plan, expectation_of())
        arena.fill(0)
        count = len(poisoned)
        assert arena.collect().around.poisoned_bytes == count
    other = HostArena()
    other.place(overlaid(), expectation_of())
    other.fill(0)
    assert other.collect().around.poisoned_bytes == 0
    other.close()


def one_buffer() -> Case:
    """Keys and values of each page in one buffer."""
    case = REPORTED["17-one-buffer"]()
    assert any(place.over for place in case.placements.values())
    return case


def test_address_sanitizer_watches_beside_an_overlay(tmp_path: Path) -> None:
    """A read past a source, where two caches are views of one buffer; a sound kernel is clean."""
    twin = tmp_path / "past-the-keys.toml"
    twin.write_text(PAST_THE_KEYS)
    case = one_buffer()
    with Checker(case.operation, f"twin:{twin}", "host", "asan") as checker:
        (failure,) = checker.check(case).failures
    assert failure.key == ("AddressSanitizer use-after-poison",)
    with Checker(case.operation, "bundled:token", "host", "asan") as checker:
        verdict = checker.check(case)
    assert verdict.clean
    launches, watched_bytes = verdict.layers["AddressSanitizer"]
    assert launches == verdict.launches > 0
    assert watched_bytes > launches * RED_ZONE_BYTES
