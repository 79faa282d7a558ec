"""Campaigns on a fake subject, in real runner processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pagefuzz.harness.campaign.engine import Campaign
from pagefuzz.harness.campaign.plan import Options, Unit
from pagefuzz.harness.campaign.result import Result
from pagefuzz.harness.reporters import Reporter

FAKES = Path(__file__).parent / "fakes"
JUDGEMENTS = ("death", "output", "bounds")
LAYERS = ("red zones", "guard pages", "checked build")


@dataclass
class Listener(Reporter):
    """Keeps what it is told. `on_tick` is called with each tick's campaign."""

    problems: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    on_tick: Callable[[Campaign], None] = lambda campaign: None

    def tick(self, campaign: Campaign) -> None:
        self.on_tick(campaign)

    def problem(self, campaign: Campaign, message: str, detail: str) -> None:
        self.problems.append(message)
        self.details.append(detail)

    def note(self, campaign: Campaign, text: str) -> None:
        self.notes.append(text)


@dataclass
class Ran:
    result: Result
    listener: Listener
    folder: Path

    @property
    def identities(self) -> set[str]:
        return {finding.identity for finding in self.result.findings}


RunCampaign = Callable[..., Ran]


@pytest.fixture
def run_campaign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunCampaign:
    """`run_campaign({"faults": ...}, cases=300, keep_going=True, ...)`; see fakes/fake_parts.py."""
    python_path = os.pathsep.join(filter(None, (str(FAKES), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", python_path)

    def run(
        subject: dict[str, Any],
        *,
        subjects: tuple[str, ...] = ("bundled:fake",),
        cases: int | None = 200,
        time_s: float | None = None,
        jobs: int = 1,
        on_tick: Callable[[Campaign], None] = lambda campaign: None,
        **options: Any,
    ) -> Ran:
        monkeypatch.setenv("FAKE_SUBJECT", json.dumps(subject))
        listener = Listener(on_tick=on_tick)
        settings = {
            "backend": "host",
            "build": "checked",
            "seed": 0,
            "shrink_s": 10.0,
            "journal": str(tmp_path / "journal.jsonl"),
            "parts": "fake_parts",
            **options,
        }
        campaign = Campaign(
            [Unit("fake", name, hostile=True) for name in subjects],
            Options(**settings),
            cases=None if time_s is not None else cases,
            time_s=time_s,
            jobs=jobs,
            findings=tmp_path / "findings",
            reporters=[listener],
            judgements={f"fake/{name}": JUDGEMENTS for name in subjects},
            layers={f"fake/{name}": LAYERS for name in subjects},
        )
        return Ran(campaign.run(), listener, tmp_path)

    return run
