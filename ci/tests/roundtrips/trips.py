"""Small round trips, written by hand."""

from __future__ import annotations

import struct
from dataclasses import replace

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.round_trip import Gather, Move, RoundTrip

MLA, FLASH = "concat_and_cache_mla", "reshape_and_cache_flash"
INDEXER, MOVER, SWAP = "indexer_k_quant_and_cache", "copy_blocks", "swap_blocks"
COPY, DEQUANT = "cp_gather_cache", "gather_and_maybe_dequant_cache"


def bits(value: float) -> int:
    """Of a float32, as an int32."""
    word: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return word


def mla(
    slots: list[int],
    *,
    elements: tuple[int, int] = (3, 1),
    page_size: int = 3,
    pages: int = 3,
    page_stride: int | None = None,
    slot_stride: int | None = None,
    dtype: Dtype = Dtype.F32,
    kv_dtype: int = 0,
    scale: float = 2.0,
    spare_rows: int = 0,
    seed: int = 1,
    cache: Placement | None = None,
) -> Case:
    """A writer's case: tokens to `slots` of pages of `page_size`."""
    unit = dtype.size_bytes
    entry = sum(elements) * (1 if kv_dtype else unit)
    slot_stride = slot_stride or entry
    values = {"slot_mapping": Values.literal(*slots)}
    if kv_dtype:
        values["scale"] = Values.literal(bits(scale))
    return Case(
        MLA,
        {
            "num_tokens": len(slots),
            "kv_c_rows": len(slots) + spare_rows,
            "k_pe_rows": len(slots) + spare_rows,
            "kv_c_row_stride_bytes": elements[0] * unit,
            "k_pe_row_stride_bytes": elements[1] * unit,
            "kv_c_elements": elements[0],
            "k_pe_elements": elements[1],
            "page_size_tokens": page_size,
            "num_pages": pages,
            "page_stride_bytes": page_stride or page_size * slot_stride,
            "slot_stride_bytes": slot_stride,
            "input_dtype": int(dtype),
            "kv_dtype": kv_dtype,
        },
        values,
        {"cache": cache} if cache else {},
        seed=seed,
    )


def reading(writer: Case, table: list[list[int]], starts: list[int], seq_starts: list[int]) -> dict:
    """Sizes and values that every gather has; `starts` with the terminal value."""
    width = len(table[0])
    sizes = {
        "num_requests": len(table),
        "num_tokens": starts[-1],
        "page_size_tokens": writer.sizes["page_size_tokens"],
        "num_pages": writer.sizes["num_pages"],
        "table_width": width,
        "table_row_stride": width,
        "page_stride_bytes": writer.sizes["page_stride_bytes"],
        "slot_stride_bytes": writer.sizes["slot_stride_bytes"],
        "dst_rows": starts[-1],
        "has_terminal": 1,
    }
    values = {
        "block_table": Values.literal(*(page for row in table for page in row)),
        "starts": Values.literal(*starts),
        "seq_starts": Values.literal(*seq_starts),
    }
    return {"sizes": sizes, "values": values}


def copied(
    writer: Case, table: list[list[int]], starts: list[int], seq_starts: list[int]
) -> RoundTrip:
    """An MLA cache, copied as it is."""
    entry = writer.sizes["kv_c_elements"] + writer.sizes["k_pe_elements"]
    entry *= 1 if writer.sizes["kv_dtype"] else Dtype(writer.sizes["input_dtype"]).size_bytes
    read = reading(writer, table, starts, seq_starts)
    own = {"entry_bytes": entry, "element_bytes": 1, "dst_row_stride_bytes": entry}
    case = Case(COPY, {**read["sizes"], **own}, read["values"])
    return RoundTrip(writer, (Gather(case, "cache"),))


def dequantised(
    writer: Case,
    table: list[list[int]],
    starts: list[int],
    seq_starts: list[int],
    *,
    result: Dtype = Dtype.F32,
    scale: float = 2.0,
) -> RoundTrip:
    """An MLA cache, dequantised."""
    elements = writer.sizes["kv_c_elements"] + writer.sizes["k_pe_elements"]
    read = reading(writer, table, starts, seq_starts)
    own = {
        "entry_elements": elements,
        "kv_dtype": writer.sizes["kv_dtype"],
        "dst_dtype": int(result),
        "dst_row_stride_bytes": elements * result.size_bytes,
    }
    values = {**read["values"], "scale": Values.literal(bits(scale))}
    return RoundTrip(writer, (Gather(Case(DEQUANT, {**read["sizes"], **own}, values), "cache"),))


