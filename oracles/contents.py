"""The bytes that buffers hold before a launch, as functions of position.

Payload and poison are streams of 64-bit words, each a bijective mix of a salt and the word's index:
any window of a buffer of any size can be generated alone, overlapping entries agree, and eight
bytes that turn up in a wrong place say which stream and which offset they were taken from.

Two *fills* of the same case hold the same payload and index values but different poison, and every
destination byte of one fill is the complement of the other's, so that a byte that was not written
cannot pass for a written one in both. A buffer that is read and written in place holds payload
where it may be read, in both fills, and is a destination elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, PlannedBuffer, Role

FILLS = (0, 1)

Words = npt.NDArray[np.uint64]

# int32 poison in index buffers: never a legal page, token or row, whatever the sizes.
_INDEX_POISON = (0x7FFFFFFF, 0x80000001)

_MASK = 2**64 - 1
_FIRST = 0x9E3779B97F4A7C15
_SECOND = 0xBF58476D1CE4E5B9
_FIRST_INVERSE = pow(_FIRST, -1, 2**64)
_SECOND_INVERSE = pow(_SECOND, -1, 2**64)

# Streams of a case.
_PAYLOAD = 0
_SOURCE_POISON = (1, 2)
_DESTINATION_POISON = 3

#: Words generated at a time: few enough to stay in the cache.
_BLOCK_WORDS = 2**14

#: With more readable runs than this, generating all payload and masking it is faster.
_FEW_RUNS = 64

#: Offsets at which bytes of a buffer or of its surroundings can lie.
_OFFSETS = range(-(2**22), 2**43)


def _salt(seed: int, stream: int) -> int:
    mixed = (seed * _SECOND + (stream + 1) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> 32)) * _FIRST) & _MASK
    return mixed ^ (mixed >> 29)


def _mix(words: Words, salt: int) -> Words:
    """Turns word indices into the words of a stream, in place."""
    words += np.uint64(salt)
    words *= np.uint64(_FIRST)
    words ^= words >> np.uint64(31)
    words *= np.uint64(_SECOND)
    words ^= words >> np.uint64(29)
    return words


def _unmix(word: int, salt: int) -> int:
    """The index, as a signed integer, of a word of a stream."""
    word ^= (word >> 29) ^ (word >> 58)
    word = (word * _SECOND_INVERSE) & _MASK
    word ^= (word >> 31) ^ (word >> 62)
    word = (word * _FIRST_INVERSE - salt) & _MASK
    return word - 2**64 if word >> 63 else word


def _stream(salt: int, begin: int, end: int) -> Bytes:
    """uint8 [end - begin]: bytes [begin, end) of a stream; both may be negative."""
    first, last = begin >> 3, (end + 7) >> 3
    words = np.arange(first, last, dtype=np.int64).view(np.uint64)
    for at in range(0, words.size, _BLOCK_WORDS):
        _mix(words[at : at + _BLOCK_WORDS], salt)
    return words.view(np.uint8)[begin - (first << 3) : end - (first << 3)]


def _stream_at(salt: int, offsets: npt.NDArray[np.int64], size_bytes: int) -> Bytes:
    """uint8 [n, size_bytes]: the bytes of a stream at each of `offsets`."""
    shift: Words = (offsets & 7).view(np.uint64)
    aligned = not bool(shift.any())
    count = (size_bytes + 7) // 8 + (0 if aligned else 1)
    first = (offsets >> 3)[:, None]
    words = _mix((first + np.arange(count, dtype=np.int64)[None, :]).view(np.uint64), salt)
    if not aligned:
        # Bytes shift..shift+8 of each pair of neighbouring words; the upper word gives nothing
        # when shift is 0, hence its two steps.
        bits = (shift << np.uint64(3))[:, None]
        low: Words = words[:, :-1] >> bits
        high: Words = (words[:, 1:] << np.uint64(1)) << (np.uint64(63) - bits)
        words = low | high
    return words.view(np.uint8)[:, :size_bytes]


def payload(seed: int, begin: int, end: int) -> Bytes:
    """Payload bytes of a source at byte offsets [begin, end) from its base."""
    return _stream(_salt(seed, _PAYLOAD), begin, end)


def payload_at(seed: int, offsets: npt.NDArray[np.int64], size_bytes: int) -> Bytes:
    """uint8 [n, size_bytes]: the payload at each of `offsets` (int64 [n])."""
    return _stream_at(_salt(seed, _PAYLOAD), offsets, size_bytes)


def _poison_salt(role: Role, seed: int, fill: int) -> int:
    stream = _DESTINATION_POISON if role.is_destination else _SOURCE_POISON[fill]
    return _salt(seed, stream)


def poison(role: Role, seed: int, fill: int, begin: int, end: int) -> Bytes:
    """Bytes that no launch may let through, at offsets [begin, end) from the base (may be < 0)."""
    if role in (Role.INDEX, Role.COUNTERS):
        first = begin - begin % 4
        words = np.full((end - first + 3) // 4, _INDEX_POISON[fill], dtype=np.uint32)
        return words.view(np.uint8)[begin - first : end - first]
    out = _stream(_poison_salt(role, seed, fill), begin, end)
    return np.invert(out, out=out) if role.is_destination and fill else out


def destination_poison_at(
    seed: int, fill: int, offsets: npt.NDArray[np.int64], size_bytes: int
) -> Bytes:
    """uint8 [n, size_bytes]: what a destination holds before a launch at each of `offsets`."""
    out = _stream_at(_poison_salt(Role.DESTINATION, seed, fill), offsets, size_bytes)
    return ~out if fill else out


def initial_bytes(
    buffer: PlannedBuffer, readable: IntervalSet, seed: int, fill: int, begin: int, end: int
) -> Bytes:
    """What `buffer` holds at byte offsets [begin, end) from its base before the launch.

    `readable` is the buffer's may-read set; it holds payload in a source and in a buffer that is
    written in place, elsewhere the image does.
    """
    out = poison(buffer.role, seed, fill, begin, end)
    if buffer.role.holds_payload and readable:
        runs, origin = readable.clipped(begin, end), buffer.payload_origin_bytes
        if len(runs) <= _FEW_RUNS:
            for b, e in runs:
                out[b - begin : e - begin] = payload(seed, origin + b, origin + e)
        else:
            held = payload(seed, origin + begin, origin + end)
            np.copyto(out, held, where=runs.mask(begin, end))
    offsets, values = buffer.image.offsets, buffer.image.values
    if offsets.size:
        width = values.shape[1]
        lo = int(np.searchsorted(offsets, begin - width + 1))
        hi = int(np.searchsorted(offsets, end))
        at = (offsets[lo:hi, None] + np.arange(width)[None, :]).ravel() - begin
        inside = (at >= 0) & (at < end - begin)
        out[at[inside]] = values[lo:hi].ravel()[inside]
    return out


def initial_blocks(
    buffer: PlannedBuffer,
    readable: IntervalSet,
    seed: int,
    fill: int,
    begins: npt.NDArray[np.int64],
    size_bytes: int,
) -> Bytes:
    """uint8 [n, size_bytes]: `initial_bytes` of blocks of equal size, all of them at once.

    `begins` int64 [n], ascending and at least `size_bytes` apart.
    """
    if buffer.role in (Role.INDEX, Role.COUNTERS):
        pattern = np.array([_INDEX_POISON[fill]], dtype=np.uint32).view(np.uint8)
        out: Bytes = pattern[(begins[:, None] + np.arange(size_bytes)) & 3]
    else:
        out = np.ascontiguousarray(
            _stream_at(_poison_salt(buffer.role, seed, fill), begins, size_bytes)
        )
        if buffer.role.is_destination and fill:
            np.invert(out, out=out)
    flat = out.reshape(-1)
    if buffer.role.holds_payload and readable:
        blocks = IntervalSet.of_runs(begins, size_bytes)
        inside = readable.intersection(blocks)
        # Blocks that touch are neighbours in `out` too, so that a run across them is one there.
        block = np.searchsorted(begins, inside.begin, side="right") - 1
        first = block * size_bytes + inside.begin - begins[block]
        mask = IntervalSet(first, first + inside.end - inside.begin).mask(0, flat.size)
        held = payload_at(seed, begins + buffer.payload_origin_bytes, size_bytes)
        np.copyto(out, held, where=mask.reshape(out.shape))
    offsets, values = buffer.image.offsets, buffer.image.values
    if offsets.size and begins.size:
        at = (offsets[:, None] + np.arange(values.shape[1])[None, :]).ravel()
        block = np.searchsorted(begins, at, side="right") - 1
        within = at - begins[block]
        inside_block = (block >= 0) & (within < size_bytes)
        flat[(block * size_bytes + within)[inside_block]] = values.ravel()[inside_block]
    return out


@dataclass(frozen=True)
class Trace:
    """Where bytes were taken from: a role's payload or poison, and the offset of the first one."""

    role: Role
    is_payload: bool
    offset_bytes: int


def trace(seed: int, found: Bytes) -> Trace | None:
    """Recognises bytes of a stream, at any alignment; None if there are fewer than eight, or if
    they are of no stream.

    Fifteen bytes always contain an aligned word; fewer may not. Chance takes other bytes for one
    of a stream once in a hundred thousand times.
    """
    raw = found.tobytes()
    streams = [
        (Role.SOURCE, True, _salt(seed, _PAYLOAD), 0),
        (Role.SOURCE, False, _salt(seed, _SOURCE_POISON[0]), 0),
        (Role.SOURCE, False, _salt(seed, _SOURCE_POISON[1]), 0),
        (Role.DESTINATION, False, _salt(seed, _DESTINATION_POISON), 0),
        (Role.DESTINATION, False, _salt(seed, _DESTINATION_POISON), _MASK),
    ]
    for skipped in range(min(8, len(raw) - 7)):
        word = int.from_bytes(raw[skipped : skipped + 8], "little")
        for role, is_payload, salt, complement in streams:
            offset_bytes = _unmix(word ^ complement, salt) * 8 - skipped
            if offset_bytes in _OFFSETS:
                return Trace(role, is_payload, offset_bytes)
    return None
