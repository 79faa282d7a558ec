"""The composition of a writer and a reader: what the rows of a round trip must hold.

A reader's row maps to a slot (B, o). Where a token wrote that slot, the row is decode(encode(x))
of the token's inputs, bit by bit, any NaN for a computed one; where several did, each element is of
one of them; where none did, it is decode of what the cache held before. Where pages were copied in
between, or swapped to a second cache, (B, o) is what the slot held whose content came to lie there.
All of it follows from the inputs, the slot mapping, the pairs and the block table: no operation's
`expect` has a say in it, so that one misreading of the contract cannot hide in both.

What it cannot see: where in a cell things lie, nor where in a page, if tokens write all of it. A
writer and a reader that both swap the order of keys and scales agree with each other, and with
this; each operation's own contract sees that. Of a page that is written in part, the bytes of the
other slots are looked at.

Decisions:

* The readers see the cache at the writer's own strides, or one head of it; another view is
  malformed.
* Starts do not decrease, seq_starts are not negative, rows of the table do not overlap. Rows whose
  page is no page, -1 say, or lies past the table, stay as they were.
* Pages are copied by copy_blocks or swap_blocks, in one layer, at the page stride of the cache that
  was written, and either with every cell of a page or with no byte of one; another move is
  malformed. A second cache has pages of the same bytes, at a stride and of a number of its own.
* Where the cells of a writer are not torn by the element (records), its tokens have distinct slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles import contents, index_values
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.free_nans import FreeNans
from pagefuzz.oracles.gathered_rows import READERS, GatheredRows, Rows
from pagefuzz.oracles.layout import Bytes, Plan
from pagefuzz.oracles.moved_pages import CACHE_NAMES, FIRST, SECOND, Entries, Moved, PageOf, moved
from pagefuzz.oracles.round_trip import Gather, RoundTrip
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.written_cells import WRITERS, WrittenCells

#: More cells than this, in bytes, are not composed.
MAX_BYTES = 2**26

#: What the caches held before is payload of other streams than the inputs', by cache.
_BEFORE = {FIRST: 0x5EED_0F_B4_5EED, SECOND: 0x5EED_0F_B4_2ECD}


@dataclass(frozen=True)
class Claim:
    """One row of a gather: which slot it reads, and by which way.

    page, cache            what is read: a page of the first cache or the second one
    origin, origin_cache   the page that was written; what was stored there is in `page` now
    """

    row: int
    request: int
    position: int
    column: int
    page: int
    origin: int
    slot: int
    tokens: tuple[int, ...]
    cache: int = FIRST
    origin_cache: int = FIRST

    def __str__(self) -> str:
        def named(page: int, cache: int) -> str:
            swapped = SECOND in (self.cache, self.origin_cache)
            return f"page {page}{f' of the {CACHE_NAMES[cache]} cache' if swapped else ''}"

        copied = ""
        if (self.origin_cache, self.origin) != (self.cache, self.page):
            copied = f", a copy of {named(self.origin, self.origin_cache)}"
        way = (
            f"request {self.request}, row {self.row} -> token position {self.position} -> logical "
            f"page {self.column} -> {named(self.page, self.cache)} offset {self.slot}{copied}"
        )
        if not self.tokens:
            return f"{way}, which no token was written to: what the cache held before"
        several = " or ".join(map(str, self.tokens[:4]))
        return f"{way}, written by input token {several}"


@dataclass(frozen=True)
class ExpectedRows:
    """Rows of one destination of one gather.

    gather, buffer  the destination: of which gather, and its name there
    claims          one a row, rows ascending
    offsets         int64 [n], of the rows from the destination's base
    alternatives    uint8 [n, row_bytes], at least one: each element is that of one of them
    nans            for each alternative, elements that may be any NaN
    element_bytes   the unit in which a row may be of several alternatives
    """

    gather: int
    buffer: str
    claims: tuple[Claim, ...]
    offsets: Int64s
    alternatives: tuple[Bytes, ...]
    nans: tuple[FreeNans | None, ...]
    element_bytes: int


@dataclass(frozen=True)
class Composition:
    """rows    of every gather's destinations
    before  (buffer of the writer with memory of its own, `FIRST`) or (cache of the writer,
            `SECOND`) -> offsets (int64, ascending, from the base of its memory) of the bytes that
            are read without having been written; `held_before` says what they hold
    reads   of every gather, the cache of the writer whose second cache it reads; None of the
            first"""

    rows: tuple[ExpectedRows, ...]
    before: Mapping[tuple[str, int], Int64s]
    reads: tuple[str | None, ...]


def held_before(seed: int, offsets: Int64s, cache: int = FIRST) -> Bytes:
    """uint8, shaped like `offsets`: what bytes of a cache hold before a round trip."""
    words, word = np.unique(offsets >> 3, return_inverse=True)
    held = contents.payload_at(seed ^ _BEFORE[cache], words << 3, 8)
    out: Bytes = held[word.reshape(offsets.shape), offsets & 7]
    return out


def sides(trip: RoundTrip) -> tuple[WrittenCells, GatheredRows]:
    """Raises `CaseError` for operations that no pair is made of."""
    writer, reader = trip.writer.operation, trip.gathers[0].case.operation
    if writer not in WRITERS:
        raise CaseError(f"{writer!r} is no writer of a round trip; there are {', '.join(WRITERS)}")
    if reader not in READERS:
        raise CaseError(f"{reader!r} is no reader of a round trip; there are {', '.join(READERS)}")
    return WRITERS[writer], READERS[reader]


def source_offset(trip: RoundTrip, gather: Gather) -> int:
    """Bytes from the base of the cache to that of the gather's src, of a view that is one."""
    cells, _ = sides(trip)
    zero = np.zeros(1, dtype=np.int64)
    return int(cells.addresses(trip.writer.sizes, gather.cache, zero, zero)[0, gather.first_byte])


