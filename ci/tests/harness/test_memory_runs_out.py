"""Memory that is there for the first launches of a case and not for a related one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from ci.tests.planted import case_of, twin

from pagefuzz.harness.check import Checker
from pagefuzz.harness.memory.arena import DoesNotFitError
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import Outcome, Verdict

FULL = DoesNotFitError("dst: no memory is free")


@pytest.fixture
def full_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Exception], None]:
    """Lets the n-th fill of memory of the next case find none left."""

    def install(nth: int, error: Exception) -> None:
        fills = [0]
        fill = HostArena.fill

        def counted(arena: HostArena, value: int) -> None:
            fills[0] += 1
            if fills[0] == nth:
                raise error
            fill(arena, value)

        monkeypatch.setattr(HostArena, "fill", counted)

    return install


def checked(case: Case, subject: str, build: str = "release") -> Verdict:
    with Checker(case.operation, subject, "host", build, isolate=False) as checker:
        return checker.check(case)


@pytest.mark.parametrize("error", [FULL, MemoryError()])
def test_what_a_related_launch_has_shown_counts(full_at, error) -> None:
    """The first of five orders has failed; there is no memory for the third."""
    full_at(2 + 3, error)
    case = replace(case_of("missing-barrier"), relations=("order",))
    verdict = checked(case, twin("missing-barrier"))
    assert verdict.outcome is Outcome.FAILED
    assert "order" in {failure.judgement for failure in verdict.failures}
    assert verdict.launches == 2 + 2


def test_what_the_first_launches_have_shown_counts(full_at) -> None:
    """There is no memory for any related launch."""
    full_at(2 + 1, FULL)
    case = replace(case_of("table-over-read"), relations=("repeat",))
    verdict = checked(case, "bundled:page-as-merged", "checked")
    assert (verdict.outcome, verdict.launches) == (Outcome.FAILED, 2)
    assert verdict.failures[0].judgement == "bounds"


@pytest.mark.parametrize(
    ("error", "said"),
    [(FULL, str(FULL)), (MemoryError(), "the case does not fit into this machine's memory")],
)
def test_what_has_shown_nothing_is_no_pass(full_at, error, said) -> None:
    """Not every launch was made: not run, and what was examined is told."""
    full_at(2 + 3, error)
    case = replace(case_of("missing-barrier"), relations=("order",))
    verdict = checked(case, "bundled:page")
    assert (verdict.outcome, verdict.not_run) == (Outcome.NOT_RUN, said)
    assert (verdict.failures, verdict.launches) == ((), 2 + 2)
    assert verdict.checked["order"] > 0


def test_without_memory_for_the_first_launches(full_at) -> None:
    """Two fills are what judgements compare: nothing is judged."""
    full_at(2, FULL)
    verdict = checked(case_of("missing-barrier"), twin("missing-barrier"))
    assert (verdict.outcome, verdict.launches) == (Outcome.NOT_RUN, 0)
