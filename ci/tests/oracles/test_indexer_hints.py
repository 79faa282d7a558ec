"""The oracle of the hinted indexer gather: its references agree; what a hint is worth, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from ci.tests.oracles.test_indexer_gather import assert_torch_equals_loop, small_cases
from ci.tests.oracles.test_references import assert_same
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, CaseError, Placement, Values
from pagefuzz.oracles.expectation import Counts
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass

NAME = "cp_gather_indexer_k_quant_cache_hinted"
OPERATION = operation(NAME)
PLAIN = operation("cp_gather_indexer_k_quant_cache")


@st.composite
def hinted_cases(draw: st.DrawFn) -> Case:
    """The cases of the plain operation, with right hints, some wrong ones, or any at all."""
    case = draw(small_cases())
    tokens, requests = case.sizes["num_tokens"], case.sizes["num_requests"]
    hints = st.integers(-1, requests + 1)
    wrong = {}
    if tokens:
        most = draw(st.sampled_from([0, 0, 2, tokens]))
        wrong = draw(st.dictionaries(st.integers(0, tokens - 1), hints, max_size=most))
    return hinted(case, Values("owners", {}, wrong))


def hinted(case: Case, hints: Values) -> Case:
    return replace(case, operation=NAME, values={**case.values, "token_to_seq": hints})


@settings(max_examples=100, deadline=None)
@given(hinted_cases())
def test_vectorised_equals_loop(case: Case) -> None:
    """The fast expectation is the loop's, byte for byte and set for set."""
    plan = OPERATION.plan(case)
    assert_same(OPERATION.expect(plan), OPERATION.expect_by_loop(plan))


@settings(max_examples=50, deadline=None)
@given(hinted_cases())
def test_torch_equals_loop(case: Case) -> None:
    """Tensors gather the bytes that the loop gathers."""
    assert_torch_equals_loop(OPERATION.plan(case))


CORNERS: dict[str, Callable[[Case], bool]] = {
    "in contract, a wrong hint of an uncovered row": lambda case: (
        _sound(case) > 2 and any(v >= 0 for v in case.values["token_to_seq"].edits.values())
    ),
    "a wrong hint, other rows exact": lambda case: (
        (e := OPERATION.expect(OPERATION.plan(case))).case_class is CaseClass.HOSTILE
        and any("token_to_seq" in sentence for sentence in e.hostile)
        and e.expected["dst_k"].offsets.size > 2
    ),
    "counts lost with a hint": lambda case: _lost(case) > 0,
}


def _sound(case: Case) -> int:
    expectation = OPERATION.expect(OPERATION.plan(case))
    sound = expectation.case_class is CaseClass.IN_CONTRACT
    return expectation.expected["dst_k"].offsets.size if sound else 0


def _lost(case: Case) -> int:
    plain = plain_of(case)
    mine, others = (
        one.expect(one.plan(c)).counts for one, c in ((OPERATION, case), (PLAIN, plain))
    )
    if mine is None or others is None:
        return 0
    return others.padding + others.skipped - mine.padding - mine.skipped


def plain_of(case: Case) -> Case:
    values = {name: one for name, one in case.values.items() if name != "token_to_seq"}
    return replace(case, operation=PLAIN.name, values=values)


@pytest.mark.parametrize("corner", CORNERS)
def test_small_cases_reach_the_corner(corner: str) -> None:
    """The equalities above are worth as much as the cases that they are tried on."""
    quickly = settings(max_examples=500, database=None, phases=[Phase.generate])
    find(hinted_cases(), CORNERS[corner], settings=quickly)


@settings(max_examples=40, deadline=None)
@given(small_cases())
def test_right_hints_change_nothing(case: Case) -> None:
    """With the owner as each row's hint, and no contest, it is the operation without hints."""
    mine = OPERATION.expect(OPERATION.plan(hinted(case, Values("owners"))))
    plain = PLAIN.expect(PLAIN.plan(case))
    assert mine.case_class is plain.case_class
    if plain.counts is None:
        return
    assert mine.counts == plain.counts
    for name, footprint in plain.footprints.items():
        assert mine.footprint(name) == footprint, name


# ---- by hand -------------------------------------------------------------------------------------


@pytest.fixture
def base_case() -> Case:
    """Two requests of 3 and 4 rows from row 1 on, of 9 rows; pages of 2 tokens."""
    sizes = {
        "num_requests": 2,
        "num_tokens": 9,
        "page_size_tokens": 2,
        "num_pages": 5,
        "table_width": 3,
        "table_row_stride": 3,
        "page_stride_bytes": 40,
        "dst_k_rows": 9,
        "dst_k_row_stride_bytes": 16,
        "dst_scale_rows": 9,
        "dst_scale_row_stride_bytes": 4,
        "head_dim": 16,
        "quant_block": 16,
        "page_layout": 0,
        "has_terminal": 1,
    }
    values = {
        "block_table": Values("identity"),
        "token_to_seq": Values("owners"),
        "starts": Values.literal(1, 4, 8),
        "seq_starts": Values.literal(1, 0),
        "counts": Values.literal(0, 0),
    }
    return Case(NAME, sizes, values)


def with_hints(case: Case, **edits: int) -> Case:
    """`r4=0` makes 0 the hint of row 4."""
    told = {int(name[1:]): value for name, value in edits.items()}
    return replace(case, values={**case.values, "token_to_seq": Values("owners", {}, told)})


