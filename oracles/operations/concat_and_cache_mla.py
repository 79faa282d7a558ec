"""(e) concat_and_cache_mla: a token's latent and rope parts, side by side in its slot.

The contract, with kv_c [kv_c_rows, C], k_pe [k_pe_rows, P] and
cache [num_pages, page_size_tokens, C + P]:

    for t in [0, num_tokens):
        s = slot_mapping[t]
        if s == -1: padding;  elif not 0 <= s < num_pages * page_size_tokens: skipped
        else: cache[s div page_size_tokens, s mod page_size_tokens] = q(kv_c[t]), q(k_pe[t])

    auto  q(x) = x, bit for bit
    fp8   q(x) = the code nearest to float32(x / scale), saturating; the rope part too

Decisions where contracts.md is open, beside those of all writers (`oracles/writes.py`,
`oracles/scaled_writes.py`):

* kv_c and k_pe each have a number of rows and a row stride of their own; C and P are at least 1.
* The order of slots within pages is that of slot_mapping; page and slot strides of the cache are
  any that nest, slots first included.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from pagefuzz.oracles.cells import Cells, Rows
from pagefuzz.oracles.layout import BufferRole, Bytes, Plan, Role
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.scaled_writes import ScaledWrite
from pagefuzz.oracles.writes import COUNTS, SLOT_MAPPING, WriteOperation

if TYPE_CHECKING:
    import torch

_ELEMENTS = range(1, 2**31)


class ConcatAndCacheMla(ScaledWrite):
    """Operation (e), the MLA cache without a record layout."""

    name = "concat_and_cache_mla"
    summary = "writes latent and rope parts of tokens to their slots, as they are or as fp8"
    sizes = (
        "num_tokens",
        "kv_c_rows",
        "k_pe_rows",
        "kv_c_row_stride_bytes",
        "k_pe_row_stride_bytes",
        "kv_c_elements",
        "k_pe_elements",
        "page_size_tokens",
        "num_pages",
        "page_stride_bytes",
        "slot_stride_bytes",
        "input_dtype",
        "kv_dtype",
    )
    buffers = (
        BufferRole("kv_c", Role.SOURCE),
        BufferRole("k_pe", Role.SOURCE),
        SLOT_MAPPING,
        BufferRole("scale", Role.INDEX, optional=True),
        BufferRole("cache", Role.DESTINATION),
        COUNTS,
    )
    ranges = MappingProxyType(
        {
            **WriteOperation.ranges,
            "kv_c_elements": ("elements", _ELEMENTS),
            "k_pe_elements": ("elements", _ELEMENTS),
        }
    )
    scales = ("scale",)
    input_rank = 2
    cache_rank = 3

    def inputs(self, sizes: Mapping[str, int]) -> tuple[Rows, ...]:
        unit = self.input_dtype(sizes).size_bytes
        return tuple(
            Rows.named(name, sizes[f"{name}_elements"] * unit, unit) for name in ("kv_c", "k_pe")
        )

    def caches(self, sizes: Mapping[str, int]) -> tuple[Cells, ...]:
        unit = self.cache_dtype(sizes).size_bytes
        dimensions = (
            ("page_stride_bytes", sizes["num_pages"]),
            ("slot_stride_bytes", sizes["page_size_tokens"]),
        )
        entry = (sizes["kv_c_elements"] + sizes["k_pe_elements"]) * unit
        return (Cells("cache", dimensions, entry, unit),)

    def scale_count(self, sizes: Mapping[str, int]) -> int:
        return 1

    def scale_of(self, plan: Plan, rows: Rows, within: Int64s) -> tuple[str, Int64s]:
        return "scale", np.zeros_like(within)

    def encode(self, plan: Plan, token: Int64s) -> Mapping[str, Bytes]:
        parts = [self.encoded(plan, rows, token) for rows in self.inputs(plan.arguments)]
        return {"cache": np.concatenate(parts, axis=1)[:, None, :]}

    def encode_by_loop(self, plan: Plan, token: int) -> Mapping[str, list[bytes]]:
        kv_c, k_pe = self.inputs(plan.arguments)
        latent, rope = (self.encoded_by_loop(plan, rows, token) for rows in (kv_c, k_pe))
        return {"cache": [latent + rope]}

    def expected_by_torch(self, plan: Plan) -> Mapping[str, Mapping[int, bytes]]:
        """Scatters with strided tensors that really exist; `CaseError` above 256 MiB."""
        import torch

        def cells(token: int) -> torch.Tensor:
            return torch.cat(
                [self.encoded_by_torch(plan, rows, token) for rows in self.inputs(plan.arguments)]
            )

        return {"cache": self.scattered_by_torch(plan, "cache", cells)}
