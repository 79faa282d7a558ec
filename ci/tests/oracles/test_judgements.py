"""Each judgement fires on a planted fault, and all are silent on a clean run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagefuzz.oracles import contents
from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.judging import judge
from pagefuzz.oracles.observation import (
    AccessFault,
    CheckRecord,
    Death,
    IndexFault,
    Observation,
    Site,
    Status,
)
from pagefuzz.oracles.registry import judgements
from pagefuzz.oracles.relation import relation_judgements
from pagefuzz.oracles.verdict import CaseClass, Failure, Outcome, Severity, Verdict, cause_first

Memory = Mapping[str, Any]
MakeBench = Callable[[Case], Any]

SITE = Site("cp_gather_cache.cu", 88, (0, 0, 0), (0, 0, 0))


def record(*faults: AccessFault | IndexFault) -> CheckRecord:
    accesses = tuple(fault for fault in faults if isinstance(fault, AccessFault))
    indices = tuple(fault for fault in faults if isinstance(fault, IndexFault))
    return CheckRecord(10, 400, 30, len(accesses), len(indices), accesses, indices)


def only(verdict: Verdict) -> Failure:
    """The single failure of a verdict, seen in both launches but told once."""
    assert verdict.outcome is Outcome.FAILED
    (failure,) = verdict.failures
    return failure


def other_byte(held: int) -> bytes:
    """A byte that is neither `held` nor its complement: the same in both fills of a destination."""
    return bytes([next(x for x in range(3) if x not in (held, held ^ 0xFF))])


def test_clean_run_is_silent_and_counted(base_case: Case, bench: MakeBench) -> None:
    """A kernel that keeps the contract gives a clean verdict that says what was looked at."""
    case = replace(base_case, relations=tuple(relation_judgements()))
    run = bench(case).run(record=record(), build="checked")
    verdict = judge(run)
    assert verdict.outcome is Outcome.CLEAN
    assert verdict.case_class is CaseClass.IN_CONTRACT
    assert set(verdict.checked) == set(judgements()) - {"recompile"}
    assert all(verdict.checked.values())
    assert verdict.checked["output"] == 2 * 17 * 12
    assert verdict.checked["bounds"] == 800
    assert verdict.checked["overflow"] == 60
    assert verdict.checked["counts"] == 4
    assert verdict.launches == 2 + len(run.observation.related)
    assert verdict.counters["mapped_rows"] == 17
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_row_not_written(base_case: Case, bench: MakeBench) -> None:
    """A row left as it was is a row that is not written, with the entry it should get."""

    def change(after: Memory) -> None:
        after["dst"].restore(48, 12)

    failure = only(judge(bench(base_case).run(change)))
    assert failure.identity == "output:dst:not written"
    assert "dst row 3, byte 0 (offset 48): got 0x" in failure.details["access"]
    assert "request 0, row 3 -> token 4 -> page" in failure.details["means"]
    assert failure.details["effect"].startswith("1 of 17 rows wrong")


def test_row_of_another_entry(base_case: Case, bench: MakeBench) -> None:
    """A row that holds the payload of another slot says of which one, short as it is."""
    made = bench(base_case)

    def change(after: Memory) -> None:
        after["dst"].put(16 * 8, after["dst"].get(16 * 9, 12))

    failure = only(judge(made.run(change)))
    assert failure.identity == "output:dst:other entry"
    source = made.operation.mapping(made.plan, "dst", 16 * 9)
    place = source.split("-> ")[-1]
    assert f"it holds {place}, byte 0" in failure.details["means"]


def test_row_of_forbidden_source_bytes(base_case: Case, bench: MakeBench) -> None:
    """Bytes of a gap of the source are recognised, and differ between the fills."""
    case = base_case.with_sizes(
        entry_bytes=32, slot_stride_bytes=64, page_stride_bytes=256, dst_row_stride_bytes=32
    )
    made = bench(case)
    at = int(made.expectation.footprint("src").may_read.end[0])

    def change(after: Memory) -> None:
        after["dst"].put(32, after["src"].get(at, 32))

    verdict = judge(made.run(change))
    assert [f.identity for f in verdict.failures] == ["output:dst:forbidden bytes", "poison:dst"]
    for failure in verdict.failures:
        assert "byte 32 of an entry of 32 of src, which no row maps" in failure.details["means"]


def test_wrong_bytes(base_case: Case, bench: MakeBench) -> None:
    """A flipped bit is a wrong byte, told in hexadecimal and decimal."""

    def change(after: Memory) -> None:
        byte = after["dst"].get(16 * 9 + 7)[0]
        after["dst"].put(16 * 9 + 7, bytes([byte ^ 1]))

    made = bench(base_case)
    failure = only(judge(made.run(change)))
    expected = int(made.expectation.expected["dst"].values[8, 7])
    assert failure.identity == "output:dst:wrong bytes"
    assert failure.details["access"] == (
        f"dst row 9, byte 7 (offset 151): got 0x{expected ^ 1:02x} ({expected ^ 1}), "
        f"expected 0x{expected:02x} ({expected})"
    )
    assert failure.details["effect"] == "1 of 17 rows wrong, 1 of 204 bytes (0.49%)"


@pytest.fixture
def decreasing_case(base_case: Case) -> Case:
    """Rows 2..7 are claimed by requests 0 and 2."""
    starts = Values.literal(0, 8, 2, 10)
    return replace(base_case, values={**base_case.values, "starts": starts})


def test_contested_rows_may_be_old_or_any_claimants(
    decreasing_case: Case, bench: MakeBench
) -> None:
    """Elements of different claimants may mix in a row, and a contested row may stay as it was."""
    made = bench(decreasing_case)
    expected = made.expectation.expected["dst"]
    assert expected.offsets.tolist() == [0, 16]
    contested = expected.contested
    at, other = np.flatnonzero(contested.offsets == 64)

    def change(after: Memory) -> None:
        after["dst"].put(64, contested.values[at][:4])
        after["dst"].put(68, contested.values[other][4:8])
        after["dst"].restore(80, 12)

    verdict = judge(made.run(change))
    assert verdict.outcome is Outcome.CLEAN
    assert verdict.case_class is CaseClass.HOSTILE
    assert "counts" not in verdict.checked
    assert verdict.checked["output"] == 2 * (2 + 8) * 12


def test_torn_contested_element(decreasing_case: Case, bench: MakeBench) -> None:
    """An element of which one half is each claimant's is nobody's."""
    made = bench(decreasing_case)
    contested = made.expectation.expected["dst"].contested
    at, other = np.flatnonzero(contested.offsets == 64)

    def change(after: Memory) -> None:
        after["dst"].put(64, contested.values[at])
        after["dst"].put(66, contested.values[other][2:4])

    failure = only(judge(made.run(change)))
    assert failure.identity == "output:dst:torn contested"
    assert "(old, or a claimant's)" in failure.details["access"]


@pytest.mark.parametrize(
    ("buffer", "offset", "region"),
    [
        ("dst", -64, "red zone in front"),
        ("dst", -1, "workspace in front"),
        ("dst", 12, "inside"),
        ("dst", 19 * 16, "inside"),
        ("dst", 20 * 16 + 4, "workspace behind"),
        ("dst", 20 * 16 + 4 + 32, "red zone behind"),
        ("src", 0, "inside"),
        ("block_table", 7, "inside"),
        ("starts", 0, "inside"),
        ("seq_starts", 12, "red zone behind"),
        ("counts", 16, "red zone behind"),
    ],
)
def test_forbidden_byte_changed(
    base_case: Case, bench: MakeBench, buffer: str, offset: int, region: str
) -> None:
    """One changed byte anywhere outside the writable ones is found, in its region."""

    def change(after: Memory) -> None:
        after[buffer].put(offset, other_byte(after[buffer].get(offset)[0]))

    failure = only(judge(bench(base_case).run(change)))
    assert failure.identity == f"untouched:{buffer}:{region}"
    assert f"{buffer} byte {offset}," in failure.details["access"]
    assert f"1 forbidden byte of {buffer} changed" in failure.details["effect"]


def test_untouched_with_many_gaps(base_case: Case, bench: MakeBench) -> None:
    """A destination of a hundred padded rows is examined as closely as one of three."""
    case = base_case.with_sizes(num_tokens=100, dst_rows=100, table_width=30, table_row_stride=30)
    case = replace(case, values={**case.values, "starts": Values.literal(0, 50, 50, 100)})
    made = bench(case)
    assert judge(made.run()).clean

    def change(after: Memory) -> None:
        after["dst"].put(16 * 77 + 13, other_byte(after["dst"].get(16 * 77 + 13)[0]))

    assert only(judge(made.run(change))).identity == "untouched:dst:inside"


def test_stray_row_says_whose_bytes_it_holds(base_case: Case, bench: MakeBench) -> None:
    """An entry that was written to a wrong place is recognised there."""
    case = base_case.with_sizes(
        entry_bytes=16, dst_row_stride_bytes=16, slot_stride_bytes=16, page_stride_bytes=64
    )

    def change(after: Memory) -> None:
        after["dst"].put(-32, after["dst"].get(16 * 10, 16))

    made = bench(case)
    failure = only(judge(made.run(change)))
    place = made.operation.mapping(made.plan, "dst", 160).split("-> ")[-1]
    assert f"it now holds {place}, byte 0" in failure.details["means"]


@pytest.mark.parametrize(("index", "by", "amount"), [(0, 1, "too much"), (1, -1, "too little")])
def test_counter_off(base_case: Case, bench: MakeBench, index: int, by: int, amount: str) -> None:
    """A count too many or too few is told with both numbers."""
    # Request 2 maps six columns of four: two pages are skipped.
    case = base_case.with_sizes(num_tokens=24)
    case = replace(case, values={**case.values, "starts": Values.literal(1, 2, 2, 24)})
    made = bench(case)
    assert made.expectation.counts.skipped == 3

    def change(after: Memory) -> None:
        pair = np.frombuffer(after["counts"].get(0, 16), dtype=np.int64).copy()
        pair[index] += by
        after["counts"].put(0, pair.view(np.uint8))

    failure = only(judge(made.run(change)))
    assert failure.identity == f"counts:{('padding', 'skipped')[index]}:{amount}"


@pytest.mark.parametrize("status", [Status.LAUNCH_FAILED, Status.BARRIER_FAULT])
def test_launch_status(base_case: Case, bench: MakeBench, status: Status) -> None:
    """A failed launch is told once, and its missing output is no second finding."""
    failure = only(judge(bench(base_case).run(status=status, message="grid.y is 65536")))
    assert failure.identity == f"launch:{status.name}"
    assert "grid.y is 65536" in failure.details["access"]


def test_refused_without_reason(base_case: Case, bench: MakeBench) -> None:
    """A legal case that is refused is a refusal failure, not one of the launch."""
    failure = only(judge(bench(base_case).run(status=Status.REFUSED, message="too wide")))
    assert failure.identity == "refusal:refused"
    assert "too wide" in failure.details["access"]


@pytest.fixture
def refused_case(base_case: Case) -> Case:
    return replace(base_case, overrides={"has_terminal": 2})


def test_refused_case_is_silent(refused_case: Case, bench: MakeBench) -> None:
    """A refusal with a message and no effect is right."""
    verdict = judge(bench(refused_case).run())
    assert verdict.clean
    assert verdict.case_class is CaseClass.REFUSED
    assert verdict.checked == {"death": 2, "hang": 2, "refusal": 2}


def test_accepted_what_must_be_refused(refused_case: Case, bench: MakeBench) -> None:
    """Accepting a broken argument fails, naming the argument."""
    failure = only(judge(bench(refused_case).run(status=Status.OK)))
    assert failure.identity == "refusal:accepted:has_terminal"
    assert failure.details["means"] == "has_terminal=2 lies outside 0..1"


def test_refused_without_a_message(refused_case: Case, bench: MakeBench) -> None:
    """A refusal has to say why."""
    assert only(judge(bench(refused_case).run(message=""))).identity == "refusal:no message"


def test_refused_with_an_effect(refused_case: Case, bench: MakeBench) -> None:
    """A refused launch counts nothing."""

    def change(after: Memory) -> None:
        after["counts"].put(0, b"\x65")

    failure = only(judge(bench(refused_case).run(change)))
    assert failure.identity == "refusal:changed:counts"
    assert failure.details["access"] == "counts byte 0: was 0x64 (100), is 0x65 (101)"


def test_death(base_case: Case, bench: MakeBench) -> None:
    """A process that died is a failure with the way it died."""
    failure = only(judge(bench(base_case).run(death=Death("SIGSEGV", "address 0x10"))))
    assert failure.identity == "death:SIGSEGV"
    assert failure.details["access"] == "SIGSEGV: address 0x10"


REPORT = """\
==7==ERROR: AddressSanitizer: use-after-poison on address 0x7f37 at pc 0x7f62 bp 0x1 sp 0x2
READ of size 4 at 0x7f37 thread T0
    #0 0x7f62 in int pf::ReadBytes<2>::load<int>(long, int, char const*) const /x/common/views.h:93
    #1 0x7f62 in merged_task /x/pagefuzz/kernels/operations/cp_gather_cache.cu:370
    #2 0x7f62 in gather<unsigned char> /x/pagefuzz/kernels/operations/cp_gather_cache.cu:383
