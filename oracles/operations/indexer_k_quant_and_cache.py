"""(e) indexer_k_quant_and_cache: a token's indexer key as fp8, and its scales, in two places.

The contract, with k [k_rows, D] of bf16, D = head_dim, Q = quant_block, G = D / Q, and pages of
page_size_tokens * (D + 4G) bytes, laid out as cp_gather_indexer_k_quant_cache reads them:

    for t in [0, num_tokens):
        s = slot_mapping[t]
        if s == -1: padding;  elif not 0 <= s < num_pages * page_size_tokens: skipped
        else: base, o = s div page_size_tokens * page_stride_bytes, s mod page_size_tokens
            cache[base + key(o, d)] = E4M3(k[t, d] / scale[d div Q])                 for d < D
            cache[base + page_size_tokens * D + 4 * (o * G + g)] = scale[g], fp32    for g < G

    page_layout 0, flat:     key(o, d) = o * D + d
    page_layout 1, tiled16:  key(o, d) = (o div 16) * 16 * D + (d div 16) * 256
                                       + (o mod 16) * 16 + (d mod 16)

    plain  scale = max(amax, 1e-4) / 448
    pow2   scale = the same, rounded up to a power of two

Decisions where contracts.md is open, beside those of all writers (`oracles/writes.py`,
`oracles/grouped_writes.py`):

* D is a multiple of 16 in 16..1024, Q a positive divisor of D, page_layout 0 or 1; tiled16 needs
  page_size_tokens to be a multiple of 16.
* A page stride below page_size_tokens * (D + 4G) is refused as one that does not nest, where it
  counts: num_pages > 1. The bytes of padding behind the last page need not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from pagefuzz.oracles.cells import Cells, IndexerCells, Part, Rows
from pagefuzz.oracles.expectation import Refusal
from pagefuzz.oracles.fp8 import Float32s
from pagefuzz.oracles.grouped_writes import (
    CACHE_ALIGNMENT_BYTES,
    ELEMENT_BYTES,
    LARGEST,
    POW2,
    SMALL,
    WORD_BYTES,
    GroupedWrite,
    divided_by_loop,
    power_of_two,
    power_of_two_by_loop,
    power_of_two_by_torch,
)
from pagefuzz.oracles.indexer_pages import TILE, IndexerPages
from pagefuzz.oracles.layout import BufferRole, Bytes, Dtype, Plan, Role
from pagefuzz.oracles.refusals import Found
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.writes import COUNTS, SLOT_MAPPING

if TYPE_CHECKING:
    import torch

TILED16 = 1


class IndexerKQuantAndCache(GroupedWrite):
    """Operation (e), the indexer's cache."""

    name = "indexer_k_quant_and_cache"
    summary = "writes indexer keys of tokens as fp8, and their scales, to their slots"
    sizes = (
        "num_tokens",
        "k_rows",
        "k_row_stride_bytes",
        "head_dim",
        "quant_block",
        "page_layout",
        "page_size_tokens",
        "num_pages",
        "page_stride_bytes",
        "scale_kind",
    )
    buffers = (
        BufferRole("k", Role.SOURCE),
        SLOT_MAPPING,
        BufferRole("cache", Role.DESTINATION),
        COUNTS,
    )
    ranges = MappingProxyType(
        {
            **GroupedWrite.ranges,
            "head_dim": ("head_dim", range(TILE, 1025)),
            "quant_block": ("quant_block", range(1, 1025)),
            "page_layout": ("page_layout", range(2)),
        }
    )
    quantised = "k"
    payload_values = frozenset({"k"})

    def inputs(self, sizes: Mapping[str, int]) -> tuple[Rows, ...]:
        return (Rows.named("k", sizes["head_dim"] * ELEMENT_BYTES, ELEMENT_BYTES),)

    def caches(self, sizes: Mapping[str, int]) -> tuple[Cells, ...]:
        keys = sizes["head_dim"]
        # A quant block of a refused case may be anything.
        scales = keys // max(sizes["quant_block"], 1) * WORD_BYTES
        tiled = sizes["page_layout"] == TILED16
        stride = sizes["page_stride_bytes"] if sizes["num_pages"] > 1 else 0
        pages = IndexerPages(stride, sizes["page_size_tokens"], keys, scales, tiled)
        parts = (
            Part("keys", TILE if tiled else keys, 1, 0, Dtype.E4M3),
            Part("scales", scales, WORD_BYTES),
        )
        dimensions = (("page_stride_bytes", sizes["num_pages"]),)
        page_bytes, unit = pages.page_bytes, CACHE_ALIGNMENT_BYTES
        return (IndexerCells("cache", dimensions, page_bytes, unit, parts, pages=pages),)

    def clamped(self, sizes: Mapping[str, int]) -> dict[str, int]:
        laid = super().clamped(sizes)
        laid["head_dim"] -= laid["head_dim"] % TILE
        if laid["head_dim"] % laid["quant_block"]:
            laid["quant_block"] = laid["head_dim"]
        if laid["page_layout"] == TILED16 and laid["page_size_tokens"] % TILE:
            laid["page_layout"] = 0
        return laid

    def own_refusals(self, found: Found, plan: Plan) -> None:
        super().own_refusals(found, plan)
        a = plan.arguments
        for name, multiple in (("head_dim", TILE), ("page_size_tokens", TILE)):
            needed = name == "head_dim" or a["page_layout"] == TILED16
            if needed and a[name] % multiple:
                found.append(Refusal(name, f"{name}={a[name]} is not a multiple of {multiple}"))
        if a["quant_block"] > 0 and a["head_dim"] % a["quant_block"]:
            found.append(
                Refusal(
                    "quant_block",
                    f"quant_block={a['quant_block']} does not divide head_dim={a['head_dim']}",
                )
            )

    def group_elements(self, sizes: Mapping[str, int]) -> int:
        return sizes["quant_block"]

    def encode(self, plan: Plan, token: Int64s) -> Mapping[str, Bytes]:
        codes, scales = self.encoded(plan, token)
        (cells,) = self.caches(plan.arguments)
        run = cells.parts[0].run_bytes
        runs = codes.shape[1] // run
        return {"keys": codes.reshape(token.size, runs, run), "scales": scales[:, None, :]}

    def encode_by_loop(self, plan: Plan, token: int) -> Mapping[str, list[bytes]]:
        codes, scales = self.encoded_by_loop(plan, token)
        run = TILE if plan.arguments["page_layout"] == TILED16 else len(codes)
        keys = [codes[at : at + run] for at in range(0, len(codes), run)]
        return {"keys": keys, "scales": [scales]}

    def begins_by_loop(
        self, sizes: Mapping[str, int], cells: Cells, part: Part, page: int, slot: int
    ) -> list[int]:
        base = page * sizes["page_stride_bytes"] if sizes["num_pages"] > 1 else 0
        head, tokens = sizes["head_dim"], sizes["page_size_tokens"]
        if part.name == "scales":
            return [base + tokens * head + WORD_BYTES * (slot * (head // sizes["quant_block"]))]
        if sizes["page_layout"] != TILED16:
            return [base + slot * head]
        return [
            base + slot // 16 * 16 * head + d // 16 * 256 + slot % 16 * 16
            for d in range(0, head, 16)
        ]

    def expected_by_torch(self, plan: Plan) -> Mapping[str, Mapping[int, bytes]]:
        """Scatters to views of the pages' bytes; `CaseError` above 256 MiB."""
        if self.refusals(plan):
            return {"keys": {}, "scales": {}}
        a = plan.arguments
        (cells,) = self.caches(a)
        pages, size, head = a["num_pages"], a["page_size_tokens"], a["head_dim"]
        stride = a["page_stride_bytes"] if pages > 1 else 0
        every = self.addresses_by_torch(plan, cells)
        whole = every.as_strided((pages, cells.run_bytes), (stride, 1))
        keys = whole[:, : size * head].reshape(pages, size, head)
        if a["page_layout"] == TILED16:
            tiles = keys.reshape(pages, size // 16, head // 16, 16, 16)
            keys = tiles.transpose(2, 3).reshape(pages, size, head // 16, 16)
        words = WORD_BYTES * (head // a["quant_block"])
        scales = whole[:, size * head :].reshape(pages, size, words)
        return {
            name: self.scattered_to(
                plan,
                cells,
                where,
                lambda token, nth=nth: self.encoded_by_torch(plan, token)[nth],  # type: ignore[misc]
            )
            for nth, (name, where) in enumerate((("keys", keys), ("scales", scales)))
        }

    # ---- scales ----------------------------------------------------------------------------------

    def scales(self, amax: Float32s, kind: int) -> Float32s:
        amax = np.maximum(amax, np.float32(SMALL))
        quotient: Float32s = np.divide(amax, np.float32(LARGEST), dtype=np.float32)
        return power_of_two(quotient) if kind == POW2 else quotient

    def scale_by_loop(self, amax: float, kind: int) -> float:
        quotient = divided_by_loop(max(amax, SMALL), LARGEST)
        return power_of_two_by_loop(quotient) if kind == POW2 else quotient

    def scales_by_torch(self, amax: torch.Tensor, kind: int) -> torch.Tensor:
        quotient = amax.clamp(min=SMALL) / LARGEST
        return power_of_two_by_torch(quotient) if kind == POW2 else quotient
