"""Moves of pages between the writer and the readers of a round trip: copies within its cache, and
swaps to a second one and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.round_trip import Move
from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.round_trip_views import WHOLE_CELLS, View, stored_bytes
from pagefuzz.strategies.strides import rounded_up

#: How pages are moved between the writer and the readers -> weight.
MOVES = {
    "none": 60,
    "to a page nobody wrote": 12,
    "a chain": 11,
    "two change places": 10,
    "a cycle of three": 9,
    "out": 14,
    "out and in": 12,
}

_MOST_MOVED = 6  # pages that are considered for a move
_MOVED_BYTES = 2**18  # of all pages that are copied
_SECOND_BYTES = 2**22  # of a second cache whose pages lie as far apart as those of the first

#: What writers call their caches.
_CACHES_OF = ("cache", "key_cache", "value_cache")

#: Stands for a page of the second cache that nothing was swapped to.
_NO_PAGE = -1

_MOVES, _MOVE_SEEDS = weighted(MOVES), st.sampled_from(range(101))

Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Arranged:
    """What readers find once all moves are done.

    origins    page that is read -> page that the writer wrote to, or `_NO_PAGE`
    num_pages  of the cache that is read
    strides    of a second cache, in bytes, by the writer's; empty if the first is read
    """

    num_pages: int
    moves: tuple[Move, ...] = ()
    origins: Mapping[int, int] = field(default_factory=dict)
    strides: Mapping[str, int] = field(default_factory=dict)

    @property
    def second(self) -> bool:
        return bool(self.strides)

    def written(self, span: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Of what tokens stored (page -> first and last offset): where it lies now."""
        stay = () if self.second else span
        now = {page: self.origins.get(page, page) for page in (*self.origins, *stay)}
        return {page: span[origin] for page, origin in now.items() if origin in span}

    def seen(self, view: View) -> View:
        """The view, of the cache that is read."""
        if not self.second:
            return view
        return replace(view, page_stride_bytes=self.strides[view.cache])


def moves(draw: st.DrawFn, case: Case, written: Sequence[int]) -> Arranged:
    """Moves of pages, of every cache alike; 2 draws.

    None where the pages of the cache are not apart, or there are too few.
    """
    kind = draw(_MOVES)
    pools = _pools(case)
    pages = case.sizes["num_pages"]
    if kind == "none" or not pools:
        return Arranged(pages)
    seed = draw(_MOVE_SEEDS)
    named = list(written[:_MOST_MOVED])
    turn = seed % max(len(named), 1)
    named = named[turn:] + named[:turn]
    free = [page for page in range(min(pages, 2 * _MOST_MOVED)) if page not in written][:2]
    if kind in ("out", "out and in"):
        return _swapped(case, pools, named, free, seed, back=kind != "out")
    both = [*named, *free]
    if kind == "to a page nobody wrote":
        pairs = list(zip(named, free, strict=False))
    elif kind == "a chain":
        pairs = list(pairwise(both[:3]))
    else:
        cycle = both[: 2 if kind == "two change places" else 3]
        pairs = list(zip(cycle, cycle[1:] + cycle[:1], strict=True)) if len(cycle) > 1 else []
    if not pairs or sum(size for _, size in pools) * len(pairs) > _MOVED_BYTES:
        return Arranged(pages)
    event(f"moves: {kind}")
    origins = {to: page for page, to in pairs}
    pairs = _listed(pairs, seed)
    launches = tuple(_move(case, cache, page_bytes, pairs) for cache, page_bytes in pools)
    return Arranged(pages, launches, origins)


def _listed(pairs: Pairs, seed: int) -> Pairs:
    """In one order or the other, at times with one of padding."""
    listed = pairs[::-1] if seed % 2 else list(pairs)
    if seed % 3 == 2:
        listed.insert(seed % 5 % len(listed), (-1, listed[0][1]))
    return listed


def _swapped(
    case: Case,
    pools: Sequence[tuple[str, int]],
    named: Sequence[int],
    free: Sequence[int],
    seed: int,
    *,
    back: bool,
) -> Arranged:
    """Pages go to a second cache of another number of pages, and come back to other ones."""
    pages = case.sizes["num_pages"]
    most = _MOVED_BYTES // sum(size for _, size in pools)
    chosen = [*named, *free][: min(most, 3 if back else _MOST_MOVED)]
    if not chosen:
        return Arranged(pages)
    event(f"moves: out{' and in' if back else ''}")
    count = len(chosen) + 1 + seed % 3
    to = [(nth + 1 + seed) % count for nth in range(len(chosen))]
    out = list(zip(chosen, to, strict=True))
    strides = {cache: _second_stride(case, cache, size, count, seed) for cache, size in pools}
    second = Second(count, strides)
    launches = [_swap(case, pool, second, _listed(out, seed), "out") for pool in pools]
    if not back:
        seen = {cache: strides.get(cache, strides[pools[0][0]]) for cache in _CACHES_OF}
        return Arranged(count, tuple(launches), {there: page for page, there in out}, seen)
    others = [page for page in range(min(pages, 2 * _MOST_MOVED)) if page not in chosen]
    places = [*others[:2], *chosen[1:], chosen[0]] if seed % 2 else [*chosen[1:], *others, *chosen]
    places = list(dict.fromkeys(places))
    origins = {place: page for page, place in zip(chosen, places, strict=False)}
    again = [(to[nth], place) for nth, place in enumerate(origins)]
    spare = [page for page in range(count) if page not in to]
    if spare and len(places) > len(again) and seed % 2:
        again.append((spare[0], places[len(origins)]))
        origins[again[-1][1]] = _NO_PAGE
    launches += [_swap(case, pool, second, _listed(again, seed + 1), "in") for pool in pools]
    return Arranged(pages, tuple(launches), origins)


