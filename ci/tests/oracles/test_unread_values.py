"""Index values that nobody may read are poison, as everything else that nobody may read is: what a
launch makes of them differs between the fills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ci.tests.oracles import test_maybe_dequant, test_mla_writes
from ci.tests.writers.conftest import drawn

from pagefuzz import check
from pagefuzz.oracles import contents
from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Bytes, Dtype, Plan, Role
from pagefuzz.oracles.registry import operation, operations
from pagefuzz.oracles.relation import writes

DRAWN = 150
MOST_BYTES = 2**16
ONE = test_mla_writes.bits(1.0)
INT32_POISON = {2**31 - 1, -(2**31) + 1}


def fills_of(plan: Plan, expectation: Expectation, name: str) -> tuple[Bytes, Bytes, Bytes]:
    """What a buffer holds with either fill, and which bytes of it may be read."""
    buffer, readable = plan.buffers[name], expectation.footprint(name).may_read
    end = min(buffer.memory_bytes, MOST_BYTES)
    first, second = (
        contents.initial_bytes(buffer, readable, plan.case.seed, fill, 0, end)
        for fill in contents.FILLS
    )
    return first, second, readable.mask(0, end)


@pytest.mark.parametrize("name", operations())
def test_no_unreadable_index_byte_is_the_same_in_both_fills(name: str) -> None:
    """Of any operation, in any drawn case in which a launch writes what could depend on it."""
    seen = 0
    for case, plan, expectation in drawn(name, DRAWN, refused=False):
        if not writes(plan, expectation):
            continue
        for buffer in plan.buffers.values():
            if buffer.role in (Role.INDEX, Role.COUNTERS) and buffer.memory_bytes:
                first, second, legal = fills_of(plan, expectation, buffer.name)
                if buffer.name != "token_to_seq":  # those of rows that nobody covers may be any
                    assert (first == second)[legal].all(), (buffer.name, case.dumps())
                assert (first != second)[~legal].all(), (buffer.name, case.dumps())
                seen += 1
    assert seen > DRAWN // 2


def auto_case(name: str, *scales: str) -> Case:
    """A case in contract that copies bits as they are and has scales all the same."""
    case = next(
        case
        for case, plan, expectation in drawn(name, DRAWN, hostile=False, refused=False)
        if not case.sizes["kv_dtype"] and writes(plan, expectation)
    )
    count = case.sizes.get("scale_count", 1)
    given = dict.fromkeys(scales, Values.literal(*[ONE] * count))
    return replace(case, values={**case.values, **given})


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("gather_and_maybe_dequant_cache", ["scale"]),
        ("concat_and_cache_mla", ["scale"]),
        ("reshape_and_cache_flash", ["k_scale", "v_scale"]),
    ],
)
def test_a_scale_with_auto_is_poison(name: str, scales: list[str]) -> None:
    """It is never read then: only where codes are made or read it holds the case's value."""
    plan = operation(name).plan(auto_case(name, *scales))
    expectation = operation(name).expect(plan)
    for scale in scales:
        first, second, legal = fills_of(plan, expectation, scale)
        assert first.size
        assert not legal.any()
        assert (first != second).all()
        assert {*first.view(np.int32).tolist(), *second.view(np.int32).tolist()} == INT32_POISON


def test_a_scale_of_codes_is_the_cases() -> None:
    """In both fills, where it may be read."""
    case = test_maybe_dequant.dense_case(1, int(Dtype.BF16), scale=ONE)
    plan = operation(case.operation).plan(case)
    first, second, legal = fills_of(plan, operation(case.operation).expect(plan), "scale")
    assert legal.all()
    assert first.view(np.int32).tolist() == second.view(np.int32).tolist() == [ONE]


def test_the_values_of_an_unread_scale_are_examined() -> None:
    """A file that gives it two is refused as ever."""
    case = test_maybe_dequant.dense_case(0, int(Dtype.BF16), scale=ONE)
    two = replace(case, values={**case.values, "scale": Values.literal(ONE, ONE)})
    with pytest.raises(ValueError, match="scale needs 1 values"):
        operation(case.operation).plan(two)


HINTED = "cp_gather_indexer_k_quant_cache_hinted"


def hinted_case(*hints: int) -> Case:
    """One request of two rows, a page a row: pages 3 and 1."""
    sizes = {
        "num_requests": 1,
        "num_tokens": 2,
        "page_size_tokens": 1,
        "num_pages": 4,
        "table_width": 2,
        "table_row_stride": 2,
        "page_stride_bytes": 20,
        "dst_k_rows": 2,
        "dst_k_row_stride_bytes": 16,
        "dst_scale_rows": 2,
        "dst_scale_row_stride_bytes": 4,
        "head_dim": 16,
        "quant_block": 16,
        "page_layout": 0,
        "has_terminal": 1,
    }
    values = {
        "block_table": Values.literal(3, 1),
        "starts": Values.literal(0, 2),
        "token_to_seq": Values.literal(*hints),
    }
    return Case(HINTED, sizes, values)


@pytest.mark.parametrize(
    ("hints", "held"),
    [((0, 0), ([3, 1], [3, 1])), ((0, 9), ([3, 2**31 - 1], [3, 1 - 2**31]))],
)
def test_table_entries_of_rows_with_a_wrong_hint_are_poison(
    hints: tuple[int, int], held: tuple[list[int], list[int]]
) -> None:
    """Nobody looks them up; those of the other rows are as the case says."""
    plan = operation(HINTED).plan(hinted_case(*hints))
    first, second, _ = fills_of(plan, operation(HINTED).expect(plan), "block_table")
    assert (first.view(np.int32).tolist(), second.view(np.int32).tolist()) == held


# Of the page schedule: what follows tells it from the others.
MOVES = """const Move move(g.scale);
  const auto& map = g.gather.map;
  const index64 first = map.first_task(0);"""
READS_THE_SCALE = f"""operation = "gather_and_maybe_dequant_cache"
schedule = "page"
breaks = "the scale is looked at where bits are copied as they are"

[[replace]]
find = '''{MOVES}'''
with = '''if (g.scale.load(0) != 1.0f) return; {MOVES}'''
"""


def test_a_kernel_that_reads_an_unread_scale_is_seen(tmp_path: Path) -> None:
    """In a release build, though the case's scale, 1, would change nothing; where it may be read
    nothing is said."""
    twin = tmp_path / "reads-the-scale.toml"
    twin.write_text(READS_THE_SCALE)
    case = test_maybe_dequant.dense_case(0, int(Dtype.BF16), scale=ONE)
    verdict = check(case, f"twin:{twin}", build="release")
    assert "output" in {failure.judgement for failure in verdict.failures}
    codes = test_maybe_dequant.dense_case(1, int(Dtype.BF16), scale=ONE)
    verdict = check(codes, f"twin:{twin}", build="release")
    assert verdict.clean, verdict.failures
