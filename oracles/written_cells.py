"""What writers store of a token, for round trips: written anew from contracts.md, operation (e).

A *cell* is everything a token stores in one cache, as one row of bytes, wherever these lie in
memory: an entry, the heads one after another. Nothing here asks the writers' own contracts; only
names of arguments and the bytes of inputs are theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from pagefuzz.oracles import contents, index_values
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.layout import Bytes, Dtype, Plan
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.small_floats import Float32s, codes_of, widened

#: kv_dtype -> format of the codes; 0 is auto.
FP8 = {1: Dtype.E4M3, 2: Dtype.E5M2}


class WrittenCells(ABC):
    """One writer. `torn` says whether a cell that several tokens name may hold bytes of each."""

    name: ClassVar[str]
    caches: ClassVar[tuple[str, ...]]
    torn: ClassVar[bool] = True

    @abstractmethod
    def cell_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes that a token stores in one cache."""

    @abstractmethod
    def element_bytes(self, sizes: Mapping[str, int]) -> int:
        """Of what is stored whole; divides `cell_bytes`."""

    @abstractmethod
    def codes(self, sizes: Mapping[str, int]) -> tuple[Dtype, int] | None:
        """Format and number of the codes at the beginning of a cell, of which a NaN is any NaN."""

    @abstractmethod
    def stored(self, plan: Plan, cache: str, token: Int64s) -> Bytes:
        """uint8 [tokens, cell_bytes]."""

    @abstractmethod
    def addresses(self, sizes: Mapping[str, int], cache: str, page: Int64s, slot: Int64s) -> Int64s:
        """int64 [n, cell_bytes]: where the bytes of each cell lie, from the base of the cache."""


def input_bytes(plan: Plan, name: str, offsets: Int64s, size_bytes: int) -> Bytes:
    """uint8 [n, size_bytes]: what an input holds at each of `offsets`."""
    buffer = plan.buffers[name]
    image = buffer.image
    if not image.offsets.size:
        at = offsets + buffer.payload_origin_bytes
        return contents.payload_at(plan.case.seed, at, size_bytes)
    width = image.values.shape[1]
    each = offsets[:, None] + np.arange(0, size_bytes, width, dtype=np.int64)
    found = np.minimum(np.searchsorted(image.offsets, each), image.offsets.size - 1)
    if not np.array_equal(image.offsets[found], each):
        raise CaseError(f"{name} holds no input at every byte that its rows are made of")
    return image.values[found].reshape(offsets.size, size_bytes)


def scales(plan: Plan, name: str, count: int) -> Float32s:
    """float32 [count], from the bits that the case gives."""
    bits = index_values.vector(plan.case.values[name], count, index_values.INT32, name)
    return bits.astype(np.int32).view(np.float32)


def rows_of(plan: Plan, name: str, token: Int64s, row_bytes: int) -> Bytes:
    """uint8 [tokens, row_bytes]: rows of an input at `<name>_row_stride_bytes`."""
    a = plan.arguments
    stride = a[f"{name}_row_stride_bytes"] if a[f"{name}_rows"] > 1 else 0
    return input_bytes(plan, name, token * stride, row_bytes)


def _unit(sizes: Mapping[str, int]) -> int:
    return Dtype(sizes["input_dtype"]).size_bytes


def _as_stored(plan: Plan, raw: Bytes, scale: Float32s | None) -> Bytes:
    """Bits as they are, or the codes of fp32(x / scale)."""
    a = plan.arguments
    if scale is None:
        return raw
    values = widened(raw, Dtype(a["input_dtype"]))
    with np.errstate(all="ignore"):
        quotient: Float32s = np.divide(values, scale, dtype=np.float32)
    return codes_of(quotient, FP8[a["kv_dtype"]])


