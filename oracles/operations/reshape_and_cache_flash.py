"""(e) reshape_and_cache_flash: a token's keys and values, head by head, in its slot of two caches.

The contract, with key and value [rows, num_heads, D] and each cache
[num_pages, page_size_tokens, num_heads, D] of any page, slot and head strides:

    for t in [0, num_tokens):
        s = slot_mapping[t]
        if s == -1: padding;  elif not 0 <= s < num_pages * page_size_tokens: skipped
        else: key_cache[s div page_size_tokens, s mod page_size_tokens, h] = q(key[t, h]) and
              value_cache likewise, for every head h

    auto  q(x) = x, bit for bit
    fp8   q(x) = the code nearest to float32(x / scale), saturating; keys by k_scale, values by
          v_scale, of one value each or one a head

Decisions where contracts.md is open, beside those of all writers (`oracles/writes.py`,
`oracles/scaled_writes.py`):

* Rows of key and value lie at row strides of their own; the heads of a row are dense. D is the same
  for keys and values.
* num_heads lies in 1..65535, D in 1..2^31-1; scale_count is 1 or num_heads.
* A token is counted once, not once a cache.
* The two caches may interleave in one buffer, such as [num_pages, 2, page_size_tokens, heads, D].
  A case says so by placing value_cache over key_cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from pagefuzz.oracles.cells import Cells, Rows
from pagefuzz.oracles.expectation import Refusal
from pagefuzz.oracles.layout import BufferRole, Bytes, Plan, Role
from pagefuzz.oracles.refusals import Found
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.scaled_writes import ScaledWrite
from pagefuzz.oracles.writes import COUNTS, SLOT_MAPPING, WriteOperation

if TYPE_CHECKING:
    import torch

_SIDES = ("key", "value")


class ReshapeAndCacheFlash(ScaledWrite):
    """Operation (e), the caches of attention with heads."""

    name = "reshape_and_cache_flash"
    summary = "writes keys and values of tokens to their slots, as they are or as fp8"
    sizes = (
        "num_tokens",
        "key_rows",
        "value_rows",
        "key_row_stride_bytes",
        "value_row_stride_bytes",
        "num_heads",
        "head_elements",
        "scale_count",
        "page_size_tokens",
        "num_pages",
        "key_page_stride_bytes",
        "key_slot_stride_bytes",
        "key_head_stride_bytes",
        "value_page_stride_bytes",
        "value_slot_stride_bytes",
        "value_head_stride_bytes",
        "input_dtype",
        "kv_dtype",
    )
    buffers = (
        BufferRole("key", Role.SOURCE),
        BufferRole("value", Role.SOURCE),
        SLOT_MAPPING,
        BufferRole("k_scale", Role.INDEX, optional=True),
        BufferRole("v_scale", Role.INDEX, optional=True),
        BufferRole("key_cache", Role.DESTINATION),
        BufferRole("value_cache", Role.DESTINATION),
        COUNTS,
    )
    ranges = MappingProxyType(
        {
            **WriteOperation.ranges,
            "num_heads": ("elements", range(1, 65536)),
            "head_elements": ("elements", range(1, 2**31)),
        }
    )
    scales = ("k_scale", "v_scale")
    input_rank = 3
    cache_rank = 4

    def inputs(self, sizes: Mapping[str, int]) -> tuple[Rows, ...]:
        unit = self.input_dtype(sizes).size_bytes
        row_bytes = sizes["num_heads"] * sizes["head_elements"] * unit
        return tuple(Rows.named(side, row_bytes, unit) for side in _SIDES)

    def caches(self, sizes: Mapping[str, int]) -> tuple[Cells, ...]:
        unit = self.cache_dtype(sizes).size_bytes
        counts = (sizes["num_pages"], sizes["page_size_tokens"], sizes["num_heads"])
        return tuple(
            Cells(
                f"{side}_cache",
                tuple(
                    (f"{side}_{part}_stride_bytes", count)
                    for part, count in zip(("page", "slot", "head"), counts, strict=True)
                ),
                sizes["head_elements"] * unit,
                unit,
            )
            for side in _SIDES
        )

    def clamped(self, sizes: Mapping[str, int]) -> dict[str, int]:
        laid = super().clamped(sizes)
        if laid["scale_count"] not in (1, laid["num_heads"]):
            laid["scale_count"] = 1
        return laid

    def own_refusals(self, found: Found, plan: Plan) -> None:
        super().own_refusals(found, plan)
        count, heads = plan.arguments["scale_count"], plan.arguments["num_heads"]
        if count not in (1, heads):
            found.append(
                Refusal("scale_count", f"scale_count={count} must be 1 or num_heads={heads}")
            )

    def scale_count(self, sizes: Mapping[str, int]) -> int:
        return sizes["scale_count"]

    def scale_of(self, plan: Plan, rows: Rows, within: Int64s) -> tuple[str, Int64s]:
        a = plan.arguments
        name = "k_scale" if rows.name == "key" else "v_scale"
        if a["scale_count"] == 1:
            return name, np.zeros_like(within)
        head = within // (a["head_elements"] * rows.element_bytes)
        return name, np.minimum(head, a["num_heads"] - 1)

    def encode(self, plan: Plan, token: Int64s) -> Mapping[str, Bytes]:
        a = plan.arguments
        return {
            f"{rows.name}_cache": self.encoded(plan, rows, token).reshape(
                token.size, a["num_heads"], -1 if token.size else cells.run_bytes
            )
            for rows, cells in zip(self.inputs(a), self.caches(a), strict=True)
        }

    def encode_by_loop(self, plan: Plan, token: int) -> Mapping[str, list[bytes]]:
        out = {}
        for rows, cells in zip(
            self.inputs(plan.arguments), self.caches(plan.arguments), strict=True
        ):
            row = self.encoded_by_loop(plan, rows, token)
            size = cells.run_bytes
            out[cells.name] = [row[at : at + size] for at in range(0, len(row), size)]
        return out

    def expected_by_torch(self, plan: Plan) -> Mapping[str, Mapping[int, bytes]]:
        """Scatters with strided tensors that really exist; `CaseError` above 256 MiB."""
        if self.refusals(plan):
            return {"key_cache": {}, "value_cache": {}}

        def stored(rows: Rows, token: int) -> torch.Tensor:
            return self.encoded_by_torch(plan, rows, token)

        key, value = self.inputs(plan.arguments)
        return {
            "key_cache": self.scattered_by_torch(plan, "key_cache", lambda t: stored(key, t)),
            "value_cache": self.scattered_by_torch(plan, "value_cache", lambda t: stored(value, t)),
        }
