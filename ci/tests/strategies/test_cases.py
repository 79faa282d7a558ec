"""Cases of cp_gather_cache as a whole, and the named corners that they reach."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from itertools import pairwise

import pytest
from ci.tests.strategies.conftest import Drawn
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis.errors import InvalidArgument
from hypothesis.statistics import collector

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.gather import GatherOperation
from pagefuzz.oracles.registry import UnknownNameError, operation
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.batches import MOST_REQUESTS
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.operations.cp_gather_cache import required_bytes, surface
from pagefuzz.strategies.refusals import REASONS, lies_by_reason
from pagefuzz.strategies.registry import cases_for, corners_for, operations
from pagefuzz.strategies.rows import spans

OPERATION = "cp_gather_cache"


def memory_bytes(case: Case, plan) -> int:
    """Bytes of all buffers with their workspaces."""
    return sum(
        buffer.memory_bytes + case.placement(name).before_bytes
        for name, buffer in plan.buffers.items()
    )


def test_the_simplest_case_is_one_row():
    """One request, one row, one page of one slot of one byte, nothing placed, seed 0."""
    case = find(cases_for(OPERATION, hostile=True, refused=True), lambda case: True)
    assert case.to_json() == {
        "pagefuzz_case": 1,
        "operation": OPERATION,
        "sizes": {
            "num_requests": 1,
            "num_tokens": 1,
            "page_size_tokens": 1,
            "num_pages": 1,
            "table_width": 1,
            "table_row_stride": 1,
            "page_stride_bytes": 1,
            "slot_stride_bytes": 1,
            "dst_rows": 1,
            "dst_row_stride_bytes": 1,
            "entry_bytes": 1,
            "element_bytes": 1,
            "has_terminal": 1,
        },
        "values": {
            "block_table": {"recipe": "identity"},
            "starts": {"recipe": "literal", "values": [0, 1]},
        },
        "seed": 0,
    }


def test_classes_have_their_shares(draw):
    """About three in five in contract, one in four hostile, the others refused."""
    found = Counter(one.expectation.case_class for one in draw(4000))
    assert 0.54 < found[CaseClass.IN_CONTRACT] / 4000 < 0.72
    assert 0.17 < found[CaseClass.HOSTILE] / 4000 < 0.30
    assert 0.10 < found[CaseClass.REFUSED] / 4000 < 0.20


def test_a_quarter_of_the_cases_in_contract_are_at_overflow_scale(draw):
    """Those with a buffer of 2^31 bytes or more, or a product that passes 2^31."""
    sound = [one for one in draw(4000) if one.expectation.case_class is CaseClass.IN_CONTRACT]
    large = [one for one in sound if memory_bytes(one.case, one.plan) >= 2**31 - 2**20]
    assert 0.15 < len(large) / len(sound) < 0.35


@pytest.mark.parametrize("refused", [False, True])
def test_without_hostile_none_is(draw, refused):
    """hostile=False draws no case that the oracle calls hostile."""
    found = {one.expectation.case_class for one in draw(800, hostile=False, refused=refused)}
    assert found == {CaseClass.IN_CONTRACT} | ({CaseClass.REFUSED} if refused else set())


def test_without_refused_none_is(draw):
    """refused=False draws no case that a launcher must refuse."""
    found = {one.expectation.case_class for one in draw(800, refused=False)}
    assert found == {CaseClass.IN_CONTRACT, CaseClass.HOSTILE}


@pytest.mark.parametrize("limit_bytes", [2**26, 2**31 + 2**27, 2**33 + 2**29])
def test_memory_stays_within_the_limit(draw, limit_bytes):
    """All buffers of a case together, workspaces included."""
    found = draw(500, limit_bytes=limit_bytes)
    largest = max(memory_bytes(one.case, one.plan) for one in found)
    assert largest <= limit_bytes
    if limit_bytes > 2**31:
        assert largest >= 2**31


def test_buffers_stay_below_the_default_limit(draw):
    """The default limit, and what is touched of it."""
    for one in draw(4000):
        assert memory_bytes(one.case, one.plan) < DEFAULT_LIMIT_BYTES


def test_one_case_in_sixteen_has_a_buffer_between_red_zones(draw):
    """One buffer of it, with and without an offset, each of them sooner or later; all the others
    lie against guards."""
    placed = [one.case.placements for one in draw(4000)]
    free = [one for one in placed if any(place.guard == "none" for place in one.values())]
    assert 0.03 < len(free) / len(placed) < 0.09
    assert max(sum(place.guard == "none" for place in one.values()) for one in free) == 1
    names = {name for one in free for name, place in one.items() if place.guard == "none"}
    assert names == {"src", "dst", "block_table", "starts", "seq_starts", "counts"}
    assert len({one["dst"].offset_bytes for one in free if "dst" in one}) > 2
    assert {place.guard for one in placed for place in one.values()} == {"end", "none"}


def test_few_bytes_are_touched(draw):
    """Typically up to 64 KiB of rows, almost always up to 256 KiB, and mostly up to 8 requests."""
    cases = draw(4000)
    touched = [one.expectation.footprint("dst").writable.total_bytes for one in cases]
    assert sum(size <= 2**16 for size in touched) / len(touched) > 0.9
    assert sum(size <= 2**18 for size in touched) / len(touched) > 0.99
    requests = [one.case.sizes["num_requests"] for one in cases]
    assert sum(count <= 8 for count in requests) / len(requests) > 0.85
    assert sum(count > 301 for count in requests) / len(requests) < 0.01
    assert max(requests) <= MOST_REQUESTS


def test_few_draws_are_made(draw):
    """A handful of integers a case, however many rows it has."""
    draws = [one.draws for one in draw(4000)]
    assert statistics.median(draws) <= 31  # one of which asks for a shape in use
    assert max(draws) <= 48


def test_each_case_is_a_new_one(draw):
    """Hypothesis does not spend its examples on near-duplicates of the case before: see `choices`
    on labels."""
    seen = [
        (one.case.seed, *(one.case.sizes[name] for name in ("page_size_tokens", "num_tokens")))
        for one in draw(4000)
    ]
    repeated = sum(before == now for before, now in pairwise(seen))
    assert repeated / len(seen) < 0.05


def test_cases_survive_json(draw):
    """A case file holds all of a case."""
    for one in draw(4000)[:500]:
        assert Case.from_json(json.loads(one.case.dumps())) == one.case


def test_spans_agree_with_the_oracle(draw):
    """The strategies' own row mapping is the contract's, hostile values included."""
    asked = operation(OPERATION)
    assert isinstance(asked, GatherOperation)
    for one in draw(4000):
        case_class, sizes = one.expectation.case_class, one.plan.arguments
        if case_class is CaseClass.REFUSED or not sizes["num_requests"]:
            continue
        starts, seq_starts = asked.index_vectors(one.plan)
        rows = asked.row_map(one.plan)
        found = [
            (span.request, span.first_row + at, span.first_token + at)
            for span in spans(
                starts.tolist(),
                None if seq_starts is None else seq_starts.tolist(),
                sizes["num_requests"],
                sizes["num_tokens"],
            )
            if seq_starts is None or seq_starts[span.request] >= 0
            for at in range(span.row_count)
        ]
        assert found == list(
            zip(rows.request.tolist(), rows.row.tolist(), rows.token.tolist(), strict=True)
        )


def test_required_bytes_agree_with_the_oracle(draw):
    """What the lies believe a buffer needs is what the plan laid out."""
    for one in draw(800, refused=False):
        needed = {name: buffer.required_bytes for name, buffer in one.plan.buffers.items()}
        assert required_bytes(one.case) == needed


def test_every_lie_is_refused_for_its_reason(draw):
    """Each lie that can be told about a sound case is seen through, for the reason it names."""
    asked = operation(OPERATION)
    sound = [one.case for one in draw(800, hostile=False, refused=False) if not one.case.overrides]
    for case in sound[:40]:
        for reason, lies in lies_by_reason(surface(case)).items():
            for lie in lies:
                reasons = {found.reason for found in asked.refusals(asked.plan(lie.told(case)))}
                assert reason in reasons, lie


def test_there_are_lies_for_every_reason(draw):
    """Nothing that the contract refuses goes untold."""
    for one in draw(800, hostile=False, refused=False)[:40]:
        assert set(lies_by_reason(surface(one.case))) == set(REASONS)


def test_classes_and_shapes_are_events():
    """Hypothesis' statistics say what was drawn."""
    seen = set()

    @seed(0)
    @settings(
        max_examples=200,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases_for(OPERATION, hostile=True, refused=True))
    def collect(case):
        pass

    def note(statistics):
        for test_case in statistics["generate-phase"]["test-cases"]:
            seen.update(test_case["events"])

    with collector.with_value(note):
        collect()
    text = "\n".join(seen)
    for word in ("class: hostile", "batch: one", "cache: dense", "boundary: ", "refused: "):
        assert word in text


