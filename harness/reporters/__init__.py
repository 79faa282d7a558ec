"""Listeners to a campaign: terminal, plain lines, files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefuzz.harness.campaign.candidate import Candidate
    from pagefuzz.harness.campaign.engine import Campaign
    from pagefuzz.harness.campaign.result import UnitResult
    from pagefuzz.harness.findings import Finding


class Reporter:
    """Told what happens, in this order of first calls; does nothing by itself."""

    def begin(self, campaign: Campaign) -> None:
        """Before the first runner is started."""

    def tick(self, campaign: Campaign) -> None:
        """A few times a second."""

    def failing(self, campaign: Campaign, unit: UnitResult, candidate: Candidate) -> None:
        """A case failed in a new way; it is being minimised."""

    def finding(
        self, campaign: Campaign, unit: UnitResult, finding: Finding, path: Path | None
    ) -> None:
        """A finding is settled. `path` is None if it could not be stored."""

    def note(self, campaign: Campaign, text: str) -> None:
        """Text that was asked for (debug profile, statistics)."""

    def problem(self, campaign: Campaign, message: str, detail: str) -> None:
        """Something could not be checked."""

    def end(self, campaign: Campaign) -> None:
        """After the last runner has ended; `campaign.result` is complete."""
