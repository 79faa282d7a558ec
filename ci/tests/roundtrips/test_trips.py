"""What is drawn: every view and mapping that a pair must agree in, and how it shrinks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from ci.tests.roundtrips.conftest import drawn
from ci.tests.roundtrips.trips import COPY, DEQUANT, FLASH, MLA
from hypothesis import HealthCheck, find, settings
from hypothesis.errors import InvalidArgument

from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.round_trip import RoundTrip
from pagefuzz.oracles.round_trip_layout import LaidRoundTrip, lay_out
from pagefuzz.strategies.round_trips import pairs, round_trips

COUNT = 150
#: Of pairs that are drawn in the slow tier only.
SLOW_COUNT = 900


def slots_of(trip: RoundTrip) -> list[int]:
    return list(trip.writer.values["slot_mapping"].parameters["values"])


def corners(laid: LaidRoundTrip) -> dict[str, bool]:
    """By name, whether a round trip is in a corner that every pair must reach."""
    trip = laid.trip
    w, slots = trip.writer.sizes, slots_of(trip)
    size, pages = w["page_size_tokens"], w["num_pages"]
    used = [slot for slot in slots if slot >= 0]
    claims = [claim for rows in laid.composition.rows for claim in rows.claims]
    readers = [gather.case for gather in trip.gathers]
    first = readers[0]
    starts = first.values["starts"].parameters["values"]
    table = first.values["block_table"].parameters["values"]
    dense = [name for name in w if name.endswith("page_stride_bytes")]
    slot_strides = [name for name in w if name.endswith("slot_stride_bytes")]
    real = pages > 1 and size > 1
    caches = [b for n, b in laid.plan.buffers.items() if n.startswith("writer.") and "cache" in n]
    before = max(buffer.placement.before_bytes for buffer in caches)
    return {
        "shuffled slots": used != sorted(used) and len(set(used)) == len(used),
        "padding at the end": slots[-1:] == [-1] and bool(used),
        "holes": -1 in slots[: len(slots) // 2],
        "inputs longer than the mapping": any(
            w[name] > w["num_tokens"] for name in w if name.endswith("_rows")
        ),
        "never written is read": any(not claim.tokens for claim in claims),
        "page size no power of two": size & (size - 1) != 0 and bool(claims),
        "padded pages": real and any(w[name] % max(size, 1) for name in dense),
        "padded or foreign slots": not slot_strides
        or (real and any(w[d] != size * w[s] for d, s in zip(dense, slot_strides, strict=False))),
        "one layer of a pool": pages > 1 and before >= w[dense[0]] // 5 > 0,
        "pages a million bytes apart": pages > 1 and w[dense[0]] >= 1_000_000,
        "shuffled pages": len({claim.page for claim in claims}) > 1
        and [claim.page for claim in claims] != sorted(claim.page for claim in claims),
        "starts in a page": any(claim.position % size and claim.row in starts for claim in claims),
        "starts past a page": "seq_starts" in first.values
        and any(at >= size for at in first.values["seq_starts"].parameters["values"]),
        "several requests": first.sizes["num_requests"] > 1,
        "an empty request": any(b == e for b, e in pairwise(starts)),
        "rows that no request covers": bool(starts)
        and (starts[0] > 0 or first.sizes["num_tokens"] > starts[-1]),
        "no terminal": not first.sizes["has_terminal"] and bool(claims),
        "a page of padding": -1 in table,
        "a moved page is read": any(claim.origin != claim.page for claim in claims),
        "the second cache is read": any(claim.cache for claim in claims),
        "a page of the second cache that nobody wrote": any(claim.origin_cache for claim in claims),
        "swapped out and in": {move.way for move in trip.moves} == {"out", "in"} and bool(claims),
        "pages on a cycle": any(
            step.expectation.counters["pages_on_cycles"] for step in laid.writing[1:]
        ),
        "moves and padding": any(
            -1 in move.case.values["pairs"].parameters["values"] for move in trip.moves
        ),
        "column slice": first.sizes["num_requests"] > 1
        and first.sizes["table_row_stride"] > first.sizes["table_width"],
        "strided rows": any(
            name.endswith("row_stride_bytes") and stride % 16 and case.sizes["num_tokens"] > 1
            for case in readers
            for name, stride in case.sizes.items()
        ),
        **{
            f"page layout {layout}": w["page_layout"] == layout and bool(claims)
            for layout in range(2 if "page_layout" in w else 0)
        },
        **(_of_kinds(laid) if "kv_dtype" in w else {}),
        **(_flash(laid) if trip.writer.operation == FLASH else {}),
        **(_dequantised(laid) if first.operation == DEQUANT else {}),
    }


def _of_kinds(laid: LaidRoundTrip) -> dict[str, bool]:
    """Of writers of plain entries."""
    w = laid.trip.writer.sizes
    claims = [claim for rows in laid.composition.rows for claim in rows.claims]
    return {
        "a contested slot is read": any(len(claim.tokens) > 1 for claim in claims),
        **{f"kv_dtype {kind}": w["kv_dtype"] == kind and bool(claims) for kind in range(3)},
        **{f"input {kind}": w["input_dtype"] == kind and bool(claims) for kind in (7, 8, 9)},
    }


def _flash(laid: LaidRoundTrip) -> dict[str, bool]:
    w, gathers = laid.trip.writer.sizes, laid.trip.gathers
    run = w["head_elements"] * (1 if w["kv_dtype"] else Dtype(w["input_dtype"]).size_bytes)
    heads, size = w["num_heads"], w["page_size_tokens"]
    several = heads > 1 and size > 1 and w["num_pages"] > 0
    head, slot = w["key_head_stride_bytes"], w["key_slot_stride_bytes"]
    return {
        "tokens first": several and slot > head,
        "heads first": several and head > slot,
        "K and V in one buffer": laid.trip.writer.placement("value_cache").over is not None,
        "keys": any(gather.cache == "key_cache" for gather in gathers),
        "values": any(gather.cache == "value_cache" for gather in gathers),
        "a head by itself": any(gather.first_byte >= run for gather in gathers),
        "a scale a head": w["kv_dtype"] > 0 and w["scale_count"] > 1,
    }


def _dequantised(laid: LaidRoundTrip) -> dict[str, bool]:
    cases = [gather.case for gather in laid.trip.gathers if gather.case.sizes["kv_dtype"]]
    return {
        **{f"to {kind}": any(c.sizes["dst_dtype"] == kind for c in cases) for kind in (7, 8, 9)},
        "an odd scale": any(
            case.values["scale"].parameters["values"][0] % 2**23 != 0 for case in cases
        ),
    }


#: The others are drawn in the same way, and cost more.
FAST = (f"{MLA}/{DEQUANT}",)


@pytest.mark.parametrize(
    "pair",
    [pair if pair in FAST else pytest.param(pair, marks=pytest.mark.slow) for pair in pairs()],
)
def test_every_corner_is_reached(pair):
    """Each of them in a few hundred round trips; most of these compare something."""
    counts: Counter[str] = Counter()
    names: set[str] = set()
    compared = 0
    count = COUNT if pair in FAST else SLOW_COUNT
    for trip in drawn(pair, count):
        laid = lay_out(trip)
        found = corners(laid)
        names |= set(found)
        counts.update(name for name, reached in found.items() if reached)
        compared += any(rows.claims for rows in laid.composition.rows)
    assert sorted(names - set(counts)) == []
    assert compared > 0.7 * count


@pytest.mark.parametrize("pair", FAST)
def test_a_round_trip_is_never_large(pair):
    """A few launches, a few hundred rows: what a check costs stays in milliseconds."""
    for trip in drawn(pair, COUNT):
        assert len(trip.gathers) <= 3
        rows = sum(gather.case.sizes["num_tokens"] for gather in trip.gathers)
        assert rows < 3 * 450
        assert RoundTrip.from_json(trip.to_json()) == trip


@pytest.mark.parametrize(
    "pair", [f"{MLA}/{COPY}", pytest.param(f"{FLASH}/{DEQUANT}", marks=pytest.mark.slow)]
)
def test_shrinks_towards_one_token_and_one_row(pair):
    """The simplest trip with a row that a token wrote."""
    trip = find(
        round_trips(pair, limit_bytes=2**26),
        lambda trip: any(
            claim.tokens for rows in lay_out(trip).composition.rows for claim in rows.claims
        ),
        settings=settings(database=None, suppress_health_check=list(HealthCheck)),
        random=Random(0),
    )
    (gather,) = trip.gathers
    assert trip.writer.sizes["num_tokens"] == 1
    assert trip.writer.sizes["num_pages"] == trip.writer.sizes["page_size_tokens"] == 1
    assert gather.case.sizes["num_requests"] == gather.case.sizes["num_tokens"] == 1
    assert gather.case.placements == trip.writer.placements == {}


def test_an_unknown_pair_is_refused():
    """With the pairs that there are."""
    with pytest.raises(InvalidArgument, match=f"must be one of {MLA}/{COPY}"):
        round_trips("cp_gather_cache/concat_and_cache_mla")
