"""What a campaign knows: totals a unit, findings, problems; and what they mean as an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagefuzz.harness.campaign.candidate import Candidate
from pagefuzz.harness.campaign.events import Progress
from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.findings import Finding
from pagefuzz.harness.layers import BY_NAME, Layer
from pagefuzz.harness.reporters.figures import plural
from pagefuzz.oracles.verdict import CaseClass

EXIT_CLEAN, EXIT_FINDINGS, EXIT_NOT_CHECKED = 0, 1, 2

#: From so many cases on, every judgement must have had something to examine.
ENOUGH_CASES = 100

#: Judgements that examine every case, however few there are.
_OF_EVERY_CASE = frozenset({"death", "hang"})


@dataclass
class Found:
    """A failing identity of a unit: the best case so far, and the finding once it is settled."""

    best: Candidate
    finding: Finding | None = None
    path: Path | None = None


@dataclass
class UnitResult:
    """totals, the planned number of cases (None: bound by time), and what was found.

    layers  names of the detection layers in force, which must have examined something
    """

    unit: Unit
    planned: int | None
    totals: Progress = field(default_factory=Progress)
    found: dict[str, Found] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    running: int = 0
    layers: tuple[str, ...] = ()

    @property
    def findings(self) -> list[Finding]:
        return [found.finding for found in self.found.values() if found.finding is not None]

    @property
    def examined(self) -> dict[str, tuple[int, int]]:
        """Layer -> (launches, amount), in the table's order; zeros of one that did nothing."""
        found = self.totals.layers
        return {n: found.get(n, (0, 0)) for n in BY_NAME if n in found or n in self.layers}

    def vacuous(self, judgements: Iterable[str]) -> list[str]:
        """One sentence for each thing that should have been examined and was not.

        judgements  names of those that must have had something to examine
        """
        totals = self.totals
        if totals.cases == 0:
            why = "; ".join(totals.reasons) or "no case was drawn"
            return [f"{self.unit.name}: no case ran ({why})"]
        blind = [
            name
            for name in judgements
            if not totals.checked.get(name)
            and (totals.drawn >= ENOUGH_CASES or name in _OF_EVERY_CASE)
        ]
        idle = [BY_NAME[name] for name in self.layers if self._is_idle(BY_NAME[name])]
        # A layer speaks for its judgements: one sentence for one thing. What one hears for a layer
        # that did its work is not blind, whatever else it counts.
        named = {name for layer in idle for name in layer.judgements}
        named |= {name for layer in self.layers for name in BY_NAME[layer].hears}
        texts = [layer.text for layer in idle] + [name for name in blind if name not in named]
        return [
            f"{self.unit.name}: {text} examined nothing in {plural(totals.cases, 'cases')}"
            for text in texts
        ]

    def _is_idle(self, layer: Layer) -> bool:
        """Whether a layer in force did nothing, though there was something for it to do."""
        totals = self.totals
        launches, amount = totals.layers.get(layer.name, (0, 0))
        in_contract = totals.classes.get(CaseClass.IN_CONTRACT, 0)
        enough = totals.drawn >= ENOUGH_CASES or (
            layer.enough is not None and in_contract >= layer.enough
        )
        return enough and not (launches and amount)


@dataclass
class Result:
    """units by name. problems are those of no single unit; interrupted by Ctrl-C, SIGTERM or the
    end of the terminal."""

    units: Mapping[str, UnitResult]
    backend: str = "host"
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        return [finding for unit in self.units.values() for finding in unit.findings]

    @property
    def all_problems(self) -> list[str]:
        own = [problem for unit in self.units.values() for problem in unit.problems]
        return list(dict.fromkeys((*self.problems, *own)))

    @property
    def totals(self) -> Progress:
        totals = Progress()
        for unit in self.units.values():
            totals.add(unit.totals)
        return totals

    @property
    def exit_code(self) -> int:
        """Findings count whatever else happened; short of them, all must have been checked."""
        if self.findings:
            return EXIT_FINDINGS
        return EXIT_NOT_CHECKED if self.all_problems or self.interrupted else EXIT_CLEAN
