"""Cases of (d) cp_gather_indexer_k_quant_cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case
from pagefuzz.strategies.boundaries import crossings
from pagefuzz.strategies.corners import Corners, gather_corners
from pagefuzz.strategies.fixed_gathers import (
    hostile_productions,
    indexed,
    long_batches,
    more_requests,
)
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.indexer_corners import INDEXER_SITUATIONS
from pagefuzz.strategies.indexer_gathers import (
    PRODUCTION,
    QUANTITIES,
    REASONS,
    Variant,
    indexer_cases,
    surface,
)

OPERATION = "cp_gather_indexer_k_quant_cache"

__all__ = ["CORNERS", "ON_GPU", "OPERATION", "REPORTED", "cases", "surface"]

_VARIANT = Variant(OPERATION, crossings(QUANTITIES))


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """See `indexer_gathers.indexer_cases`."""
    return indexer_cases(_VARIANT, hostile=hostile, refused=refused, limit_bytes=limit_bytes)


_LEAST_HEAD = indexed(16)
REPORTED: Mapping[str, Callable[[], Case]] = {
    **long_batches(OPERATION, _LEAST_HEAD),
    **hostile_productions(
        OPERATION,
        [
            (
                f"head-{PRODUCTION.entry_bytes}",
                PRODUCTION.page_size_tokens,
                indexed(PRODUCTION.entry_bytes),
            )
        ],
    ),
}
ON_GPU: Mapping[str, Callable[[], Case]] = more_requests(OPERATION, _LEAST_HEAD)

#: Name -> whether a case is in that corner.
CORNERS: Corners = gather_corners(INDEXER_SITUATIONS, REASONS)
