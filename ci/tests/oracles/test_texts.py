"""Texts of failures, as snapshots: what a person reads first must not change unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.judging import judge
from pagefuzz.oracles.observation import AccessFault, CheckRecord, IndexFault, Site
from pagefuzz.oracles.registry import operation

MakeBench = Callable[[Case], Any]
OPERATION = operation("cp_gather_cache")


def report(bench: Any, *faults: AccessFault | IndexFault) -> str:
    accesses = tuple(fault for fault in faults if isinstance(fault, AccessFault))
    indices = tuple(fault for fault in faults if isinstance(fault, IndexFault))
    record = CheckRecord(3, 9, 5, len(accesses), len(indices), accesses, indices)
    verdict = judge(bench.run(record=record, build="checked"))
    cause = verdict.failures[0]
    lines = [f"{cause.judgement.upper()}  {cause.title}", f"case  {OPERATION.describe(bench.plan)}"]
    lines += [f"{name}  {text}" for name, text in sorted(cause.details.items())]
    return "\n".join(lines)


def one_row(**sizes: int) -> dict[str, int]:
    entry = sizes.get("entry_bytes", 1)
    return {
        "num_requests": 1,
        "num_tokens": 1,
        "page_size_tokens": 1,
        "num_pages": 1,
        "table_width": 1,
        "table_row_stride": 1,
        "page_stride_bytes": entry,
        "slot_stride_bytes": entry,
        "dst_rows": 1,
        "dst_row_stride_bytes": entry,
        "entry_bytes": entry,
        "element_bytes": 1,
        "has_terminal": 1,
        **sizes,
    }


def test_table_over_read(bench: MakeBench) -> None:
    """The reported over-read of the block table, minimised."""
    case = Case(
        "cp_gather_cache",
        one_row(),
        {
            "block_table": Values("identity"),
            "starts": Values.literal(0, 1),
            "seq_starts": Values.literal(1),
        },
    )
    site = Site("cp_gather_cache.cu", 88, (0, 0, 0), (0, 0, 0))
    fault = AccessFault(1, "block_table", 4, 4, "read", site)
    assert report(bench(case), fault) == (
        "BOUNDS  read past block_table\n"
        "case  R=1  N=1  BS=1  NB=1  W=1  starts=[0, 1]  seq_starts=[1]  table identity  "
        "entry 1 B, dense, seed 0\n"
        "access  reads 4 bytes at block_table[1] (bytes 4..7 of 4); row 0, column 1; the row ends "
        "at column 0; no byte of it is legal\n"
        "effect  no row must be written; no forbidden byte changed\n"
        "means  request 0, row 0 -> token 1 -> logical page 1 of 1\n"
        "where  cp_gather_cache.cu:88  block (0,0,0) thread (0,0,0)"
    )


def test_int32_wrap(bench: MakeBench) -> None:
    """The reported int32 product, at the first row that wraps."""
    sizes = one_row(entry_bytes=2304, num_tokens=932069, dst_rows=932069, num_pages=2)
    case = Case(
        "cp_gather_cache",
        sizes,
        {"block_table": Values("identity"), "starts": Values.literal(932068, 932069)},
        seed=3,
    )
    plan = OPERATION.plan(case)
    made = SparseBench(OPERATION.expect(plan), plan)
    site = Site("cp_gather_cache.cu", 140, (932068, 0, 0), (0, 0, 0))
    fault = IndexFault(1, "*", "int32", 932068, 2304, -2147482624, site)
    assert report(made, fault) == (
        "OVERFLOW  int32 multiplication wraps\n"
        "case  R=1  N=932069  BS=1  NB=2  W=1  starts=[932068, 932069]  table identity  "
        "entry 2304 B, dense, seed 3\n"
        "access  932068 * 2304 in int32 gave -2147482624; the true product is 2147484672\n"
        "effect  1 of 1 row wrong, 2290 of 2304 bytes (99.4%); no forbidden byte changed\n"
        "means  byte 2147484672 of dst is row 932068, byte 0: request 0, row 932068 -> token 0 "
        "-> page 0 slot 0\n"
        "where  cp_gather_cache.cu:140  block (932068,0,0) thread (0,0,0)"
    )


class SparseBench:
    """Two launches that changed nothing, of a case too large for a bench."""

    def __init__(self, expectation: Any, plan: Any) -> None:
        self.expectation, self.plan = expectation, plan

    def run(self, *, record: CheckRecord, build: str) -> Any:
        from pagefuzz.oracles.judgement import Run
        from pagefuzz.oracles.observation import Launch, Observation, Status

        launches = tuple(Launch(fill, Status.OK, "", {}, 0, record) for fill in (0, 1))
        observation = Observation("host", build, launches)
        return Run(OPERATION, self.plan, self.expectation, observation)


@pytest.mark.parametrize(
    ("buffer", "offset", "text"),
    [
        ("src", 0, "page 0 slot 0, byte 0"),
        ("src", 72 * 4 + 16 * 2 + 5, "page 4 slot 2, byte 5"),
        ("src", -1, "in front of page 0"),
        ("src", 72 * 5 + 16 * 3 + 12, "past its 420 bytes"),
        ("src", 72 * 4 + 16 * 2 + 13, "page 4 slot 2, byte 13 of an entry of 12"),
        ("dst", 16 * 3 + 2, "row 3, byte 2"),
        ("dst", 16 * 3 + 12, "row 3, byte 12 of an entry of 12"),
        ("dst", 16 * 21, "row 21 of 20, byte 0"),
        ("dst", -16, "row -1 of 20, byte 0"),
        ("block_table", 4 * 4, "row 0, column 4; the row ends at column 3"),
        ("block_table", -4, "in front of the table"),
        ("block_table", 4 * 6, "row 1, column 1, which no row of dst maps"),
        ("block_table", 4 * 1, "row 0, column 1"),
        ("starts", 16, "element 4 of 4"),
        ("counts", 8, "element 1 of 2"),
    ],
)
def test_locate(base_case: Case, buffer: str, offset: int, text: str) -> None:
    """Every byte of every buffer has a name."""
    assert OPERATION.locate(OPERATION.plan(base_case), buffer, offset) == text


def test_describe_names_what_is_unusual(base_case: Case) -> None:
    """Strides, placements and lies show; what is as usual does not."""
    plan = OPERATION.plan(
        Case(
            base_case.operation,
            {**base_case.sizes, "has_terminal": 0},
            {**base_case.values, "starts": Values.literal(1, 7, 7)},
            {"src": Placement(offset_bytes=8)},
            {"num_tokens": 19},
        )
    )
    assert OPERATION.describe(plan) == (
        "R=3  N=19  BS=4  NB=6  W=4 bt=5  starts=[1, 7, 7]  seq_starts=[2, 0, 3]  no terminal  "
        "table permuted (seed 1)  entry 12 B of 4 B elements, cb=72 ce=16 d0=16, seed 0  "
        "src +8 B  num_tokens:=19"
    )
