"""How near offsets come to where 32-bit arithmetic ends: a figure for Hypothesis to climb."""

from __future__ import annotations

import numpy as np

from pagefuzz.oracles.rows import Int64s


def closeness(offsets: Int64s, element_bytes: int) -> int:
    """64 less the bits of the smallest distance between an offset and 2^31 or 2^32, bytes or
    elements; 0 if there is no offset."""
    if not offsets.size:
        return 0
    distance = min(
        int(np.abs(offsets - boundary * unit).min()) // unit
        for boundary in (2**31, 2**32)
        for unit in {1, element_bytes}
    )
    return 64 - distance.bit_length()
