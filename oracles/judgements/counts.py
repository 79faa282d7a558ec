"""counts: a launch adds exactly the padding and skipped pages to its counter pair."""

from __future__ import annotations

import numpy as np

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import Launch
from pagefuzz.oracles.verdict import Failure

NAMES = ("padding", "skipped")


class CountsJudgement(Judgement):
    name = "counts"
    unit = "counters"
    summary = "padding and skipped pages are added to the counters, each once"

    def applies(self, run: Run) -> bool:
        return has_counts(run.plan, run.expectation) and bool(run.finished)

    def judge(self, run: Run) -> Judged:
        counts = run.expectation.counts
        assert counts is not None
        failures = []
        for launch in run.finished:
            rose = rises(launch)
            for index, expected in enumerate((counts.padding, counts.skipped)):
                if rose[index] != expected:
                    means = f"one count for each {run.operation.counted[index]}"
                    failures.append(self._failure(index, rose[index], expected, means))
        return Judged(tuple(failures), 2 * len(run.finished))

    def _failure(self, index: int, rise: int, expected: int, means: str) -> Failure:
        amount = "too little" if rise < expected else "too much"
        return Failure(
            self.name,
            f"the {NAMES[index]} counter rises {amount}",
            (NAMES[index], amount),
            {
                "access": f"counts[{index}] ({NAMES[index]}) rose by {rise} ({rise:#x}), "
                f"expected {expected} ({expected:#x})",
                "means": means,
            },
        )


def has_counts(plan: Plan, expectation: Expectation) -> bool:
    """Whether a case has counters, and the contract fixes what is added to them."""
    counters = plan.buffers.get("counts")
    return expectation.counts is not None and counters is not None and not counters.is_null


def rises(launch: Launch) -> list[int]:
    """By how much each counter rose, as a signed 64-bit difference; 0 where nothing changed."""
    pair = np.zeros((2, 16), dtype=np.uint8)
    for chunk in launch.chunks.get("counts", ()):
        begin, end = max(chunk.offset_bytes, 0), min(chunk.offset_bytes + chunk.before.size, 16)
        if begin < end:
            there = slice(begin - chunk.offset_bytes, end - chunk.offset_bytes)
            pair[0, begin:end], pair[1, begin:end] = chunk.before[there], chunk.after[there]
    before, after = pair.view(np.int64)
    with np.errstate(over="ignore"):
        rose: list[int] = (after - before).tolist()
    return rose
