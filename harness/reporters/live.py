"""A table that changes in place, for a person at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pagefuzz.harness.reporters.figures import duration
from pagefuzz.harness.reporters.plain import PlainReporter, progress_line

if TYPE_CHECKING:
    from pagefuzz.harness.campaign.engine import Campaign
    from pagefuzz.harness.campaign.result import UnitResult


class LiveReporter(PlainReporter):
    """As `PlainReporter`, with the progress in place of its lines."""

    def __init__(
        self, header: Sequence[str], judgement_units: Mapping[str, str], console: Console
    ) -> None:
        super().__init__(header, judgement_units, console.width)
        self._console = console
        self._live: Live | None = None

    def _print(self, text: str) -> None:
        # Above the table, if there is one. Lines are as long as they are meant to be: a path that
        # is folded cannot be pasted.
        self._console.print(Text(text), soft_wrap=True)

    def begin(self, campaign: Campaign) -> None:
        super().begin(campaign)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # what goes to a file disturbs no table
        )
        self._live.start()

    def tick(self, campaign: Campaign) -> None:
        if self._live is not None:
            self._live.update(self._picture(campaign), refresh=True)

    def problem(self, campaign: Campaign, message: str, detail: str) -> None:
        if not sys.stderr.isatty():
            super().problem(campaign, message, detail)
            return
        # Standard error is redirected to there, but folded.
        self._print("\n".join(filter(None, (f"pagefuzz: {message}", detail))))

    def end(self, campaign: Campaign) -> None:
        if self._live is not None:
            self._live.stop()
        super().end(campaign)

    def _picture(self, campaign: Campaign) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("operation/subject", overflow="fold", ratio=1)
        for name in ("cases", "cases/s/core", "launches", "findings", "now"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, unit in campaign.result.units.items():
            totals = unit.totals
            cases = f"{totals.cases:,}" + (f"/{unit.planned:,}" if unit.planned else "")
            findings = len(unit.findings)
            table.add_row(
                name,
                cases,
                f"{totals.cases_a_second:.0f}",
                f"{totals.launches:,}",
                Text(str(findings), style="bold red" if findings else ""),
                _now(campaign, unit),
            )
        return Group(table, Text(progress_line(campaign), style="dim"))


def _now(campaign: Campaign, unit: UnitResult) -> str:
    if unit.problems:
        return "problem"
    if not unit.running:
        return "waits" if not unit.totals.cases else "done"
    if any(found.finding is None for found in unit.found.values()):
        return "minimises"
    if campaign.time_s is not None:
        return f"{duration(campaign.time_s - campaign.elapsed_s)} left"
    return "runs"
