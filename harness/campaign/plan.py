"""What a campaign runs: units, cut into the shards that runner processes work off."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

from pagefuzz.harness.profiles import SHARD_CASES
from pagefuzz.harness.workers.journal import new_token, path_of

#: How long a runner may take to end after its time is up, or after it was asked to stop.
GRACE_S = 15.0

#: A piece of time shorter than this would go to starting its runner.
SHORTEST_PIECE_S = 3.0

#: A unit's share shorter than this is not cut into pieces: a runner takes seconds to start, more
#: on a busy machine, so that a cut unit could get no case at all.
SHORTEST_CUT_S = 20.0


@dataclass(frozen=True)
class Unit:
    """One subject of one operation."""

    operation: str
    subject: str
    hostile: bool  # whether hostile cases are drawn

    @property
    def name(self) -> str:
        return f"{self.operation}/{self.subject}"


@dataclass(frozen=True)
class Options:
    """What holds for every shard of a campaign.

    backend, build  of the device and object ("host", "checked")
    parts           module that supplies checkers and strategies (`campaign.parts`)
    cache           folder for what may be lost: what Hypothesis works out, running cases
    database        folder of Hypothesis' examples; None: none
    journal         file to which every failing case is appended at once
    isolate         whether launches happen in worker processes, or in the runner itself
    gpu_memory_bytes  that a worker may take of a GPU; None: what is free
    hang_after_s    after which a launch that has not come back is a hang; None: `check.TIMEOUT_S`
    """

    backend: str
    build: str
    seed: int
    keep_going: bool = False
    shrink_s: float = 20.0
    verbose: bool = False
    statistics: bool = False
    cache: str | None = None
    database: str | None = None
    journal: str | None = None
    isolate: bool = True
    gpu_memory_bytes: int | None = None
    hang_after_s: float | None = None
    parts: str = "pagefuzz.harness.campaign.parts"


@dataclass(frozen=True)
class Shard:
    """The part of a unit that one runner process works off.

    cases   to generate; None: until time is up
    end_s   when time is up, in seconds after the campaign began; None: unbounded
    """

    unit: Unit
    index: int
    cases: int | None
    end_s: float | None = None

    def seed(self, campaign_seed: int, round_index: int = 0) -> int:
        """Differs for every unit, shard and round; the same in every process and version, and
        wherever the file of a twin lies."""
        kind, _, name = self.unit.subject.partition(":")
        subject = f"{kind}:{PurePath(name).name}"
        text = f"{campaign_seed}/{self.unit.operation}/{subject}/{self.index}/{round_index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@dataclass(frozen=True)
class Job:
    """What a runner process reads: a shard, the options, and the clock time of its end.

    token  of this runner alone, in the name of its running case's file
    """

    shard: Shard
    options: Options
    deadline: float | None  # of time.monotonic(), which is one clock for all processes
    token: str = field(default_factory=new_token)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        shard = dict(data["shard"])
        shard["unit"] = Unit(**shard["unit"])
        return cls(Shard(**shard), Options(**data["options"]), data["deadline"], data["token"])


def running_case_file(job: Job, runner_pid: int) -> Path | None:
    """Where the runner of a job keeps the case that it is checking, so that it survives the
    runner."""
    if job.options.cache is None:
        return None
    return path_of(Path(job.options.cache) / "journals", runner_pid, job.token)


def count_bound(units: Sequence[Unit], cases: int) -> list[Shard]:
    """Shards of at most `SHARD_CASES` cases, the units taking turns, to be started in order."""
    sizes = [min(SHARD_CASES, cases - done) for done in range(0, cases, SHARD_CASES)]
    return [Shard(unit, index, size) for index, size in enumerate(sizes) for unit in units]


def time_bound(units: Sequence[Unit], jobs: int, time_s: float) -> list[list[Shard]]:
    """One list of shards a lane (runner slot); each unit gets the same share of all lanes' time.

    The units are laid end to end on a line of `jobs * time_s` seconds, which is then cut into
    lanes. A piece too short to be worth a runner is left out, unless it is its unit's longest.
    Where shares are short, no unit is cut: the units of one lane then share its time.
    """
    share = jobs * time_s / len(units)
    if len(units) >= jobs and share < SHORTEST_CUT_S:
        return [_whole(units[lane::jobs], time_s) for lane in range(jobs)]
    lanes: list[list[Shard]] = [[] for _ in range(jobs)]
    for position, unit in enumerate(units):
        begin, end = position * share, (position + 1) * share
        pieces = []
        for lane in range(jobs):
            piece_begin = max(begin - lane * time_s, 0.0)
            piece_end = min(end - lane * time_s, time_s)
            if piece_end - piece_begin > 1e-6:
                pieces.append((piece_end - piece_begin, lane, piece_end))
        longest = max(pieces)
        worth = [piece for piece in pieces if piece is longest or piece[0] >= SHORTEST_PIECE_S]
        for index, (_, lane, piece_end) in enumerate(worth):
            lanes[lane].append(Shard(unit, index, None, piece_end))
    return lanes


def _whole(units: Sequence[Unit], time_s: float) -> list[Shard]:
    """One shard for each, of the same length, one after the other."""
    share = time_s / len(units)
    return [Shard(unit, 0, None, nth * share) for nth, unit in enumerate(units, 1)]
