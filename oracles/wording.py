"""Phrases that the judgements share, so that numbers look the same in every report."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pagefuzz.oracles.intervals import IntervalSet


def byte_text(value: int) -> str:
    """ "0x3f (63)"."""
    return f"0x{value:02x} ({value})"


def count_text(count: int, noun: str) -> str:
    """ "1 byte", "2 bytes"; nouns whose plural is an added s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def unknown_text(what: str, name: str, names: Iterable[str], also: str = "") -> str:
    """A name that is not there, the one that was probably meant, and those that are.

    Of "bundled:page" only what stands behind the colon is compared. `also` follows the names.
    """
    known = list(dict.fromkeys(names))
    meant = {_compared(one): one for one in known}
    close = difflib.get_close_matches(_compared(name), meant, n=1)
    there = f"here is {', '.join(known)}{also}"
    if close:
        return f"unknown {what} {name!r:.200}; did you mean {meant[close[0]]!r}? T{there}"
    return f"unknown {what} {name!r:.200}; t{there}"


def _compared(name: str) -> str:
    return name.rpartition(":")[2].casefold()


def share_text(part: int, whole: int, noun: str) -> str:
    """ "4 of 12 bytes (33.3%)"."""
    return f"{part} of {count_text(whole, noun)} ({100 * part / whole:.3g}%)"


def range_text(begin: int, end: int) -> str:
    """ "bytes 4..7" of [4, 8); "byte 4" of [4, 5)."""
    return f"byte {begin}" if end == begin + 1 else f"bytes {begin}..{end - 1}"


def nearest_legal_text(allowed: IntervalSet, offset_bytes: int) -> str:
    """The legal runs on both sides of a forbidden byte: "bytes 0..3 or 8..11 are legal"."""
    if not allowed:
        return "no byte of it is legal"
    below = allowed.begin.searchsorted(offset_bytes, side="right") - 1
    sides = [i for i in (below, below + 1) if 0 <= i < len(allowed)]
    runs = [(int(allowed.begin[i]), int(allowed.end[i])) for i in sides]
    first, *rest = [range_text(*run) for run in runs]
    legal = " or ".join([first, *(text.split(" ", 1)[1] for text in rest)])
    return f"{legal} {'is' if legal.startswith('byte ') else 'are'} legal"
