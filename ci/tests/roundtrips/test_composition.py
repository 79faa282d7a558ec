"""What the rows of a round trip must hold, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from ci.tests.roundtrips.trips import (
    COPY,
    FLASH,
    MLA,
    bits,
    copied,
    dequantised,
    indexed,
    mla,
    moved,
)

from pagefuzz.oracles import contents, registry
from pagefuzz.oracles.case import Case, CaseError, Placement, Values
from pagefuzz.oracles.composition import Composition, compose, held_before
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.round_trip import Gather, Move, RoundTrip, load_round_trip
from pagefuzz.oracles.round_trip_layout import lay_out


def composed(trip: RoundTrip) -> Composition:
    writer = registry.operation(trip.writer.operation).plan(trip.writer)
    reader = registry.operation(trip.gathers[0].case.operation)
    return compose(
        trip,
        writer,
        tuple(reader.plan(gather.case) for gather in trip.gathers),
        tuple(registry.operation(move.case.operation).plan(move.case) for move in trip.moves),
    )


def raw(seed: int, origin: int, offset: int, size: int) -> bytes:
    """Bytes of the payload of the writer's input number `origin`."""
    at = np.array([origin * 2**42 + offset], dtype=np.int64)
    return contents.payload_at(seed, at, size)[0].tobytes()


def test_a_row_holds_the_inputs_of_the_token_in_its_slot():
    """Tokens 0, 1, 2 in slots 7, -1, 2 of pages of 3; the reader's pages are 2 and 0."""
    trip = copied(mla([7, -1, 2]), [[2, 0]], [0, 4], [1])
    (rows,) = composed(trip).rows
    # Position 1 is page 2 offset 1 = slot 7; then slots 8, 0 and 1.
    assert [(c.page, c.slot, c.tokens) for c in rows.claims] == [
        (2, 1, (0,)),
        (2, 2, ()),
        (0, 0, ()),
        (0, 1, ()),
    ]
    assert rows.offsets.tolist() == [0, 16, 32, 48]
    assert rows.alternatives[0][0].tobytes() == raw(1, 0, 0, 12) + raw(1, 1, 0, 4)
    before = held_before(1, np.arange(8 * 16, 9 * 16, dtype=np.int64))
    assert rows.alternatives[0][1].tobytes() == before.tobytes()
    assert rows.nans == (None,)
    trip = copied(mla([7, -1, 2]), [[0]], [0, 1], [2])
    (rows,) = composed(trip).rows
    assert rows.claims[0].tokens == (2,)
    assert rows.alternatives[0][0].tobytes() == raw(1, 0, 24, 12) + raw(1, 1, 8, 4)


def test_what_was_never_written_is_what_the_memory_holds():
    """Bytes that are read and not written lie in the cache before the launch, and nowhere else."""
    laid = lay_out(copied(mla([0]), [[0, 2]], [0, 6], [0]))
    image = laid.plan.buffers["writer.cache"].image
    entry = [16 * slot + byte for slot in (1, 2, 6, 7, 8) for byte in range(16)]
    assert image.offsets.tolist() == entry
    assert image.values.ravel().tolist() == held_before(1, np.array(entry)).tolist()
    assert laid.plan.buffers["reader.src"].placement.over == ("writer.cache", 0)


@pytest.mark.parametrize(
    ("kv_dtype", "result", "wanted"),
    [
        # x / 2 is 1.5, 0.03125 * 3, 500 and NaN: 448 and 57344 are the largest.
        (1, Dtype.F32, [3.0, 0.1875, 896.0, float("nan")]),
        (2, Dtype.F32, [3.0, 0.1875, 1024.0, float("nan")]),
        (1, Dtype.F16, [3.0, 0.1875, 896.0, float("nan")]),
        (1, Dtype.BF16, [3.0, 0.1875, 896.0, float("nan")]),
    ],
)
def test_values_are_decoded_of_encoded(kv_dtype, result, wanted):
    """One division and one rounding, then one multiplication and one rounding."""
    from pagefuzz.oracles.small_floats import widened
    from pagefuzz.oracles.written_cells import WRITERS

    trip = dequantised(mla([4], kv_dtype=kv_dtype), [[1]], [0, 1], [1], result=result)
    plan = registry.operation(MLA).plan(trip.writer)
    given = np.array([3.0, 0.1875, 1000.0, np.nan], dtype=np.float32)

    def image(buffer, values):
        return replace(buffer, image=replace(buffer.image, values=values.view(np.uint8)))

    buffers = dict(plan.buffers)
    buffers["kv_c"] = image(buffers["kv_c"], given[:3, None])
    buffers["k_pe"] = image(buffers["k_pe"], given[3:, None])
    plan = replace(plan, buffers=buffers)
    assert WRITERS[MLA].stored(plan, "cache", np.array([0])).shape == (1, 4)
    reader = registry.operation(trip.gathers[0].case.operation)
    (rows,) = compose(trip, plan, (reader.plan(trip.gathers[0].case),)).rows
    assert np.array_equal(widened(rows.alternatives[0], result)[0], wanted, equal_nan=True)
    assert rows.nans[0] is not None
    assert rows.nans[0].mask.tolist() == [[False, False, False, True]]
    assert rows.element_bytes == result.size_bytes


