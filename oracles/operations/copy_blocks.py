"""(e) copy_blocks: copies pages of one cache to other pages of it, in every layer.

The contract, with cache [num_layers, num_pages, page_bytes]:

    for s, d in pairs:                                  # tested in this order
        if s == -1 or d == -1: padding
        elif s or d is not in [0, num_pages): skipped
        elif another such pair has the same d and another s: the launch is refused
        elif s == d: nothing to do
        else: new_cache[:, d] = old_cache[:, s]         # as if all pages were read first

Decisions where contracts.md is open, beside those of all page copies (`oracles/page_copies.py`):

* Layers lie in one cache argument at a stride of their own, in any order with pages that nests.
  Engines pass a pointer a layer; it is the same memory.
* A cycle is one of the pairs that are left: a page to itself is none. With a cycle, scratch must
  have page_bytes bytes (refused otherwise, an absent one too, whatever num_layers is); its first
  page_bytes may be read and written, what they hold afterwards is open. Without one it is not
  touched, and may be absent or of any extent.
* A scratch that is passed must have rank 1, the cache's element size and alignment, and no byte of
  pairs or counts, needed or not. That it shares no byte of the cache's pages is the caller's duty.
* Several cycles, and all layers, share the one page of scratch.
* With num_layers == 0 pairs are examined and counted all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagefuzz.oracles.cells import Cells
from pagefuzz.oracles.expectation import Footprint, Refusal
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import BufferRole, Plan, Role
from pagefuzz.oracles.page_copies import COUNTS, PAIRS, PageCopyOperation


class CopyBlocks(PageCopyOperation):
    """Operation (e), pages within one cache."""

    name = "copy_blocks"
    summary = "copies pages of a cache to other pages of it, in every layer"
    sizes = (
        "num_pairs",
        "num_layers",
        "num_pages",
        "layer_stride_bytes",
        "page_stride_bytes",
        "page_bytes",
        "element_bytes",
    )
    buffers = (
        PAIRS,
        BufferRole("cache", Role.IN_PLACE),
        BufferRole("scratch", Role.DESTINATION, optional=True),
        COUNTS,
    )
    numbers = ("num_pairs", "num_layers", "num_pages")
    ranks = MappingProxyType({"cache": 3, "scratch": 1})

    def caches(self, sizes: Mapping[str, int]) -> tuple[Cells, Cells]:
        dimensions = (
            ("layer_stride_bytes", sizes["num_layers"]),
            ("page_stride_bytes", sizes["num_pages"]),
        )
        cache = Cells("cache", dimensions, sizes["page_bytes"], sizes["element_bytes"])
        return cache, cache

    def cycle_refusals(self, plan: Plan, *, has_cycle: bool) -> tuple[Refusal, ...]:
        needed, given = plan.arguments["page_bytes"], plan.buffers["scratch"].extent_bytes
        if not has_cycle or given >= needed:
            return ()
        sentence = f"pairs hold a cycle, and scratch has {given} bytes, fewer than {needed}"
        return (Refusal("scratch", sentence),)

    def staging(self, plan: Plan, *, has_cycle: bool) -> Mapping[str, Footprint]:
        if not has_cycle or not plan.arguments["num_layers"]:
            return {}
        page = IntervalSet([0], [plan.arguments["page_bytes"]])
        return {"scratch": Footprint(page, may_write=page)}
