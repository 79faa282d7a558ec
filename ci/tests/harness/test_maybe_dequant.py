"""gather_and_maybe_dequant_cache from a case to a verdict: silent kernels, named faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from pagefuzz import check
from pagefuzz.harness.check import Checker
from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.verdict import Outcome
from pagefuzz.strategies.registry import cases_for
from pagefuzz.strategies.reported import examples_for

OPERATION = "gather_and_maybe_dequant_cache"
TWINS = Path(__file__).parent.parent / "twins"


@cache
def drawn(count: int) -> list[Case]:
    found: list[Case] = []

    @seed(11)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases_for(OPERATION, hostile=True, refused=True, limit_bytes=2**34))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def planted() -> Iterator[tuple[str, Case]]:
    for path in sorted(TWINS.glob("maybe-dequant-*.json")):
        yield path.stem, Case.from_json(json.loads(path.read_text())["case"])


@pytest.mark.parametrize("subject", ["bundled:page", "bundled:token"])
def test_correct_kernels_are_silent(subject: str) -> None:
    """On drawn cases of every class, on reported ones and on those that show planted faults."""
    with Checker(OPERATION, subject, "host", "checked") as checker:
        cases = [*drawn(150), *examples_for(OPERATION).values(), *(case for _, case in planted())]
        for case in cases:
            verdict = checker.check(case)
            assert verdict.outcome is Outcome.CLEAN, (case, verdict.failures)
        assert checker.deaths == 0


def slice_case(case: Case) -> Case:
    """Two requests over rows of two columns in a wider table; the first runs past its row."""
    return Case(
        OPERATION,
        {
            **case.sizes,
            "num_requests": 2,
            "num_tokens": 8,
            "dst_rows": 8,
            "table_width": 2,
            "table_row_stride": 3,
        },
        {
            **case.values,
            "block_table": Values("identity"),
            "starts": Values.literal(0, 7, 8),
        },
        seed=1,
    )


def test_the_merged_form_guards_with_the_stride() -> None:
    """Right where the table is dense and all is in contract; in a column slice it reads past."""
    cases = dict(planted())
    good = cases["maybe-dequant-wrong-format"]
    with Checker(OPERATION, "bundled:page-as-merged", "host", "checked") as checker:
        assert checker.check(good).clean
        dense = examples_for(OPERATION)["4-past-the-row"]
        assert {f.judgement for f in checker.check(dense).failures} == {"counts"}
        failures = checker.check(slice_case(good)).failures
        assert failures[0].judgement == "bounds"
        assert failures[0].key[:2] == ("read", "block_table")


@pytest.mark.slow
def test_bundled_twins_fail_on_their_reports() -> None:
    """Report 4 is a read past the row; report 28 shows at 241 to 255 tokens, not at 240 or 256."""
    examples = examples_for(OPERATION)
    verdict = check(examples["4-past-the-row"], "twin:maybe-dequant-table-unguarded")
    assert verdict.failures[0].judgement == "bounds"
    with Checker(OPERATION, "twin:maybe-dequant-sixteen-pages", "host", "release") as checker:
        for length, fails in ((240, False), (241, True), (255, True), (256, False)):
            verdict = checker.check(examples[f"28-{length}-tokens"])
            assert [f.judgement for f in verdict.failures] == ["output"] * fails
            assert not fails or "not written" in verdict.failures[0].title


def test_digests_of_both_schedules_agree() -> None:
    """NaNs and all."""
    digests = []
    for subject in ("bundled:page", "bundled:token"):
        with Checker(OPERATION, subject, build="release") as checker:
            digests.append([checker.check_fixed_bytes(case)[1] for case in drawn(150)[:60]])
    assert digests[0] == digests[1]
