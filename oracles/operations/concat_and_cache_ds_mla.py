"""(e) concat_and_cache_ds_mla: a token's latent part as fp8 with scales, its rope part as it is.

The contract, with kv_c [kv_c_rows, C] and k_pe [k_pe_rows, P] of bf16, and records of
C + 4 * C/128 + 2 * P bytes in cache [num_pages, page_size_tokens, record]:

    for t in [0, num_tokens):
        s = slot_mapping[t]
        if s == -1: padding;  elif not 0 <= s < num_pages * page_size_tokens: skipped
        else: record = cache[s div page_size_tokens, s mod page_size_tokens]
            record[j]            = E4M3(kv_c[t, j] / scale[j div 128])     for j < C
            record[C + 4g ...]   = scale[g], an fp32 word                  for g < C/128
            record[C + C/32 ...] = k_pe[t], raw

    plain  scale = max(amax / 448, FLT_MIN)
    pow2   scale = the smallest power of two >= max(amax / 448, 1e-4)

Decisions where contracts.md is open, beside those of all writers (`oracles/writes.py`,
`oracles/grouped_writes.py`):

* C is a multiple of 128 in 128..2^31-1, P lies in 1..2^31-1.
* A record whose size is no multiple of 4 (P odd) lies at strides that are.
* Page and slot strides are any that nest, slots first included; smaller ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from pagefuzz.oracles.cells import Cells, Part, Rows
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
from pagefuzz.oracles.layout import BufferRole, Bytes, Dtype, Plan, Role
from pagefuzz.oracles.refusals import Found
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.writes import COUNTS, SLOT_MAPPING

if TYPE_CHECKING:
    import torch

GROUP = 128
FLT_MIN = 2.0**-126

_ELEMENTS = range(1, 2**31)


class ConcatAndCacheDsMla(GroupedWrite):
    """Operation (e), the MLA cache of records."""

    name = "concat_and_cache_ds_mla"
    summary = "writes latent parts of tokens as fp8 with scales, and rope parts, to their slots"
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
        "scale_kind",
    )
    buffers = (
        BufferRole("kv_c", Role.SOURCE),
        BufferRole("k_pe", Role.SOURCE),
        SLOT_MAPPING,
        BufferRole("cache", Role.DESTINATION),
        COUNTS,
    )
    ranges = MappingProxyType(
        {
            **GroupedWrite.ranges,
            "kv_c_elements": ("elements", _ELEMENTS),
            "k_pe_elements": ("elements", _ELEMENTS),
        }
    )
    quantised = "kv_c"
    payload_values = frozenset({"kv_c"})

    def inputs(self, sizes: Mapping[str, int]) -> tuple[Rows, ...]:
        return tuple(
            Rows.named(name, sizes[f"{name}_elements"] * ELEMENT_BYTES, ELEMENT_BYTES)
            for name in ("kv_c", "k_pe")
        )

    def caches(self, sizes: Mapping[str, int]) -> tuple[Cells, ...]:
        codes = sizes["kv_c_elements"]
        scales, rope = codes // GROUP * WORD_BYTES, sizes["k_pe_elements"] * ELEMENT_BYTES
        parts = (
            Part("codes", codes, 1, 0, Dtype.E4M3),
            Part("scales", scales, WORD_BYTES, codes),
            Part("rope", rope, ELEMENT_BYTES, codes + scales),
        )
        dimensions = (
            ("page_stride_bytes", sizes["num_pages"]),
            ("slot_stride_bytes", sizes["page_size_tokens"]),
        )
        record = codes + scales + rope
        return (Cells("cache", dimensions, record, CACHE_ALIGNMENT_BYTES, parts),)

    def clamped(self, sizes: Mapping[str, int]) -> dict[str, int]:
        laid = super().clamped(sizes)
        laid["kv_c_elements"] = max(laid["kv_c_elements"] // GROUP, 1) * GROUP
        return laid

    def own_refusals(self, found: Found, plan: Plan) -> None:
        super().own_refusals(found, plan)
        if (elements := plan.arguments["kv_c_elements"]) % GROUP:
            found.append(
                Refusal("elements", f"kv_c_elements={elements} is not a multiple of {GROUP}")
            )

    def group_elements(self, sizes: Mapping[str, int]) -> int:
        return GROUP

    def encode(self, plan: Plan, token: Int64s) -> Mapping[str, Bytes]:
        codes, scales = self.encoded(plan, token)
        rope = self.rows_of(plan, "k_pe", token)
        return {
            "codes": codes[:, None, :],
            "scales": scales[:, None, :],
            "rope": rope[:, None, :],
        }

    def encode_by_loop(self, plan: Plan, token: int) -> Mapping[str, list[bytes]]:
        codes, scales = self.encoded_by_loop(plan, token)
        rope = self.rows_of(plan, "k_pe", np.array([token], dtype=np.int64))
        return {"codes": [codes], "scales": [scales], "rope": [rope.tobytes()]}

    def expected_by_torch(self, plan: Plan) -> Mapping[str, Mapping[int, bytes]]:
        """Scatters to views of one strided tensor; `CaseError` above 256 MiB."""
        import torch

        (cells,) = self.caches(plan.arguments)
        names = [part.name for part in cells.parts]
        if self.refusals(plan):
            return {name: {} for name in names}
        shape = [count for _, count in cells.dimensions] + [cells.run_bytes]
        strides = (*cells.strides(plan.arguments), 1)
        records = self.addresses_by_torch(plan, cells).as_strided(shape, strides)

        def stored(token: int) -> tuple[torch.Tensor, ...]:
            rope = self.rows_of(plan, "k_pe", np.array([token], dtype=np.int64))[0].copy()
            return (*self.encoded_by_torch(plan, token), torch.from_numpy(rope))

        codes, tail = plan.arguments["kv_c_elements"], 2 * plan.arguments["k_pe_elements"]
        views = (records[..., :codes], records[..., codes:-tail], records[..., -tail:])
        return {
            name: self.scattered_to(plan, cells, view, lambda token, nth=nth: stored(token)[nth])  # type: ignore[misc]
            for nth, (name, view) in enumerate(zip(names, views, strict=True))
        }

    # ---- scales ----------------------------------------------------------------------------------

    def scales(self, amax: Float32s, kind: int) -> Float32s:
        quotient: Float32s = np.divide(amax, np.float32(LARGEST), dtype=np.float32)
        least: Float32s = np.maximum(quotient, np.float32(SMALL if kind == POW2 else FLT_MIN))
        return power_of_two(least) if kind == POW2 else least

    def scale_by_loop(self, amax: float, kind: int) -> float:
        quotient = divided_by_loop(amax, LARGEST)
        return (
            power_of_two_by_loop(max(quotient, SMALL)) if kind == POW2 else max(quotient, FLT_MIN)
        )

    def scales_by_torch(self, amax: torch.Tensor, kind: int) -> torch.Tensor:
        if kind == POW2:
            return power_of_two_by_torch((amax / LARGEST).clamp(min=SMALL))
        return (amax / LARGEST).clamp(min=FLT_MIN)