def source_base(
    trip: RoundTrip, writer: Plan, gather: Gather, second: str | None
) -> tuple[str, int]:
    """Key in `Composition.before`, and bytes from the base of that memory to src's.

    second  the writer's cache whose second cache src is in; None for the first
    """
    root, begin = writer.base(gather.cache)
    begin += source_offset(trip, gather)
    return (root, begin) if second is None else (second, begin - writer.base(second)[1])


def compose(
    trip: RoundTrip, writer: Plan, gathers: tuple[Plan, ...], moves: tuple[Plan, ...] = ()
) -> Composition:
    """What every row must hold. Plans are those of the trip's cases; the arguments must be legal.

    Raises `CaseError` if the trip is not one: other views, decreasing starts, too many bytes.
    """
    cells, reader = sides(trip)
    a = writer.arguments
    slots = index_values.vector(
        trip.writer.values["slot_mapping"], a["num_tokens"], index_values.INT64, "slot_mapping"
    )
    tokens: dict[int, list[int]] = {}
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < a["num_pages"] * a["page_size_tokens"]:
            tokens.setdefault(slot, []).append(token)
    if not cells.torn and any(len(several) > 1 for several in tokens.values()):
        raise CaseError(f"the tokens of a round trip through {cells.name} need distinct slots")
    rows: list[ExpectedRows] = []
    reads: list[str | None] = []
    before: dict[tuple[str, int], list[Int64s]] = {}
    for number, (gather, plan) in enumerate(zip(trip.gathers, gathers, strict=True)):
        width = _checked_width(trip, gather, plan)
        entries = _entries(trip, writer, gather, width)
        history = moved(writer, cells.caches, entries, trip.moves, moves)
        _check_view(trip, gather, plan, history)
        claims = _claims(plan, tokens, history, SECOND if gather.second else FIRST)
        if len(claims) * width > MAX_BYTES:
            raise CaseError(f"the rows of a round trip hold more than {MAX_BYTES} bytes")
        old = np.empty((len(claims), width), dtype=np.uint8)
        for key, (kept, at) in _unwritten(trip, writer, gather, plan, entries, history, claims):
            before.setdefault(key, []).append(at.ravel())
            old[kept] = held_before(writer.case.seed, at, key[1])
        alternatives = _alternatives(cells, writer, gather, claims, old)
        rows += _rows(reader, cells, plan, gather, number, claims, alternatives, writer)
        reads.append(history.second[0] if gather.second and history.second else None)
    unwritten = {name: np.unique(np.concatenate(several)) for name, several in before.items()}
    return Composition(tuple(rows), unwritten, tuple(reads))


def _entries(trip: RoundTrip, writer: Plan, gather: Gather, width: int) -> Entries:
    cells, _ = sides(trip)
    a = trip.writer.sizes
    root, begin = writer.base(gather.cache)
    zero, ends = np.zeros(2, np.int64), np.array([0, a["page_size_tokens"] - 1])
    # Addresses grow with the slot.
    at = cells.addresses(a, gather.cache, zero, ends)[:, gather.first_byte :][:, :width] + begin
    stride = 0
    if a["num_pages"] > 1:
        first = cells.addresses(a, gather.cache, np.array([0, 1]), zero)[:, 0]
        stride = int(first[1] - first[0])
    return Entries(root, int(at.min()), int(at.max()) + 1, a["num_pages"], stride)


