"""What a byte of a page copy's buffers is called, and where bytes in a wrong place come from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pagefuzz.oracles import contents
from pagefuzz.oracles.gather_text import oddities
from pagefuzz.oracles.layout import Bytes, Plan
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.origin import Origin, OriginKind

if TYPE_CHECKING:
    from pagefuzz.oracles.cells import Cells
    from pagefuzz.oracles.page_pairs import PagePairs
    from pagefuzz.oracles.rows import Int64s

_SHOWN_PAIRS = 8


class PageCopyText(Operation):
    """The sentences of a page copy; `page_copies.PageCopyOperation` is what they speak of."""

    @abstractmethod
    def caches(self, sizes: Mapping[str, int]) -> tuple[Cells, Cells]:
        """(the one that is read, the one that is written), equal if it is one. The last dimension
        is that of pages; one before it is that of layers."""

    @abstractmethod
    def page_pairs(self, plan: Plan) -> PagePairs: ...

    @abstractmethod
    def page_offsets(self, plan: Plan, cells: Cells, pages: Int64s) -> Int64s: ...

    @abstractmethod
    def counted_strides(self, sizes: Mapping[str, int]) -> tuple[str, ...]: ...

    def locate(self, plan: Plan, buffer: str, offset_bytes: int) -> str:
        if (cells := self._cache(plan, buffer)) is not None:
            if offset_bytes < 0:
                return "in front of page 0"
            needed = cells.required_bytes(plan.arguments)
            if offset_bytes >= needed:
                return f"past its {needed} bytes"
            layer, page, byte = _page_at(plan, cells, offset_bytes)
            gap = "" if byte < cells.run_bytes else f", past the {cells.run_bytes} of a page"
            return f"page {page}, {_layer_text(cells, layer)}byte {byte}{gap}"
        if buffer == "pairs":
            pair, side = divmod(offset_bytes // 8, 2)
            return f"pair {pair} of {plan.arguments['num_pairs']}, its {_SIDES[side]}"
        if buffer == "counts":
            return f"element {offset_bytes // 8} of 2"
        return f"byte {offset_bytes} of {plan.arguments['page_bytes']}"

    def mapping(self, plan: Plan, buffer: str, offset_bytes: int) -> str | None:
        if self.refusals(plan) or (cells := self._cache(plan, buffer)) is None:
            return None
        pairs, (source, destination) = self.page_pairs(plan), self.caches(plan.arguments)
        layer, page, byte = _page_at(plan, cells, offset_bytes)
        if byte >= cells.run_bytes:
            return "no pair copies what lies between pages"
        kept = ~pairs.is_padding & ~pairs.is_skipped
        if source == destination:
            kept &= pairs.pairs[:, 0] != pairs.pairs[:, 1]
        for side, one, verb in ((1, destination, "writes"), (0, source, "reads")):
            named = np.flatnonzero(kept & (pairs.pairs[:, side] == page))
            if one.name == buffer and named.size:
                begin, to = pairs.pairs[named[0]].tolist()
                where = f"{_layer_text(cells, layer)}byte {byte}"
                return f"pair {named[0]} ({begin} -> {to}) {verb} it: {where}"
        return f"no pair copies page {page}"

    def origin(self, plan: Plan, buffer: str, offset_bytes: int, found: Bytes) -> Origin | None:
        if not found.any():
            return Origin(OriginKind.ZEROS, "zeros")
        source, _ = self.caches(plan.arguments)
        traced = contents.trace(plan.case.seed, found)
        if traced is None:
            return self._short_origin(plan, buffer, offset_bytes, found)
        if not traced.is_payload:
            same = plan.buffers[buffer].role.is_destination and traced.role.is_destination
            if same and traced.offset_bytes == offset_bytes:
                return Origin(OriginKind.OLD, "what was there before")
            return Origin(OriginKind.FORBIDDEN, "bytes of a page that no pair reads")
        at = traced.offset_bytes - plan.buffers[source.name].payload_origin_bytes
        if source.name == buffer and at == offset_bytes:
            return Origin(OriginKind.OLD, "what was there before")
        return Origin(OriginKind.ENTRY, f"{source.name} {self.locate(plan, source.name, at)}")

    def _short_origin(
        self, plan: Plan, buffer: str, offset_bytes: int, found: Bytes
    ) -> Origin | None:
        """Compares with the same bytes of every page that is read; None if it could be chance."""
        cells = self._cache(plan, buffer)
        if cells is None or self.refusals(plan):
            return None
        _, _, byte = _page_at(plan, cells, offset_bytes)
        source, _ = self.caches(plan.arguments)
        pages = np.unique(self.page_pairs(plan).moves[:, 0])
        begins = self.page_offsets(plan, source, pages).ravel() + byte
        size = min(found.size, source.run_bytes - byte)
        if size <= 0 or begins.size > 256**size // 20:
            return None
        origin = plan.buffers[source.name].payload_origin_bytes
        held = contents.payload_at(plan.case.seed, begins + origin, size)
        same = np.flatnonzero((held == found[:size]).all(axis=1))
        if not same.size:
            return None
        place = self.locate(plan, source.name, int(begins[same[0]]))
        return Origin(OriginKind.ENTRY, f"{source.name} {place}")

    def describe(self, plan: Plan) -> str:
        a = plan.arguments
        source, destination = self.caches(a)
        parts = [f"P={a['num_pairs']}"]
        dense = {}
        for cells in dict.fromkeys((source, destination)):
            *layers, (page_stride, pages) = cells.dimensions
            parts.append(f"{'' if source == destination else cells.name + ' '}NB={pages}")
            dense[page_stride] = cells.run_bytes
            for layer_stride, count in layers:
                parts.append(f"L={count}")
                dense[layer_stride] = cells.run_bytes * pages
        raw = plan.buffers["pairs"].image.values
        if raw.size:
            ids = raw.view(np.int64).reshape(-1, 2).tolist()
            shown = [f"{page}->{to}" for page, to in ids[:_SHOWN_PAIRS]]
            more = len(ids) - len(shown)
            parts.append(f"pairs={' '.join(shown)}{f' ... {more} more' if more else ''}")
        parts.append(f"page {a['page_bytes']} B of {a['element_bytes']}-byte elements")
        if "scratch" in plan.buffers and not plan.buffers["scratch"].is_null:
            parts.append(f"scratch {plan.buffers['scratch'].extent_bytes} B")
        counted = self.counted_strides(a)
        padded = [f"{n}={a[n]}" for n, usual in dense.items() if n in counted and a[n] != usual]
        parts.append(f"{' '.join(padded) or 'dense'}, seed {plan.case.seed}")
        return "  ".join([*parts, *oddities(plan)])

    def _cache(self, plan: Plan, buffer: str) -> Cells | None:
        return next((c for c in self.caches(plan.arguments) if c.name == buffer), None)


_SIDES = ("source", "destination")


def _page_at(plan: Plan, cells: Cells, offset_bytes: int) -> tuple[int, int, int]:
    """(layer, page, byte from the page's beginning); outside the cache the nearest page.

    From the largest stride to the smallest, each divides what is left.
    """
    strides = cells.strides(plan.arguments)
    index = [0] * len(strides)
    rest = offset_bytes
    for nth in sorted(range(len(strides)), key=lambda nth: -strides[nth]):
        count = cells.dimensions[nth][1]
        if strides[nth] and count > 1:
            index[nth] = min(max(rest // strides[nth], 0), count - 1)
            rest -= index[nth] * strides[nth]
    return index[0] if len(index) > 1 else 0, index[-1], rest


def _layer_text(cells: Cells, layer: int) -> str:
    """ "layer 1, " where there are layers."""
    return f"layer {layer}, " if len(cells.dimensions) > 1 else ""