"""


@pytest.mark.parametrize(
    ("report", "access"),
    [
        (REPORT, "reads 4 bytes in merged_task, kernels/operations/cp_gather_cache.cu:370"),
        (
            REPORT.replace("READ of size 4 at 0x7f37 thread T0", "caused by a WRITE memory access"),
            "writes in merged_task, kernels/operations/cp_gather_cache.cu:370",
        ),
        ("==7==ERROR: AddressSanitizer: it broke", "==7==ERROR: AddressSanitizer: it broke"),
    ],
)
def test_a_sanitizers_report_is_a_line(
    base_case: Case, bench: MakeBench, report: str, access: str
) -> None:
    """The access and its place in the kernel's source, where the report tells them."""
    death = Death("AddressSanitizer use-after-poison", report)
    failure = only(judge(bench(base_case).run(death=death)))
    assert failure.details["access"] == f"AddressSanitizer use-after-poison: {access}"


@pytest.mark.parametrize(
    ("how", "means"),
    [
        ("SIGSEGV", "the launch touched memory that nobody may touch"),
        ("SIGABRT", "the launch called abort"),
        ("SIGBUS", "the launch touched memory behind which there is none"),
        ("SIGKILL", "the process was killed in this launch, and again"),
        ("exit status 3", "the launch ended its process by exit"),
        ("AddressSanitizer heap-use-after-free", "AddressSanitizer saw a forbidden access"),
        ("illegal memory access", "a thread touched device memory that is mapped nowhere"),
        ("misaligned address", "a thread made an access at an address that is no multiple"),
        ("launch failure", "the kernel failed on the device"),
        ("signal 64", "the process that launched ended instead of answering"),
    ],
)
def test_every_end_is_a_sentence(base_case: Case, bench: MakeBench, how: str, means: str) -> None:
    """What a signal or an error of the device means, beside its name."""
    failure = only(judge(bench(base_case).run(death=Death(how))))
    assert failure.details["means"].startswith(means)


