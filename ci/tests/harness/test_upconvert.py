"""The fp8 up-convert from a case to a verdict: correct schedules are silent, faults are found."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from pagefuzz.harness.build import KERNELS
from pagefuzz.harness.check import Checker, check
from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.verdict import CaseClass, Outcome, Verdict
from pagefuzz.strategies.classes import CLASSES
from pagefuzz.strategies.operations.cp_gather_and_upconvert_fp8_kv_cache import cases
from pagefuzz.strategies.reported import examples_for
from pagefuzz.strategies.scales import SPECIAL

NAME = "cp_gather_and_upconvert_fp8_kv_cache"


def judged(schedule: str, count: int, seed_value: int) -> list[tuple[Case, Verdict]]:
    """Verdicts of reported cases and of `count` drawn ones."""
    found: list[Case] = list(examples_for(NAME).values())

    @seed(seed_value)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    with Checker(NAME, f"bundled:{schedule}") as checker:
        verdicts = [(case, checker.check(case)) for case in found]
        assert checker.deaths == 0
    return verdicts


@pytest.mark.parametrize("schedule", ["page", "token"])
def test_contained_schedules_are_silent(schedule: str) -> None:
    """No judgement fails on 300 drawn cases and the reported ones, all classes among them."""
    verdicts = judged(schedule, 300, seed_value=11)
    for case, verdict in verdicts:
        assert verdict.outcome is Outcome.CLEAN, (case.dumps(), verdict.failures, verdict.not_run)
    classes = Counter(verdict.case_class for _, verdict in verdicts)
    assert len(classes) == len(CLASSES)
    assert min(classes.values()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["page", "token"])
def test_contained_schedules_stay_silent(schedule: str) -> None:
    """The same on 5,000 cases."""
    for case, verdict in judged(schedule, 5000, seed_value=12):
        assert verdict.outcome is Outcome.CLEAN, (case.dumps(), verdict.failures, verdict.not_run)


def test_the_merged_schedule_has_the_reported_fault() -> None:
    """Report 2: right in contract, a read past the table's last row where a length goes too far."""
    with Checker(NAME, "bundled:page-as-merged") as checker:
        for name, case in examples_for(NAME).items():
            verdict = checker.check(case)
            if name == "2-past-the-table":
                first = verdict.failures[0]
                assert (first.judgement, first.title) == ("bounds", "read past block_table")
                assert verdict.case_class is CaseClass.HOSTILE
            elif name in ("22-rejected-row", "production-records-64"):
                # Hostile, which this form does not contain.
                assert not verdict.clean
            else:
                assert verdict.clean, (name, verdict.failures)


def test_the_token_twin_without_a_width_guard_is_found() -> None:
    """The same fault in the schedule that is otherwise correct."""
    twin = KERNELS / "twins" / "upconvert-table-width-unguarded.toml"
    verdict = check(examples_for(NAME)["2-past-the-table"], f"twin:{twin}")
    assert verdict.failures[0].title == "read past block_table"


# How wide the schedules load and store follows from where the buffers lie.
OFFSETS = [(0, 0, 656, 1152), (4, 0, 660, 1152), (8, 4, 656, 1156), (4, 2, 656, 1154)]


@pytest.mark.parametrize("schedule", ["page", "token", "page-as-merged"])
def test_every_width_takes_every_special_scale(schedule: str) -> None:
    """All codes under NaN, infinite, zero, negative and subnormal scales, beside the rope."""
    with Checker(NAME, f"bundled:{schedule}") as checker:
        for src, dst, slot, row in OFFSETS:
            for start in range(0, len(SPECIAL), 4):
                case = Case(
                    NAME,
                    {
                        "num_requests": 2,
                        "num_tokens": 14,
                        "page_size_tokens": 8,
                        "num_pages": 3,
                        "table_width": 2,
                        "table_row_stride": 2,
                        "page_stride_bytes": 8 * slot,
                        "slot_stride_bytes": slot,
                        "dst_rows": 14,
                        "dst_row_stride_bytes": row,
                        "has_terminal": 0,
                    },
                    {
                        "starts": Values.literal(1, 8),
                        "seq_starts": Values.literal(3, 0),
                        "block_table": Values.literal(2, 0, 1, 1),
                        "src": Values.literal(*SPECIAL[start : start + 4]),
                    },
                    {"src": Placement(src), "dst": Placement(dst)},
                    seed=start,
                )
                verdict = checker.check(case)
                assert verdict.clean, verdict.failures