def moved(
    writer: Case, pairs: list[tuple[int, int]], *, cache: str = "cache", **sizes: int
) -> Move:
    """Whole pages of an MLA cache, copied by (from, to)."""
    w = writer.sizes
    entry = (w["kv_c_elements"] + w["k_pe_elements"]) * (
        1 if w["kv_dtype"] else Dtype(w["input_dtype"]).size_bytes
    )
    own = {
        "num_pairs": len(pairs),
        "num_layers": 1,
        "num_pages": w["num_pages"],
        "layer_stride_bytes": 0,
        "page_stride_bytes": w["page_stride_bytes"],
        "page_bytes": (w["page_size_tokens"] - 1) * w["slot_stride_bytes"] + entry,
        "element_bytes": 1,
    }
    values = {
        "pairs": Values.literal(*(page for pair in pairs for page in pair)),
        "scratch": Values.literal(),
    }
    return Move(Case(MOVER, {**own, **sizes}, values), cache)


def swapped(
    writer: Case,
    pairs: list[tuple[int, int]],
    way: str,
    *,
    pages: int = 4,
    stride: int = 80,
    **sizes: int,
) -> Move:
    """Whole pages of an MLA cache, swapped by (from, to) to a second cache of `pages`, `stride`
    bytes apart, or back from there."""
    copy = moved(writer, pairs)
    first = (copy.case.sizes["num_pages"], copy.case.sizes["page_stride_bytes"])
    sides = ((first), (pages, stride)) if way == "out" else ((pages, stride), first)
    own = {"num_pairs": len(pairs)}
    for side, (count, apart) in zip(("src", "dst"), sides, strict=True):
        own |= {f"{side}_num_pages": count, f"{side}_page_stride_bytes": apart}
    own |= {name: copy.case.sizes[name] for name in ("page_bytes", "element_bytes")}
    values = {"pairs": copy.case.values["pairs"]}
    return Move(Case(SWAP, {**own, **sizes}, values), "cache", way)


def of_second(trip: RoundTrip, *, pages: int = 4, stride: int = 80) -> RoundTrip:
    """The trip, whose readers read the second cache."""
    return replace(
        trip,
        gathers=tuple(
            replace(
                gather,
                case=gather.case.with_sizes(num_pages=pages, page_stride_bytes=stride),
                second=True,
            )
            for gather in trip.gathers
        ),
    )


def indexed(
    reader: str, slots: list[int], hints: list[int] | None = None, *, layout: int = 0
) -> RoundTrip:
    """Tokens to pages of 16, of 16 keys and one scale each; every page a request, from its first
    token on to the third."""
    page = 16 * 20
    writer = Case(
        INDEXER,
        {
            "num_tokens": len(slots),
            "k_rows": len(slots),
            "k_row_stride_bytes": 32,
            "page_size_tokens": 16,
            "num_pages": 2,
            "page_stride_bytes": page,
            "head_dim": 16,
            "quant_block": 16,
            "page_layout": layout,
            "scale_kind": 0,
        },
        {"slot_mapping": Values.literal(*slots)},
        seed=1,
    )
    values = {"block_table": Values.literal(1, 0), "starts": Values.literal(0, 3, 6)}
    if hints is not None:
        values["token_to_seq"] = Values.literal(*hints)
    case = Case(
        reader,
        {
            "num_requests": 2,
            "num_tokens": 6,
            "page_size_tokens": 16,
            "num_pages": 2,
            "table_width": 1,
            "table_row_stride": 1,
            "page_stride_bytes": page,
            "dst_k_rows": 6,
            "dst_k_row_stride_bytes": 16,
            "dst_scale_rows": 6,
            "dst_scale_row_stride_bytes": 4,
            "head_dim": 16,
            "quant_block": 16,
            "page_layout": layout,
            "has_terminal": 1,
        },
        values,
        seed=1,
    )
    return RoundTrip(writer, (Gather(case, "cache"),))
