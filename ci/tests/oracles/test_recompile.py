"""The judgement on compilation keys, from keys written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ci.tests.oracles.test_indexer_hints import NAME

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.judging import judge
from pagefuzz.oracles.observation import CheckRecord, Compilation
from pagefuzz.oracles.verdict import Verdict

MakeBench = Callable[[Case], Any]

RECORD = CheckRecord(10, 400, 0, 0, 0)


@pytest.fixture
def one_row() -> Case:
    """One request of one row."""
    sizes = {
        "num_requests": 1,
        "num_tokens": 1,
        "page_size_tokens": 1,
        "num_pages": 1,
        "table_width": 1,
        "table_row_stride": 1,
        "page_stride_bytes": 20,
        "dst_k_rows": 1,
        "dst_k_row_stride_bytes": 16,
        "dst_scale_rows": 1,
        "dst_scale_row_stride_bytes": 4,
        "head_dim": 16,
        "quant_block": 16,
        "page_layout": 0,
        "has_terminal": 1,
    }
    values = {
        "block_table": Values("identity"),
        "token_to_seq": Values("owners"),
        "starts": Values.literal(0, 1),
    }
    return Case(NAME, sizes, values)


def key(**parts: str) -> dict[str, str]:
    return {"num_pages": "i64", "num_tokens": "i64", "src": "*u8", **parts}


def judged(bench: MakeBench, case: Case, *compilations: Compilation) -> Verdict:
    run = bench(case).run(record=RECORD, build="checked,triton")
    return judge(replace(run, observation=replace(run.observation, compilations=compilations)))


def test_equal_keys_are_silent_and_counted(one_row: Case, bench: MakeBench) -> None:
    """One key over all values: nothing is said, and every key was looked at."""
    verdict = judged(
        bench,
        one_row,
        *(Compilation("num_pages", str(value), key()) for value in (1, 15, 16)),
        *(Compilation("shape", text, key()) for text in ("a", "b")),
    )
    assert verdict.clean
    assert verdict.checked["recompile"] == 5
    assert "overflow" not in verdict.checked


def test_a_value_in_the_key_is_named(one_row: Case, bench: MakeBench) -> None:
    """The argument, the two values and what differs; shapes that this explains are not told."""
    one = key(num_pages="the value 1")
    verdict = judged(
        bench,
        one_row,
        Compilation("shape", "a", key()),
        Compilation("shape", "b", one),
        Compilation("num_pages", "7", key()),
        Compilation("num_pages", "15", key()),
        Compilation("num_pages", "1", one),
        Compilation("num_tokens", "7", key()),
        Compilation("num_tokens", "1", key()),
    )
    (failure,) = verdict.failures
    assert failure.title == "num_pages enters the compilation key"
    assert failure.identity == "recompile:num_pages"
    assert failure.details["access"] == (
        "compiled for num_pages = 7, then anew for 1: num_pages is 'i64' in one key, 'the value 1' "
        "in the other"
    )


def test_each_argument_is_a_failure_of_its_own(one_row: Case, bench: MakeBench) -> None:
    """Two arguments, and a shape that enters by a parameter that neither explains."""
    verdict = judged(
        bench,
        one_row,
        *(Compilation("num_pages", v, key(num_pages=f"the value {v}")) for v in "12"),
        *(Compilation("the alignment of src", v, key(src=f"*u8{v}")) for v in ("", ", 16")),
        *(Compilation("shape", v, key(tile=f"the value {v}")) for v in "34"),
    )
    assert [failure.key for failure in verdict.failures] == [
        ("num_pages",),
        ("shape",),
        ("the alignment of src",),
    ]


def test_groups_are_not_compared_with_each_other(one_row: Case, bench: MakeBench) -> None:
    """Launches of other compile-time arguments may have another kernel."""
    verdict = judged(
        bench,
        one_row,
        Compilation("num_pages", "1", key()),
        Compilation("shape", "a", key(tile="the value 3")),
    )
    assert verdict.clean


def test_a_launch_of_no_rows_is_no_example(one_row: Case, bench: MakeBench) -> None:
    """Nothing is launched for it, so nothing is compiled."""
    bad = [Compilation("num_pages", v, key(num_pages=v)) for v in "12"]
    verdict = judged(bench, one_row.with_sizes(num_tokens=0), *bad)
    assert verdict.clean
    assert "recompile" not in verdict.checked