def test_access_faults(base_case: Case, bench: MakeBench) -> None:
    """A recorded access is told with its side of the buffer; the same one twice is one."""
    made = bench(base_case)
    past = made.plan.buffers["src"].required_bytes
    faults = [
        AccessFault(3, "src", past - 4, 8, "read", SITE),
        AccessFault(2, "dst", -4, 4, "write", SITE),
        AccessFault(1, "dst", 12, 4, "write", SITE),
    ]
    verdict = judge(made.run(record=record(*faults), build="checked,coverage"))
    assert [failure.identity for failure in verdict.failures] == [
        "bounds:write:dst:inside:cp_gather_cache.cu:88",
        "bounds:write:dst:before:cp_gather_cache.cu:88",
        "bounds:read:src:past:cp_gather_cache.cu:88",
    ]
    inside = verdict.failures[0]
    assert inside.details["access"] == (
        "writes 4 bytes at dst byte 12 (bytes 12..15 of 316); row 0, byte 12 of an entry of 12; "
        "bytes 16..27 are legal"
    )
    assert inside.details["where"] == "cp_gather_cache.cu:88  block (0,0,0) thread (0,0,0)"
    assert inside.details["effect"] == (
        "every row that must be written is right; no forbidden byte changed"
    )


def test_unrecorded_faults_do_not_pass(base_case: Case, bench: MakeBench) -> None:
    """Counts of faults without their records are failures all the same."""
    empty = replace(record(), access_fault_count=2, index_fault_count=1)
    verdict = judge(bench(base_case).run(record=empty, build="checked"))
    assert {f.identity for f in verdict.failures} == {"bounds:unrecorded", "overflow:unrecorded"}


