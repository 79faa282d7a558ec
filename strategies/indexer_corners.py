"""Corners of gathers from the indexer's cache: two destinations, pages of keys and then scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pagefuzz.oracles.rows import Int64s
from pagefuzz.strategies.boundaries import INT32_MAX, LIMITS
from pagefuzz.strategies.corners import (
    BATCHES,
    HOSTILE,
    TABLES,
    Predicate,
    boundary_corners,
    column_offsets,
    page_offsets,
    table_offsets,
)
from pagefuzz.strategies.facts import Facts

#: Stride -> (size that must exceed 1 for it to count, alignment in bytes).
STRIDES = {
    "page_stride_bytes": ("num_pages", 4),
    "dst_k_row_stride_bytes": ("dst_k_rows", 1),
    "dst_scale_row_stride_bytes": ("dst_scale_rows", 4),
    "table_row_stride": ("num_requests", 1),
}


def row_bytes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Payload bytes of a row of each destination."""
    return {
        "dst_k": sizes["head_dim"],
        "dst_scale": 4 * (sizes["head_dim"] // sizes["quant_block"]),
    }


# ---- corners -------------------------------------------------------------------------------------


def _ignored(name: str) -> Predicate:
    def holds(f: Facts) -> bool:
        sound = f.sizes[name] in range(2**31)
        return bool(f.spans) and f.sizes[STRIDES[name][0]] <= 1 and not sound

    return holds


def _has(predicate: Callable[[Mapping[str, int]], bool]) -> Predicate:
    """Of the sizes of a launch that copies something."""
    return lambda f: bool(f.spans) and predicate(f.sizes)


def _page_bytes(sizes: Mapping[str, int]) -> int:
    return sizes["page_size_tokens"] * sum(row_bytes(sizes).values())


def _padded(name: str) -> Predicate:
    return _has(
        lambda s: s[f"{name}_rows"] > 1 and s[f"{name}_row_stride_bytes"] > row_bytes(s)[name]
    )


def _row_offsets(name: str) -> Callable[[Facts], tuple[Int64s, int]]:
    def offsets(f: Facts) -> tuple[Int64s, int]:
        stride = f.stride(f"{name}_row_stride_bytes", f"{name}_rows")
        return f.row * stride, stride

    return offsets


def _packed_offsets(f: Facts) -> tuple[Int64s, int]:
    packed = 900_000 < f.sizes["page_stride_bytes"] < 1_100_000
    return page_offsets(f) if packed else (np.empty(0, np.int64), 0)


def _scales_alone(limit: int) -> Predicate:
    """The keys of a page begin below the boundary, its scales at it or past it."""

    def holds(f: Facts) -> bool:
        base, _ = page_offsets(f)
        keys = f.page_size * f.sizes["head_dim"]
        return bool(((base < limit) & (base + keys >= limit)).any())

    return holds


def _scales_below(limit: int) -> Predicate:
    """The last scales end just below the boundary."""

    def holds(f: Facts) -> bool:
        base, _ = page_offsets(f)
        ends = base + _page_bytes(f.sizes)
        return bool(((ends <= limit) & (ends > limit - 64)).any())

    return holds


#: Situations of a launch, by name.
INDEXER_SITUATIONS: Mapping[str, Predicate] = {
    **BATCHES,
    **TABLES,
    **HOSTILE,
    "rows: num_tokens equals dst_rows": _has(
        lambda s: s["num_tokens"] == s["dst_k_rows"] == s["dst_scale_rows"]
    ),
    "rows: spare destination rows": _has(
        lambda s: s["num_tokens"] < min(s["dst_k_rows"], s["dst_scale_rows"])
    ),
    "rows: more in one destination": _has(lambda s: s["dst_k_rows"] != s["dst_scale_rows"]),
    "layout: flat": _has(lambda s: s["page_layout"] == 0),
    "layout: tiled16": _has(lambda s: s["page_layout"] == 1),
    "layout: a second tile is read": lambda f: (
        f.sizes["page_layout"] == 1 and bool(f.spans) and bool((f.slot >= 16).any())
    ),
    "layout: tiled16 at overflow scale": lambda f: (
        f.sizes["page_layout"] == 1 and bool(f.spans) and bool((page_offsets(f)[0] >= 2**31).any())
    ),
    "head: 16": _has(lambda s: s["head_dim"] == 16),
    "head: 128 in one block": _has(lambda s: s["head_dim"] == s["quant_block"] == 128),
    "head: above 512": _has(lambda s: s["head_dim"] > 512),
    "head: no power of two": _has(lambda s: s["head_dim"] & (s["head_dim"] - 1) > 0),
    "scales: several": _has(lambda s: s["head_dim"] > s["quant_block"]),
    "scales: one a byte": _has(lambda s: s["quant_block"] == 1),
    "cache: dense pages": _has(
        lambda s: s["num_pages"] > 1 and s["page_stride_bytes"] == _page_bytes(s)
    ),
    "cache: padded pages": _has(
        lambda s: s["num_pages"] > 1 and _page_bytes(s) < s["page_stride_bytes"] < 2**18
    ),
    "cache: packed pool": lambda f: bool(f.spans) and _packed_offsets(f)[1] > 0,
    "dst_k: padded rows": _padded("dst_k"),
    "dst_k: odd row stride": _has(
        lambda s: s["dst_k_rows"] > 1 and s["dst_k_row_stride_bytes"] % 2 == 1
    ),
    "dst_scale: padded rows": _padded("dst_scale"),
    "base: dst_k odd": lambda f: bool(f.spans) and f.placed("dst_k")[0] % 2 == 1,
    "base: dst_scale at 4 past 8": lambda f: bool(f.spans) and f.placed("dst_scale")[0] % 8 == 4,
    "base: src at 4 past 8": lambda f: bool(f.spans) and f.placed("src")[0] % 8 == 4,
    "workspace: around dst_k": lambda f: bool(f.spans) and max(f.placed("dst_k")[1:]) > 0,
    "workspace: around dst_scale": lambda f: bool(f.spans) and max(f.placed("dst_scale")[1:]) > 0,
    **{f"ignored: {name}": _ignored(name) for name in STRIDES},
    "counts: present": lambda f: bool(f.spans) and "counts" in f.case.values,
    "counts: absent": lambda f: bool(f.spans) and "counts" not in f.case.values,
    "keys: of an fp8 type": lambda f: "dst_k.dtype" in f.case.overrides,
    "null pointer: nothing behind it": lambda f: any(
        b.is_null and not b.extent_bytes
        for n, b in f.plan.buffers.items()
        if n not in ("counts", "seq_starts")
    ),
    "absent: dtype and rank are nonsense": lambda f: any(
        name.endswith(".rank") for name in f.case.overrides
    ),
    **dict(
        boundary_corners(
            {
                "dst_k row": _row_offsets("dst_k"),
                "dst_scale row": _row_offsets("dst_scale"),
                "src page": page_offsets,
                "packed page": _packed_offsets,
                "table row": table_offsets,
                "column": column_offsets,
            }
        )
    ),
    **{
        f"boundary: scales {side} 2^{limit.bit_length() - 1}": corner(limit)
        for limit in (*LIMITS, 4 * LIMITS[0], 4 * LIMITS[1])
        for side, corner in (("alone past", _scales_alone), ("just below", _scales_below))
    },
    "boundary: row 2^31 - 2": lambda f: (
        f.sound and any(s.first_row + s.row_count == INT32_MAX for s in f.spans)
    ),
    "boundary: page 2^31 - 2": lambda f: f.sound and bool((f.ids >= INT32_MAX - 2).any()),
    "boundary: token 2^31": lambda f: f.sound and any(s.last_token > INT32_MAX for s in f.spans),
}
