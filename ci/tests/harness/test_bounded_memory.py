"""Faults at the boundaries of 32-bit offsets are found by real launches in little memory.

Release builds: nothing but guards and the comparison of memory sees a fault. In a checked build the
arithmetic itself is watched, and every one of them is an `overflow`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from ci.tests.harness.fake_driver import FakeDriver
from ci.tests.planted import twin

from pagefuzz.harness.check import Checker
from pagefuzz.harness.memory.cuda import CudaArena
from pagefuzz.harness.running import Injection
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.verdict import Outcome
from pagefuzz.strategies.reported import examples_for


@dataclass(frozen=True)
class Reported:
    """A row of the reported faults.

    faulty  the subject that has the fault; `sound` has none
    found   reported case -> the judgement that names the fault first in a release build
    """

    operation: str
    faulty: str
    sound: str
    found: Mapping[str, str]


GATHER, INDEXER = "cp_gather_cache", "cp_gather_indexer_k_quant_cache"
FLASH, MLA = "reshape_and_cache_flash", "concat_and_cache_mla"
MERGED, PAGE, TOKEN = "bundled:page-as-merged", "bundled:page", "bundled:token"

#: ROW -> (operation, faulty subject, sound subject, reported case -> judgement)
ROWS = {
    3: Reported(
        GATHER,
        MERGED,
        PAGE,
        {
            "3-entry-2304-bad": "death",
            "3-entry-2304-silent": "untouched",
            "3-entry-1152-bad": "death",
            "3-entry-576-bad": "death",
        },
    ),
    6: Reported(FLASH, twin("flash-int32-element-offset"), TOKEN, {"6-fp16-pool-bad": "death"}),
    7: Reported(GATHER, twin("gather-int32-element-offset"), PAGE, {"7-shared-pool-bad": "death"}),
    8: Reported(INDEXER, twin("indexer-int32-page-offset"), PAGE, {"8-packed-pool-bad": "death"}),
    9: Reported(INDEXER, twin("indexer-int32-page-offset"), PAGE, {"9-packed-pool-bad": "death"}),
    10: Reported(
        INDEXER, twin("indexer-scale-offset-int32"), PAGE, {"10-scale-offset-bad": "death"}
    ),
    11: Reported(GATHER, twin("page-offset-unsigned-32"), PAGE, {"11-unsigned-bad": "output"}),
    12: Reported(
        FLASH,
        twin("flash-int32-page-offset"),
        TOKEN,
        {"12-page-2-bad": "death", "12-page-4-bad": "untouched"},
    ),
    13: Reported(MLA, twin("mla-int32-slot-offset"), TOKEN, {"13-slot-offset-bad": "death"}),
}

#: Reported cases whose fault lands in a hole on the host: a GPU's granules have none there.
IN_HOLES = ("3-entry-2304-silent",)

#: Bytes of memory that the buffers of a case may take, by device.
LIMIT_BYTES = {"host": 256 * 2**20, "cuda": 2**30}

#: The others compile a subject that few tests use.
FAST_ROWS = (3, 11)

ON_BOTH = ["host", pytest.param("cuda", marks=pytest.mark.cuda)]
EVERY_ROW = [
    pytest.param(row, marks=[] if row in FAST_ROWS else [pytest.mark.slow]) for row in ROWS
]

TOP = 2**40
ENTRY_BYTES = 1024
LAST_ROW = TOP // ENTRY_BYTES - 1


def limited(device: str, operation: str, subject: str, build: str) -> Checker:
    """On a GPU, a case that needs more than the limit is not run, which no test here takes for an
    answer. On the host nothing limits it: `assert_within_limit` looks at what was taken."""
    limit_bytes = LIMIT_BYTES[device] if device == "cuda" else None
    return Checker(operation, subject, device, build, gpu_memory_bytes=limit_bytes)


def assert_within_limit(checker: Checker) -> None:
    """The memory behind the arena, that of workers that died included."""
    assert 0 < checker.memory.arena_bytes <= LIMIT_BYTES[checker.backend]


def far_row() -> Case:
    """One request over the last of 2^30 dense rows of 1,024 bytes: the destination has 2^40."""
    case = examples_for(GATHER)["3-entry-1152-good"]
    strides = ("entry_bytes", "page_stride_bytes", "slot_stride_bytes", "dst_row_stride_bytes")
    sizes = dict.fromkeys(("num_tokens", "dst_rows"), LAST_ROW + 1)
    case = case.with_sizes(**sizes, **dict.fromkeys(strides, ENTRY_BYTES))
    return replace(case, values={**case.values, "starts": Values.literal(LAST_ROW, LAST_ROW + 1)})


def cases() -> Iterator[Case]:
    """Every case that this file launches."""
    for reported in ROWS.values():
        examples = examples_for(reported.operation)
        yield from (examples[name] for name in reported.found)
    yield far_row()


@pytest.mark.parametrize("device", ON_BOTH)
@pytest.mark.parametrize("row", EVERY_ROW)
def test_the_fault_is_found(row: int, device: str) -> None:
    """As the judgement promised, within the limit."""
    reported = ROWS[row]
    examples = examples_for(reported.operation)
    with limited(device, reported.operation, reported.faulty, "release") as checker:
        for name, judgement in reported.found.items():
            verdict = checker.check(examples[name])
            if device == "host" and name in IN_HOLES:
                judgement = "death"
            assert verdict.outcome is Outcome.FAILED, (name, verdict.not_run)
            assert verdict.failures[0].judgement == judgement, (name, verdict.failures)
            assert_within_limit(checker)


@pytest.mark.parametrize("device", ON_BOTH)
@pytest.mark.parametrize("row", EVERY_ROW)
def test_the_sound_kernel_is_clean(row: int, device: str) -> None:
    """On the same cases, within the same limit."""
    reported = ROWS[row]
    examples = examples_for(reported.operation)
    with limited(device, reported.operation, reported.sound, "release") as checker:
        for name in reported.found:
            verdict = checker.check(examples[name])
            assert verdict.outcome is Outcome.CLEAN, (name, verdict.not_run, verdict.failures)
        assert checker.deaths == 0
        assert_within_limit(checker)


@pytest.mark.parametrize("device", ON_BOTH)
def test_a_destination_of_two_to_the_40_bytes_works(device: str) -> None:
    """Its last row is gathered and compared to the last byte; a store to any other byte is seen,
    in the middle, too, where nobody may touch it. All within the limit."""
    case = far_row()
    assert registry.operation(GATHER).plan(case).buffers["dst"].memory_bytes == TOP
    wrong_stores = {
        TOP - 1: "output",
        LAST_ROW * ENTRY_BYTES: "output",
        LAST_ROW * ENTRY_BYTES - 1: "untouched",
        0: "untouched",
        TOP // 2: "death",
    }
    with limited(device, GATHER, PAGE, "inject") as checker:
        verdict = checker.check(case)
        assert verdict.outcome is Outcome.CLEAN, (verdict.not_run, verdict.failures)
        assert verdict.checked["output"] == verdict.launches * ENTRY_BYTES
        for offset_bytes, judgement in wrong_stores.items():
            store = Injection("dst", offset_bytes, 1, "write")
            verdict = checker.check(case, injection=store)
            assert {f.judgement for f in verdict.failures} == {judgement}, offset_bytes
        assert checker.deaths == 1
        assert checker.memory.address_bytes > TOP
        assert_within_limit(checker)


def test_memory_of_a_gpu_suffices_for_every_case() -> None:
    """Placed as for both launches over a driver that allots host memory: what a GPU's limit leaves
    is enough, one case after another."""
    driver: Any = FakeDriver(2 * LIMIT_BYTES["cuda"])
    arena = CudaArena(driver, driver.scan, LIMIT_BYTES["cuda"])
    most_bytes = 0
    for case in cases():
        operation = registry.operation(case.operation)
        plan = operation.plan(case)
        for fill, launched in enumerate((plan, plan.mirrored())):
            arena.place(launched, operation.expect(plan))
            arena.fill(fill)
            assert arena.collect().examined_bytes > 0
            most_bytes = max(most_bytes, arena.allocated_bytes)
    assert 0 < most_bytes <= LIMIT_BYTES["cuda"]
    arena.close()
