"""Corners of page copies: named situations that their strategies must reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from pagefuzz.oracles.cells import Cells
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.page_copies import PageCopyOperation
from pagefuzz.oracles.page_pairs import PagePairs
from pagefuzz.oracles.refusals import is_absent
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.rows import Int64s
from pagefuzz.strategies.boundaries import LIMITS
from pagefuzz.strategies.corners import Corners
from pagefuzz.strategies.told import Told, corners_of, refused_for

_NO_PAIRS = np.empty((0, 2), np.int64)


class Copied(Told):
    """What the oracle says of a page copy, in the words that corners are written in."""

    def __init__(self, plan: Plan, expectation: Expectation) -> None:
        super().__init__(plan, expectation)
        asked = operation(plan.case.operation)
        assert isinstance(asked, PageCopyOperation)
        self.operation = asked
        self.one_cache = plan.case.operation == "copy_blocks"
        self.resolved = (
            PagePairs.of(_NO_PAIRS, 0, 0, one_cache=True)
            if self.refused
            else asked.page_pairs(plan)
        )
        self.pairs, self.moves = self.resolved.pairs, self.resolved.moves
        self.source, self.destination = asked.caches(asked.clamped(plan.arguments))
        self.copies = bool(len(self.moves)) and (not self.one_cache or self.sizes["num_layers"] > 0)

    @property
    def on_cycle(self) -> Int64s:
        """int64 [k, 2]: the moves that are part of cycles."""
        return self.moves[self.resolved.on_cycle]

    def cycles(self) -> list[int]:
        """Lengths of all cycles."""
        to = dict(self.on_cycle.tolist())
        lengths = []
        while to:
            page, _ = next(iter(to.items()))
            length = 0
            while page in to:
                page, length = to.pop(page), length + 1
            lengths.append(length)
        return lengths

    def kept(self) -> Int64s:
        """int64 [n, 2]: pairs that name two pages, in their order."""
        return self.pairs[~self.resolved.is_padding & ~self.resolved.is_skipped]

    def chained(self, *, backwards: bool) -> bool:
        """Whether a page is read after (before) the pair that writes over it, in list order."""
        kept = self.kept().tolist()
        for nth, (page, to) in enumerate(kept):
            for other, other_to in kept[:nth]:
                if not backwards and other_to == page != to and other != page:
                    return True
                if backwards and other == to != page and other_to != page:
                    return True
        return False

    def begins(self, cells: Cells) -> Int64s:
        """int64 [n]: where the pages that are copied begin in a cache, in every layer."""
        if not self.copies:
            return np.empty(0, np.int64)
        sides = [1] if cells == self.destination and not self.one_cache else [0]
        pages = np.unique(self.moves[:, sides] if not self.one_cache else self.moves)
        return self.operation.page_offsets(self.plan, cells, pages).ravel()

    def stride(self, name: str) -> int:
        """0 where it is ignored."""
        cells = [c for c in (self.source, self.destination) if name in dict(c.dimensions)]
        return self.sizes[name] if dict(cells[0].dimensions)[name] > 1 else 0


_Predicate: TypeAlias = Callable[[Copied], bool]


def _repeated(c: Copied) -> bool:
    kept = c.kept()
    return len(kept) > 1 and len(np.unique(kept, axis=0)) < len(kept)


def _several_readers(c: Copied) -> bool:
    return len(np.unique(c.moves[:, 0])) < len(c.moves)


def _still(c: Copied) -> bool:
    kept = c.kept()
    return bool((kept[:, 0] == kept[:, 1]).any())


def _shared_destination(c: Copied) -> bool:
    """A skipped pair would contradict one that is kept."""
    skipped = c.pairs[c.resolved.is_skipped]
    return bool(np.isin(skipped[:, 1], c.kept()[:, 1]).any())


def _bad(side: int, value: Callable[[Copied], int]) -> _Predicate:
    return lambda c: c.hostile and bool((c.pairs[c.resolved.is_skipped][:, side] == value(c)).any())


def _wraps(c: Copied) -> bool:
    skipped = c.pairs[c.resolved.is_skipped]
    pages = [c.source.dimensions[-1][1], c.destination.dimensions[-1][1]]
    return bool(((skipped >= 2**32) & (skipped % 2**32 < np.array(pages))).any())


def _placed(name: str, part: str) -> _Predicate:
    return lambda c: c.copies and getattr(c.plan.buffers[name].placement, part) > 0


_PAIRS: Mapping[str, _Predicate] = {
    "pairs: none": lambda c: not c.refused and c.sizes["num_pairs"] == 0,
    "pairs: one": lambda c: len(c.pairs) == 1 and c.copies,
    "pairs: only padding": lambda c: len(c.pairs) > 0 and bool(c.resolved.is_padding.all()),
    "pairs: hundreds": lambda c: len(c.moves) > 500,
    "pairs: twice the same": _repeated,
    "pairs: a source of several": _several_readers,
    "pairs: a page to itself": _still,
    "pairs: padding as source": lambda c: bool(((c.pairs == -1) @ [2, 1] == 2).any()),
    "pairs: padding as destination": lambda c: bool(((c.pairs == -1) @ [2, 1] == 1).any()),
    "pairs: padding as both": lambda c: bool(((c.pairs == -1) @ [2, 1] == 3).any()),
    "pages: none": lambda c: not c.refused and c.destination.dimensions[-1][1] == 0,
    "pages: the last one": lambda c: (
        c.copies and bool((c.moves[:, 1] == c.destination.dimensions[-1][1] - 1).any())
    ),
    "page: 1 byte": lambda c: c.copies and c.sizes["page_bytes"] == 1,
    "page: no multiple of 16": lambda c: c.copies and c.sizes["page_bytes"] % 16 > 0,
    "page: above 16 KiB": lambda c: c.copies and c.sizes["page_bytes"] > 2**14,
    "page: above 256 KiB": lambda c: c.copies and c.sizes["page_bytes"] > 2**18,
    "page: just above 16 KiB": lambda c: c.copies and 0 < c.sizes["page_bytes"] - 2**14 < 16,
    **{
        f"element: {size} bytes": lambda c, size=size: (  # type: ignore[misc]
            c.copies and c.sizes["element_bytes"] == size
        )
        for size in (1, 2, 4, 8)
    },
    "element: another type": lambda c: (
        c.copies and any(name.endswith("cache.dtype") for name in c.plan.case.overrides)
    ),
    "counts: absent": lambda c: c.copies and "counts" not in c.plan.case.values,
    "counts: present": lambda c: c.copies and "counts" in c.plan.case.values,
    "null pointer: nothing behind it": lambda c: (
        not c.refused
        and any(n.endswith(("cache.data", "pairs.data")) for n in c.plan.case.overrides)
    ),
    "absent: dtype and rank are nonsense": lambda c: (
        not c.refused and "counts.rank" in c.plan.case.overrides
    ),
    "pairs: at an odd multiple of 8": lambda c: (
        len(c.pairs) > 0 and c.plan.buffers["pairs"].placement.offset_bytes % 16 == 8
    ),
    "pairs: a slice of a workspace": lambda c: (
        len(c.pairs) > 0 and c.plan.buffers["pairs"].placement.before_bytes > 0
    ),
}

_HOSTILE: Mapping[str, _Predicate] = {
    "hostile: source just past": _bad(0, lambda c: c.source.dimensions[-1][1]),
    "hostile: destination just past": _bad(1, lambda c: c.destination.dimensions[-1][1]),
    "hostile: source -2": _bad(0, lambda c: -2),
    "hostile: destination -2": _bad(1, lambda c: -2),
    "hostile: highest": _bad(0, lambda c: 2**63 - 1),
    "hostile: lowest": _bad(1, lambda c: -(2**63)),
    "hostile: wraps to a page": lambda c: c.hostile and _wraps(c),
    "hostile: beside a -1": lambda c: (
        c.hostile and bool((c.resolved.is_hostile & c.resolved.is_padding).any())
    ),
    "hostile: only beside a -1": lambda c: c.hostile and not c.resolved.is_skipped.any(),
    "hostile: to the destination of another": lambda c: c.hostile and _shared_destination(c),
    "hostile: others are copied": lambda c: c.hostile and c.copies,
    "class: in contract": lambda c: not c.refused and not c.hostile,
    "class: hostile": lambda c: c.hostile,
    "class: refused": lambda c: c.refused,
}

_REASONS = (
    "dtype",
    "rank",
    "element_bytes",
    "page_bytes",
    "size_range",
    "negative_stride",
    "stride_overflow",
    "extent",
    "null_pointer",
    "alignment",
    "not_nested",
    "overlap",
    "conflict",
)


def _boundaries(name: str, cells: Callable[[Copied], Cells]) -> dict[str, _Predicate]:
    def past(c: Copied, limit: int) -> bool:
        found = c.begins(cells(c))
        return bool(found.size) and int(found.max()) >= limit

    def below(c: Copied, limit: int) -> bool:
        found = c.begins(cells(c))
        return bool(found.size) and limit - 2**21 <= int(found.max()) < limit

    return {
        f"boundary: {name} {side} {power}": lambda c, holds=holds, limit=limit: holds(c, limit)  # type: ignore[misc]
        for limit, power in zip(LIMITS, ("2^31", "2^32"), strict=True)
        for side, holds in (("past", past), ("below", below))
    }


def _cache(name: str, page: str) -> dict[str, _Predicate]:
    """Layouts of one cache."""
    return {
        f"{name}: dense pages": lambda c: c.copies and c.stride(page) == c.sizes["page_bytes"],
        f"{name}: padded pages": lambda c: (
            c.copies and c.sizes["page_bytes"] < c.stride(page) < 2**16
        ),
        f"{name}: packed pool": lambda c: c.copies and 900_000 < c.stride(page) < 1_100_000,
        f"{name}: a page stride of 2^31": lambda c: c.copies and c.stride(page) >= 2**31,
        f"{name}: page stride ignored": lambda c: (
            not c.refused and c.stride(page) == 0 and c.sizes[page] < 0
        ),
        f"{name}: at its least alignment": lambda c: (
            c.copies
            and c.plan.buffers[name].placement.offset_bytes % (2 * c.sizes["element_bytes"]) > 0
        ),
    }


_LAYERS: Mapping[str, _Predicate] = {
    "layers: none": lambda c: len(c.moves) > 0 and c.sizes["num_layers"] == 0,
    "layers: one": lambda c: c.copies and c.sizes["num_layers"] == 1,
    "layers: several": lambda c: c.copies and c.sizes["num_layers"] > 1,
    "layers: padded": lambda c: (
        c.copies
        and c.stride("layer_stride_bytes")
        > c.sizes["num_pages"] * max(c.stride("page_stride_bytes"), c.sizes["page_bytes"])
    ),
    "layers: inside pages": lambda c: (
        c.copies and 0 < c.stride("layer_stride_bytes") < c.stride("page_stride_bytes")
    ),
    "layers: a layer stride of 2^31": lambda c: (
        c.copies and c.stride("layer_stride_bytes") >= 2**31
    ),
    "layers: their stride ignored": lambda c: (
        not c.refused and c.stride("layer_stride_bytes") == 0 and c.sizes["layer_stride_bytes"] < 0
    ),
    "chain: written before it is read": lambda c: c.copies and c.chained(backwards=False),
    "chain: read before it is written": lambda c: c.copies and c.chained(backwards=True),
    **{
        f"cycle: of {length}": lambda c, length=length: length in c.cycles()  # type: ignore[misc]
        for length in range(2, 7)
    },
    "cycle: several": lambda c: len(c.cycles()) > 1,
    "cycle: in several layers": lambda c: len(c.on_cycle) > 0 and c.sizes["num_layers"] > 1,
    "cycle: without layers": lambda c: len(c.on_cycle) > 0 and c.sizes["num_layers"] == 0,
    "cycle: goes elsewhere too": lambda c: bool(
        np.isin(c.moves[~c.resolved.on_cycle][:, 0], c.on_cycle[:, 0]).any()
    ),
    "cycle: beside a chain": lambda c: 0 < len(c.on_cycle) < len(c.moves),
    "cycle: at overflow scale": lambda c: (
        len(c.on_cycle) > 0 and c.plan.buffers["cache"].required_bytes >= 2**31
    ),
    "cycle: in a hostile case": lambda c: c.hostile and len(c.on_cycle) > 0,
    "scratch: absent": lambda c: c.copies and is_absent(c.plan.buffers["scratch"]),
    "scratch: exact": lambda c: (
        len(c.on_cycle) > 0 and c.plan.buffers["scratch"].extent_bytes == c.sizes["page_bytes"]
    ),
    "scratch: larger": lambda c: (
        len(c.on_cycle) > 0 and c.plan.buffers["scratch"].extent_bytes > c.sizes["page_bytes"]
    ),
    "scratch: too small and not needed": lambda c: (
        c.copies
        and not is_absent(c.plan.buffers["scratch"])
        and c.plan.buffers["scratch"].extent_bytes < c.sizes["page_bytes"]
    ),
    "scratch: at its least alignment": lambda c: (
        len(c.on_cycle) > 0
        and c.plan.buffers["scratch"].placement.offset_bytes % (2 * c.sizes["element_bytes"]) > 0
    ),
    "cache: workspace before": _placed("cache", "before_bytes"),
    "cache: slack": _placed("cache", "slack_bytes"),
    "cache: workspace after": _placed("cache", "after_bytes"),
}

_SWAPS: Mapping[str, _Predicate] = {
    "pages: fewer in the source": lambda c: (
        c.copies and c.sizes["src_num_pages"] < c.sizes["dst_num_pages"]
    ),
    "pages: fewer in the destination": lambda c: (
        c.copies and c.sizes["src_num_pages"] > c.sizes["dst_num_pages"]
    ),
    "pages: none in the source": lambda c: not c.refused and c.sizes["src_num_pages"] == 0,
    "strides: not the same": lambda c: (
        c.copies and 0 < c.stride("src_page_stride_bytes") != c.stride("dst_page_stride_bytes") > 0
    ),
    "src_cache: overlapping pages": lambda c: (
        c.copies and 0 < c.stride("src_page_stride_bytes") < c.sizes["page_bytes"]
    ),
    "dst_cache: workspace before": _placed("dst_cache", "before_bytes"),
    "dst_cache: slack": _placed("dst_cache", "slack_bytes"),
    "dst_cache: workspace after": _placed("dst_cache", "after_bytes"),
}


def copy_corners() -> Corners:
    """Corners of copy_blocks."""
    return corners_of(
        Copied,
        {
            **_PAIRS,
            **_HOSTILE,
            **_LAYERS,
            **_cache("cache", "page_stride_bytes"),
            **_boundaries("page", lambda c: c.source),
            **refused_for(*_REASONS, "scratch"),
        },
    )


def swap_corners() -> Corners:
    """Corners of swap_blocks."""
    return corners_of(
        Copied,
        {
            **_PAIRS,
            **_HOSTILE,
            **_SWAPS,
            **_cache("src_cache", "src_page_stride_bytes"),
            **_cache("dst_cache", "dst_page_stride_bytes"),
            **_boundaries("source page", lambda c: c.source),
            **_boundaries("destination page", lambda c: c.destination),
            **refused_for(*_REASONS),
        },
    )