def test_bounds_needs_a_checked_build(base_case: Case, bench: MakeBench) -> None:
    """The record of a sanitizer build has no accesses, and bounds does not claim to have looked."""
    verdict = judge(bench(base_case).run(record=record(), build="release,ubsan"))
    assert "bounds" not in verdict.checked
    assert "overflow" in verdict.checked


def test_missing_record_is_an_error(base_case: Case, bench: MakeBench) -> None:
    """A checked build that sends no record must not pass unseen."""
    with pytest.raises(ValueError, match="without its record"):
        judge(bench(base_case).run(build="checked"))


@pytest.mark.parametrize(
    ("fault", "access"),
    [
        (
            IndexFault(1, "*", "int32", 932068, 2304, -2147482624, SITE),
            "932068 * 2304 in int32 gave -2147482624; the true product is 2147484672",
        ),
        (
            IndexFault(1, "*", "uint32", 262144, 16384, 0, SITE),
            "262144 * 16384 in uint32 gave 0; the true product is 4294967296",
        ),
        (
            IndexFault(1, "+", "uint64", -1, 1, 0, SITE),
            "18446744073709551615 + 1 in uint64 gave 0; the true sum is 18446744073709551616",
        ),
        (
            IndexFault(1, "-", "uint32", 0, 1, 4294967295, SITE),
            "0 - 1 in uint32 gave 4294967295; the true difference is -1",
        ),
        (
            IndexFault(1, "<<", "int32", 3, 31, -2147483648, SITE),
            "3 << 31 in int32 gave -2147483648; the true result is 6442450944",
        ),
        (
            IndexFault(1, "neg", "int32", -(2**31), 0, -(2**31), SITE),
            "-(-2147483648) in int32 gave -2147483648; the true result is 2147483648",
        ),
        (
            IndexFault(1, "/", "int32", -(2**31), -1, -(2**31), SITE),
            "-2147483648 / -1 in int32 gave -2147483648; the true quotient is 2147483648",
        ),
        (
            IndexFault(1, "narrow", "int32", 2147484672, 0, -2147482624, SITE),
            "2147484672 converted to int32 gave -2147482624",
        ),
    ],
    ids=lambda value: value.operation if isinstance(value, IndexFault) else "",
)
def test_index_faults(base_case: Case, bench: MakeBench, fault: IndexFault, access: str) -> None:
    """A wrap is told with operands, type, wrapped and true result."""
    failure = only(judge(bench(base_case).run(record=record(fault), build="ubsan")))
    assert failure.identity == (
        f"overflow:{fault.operation}:{fault.type_name}:cp_gather_cache.cu:88"
    )
    assert failure.details["access"] == access


