"""The vectorised expectation, the loop and the torch reference say the same of every case."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.gather import GatherOperation
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass

OPERATION = operation("cp_gather_cache")


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Cases with every kind of hostile value and any strides, small enough for a loop."""
    small = st.integers(0, 5)
    element = draw(st.sampled_from([1, 2, 4, 8]))
    entry = element * draw(st.integers(1, 5))
    requests, tokens = draw(st.integers(0, 4)), draw(st.integers(0, 12))
    page_size, pages, width = draw(st.integers(1, 5)), draw(small), draw(small)
    terminal = draw(st.integers(0, 1))
    start = st.integers(-3, 15)
    starts = draw(st.lists(start, min_size=requests + terminal, max_size=requests + terminal))
    if draw(st.booleans()):
        starts.sort()
    values = {
        "starts": Values.literal(*(starts if requests else [])),
        "block_table": draw(
            st.one_of(
                st.builds(
                    Values,
                    st.sampled_from(["identity", "reversed", "shared"]),
                    edits=st.dictionaries(
                        st.integers(0, requests * width - 1),
                        st.sampled_from([-1, -2, 7, 0]),
                        max_size=4,
                    )
                    if requests * width
                    else st.just({}),
                ),
                st.builds(lambda seed: Values("permuted", {"seed": seed}), st.integers()),
            )
        ),
    }
    if draw(st.booleans()):
        values["seq_starts"] = Values.literal(
            *draw(st.lists(st.integers(-1, 9), min_size=requests, max_size=requests))
        )
    if draw(st.booleans()):
        values["counts"] = Values.literal(5, 7)
    sizes = {
        "num_requests": requests,
        "num_tokens": tokens,
        "page_size_tokens": page_size,
        "num_pages": pages,
        "table_width": width,
        "table_row_stride": draw(st.integers(0, 8)),
        "page_stride_bytes": element * draw(st.integers(0, 30)),
        "slot_stride_bytes": element * draw(st.integers(0, 8)),
        "dst_rows": tokens + draw(small),
        "dst_row_stride_bytes": entry + element * draw(st.integers(0, 2)),
        "entry_bytes": entry,
        "element_bytes": element,
        "has_terminal": terminal,
    }
    return Case("cp_gather_cache", sizes, values, seed=draw(st.integers(0, 2**64 - 1)))


def assert_same(fast: Expectation, loop: Expectation) -> None:
    assert fast.case_class == loop.case_class
    assert fast.refusals == loop.refusals
    assert fast.footprints == loop.footprints
    assert fast.counts == loop.counts
    assert bool(fast.hostile) == (fast.case_class is CaseClass.HOSTILE)
    assert fast.expected.keys() == loop.expected.keys()
    for name, runs in loop.expected.items():
        assert np.array_equal(fast.expected[name].offsets, runs.offsets)
        assert np.array_equal(fast.expected[name].values, runs.values)
        mine, theirs = fast.expected[name].contested, runs.contested
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert np.array_equal(mine.offsets, theirs.offsets)
            assert np.array_equal(mine.values, theirs.values)
            assert mine.element_bytes == theirs.element_bytes


@settings(max_examples=500, deadline=None)
@given(small_cases())
def test_vectorised_equals_loop(case: Case) -> None:
    """The fast expectation is the loop's, byte for byte and set for set."""
    plan = OPERATION.plan(case)
    assert_same(OPERATION.expect(plan), OPERATION.expect_by_loop(plan))


@settings(max_examples=250, deadline=None)
@given(small_cases())
def test_torch_equals_loop(case: Case) -> None:
    """Strided torch tensors gather the bytes that the loop gathers."""
    plan = OPERATION.plan(case)
    runs = OPERATION.expect_by_loop(plan).expected["dst"]
    by_loop = {
        at: value.tobytes() for at, value in zip(runs.offsets.tolist(), runs.values, strict=True)
    }
    assert OPERATION.expected_by_torch(plan) == {"dst": by_loop}


def _page_ids(case: Case) -> list[int]:
    assert isinstance(OPERATION, GatherOperation)
    plan = OPERATION.plan(case)
    pages = OPERATION.pages(plan, OPERATION.row_map(plan))
    page_ids: list[int] = pages.page_id[pages.in_table].tolist()
    return page_ids


def _contested_rows(case: Case) -> list[int]:
    contested = OPERATION.expect(OPERATION.plan(case)).expected["dst"].contested
    return [] if contested is None else contested.offsets.tolist()


def _hostile(case: Case, words: str) -> bool:
    return any(words in text for text in OPERATION.expect(OPERATION.plan(case)).hostile)


CORNERS: dict[str, Callable[[Case], bool]] = {
    "padding page": lambda case: -1 in _page_ids(case),
    "negative page": lambda case: -2 in _page_ids(case),
    "page past the pool": lambda case: 7 in _page_ids(case),
    "column past the row": lambda case: _hostile(case, "reaches logical page"),
    "negative seq_start": lambda case: _hostile(case, "has rows and seq_starts"),
    "negative start": lambda case: _hostile(case, "is negative"),
    "two claimants": lambda case: len(set(_contested_rows(case))) < len(_contested_rows(case)),
    "in contract with rows": lambda case: (
        OPERATION.expect(OPERATION.plan(case)).case_class is CaseClass.IN_CONTRACT
        and len(_page_ids(case)) > 2
    ),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_small_cases_reach_the_corner(corner: str) -> None:
    """The equalities above are worth as much as the cases that they are tried on."""
    quickly = settings(max_examples=500, database=None, phases=[Phase.generate])
    find(small_cases(), CORNERS[corner], settings=quickly)
