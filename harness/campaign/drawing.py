"""Drives Hypothesis: one run of a property over a strategy, whatever the surroundings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky
from hypothesis.internal.conjecture import providers
from hypothesis.statistics import collector, describe_statistics
from hypothesis.strategies import SearchStrategy

from pagefuzz.harness.build import cache_folder

__all__ = [
    "Drawing",
    "Flaky",
    "draw_from_the_seed_alone",
    "feed",
    "leave_the_folder_alone",
    "use_cache",
]

T = TypeVar("T")

#: Hypothesis climbs no higher than 2 to this: a case of 64 pages is as telling as one of 4,096, and
#: a climb would spend the run on the slowest cases there are.
TARGET_BITS = 6


@dataclass(frozen=True)
class Drawing:
    """seed        that fixes what is drawn
    count       of cases at most
    database    folder of failing examples, written to; None: none
    reuse       whether those examples come first. One that passes now is deleted there
    """

    seed: int
    count: int
    database: Path | None
    reuse: bool

    def run(
        self,
        strategy: SearchStrategy[T],
        body: Callable[[T], None],
        statistics: Callable[[str], None] | None = None,
    ) -> None:
        """Draws cases until one fails, then minimises it.

        Raises what `body` raises for the smallest failing case, or `Flaky` if that did not fail
        again. A `KeyboardInterrupt` from `body` ends it at once. `statistics` is told Hypothesis'.
        """
        database = None if self.database is None else DirectoryBasedExampleDatabase(self.database)
        phases = [Phase.generate, Phase.target, Phase.shrink]

        # Everything is explicit, so that no profile that is loaded by itself (Hypothesis has one
        # for CI, derandomised) changes what is drawn.
        @hypothesis.settings(
            max_examples=self.count,
            phases=[Phase.reuse, *phases] if self.reuse else phases,
            database=database,
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            backend="hypothesis",
        )
        @hypothesis.seed(self.seed)  # below the settings, of which it would drop the database
        @hypothesis.given(strategy)
        def examine(case: T) -> None:
            body(case)

        draw_from_the_seed_alone()
        figures: list[Any] = []
        try:
            # Annotated as a variable of type None, after its default.
            with collector.with_value(figures.append):  # type: ignore[arg-type]
                examine()
        finally:
            if statistics is not None:
                for figure in figures:
                    statistics(describe_statistics(figure))


def use_cache(folder: Path) -> None:
    """Where Hypothesis keeps what it works out, in place of a folder where the command runs."""
    set_hypothesis_home_dir(folder)


def leave_the_folder_alone() -> None:
    """Of a command that draws in its own process: no `.hypothesis` where it runs."""
    use_cache(cache_folder().parent / "hypothesis")


def feed(event: str, counters: Mapping[str, int]) -> None:
    """Hands figures of the case at hand to Hypothesis' statistics and to its hill climbing.

    A counter whose name begins with "distance" is better the smaller it is.
    """
    hypothesis.event(event)
    for name, figure in counters.items():
        # Powers of two keep the number of different events small.
        hypothesis.event(f"{name}: below 2^{abs(figure).bit_length()}")
        magnitude = min(math.log2(1 + abs(figure)), TARGET_BITS)
        hypothesis.target(-magnitude if name.startswith("distance") else magnitude, label=name)


def draw_from_the_seed_alone() -> None:
    """Stops Hypothesis from drawing numbers that stand in the source of loaded modules.

    It does so for modules outside site-packages: what a seed draws would change with every edit of
    pagefuzz, with how it is installed, and with what else was imported. There is no setting.
    """
    if hasattr(providers, "_get_local_constants"):
        empty = providers._local_constants
        providers._get_local_constants = lambda: empty
