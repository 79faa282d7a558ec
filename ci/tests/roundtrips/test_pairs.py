"""Every pair on the bundled kernels, and pairs of which one or both are faulty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
    indexed,
    mla,
    moved,
)

from pagefuzz.harness import subjects
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.round_trip_search import Search
from pagefuzz.harness.round_trips import RoundTripChecker
from pagefuzz.oracles.case import CaseError, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.round_trip_judging import NAME, judge_round_trip
from pagefuzz.oracles.round_trip_layout import lay_out
from pagefuzz.oracles.verdict import Outcome, Severity
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.round_trips import pairs

TWINS = Path(__file__).parent.parent / "twins"
DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.cuda)]
SOUND = [
    (pair, reader.name)
    for pair in pairs()
    for (operation, _), reader in subjects.bundled().items()
    if operation == pair.split("/")[1] and not reader.faults
]


def twin(name: str) -> str:
    return f"twin:{TWINS / name}.toml"


def agree(pair: str, reader: str, device: str, build: str, count: int, limit_bytes: int) -> int:
    """Checks drawn trips; how many bytes of rows were compared."""
    checked = 0
    with RoundTripChecker(pair, "bundled:token", reader, device, build) as checker:
        for trip in drawn(pair, count, limit_bytes):
            verdict = checker.check(trip)
            if verdict.outcome is Outcome.NOT_RUN:  # a GPU has less room than address space has
                assert device == "cuda", verdict.not_run
                continue
            assert verdict.outcome is Outcome.CLEAN, (trip.dumps(), verdict.failures)
            assert not verdict.failures
            checked += verdict.checked[NAME]
        assert checker.deaths == 0
    return checked


#: One reader of each pair in the fast tier: the other schedule reads the same caches.
FAST = [
    one if one[1] != "bundled:token" else pytest.param(*one, marks=pytest.mark.slow)
    for one in SOUND
]


def test_every_pair_of_the_contract_is_there():
    """What each writer stores is read in every way that there is."""
    assert len(pairs()) == 8
    assert {pair for pair, _ in SOUND} == set(pairs())
    hinted = [reader for pair, reader in SOUND if pair.endswith("_hinted")]
    assert hinted == ["bundled:triton"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pair", "reader"), FAST)
def test_a_pair_composes(pair, reader, device):
    """What is written is what is gathered, in every view, bit by bit."""
    assert agree(pair, reader, device, "checked", 12, 2**26) > 3_000


@pytest.mark.slow
@pytest.mark.parametrize("build", ["checked", "release"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pair", "reader"), SOUND)
def test_a_pair_composes_at_length(pair, reader, device, build):
    """The same on many, those at 32-bit boundaries included."""
    # A GPU compiles a Triton kernel for each page layout.
    count = 100 if reader == "bundled:triton" and device == "cuda" else 150
    assert agree(pair, reader, device, build, count, DEFAULT_LIMIT_BYTES) > 30_000


def found(pair, writer, reader, *, mover="bundled:page", build="release", cases=300):
    """The finding that a search ends with; None if it ends without."""
    with RoundTripChecker(pair, writer, reader, "host", build, mover=mover) as checker:
        searched = Search(checker, seed=0, limit_bytes=2**26).run(cases=cases)
    assert searched.checked > 0
    assert not searched.not_run
    return searched.finding


FAULTY = [
    # Faults of writers.
    (f"{FLASH}/{COPY}", twin("flash-page-stride-from-shape"), "bundled:page"),
    (f"{FLASH}/{DEQUANT}", twin("flash-values-are-keys"), "bundled:page"),
    (f"{FLASH}/{COPY}", twin("flash-head-stride-from-shape"), "bundled:page"),
    (f"{MLA}/{COPY}", twin("mla-no-clamp"), "bundled:page"),
    (f"{MLA}/{COPY}", twin("mla-ties-away"), "bundled:page"),
    (f"{MLA}/{COPY}", twin("mla-padding-is-page-zero"), "bundled:page"),
    # Faults of readers.
    (f"{MLA}/{COPY}", "bundled:token", "twin:table-pitch-from-width"),
    (f"{MLA}/{DEQUANT}", "bundled:token", twin("maybe-dequant-wrong-format")),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["copy-one-by-one", "copy-padding-is-page-zero"])
def test_a_fault_in_between_is_found(name):
    """Of a copy whose writer and reader are sound; the report shows all three."""
    finding = found(f"{MLA}/{COPY}", "bundled:token", "bundled:page", mover=twin(name))
    assert finding is not None
    assert len(finding.trip.moves) == 1
    assert finding.mover == twin(name)
    assert "mover" in finding.text()


@pytest.mark.parametrize("device", DEVICES)
def test_pages_are_copied_between_writer_and_reader(device):
    """A cycle and a chain: rows hold what the pages held before; copied one by one they do not."""
    writer = mla([0, 3, 7], kv_dtype=1)
    trip = dequantised(writer, [[0], [1], [2]], [0, 3, 6, 9], [0, 0, 0])
    trip = replace(trip, moves=(moved(writer, [(0, 1), (1, 0)]), moved(writer, [(1, 2)])))
    for build in ("checked", "release"):
        with RoundTripChecker(f"{MLA}/{DEQUANT}", device=device, build=build) as checker:
            verdict = checker.check(trip)
        assert verdict.clean, verdict.failures
        assert verdict.launches == 2 * 4
        assert verdict.checked[NAME] == 2 * 9 * 16
    with RoundTripChecker(
        f"{MLA}/{DEQUANT}", device=device, build="release", mover=twin("copy-one-by-one")
    ) as checker:
        verdict = checker.check(trip)
    assert verdict.failures[0].key == ("rows", "dst", "holds another entry")
    assert "a copy of page" in verdict.failures[0].details["means"]


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_a_cuda_writer_and_a_triton_reader_work_on_one_memory(device, layout):
    """Flat pages and tiled ones; a writer of other pages is found through the Triton reader."""
    hinted = "cp_gather_indexer_k_quant_cache_hinted"
    trip = indexed(hinted, [0, 17, 16], [0, 0, 0, 1, 1, 1], layout=layout)
    pair, reader = f"{INDEXER}/{hinted}", "bundled:triton"
    with RoundTripChecker(pair, "bundled:token", reader, device) as checker:
        verdict = checker.check(trip)
    assert verdict.clean, verdict.failures
    assert verdict.checked[NAME] == 2 * 6 * 20
    swapped = twin("indexer-write-scales-before-keys")
    with RoundTripChecker(pair, swapped, reader, device, "release") as checker:
        assert checker.check(trip).outcome is Outcome.FAILED


def test_a_shared_place_is_not_seen():
    """What a round trip cannot see, as is documented: a writer and a reader that both swap keys and
    scales of full pages agree, although each of them fails with a sound other."""
    reads = "cp_gather_indexer_k_quant_cache"
    trip, pair = indexed(reads, [5 * token % 32 for token in range(32)]), f"{INDEXER}/{reads}"
    writers = ("bundled:token", twin("indexer-write-scales-before-keys"))
    readers = ("bundled:page", twin("indexer-scales-before-keys"))
    part = indexed(reads, [0, 17, 16, 18])
    seen = {}
    for w, writer in enumerate(writers):
        for r, reader in enumerate(readers):
            with RoundTripChecker(pair, writer, reader, build="release") as checker:
                seen[w, r] = [checker.check(one).outcome for one in (trip, part)]
    clean, failed = Outcome.CLEAN, Outcome.FAILED
    assert seen[0, 0] == [clean, clean]
    assert seen[0, 1] == seen[1, 0] == [failed, failed]
    assert seen[1, 1] == [clean, failed]


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "writer", "reader"), FAULTY)
def test_a_fault_in_either_is_found(pair, writer, reader):
    """Within 300 round trips, and minimised to a few tokens and requests."""
    finding = found(pair, writer, reader)
    assert finding is not None
    assert finding.verdict.failures[0].key[0] in ("rows", "untouched", "death")
    # Which payload shows it follows from the seed: of seed 0 it may be the fourth row's alone.
    assert finding.trip.writer.sizes["num_tokens"] <= 4
    assert finding.trip.gathers[0].case.sizes["num_requests"] <= 4
    assert len(finding.trip.gathers) == 1


#: A reader that multiplies by the reciprocal of its scale.
UPSIDE_DOWN = """
operation = "gather_and_maybe_dequant_cache"
schedule = "page"
breaks = "codes are divided by their scale"

