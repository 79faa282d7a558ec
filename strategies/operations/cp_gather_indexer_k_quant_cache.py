"""Cases of (d) cp_gather_indexer_k_quant_cache."""

from __future__ import annotations

from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case
from pagefuzz.strategies.boundaries import crossings
from pagefuzz.strategies.corners import Corners, gather_corners
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.indexer_corners import INDEXER_SITUATIONS
from pagefuzz.strategies.indexer_gathers import QUANTITIES, REASONS, Variant, indexer_cases, surface

OPERATION = "cp_gather_indexer_k_quant_cache"

__all__ = ["CORNERS", "OPERATION", "cases", "surface"]

_VARIANT = Variant(OPERATION, crossings(QUANTITIES))


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """See `indexer_gathers.indexer_cases`."""
    return indexer_cases(_VARIANT, hostile=hostile, refused=refused, limit_bytes=limit_bytes)


#: Name -> whether a case is in that corner.
CORNERS: Corners = gather_corners(INDEXER_SITUATIONS, REASONS)
