"""Where bytes that turned up in a wrong place were taken from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OriginKind(StrEnum):
    OLD = "old"  # what the same place held before
    ENTRY = "entry"  # payload of a mapped entry
    FORBIDDEN = "forbidden"  # poison: bytes that no launch may read
    ZEROS = "zeros"


@dataclass(frozen=True)
class Origin:
    """`text` completes the sentence "it holds ...": "page 9 slot 2, byte 0"."""

    kind: OriginKind
    text: str