@dataclass(frozen=True)
class Second:
    """num_pages: of every second cache; strides: of its pages, by the writer's cache."""

    num_pages: int
    strides: Mapping[str, int]


def _second_stride(case: Case, cache: str, page_bytes: int, count: int, seed: int) -> int:
    """Dense, padded, or as in the first cache."""
    unit, own = _unit(case), case.sizes[_stride_name(cache)]
    if seed % 4 == 3 and own * count <= _SECOND_BYTES:
        return own
    return rounded_up(page_bytes, unit) + unit * (seed // 4 % 5)


def _swap(case: Case, pool: tuple[str, int], second: Second, pairs: Pairs, way: str) -> Move:
    cache, page_bytes = pool
    first = (case.sizes["num_pages"], case.sizes[_stride_name(cache)])
    sides = [first, (second.num_pages, second.strides[cache])]
    source, destination = sides if way == "out" else sides[::-1]
    return Move(
        Case(
            "swap_blocks",
            {
                "num_pairs": len(pairs),
                "src_num_pages": source[0],
                "dst_num_pages": destination[0],
                "src_page_stride_bytes": source[1],
                "dst_page_stride_bytes": destination[1],
                "page_bytes": page_bytes,
                "element_bytes": gcd(_unit(case), page_bytes),
            },
            {"pairs": _values(pairs)},
            seed=case.seed,
        ),
        cache,
        way,
    )


def _unit(case: Case) -> int:
    return 4 if case.operation in WHOLE_CELLS else stored_bytes(case.sizes)


def _values(pairs: Sequence[tuple[int, int]]) -> Values:
    return Values.literal(*(page for pair in pairs for page in pair))


def _move(case: Case, cache: str, page_bytes: int, pairs: Sequence[tuple[int, int]]) -> Move:
    stride = case.sizes[_stride_name(cache)]
    return Move(
        Case(
            "copy_blocks",
            {
                "num_pairs": len(pairs),
                "num_layers": 1,
                "num_pages": case.sizes["num_pages"],
                "layer_stride_bytes": 0,
                "page_stride_bytes": stride,
                "page_bytes": page_bytes,
                "element_bytes": gcd(_unit(case), page_bytes),
            },
            {"pairs": _values(pairs), "scratch": Values.literal()},
            seed=case.seed,
        ),
        cache,
    )


def _stride_name(cache: str) -> str:
    """ "page_stride_bytes" of "cache", "key_page_stride_bytes" of "key_cache"."""
    return f"{cache.removesuffix('cache')}page_stride_bytes"


def _pools(case: Case) -> list[tuple[str, int]]:
    """Caches whose pages can be copied, and the bytes of a page from its first entry to the end of
    its last one: one of two that share their pages, none where pages lie within each other."""
    sizes = case.sizes
    caches = [cache for cache in _CACHES_OF if _stride_name(cache) in sizes]
    found = [(cache, _page_bytes(case, cache)) for cache in caches]
    strides = [sizes[_stride_name(cache)] for cache in caches]
    pages = sizes["num_pages"]
    if len(found) == 2 and (over := case.placement(caches[1]).over) is not None:
        begin, end = over[1], over[1] + found[1][1]
        if begin < (pages - 1) * strides[0] + found[0][1]:  # else one behind the other
            if strides[0] != strides[1]:
                return []
            found = [(caches[0], max(found[0][1], end))]
    if any(size > stride for (_, size), stride in zip(found, strides, strict=False)) and pages > 1:
        return []
    return found if pages > 1 else []


def _page_bytes(case: Case, cache: str) -> int:
    sizes, side = case.sizes, cache.removesuffix("cache")
    size = sizes["page_size_tokens"]
    if case.operation == "indexer_k_quant_and_cache":
        return size * (sizes["head_dim"] + 4 * (sizes["head_dim"] // sizes["quant_block"]))
    reach = (size - 1) * sizes[f"{side}slot_stride_bytes"] if size > 1 else 0
    if case.operation == "concat_and_cache_ds_mla":
        codes = sizes["kv_c_elements"]
        return reach + codes + codes // 32 + 2 * sizes["k_pe_elements"]
    unit = stored_bytes(sizes)
    if not side:
        return reach + (sizes["kv_c_elements"] + sizes["k_pe_elements"]) * unit
    heads = sizes["num_heads"]
    reach += (heads - 1) * sizes[f"{side}head_stride_bytes"] if heads > 1 else 0
    return reach + sizes["head_elements"] * unit
