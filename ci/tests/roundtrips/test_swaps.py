"""Pages that are swapped to a second cache, and back: by hand, drawn, and with faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ci.tests.roundtrips.conftest import drawn
from ci.tests.roundtrips.trips import (
    COPY,
    DEQUANT,
    FLASH,
    INDEXER,
    MLA,
    copied,
    dequantised,
    mla,
    moved,
    of_second,
    swapped,
)

from pagefuzz.harness.cli import main
from pagefuzz.harness.round_trip_search import RoundTripFinding, Search
from pagefuzz.harness.round_trips import RoundTripChecker
from pagefuzz.oracles import composition
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.composition import held_before
from pagefuzz.oracles.moved_pages import FIRST, SECOND, Moved
from pagefuzz.oracles.round_trip import RoundTrip
from pagefuzz.oracles.round_trip_judging import NAME
from pagefuzz.oracles.round_trip_layout import lay_out
from pagefuzz.oracles.verdict import Outcome

TWINS = Path(__file__).parent.parent / "twins"
ONE_BY_ONE = f"twin:{TWINS / 'copy-one-by-one.toml'}"
DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.cuda)]

#: By what each does wrong, what a twin of swap_blocks replaces.
FAULTS = {
    "turned": (
        "const pf::PageMove* moves = pairs.moves.data();",
        (
            "std::vector<pf::PageMove> turned = pairs.moves; "
            "for (pf::PageMove& one : turned) if (one.from < a.dst_num_pages && "
            "one.to < a.src_num_pages) std::swap(one.from, one.to); "
            "const pf::PageMove* moves = turned.data();"
        ),
    ),
    "dropped": (
        "moves + pairs.moves.size(), 0, 1)",
        "moves + (pairs.moves.empty() ? 0 : pairs.moves.size() - 1), 0, 1)",
    ),
}


@pytest.fixture
def twin(tmp_path, request):
    """Name of a twin of swap_blocks with one fault."""
    find, put = FAULTS[request.param]
    path = tmp_path / f"swap-{request.param}.toml"
    path.write_text(
        f'operation = "swap_blocks"\nschedule = "page"\nbreaks = "pairs are {request.param}"\n\n'
        f"[[replace]]\nfind = {json.dumps(find)}\nwith = {json.dumps(put)}\n"
    )
    return f"twin:{path}"


WRITER = mla([0, 3])  # in pages 0 and 1 of 3
FIRST_CACHE = copied(WRITER, [[0], [1], [2]], [0, 1, 2, 3], [0, 0, 0])
SECOND_CACHE = of_second(copied(WRITER, [[0, 1, 2, 3]], [0, 12], [0]))


def out_and_in(*pairs: tuple[int, int]) -> RoundTrip:
    """Pages 0 and 1 to pages 2 and 0 of the second cache, from there by `pairs`."""
    out = swapped(WRITER, [(0, 2), (1, 0)], "out")
    return replace(FIRST_CACHE, moves=(out, swapped(WRITER, list(pairs), "in")))


def came_from(trip: RoundTrip) -> list[tuple[int, int]]:
    """(cache, page) of the content of every row that begins a page."""
    (rows,) = lay_out(trip).composition.rows
    return [(c.origin_cache, c.origin) for c in rows.claims if not c.slot]


def test_what_was_swapped_out_is_read_from_the_second_cache():
    """Pages 0, 1 and 2 to 3, 0 and 1 of a second cache with gaps; page 2 there is as it was."""
    trip = replace(SECOND_CACHE, moves=(swapped(WRITER, [(0, 3), (1, 0), (2, 1)], "out"),))
    laid = lay_out(trip)
    (rows,) = laid.composition.rows
    assert came_from(trip) == [(FIRST, 1), (FIRST, 2), (SECOND, 2), (FIRST, 0)]
    assert [claim.tokens for claim in rows.claims][::3] == [(1,), (), (), (0,)]
    whole = lay_out(FIRST_CACHE).composition.rows[0].alternatives[0]
    assert np.array_equal(rows.alternatives[0][[9, 0, 3]], whole)
    old = held_before(1, 2 * 80 + np.arange(48, dtype=np.int64), SECOND)
    assert rows.alternatives[0][6:9].tobytes() == old.tobytes()
    assert not np.array_equal(old, held_before(1, 2 * 80 + np.arange(48, dtype=np.int64)))
    buffers = laid.plan.buffers
    assert buffers["mover.dst_cache"].memory_bytes == 3 * 80 + 48
    assert buffers["mover.dst_cache"].image.offsets.tolist() == list(range(160, 208))
    assert buffers["mover.src_cache"].placement.over == ("writer.cache", 0)
    assert buffers["reader.src"].placement.over == ("mover.dst_cache", 0)
    said = str(rows.claims[0])
    assert "page 0 of the second cache offset 0, a copy of page 1 of the first cache" in said


def test_what_comes_back_is_what_went_out():
    """To other pages, over others, and with a page of the second cache that nobody wrote."""
    assert came_from(out_and_in((2, 1), (0, 2))) == [(FIRST, 0), (FIRST, 0), (FIRST, 1)]
    assert came_from(out_and_in((0, 0), (2, 1))) == [(FIRST, 1), (FIRST, 0), (FIRST, 2)]
    trip = out_and_in((3, 0), (-1, 2))
    assert came_from(trip) == [(SECOND, 3), (FIRST, 1), (FIRST, 2)]
    laid = lay_out(trip)
    assert laid.plan.buffers["mover[1].src_cache"].placement.over == ("mover[0].dst_cache", 0)
    assert laid.plan.buffers["mover[0].dst_cache"].image.offsets.tolist() == list(range(240, 256))
    (rows,) = laid.composition.rows
    assert "page 0 of the first cache offset 0, a copy of page 3 of the second" in str(
        rows.claims[0]
    )
    copy, out = moved(WRITER, [(0, 1)]), swapped(WRITER, [(1, 3)], "out")
    both = replace(SECOND_CACHE, moves=(copy, out))
    assert came_from(both)[3] == (FIRST, 0)
    assert came_from(replace(both, moves=(out, copy)))[3] == (FIRST, 1)


def test_only_swaps_in_read_a_cache_that_nobody_writes():
    """What it held before comes in."""
    trip = replace(FIRST_CACHE, moves=(swapped(WRITER, [(3, 1)], "in"),))
    assert came_from(trip) == [(FIRST, 0), (SECOND, 3), (FIRST, 2)]
    with RoundTripChecker(f"{MLA}/{COPY}") as checker:
        assert checker.check(trip).clean


@pytest.mark.parametrize(
    ("trip", "sentence"),
    [
        (replace(out_and_in((2, 1)), gathers=SECOND_CACHE.gathers, moves=()), "are swapped to"),
        (replace(out_and_in((2, 1)), gathers=of_second(FIRST_CACHE, pages=3).gathers), "cache 4"),
        (
            replace(out_and_in((2, 1)), gathers=of_second(FIRST_CACHE, stride=64).gathers),
            "src does not lie as the second cache does",
        ),
        (
            replace(
                FIRST_CACHE,
                moves=tuple(swapped(WRITER, [(0, 0)], "out", stride=at) for at in (80, 64)),
            ),
            "swaps of cache do not agree",
        ),
        (
            replace(FIRST_CACHE, moves=(swapped(WRITER, [(0, 0)], "out", page_bytes=47),)),
            "a move of 47 bytes a page tears",
        ),
        (
            replace(FIRST_CACHE, moves=(swapped(WRITER, [], "out", pages=0),)),
            "the second cache of cache needs a page",
        ),
        (
            replace(FIRST_CACHE, moves=(swapped(WRITER, [(0, 0)], "out", src_num_pages=2),)),
            "of one layer and of all 3 pages",
        ),
        (
            replace(FIRST_CACHE, moves=(replace(swapped(WRITER, [], "out"), way=""),)),
            "the way of swap_blocks must be 'out' or 'in', not ''",
        ),
        (
            replace(FIRST_CACHE, moves=(replace(moved(WRITER, []), way="in"),)),
            "the way of copy_blocks must be '', not 'in'",
        ),
    ],
)
def test_what_is_no_swap_is_one_sentence(trip, sentence):
    """Readers of a cache that is none, swaps that disagree, and ways that there are not."""
    with pytest.raises(CaseError, match=sentence):
        lay_out(trip)


def test_swaps_are_plain_data():
    """JSON and back is the same; a file of before has neither ways nor second caches."""
    trip = replace(SECOND_CACHE, moves=out_and_in((2, 1)).moves)
    assert RoundTrip.from_json(json.loads(trip.dumps())) == trip
    old = replace(FIRST_CACHE, moves=(moved(WRITER, [(0, 1)]),))
    assert '"way"' not in old.dumps()
    assert '"second"' not in old.dumps()
    bad = trip.dumps().replace('"second":true', '"second":1')
    with pytest.raises(CaseError, match="second of a gather must be true or false"):
        RoundTrip.from_json(json.loads(bad))


PAIRS = [
    f"{MLA}/{DEQUANT}",
    f"{FLASH}/{COPY}",
    "concat_and_cache_ds_mla/cp_gather_and_upconvert_fp8_kv_cache",
    f"{INDEXER}/cp_gather_indexer_k_quant_cache",
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_composes_with_swaps(pair, device):
    """Drawn ones; some read a second cache of another page stride, some the first one again."""
    checked, seen = 0, set()
    with RoundTripChecker(pair, "bundled:token", "bundled:page", device) as checker:
        for trip in drawn(pair, 400):
            swaps = [move.case.sizes for move in trip.moves if move.way == "out"]
            if not swaps:
                continue
            verdict = checker.check(trip)
            if verdict.outcome is Outcome.NOT_RUN:  # a GPU has less room than address space has
                assert device == "cuda", verdict.not_run
                continue
            assert verdict.outcome is Outcome.CLEAN, (trip.dumps(), verdict.failures)
            checked += verdict.checked[NAME]
            seen |= {("second", gather.second) for gather in trip.gathers}
            seen.add(swaps[0]["src_page_stride_bytes"] != swaps[0]["dst_page_stride_bytes"])
            seen.add(("more pages", swaps[0]["dst_num_pages"] != swaps[0]["src_num_pages"]))
        assert checker.deaths == 0
    assert checked > 3_000
    assert {("second", True), ("second", False), True, ("more pages", True)} <= seen


@pytest.mark.parametrize("device", DEVICES)
def test_out_and_in_by_hand(device):
    """The second cache of padded pages; every launch is made with each fill."""
    writer = mla([0, 3, 7], kv_dtype=1)
    moves = (
        swapped(writer, [(0, 2), (1, 0)], "out", stride=28),
        swapped(writer, [(2, 1), (0, 2)], "in", stride=28),
    )
    trip = dequantised(writer, [[0], [1], [2]], [0, 3, 6, 9], [0, 0, 0])
    for build in ("checked", "release"):
        with RoundTripChecker(f"{MLA}/{DEQUANT}", device=device, build=build) as checker:
            for one in (
                replace(trip, moves=moves),
                replace(of_second(trip, stride=28), moves=moves[:1]),
            ):
                verdict = checker.check(one)
                assert verdict.clean, verdict.failures
                assert verdict.launches == 2 * len(lay_out(one).steps)
                assert verdict.checked[NAME] == 2 * 9 * 16


@pytest.mark.parametrize(
    "twin",
    [pytest.param(n, marks=pytest.mark.slow) if n == "dropped" else n for n in FAULTS],
    indirect=True,
)
def test_a_faulty_swap_is_found_and_named(twin):
    """On one trip; a search minimises to one swap, whose finding names the way."""
    out = swapped(WRITER, [(0, 2), (1, 0)], "out")
    with RoundTripChecker(f"{MLA}/{COPY}", build="release", mover=twin) as checker:
        assert checker.check(FIRST_CACHE).clean
        assert checker.check(replace(FIRST_CACHE, moves=(moved(WRITER, [(0, 1)]),))).clean
        trip = replace(SECOND_CACHE, moves=(out,))
        verdict = checker.check(trip)
        text = " ".join(RoundTripFinding.of(checker, trip, verdict).text().split())
        searched = Search(checker, seed=0, limit_bytes=2**26).run(cases=300)
    assert verdict.failures[0].key[0] == "rows"
    assert "of the first cache" in verdict.failures[0].details["means"]
    assert f"mover {twin}, out of cache" in text
    assert "reader of the second cache from byte 0" in text
    assert searched.finding is not None
    assert {move.case.operation for move in searched.finding.trip.moves} == {"swap_blocks"}
    assert len(searched.finding.trip.moves) <= 2


@pytest.mark.parametrize("twin", ["dropped"], indirect=True)
def test_the_mover_of_a_command_is_one_of_either(twin, tmp_path, capsys):
    """A twin of swap_blocks: the trip fails with it, and again from the finding's file."""
    path = tmp_path / "trip.json"
    path.write_text(replace(SECOND_CACHE, moves=out_and_in((2, 1)).moves[:1]).dumps())
    only = ["--writer", "bundled:token", "--reader", "bundled:page", "--build", "release"]
    assert main(["roundtrip", str(path), "--device", "host", *only]) == 0
    assert main(["roundtrip", str(path), "--device", "host", *only, "--mover", twin]) == 1
    assert "of the first cache" in " ".join(capsys.readouterr().out.split())
    report = tmp_path / "out"
    search = ["--pair", f"{MLA}/{COPY}", "--device", "host", "--cases", "300", *only]
    assert main(["roundtrip", *search, "--mover", twin, "--report", str(report)]) == 1
    (found,) = (report / "findings").iterdir()
    assert main(["roundtrip", str(found)]) == 1
    assert main(["roundtrip", str(found), "--mover", "bundled:page"]) == 0


