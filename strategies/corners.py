"""Corners: named situations that the strategies of a gather must reach.

A corner is a predicate on what the oracle says of a case. Each side of a boundary is a corner of
its own, and so is each kind of hostile value and each reason for a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.rows import Int64s
from pagefuzz.strategies.boundaries import INT32_MAX, INT32_MIN, LIMITS
from pagefuzz.strategies.facts import Facts
from pagefuzz.strategies.refusals import REASONS
from pagefuzz.strategies.told import corners_of, refused_for

Corners: TypeAlias = Mapping[str, Callable[[Plan, Expectation], bool]]


Predicate: TypeAlias = Callable[[Facts], bool]

# ---- batches, tables, sequences, rows ------------------------------------------------------------


def _lengths(f: Facts) -> list[int]:
    found = [0] * f.requests
    for span in f.spans:
        found[span.request] = span.row_count
    return found


def _uneven(f: Facts) -> bool:
    lengths = sorted(_lengths(f))
    return len(lengths) > 1 and lengths[-1] >= 16 and lengths[-2] <= 2


def _empty_middle(f: Facts) -> bool:
    return len(f.live) > 1 and len(f.live) < max(f.live) - min(f.live) + 1


def _slice_is_read(f: Facts) -> bool:
    return bool(f.live) and max(f.live) > 0


BATCHES: Mapping[str, Predicate] = {
    "batch: no request": lambda f: f.requests == 0,
    "batch: one request": lambda f: f.requests == 1 and bool(f.spans),
    "batch: several requests": lambda f: 2 <= len(f.live) <= 8,
    "batch: more than 64 requests": lambda f: f.requests > 64,
    "batch: all empty": lambda f: f.requests > 1 and f.tokens > 0 and not f.spans,
    "batch: first empty": lambda f: bool(f.live) and 0 not in f.live,
    "batch: middle empty": _empty_middle,
    "batch: last empty": lambda f: bool(f.live) and f.requests - 1 not in f.live,
    "batch: very uneven": _uneven,
    "rows: first start 0": lambda f: bool(f.spans) and f.starts[0] == 0,
    "rows: first start above 0": lambda f: bool(f.spans) and f.starts[0] > 0,
    "rows: a start beyond num_tokens": lambda f: any(s > f.tokens for s in f.starts[: f.requests]),
    "rows: a start of 2^31 - 1": lambda f: bool(f.spans) and INT32_MAX in f.starts,
    "rows: terminal": lambda f: bool(f.spans) and f.sizes["has_terminal"] == 1,
    "rows: no terminal": lambda f: bool(f.spans) and f.sizes["has_terminal"] == 0,
    "rows: num_tokens 0": lambda f: f.requests > 0 and f.tokens == 0,
    "rows: num_tokens below the batch": lambda f: (
        len(f.starts) > f.requests > 0 and bool(f.spans) and f.tokens < f.starts[-1]
    ),
    "rows: num_tokens equals the batch": lambda f: (
        len(f.starts) > f.requests > 0 and bool(f.spans) and f.tokens == f.starts[-1]
    ),
    "rows: num_tokens above the batch": lambda f: (
        len(f.starts) > f.requests > 0 and bool(f.spans) and f.tokens > f.starts[-1]
    ),
    "rows: num_tokens equals dst_rows": lambda f: f.tokens == f.sizes["dst_rows"] > 0,
    "rows: spare destination rows": lambda f: bool(f.spans) and f.tokens < f.sizes["dst_rows"],
    "pages: size 1": lambda f: bool(f.spans) and f.page_size == 1,
    "pages: size 4096": lambda f: bool(f.spans) and f.page_size == 4096,
    "pages: odd size": lambda f: bool(f.spans) and f.page_size % 2 == 1 and f.page_size > 1,
    "pages: size above 64": lambda f: bool(f.spans) and f.page_size > 64,
    "pages: partial first page": lambda f: any(
        s.first_token % f.page_size and len(s.columns(f.page_size)) > 1 for s in f.spans
    ),
    "pages: partial last page": lambda f: any(
        (s.last_token + 1) % f.page_size and len(s.columns(f.page_size)) > 1 for s in f.spans
    ),
    "pages: partial on both sides": lambda f: any(
        s.first_token % f.page_size
        and (s.last_token + 1) % f.page_size
        and len(s.columns(f.page_size)) > 2
        for s in f.spans
    ),
    "pages: two requests inside one page": lambda f: (
        len(f.ids) > 1 and len(np.unique(f.ids)) < len(f.ids)
    ),
    "pages: none": lambda f: f.sizes["num_pages"] == 0,
}

TABLES: Mapping[str, Predicate] = {
    **{
        f"table: {recipe}": lambda f, recipe=recipe: (  # type: ignore[misc]
            len(f.columns) > 1 and f.case.values["block_table"].recipe == recipe
        )
        for recipe in ("identity", "reversed", "permuted", "shared")
    },
    "table: exact width": lambda f: len(f.columns) > 0 and int(f.columns.max()) == f.width - 1,
    "table: wider than needed": lambda f: len(f.columns) > 0 and int(f.columns.max()) < f.width - 1,
    "table: column slice": lambda f: _slice_is_read(f) and f.sizes["table_row_stride"] > f.width,
    "table: dense rows": lambda f: _slice_is_read(f) and f.sizes["table_row_stride"] == f.width,
    "table: broadcast": lambda f: _slice_is_read(f) and f.sizes["table_row_stride"] == 0,
    "table: overlapping rows": lambda f: (
        _slice_is_read(f) and 0 < f.sizes["table_row_stride"] < f.width
    ),
    "table: width 0": lambda f: f.requests > 0 and f.width == 0,
    "seq_starts: absent": lambda f: bool(f.spans) and f.seq_starts is None,
    "seq_starts: zero": lambda f: (
        bool(f.spans) and f.seq_starts is not None and not any(f.seq_starts)
    ),
    "seq_starts: on a page": lambda f: (
        f.page_size > 1
        and f.seq_starts is not None
        and any(f.seq_starts[r] > 0 and f.seq_starts[r] % f.page_size == 0 for r in f.live)
    ),
    "seq_starts: inside a page": lambda f: (
        f.seq_starts is not None and any(0 < f.seq_starts[r] < f.page_size for r in f.live)
    ),
    "seq_starts: past one page": lambda f: (
        f.page_size > 1
        and f.seq_starts is not None
        and any(f.seq_starts[r] > f.page_size for r in f.live)
    ),
    "seq_starts: last slot of the last column": lambda f: (
        f.page_size > 1 and any(s.last_token + 1 == f.width * f.page_size for s in f.spans)
    ),
    "seq_starts: negative for an empty request": lambda f: (
        f.sound and f.seq_starts is not None and min(f.seq_starts, default=0) < 0
    ),
}

# ---- memory --------------------------------------------------------------------------------------


def _pool(f: Facts) -> tuple[int, int, int, int]:
    """(page stride, slot stride, entry bytes, bytes of dense entries of a page); 0s if ignored."""
    return (
        f.stride("page_stride_bytes", "num_pages"),
        f.stride("slot_stride_bytes", "page_size_tokens"),
        f.entry_bytes,
        f.entry_bytes * f.page_size,
    )


def _dense(f: Facts) -> bool:
    page, slot, entry, dense = _pool(f)
    return bool(f.spans) and page == dense and slot == entry


def _padded_entry(f: Facts) -> bool:
    page, slot, entry, _ = _pool(f)
    return bool(f.spans) and slot > entry and page >= slot * f.page_size


def _padded_page(f: Facts) -> bool:
    page, slot, entry, dense = _pool(f)
    return bool(f.spans) and slot == entry and dense < page < 2**16


def _wider_than_its_end(f: Facts) -> bool:
    """Every entry and row begins aligned to more than the length of one is a multiple of."""
    _, slot, entry, _ = _pool(f)
    row = f.stride("dst_row_stride_bytes", "dst_rows")
    bases = f.placed("src")[0] | f.placed("dst")[0]
    pages = f.stride("page_stride_bytes", "num_pages")
    unit = entry & -entry
    return bool(f.spans) and unit < 16 and (slot | row | bases | pages) % (2 * unit) == 0


def _packed(f: Facts) -> bool:
    page, _, _, dense = _pool(f)
    return bool(f.spans) and 900_000 < page < 1_100_000 and dense < page


def _slots_first(f: Facts) -> bool:
    page, slot, entry, _ = _pool(f)
    return bool(f.spans) and page == entry and slot >= f.sizes["num_pages"] * entry


def _shared_bytes(f: Facts) -> bool:
    page, slot, entry, _ = _pool(f)
    two_pages, two_slots = f.sizes["num_pages"] > 1, f.page_size > 1
    return bool(f.spans) and ((two_pages and page < entry) or (two_slots and slot < entry))


def _ignored(name: str, size: str) -> Predicate:
    def holds(f: Facts) -> bool:
        sound = f.sizes[name] == 0 or f.sizes[name] in range(1, 2**31)
        return not f.refused and bool(f.spans) and f.sizes[size] <= 1 and not sound

    return holds


def _least_aligned(buffer: str) -> Predicate:
    def holds(f: Facts) -> bool:
        unit = f.element_bytes
        return not f.refused and f.placed(buffer)[0] % (2 * unit) == unit

    return holds


_MEMORY: Mapping[str, Predicate] = {
    "cache: dense": _dense,
    "cache: strides aligned beyond the entry": lambda f: (
        f.page_size > 1 and f.sizes["dst_rows"] > 1 and _wider_than_its_end(f)
    ),
    "cache: padded entries": _padded_entry,
    "cache: padded pages": _padded_page,
    "cache: packed pool": _packed,
    "cache: slots first": _slots_first,
    "cache: entries that share bytes": _shared_bytes,
    "dst: dense rows": lambda f: (
        not f.refused and f.tokens > 1 and f.sizes["dst_row_stride_bytes"] == f.row_bytes
    ),
    "dst: padded rows": lambda f: (
        not f.refused and f.tokens > 1 and f.sizes["dst_row_stride_bytes"] > f.row_bytes
    ),
    "dst: workspace before": lambda f: bool(f.spans) and f.placed("dst")[1] > 0,
    "dst: slack": lambda f: bool(f.spans) and f.placed("dst")[2] > 0,
    "dst: workspace after": lambda f: bool(f.spans) and f.placed("dst")[3] > 0,
    "extent: no byte more than needed": lambda f: (
        bool(f.spans) and not any(f.placed(name)[2] for name in f.plan.buffers)
    ),
    "ignored: page stride": _ignored("page_stride_bytes", "num_pages"),
    "ignored: slot stride": _ignored("slot_stride_bytes", "page_size_tokens"),
    "ignored: destination row stride": _ignored("dst_row_stride_bytes", "dst_rows"),
    "ignored: table row stride": _ignored("table_row_stride", "num_requests"),
    "base: src at its least alignment": _least_aligned("src"),
    "base: dst at its least alignment": _least_aligned("dst"),
    "base: src and dst at different offsets": lambda f: (
        bool(f.spans) and f.placed("src")[0] % 16 != f.placed("dst")[0] % 16
    ),
    "base: odd address": lambda f: bool(f.spans) and f.placed("dst")[0] % 2 == 1,
    "base: index vectors at 4 past 8": lambda f: (
        bool(f.spans) and f.placed("block_table")[0] % 8 == 4
    ),
    "counts: present": lambda f: bool(f.spans) and "counts" in f.case.values,
    "counts: absent": lambda f: bool(f.spans) and "counts" not in f.case.values,
    "counts: not zero before": lambda f: (
        "counts" in f.case.values and f.case.values["counts"].parameters["values"] != (0, 0)
    ),
    "element type: of the same size": lambda f: not f.refused and "src.dtype" in f.case.overrides,
    "null pointer: nothing behind it": lambda f: (
        not f.refused
        and any(
            b.is_null and not b.extent_bytes
            for n, b in f.plan.buffers.items()
            if n != "counts" and n != "seq_starts"
        )
    ),
    "absent: dtype and rank are nonsense": lambda f: (
        not f.refused and any(name.endswith(".rank") for name in f.case.overrides)
    ),
    **{
        f"element: {size} bytes": lambda f, size=size: (  # type: ignore[misc]
            bool(f.spans) and f.element_bytes == size
        )
        for size in (1, 2, 4, 8)
    },
    "entry: 1 byte": lambda f: bool(f.spans) and f.entry_bytes == 1,
    "entry: one element": lambda f: bool(f.spans) and f.entry_bytes == f.element_bytes > 1,
    "entry: no multiple of 16": lambda f: bool(f.spans) and f.entry_bytes % 16 > 0,
    "entry: above 1024 bytes": lambda f: bool(f.spans) and f.entry_bytes > 1024,
}

# ---- overflow scale ------------------------------------------------------------------------------


#: Offsets in bytes that a quantity takes in a case, and the step from one to the next.
Offsets: TypeAlias = Callable[[Facts], tuple[Int64s, int]]


def _row_offsets(f: Facts) -> tuple[Int64s, int]:
    stride = f.stride("dst_row_stride_bytes", "dst_rows")
    return f.row * stride, stride


def page_offsets(f: Facts) -> tuple[Int64s, int]:
    stride = f.stride("page_stride_bytes", "num_pages")
    return f.page_id * stride, stride


def _packed_offsets(f: Facts) -> tuple[Int64s, int]:
    return page_offsets(f) if _packed(f) else (np.empty(0, np.int64), 0)


def _slot_offsets(f: Facts) -> tuple[Int64s, int]:
    stride = f.stride("slot_stride_bytes", "page_size_tokens")
    return f.slot * stride, stride


def table_offsets(f: Facts) -> tuple[Int64s, int]:
    stride = 4 * f.stride("table_row_stride", "num_requests")
    return f.page_requests * stride, stride


def column_offsets(f: Facts) -> tuple[Int64s, int]:
    return f.columns[f.pages.in_table] * 4, 4


_OFFSETS: Mapping[str, Offsets] = {
    "dst row": _row_offsets,
    "src page": page_offsets,
    "packed page": _packed_offsets,
    "slot": _slot_offsets,
    "table row": table_offsets,
    "column": column_offsets,
}


def _reaches(
    quantity: str, offsets_of: Offsets, limit: int, elements: bool, *, past: bool
) -> Predicate:
    """Past: the first offset at the limit or past it is reached. Below: the last one below it is,
    and none past it."""

    def holds(f: Facts) -> bool:
        if f.refused or not f.spans:
            return False
        offsets, stride = offsets_of(f)
        unit = 1
        if elements:
            unit = f.row_element_bytes if quantity == "dst row" else f.element_bytes
            unit = 4 if quantity in ("table row", "column") else unit
            if unit == 1:
                return False
        if not offsets.size:
            return False
        at = limit * unit
        if past:
            beyond = offsets[offsets >= at]
            return beyond.size > 0 and int(beyond.min()) < at + stride
        last = int(offsets.max())
        return at - stride <= last < at

    return holds


def boundary_corners(quantities: Mapping[str, Offsets]) -> Iterator[tuple[str, Predicate]]:
    """Both sides of each boundary, in bytes and elements, for each quantity that reaches it."""
    for quantity, offsets_of in quantities.items():
        for limit, limit_name in zip(LIMITS, ("2^31", "2^32"), strict=True):
            for elements in (False, True):
                if quantity == "column" and elements:
                    continue  # a column is below 2^31; what can be reached has its own corners
                unit = "elements" if elements else "bytes"
                for past in (False, True):
                    side = "past" if past else "below"
                    yield (
                        f"boundary: {quantity} {side} {limit_name} {unit}",
                        _reaches(quantity, offsets_of, limit, elements, past=past),
                    )


def _page_straddles(f: Facts) -> bool:
    if f.refused or not f.spans:
        return False
    base, _ = page_offsets(f)
    slot, _ = _slot_offsets(f)
    whole = base + slot
    return any(bool(((base < limit) & (whole >= limit)).any()) for limit in LIMITS)


def _both_sides(f: Facts) -> bool:
    if f.refused or not f.spans:
        return False
    offsets, _ = _row_offsets(f)
    return any(bool((offsets < at).any() and (offsets >= at).any()) for at in LIMITS)


_SCALE: Mapping[str, Predicate] = {
    **dict(boundary_corners(_OFFSETS)),
    "boundary: row 932068 of 2304 bytes or alike": lambda f: (
        not f.refused and len(f.spans) == 1 and f.spans[0].first_row * f.row_bytes >= 2**31
    ),
    "boundary: a batch on both sides": _both_sides,
    "boundary: a page on both sides": _page_straddles,
    "boundary: a page stride of 2^31 bytes or more": lambda f: (
        not f.refused and bool(f.spans) and f.stride("page_stride_bytes", "num_pages") >= 2**31
    ),
    "boundary: a row stride of 2^31 bytes or more": lambda f: (
        not f.refused and bool(f.spans) and f.stride("dst_row_stride_bytes", "dst_rows") >= 2**31
    ),
    "boundary: token 2^31 - 1": lambda f: (
        any(s.first_token <= INT32_MAX <= s.last_token for s in f.spans) and f.sound
    ),
    "boundary: token 2^31": lambda f: any(s.last_token > INT32_MAX for s in f.spans) and f.sound,
    "boundary: row 2^31 - 2": lambda f: (
        any(s.first_row + s.row_count == INT32_MAX for s in f.spans) and f.sound
    ),
    "boundary: page 2^31 - 2": lambda f: bool((f.ids == INT32_MAX - 1).any()) and f.sound,
    "boundary: column above 2^30": lambda f: bool((f.columns > 2**30).any()) and f.sound,
}

# ---- hostile and refused -------------------------------------------------------------------------


def _falls(values: list[int]) -> list[int]:
    return [i for i in range(len(values) - 1) if values[i + 1] < values[i]]


def _clamped_fall(f: Facts) -> bool:
    return bool(_falls([min(max(s, 0), f.tokens) for s in f.starts]))


def _past_table(f: Facts) -> bool:
    return bool((f.columns >= f.width).any())


HOSTILE: Mapping[str, Predicate] = {
    "hostile: column past the table": _past_table,
    "hostile: column just past the table": lambda f: bool((f.columns == f.width).any()),
    "hostile: column past the last row": lambda f: bool(
        ((f.columns >= f.width) & (f.page_requests == f.requests - 1)).any()
    ),
    "hostile: column past a slice": lambda f: (
        _past_table(f) and f.requests > 1 and f.sizes["table_row_stride"] > f.width
    ),
    "hostile: page -1": lambda f: bool((f.ids == -1).any()),
    "hostile: page -2": lambda f: bool((f.ids == -2).any()),
    "hostile: page num_pages": lambda f: bool((f.ids == f.sizes["num_pages"]).any()),
    "hostile: page 2^31 - 1": lambda f: bool((f.ids == INT32_MAX).any()),
    "hostile: page -2^31": lambda f: bool((f.ids == INT32_MIN).any()),
    "hostile: first start negative": lambda f: bool(f.spans) and f.starts[0] < 0,
    "hostile: two starts negative": lambda f: sum(start < 0 for start in f.starts) > 1,
    "hostile: start -2^31": lambda f: INT32_MIN in f.starts,
    "hostile: start 2^31 - 1 before others": lambda f: f.hostile and INT32_MAX in f.starts[:-1],
    "hostile: seq_start negative": lambda f: any(
        f.seq_starts[r] < 0 for r in f.live if f.seq_starts
    ),
    "hostile: seq_start -2^31": lambda f: any(
        f.seq_starts[r] == INT32_MIN for r in f.live if f.seq_starts
    ),
    "hostile: seq_start 2^31 - 1": lambda f: (
        f.hostile and any(f.seq_starts[r] == INT32_MAX for r in f.live if f.seq_starts)
    ),
    "hostile: starts fall": lambda f: bool(_falls(f.starts)) and _clamped_fall(f),
    "hostile: starts fall, requests contest rows": lambda f: (
        f.hostile and any(e.contested is not None for e in f.expectation.expected.values())
    ),
    "hostile: only the terminal falls": lambda f: (
        f.requests > 0 and len(f.starts) > f.requests and _falls(f.starts) == [f.requests - 1]
    ),
    "hostile: starts fall past num_tokens only": lambda f: (
        bool(_falls(f.starts)) and not _clamped_fall(f)
    ),
    "hostile: some rows are exact all the same": lambda f: (
        f.hostile and any(e.offsets.size for e in f.expectation.expected.values())
    ),
    "hostile: nothing is written": lambda f: (
        f.hostile and not any(e.offsets.size for e in f.expectation.expected.values())
    ),
    "hostile: at overflow scale": lambda f: (
        f.hostile and max(b.required_bytes for b in f.plan.buffers.values()) >= 2**31
    ),
}


def _guarded(corners: Mapping[str, Predicate]) -> dict[str, Predicate]:
    """Situations of a launch: a refused case is in none of them."""

    def guard(predicate: Predicate) -> Predicate:
        return lambda f: not f.refused and predicate(f)

    return {name: guard(predicate) for name, predicate in corners.items()}


def gather_corners(situations: Mapping[str, Predicate], reasons: Sequence[str]) -> Corners:
    """Corners of an operation: situations of a launch, every reason for a refusal, the classes."""
    refused: dict[str, Predicate] = {
        **refused_for(*reasons),
        "refused: nothing to do": lambda f: (
            f.refused and (f.case.sizes["num_requests"] == 0 or f.case.sizes["num_tokens"] == 0)
        ),
        "refused: for one reason": lambda f: len(f.expectation.refusals) == 1,
    }
    classes: dict[str, Predicate] = {
        "class: in contract": lambda f: f.sound,
        "class: hostile": lambda f: f.hostile,
        "class: refused": lambda f: f.refused,
    }
    return corners_of(Facts, {**_guarded(situations), **refused, **classes})


#: Corners of a gather of entries to one destination.
GATHER_CORNERS: Corners = gather_corners(
    {**BATCHES, **TABLES, **_MEMORY, **_SCALE, **HOSTILE}, REASONS
)
