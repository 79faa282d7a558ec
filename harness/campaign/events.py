"""What a runner process tells the command line process: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import Verdict


@dataclass
class Progress:
    """Work done since the runner's last `Progress`.

    cases     judged, minimising not included
    not_run   drawn, but not judged (`reasons` says why): never a pass
    shrinks   further cases that were judged to minimise a finding
    launches  of all of them
    seconds   spent on drawing and judging `cases`
    checked   judgement -> amount it examined, all of them
    layers    detection layer -> (launches, amount) that it examined, all of them
    memory    the most that one worker has held until now
    """

    cases: int = 0
    not_run: int = 0
    shrinks: int = 0
    launches: int = 0
    seconds: float = 0.0
    checked: dict[str, int] = field(default_factory=dict)
    layers: dict[str, tuple[int, int]] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    memory: MemoryUse = field(default_factory=MemoryUse)

    @property
    def drawn(self) -> int:
        """Cases, whether they could be run or not."""
        return self.cases + self.not_run

    def add(self, other: Progress) -> None:
        self.cases += other.cases
        self.not_run += other.not_run
        self.shrinks += other.shrinks
        self.launches += other.launches
        self.seconds += other.seconds
        self.memory = self.memory.most(other.memory)
        for mine, theirs in (
            (self.checked, other.checked),
            (self.classes, other.classes),
            (self.reasons, other.reasons),
        ):
            for name, amount in theirs.items():
                mine[name] = mine.get(name, 0) + amount
        self.add_layers(other.layers)

    def add_layers(self, examined: Mapping[str, tuple[int, int]]) -> None:
        for name, (launches, amount) in examined.items():
            mine = self.layers.get(name, (0, 0))
            self.layers[name] = (mine[0] + launches, mine[1] + amount)

    @property
    def cases_a_second(self) -> float:
        return self.cases / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Failing:
    """A case failed: a new identity, or a simpler case of a known one. Not minimised yet."""

    case: Case
    verdict: Verdict


@dataclass(frozen=True)
class Settled:
    """A finding: minimised as far as time allowed, and repeated.

    minimised  False if time ran out first
    repeats    how many of `runs` further runs of the case failed in the same way
    repeats_hang_after_s, not_minimised  as of a `Finding`
    """

    case: Case
    verdict: Verdict
    minimised: bool
    repeats: int
    runs: int
    repeats_hang_after_s: float | None = None
    not_minimised: str = ""


@dataclass(frozen=True)
class Claim:
    """The other way round: another runner of the unit works on this identity.

    rank  of the case class that it was seen in (`candidate.CLASS_RANK`)
    """

    identity: str
    rank: int


@dataclass(frozen=True)
class Unended:
    """A launch of the case may hang: it had lasted for `seconds`, far longer than others, when it
    was ended because time was up."""

    case: Case
    seconds: float


@dataclass(frozen=True)
class Note:
    """Text for a person who asked for it (debug profile, statistics)."""

    text: str


@dataclass(frozen=True)
class Problem:
    """Something that was asked for could not be done. `detail` is for a bug report.

    fatal  the runner gives up, and others of its unit would too
    """

    message: str
    detail: str = ""
    fatal: bool = True


@dataclass(frozen=True)
class Done:
    """The runner's last word: "finished", "time is up", "stopped", "a finding", "a problem"."""

    reason: str


Event = Progress | Failing | Settled | Unended | Note | Problem | Done

_BY_NAME: Mapping[str, type[Event]] = {
    kind.__name__: kind for kind in (Progress, Failing, Settled, Unended, Note, Problem, Done)
}


def encode(event: Event) -> bytes:
    data: dict[str, Any]
    if isinstance(event, Failing | Settled):
        data = {**vars(event), "case": event.case.to_json(), "verdict": event.verdict.to_json()}
    elif isinstance(event, Unended):
        data = {**vars(event), "case": event.case.to_json()}
    else:
        data = asdict(event)
    return json.dumps({"event": type(event).__name__, **data}).encode() + b"\n"


def decode(line: bytes) -> Event:
    """Raises `ValueError` (or a subclass) on a line that is no event, such as a torn one."""
    try:
        data = json.loads(line)
        kind = _BY_NAME[data.pop("event")]
        if "case" in data:
            data["case"] = Case.from_json(data["case"])
        if "verdict" in data:
            data["verdict"] = Verdict.from_json(data["verdict"])
        if "memory" in data:
            data["memory"] = MemoryUse(**data["memory"])
        if "layers" in data:
            data["layers"] = {name: tuple(one) for name, one in data["layers"].items()}
        return kind(**data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an event: {line[:80]!r}") from error
