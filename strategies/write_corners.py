"""Corners of the writers: named situations that their strategies must reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Dtype, Plan
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.writes import WriteOperation
from pagefuzz.strategies.boundaries import INT32_MAX, LIMITS
from pagefuzz.strategies.corners import Corners
from pagefuzz.strategies.told import Told, corners_of, refused_for


class Written(Told):
    """What the oracle says of a write, in the words that corners are written in."""

    def __init__(self, plan: Plan, expectation: Expectation) -> None:
        super().__init__(plan, expectation)
        asked = operation(plan.case.operation)
        assert isinstance(asked, WriteOperation)
        self.operation = asked
        self.slots = None if self.refused else asked.slots(plan)

    @property
    def slot(self) -> Int64s:
        return self.slots.slot if self.slots is not None else np.empty(0, np.int64)

    @property
    def token(self) -> Int64s:
        return self.slots.token if self.slots is not None else np.empty(0, np.int64)

    @property
    def capacity(self) -> int:
        return self.sizes["num_pages"] * self.sizes["page_size_tokens"]

    def codes(self, *wanted: int) -> bool:
        """Whether any of these fp8 codes must be written."""
        if self.refused or not self.sizes["kv_dtype"]:
            return False
        return any(
            bool(np.isin(one.values, wanted).any()) for one in self.expectation.expected.values()
        )

    def begins(self) -> Int64s:
        """Where the entries of written tokens begin, in every cache."""
        if self.slots is None:
            return np.empty(0, np.int64)
        return np.concatenate(
            [
                cells.begins(self.sizes, cells.parts[0], self.slots.page, self.slots.offset).min(
                    axis=1, initial=2**62
                )
                for cells in self.operation.caches(self.sizes)
            ]
        )

    def input_begins(self) -> Int64s:
        inputs = self.operation.inputs(self.sizes)
        return np.concatenate([self.token * rows.stride_bytes(self.sizes) for rows in inputs])

    def contested(self) -> bool:
        return any(one.contested is not None for one in self.expectation.expected.values())


_Predicate: TypeAlias = Callable[[Written], bool]


def _reaches(offsets: Callable[[Written], Int64s], limit: int) -> _Predicate:
    def holds(w: Written) -> bool:
        found = offsets(w)
        return bool(found.size) and int(found.max()) >= limit

    return holds


def _below(offsets: Callable[[Written], Int64s], limit: int) -> _Predicate:
    def holds(w: Written) -> bool:
        found = offsets(w)
        return bool(found.size) and limit - 2**21 <= int(found.max()) < limit

    return holds


def _page_bytes(w: Written) -> int:
    """Of all slots of a page of the first cache, without what lies between them."""
    cells = w.operation.caches(w.sizes)[0]
    return cells.run_bytes * prod(count for _, count in cells.dimensions[1:])


_SLOTS: Mapping[str, _Predicate] = {
    "tokens: none": lambda w: not w.refused and w.sizes["num_tokens"] == 0,
    "tokens: one": lambda w: not w.refused and w.sizes["num_tokens"] == 1,
    "tokens: more than 64": lambda w: w.token.size > 64,
    "tokens: more than 300": lambda w: not w.refused and w.sizes["num_tokens"] > 300,
    "tokens: all padding": lambda w: w.slot.size > 1 and bool((w.slot == -1).all()),
    "tokens: padded tail": lambda w: (
        w.token.size > 0 and int(w.slot[-1]) == -1 and int(w.slot[0]) >= 0
    ),
    "tokens: a hole": lambda w: (
        w.token.size > 1 and bool((w.slot[int(w.token[0]) : int(w.token[-1])] == -1).any())
    ),
    "slots: ascending": lambda w: w.token.size > 2 and bool((np.diff(w.slot[w.token]) > 0).all()),
    "slots: descending": lambda w: w.token.size > 2 and bool((np.diff(w.slot[w.token]) < 0).all()),
    "slots: contested": lambda w: not w.refused and w.contested(),
    "slots: duplicates that agree": lambda w: (
        w.token.size > 1 and not w.contested() and np.unique(w.slot[w.token]).size < w.token.size
    ),
    "slots: the last one": lambda w: w.capacity > 1 and bool((w.slot == w.capacity - 1).any()),
    "slots: beyond int32": lambda w: bool((w.slot[w.token] > INT32_MAX).any()),
    "inputs: longer than slot_mapping": lambda w: (
        w.token.size > 0
        and all(w.sizes[r.rows] > w.sizes["num_tokens"] for r in w.operation.inputs(w.sizes))
    ),
    "inputs: padded rows": lambda w: (
        w.token.size > 1
        and any(r.stride_bytes(w.sizes) > r.row_bytes for r in w.operation.inputs(w.sizes))
    ),
    "inputs: overlapping rows": lambda w: (
        w.token.size > 1
        and any(0 < r.stride_bytes(w.sizes) < r.row_bytes for r in w.operation.inputs(w.sizes))
    ),
    "inputs: one row for all": lambda w: (
        w.token.size > 1 and all(r.stride_bytes(w.sizes) == 0 for r in w.operation.inputs(w.sizes))
    ),
    "page: more than 2^18 bytes": lambda w: w.token.size > 0 and _page_bytes(w) > 2**18,
    "cache: no pages": lambda w: not w.refused and w.sizes["num_pages"] == 0,
    "counts: absent": lambda w: w.token.size > 0 and "counts" not in w.plan.case.values,
    "counts: present": lambda w: w.token.size > 0 and "counts" in w.plan.case.values,
    "hostile: just past": lambda w: w.hostile and bool((w.slot == w.capacity).any()),
    "hostile: -2": lambda w: w.hostile and bool((w.slot == -2).any()),
    "hostile: wraps to a slot": lambda w: (
        w.hostile and bool(((w.slot >= 2**32) & (w.slot % 2**32 < w.capacity)).any())
    ),
    "hostile: highest": lambda w: w.hostile and bool((w.slot == 2**63 - 1).any()),
    "hostile: lowest": lambda w: w.hostile and bool((w.slot == -(2**63)).any()),
    "hostile: others are written": lambda w: w.hostile and w.token.size > 0,
    "class: in contract": lambda w: not w.refused and not w.hostile,
    "class: hostile": lambda w: w.hostile,
    "class: refused": lambda w: w.refused,
    **{
        f"boundary: {name} {side} {power}": test(offsets, limit)
        for name, offsets in (("entry", Written.begins), ("input row", Written.input_begins))
        for limit, power in zip(LIMITS, ("2^31", "2^32"), strict=True)
        for side, test in (("past", _reaches), ("below", _below))
    },
}


def _rows(w: Written) -> tuple[int, ...]:
    """Of both inputs of a write; the same where nothing is written."""
    return tuple(w.sizes[r.rows] if w.token.size else 0 for r in w.operation.inputs(w.sizes))


def _gaps(w: Written) -> tuple[int, ...]:
    """Bytes between rows of both inputs of several tokens; else 0."""
    inputs = w.operation.inputs(w.sizes)
    several = w.token.size > 1
    return tuple(r.stride_bytes(w.sizes) - r.row_bytes if several else 0 for r in inputs)


_TWO_INPUTS: Mapping[str, _Predicate] = {
    "inputs: the first is longer": lambda w: _rows(w)[0] > _rows(w)[1],
    "inputs: the second is longer": lambda w: _rows(w)[0] < _rows(w)[1],
    "inputs: only the first is padded": lambda w: _gaps(w)[0] > 0 == _gaps(w)[1],
    "inputs: only the second is padded": lambda w: _gaps(w)[0] == 0 < _gaps(w)[1],
    "inputs: padded, and not alike": lambda w: 0 < min(_gaps(w)) < max(_gaps(w)),
}


def _production(**sizes: int) -> dict[str, _Predicate]:
    """A shape that engines run, in contract and not."""

    def holds(w: Written) -> bool:
        return w.token.size > 0 and all(w.sizes[name] == size for name, size in sizes.items())

    return {
        "production: in contract": lambda w: holds(w) and not w.hostile,
        "production: hostile": lambda w: holds(w) and w.hostile,
    }


_CODES: Mapping[str, _Predicate] = {
    **{
        f"stored: {Dtype(code).name} as {kind}": lambda w, code=code, nth=nth: (  # type: ignore[misc]
            w.token.size > 0 and w.sizes["input_dtype"] == code and w.sizes["kv_dtype"] == nth
        )
        for code in (Dtype.F32, Dtype.F16, Dtype.BF16)
        for nth, kind in enumerate(("auto", "e4m3", "e5m2"))
    },
    "codes: the maximum": lambda w: w.codes({1: 0x7E, 2: 0x7B}.get(w.sizes["kv_dtype"], 0)),
    "codes: the lowest": lambda w: w.codes({1: 0xFE, 2: 0xFB}.get(w.sizes["kv_dtype"], 0)),
    "codes: NaN": lambda w: w.codes(0x7F),
    "codes: -0": lambda w: w.codes(0x80),
    "codes: subnormal": lambda w: w.codes(1, 2, 0x81, 0x82),
    "codes: a U8 cache": lambda w: (
        w.token.size > 0
        and any(
            w.plan.buffers[cells.name].dtype == Dtype.U8 for cells in w.operation.caches(w.sizes)
        )
    ),
    "scale: unread": lambda w: (
        w.token.size > 0
        and w.sizes["kv_dtype"] == 0
        and any(name in w.plan.case.values for name in w.operation.scalars(w.sizes))
    ),
}


def _stored(w: Written, part: int) -> npt.NDArray[np.uint8]:
    """Runs of a part of the first cache that must be written."""
    if w.refused or not w.token.size:
        return np.empty((0, 4), np.uint8)
    name = w.operation.caches(w.sizes)[0].parts[part].name
    return w.expectation.expected[name].values


def _code(*wanted: int) -> _Predicate:
    return lambda w: bool(np.isin(_stored(w, 0), wanted).any())


def _scale(holds: Callable[[npt.NDArray[np.float32]], bool]) -> _Predicate:
    """Of the scale words, [n, groups], where there is one."""

    def predicate(w: Written) -> bool:
        words = np.ascontiguousarray(_stored(w, 1)).view(np.float32)
        return bool(words.size) and holds(words)

    return predicate


def _is_power_of_two(words: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.isfinite(words) & (np.frexp(words)[0] == 0.5)
    return found


_GROUPS: Mapping[str, _Predicate] = {
    "scales: plain": lambda w: w.token.size > 0 and w.sizes["scale_kind"] == 0,
    "scales: powers of two": lambda w: w.token.size > 0 and w.sizes["scale_kind"] == 1,
    "scales: plain, a power of two": lambda w: (
        w.sizes["scale_kind"] == 0 and _scale(lambda s: bool(_is_power_of_two(s).any()))(w)
    ),
    "scales: plain, none": lambda w: (
        w.sizes["scale_kind"] == 0 and _scale(lambda s: not _is_power_of_two(s).all())(w)
    ),
    "scales: infinite": _scale(lambda s: bool(np.isinf(s).any())),
    "scales: the floor": _scale(lambda s: bool((s <= np.float32(2.0**-13)).any())),
    "scales: huge": _scale(lambda s: bool(((s > 1e30) & np.isfinite(s)).any())),
    "scales: several of a token": _scale(lambda s: bool((s != s[:, :1]).any())),
    "scales: far apart in a token": _scale(
        lambda s: bool((s.max(axis=1) > np.float32(64) * s.min(axis=1)).any())
    ),
    "codes: the maximum": _code(0x7E),
    "codes: the lowest": _code(0xFE),
    "codes: NaN": _code(0x7F),
    "codes: -0": _code(0x80),
    "codes: subnormal": _code(1, 2, 0x81, 0x82),
}


_REASONS = (
    "dtype",
    "rank",
    "kv_dtype",
    "input_dtype",
    "elements",
    "null_scale",
    "input_rows",
    "page_size_tokens",
    "size_range",
    "negative_stride",
    "stride_overflow",
    "extent",
    "null_pointer",
    "alignment",
    "not_nested",
    "overlap",
)


def _dense_heads(w: Written, side: str) -> bool:
    return w.sizes[f"{side}_head_stride_bytes"] == w.operation.caches(w.sizes)[0].run_bytes


def _several_heads(w: Written) -> bool:
    return w.token.size > 0 and w.sizes["num_heads"] > 1 and w.sizes["page_size_tokens"] > 1


def _heads_first(w: Written, side: str) -> bool:
    head, slot = (w.sizes[f"{side}_{part}_stride_bytes"] for part in ("head", "slot"))
    return _several_heads(w) and head > slot


def _strides_differ(w: Written) -> bool:
    parts = ("page", "slot", "head")
    key, value = (
        [w.sizes[f"{side}_{part}_stride_bytes"] for part in parts] for side in ("key", "value")
    )
    return _several_heads(w) and w.sizes["num_pages"] > 1 and key != value


def _furthest_head(w: Written) -> int:
    if w.slots is None or not w.token.size:
        return 0
    cells = w.operation.caches(w.sizes)[0]
    return int(cells.run_offsets(w.sizes).max())


_HEADS: Mapping[str, _Predicate] = {
    "heads: one": lambda w: w.token.size > 0 and w.sizes["num_heads"] == 1,
    "heads: more than 32": lambda w: w.token.size > 0 and w.sizes["num_heads"] > 32,
    "heads: more than 256 elements": lambda w: w.token.size > 0 and w.sizes["head_elements"] > 256,
    "heads: tokens first, dense": lambda w: _several_heads(w) and _dense_heads(w, "key"),
    "heads: tokens first, padded": lambda w: (
        _several_heads(w) and not _dense_heads(w, "key") and not _heads_first(w, "key")
    ),
    "heads: heads first": lambda w: _heads_first(w, "key"),
    "heads: values alone heads first": lambda w: (
        _heads_first(w, "value") and not _heads_first(w, "key")
    ),
    "heads: keys and values differ in strides": _strides_differ,
    "heads: keys and values in one buffer": lambda w: (
        w.token.size > 0 and w.plan.buffers["value_cache"].placement.over is not None
    ),
    "boundary: head past 2^31": lambda w: _furthest_head(w) >= LIMITS[0],
    "boundary: head below 2^31 or 2^32": lambda w: any(
        limit - 2**21 <= _furthest_head(w) < limit for limit in LIMITS
    ),
    "scale: one a head": lambda w: (
        w.token.size > 0 and w.sizes["kv_dtype"] > 0 and w.sizes["scale_count"] > 1
    ),
    "scale: one of keys, another of values": lambda w: (
        w.token.size > 0
        and w.sizes["kv_dtype"] > 0
        and w.plan.case.values["k_scale"] != w.plan.case.values["v_scale"]
    ),
}


def _without(predicates: Mapping[str, _Predicate], *names: str) -> dict[str, _Predicate]:
    return {name: one for name, one in predicates.items() if name not in names}


#: Refusals of writers with a scale that is given.
_SCALED_REASONS = ("kv_dtype", "input_dtype", "null_scale")


def _group_refusals(*more: str) -> dict[str, _Predicate]:
    reasons = [reason for reason in _REASONS if reason not in _SCALED_REASONS]
    return {**refused_for(*reasons, "scale_kind", *more)}


def _other_width(w: Written) -> bool:
    """A record whose code and rope parts are no multiple of one tile."""
    return w.token.size > 0 and 2 * w.sizes["k_pe_elements"] % 128 > 0


def ds_mla_corners() -> Corners:
    """Corners of concat_and_cache_ds_mla. A record is too large for 2^31 slots of them."""
    records: Mapping[str, _Predicate] = {
        "record: 656 bytes": lambda w: (
            w.token.size > 0 and (w.sizes["kv_c_elements"], w.sizes["k_pe_elements"]) == (512, 64)
        ),
        "record: 512 codes, more than 512 in a page": lambda w: (
            w.token.size > 0 and w.sizes["kv_c_elements"] == 512 < w.sizes["page_size_tokens"]
        ),
        "record: no multiple of 4": lambda w: (
            w.token.size > 0 and w.sizes["k_pe_elements"] % 2 == 1
        ),
        "record: rope part of another width": _other_width,
        "cache: slots first": lambda w: (
            w.token.size > 1
            and min(w.sizes["num_pages"], w.sizes["page_size_tokens"]) > 1
            and w.sizes["page_stride_bytes"] < w.sizes["slot_stride_bytes"]
        ),
    }
    slots = _without(_SLOTS, "slots: beyond int32")
    produced = _production(kv_c_elements=512, k_pe_elements=64, page_size_tokens=64)
    own = {**records, **produced, **_group_refusals()}
    return corners_of(Written, {**slots, **_TWO_INPUTS, **_GROUPS, **own})


def indexer_write_corners() -> Corners:
    """Corners of indexer_k_quant_and_cache."""
    pages: Mapping[str, _Predicate] = {
        "layout: flat": lambda w: w.token.size > 0 and w.sizes["page_layout"] == 0,
        "layout: tiled16": lambda w: w.token.size > 0 and w.sizes["page_layout"] == 1,
        "layout: tiled16, several tiles": lambda w: (
            w.sizes["page_layout"] == 1 and bool((w.slot[w.token] > 16).any())
        ),
        "cache: padded pages": lambda w: (
            w.token.size > 0
            and w.sizes["num_pages"] > 1
            and w.sizes["page_stride_bytes"] > w.operation.caches(w.sizes)[0].run_bytes
        ),
        "group: one value": lambda w: w.token.size > 0 and w.sizes["quant_block"] == 1,
        "group: the whole key": lambda w: (
            w.token.size > 0 and w.sizes["quant_block"] == w.sizes["head_dim"]
        ),
        "group: no power of two": lambda w: (
            w.token.size > 0 and w.sizes["quant_block"] & (w.sizes["quant_block"] - 1) > 0
        ),
        "boundary: scales past, keys below 2^31 or 2^32": _scales_past,
    }
    refused = _group_refusals("head_dim", "quant_block", "page_layout")
    produced = _production(head_dim=128, quant_block=128, page_size_tokens=64)
    own = {**pages, **produced, **_without(refused, "refused: elements")}
    return corners_of(Written, {**_SLOTS, **_GROUPS, **own})


def _scales_past(w: Written) -> bool:
    """A token whose keys begin below a boundary and whose scales lie past it."""
    if w.slots is None or not w.token.size:
        return False
    (cells,) = w.operation.caches(w.sizes)
    keys, scales = (
        cells.begins(w.sizes, part, w.slots.page, w.slots.offset).min(axis=1)
        for part in cells.parts
    )
    return any(bool(((keys < limit) & (limit <= scales)).any()) for limit in LIMITS)


def mla_corners() -> Corners:
    """Corners of concat_and_cache_mla."""
    produced = _production(kv_c_elements=512, k_pe_elements=64, page_size_tokens=64)
    own = {**produced, **refused_for(*_REASONS)}
    return corners_of(Written, {**_SLOTS, **_TWO_INPUTS, **_CODES, **own})


def flash_corners() -> Corners:
    """Corners of reshape_and_cache_flash."""
    produced = _production(num_heads=8, head_elements=128, page_size_tokens=16)
    own = {**_HEADS, **produced, **refused_for(*_REASONS, "scale_count")}
    return corners_of(Written, {**_SLOTS, **_TWO_INPUTS, **_CODES, **own})