def test_a_wrong_composition_fires(monkeypatch):
    """One that moves the content of a page twice does not agree with sound kernels."""
    trip = out_and_in((2, 1), (0, 2))
    with RoundTripChecker(f"{MLA}/{COPY}", isolate=False) as checker:
        assert checker.check(trip).clean
        right = composition.moved

        def twice(*arguments):
            history = right(*arguments)
            origins = {to: history.origin(page) for to, page in history.origins.items()}
            return Moved(origins, history.second)

        monkeypatch.setattr(composition, "moved", twice)
        verdict = checker.check(trip)
    assert verdict.outcome is Outcome.FAILED
    assert verdict.failures[0].key[:2] == ("rows", "dst")
    assert verdict.failures[0].details["effect"].startswith("1 of 3 rows wrong")


def test_the_mover_of_the_other_operation_is_the_bundled_one():
    """A twin changes one of the two."""
    with RoundTripChecker(f"{MLA}/{COPY}", mover=ONE_BY_ONE, build="release") as checker:
        assert checker.mover == checker.movers["copy_blocks"].name == ONE_BY_ONE
        assert checker.movers["swap_blocks"].name == "bundled:page"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["swap-pages-of-the-source", "swap-strides-are-those-of-the-source"]
)
def test_faults_that_are_kept_are_found(name):
    """Of page counts and of strides: a second cache has its own."""
    mover = f"twin:{TWINS / name}.toml"
    with RoundTripChecker(f"{MLA}/{COPY}", mover=mover, build="release") as checker:
        finding = Search(checker, seed=0, limit_bytes=2**26).run(cases=400).finding
    assert finding is not None
    assert {move.way for move in finding.trip.moves} <= {"out", "in"}
    assert finding.trip.moves
