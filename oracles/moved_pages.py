"""Where the content of a page comes from, once the moves of a round trip are done.

Pages are copied within the cache that was written, the *first* one, or between it and a *second*
one of the same page size. A cache of the writer has one second cache at most: all swaps of its
pages are to and from that one.

Read off the pairs and the strides alone: no operation's `expect` has a say in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagefuzz.oracles import index_values
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.round_trip import Move

#: Operations that move pages between a writer and its readers.
COPY, SWAP = MOVERS = ("copy_blocks", "swap_blocks")

FIRST, SECOND = 0, 1
CACHE_NAMES = ("first", "second")

#: What a launch of an operation moves, by its way -> (cache it reads, cache it writes).
WAYS = {COPY: {"": (FIRST, FIRST)}, SWAP: {"out": (FIRST, SECOND), "in": (SECOND, FIRST)}}


class PageOf(NamedTuple):
    """cache: `FIRST` or `SECOND`; number: of the page there."""

    cache: int
    number: int


@dataclass(frozen=True)
class Pages:
    """Pages as they lie in one cache. The stride is 0 where there are not two of them."""

    count: int
    stride_bytes: int
    page_bytes: int

    @classmethod
    def of(cls, arguments: Mapping[str, int], side: str) -> Pages:
        """side: "src_", "dst_", or "" of an operation with one cache."""
        count = arguments[f"{side}num_pages"]
        stride = arguments[f"{side}page_stride_bytes"] if count > 1 else 0
        return cls(count, stride, arguments["page_bytes"])


@dataclass(frozen=True)
class Entries:
    """What a gather reads, where it lies in the first cache.

    root          the writer's buffer that has the memory
    low, high     the bytes of page 0 that entries are of lie in [low, high), from the root's base
    num_pages, page_stride_bytes  of the first cache
    """

    root: str
    low: int
    high: int
    num_pages: int
    page_stride_bytes: int

    def in_moved(self, begin: int, page_bytes: int) -> bool | None:
        """Whether all entries lie in pages that begin at `begin`; None if only some bytes do."""
        low, high = self.low - begin, self.high - begin
        if 0 <= low < high <= page_bytes:
            return True
        stride = self.page_stride_bytes
        reach = max(self.num_pages - 1, 0) * stride
        between = low >= page_bytes and high <= stride
        return False if high + reach <= 0 or low >= reach + page_bytes or between else None


@dataclass(frozen=True)
class Moved:
    """origins  page -> the page whose content it holds; the others hold their own
    second   name of the writer's cache whose second cache has such entries too, and its pages; None
             if no swap moves them"""

    origins: Mapping[PageOf, PageOf]
    second: tuple[str, Pages] | None

    def origin(self, page: PageOf) -> PageOf:
        return self.origins.get(page, page)


def second_caches(moves: Sequence[Move], plans: Sequence[Plan]) -> dict[str, Pages]:
    """Name of the writer's cache -> pages of its second one.

    Raises `CaseError` if the swaps of a cache do not agree in them.
    """
    found: dict[str, Pages] = {}
    for move, plan in zip(moves, plans, strict=True):
        if move.case.operation != SWAP:
            continue
        pages = Pages.of(plan.arguments, "dst_" if move.way == "out" else "src_")
        if not pages.count:
            raise CaseError(f"the second cache of {move.cache} needs a page")
        if found.setdefault(move.cache, pages) != pages:
            raise CaseError(f"swaps of {move.cache} do not agree in pages of the second cache")
    return found


def moved(
    writer: Plan,
    caches: Sequence[str],
    entries: Entries,
    moves: Sequence[Move],
    plans: Sequence[Plan],
) -> Moved:
    """What became of the pages that hold `entries`. caches: of the writer, by name.

    Raises `CaseError` for a move of another cache layout, or of a part of the entries.
    """
    seconds = second_caches(moves, plans)
    origins: dict[PageOf, PageOf] = {}
    of: set[str] = set()
    for move, plan in zip(moves, plans, strict=True):
        reads, writes = _way(move)
        if move.cache not in caches:
            raise CaseError(f"{writer.case.operation} has no cache {move.cache!r}")
        first = _first_pages(move, plan)
        if first.count != entries.num_pages or plan.arguments.get("num_layers", 1) != 1:
            raise CaseError(
                f"a move of a round trip is of one layer and of all {entries.num_pages} pages"
            )
        root, begin = writer.base(move.cache)
        if root != entries.root:
            continue
        if first.stride_bytes != entries.page_stride_bytes:
            raise CaseError(
                f"a move's pages lie {first.stride_bytes} bytes apart, those of src do not"
            )
        inside = entries.in_moved(begin, first.page_bytes)
        if inside is None:
            raise CaseError(
                f"a move of {first.page_bytes} bytes a page tears the pages of {move.cache}"
            )
        if not inside:
            continue
        counts = {FIRST: first.count}
        if move.case.operation == SWAP:
            of.add(move.cache)
            counts[SECOND] = seconds[move.cache].count
        copied = _copied(plan, counts[reads], counts[writes])
        origins |= {
            PageOf(writes, to): origins.get(PageOf(reads, page), PageOf(reads, page))
            for to, page in copied.items()
        }
    if len(of) > 1:
        raise CaseError(f"the same pages are swapped as those of {' and of '.join(sorted(of))}")
    return Moved(origins, next(((name, seconds[name]) for name in of), None))


def _way(move: Move) -> tuple[int, int]:
    operation = move.case.operation
    if operation not in WAYS:
        wanted = " and ".join(MOVERS)
        raise CaseError(f"{operation!r} moves no pages of a round trip; {wanted} do")
    if move.way not in WAYS[operation]:
        ways = " or ".join(repr(way) for way in WAYS[operation])
        raise CaseError(f"the way of {operation} must be {ways}, not {move.way!r}")
    return WAYS[operation][move.way]


def _first_pages(move: Move, plan: Plan) -> Pages:
    if move.case.operation == COPY:
        return Pages.of(plan.arguments, "")
    return Pages.of(plan.arguments, "src_" if move.way == "out" else "dst_")


def _copied(plan: Plan, pages: int, to_pages: int) -> dict[int, int]:
    """Destination -> source, of the pairs that copy a page."""
    count = plan.arguments["num_pairs"]
    ids = index_values.vector(
        plan.case.values["pairs"], 2 * count, index_values.INT64, "pairs"
    ).tolist()
    return {
        to: page
        for page, to in zip(ids[::2], ids[1::2], strict=True)
        if 0 <= page < pages and 0 <= to < to_pages
    }
