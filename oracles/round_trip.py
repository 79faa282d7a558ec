"""A round trip: one launch of a writer, perhaps moves of pages, then gathers from the cache.

Pure data like a case, and made of cases: each is sound by itself, but what the moves and the
readers call a cache has no memory of its own. It is the writer's, or a second cache that pages are
swapped to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from pagefuzz.oracles.case import Case, CaseError

ROUND_TRIP_SCHEMA = 1


@dataclass(frozen=True)
class Gather:
    """One launch of a reader.

    case        of the reader; its strides are those of the cache
    cache       which of the writer's caches src is
    first_byte  of what a token stores there (its *cell*), where an entry of src begins: 0, unless
                the entry is one head of several
    second      whether src is not that cache but the one that pages of it are swapped to
    """

    case: Case
    cache: str
    first_byte: int = 0
    second: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "cache": self.cache,
            "first_byte": self.first_byte,
            "case": self.case.to_json(),
            **({"second": True} if self.second else {}),
        }

    @classmethod
    def from_json(cls, data: object) -> Gather:
        if not isinstance(data, Mapping) or set(data) - {"second"} != {
            "cache",
            "first_byte",
            "case",
        }:
            raise CaseError("a gather of a round trip needs cache, first_byte and case")
        second = data.get("second", False)
        if not isinstance(second, bool):
            raise CaseError(f"second of a gather must be true or false, got {second!r:.60}")
        first = data["first_byte"]
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise CaseError(f"first_byte must be an integer >= 0, got {first!r:.60}")
        return cls(Case.from_json(data["case"]), str(data["cache"]), first, second)


@dataclass(frozen=True)
class Move:
    """One launch of copy_blocks or swap_blocks between the writer and the readers.

    case   of it; the pages lie as those of the cache, and there is one layer
    cache  which of the writer's caches its pages are in
    way    of swap_blocks "out", to the second cache, or "in", back from there; "" of copy_blocks
    """

    case: Case
    cache: str
    way: str = ""

    def to_json(self) -> dict[str, Any]:
        way = {"way": self.way} if self.way else {}
        return {"cache": self.cache, "case": self.case.to_json(), **way}

    @classmethod
    def from_json(cls, data: object) -> Move:
        if not isinstance(data, Mapping) or set(data) - {"way"} != {"cache", "case"}:
            raise CaseError("a move of a round trip needs cache and case")
        return cls(Case.from_json(data["case"]), str(data["cache"]), str(data.get("way", "")))


@dataclass(frozen=True)
class RoundTrip:
    """writer: its case; gathers: at least one, all of one reader, launched in this order; moves:
    launched in this order before them."""

    writer: Case
    gathers: tuple[Gather, ...]
    moves: tuple[Move, ...] = ()

    @property
    def pair(self) -> str:
        """ "concat_and_cache_mla/cp_gather_cache"."""
        return pair_name(self.writer.operation, self.gathers[0].case.operation)

    def to_json(self) -> dict[str, Any]:
        return {
            "pagefuzz_round_trip": ROUND_TRIP_SCHEMA,
            "writer": self.writer.to_json(),
            "gathers": [gather.to_json() for gather in self.gathers],
            **({"moves": [move.to_json() for move in self.moves]} if self.moves else {}),
        }

    @classmethod
    def from_json(cls, data: object) -> RoundTrip:
        """Raises `CaseError`."""
        if not isinstance(data, Mapping):
            raise CaseError(f"a round trip must be an object, got {data!r:.60}")
        schema = data.get("pagefuzz_round_trip")
        if schema != ROUND_TRIP_SCHEMA:
            raise CaseError(
                f'a round trip needs "pagefuzz_round_trip": {ROUND_TRIP_SCHEMA} (its schema), '
                f"got {schema!r:.60}"
            )
        gathers = data.get("gathers")
        if not isinstance(gathers, list) or not gathers:
            raise CaseError("a round trip needs gathers, a list of at least one")
        moves = data.get("moves", [])
        if not isinstance(moves, list):
            raise CaseError(f"moves of a round trip must be a list, got {moves!r:.60}")
        trip = cls(
            Case.from_json(data.get("writer")),
            tuple(Gather.from_json(one) for one in gathers),
            tuple(Move.from_json(one) for one in moves),
        )
        if len({gather.case.operation for gather in trip.gathers}) > 1:
            raise CaseError("the gathers of a round trip must all be of one operation")
        return trip

    def dumps(self) -> str:
        """Canonical text: equal round trips have equal text."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))


def pair_name(writer: str, reader: str) -> str:
    return f"{writer}/{reader}"


def load_round_trip(path: str | Path) -> RoundTrip:
    """Reads a file of a round trip, or the one inside a finding's file.

    Raises `CaseError` with one sentence that names the file.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CaseError(f"{path}: cannot read the round trip: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{path}: not a JSON round trip: {error}") from None
    if isinstance(data, dict) and not data.keys().isdisjoint({"pagefuzz_case", "pagefuzz_finding"}):
        raise CaseError(f"{path} is a case of one launch; try: pagefuzz replay {quote(str(path))}")
    if isinstance(data, dict) and "round_trip" in data:
        data = data["round_trip"]
    try:
        return RoundTrip.from_json(data)
    except CaseError as error:
        raise CaseError(f"{path}: {error}") from None