def written(case: Case) -> list[int]:
    offsets = OPERATION.expect(OPERATION.plan(case)).expected["dst_k"].offsets
    return [int(at) // 16 for at in offsets]


def test_hints_of_uncovered_rows_mean_nothing(base_case: Case) -> None:
    """Rows 0 and 8 belong to nobody, whatever their hints say; the case is in contract."""
    case = with_hints(base_case, r0=0, r8=1)
    assert written(case) == [1, 2, 3, 4, 5, 6, 7]
    assert OPERATION.expect(OPERATION.plan(case)).case_class is CaseClass.IN_CONTRACT


@pytest.mark.parametrize("hint", [0, 2, -1, 2**31 - 1, -(2**31)])
def test_a_row_with_a_wrong_hint_is_untouched(base_case: Case, hint: int) -> None:
    """Neither written, nor is anything read for it; its page's other row is exact."""
    case = with_hints(base_case, r4=hint)
    expectation = OPERATION.expect(OPERATION.plan(case))
    assert expectation.case_class is CaseClass.HOSTILE
    assert expectation.hostile == (f"token_to_seq[4]={hint}, the row is covered by request 1",)
    assert written(case) == [1, 2, 3, 5, 6, 7]
    # Token 0 of request 1 is slot 0 of page 3; token 1 its other slot.
    read = expectation.footprint("src").may_read
    assert not read.contains(3 * 40, 3 * 40 + 16)
    assert read.contains(3 * 40 + 16, 3 * 40 + 32)
    assert expectation.counts == Counts(0, 0)


def test_a_table_entry_is_read_for_right_hints_only(base_case: Case) -> None:
    """The second page of request 1 has two rows; with both hints wrong nobody reads its entry."""
    entry = 4 * 4, 4 * 4 + 4
    for edits, readable in (({}, True), ({"r6": 0}, True), ({"r6": 0, "r7": 0}, False)):
        plan = OPERATION.plan(with_hints(base_case, **edits))
        table = OPERATION.expect(plan).footprint("block_table").may_read
        assert table.contains(*entry) is readable, edits
    assert OPERATION.expect(plan).footprint("token_to_seq").may_read.contains(0, 36)


@pytest.mark.parametrize(
    ("edits", "counts"),
    [({}, Counts(1, 2)), ({"r4": 0}, Counts(0, 2)), ({"r5": 0}, Counts(1, 2)), ({"r1": 7}, None)],
)
def test_the_first_row_counts(base_case: Case, edits: dict[str, int], counts: Counts) -> None:
    """Request 0 has a negative start, request 1 a padding page and then one past the table."""
    values = {
        **base_case.values,
        "seq_starts": Values.literal(-5, 0),
        "block_table": Values("literal", {"values": (0, -1)}),
    }
    case = replace(base_case, values=values).with_sizes(table_width=1, table_row_stride=1)
    expectation = OPERATION.expect(OPERATION.plan(with_hints(case, **edits)))
    assert expectation.counts == (counts or Counts(1, 1))
    assert written(with_hints(case, **edits)) == []


def test_hints_are_refused_like_every_index_vector(base_case: Case) -> None:
    """Too short, null, of another type, misaligned, under a destination."""
    lies = {
        "extent": {"token_to_seq.extent_bytes": 35},
        "null_pointer": {"token_to_seq.data": 0},
        "dtype": {"token_to_seq.dtype": 6},
        "rank": {"token_to_seq.rank": 2},
    }
    for reason, overrides in lies.items():
        plan = OPERATION.plan(replace(base_case, overrides=overrides))
        assert {refusal.reason for refusal in OPERATION.refusals(plan)} == {reason}
    moved = {
        "alignment": {"token_to_seq": Placement(offset_bytes=2)},
        "overlap": {"dst_k": Placement(over=("token_to_seq", 0))},
    }
    for reason, placements in moved.items():
        plan = OPERATION.plan(replace(base_case, placements=placements))
        assert {refusal.reason for refusal in OPERATION.refusals(plan)} == {reason}
    assert not OPERATION.refusals(OPERATION.plan(base_case))


@pytest.mark.parametrize(
    ("hints", "complaint"),
    [
        (None, "needs 'token_to_seq'; it is not optional"),
        (Values.literal(0), "token_to_seq needs 9 values"),
        (Values("owners", {}, {9: 0}), "edit at element 9, it has 9 elements"),
        (Values("owners", {}, {0: 2**31}), r"token_to_seq\[0\]=2147483648 must lie in"),
        (Values("identity"), "cannot have recipe 'identity'"),
    ],
)
def test_malformed_hints_are_one_sentence(
    base_case: Case, hints: Values | None, complaint: str
) -> None:
    """What is wrong with the hints of a case is said."""
    values = {name: one for name, one in base_case.values.items() if name != "token_to_seq"}
    if hints is not None:
        values["token_to_seq"] = hints
    with pytest.raises(CaseError, match=complaint):
        OPERATION.plan(replace(base_case, values=values))


def test_texts_speak_of_hints(base_case: Case) -> None:
    """The case on one line, and the place of a hint."""
    plan = OPERATION.plan(with_hints(base_case, r4=0))
    assert "hints owners with 1 edited" in OPERATION.describe(plan)
    assert OPERATION.locate(plan, "token_to_seq", 16) == "element 4 of 9"
