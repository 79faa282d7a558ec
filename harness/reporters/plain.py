"""Lines of text, for CI and files: one every few seconds, and one for all that happens."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagefuzz.harness.reporters import Reporter
from pagefuzz.harness.reporters.ending import ending
from pagefuzz.harness.reporters.figures import beside, duration, plural

if TYPE_CHECKING:
    from pagefuzz.harness.campaign.candidate import Candidate
    from pagefuzz.harness.campaign.engine import Campaign
    from pagefuzz.harness.campaign.result import UnitResult
    from pagefuzz.harness.findings import Finding

LINE_EVERY_S = 10.0


def progress_line(campaign: Campaign) -> str:
    """Time, cases, rate, launches, findings, time left."""
    totals = campaign.result.totals
    minimising = totals.shrinks if any(u.running for u in campaign.result.units.values()) else 0
    parts = [
        f"{duration(campaign.elapsed_s):>6}",
        plural(totals.cases, "cases"),
        f"{totals.cases_a_second:.0f}/s/core",
        plural(totals.launches, "launches"),
        plural(len(campaign.result.findings), "findings"),
    ]
    if minimising:
        parts.append(f"{minimising:,} to minimise")
    if totals.not_run:
        parts.append(f"{totals.not_run:,} not run")
    if campaign.time_s is not None:
        parts.append(f"{duration(campaign.time_s - campaign.elapsed_s)} left")
    return "  ".join(parts)


class PlainReporter(Reporter):
    """header: lines printed first. judgement_units: what each judgement counts, by name."""

    def __init__(
        self, header: Sequence[str], judgement_units: Mapping[str, str], width: int = 80
    ) -> None:
        self._header = header
        self._judgement_units = judgement_units
        self._width = width
        self._next_line_s = LINE_EVERY_S
        self._shown: set[tuple[str, str]] = set()

    def _print(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, campaign: Campaign) -> None:
        for line in self._header:
            self._print(line)
        self._print("")

    def tick(self, campaign: Campaign) -> None:
        if campaign.elapsed_s >= self._next_line_s:
            self._next_line_s = campaign.elapsed_s + LINE_EVERY_S
            self._print(progress_line(campaign))

    def failing(self, campaign: Campaign, unit: UnitResult, candidate: Candidate) -> None:
        failure = candidate.verdict.failures[0]
        what = f"failing  {failure.judgement}: {failure.title}"
        self._print("\n".join(beside(what, f"({unit.unit.name})", self._width)))

    def finding(
        self, campaign: Campaign, unit: UnitResult, finding: Finding, path: Path | None
    ) -> None:
        if (unit.unit.name, finding.identity) in self._shown:
            self._print("\nA better case of what was found above, in place of it:")
        self._shown.add((unit.unit.name, finding.identity))
        self._print(f"\n{finding.text(self._width, path)}\n")

    def note(self, campaign: Campaign, text: str) -> None:
        self._print(text)

    def problem(self, campaign: Campaign, message: str, detail: str) -> None:
        print(f"pagefuzz: {message}", file=sys.stderr, flush=True)
        if detail:
            print(detail, file=sys.stderr, flush=True)

    def end(self, campaign: Campaign) -> None:
        self._print("\n" + ending(campaign.result, self._judgement_units, self._width))
