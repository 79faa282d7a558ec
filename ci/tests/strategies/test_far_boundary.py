"""2^40 bytes: cases are drawn on both sides of it, and stay address space that can be had."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
from ci.tests.strategies.conftest import Drawn, drawn_from
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pagefuzz.oracles import registry
from pagefuzz.oracles.planning import MAX_MEMORY_BYTES
from pagefuzz.oracles.relation import relations_of
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies import boundaries
from pagefuzz.strategies.boundaries import FAR_BYTES, Boundary, Crossing, crossings
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.registry import cases_for

NAMES = tuple(registry.operations())
#: Those that the others are made like, in the fast tier.
FIRST = ("cp_gather_cache", "concat_and_cache_mla", "reshape_and_cache_flash", "copy_blocks")
SPREAD = [pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in NAMES]
FAR_CHOICE = 4
#: How far from the boundary its nearest neighbour may lie: a packed page, and what is past it.
NEAR_BYTES = 2**22


@dataclass
class Sides:
    """How near to the boundary cases come. at: an access begins exactly there; across: one begins
    before it and ends past it."""

    at: int = 0
    past: int = 0
    below: int = 0
    across: int = 0

    @property
    def is_crossed(self) -> bool:
        return min(self.at + self.past, self.below + self.across) > 0


def sides(found: list[Drawn]) -> Sides:
    """Of how many buffers of cases in contract."""
    out = Sides()
    for one in found:
        if one.expectation.case_class is not CaseClass.IN_CONTRACT:
            continue
        for name in one.plan.buffers:
            footprint = one.expectation.footprint(name)
            touched = footprint.may_read.union(footprint.changeable)
            begin, end = touched.begin, touched.end
            out.at += bool((begin == FAR_BYTES).any())
            out.past += bool(((begin > FAR_BYTES) & (begin < FAR_BYTES + NEAR_BYTES)).any())
            out.below += bool(((end <= FAR_BYTES) & (end > FAR_BYTES - NEAR_BYTES)).any())
            out.across += bool(((begin < FAR_BYTES) & (end > FAR_BYTES)).any())
    return out


@pytest.fixture
def always_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches a boundary reaches the far one, where it can."""
    monkeypatch.setattr(boundaries, "_CHOICES", st.just(FAR_CHOICE))


@cache
def far_cases(name: str) -> list[Drawn]:
    """Cases of every class, drawn once, by the first test that has `always_far`."""
    return drawn_from(cases_for(name, hostile=True, refused=True), 400, 5, name)


@pytest.mark.parametrize("name", ["cp_gather_cache", "concat_and_cache_mla", "copy_blocks"])
def test_drawn_cases_lie_on_both_sides(name: str) -> None:
    """Cases as a campaign draws them: of a gather, a writer and a copy of pages."""
    strategy = cases_for(name, hostile=False, refused=False)
    assert sides(drawn_from(strategy, 1000, 5, name)).is_crossed


@pytest.mark.usefixtures("always_far")
@pytest.mark.parametrize("name", SPREAD)
def test_every_operation_meets_it_exactly(name: str) -> None:
    """Something is touched that begins at 2^40 to the byte, something past it, something below."""
    found = sides(far_cases(name))
    assert found.is_crossed, found
    assert found.at, found


@pytest.mark.usefixtures("always_far")
@pytest.mark.parametrize("name", SPREAD)
def test_nothing_takes_more_address_space_than_there_is(name: str) -> None:
    """Whatever the class; and the forms that a relation gives a case, too."""
    operation = registry.operation(name)
    related = 0
    for one in far_cases(name):
        plan, expectation = one.plan, one.expectation
        assert sum(b.memory_bytes for b in plan.buffers.values()) <= DEFAULT_LIMIT_BYTES
        for relation in relations_of(operation).values():
            for derived in relation.related(operation, plan, expectation):
                sizes = [b.memory_bytes for b in derived.plan.buffers.values()]
                assert sum(sizes) <= MAX_MEMORY_BYTES, relation.name
                related += max(sizes) > FAR_BYTES - NEAR_BYTES
    assert related, "relations were looked at where it matters"


def test_one_crossing_in_sixteen_is_far() -> None:
    """Of the crossings as they are drawn, a few percent; each boundary of 32 bits has more."""
    counted: Counter[Boundary | None] = Counter()

    @seed(3)
    @settings(
        max_examples=2000,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(crossings({"page": 1}))
    def collect(crossing: Crossing) -> None:
        counted[crossing.boundary(DEFAULT_LIMIT_BYTES, 8)] += 1

    collect()
    far = counted.pop(Boundary(FAR_BYTES, 1))
    assert 0.03 < far / 2000 < 0.1
    assert len(counted) == 4
    assert min(counted.values()) > far


@pytest.mark.parametrize("limit_bytes", [2**33, FAR_BYTES - 1])
def test_it_is_left_out_where_the_limit_forbids_it(limit_bytes: int) -> None:
    """Another boundary is then reached."""
    boundary = Crossing("page", FAR_CHOICE, below=False, extra=0).boundary(limit_bytes, 4)
    assert boundary is not None
    assert boundary.offset_bytes <= limit_bytes


def test_strides_that_are_multiplied_reach_it_too() -> None:
    """A row stride that is doubled in the end crosses at half."""
    crossing = Crossing("dst row", FAR_CHOICE, below=False, extra=0)
    assert crossing.boundary(FAR_BYTES, 1, factor=2) == Boundary(FAR_BYTES // 2, 1)


@pytest.mark.usefixtures("always_far")
def test_rows_stay_countable() -> None:
    """A destination reaches it with at most 2^23 rows, or by its stride."""
    rows = [
        one.case.sizes["num_tokens"]
        for one in far_cases("cp_gather_cache")
        if one.plan.buffers["dst"].required_bytes > FAR_BYTES - NEAR_BYTES
    ]
    assert rows
    assert max(rows) <= 2**23 + 2**10
