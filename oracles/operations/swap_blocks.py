"""(e) swap_blocks: copies pages of a source cache to pages of a distinct destination cache.

The contract, with src_cache [src_num_pages, page_bytes] and dst_cache [dst_num_pages, page_bytes]:

    for s, d in pairs:                                  # tested in this order
        if s == -1 or d == -1: padding
        elif s is not in [0, src_num_pages) or d not in [0, dst_num_pages): skipped
        elif another such pair has the same d and another s: the launch is refused
        else: dst_cache[d] = src_cache[s]

Decisions where contracts.md is open, beside those of all page copies (`oracles/page_copies.py`):

* Nothing is exchanged: the source cache is only read, and a pair (s, s) is a pair like any other.
* The caches have page counts and page strides of their own, and one page size. Pages of the source
  may overlap, those of the destination may not. The two caches share no byte, or it is refused.
* There are no layers: a launch is of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagefuzz.oracles.cells import Cells
from pagefuzz.oracles.expectation import Footprint, Refusal
from pagefuzz.oracles.layout import BufferRole, Plan, Role
from pagefuzz.oracles.page_copies import COUNTS, PAIRS, PageCopyOperation


class SwapBlocks(PageCopyOperation):
    """Operation (e), pages from one cache to another."""

    name = "swap_blocks"
    summary = "copies pages of one cache to pages of another"
    sizes = (
        "num_pairs",
        "src_num_pages",
        "dst_num_pages",
        "src_page_stride_bytes",
        "dst_page_stride_bytes",
        "page_bytes",
        "element_bytes",
    )
    buffers = (
        PAIRS,
        BufferRole("src_cache", Role.SOURCE),
        BufferRole("dst_cache", Role.DESTINATION),
        COUNTS,
    )
    numbers = ("num_pairs", "src_num_pages", "dst_num_pages")
    ranks = MappingProxyType({"src_cache": 2, "dst_cache": 2})

    def caches(self, sizes: Mapping[str, int]) -> tuple[Cells, Cells]:
        source, destination = (
            Cells(
                f"{side}_cache",
                ((f"{side}_page_stride_bytes", sizes[f"{side}_num_pages"]),),
                sizes["page_bytes"],
                sizes["element_bytes"],
            )
            for side in ("src", "dst")
        )
        return source, destination

    def cycle_refusals(self, plan: Plan, *, has_cycle: bool) -> tuple[Refusal, ...]:
        return ()

    def staging(self, plan: Plan, *, has_cycle: bool) -> Mapping[str, Footprint]:
        return {}
