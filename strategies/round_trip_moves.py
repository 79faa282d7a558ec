"""Copies of pages between the writer and the readers of a round trip."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.round_trip import Move
from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.round_trip_views import WHOLE_CELLS, stored_bytes

#: How pages are copied between the writer and the readers -> weight.
MOVES = {
    "none": 60,
    "to a page nobody wrote": 12,
    "a chain": 11,
    "two change places": 10,
    "a cycle of three": 9,
}

_MOST_MOVED = 6  # pages that are considered for a move
_MOVED_BYTES = 2**18  # of all pages that are copied

#: What writers call their caches.
_CACHES_OF = ("cache", "key_cache", "value_cache")

_MOVES, _MOVE_SEEDS = weighted(MOVES), st.sampled_from(range(101))


def moves(
    draw: st.DrawFn, case: Case, written: Sequence[int]
) -> tuple[tuple[Move, ...], dict[int, int]]:
    """Copies of pages, of every cache alike, and page -> the page whose entries it then holds.

    None where the pages of the cache are not apart, or there are too few.
    """
    kind = draw(_MOVES)
    pools = _pools(case)
    pages = case.sizes["num_pages"]
    if kind == "none" or not pools:
        return (), {}
    seed = draw(_MOVE_SEEDS)
    named = list(written[:_MOST_MOVED])
    turn = seed % max(len(named), 1)
    named = named[turn:] + named[:turn]
    free = [page for page in range(min(pages, 2 * _MOST_MOVED)) if page not in written][:2]
    both = [*named, *free]
    if kind == "to a page nobody wrote":
        pairs = list(zip(named, free, strict=False))
    elif kind == "a chain":
        pairs = list(pairwise(both[:3]))
    else:
        cycle = both[: 2 if kind == "two change places" else 3]
        pairs = list(zip(cycle, cycle[1:] + cycle[:1], strict=True)) if len(cycle) > 1 else []
    if not pairs or sum(size for _, size in pools) * len(pairs) > _MOVED_BYTES:
        return (), {}
    event(f"moves: {kind}")
    if seed % 2:
        pairs.reverse()
    if seed % 3 == 2:
        pairs.insert(seed % 5 % len(pairs), (-1, pairs[0][1]))
    launches = tuple(_move(case, cache, page_bytes, pairs) for cache, page_bytes in pools)
    return launches, {to: page for page, to in pairs if page >= 0}


def _move(case: Case, cache: str, page_bytes: int, pairs: Sequence[tuple[int, int]]) -> Move:
    stride = case.sizes[_stride_name(cache)]
    unit = 4 if case.operation in WHOLE_CELLS else stored_bytes(case.sizes)
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
                "element_bytes": gcd(unit, page_bytes),
            },
            {"pairs": Values.literal(*(page for pair in pairs for page in pair))}
            | {"scratch": Values.literal()},
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
