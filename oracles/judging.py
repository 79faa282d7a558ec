"""Runs every judgement that applies, and makes one verdict of what they found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagefuzz.oracles.judgement import Run
from pagefuzz.oracles.observation import Launch, Status
from pagefuzz.oracles.registry import judgements
from pagefuzz.oracles.verdict import (
    CaseClass,
    Failure,
    Outcome,
    Severity,
    Verdict,
    cause_first,
)


def judge(run: Run) -> Verdict:
    """Judges all launches of a run.

    The same failure in several launches is one. Failures of a hostile case on a subject that does
    not promise containment are notes; notes alone leave the outcome clean.

    Raises `ValueError` if an observation lacks what its build promises: it must not pass unseen.
    """
    observation, expectation = run.observation, run.expectation
    if not observation.launches and observation.death is None:
        return Verdict(
            Outcome.NOT_RUN, expectation.case_class, not_run="no launch of the case was observed"
        )
    for launch in (*observation.launches, *(one.launch for one in observation.related)):
        _check_record(launch, observation.build_flags)
    found: dict[str, Failure] = {}
    checked: dict[str, int] = {}
    for name, judgement in judgements().items():
        if judgement.concerns(run.operation, observation.build_flags) and judgement.applies(run):
            judged = judgement.judge(run)
            checked[name] = judged.checked
            for failure in judged.failures:
                found.setdefault(failure.identity, failure)
    failures = cause_first(tuple(_with_effects(run, found, checked)))
    if expectation.case_class is CaseClass.HOSTILE and not run.contained:
        failures = tuple(replace(failure, severity=Severity.NOTE) for failure in failures)
    failed = any(failure.severity is Severity.FAILURE for failure in failures)
    return Verdict(
        outcome=Outcome.FAILED if failed else Outcome.CLEAN,
        case_class=expectation.case_class,
        failures=failures,
        checked=checked,
        launches=len(observation.launches)
        + len(observation.related)
        + (observation.death is not None),
        counters=expectation.counters,
    )


def _check_record(launch: Launch, flags: frozenset[str]) -> None:
    ran = launch.status in (Status.OK, Status.BARRIER_FAULT)
    if ran and launch.record is None and flags & {"checked", "ubsan"}:
        raise ValueError("a launch of a checked build came without its record")


def _with_effects(
    run: Run, found: Mapping[str, Failure], checked: Mapping[str, int]
) -> list[Failure]:
    """Gives recorded faults the effect that the other judgements saw; nothing if none looked."""
    if not (effect := _effect(run, found, checked)):
        return list(found.values())
    return [
        replace(failure, details={**failure.details, "effect": effect})
        if failure.judgement in ("bounds", "overflow")
        else failure
        for failure in found.values()
    ]


def _effect(run: Run, found: Mapping[str, Failure], checked: Mapping[str, int]) -> str:
    """What `output` and `untouched` saw. One that did not look at every launch has seen nothing
    wrong, which is not to say that nothing is."""
    failed = {failure.judgement for failure in found.values()}
    seen = [
        failure.details["effect"]
        for failure in found.values()
        if failure.judgement in ("output", "untouched") and "effect" in failure.details
    ]
    all_finished = len(run.finished) == len(run.observation.launches)
    if "output" in checked and "output" not in failed and all_finished:
        runs = run.expectation.expected.values()
        must_write = any(expected.offsets.size for expected in runs)
        seen.insert(
            0, "every row that must be written is right" if must_write else "no row must be written"
        )
    if "untouched" in checked and "untouched" not in failed:
        seen.append("no forbidden byte changed")
    return "; ".join(seen)