def test_hostile_failure_without_promise_is_a_note(decreasing_case: Case, bench: MakeBench) -> None:
    """Without a promise of containment a hostile case cannot fail a subject."""

    def change(after: Memory) -> None:
        after["starts"].put(0, b"\x01")

    made = bench(decreasing_case)
    assert judge(made.run(change)).outcome is Outcome.FAILED
    verdict = judge(made.run(change, contained=False))
    assert verdict.outcome is Outcome.CLEAN
    assert [failure.severity for failure in verdict.failures] == [Severity.NOTE]


def test_in_contract_failure_needs_no_promise(base_case: Case, bench: MakeBench) -> None:
    """The promise concerns hostile values only."""

    def change(after: Memory) -> None:
        after["starts"].put(0, b"\x00")

    assert judge(bench(base_case).run(change, contained=False)).outcome is Outcome.FAILED


def test_nothing_observed_is_no_pass(base_case: Case, bench: MakeBench) -> None:
    """A run without launches is not run, never clean."""
    run = replace(bench(base_case).run(), observation=Observation("host", "release"))
    verdict = judge(run)
    assert verdict.outcome is Outcome.NOT_RUN
    assert not verdict.clean


def test_cause_comes_first() -> None:
    """A wrong acceptance, then timed faults as they happened, then what they led to."""
    names = ["output", "untouched", "death", "bounds", "overflow", "refusal"]
    times = {"bounds": 7, "overflow": 5}
    failures = [Failure(name, name, (), sequence=times.get(name)) for name in names]
    order = [failure.judgement for failure in cause_first(failures)]
    assert order == ["refusal", "overflow", "bounds", "death", "untouched", "output"]


