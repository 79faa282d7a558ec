"""From drawn cases of cp_gather_indexer_k_quant_cache to verdicts on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings

from pagefuzz.harness.check import Checker
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.registry import concerned, operation
from pagefuzz.oracles.verdict import CaseClass, Outcome
from pagefuzz.strategies.indexer_gathers import REASONS, surface
from pagefuzz.strategies.refusals import lies_by_reason
from pagefuzz.strategies.registry import cases_for
from pagefuzz.strategies.reported import examples_for

OPERATION = "cp_gather_indexer_k_quant_cache"


@pytest.fixture(scope="module", params=["page", "token"])
def checker(request: pytest.FixtureRequest) -> Iterator[Checker]:
    with Checker(OPERATION, f"bundled:{request.param}") as made:
        yield made


def test_the_schedules_are_silent_on_drawn_cases(checker: Checker) -> None:
    """250 cases of every class, overflow scale among them: nothing fails, every judgement looks."""
    outcomes: Counter[tuple[CaseClass, Outcome]] = Counter()
    looked: Counter[str] = Counter()

    @seed(7)
    @settings(
        max_examples=250,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases_for(OPERATION, hostile=True, refused=True))
    def run(case: Case) -> None:
        verdict = checker.check(case)
        assert verdict.outcome is Outcome.CLEAN, (case.dumps(), verdict.failures)
        outcomes[verdict.case_class, verdict.outcome] += 1
        looked.update(verdict.checked)

    run()
    assert {case_class for case_class, _ in outcomes} == set(CaseClass)
    assert set(looked) == set(concerned(operation(OPERATION), frozenset({"checked"})))
    assert checker.deaths == 0


def test_every_lie_is_refused_by_the_launchers(checker: Checker) -> None:
    """Each reason, told in each way about one case with rows and every optional buffer."""
    case = find(
        cases_for(OPERATION, hostile=False, refused=False),
        lambda one: {"seq_starts", "counts"} <= set(one.values) and one.sizes["num_tokens"] > 1,
        settings=settings(database=None, phases=[Phase.generate]),
    )
    lies = lies_by_reason(surface(case))
    assert set(lies) == set(REASONS)
    for told in lies.values():
        for lie in told:
            verdict = checker.check(lie.told(case))
            assert verdict.case_class is CaseClass.REFUSED, lie
            assert verdict.outcome is Outcome.CLEAN, (lie, verdict.failures)


def test_reported_cases_are_right_here(checker: Checker) -> None:
    """Reports 8, 9, 10, 14, 19, 29 and 35: what others got wrong."""
    for name, case in examples_for(OPERATION).items():
        verdict = checker.check(case)
        assert verdict.outcome is Outcome.CLEAN, (name, verdict.failures)