class _Entries(WrittenCells):
    """Writers of plain entries, bits or codes."""

    @abstractmethod
    def elements(self, sizes: Mapping[str, int]) -> int: ...

    def element_bytes(self, sizes: Mapping[str, int]) -> int:
        return 1 if sizes["kv_dtype"] in FP8 else _unit(sizes)

    def cell_bytes(self, sizes: Mapping[str, int]) -> int:
        return self.elements(sizes) * self.element_bytes(sizes)

    def codes(self, sizes: Mapping[str, int]) -> tuple[Dtype, int] | None:
        kind = sizes["kv_dtype"]
        return (FP8[kind], self.elements(sizes)) if kind in FP8 else None


class _Mla(_Entries):
    name = "concat_and_cache_mla"
    caches = ("cache",)

    def elements(self, sizes: Mapping[str, int]) -> int:
        return sizes["kv_c_elements"] + sizes["k_pe_elements"]

    def stored(self, plan: Plan, cache: str, token: Int64s) -> Bytes:
        a = plan.arguments
        latent = rows_of(plan, "kv_c", token, a["kv_c_elements"] * _unit(a))
        rope = rows_of(plan, "k_pe", token, a["k_pe_elements"] * _unit(a))
        scale = scales(plan, "scale", 1) if a["kv_dtype"] in FP8 else None
        return _as_stored(plan, np.concatenate((latent, rope), axis=1), scale)

    def addresses(self, sizes: Mapping[str, int], cache: str, page: Int64s, slot: Int64s) -> Int64s:
        begin = page * sizes["page_stride_bytes"] + slot * sizes["slot_stride_bytes"]
        return begin[:, None] + np.arange(self.cell_bytes(sizes), dtype=np.int64)