def _unwritten(
    trip: RoundTrip,
    writer: Plan,
    gather: Gather,
    plan: Plan,
    entries: Entries,
    history: Moved,
    claims: list[Claim],
) -> Iterator[tuple[tuple[str, int], tuple[list[int], Int64s]]]:
    """By key in `Composition.before`: claims that no token wrote to, by index, and int64
    [n, entry_bytes] where in that memory the bytes lie that their rows come from."""
    _, reader = sides(trip)
    memories: list[tuple[int, str | None, int]] = [(FIRST, None, entries.page_stride_bytes)]
    if history.second is not None:
        memories.append((SECOND, history.second[0], history.second[1].stride_bytes))
    for cache, second, stride in memories:
        kept = [
            nth
            for nth, claim in enumerate(claims)
            if not claim.tokens and claim.origin_cache == cache
        ]
        name, begin = source_base(trip, writer, gather, second)
        page = np.array([claims[nth].origin for nth in kept], dtype=np.int64)
        slot = np.array([claims[nth].slot for nth in kept], dtype=np.int64)
        in_page = reader.addresses(plan.arguments, np.zeros_like(page), slot)
        yield (name, cache), (kept, in_page + begin + stride * page[:, None])


def _claims(plan: Plan, tokens: Mapping[int, list[int]], history: Moved, cache: int) -> list[Claim]:
    """The contract's row mapping, as it is written there. Tokens are in the first cache."""
    a, values = plan.arguments, plan.case.values
    requests, count, size = a["num_requests"], a["num_tokens"], a["page_size_tokens"]
    if not requests:
        return []
    if requests > 1 and a["table_row_stride"] < a["table_width"]:
        raise CaseError("rows of a round trip's block table must not overlap")
    starts = index_values.vector(
        values["starts"], requests + a["has_terminal"], index_values.INT32, "starts"
    ).tolist()
    ends = [*starts[1:], count][:requests]
    skipped = [0] * requests
    if "seq_starts" in values:
        skipped = index_values.vector(
            values["seq_starts"], requests, index_values.INT32, "seq_starts"
        ).tolist()
    if any(b > e for b, e in pairwise(starts)) or min(*starts, *skipped) < 0:
        raise CaseError("starts of a round trip must not decrease or be negative, nor seq_starts")
    hints = _hints(plan)
    found: list[tuple[int, int, int, int, int]] = []
    for r in range(requests):
        for row in range(min(starts[r], count), min(ends[r], count)):
            p = skipped[r] + row - starts[r]
            if p // size < a["table_width"] and hints.get(row, r) == r:
                found.append((row, r, p, p // size, p % size))
    if not found:
        return []
    at = np.array(found, dtype=np.int64)
    entries = index_values.table_entries(
        values["block_table"],
        at[:, 1],
        at[:, 3],
        rows=requests,
        width=a["table_width"],
        num_pages=a["num_pages"],
        name="block_table",
    ).tolist()
    claims = []
    for (row, r, p, q, slot), page in zip(found, entries, strict=True):
        if 0 <= page < a["num_pages"]:
            come_from, origin = history.origin(PageOf(cache, page))
            writers = tuple(tokens.get(origin * size + slot, ())) if come_from == FIRST else ()
            claims.append(Claim(row, r, p, q, page, origin, slot, writers, cache, come_from))
    return claims


def _hints(plan: Plan) -> dict[int, int]:
    """Row -> the request that its hint names; empty without hints, or of a row's own request."""
    hints = plan.case.values.get("token_to_seq")
    if hints is None:
        return {}
    if hints.recipe == "owners":
        return dict(hints.edits)
    count = plan.arguments["num_tokens"]
    return dict(
        enumerate(index_values.vector(hints, count, index_values.INT32, "token_to_seq").tolist())
    )


def _alternatives(
    cells: WrittenCells, writer: Plan, gather: Gather, claims: list[Claim], old: Bytes
) -> list[Bytes]:
    """Entries uint8 [n, width]: of every claim the one its first token wrote, its second, ...; of
    one without tokens that of `old`."""
    width = old.shape[1]
    named = sorted({token for claim in claims for token in claim.tokens})
    stored = cells.stored(writer, gather.cache, np.array(named, dtype=np.int64))
    stored = stored[:, gather.first_byte : gather.first_byte + width]
    place = {token: index for index, token in enumerate(named)}
    first = old.copy()
    for i, claim in enumerate(claims):
        if claim.tokens:
            first[i] = stored[place[claim.tokens[0]]]
    out = [first]
    for nth in range(1, max((len(claim.tokens) for claim in claims), default=0)):
        more = first.copy()
        for i, claim in enumerate(claims):
            if len(claim.tokens) > nth:
                more[i] = stored[place[claim.tokens[nth]]]
        out.append(more)
    return out


def _rows(
    reader: GatheredRows,
    cells: WrittenCells,
    plan: Plan,
    gather: Gather,
    number: int,
    claims: list[Claim],
    entries: list[Bytes],
    writer: Plan,
) -> list[ExpectedRows]:
    made = [reader.rows(plan, alternative) for alternative in entries]
    written = np.array([bool(claim.tokens) for claim in claims], dtype=np.bool_)
    out = []
    for name, stride in reader.destinations.items():
        several = [one[name] for one in made]
        nans = [
            rows.nans
            if rows.copied is None
            else _code_nans(cells, writer, gather.first_byte, rows, written)
            for rows in several
        ]
        copied = several[0].copied is not None
        row = np.array([claim.row for claim in claims], dtype=np.int64)
        out.append(
            ExpectedRows(
                gather=number,
                buffer=name,
                claims=tuple(claims),
                offsets=row * plan.arguments[stride],
                alternatives=tuple(rows.values for rows in several),
                nans=tuple(nans),
                element_bytes=cells.element_bytes(writer.arguments)
                if copied
                else several[0].element_bytes,
            )
        )
    return out


def _code_nans(
    cells: WrittenCells, writer: Plan, first: int, rows: Rows, written: npt.NDArray[np.bool_]
) -> FreeNans | None:
    """Of a copy of cells: codes that a token's NaN became may be of any NaN."""
    codes = cells.codes(writer.arguments)
    if codes is None or rows.copied is None:
        return None
    dtype, count = codes
    at = np.arange(rows.copied.start, rows.copied.stop) + first
    return FreeNans.of(rows.values, dtype, written[:, None] & (at < count))


def _checked_width(trip: RoundTrip, gather: Gather, plan: Plan) -> int:
    """Bytes of the reader's entries, which are cells or the part of each from `first_byte` on."""
    cells, reader = sides(trip)
    a, own = trip.writer.sizes, plan.arguments
    if gather.cache not in cells.caches:
        raise CaseError(f"{cells.name} has no cache {gather.cache!r}")
    if a["page_size_tokens"] != own["page_size_tokens"]:
        raise CaseError(
            f"the reader has page_size_tokens={own['page_size_tokens']}, "
            f"the writer {a['page_size_tokens']}"
        )
    width, whole = reader.entry_bytes(own), cells.cell_bytes(a)
    if gather.first_byte + width > whole:
        raise CaseError(
            f"an entry of {width} bytes from byte {gather.first_byte} on is no part of {whole}"
        )
    return width


def _check_view(trip: RoundTrip, gather: Gather, plan: Plan, history: Moved) -> None:
    """The reader's entries lie where those of the cache do, the first one or the second."""
    cells, reader = sides(trip)
    a, own = trip.writer.sizes, plan.arguments
    pages, whose = a["num_pages"], "the writer"
    if gather.second:
        if history.second is None:
            raise CaseError(f"no pages of {gather.cache} are swapped to a second cache")
        pages, whose = history.second[1].count, "the second cache"
    if own["num_pages"] != pages:
        raise CaseError(f"the reader has num_pages={own['num_pages']}, {whose} {pages}")
    last = max(pages - 1, 0)
    page = np.array([0, 0, last, last], dtype=np.int64)
    slot = np.array([0, a["page_size_tokens"] - 1] * 2, dtype=np.int64)
    if gather.second and history.second is not None:
        written = cells.addresses(a, gather.cache, np.zeros_like(page), slot)
        written = written + history.second[1].stride_bytes * page[:, None]
    else:
        written = cells.addresses(a, gather.cache, page, slot)
    written = written[:, gather.first_byte :][:, : reader.entry_bytes(own)]
    base = source_offset(trip, gather)
    if not np.array_equal(written, reader.addresses(own, page, slot) + base):
        lies = "the second cache" if gather.second else gather.cache
        raise CaseError(f"src does not lie as {lies} does: strides or layout differ")