def test_each_element_of_a_contested_slot_is_one_writers():
    """Two tokens in one slot are two alternatives; a slot of one is the same in both."""
    trip = copied(mla([3, 3, 4]), [[1]], [0, 2], [0])
    (rows,) = composed(trip).rows
    first, second = rows.alternatives
    assert rows.element_bytes == 4
    assert first[0].tobytes() == raw(1, 0, 0, 12) + raw(1, 1, 0, 4)
    assert second[0].tobytes() == raw(1, 0, 12, 12) + raw(1, 1, 4, 4)
    assert first[1].tobytes() == second[1].tobytes()


def test_rows_that_no_page_backs_stay_as_they_were():
    """-1, and columns past the table, give no row."""
    trip = copied(mla([0]), [[-1, 0]], [0, 7], [0])
    (rows,) = composed(trip).rows
    assert [claim.row for claim in rows.claims] == [3, 4, 5]


@pytest.mark.parametrize(
    ("moves", "origins"),
    [
        ([[(0, 1)]], [0, 0, 2]),
        ([[(0, 1), (1, 2)]], [0, 0, 1]),  # as if both were read first
        ([[(1, 2), (0, 1)]], [0, 0, 1]),
        ([[(0, 1)], [(1, 2)]], [0, 0, 0]),  # one launch after the other
        ([[(0, 1), (1, 0)]], [1, 0, 2]),
        ([[(0, 1), (1, 2), (2, 0)]], [2, 0, 1]),
        ([[(-1, 1), (0, -1), (2, 0)]], [2, 1, 2]),
    ],
)
def test_a_moved_page_holds_what_was_stored_in_another(moves, origins):
    """Tokens 0 and 1 in pages 0 and 1; whatever page 2 held before is moved as well."""
    writer = mla([0, 3])
    trip = copied(writer, [[0], [1], [2]], [0, 1, 2, 3], [0, 0, 0])
    trip = replace(trip, moves=tuple(moved(writer, pairs) for pairs in moves))
    (rows,) = composed(trip).rows
    assert [claim.origin for claim in rows.claims] == origins
    tokens = {0: (0,), 1: (1,), 2: ()}
    assert [claim.tokens for claim in rows.claims] == [tokens[page] for page in origins]
    held = [
        raw(1, 0, 0, 12) + raw(1, 1, 0, 4),
        raw(1, 0, 12, 12) + raw(1, 1, 4, 4),
        held_before(1, np.arange(6 * 16, 7 * 16, dtype=np.int64)).tobytes(),
    ]
    assert [row.tobytes() for row in rows.alternatives[0]] == [held[page] for page in origins]
    image = lay_out(trip).plan.buffers["writer.cache"].image
    unwritten = list(range(6 * 16, 7 * 16)) if 2 in origins else []
    assert image.offsets.tolist() == unwritten


def test_a_row_whose_hint_names_another_request_is_not_written():
    """Hints of rows that nobody covers, and right ones, change nothing."""
    hinted = "cp_gather_indexer_k_quant_cache_hinted"
    rows = composed(indexed(hinted, [0, 16, 18], [0, 0, 1, 1, 1, 7])).rows
    assert [one.buffer for one in rows] == ["dst_k", "dst_scale"]
    for one in rows:
        assert [claim.row for claim in one.claims] == [0, 1, 3, 4]
        assert [claim.tokens for claim in one.claims] == [(1,), (), (0,), ()]
    plain = composed(indexed("cp_gather_indexer_k_quant_cache", [0, 16, 18])).rows
    assert [claim.row for claim in plain[0].claims] == [0, 1, 2, 3, 4, 5]


