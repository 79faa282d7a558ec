"""What the strategies of all operations that write a cache have in common."""

from __future__ import annotations

import importlib
from collections import Counter
from types import ModuleType

import pytest
from ci.tests.writers.conftest import drawn

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.page_copies import PageCopyOperation
from pagefuzz.oracles.registry import operation, operations
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.oracles.writes import WriteOperation
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.refusals import lies_by_reason
from pagefuzz.strategies.registry import corners_for

COUNT, FEW = 1500, 700
NAMES = [
    name
    for name, one in operations().items()
    if isinstance(one, (WriteOperation, PageCopyOperation))
]


def plain(case: Case) -> bool:
    """Whether lies can be told about it: its arguments are as they are, its buffers its own, and no
    stride holds nonsense that a lie about a size would bring to light."""
    return (
        not case.overrides
        and all(place.over is None for place in case.placements.values())
        and all(size >= 0 for size in case.sizes.values())
    )


def strategy(name: str) -> ModuleType:
    return importlib.import_module(f"pagefuzz.strategies.operations.{name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_corner_is_reached(name: str) -> None:
    """Enough cases reach each named corner, and none holds of all."""
    counted = Counter(dict.fromkeys(corners_for(name), 0))
    for _, plan, expectation in drawn(name, COUNT):
        counted.update(k for k, holds in corners_for(name).items() if holds(plan, expectation))
    assert sorted(corner for corner, count in counted.items() if count == 0) == []
    assert max(counted.values()) < COUNT


@pytest.mark.parametrize("name", NAMES)
def test_memory_stays_within_the_limit_and_reaches_overflow_scale(name: str) -> None:
    """Below the default limit; one case in ten at least has a buffer of 2^31."""
    sizes = [
        sum(buffer.memory_bytes for buffer in plan.buffers.values())
        for _, plan, _ in drawn(name, FEW)
    ]
    assert max(sizes) < DEFAULT_LIMIT_BYTES
    assert sum(size >= 2**31 - 2**20 for size in sizes) > FEW / 10


@pytest.mark.parametrize("name", NAMES)
def test_classes_follow_what_was_asked_for(name: str) -> None:
    """Without hostile and refused cases all are in contract; with them each class has its share."""
    assert {one[2].case_class for one in drawn(name, 200, hostile=False, refused=False)} == {
        CaseClass.IN_CONTRACT
    }
    found = Counter(expectation.case_class for _, _, expectation in drawn(name, FEW))
    assert 0.5 < found[CaseClass.IN_CONTRACT] / FEW < 0.75
    assert 0.15 < found[CaseClass.HOSTILE] / FEW < 0.32
    assert 0.08 < found[CaseClass.REFUSED] / FEW < 0.22


@pytest.mark.parametrize("name", NAMES)
def test_every_lie_is_refused_for_its_reason(name: str) -> None:
    """By the oracle; sound cases need the bytes that the lies believe they need."""
    asked = operation(name)
    sound = [one for one in drawn(name, 200, hostile=False, refused=False) if plain(one[0])]
    for case, plan, _ in sound[:25]:
        needed = {buffer: planned.required_bytes for buffer, planned in plan.buffers.items()}
        assert strategy(name).required_bytes(case) == needed
        for reason, lies in lies_by_reason(strategy(name).surface(case)).items():
            for lie in lies:
                found = {refusal.reason for refusal in asked.refusals(asked.plan(lie.told(case)))}
                assert reason in found, lie
