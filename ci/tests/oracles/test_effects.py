"""What a report says of a forbidden access's effect is what was looked at, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.judgement import Run
from pagefuzz.oracles.judging import judge
from pagefuzz.oracles.observation import (
    AccessFault,
    CheckRecord,
    IndexFault,
    Site,
    Status,
)
from pagefuzz.oracles.verdict import Failure

MakeBench = Callable[[Case], Any]

SITE = Site("cp_gather_cache.cu", 88, (0, 0, 0), (0, 0, 0))
RECORD = CheckRecord(
    1,
    4,
    1,
    1,
    1,
    (AccessFault(1, "src", 10**6, 4, "read", SITE),),
    (IndexFault(2, "+", "int32", 1, 1, 0, SITE),),
)
RIGHT = "every row that must be written is right"
UNCHANGED = "no forbidden byte changed"


def recorded(run: Run) -> list[Failure]:
    """The failures that are given an effect: one of each judgement that records faults."""
    found = [one for one in judge(run).failures if one.judgement in ("bounds", "overflow")]
    assert len(found) == 2
    return found


def wipe(after: Mapping[str, Any]) -> None:
    after["dst"].restore(0, 300)


def scribble(after: Mapping[str, Any]) -> None:
    after["dst"].put(0, b"\x01\x02\x03\x04")


def test_of_launches_that_finished(base_case: Case, bench: MakeBench) -> None:
    """Both judgements looked, and saw nothing: both halves are said."""
    for failure in recorded(bench(base_case).run(record=RECORD, build="checked")):
        assert failure.details["effect"] == f"{RIGHT}; {UNCHANGED}"


@pytest.mark.parametrize("change", [None, wipe])
def test_of_launches_that_did_not_finish(
    base_case: Case, bench: MakeBench, change: Callable[[Mapping[str, Any]], None] | None
) -> None:
    """Nobody looked at the rows: nothing is said of them, whether they are right or not."""
    run = bench(base_case).run(change, status=Status.BARRIER_FAULT, record=RECORD, build="checked")
    for failure in recorded(run):
        assert failure.details["effect"] == UNCHANGED


def test_of_a_launch_of_two_that_did_not_finish(base_case: Case, bench: MakeBench) -> None:
    """What is right in one launch is not said of both."""
    run = bench(base_case).run(record=RECORD, build="checked")
    first, second = run.observation.launches
    launches = (first, replace(second, status=Status.BARRIER_FAULT, message="no"))
    run = replace(run, observation=replace(run.observation, launches=launches))
    assert "output" in judge(run).checked
    for failure in recorded(run):
        assert failure.details["effect"] == UNCHANGED


@pytest.mark.parametrize("change", [None, scribble])
def test_of_a_case_that_must_be_refused(
    base_case: Case, bench: MakeBench, change: Callable[[Mapping[str, Any]], None] | None
) -> None:
    """Neither judgement looks at it; what changed is said by `refusal`."""
    case = replace(base_case, overrides={"src.rank": 2})
    run = bench(case).run(change, status=Status.OK, record=RECORD, build="checked")
    assert not {"output", "untouched"} & set(judge(run).checked)
    for failure in recorded(run):
        assert "effect" not in failure.details
    if change is not None:
        changed = next(one for one in judge(run).failures if one.key == ("changed", "dst"))
        assert changed.details["effect"] == "4 bytes changed"


def test_of_what_was_seen(base_case: Case, bench: MakeBench) -> None:
    """A half that a judgement did see stays what it saw."""
    for failure in recorded(bench(base_case).run(wipe, record=RECORD, build="checked")):
        assert failure.details["effect"].startswith("17 of 17 rows wrong")
        assert failure.details["effect"].endswith(f"; {UNCHANGED}")
