"""Round trips, drawn once and shared by the tests that only look at them."""

from __future__ import annotations

from functools import cache

from hypothesis import HealthCheck, Phase, given, seed, settings

from pagefuzz.oracles.round_trip import RoundTrip
from pagefuzz.strategies.round_trips import round_trips

#: Bound on a writer's memory: nothing at 32-bit boundaries.
ORDINARY_BYTES = 2**26


@cache
def drawn(pair: str, count: int, limit_bytes: int = ORDINARY_BYTES) -> list[RoundTrip]:
    """`count` round trips of a pair."""
    found: list[RoundTrip] = []

    @seed(0)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(round_trips(pair, limit_bytes=limit_bytes))
    def collect(trip: RoundTrip) -> None:
        found.append(trip)

    collect()
    return found