def flash(heads: int, *, head_stride: int, scale_count: int = 1) -> Case:
    """One token of 2-element heads, as E4M3, in slot 1 of a page of 2; keys and values apart."""
    own = {}
    for side in ("key", "value"):
        own |= {
            f"{side}_rows": 1,
            f"{side}_row_stride_bytes": 8 * heads,
            f"{side}_page_stride_bytes": 512,
            f"{side}_slot_stride_bytes": 2 if head_stride > 2 else 2 * heads,
            f"{side}_head_stride_bytes": head_stride,
        }
    sizes = {"num_tokens": 1, "num_heads": heads, "head_elements": 2, "scale_count": scale_count}
    sizes |= {"page_size_tokens": 2, "num_pages": 1, "input_dtype": int(Dtype.F32), "kv_dtype": 1}
    scales = Values.literal(*(bits(2.0 ** (1 + head)) for head in range(scale_count)))
    values = {"slot_mapping": Values.literal(1), "k_scale": scales, "v_scale": scales}
    return Case(FLASH, {**sizes, **own}, values)


def test_a_head_is_a_part_of_the_cell():
    """Heads first: the second head's entry begins where its head does, with its own codes."""
    writer = flash(3, head_stride=4, scale_count=3)
    whole = []
    for head in range(3):
        gather = Gather(
            Case(
                COPY,
                {
                    "num_requests": 1,
                    "num_tokens": 1,
                    "page_size_tokens": 2,
                    "num_pages": 1,
                    "table_width": 1,
                    "table_row_stride": 1,
                    "page_stride_bytes": 512,
                    "slot_stride_bytes": 2,
                    "dst_rows": 1,
                    "dst_row_stride_bytes": 2,
                    "entry_bytes": 2,
                    "element_bytes": 1,
                    "has_terminal": 1,
                },
                {
                    "block_table": Values.literal(0),
                    "starts": Values.literal(0, 1),
                    "seq_starts": Values.literal(1),
                },
            ),
            "value_cache",
            2 * head,
        )
        trip = RoundTrip(writer, (gather,))
        laid = lay_out(trip)
        placed = laid.plan.buffers["reader.src"].placement
        assert placed.over == ("writer.value_cache", 4 * head)
        (rows,) = composed(trip).rows
        whole.append(rows.alternatives[0][0].tobytes())
    expected = registry.operation(FLASH)
    plan = expected.plan(writer)
    codes = expected.expect(plan).expected["value_cache"].values
    assert [bytes(run) for run in codes] == whole
    wider = replace(gather, case=gather.case.with_sizes(slot_stride_bytes=4))
    with pytest.raises(CaseError, match="does not lie as value_cache does"):
        composed(RoundTrip(writer, (wider,)))


SOUND = copied(mla([0, 4]), [[1], [0]], [0, 1, 2], [1, 0])


def reader(**sizes: int) -> RoundTrip:
    (gather,) = SOUND.gathers
    return replace(SOUND, gathers=(replace(gather, case=gather.case.with_sizes(**sizes)),))


def starting(name: str, *values: int) -> RoundTrip:
    (gather,) = SOUND.gathers
    changed = {**gather.case.values, name: Values.literal(*values)}
    return replace(SOUND, gathers=(replace(gather, case=replace(gather.case, values=changed)),))


def moving(**sizes: int) -> RoundTrip:
    return replace(SOUND, moves=(moved(SOUND.writer, [(0, 1)], **sizes),))