def test_unchanged_rows_outside_all_chunks_count(base_case: Case, bench: MakeBench) -> None:
    """Bytes that no chunk shows are unchanged, so that a row among them is not written."""
    run = bench(base_case).run()
    launches = []
    for launch in run.observation.launches:
        (chunk,) = launch.chunks["dst"]
        cut = 96 + 16 * 9 + 5  # in the middle of row 9
        short = replace(chunk, before=chunk.before[:cut], after=chunk.after[:cut])
        launches.append(replace(launch, chunks={**launch.chunks, "dst": (short,)}))
    observation = replace(run.observation, launches=tuple(launches))
    failure = only(judge(replace(run, observation=observation)))
    assert failure.identity == "output:dst:not written"
    assert "dst row 9, byte 5" in failure.details["access"]
    assert failure.details["effect"].startswith("9 of 17 rows wrong")


def test_chunks_split_between_rows_are_joined(base_case: Case, bench: MakeBench) -> None:
    """A row whose halves lie in two chunks is compared as one."""
    run = bench(base_case).run()
    launches = []
    for launch in run.observation.launches:
        (chunk,) = launch.chunks["dst"]
        cut = 96 + 16 * 9 + 5
        parts = tuple(
            replace(
                chunk,
                offset_bytes=chunk.offset_bytes + begin,
                before=chunk.before[begin:end],
                after=chunk.after[begin:end],
            )
            for begin, end in ((0, cut), (cut, chunk.before.size))
        )
        launches.append(replace(launch, chunks={**launch.chunks, "dst": parts}))
    observation = replace(run.observation, launches=tuple(launches))
    assert judge(replace(run, observation=observation)).clean


def test_fill_matters_to_the_bench(base_case: Case, bench: MakeBench) -> None:
    """The bench's two launches really hold different bytes where nobody may look."""
    first, second = bench(base_case).run().observation.launches
    assert (first.fill, second.fill) == contents.FILLS
    assert not np.array_equal(first.chunks["dst"][0].before, second.chunks["dst"][0].before)
    assert not np.array_equal(first.chunks["src"][0].before, second.chunks["src"][0].before)


def test_zero_extent_destination_is_judged(base_case: Case, bench: MakeBench) -> None:
    """A launch of no rows has nothing to write, and its red zones are still examined."""
    case = base_case.with_sizes(num_tokens=0, dst_rows=0)
    case = replace(case, placements={"dst": Placement()})
    made = bench(case)
    assert judge(made.run()).clean

    def change(after: Memory) -> None:
        after["dst"].put(0, b"\x00\x01\x02\x03")

    assert only(judge(made.run(change))).identity == "untouched:dst:red zone behind"
