"""Page copies: vectorised expectation, loop and torch say the same of every case."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ci.tests.oracles.test_references import assert_same
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, CaseError, Placement, Values
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.origin import OriginKind
from pagefuzz.oracles.page_copies import PageCopyOperation
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass

OPERATIONS = ("copy_blocks", "swap_blocks")


def asked(name: str) -> PageCopyOperation:
    found = operation(name)
    assert isinstance(found, PageCopyOperation)
    return found


@st.composite
def small_cases(draw: st.DrawFn, name: str) -> Case:
    """A few pages, any pairs of theirs and near misses, any order of pages and layers."""
    unit = draw(st.sampled_from([1, 2, 4, 8]))
    page = unit * draw(st.integers(1, 5))
    count = draw(st.integers(0, 6))
    few = st.integers(0, 6)
    padding = unit * draw(st.integers(0, 2))
    values = {}
    sizes = {"num_pairs": count, "page_bytes": page, "element_bytes": unit}
    if name == "copy_blocks":
        layers, pages = draw(st.integers(0, 3)), draw(few)
        strides = (page * max(pages, 1) + padding, page)
        if draw(st.booleans()):
            strides = (page + padding, (page + padding) * max(layers, 1))
        sizes |= {"num_layers": layers, "num_pages": pages}
        sizes |= {"layer_stride_bytes": strides[0], "page_stride_bytes": strides[1]}
        limits = (pages, pages)
        if draw(st.booleans()):
            values["scratch"] = Values.literal()
    else:
        limits = (draw(few), draw(few))
        sizes |= {"src_num_pages": limits[0], "dst_num_pages": limits[1]}
        sizes |= {
            "src_page_stride_bytes": unit * draw(st.integers(0, 8)),
            "dst_page_stride_bytes": page + padding,
        }
    sides = [st.integers(-1, limit - draw(st.integers(0, 1))) for limit in limits if limit]
    sides = sides if len(sides) == 2 else [st.integers(-2, 1)] * 2
    pairs = [draw(side) for _ in range(count) for side in sides]
    if min(limits) and draw(st.booleans()):  # no conflict, and more cycles than chance makes
        written = draw(st.permutations(range(limits[1])))
        pairs[1 : 2 * len(written) : 2] = written[:count]
    values["pairs"] = Values.literal(*pairs)
    if draw(st.booleans()):
        values["counts"] = Values.literal(5, 7)
    return Case(name, sizes, values, seed=draw(st.integers(0, 2**64 - 1)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_vectorised_equals_loop(name: str) -> None:
    """The fast expectation is the loop's, byte for byte and set for set."""

    @settings(max_examples=150, deadline=None, database=None)
    @given(small_cases(name))
    def compare(case: Case) -> None:
        plan = asked(name).plan(case)
        assert_same(asked(name).expect(plan), asked(name).expect_by_loop(plan))

    compare()


@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_equals_loop(name: str) -> None:
    """One gather and one scatter of strided torch tensors give the loop's bytes."""

    @settings(max_examples=80, deadline=None, database=None)
    @given(small_cases(name))
    def compare(case: Case) -> None:
        plan = asked(name).plan(case)
        _, destination = asked(name).caches(plan.arguments)
        by_loop: dict[int, bytes] = {}
        for runs in asked(name).expect_by_loop(plan).expected.values():
            pairs = zip(runs.offsets.tolist(), runs.values, strict=True)
            by_loop |= {at: value.tobytes() for at, value in pairs}
        assert asked(name).expected_by_torch(plan) == {destination.name: by_loop}

    compare()


CORNERS = {
    "copied": lambda plan, e: any(one.offsets.size for one in e.expected.values()),
    "cycle": lambda plan, e: e.counters.get("pages_on_cycles", 0) > 1,
    "cycle and more": lambda plan, e: (
        0 < e.counters.get("pages_on_cycles", 0) < e.counters["copied_pages"]
    ),
    "hostile": lambda plan, e: e.case_class is CaseClass.HOSTILE,
    "conflict": lambda plan, e: any(r.reason == "conflict" for r in e.refusals),
    "no scratch": lambda plan, e: any(r.reason == "scratch" for r in e.refusals),
}


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_small_cases_reach_the_corner(name: str, corner: str) -> None:
    """The equalities above are worth as much as the cases that they are tried on."""
    if name == "swap_blocks" and corner in ("cycle", "cycle and more", "no scratch"):
        return  # two caches have none

    def holds(case: Case) -> bool:
        plan = asked(name).plan(case)
        return bool(CORNERS[corner](plan, asked(name).expect(plan)))

    quickly = settings(max_examples=1000, database=None, phases=[Phase.generate])
    find(small_cases(name), holds, settings=quickly)