@pytest.mark.parametrize(
    ("trip", "sentence"),
    [
        (moving(page_bytes=47), "a move of 47 bytes a page tears the pages of cache"),
        (moving(page_stride_bytes=64), "pages lie 64 bytes apart"),
        (moving(num_layers=2, layer_stride_bytes=144), "of one layer and of all 3 pages"),
        (moving(num_pages=2), "of one layer and of all 3 pages"),
        (moving(page_bytes=0), "the mover must be refused: page_bytes=0"),
        (
            replace(SOUND, moves=(moved(SOUND.writer, [(0, 1)], cache="key_cache"),)),
            "has no cache 'key_cache'",
        ),
        (
            replace(SOUND, moves=(Move(SOUND.gathers[0].case, "cache"),)),
            "'cp_gather_cache' moves no pages",
        ),
        (reader(page_stride_bytes=64), "src does not lie as cache does"),
        (reader(slot_stride_bytes=32), "src does not lie as cache does"),
        (reader(page_size_tokens=4), "page_size_tokens=4, the writer 3"),
        (reader(num_pages=2), "num_pages=2, the writer 3"),
        (reader(entry_bytes=20, dst_row_stride_bytes=20), "an entry of 20 bytes"),
        (starting("starts", 1, 0, 2), "must not decrease"),
        (starting("seq_starts", -1, 0), "must not decrease or be negative, nor seq_starts"),
        (reader(table_row_stride=0), "block table must not overlap"),
        (reader(dst_rows=1), "the reader must be refused: num_tokens=2"),
        (replace(SOUND, writer=SOUND.gathers[0].case), "is no writer of a round trip"),
        (replace(SOUND, gathers=(Gather(SOUND.writer, "cache"),)), "is no reader of a round trip"),
        (replace(SOUND, gathers=(replace(SOUND.gathers[0], cache="src"),)), "has no cache 'src'"),
        (
            replace(SOUND, gathers=(replace(SOUND.gathers[0], first_byte=16),)),
            "from byte 16 on is no part of 16",
        ),
    ],
)
def test_what_is_no_round_trip_is_one_sentence(trip, sentence):
    """Readers that see another cache, and indices that a composition does not define."""
    with pytest.raises(CaseError, match=sentence):
        lay_out(trip)


@pytest.mark.parametrize("by", ["reader", "mover"])
@pytest.mark.parametrize("element_bytes", [1, 4])
def test_a_cache_is_aligned_as_all_its_users_need_it(by, element_bytes):
    """A cache of bytes, a slice of a workspace, of which whole elements are copied: no launcher
    refuses it, and it lies no further from its guard than that."""
    writer = mla([0, 4], kv_dtype=1, cache=Placement(before_bytes=1, after_bytes=2))
    trip = copied(writer, [[0, 2]], [0, 6], [0])
    wide = {"element_bytes": element_bytes}
    if by == "reader":
        (gather,) = trip.gathers
        trip = replace(trip, gathers=(replace(gather, case=gather.case.with_sizes(**wide)),))
    else:
        trip = replace(trip, moves=(moved(writer, [(0, 1)], **wide),))
    laid = lay_out(trip).plan
    for plan, front in ((laid, False), (laid.mirrored(), True)):
        cache = plan.buffers["writer.cache"]
        base = cache.base_offset_bytes
        assert base % element_bytes == 0
        gap = base - 1 if front else -(base + cache.memory_bytes) % 256
        assert 0 <= gap < element_bytes


def test_round_trips_are_plain_data(tmp_path):
    """JSON and back is the same; what is malformed is one sentence that names the file."""
    trip = replace(SOUND, writer=mla([0, 4], cache=Placement(offset_bytes=8)))
    for one in (trip, moving()):
        assert RoundTrip.from_json(json.loads(one.dumps())) == one
    path = tmp_path / "trip.json"
    path.write_text(json.dumps({"round_trip": trip.to_json()}))
    assert load_round_trip(path) == trip
    for data, sentence in (
        ("[", "not a JSON round trip"),
        ("{}", '"pagefuzz_round_trip": 1'),
        ('{"pagefuzz_round_trip": 1}', "needs gathers"),
        (trip.dumps().replace('"first_byte":0', '"first_byte":-1'), "first_byte must be"),
        (trip.dumps().replace('"cache":', '"cash":'), "needs cache, first_byte and case"),
        (moving().dumps().replace('"moves":[', '"moves":[7,'), "a move .* needs cache and case"),
        (moving().dumps().replace('"moves":[', '"moves":7,"m":['), "moves .* must be a list"),
    ):
        path.write_text(data)
        with pytest.raises(CaseError, match=rf"trip\.json: .*{sentence}"):
            load_round_trip(path)
    with pytest.raises(CaseError, match="cannot read the round trip"):
        load_round_trip(tmp_path / "none.json")