[[replace]]
find = "  pf::ReadView<float, kScale> scale;"
with = "  struct UpsideDown { pf::ReadView<float, kScale> view; __device__ float load(int i) const { return 1.0f / view.load(i); } } scale;"

[[replace]]
find = ".scale = pf::ReadView<float, kScale>(a.scale),"
with = ".scale = {pf::ReadView<float, kScale>(a.scale)},"
"""  # noqa: E501


def test_a_misreading_that_both_share_is_found_by_the_values(tmp_path):
    """Writer and reader both apply the scale upside down: what comes back is near what went in, and
    is not what the contract says."""
    upside_down = tmp_path / "upside-down.toml"
    upside_down.write_text(UPSIDE_DOWN)
    pair = f"{MLA}/{DEQUANT}"
    writer, reader = twin("mla-scale-upside-down"), f"twin:{upside_down}"
    # A large scale, with which codes lose either their low bits or their high ones.
    trip = dequantised(mla([0], kv_dtype=1, scale=3.0), [[0]], [0, 1], [0], scale=3.0)
    with RoundTripChecker(pair, writer, reader, build="release") as checker:
        verdict = checker.check(trip)
    assert verdict.outcome is Outcome.FAILED
    assert verdict.failures[0].key == ("rows", "dst", "holds wrong values")


def test_what_is_not_written_and_what_is_stray_is_said():
    """A row that stays as it was, and bytes that change although nothing covers them."""
    trip = copied(mla([0, 1]), [[0]], [0, 2], [0])
    with RoundTripChecker(f"{MLA}/{COPY}", reader=twin("gap-store"), build="release") as checker:
        (gather,) = trip.gathers
        wide = gather.case.with_sizes(dst_row_stride_bytes=32)
        apart = type(trip)(trip.writer, (type(gather)(wide, gather.cache),))
        verdict = checker.check(apart)
    assert [failure.key[0] for failure in verdict.failures] == ["untouched"]
    assert "reader.dst" in verdict.failures[0].title


def test_a_launch_that_kills_its_process_is_a_failure():
    """The death is named, and the next trip runs."""
    trip = copied(mla([0], pages=3), [[0]], [0, 1], [0])
    with RoundTripChecker(
        f"{MLA}/{COPY}", reader=twin("null-dereference"), build="release"
    ) as checker:
        verdict = checker.check(trip)
        assert verdict.outcome is Outcome.FAILED
        assert verdict.failures[0].key == ("death", "SIGSEGV")
        assert checker.check(copied(mla([0], pages=4), [[0]], [0, 1], [0])).clean
        assert checker.deaths == 1


def test_a_contested_slot_holds_elements_of_its_writers():
    """Duplicate slots pass with any winner; a third value does not."""
    trip = dequantised(mla([2, 2, 2], kv_dtype=2), [[0]], [0, 3], [0], result=Dtype.BF16)
    with RoundTripChecker(f"{MLA}/{DEQUANT}", build="checked") as checker:
        assert checker.check(trip).clean
    with RoundTripChecker(
        f"{MLA}/{DEQUANT}", reader=twin("maybe-dequant-wrong-format"), build="release"
    ) as checker:
        assert checker.check(trip).outcome is Outcome.FAILED


def test_what_cannot_be_checked_raises():
    """A trip of another pair, an unknown subject, a build that chains cannot have."""
    trip = copied(mla([0]), [[0]], [0, 1], [0])
    with (
        RoundTripChecker(f"{MLA}/{DEQUANT}") as checker,
        pytest.raises(CaseError, match=rf"is of {MLA}/{COPY}, not of"),
    ):
        checker.check(trip)
    with pytest.raises(CannotCheckError, match="unknown subject"):
        RoundTripChecker(f"{MLA}/{COPY}", reader="bundled:nothing")
    with pytest.raises(CannotCheckError, match="AddressSanitizer"):
        RoundTripChecker(f"{MLA}/{COPY}", build="asan")
    with pytest.raises(ValueError, match="without launches"):
        judge_round_trip(lay_out(trip), [])


@pytest.mark.parametrize("device", DEVICES)
def test_layers_say_what_they_examined(device):
    """Of each launch of the trip; memory is compared once a fill, rows and records in both."""
    trip = copied(mla([0, 1]), [[0]], [0, 2], [0])
    with RoundTripChecker(f"{MLA}/{COPY}", device=device) as checker:
        verdict = checker.check(trip)
    assert verdict.clean
    assert (
        set(verdict.layers)
        == set(checker.layers)
        == {
            "reference, bit-exact",
            "whole-buffer byte diff",
            "red zones",
            "launch limits",
            "guard pages",
            "read-only sources",
            "worker deaths",
            "checked build",
            "checked index type",
        }
    )
    assert {launches for launches, _ in verdict.layers.values()} == {verdict.launches} == {4}
    assert verdict.layers["reference, bit-exact"][1] == verdict.checked[NAME] > 0
    assert min(amount for _, amount in verdict.layers.values()) > 0
    nothing = copied(mla([0, 1]), [[0]], [0, 0], [0])
    with RoundTripChecker(f"{MLA}/{COPY}", device=device, build="release") as checker:
        verdict = checker.check(nothing)
    assert verdict.layers["reference, bit-exact"] == (0, 0)
    assert "checked build" not in verdict.layers


def test_a_hostile_table_is_a_note_without_containment():
    """-1 in the table: contained subjects pass; one that promises nothing gets a note at most."""
    trip = copied(mla([0, 3]), [[-1, 1]], [0, 4], [0])
    with RoundTripChecker(f"{MLA}/{COPY}") as checker:
        assert checker.check(trip).clean
    with RoundTripChecker(f"{MLA}/{COPY}", reader="bundled:page-as-merged") as checker:
        verdict = checker.check(trip)
    assert all(f.severity is Severity.FAILURE for f in verdict.failures)  # it inherits the promise


@pytest.mark.parametrize(
    ("writer", "reader", "key"),
    [
        (twin("mla-padding-is-page-zero"), "bundled:page", ("death", "SIGSEGV", "writer.cache")),
        ("bundled:token", "twin:table-pitch-from-width", ("rows", "dst", "is not written")),
    ],
)
def test_a_fault_in_either_is_seen_on_one_trip(writer, reader, key):
    """A writer that stores padding tokens too; a reader that takes the table's rows for dense."""
    trip = copied(mla([-1, 3, 6]), [[0, 1], [1, 2]], [0, 3, 6], [0, 3])
    (gather,) = trip.gathers
    case = replace(
        gather.case,
        sizes={**gather.case.sizes, "table_width": 1, "table_row_stride": 2},
        values={
            **gather.case.values,
            "block_table": Values.literal(0, 1),
            "seq_starts": Values.literal(0, 0),
        },
    )
    trip = replace(trip, gathers=(replace(gather, case=case),))
    with RoundTripChecker(f"{MLA}/{COPY}", writer, reader, build="release") as checker:
        verdict = checker.check(trip)
    assert key in [failure.key for failure in verdict.failures]
    with RoundTripChecker(f"{MLA}/{COPY}", build="release") as checker:
        assert checker.check(trip).clean
