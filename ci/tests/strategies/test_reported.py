"""Reported cases say what the reports say."""

from __future__ import annotations

import numpy as np
import pytest

from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies import reported
from pagefuzz.strategies.facts import Facts
from pagefuzz.strategies.refusals import REASONS

OPERATION = "cp_gather_cache"
NAMES = sorted(reported.examples_for(OPERATION))


def facts_of(name: str) -> Facts:
    asked = operation(OPERATION)
    plan = asked.plan(reported.examples_for(OPERATION)[name])
    return Facts(plan, asked.expect(plan))


@pytest.mark.parametrize("name", NAMES)
def test_is_in_contract_but_for_the_first(name):
    """Only the report of the missing table guard needs hostile values, and shapes in use have
    them."""
    hostile = name == "1-past-last-row" or name.startswith("production-")
    expected = CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT
    assert facts_of(name).expectation.case_class is expected


def test_every_report_for_this_operation_is_there():
    """Reports 1, 3, 7, 11, 14, 23, 27, 28 and 29, and what nobody reported."""
    reports = {"1", "3", "7", "11", "14", "23", "27", "28", "29"}
    assert {name.split("-")[0] for name in NAMES} == {*reports, "many", "production"}


def test_cases_are_documented():
    """Each says in its docstring which report it restates."""
    for cases in reported._CASES.values():
        for name, case in cases.items():
            assert (case.__doc__ or "").startswith(f"Report {name.split('-')[0]}"), name


def test_operations_without_reports_have_no_examples():
    """Nothing is made up for them."""
    assert reported.examples_for("unheard_of") == {}


def test_report_1_reads_column_1024_of_the_last_row():
    """q = 1,024 is the first column past the table, in request 997 alone."""
    facts = facts_of("1-past-last-row")
    past = facts.columns >= facts.width
    assert set(facts.page_requests[past].tolist()) == {997}
    assert int(facts.columns[past].min()) == 1024
    assert facts.spans[-1].last_token == 15967 + 1831 - 997 - 1


@pytest.mark.parametrize("entry_bytes", [2304, 1152, 576])
def test_report_3_lies_on_both_sides(entry_bytes):
    """The last good row begins below 2^31 bytes, the first bad one does not."""
    good = facts_of(f"3-entry-{entry_bytes}-good").spans[0].first_row
    bad = facts_of(f"3-entry-{entry_bytes}-bad").spans[0].first_row
    assert bad == good + 1
    assert good * entry_bytes < 2**31 <= bad * entry_bytes


def test_report_3_wraps_to_early_rows():
    """The first silent row is the first whose product passes 2^32."""
    row = facts_of("3-entry-2304-silent").spans[0].first_row
    assert (row - 1) * 2304 < 2**32 <= row * 2304


@pytest.mark.parametrize(
    ("name", "elements", "page"),
    [("7-shared-pool", 2**31, 65_536), ("11-unsigned", 2**32, 262_144)],
)
def test_pools_lie_on_both_sides(name, elements, page):
    """The good page begins below the boundary, the bad one at it, in elements."""
    for side, expected in (("good", page - 1), ("bad", page)):
        facts = facts_of(f"{name}-{side}")
        assert facts.page_id.tolist() == [expected]
        offset = expected * facts.sizes["page_stride_bytes"] // facts.sizes["element_bytes"]
        assert (offset >= elements) == (side == "bad")
        assert side == "good" or offset == elements


def test_report_14_reads_columns_of_a_wider_table():
    """Rows lie 4 elements apart and have 2 columns."""
    facts = facts_of("14-column-slice")
    assert np.array_equal(facts.pages.element, [0, 1, 4, 5, 8, 9])


def test_report_29_has_empty_requests():
    """First, last, in between and all."""
    assert 0 not in facts_of("29-empty-first").live
    assert 1 not in facts_of("29-empty-last").live
    assert facts_of("29-empty-among-others").live == {0, 2}
    assert facts_of("29-all-empty").live == set()


def test_every_lie_is_told_once() -> None:
    """Before anything is drawn, each reason to refuse is reached about each buffer it can hit."""
    asked, told = operation(OPERATION), reported.lies_for(OPERATION)
    reasons: set[str] = set()
    for case in told:
        refusals = asked.refusals(asked.plan(case))
        assert refusals, case.dumps()
        reasons |= {refusal.reason for refusal in refusals}
        if case.overrides.get("has_terminal") == 2:  # a launcher that misses it has no other reason
            assert [refusal.reason for refusal in refusals] == ["has_terminal"]
    assert set(REASONS) <= reasons
    assert len(told) > 100
