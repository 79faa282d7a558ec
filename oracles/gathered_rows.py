"""What readers make of cells, for round trips: written anew from contracts.md, (a) to (d).

Nothing here asks the readers' own contracts; only names of arguments are theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pagefuzz.oracles.free_nans import FreeNans
from pagefuzz.oracles.layout import Bytes, Dtype, Plan
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.small_floats import Float32s, narrowed, values_of, widened
from pagefuzz.oracles.written_cells import FP8, indexer_addresses, scales


@dataclass(frozen=True)
class Rows:
    """Rows of one destination.

    values   uint8 [n, row_bytes]
    copied   bytes of the entry that the row is a copy of, if it is one
    nans     computed elements that may be any NaN
    element_bytes  of what is written whole; 1 of a copy, whose elements are those of the cache
    """

    values: Bytes
    copied: slice | None = None
    nans: FreeNans | None = None
    element_bytes: int = 1


class GatheredRows(ABC):
    """One reader. destinations: name -> size that is its row stride."""

    name: ClassVar[str]
    destinations: ClassVar[Mapping[str, str]] = {"dst": "dst_row_stride_bytes"}

    @abstractmethod
    def entry_bytes(self, sizes: Mapping[str, int]) -> int:
        """Of a cell, that become a row."""

    def addresses(self, sizes: Mapping[str, int], page: Int64s, slot: Int64s) -> Int64s:
        """int64 [n, entry_bytes]: where the bytes of entries lie, from the base of src."""
        begin = page * sizes["page_stride_bytes"] + slot * sizes["slot_stride_bytes"]
        return begin[:, None] + np.arange(self.entry_bytes(sizes), dtype=np.int64)

    @abstractmethod
    def rows(self, plan: Plan, entries: Bytes) -> Mapping[str, Rows]:
        """Rows by destination, of uint8 [n, entry_bytes]."""


class _Copied(GatheredRows):
    name = "cp_gather_cache"

    def entry_bytes(self, sizes: Mapping[str, int]) -> int:
        return sizes["entry_bytes"]

    def rows(self, plan: Plan, entries: Bytes) -> Mapping[str, Rows]:
        return {"dst": Rows(entries, slice(0, entries.shape[1]))}


class _Dequantised(GatheredRows):
    name = "gather_and_maybe_dequant_cache"

    def entry_bytes(self, sizes: Mapping[str, int]) -> int:
        unit = 1 if sizes["kv_dtype"] in FP8 else Dtype(sizes["dst_dtype"]).size_bytes
        return sizes["entry_elements"] * unit

    def rows(self, plan: Plan, entries: Bytes) -> Mapping[str, Rows]:
        a = plan.arguments
        if a["kv_dtype"] not in FP8:
            return {"dst": Rows(entries, slice(0, entries.shape[1]))}
        codes, result = FP8[a["kv_dtype"]], Dtype(a["dst_dtype"])
        values = _product(values_of(entries, codes), scales(plan, "scale", 1))
        raw = narrowed(values, result)
        return {"dst": Rows(raw, None, FreeNans.of(raw, result), result.size_bytes)}


class _Upconverted(GatheredRows):
    name = "cp_gather_and_upconvert_fp8_kv_cache"

    def entry_bytes(self, sizes: Mapping[str, int]) -> int:
        return 512 + 4 * 4 + 64 * 2

    def rows(self, plan: Plan, entries: Bytes) -> Mapping[str, Rows]:
        codes, words, rope = np.split(entries, (512, 528), axis=1)
        scale = np.repeat(widened(words, Dtype.F32), 128, axis=1)
        latent = narrowed(_product(values_of(codes, Dtype.E4M3), scale), Dtype.BF16)
        raw = np.concatenate((latent, rope), axis=1)
        nans = FreeNans.of(raw, Dtype.BF16, np.arange(576) < 512)
        return {"dst": Rows(raw, None, nans, 2)}


class _Indexer(GatheredRows):
    """A cell is D key bytes, then G scale words."""

    name = "cp_gather_indexer_k_quant_cache"
    destinations: ClassVar[Mapping[str, str]] = {
        "dst_k": "dst_k_row_stride_bytes",
        "dst_scale": "dst_scale_row_stride_bytes",
    }

    def entry_bytes(self, sizes: Mapping[str, int]) -> int:
        return sizes["head_dim"] + 4 * (sizes["head_dim"] // sizes["quant_block"])

    def addresses(self, sizes: Mapping[str, int], page: Int64s, slot: Int64s) -> Int64s:
        return indexer_addresses(sizes, page, slot)

    def rows(self, plan: Plan, entries: Bytes) -> Mapping[str, Rows]:
        keys = plan.arguments["head_dim"]
        k, scale = slice(0, keys), slice(keys, entries.shape[1])
        return {"dst_k": Rows(entries[:, k], k), "dst_scale": Rows(entries[:, scale], scale)}


class _HintedIndexer(_Indexer):
    """Hints say which request a row is of; they change nothing about its entry."""

    name = "cp_gather_indexer_k_quant_cache_hinted"


def _product(values: Float32s, scale: Float32s) -> Float32s:
    with np.errstate(all="ignore"):
        product: Float32s = np.multiply(values, scale, dtype=np.float32)
    return product


#: By operation.
READERS: Mapping[str, GatheredRows] = {
    side.name: side
    for side in (_Copied(), _Dequantised(), _Upconverted(), _Indexer(), _HintedIndexer())
}
