"""The bytes that buffers hold before a launch, as functions of position.

Payload and poison are position-hashed: any window of a buffer of any size can be generated alone,
overlapping entries agree, and a wrong byte can be traced to where it came from. Two *fills* of the
same case hold the same payload and index values but different poison, and every destination byte
of one fill is the complement of the other's, so that a byte that was not written cannot pass for a
written one in both.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, PlannedBuffer, Role

FILLS = (0, 1)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)

# int32 poison in index buffers: never a legal page, token or row, whatever the sizes.
_INDEX_POISON = (0x7FFFFFFF, 0x80000001)


def _hashed(salt: int, begin: int, end: int) -> Bytes:
    """uint8 [end - begin]: byte i is a hash of (salt, begin + i)."""
    first, last = begin >> 3, (end + 7) >> 3
    words = np.arange(first, last, dtype=np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        words = (words + np.uint64(salt & 0xFFFFFFFF) * _MIX) * _GOLDEN
        words ^= words >> np.uint64(31)
        words *= _MIX
        words ^= words >> np.uint64(29)
    return words.view(np.uint8)[begin - (first << 3) : end - (first << 3)]


def payload(seed: int, begin: int, end: int) -> Bytes:
    """Payload bytes of a source at byte offsets [begin, end) from its base."""
    return _hashed(seed * 2 + 1, begin, end)


def payload_at(seed: int, offsets: npt.NDArray[np.int64], size_bytes: int) -> Bytes:
    """uint8 [n, size_bytes]: the payload at each of `offsets` (int64 [n])."""
    positions = offsets[:, None] + np.arange(size_bytes, dtype=np.int64)[None, :]
    words = (positions >> 3).view(np.uint64)
    with np.errstate(over="ignore"):
        words = (words + np.uint64((seed * 2 + 1) & 0xFFFFFFFF) * _MIX) * _GOLDEN
        words ^= words >> np.uint64(31)
        words *= _MIX
        words ^= words >> np.uint64(29)
    shift = ((positions & 7) << 3).view(np.uint64)
    return (words >> shift).astype(np.uint8)


def poison(role: Role, seed: int, fill: int, begin: int, end: int) -> Bytes:
    """Bytes that no launch may let through, at offsets [begin, end) from the base (may be < 0)."""
    if role in (Role.INDEX, Role.COUNTERS):
        first = begin - begin % 4
        words = np.full((end - first + 3) // 4, _INDEX_POISON[fill], dtype=np.uint32)
        return words.view(np.uint8)[begin - first : end - first]
    hashed = _hashed(seed * 2 + 0x5EED0000 + (0 if role is Role.DESTINATION else fill), begin, end)
    return ~hashed if role is Role.DESTINATION and fill else hashed


def initial_bytes(
    buffer: PlannedBuffer, readable: IntervalSet, seed: int, fill: int, begin: int, end: int
) -> Bytes:
    """What `buffer` holds at byte offsets [begin, end) from its base before the launch.

    `readable` is the buffer's may-read set; in a source it holds payload, elsewhere the image does.
    """
    out = poison(buffer.role, seed, fill, begin, end).copy()
    if buffer.role is Role.SOURCE and readable:
        inside = readable.mask(begin, end)
        np.copyto(out, payload(seed, begin, end), where=inside)
    offsets, values = buffer.image.offsets, buffer.image.values
    if offsets.size:
        width = values.shape[1]
        lo = int(np.searchsorted(offsets, begin - width + 1))
        hi = int(np.searchsorted(offsets, end))
        at = (offsets[lo:hi, None] + np.arange(width)[None, :]).ravel() - begin
        inside = (at >= 0) & (at < end - begin)
        out[at[inside]] = values[lo:hi].ravel()[inside]
    return out