# ---- what the contract says, pair by pair --------------------------------------------------------


def copy_case(*pairs: tuple[int, int], pages: int = 8, layers: int = 1, scratch: int = 16) -> Case:
    """Pages of 16 bytes; scratch of that many bytes, -1: absent."""
    values = {"pairs": Values.literal(*(page for pair in pairs for page in pair))}
    values["counts"] = Values.literal(0, 0)
    if scratch >= 0:
        values["scratch"] = Values.literal()
    sizes = {
        "num_pairs": len(pairs),
        "num_layers": layers,
        "num_pages": pages,
        "layer_stride_bytes": 16 * pages,
        "page_stride_bytes": 16,
        "page_bytes": 16,
        "element_bytes": 1,
    }
    case = Case("copy_blocks", sizes, values, seed=3)
    return replace(case, overrides={"scratch.extent_bytes": scratch}) if scratch >= 0 else case


def expect(case: Case) -> tuple[Plan, Expectation]:
    plan = asked(case.operation).plan(case)
    return plan, asked(case.operation).expect(plan)


def copied(case: Case) -> dict[int, int]:
    """Destination page -> page that it becomes, told by the payload; of layer 0."""
    plan, expectation = expect(case)
    where = {}
    runs = expectation.expected["cache"]
    for at, value in zip(runs.offsets.tolist(), runs.values, strict=True):
        origin = asked("copy_blocks").origin(plan, "cache", at, value)
        assert origin is not None
        assert origin.kind is OriginKind.ENTRY
        if at < 16 * case.sizes["num_pages"]:
            where[at // 16] = int(origin.text.split()[2].rstrip(","))
    return where


@pytest.mark.parametrize(
    ("pairs", "want"),
    [
        ([(0, 1), (1, 2), (2, 3)], {1: 0, 2: 1, 3: 2}),
        ([(2, 3), (1, 2), (0, 1)], {1: 0, 2: 1, 3: 2}),
        ([(1, 2), (2, 1)], {1: 2, 2: 1}),
        ([(0, 1), (1, 2), (2, 0), (1, 5), (5, 6)], {0: 2, 1: 0, 2: 1, 5: 1, 6: 5}),
        ([(4, 4), (4, 5)], {5: 4}),
        ([(4, 5), (4, 5)], {5: 4}),
        ([(-1, 5), (4, -1), (4, 8), (8, 5), (4, 5)], {5: 4}),
    ],
)
def test_pages_are_read_before_any_is_written(
    pairs: list[tuple[int, int]], want: dict[int, int]
) -> None:
    """Chains in either order, cycles, a cycle with a branch, repeats and pages to themselves."""
    assert copied(copy_case(*pairs)) == want


@pytest.mark.parametrize(
    ("pairs", "reasons"),
    [
        ([(0, 2), (1, 2)], ["conflict"]),
        ([(2, 2), (1, 2)], ["conflict"]),
        ([(-1, 2), (1, 2)], []),
        ([(9, 2), (1, 2)], []),
        ([(2, 2), (2, 2)], []),
        ([(1, 2), (2, 1), (0, 2)], ["conflict"]),
    ],
)
def test_contradictions_are_of_pairs_that_are_left(
    pairs: list[tuple[int, int]], reasons: list[str]
) -> None:
    """Padding and skipped pairs contradict nobody; a page to itself does."""
    _, expectation = expect(copy_case(*pairs))
    assert [refusal.reason for refusal in expectation.refusals] == reasons


@pytest.mark.parametrize(
    ("pairs", "scratch", "refused"),
    [
        ([(1, 2), (2, 1)], 15, True),
        ([(1, 2), (2, 1)], 16, False),
        ([(1, 2), (2, 1)], -1, True),
        ([(1, 2), (2, 3)], 0, False),
        ([(1, 2), (2, 3)], -1, False),
        ([(1, 1)], -1, False),
        ([(1, 2), (2, 8)], -1, False),
    ],
)
def test_scratch_is_needed_for_cycles_only(
    pairs: list[tuple[int, int]], scratch: int, refused: bool
) -> None:
    """It may be absent or too small otherwise, and is then out of bounds."""
    _, expectation = expect(copy_case(*pairs, scratch=scratch))
    assert [r.reason for r in expectation.refusals] == (["scratch"] if refused else [])
    touched = expectation.footprint("scratch")
    is_used = scratch == 16 and not refused
    assert touched.may_read.total_bytes == touched.may_write.total_bytes == 16 * is_used
    assert not touched.must_write


def test_counts_are_of_pairs_whatever_the_layers() -> None:
    """Padding is tested first; a page to itself and a repeat are not counted."""
    pairs = [(-1, 0), (0, -1), (-1, 99), (99, 0), (0, 99), (-2, 0), (3, 3), (1, 2), (1, 2)]
    for layers in (0, 1, 3):
        _, expectation = expect(copy_case(*pairs, layers=layers))
        assert expectation.counts is not None
        assert (expectation.counts.padding, expectation.counts.skipped) == (3, 3)
        assert expectation.case_class is CaseClass.HOSTILE


def test_pages_that_no_pair_names_are_neither_read_nor_written() -> None:
    """Nor are bytes between pages, nor a page that goes to itself."""
    case = copy_case((0, 1), (3, 3), pages=4, layers=2, scratch=-1).with_sizes(
        page_bytes=12, page_stride_bytes=16
    )
    _, expectation = expect(case)
    cache = expectation.footprint("cache")
    assert cache.may_read.offsets().tolist() == [*range(12), *range(64, 76)]
    assert cache.must_write.offsets().tolist() == [*range(16, 28), *range(80, 92)]


def test_a_page_to_itself_is_copied_between_caches() -> None:
    """Page 1 of one cache and page 1 of another are not the same."""
    sizes = {
        "num_pairs": 2,
        "src_num_pages": 2,
        "dst_num_pages": 3,
        "src_page_stride_bytes": 16,
        "dst_page_stride_bytes": 32,
        "page_bytes": 16,
        "element_bytes": 4,
    }
    case = Case("swap_blocks", sizes, {"pairs": Values.literal(1, 1, 0, 2)})
    _, expectation = expect(case)
    assert expectation.expected["dst_cache"].offsets.tolist() == [32, 64]
    assert expectation.footprint("src_cache").may_read.total_bytes == 32
    assert not expectation.footprint("src_cache").writable


def test_texts() -> None:
    """A reader is told the pair, the layer and the byte."""
    case = copy_case((0, 1), (7, 2), layers=2)
    plan, _ = expect(case)
    at = 128 + 2 * 16 + 9
    text = asked("copy_blocks")
    assert text.locate(plan, "cache", at) == "page 2, layer 1, byte 9"
    assert text.mapping(plan, "cache", at) == "pair 1 (7 -> 2) writes it: layer 1, byte 9"
    assert text.mapping(plan, "cache", 7 * 16) == "pair 1 (7 -> 2) reads it: layer 0, byte 0"
    assert text.mapping(plan, "cache", 3 * 16) == "no pair copies page 3"
    assert text.locate(plan, "pairs", 24) == "pair 1 of 2, its destination"
    assert text.describe(plan) == (
        "P=2  NB=8  L=2  pairs=0->1 7->2  page 16 B of 1-byte elements  scratch 16 B  "
        "dense, seed 3  scratch.extent_bytes:=16"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"values": {}}, "needs 'pairs'"),
        ({"values": {"pairs": Values.literal(0, 1, 2)}}, "pairs needs 2 values"),
        ({"values": {"pairs": Values.literal(0, 1), "cache": Values.literal()}}, "holds payload"),
        (
            {"values": {"pairs": Values.literal(0, 1), "scratch": Values.literal(1)}},
            "empty literal",
        ),
        ({"placements": {"scratch": Placement(over=("cache", 0))}}, "must be refused"),
    ],
)
def test_malformed_cases_are_one_sentence(change: dict[str, object], sentence: str) -> None:
    """What cannot be laid out says why."""
    with pytest.raises(CaseError, match=sentence):
        expect(replace(copy_case((0, 1)), **change))  # type: ignore[arg-type]


def test_nothing_is_read_of_no_pairs() -> None:
    """No pairs, no footprint at all."""
    plan, expectation = expect(copy_case())
    assert not any(expectation.footprint(name).may_read for name in plan.buffers)
    assert np.array_equal(expectation.expected["cache"].offsets, [])