class _Flash(_Entries):
    name = "reshape_and_cache_flash"
    caches = ("key_cache", "value_cache")

    def elements(self, sizes: Mapping[str, int]) -> int:
        return sizes["num_heads"] * sizes["head_elements"]

    def stored(self, plan: Plan, cache: str, token: Int64s) -> Bytes:
        a, side = plan.arguments, cache.removesuffix("_cache")
        scale = None
        if a["kv_dtype"] in FP8:
            scale = scales(plan, f"{side[0]}_scale", a["scale_count"])
            scale = np.repeat(scale, self.elements(a) // a["scale_count"])
        return _as_stored(plan, rows_of(plan, side, token, self.elements(a) * _unit(a)), scale)

    def addresses(self, sizes: Mapping[str, int], cache: str, page: Int64s, slot: Int64s) -> Int64s:
        side = cache.removesuffix("_cache")
        run = sizes["head_elements"] * self.element_bytes(sizes)
        head, byte = np.divmod(np.arange(self.cell_bytes(sizes), dtype=np.int64), run)
        inside = head * sizes[f"{side}_head_stride_bytes"] + byte
        begin = page * sizes[f"{side}_page_stride_bytes"]
        begin = begin + slot * sizes[f"{side}_slot_stride_bytes"]
        at: Int64s = begin[:, None] + inside
        return at


class _Grouped(WrittenCells):
    """Writers of E4M3 codes with an fp32 scale for every group of bf16 values. A cell begins with
    the codes, then come the scales."""

    torn = False

    @abstractmethod
    def elements(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Codes of a cell, and of a group."""

    @abstractmethod
    def scales_of(self, amax: Float32s, kind: int) -> Float32s:
        """What is stored for groups of these largest magnitudes; kind 0 is plain, 1 pow2."""

    def element_bytes(self, sizes: Mapping[str, int]) -> int:
        return 1

    def codes(self, sizes: Mapping[str, int]) -> tuple[Dtype, int] | None:
        return Dtype.E4M3, self.elements(sizes)[0]

    def grouped(self, plan: Plan, name: str, token: Int64s) -> Bytes:
        """uint8 [tokens, codes and scales] of rows of an input."""
        count, group = self.elements(plan.arguments)
        values = widened(rows_of(plan, name, token, 2 * count), Dtype.BF16)
        values = values.reshape(token.size, count // group, group)
        amax = np.nan_to_num(np.abs(values), nan=0.0, posinf=np.inf).max(axis=2, initial=0.0)
        with np.errstate(all="ignore"):
            scale = self.scales_of(amax.astype(np.float32), plan.arguments["scale_kind"])
            quotient: Float32s = np.divide(values, scale[:, :, None], dtype=np.float32)
        codes = codes_of(quotient, Dtype.E4M3).reshape(token.size, count)
        words = np.ascontiguousarray(scale).view(np.uint8).reshape(token.size, 4 * (count // group))
        return np.concatenate((codes, words), axis=1)


def _power_of_two(values: Float32s) -> Float32s:
    """The smallest not below each; infinity stays."""
    fraction, exponent = np.frexp(values)
    power = np.ldexp(np.float32(1), np.where(fraction == 0.5, exponent - 1, exponent))
    rounded: Float32s = np.where(np.isinf(values), values, power).astype(np.float32)
    return rounded


_LARGEST, _SMALL = np.float32(448), np.float32(1e-4)


class _DsMla(_Grouped):
    name = "concat_and_cache_ds_mla"
    caches = ("cache",)

    def elements(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        return sizes["kv_c_elements"], 128

    def scales_of(self, amax: Float32s, kind: int) -> Float32s:
        scale: Float32s = np.divide(amax, _LARGEST, dtype=np.float32)
        if kind:
            return _power_of_two(np.maximum(scale, _SMALL))
        return np.maximum(scale, np.finfo(np.float32).tiny)

    def cell_bytes(self, sizes: Mapping[str, int]) -> int:
        codes, group = self.elements(sizes)
        return codes + 4 * (codes // group) + 2 * sizes["k_pe_elements"]

    def stored(self, plan: Plan, cache: str, token: Int64s) -> Bytes:
        rope = rows_of(plan, "k_pe", token, 2 * plan.arguments["k_pe_elements"])
        return np.concatenate((self.grouped(plan, "kv_c", token), rope), axis=1)

    def addresses(self, sizes: Mapping[str, int], cache: str, page: Int64s, slot: Int64s) -> Int64s:
        begin = page * sizes["page_stride_bytes"] + slot * sizes["slot_stride_bytes"]
        return begin[:, None] + np.arange(self.cell_bytes(sizes), dtype=np.int64)


class _Indexer(_Grouped):
    name = "indexer_k_quant_and_cache"
    caches = ("cache",)

    def elements(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        return sizes["head_dim"], sizes["quant_block"]

    def scales_of(self, amax: Float32s, kind: int) -> Float32s:
        scale: Float32s = np.divide(np.maximum(amax, _SMALL), _LARGEST, dtype=np.float32)
        return _power_of_two(scale) if kind else scale

    def cell_bytes(self, sizes: Mapping[str, int]) -> int:
        codes, group = self.elements(sizes)
        return codes + 4 * (codes // group)

    def stored(self, plan: Plan, cache: str, token: Int64s) -> Bytes:
        return self.grouped(plan, "k", token)

    def addresses(self, sizes: Mapping[str, int], cache: str, page: Int64s, slot: Int64s) -> Int64s:
        return indexer_addresses(sizes, page, slot)


def indexer_addresses(sizes: Mapping[str, int], page: Int64s, slot: Int64s) -> Int64s:
    """int64 [n, D + 4G]: the key bytes of each token, then those of its scale words, in a cache of
    pages of the layout that `page_layout` names (0 flat, 1 tiled16)."""
    keys, size = sizes["head_dim"], sizes["page_size_tokens"]
    words = keys // sizes["quant_block"]
    d, o = np.arange(keys, dtype=np.int64), slot[:, None]
    if sizes["page_layout"]:
        at = o // 16 * 16 * keys + d // 16 * 256 + o % 16 * 16 + d % 16
    else:
        at = o * keys + d
    scale = size * keys + 4 * words * o + np.arange(4 * words, dtype=np.int64)
    inside = np.concatenate((at, scale), axis=1)
    return page[:, None] * sizes["page_stride_bytes"] + inside


#: By operation.
WRITERS: Mapping[str, WrittenCells] = {
    side.name: side for side in (_Mla(), _Flash(), _DsMla(), _Indexer())
}
