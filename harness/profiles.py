"""Profiles: how many cases a run examines, and whether two runs examine the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: Cases that one runner process examines before the next shard begins. Part of what makes a profile
#: deterministic: shards and their seeds follow from the number of cases, never from `--jobs`.
SHARD_CASES = 1000


@dataclass(frozen=True)
class Profile:
    """cases            generated a unit (operation and subject); None: bound by time alone
    time_s           for the whole run, if it is bound by time
    fixed_seed       the seed of every run; None: a fresh one each time, printed
    example_database failing examples of earlier runs come first. A profile that must not depend on
                     what ran before has none
    shrink_s         at most this long is spent on minimising one finding
    verbose          prints every case and Hypothesis' statistics
    """

    name: str
    summary: str
    cases: int | None
    time_s: float | None = None
    fixed_seed: int | None = 0
    example_database: bool = True
    shrink_s: float = 20.0
    verbose: bool = False


_ALL = (
    Profile("smoke", "300 cases a unit from one seed, after what failed before", cases=300),
    Profile(
        "gate",
        "4,000 cases a unit, the same ones every time, whatever ran before",
        cases=4000,
        example_database=False,
    ),
    Profile(
        "nightly",
        "new cases for an hour, or as long as --time says",
        cases=None,
        time_s=3600.0,
        fixed_seed=None,
    ),
    Profile("debug", "20 cases a unit, each one printed", cases=20, verbose=True),
)

PROFILES: Mapping[str, Profile] = MappingProxyType({profile.name: profile for profile in _ALL})
