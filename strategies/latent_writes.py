"""Writes of a latent vector and a rope part to each slot: concat_and_cache_mla, .._ds_mla."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.refusals import Argument, Lie, Surface, reach, rows_bytes
from pagefuzz.strategies.writes import COUNTS, Write, index_arguments


@dataclass(frozen=True)
class LatentWrite:
    """Sizes and arguments of such a write.

    unit, stored  what bases and strides of inputs and of the cache are multiples of, bytes
    has_scale     whether there is a scale, or room for one
    """

    unit: int
    stored: int
    has_scale: bool = False

    @property
    def alignments(self) -> dict[str, int]:
        """Of every buffer's base, in ABI order."""
        scale = {"scale": 4} if self.has_scale else {}
        inputs = {"kv_c": self.unit, "k_pe": self.unit, "slot_mapping": 8}
        return {**inputs, **scale, "cache": self.stored, "counts": 8}

    @property
    def strides(self) -> dict[str, tuple[str, int]]:
        """Stride -> (size that must exceed 1 for it to count, alignment in bytes)."""
        return {
            "kv_c_row_stride_bytes": ("kv_c_rows", self.unit),
            "k_pe_row_stride_bytes": ("k_pe_rows", self.unit),
            "page_stride_bytes": ("num_pages", self.stored),
            "slot_stride_bytes": ("page_size_tokens", self.stored),
        }

    def sizes(self, write: Write, latent: int, rope: int) -> dict[str, int]:
        """Of a case. latent, rope: elements of an input row."""
        return {
            **write.inputs(kv_c=latent * self.unit, k_pe=rope * self.unit),
            "kv_c_elements": latent,
            "k_pe_elements": rope,
            "page_size_tokens": write.page_size_tokens,
            "num_pages": write.num_pages,
            "page_stride_bytes": write.page_stride_bytes,
            "slot_stride_bytes": write.slot_stride_bytes,
        }

    def required_bytes(self, case: Case, entry_bytes: int) -> dict[str, int]:
        """What every buffer needs; absent ones 0."""
        sizes, reached = case.sizes, reach(case, self.strides)
        rows = {name: sizes[f"{name}_elements"] * self.unit for name in ("kv_c", "k_pe")}
        scale = {"scale": 4 if "scale" in case.values else 0} if self.has_scale else {}
        pool = reached["page_stride_bytes"] + reached["slot_stride_bytes"] + entry_bytes
        return {
            **rows_bytes(case, **rows),
            "slot_mapping": 8 * sizes["num_tokens"],
            **scale,
            "cache": pool if sizes["num_pages"] else 0,
            "counts": 16 if "counts" in case.values else 0,
        }

    def surface(
        self,
        case: Case,
        required_bytes: Mapping[str, int],
        input_dtype: int,
        cache_dtype: int,
        own: Mapping[str, list[Lie]],
    ) -> Surface:
        """What launchers must see through, for a sound case. own: lies of one operation alone."""
        needed, index = required_bytes, index_arguments(case)
        scale = {}
        if self.has_scale:
            is_absent = "scale" not in case.values
            f32 = int(Dtype.F32)
            scale["scale"] = Argument(f32, 1, needed["scale"], 4, is_absent=is_absent)
        return Surface(
            case=case,
            arguments={
                "kv_c": Argument(input_dtype, 2, needed["kv_c"], self.unit),
                "k_pe": Argument(input_dtype, 2, needed["k_pe"], self.unit),
                "slot_mapping": index["slot_mapping"],
                **scale,
                "cache": Argument(cache_dtype, 3, needed["cache"], self.stored),
                "counts": index["counts"],
            },
            destinations=("cache",),
            strides=self.strides,
            extents={
                "kv_c_row_stride_bytes": ("num_tokens", "kv_c_rows"),
                "k_pe_row_stride_bytes": ("num_tokens", "k_pe_rows"),
                "page_stride_bytes": ("num_pages",),
                "slot_stride_bytes": ("page_size_tokens", "num_pages"),
            },
            counts=COUNTS,
            own=own,
        )
