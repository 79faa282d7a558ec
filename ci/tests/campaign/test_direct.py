"""What fails in a related launch alone is told as that launch, if that fails by itself."""

from __future__ import annotations

from dataclasses import replace

from pagefuzz.harness.campaign.direct import directly
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import CaseClass, Failure, Outcome, Verdict
from pagefuzz.strategies.reported import examples_for

CASE = replace(examples_for("copy_blocks")["34-cycle"], relations=("restriding",))


def failed(judgement: str) -> Verdict:
    failure = Failure(judgement, "cache changes", ("cache",), {})
    return Verdict(Outcome.FAILED, CaseClass.IN_CONTRACT, failures=(failure,))


CLEAN = Verdict(Outcome.CLEAN, CaseClass.IN_CONTRACT)


def test_the_launch_that_fails_by_itself_is_the_case() -> None:
    """It has the other strides, and names no relation."""
    judged: list[Case] = []

    def judge(case: Case) -> Verdict:
        judged.append(case)
        return failed("bounds")

    case, verdict = directly(CASE, failed("restriding"), judge)
    assert judged == [case]
    assert case.relations == ()
    assert case.sizes["page_stride_bytes"] != CASE.sizes["page_stride_bytes"]
    assert verdict == failed("bounds")


def test_what_only_the_comparison_shows_stays_as_it_is() -> None:
    """Such as what is kept from launch to launch."""
    found = directly(CASE, failed("restriding"), lambda _: CLEAN)
    assert found == (CASE, failed("restriding"))


def test_other_failures_are_not_judged_again() -> None:
    """Nor what passes, nor relations that no case can say."""

    def judge(case: Case) -> Verdict:
        raise AssertionError

    for verdict in (failed("bounds"), failed("renaming"), CLEAN):
        assert directly(CASE, verdict, judge) == (CASE, verdict)