def test_a_limit_below_64_mib_is_refused():
    """The message holds the argument's name and value, and what would do."""
    with pytest.raises(InvalidArgument, match=r"limit_bytes=1000 .* 67108864"):
        cases_for(OPERATION, hostile=False, refused=False, limit_bytes=1000)


@pytest.mark.parametrize(
    "ask", [lambda: cases_for("x", hostile=True, refused=True), lambda: corners_for("x")]
)
def test_an_unknown_operation_is_named(ask):
    """One sentence with the operations that there are."""
    with pytest.raises(UnknownNameError, match=r"'x'.*cp_gather_cache"):
        ask()


def test_every_operation_has_an_oracle():
    """Strategies are found by the name of an operation."""
    for name in operations():
        assert operation(name).name == name
        assert corners_for(name)


def held_by(found: list[Drawn]) -> list[set[str]]:
    """The corners that each case is in."""
    corners = corners_for(OPERATION)
    return [
        {name for name, holds in corners.items() if holds(one.plan, one.expectation)}
        for one in found
    ]


def counts_of(held: list[set[str]]) -> Counter[str]:
    """Corner -> how many cases were in it."""
    counted = Counter(dict.fromkeys(corners_for(OPERATION), 0))
    for names in held:
        counted.update(names)
    return counted


@pytest.fixture(scope="module")
def held(draw) -> list[set[str]]:
    return held_by(draw(4000))


def test_every_corner_is_reached(held):
    """4,000 cases are enough for all of them."""
    assert [name for name, count in counts_of(held).items() if count == 0] == []


def test_no_corner_is_trivial(held):
    """The simplest case is in contract and in few corners; no corner holds of every case."""
    assert max(counts_of(held).values()) < 4000
    assert "class: in contract" in held[0]
    assert not [name for name in held[0] if name.startswith("hostile")]


def test_corners_are_of_the_class_they_name(held):
    """A hostile corner holds of no case in contract, a boundary corner of no refused one."""
    for names in held:
        kinds = {name.split(":")[0] for name in names}
        if "class: in contract" in names:
            assert "hostile" not in kinds
        if "class: refused" in names:
            assert "boundary" not in kinds
        else:
            assert "refused" not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("seed_value", [1, 2, 3])
def test_every_corner_has_its_odds(draw, seed_value):
    """Each is reached about once in 1,500 cases or more often, whatever the seed (6 expected of
    the rarest, give or take two or three)."""
    counted = counts_of(held_by(draw(9000, seed_value=seed_value)))
    assert [name for name, count in counted.items() if count < 4] == []
