"""What gathers draw beside corners: many requests, whole tables, wide entries, shapes in use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from ci.tests.strategies.conftest import Drawn, drawn_from

from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.batches import TABLE_PAGES
from pagefuzz.strategies.facts import Facts
from pagefuzz.strategies.registry import cases_for, gpu_cases_for
from pagefuzz.strategies.reported import examples_for, related_for

COPY = "cp_gather_cache"
DEQUANT = "gather_and_maybe_dequant_cache"
UPCONVERT = "cp_gather_and_upconvert_fp8_kv_cache"
INDEXER = "cp_gather_indexer_k_quant_cache"
HINTED = "cp_gather_indexer_k_quant_cache_hinted"
PLAIN = (COPY, DEQUANT, UPCONVERT, INDEXER)

#: The operations of which many cases are drawn; one of them in the fast tier.
DRAWN = [COPY, *(pytest.param(name, marks=pytest.mark.slow) for name in PLAIN[1:])]

#: As many as a campaign of half a minute has, or less.
COUNT = 1500


@cache
def drawn(name: str) -> list[Facts]:
    """Cases that launch."""
    found: list[Drawn] = drawn_from(cases_for(name, hostile=True, refused=False), COUNT, 0, name)
    return [Facts(one.plan, one.expectation) for one in found]


def count(name: str, holds: Callable[[Facts], bool]) -> int:
    return sum(holds(facts) for facts in drawn(name))


def sizes_are(**wanted: int) -> Callable[[Facts], bool]:
    return lambda f: bool(f.spans) and all(f.sizes[name] == size for name, size in wanted.items())


# ---- many requests -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWN)
def test_requests_are_sometimes_more_than_a_block_has_threads(name: str) -> None:
    """Rarely, and then with few rows, one of them the last request's."""
    many = [f for f in drawn(name) if f.requests > 1024]
    assert 1 <= len(many) <= COUNT // 100
    assert all(len(f.live) <= 32 for f in many if f.sound)
    assert any(max(f.live, default=0) >= 1024 for f in many)


@pytest.mark.parametrize("name", PLAIN)
def test_many_requests_are_launched_in_every_campaign(name: str) -> None:
    """1,025 whose tables have 2^31 columns together, the last one read; and of a row each, but for
    the operation of which that takes too long."""
    cases = examples_for(name)
    assert name == UPCONVERT or cases["many-1025-requests"].sizes["num_tokens"] == 1025
    columns = cases["many-columns"]
    asked = operation(name)
    plan = asked.plan(columns)
    facts = Facts(plan, asked.expect(plan))
    assert facts.sound
    assert facts.requests * facts.width > 2**31
    assert facts.live == {1024}
    assert int(facts.columns.max()) == facts.width - 1


@pytest.mark.parametrize("name", [*PLAIN, HINTED])
def test_more_requests_are_launched_on_a_gpu_alone(name: str) -> None:
    """16,384, and both sides of the end of a grid's y axis; and as many rows for the kernel that
    runs a program for each. All are in contract."""
    on_gpu = {label: case() for label, case in gpu_cases_for(name).items()}
    assert not set(on_gpu) & set(examples_for(name))
    assert set(on_gpu) <= set(examples_for(name, "cuda"))
    requests = {case.sizes["num_requests"] for case in on_gpu.values()}
    assert requests >= {16_384, 65_535, 65_536}
    tokens = {case.sizes["num_tokens"] for case in on_gpu.values()}
    assert (tokens >= {65_535, 65_536}) is (name == HINTED)
    for case in on_gpu.values():
        asked = operation(name)
        assert asked.expect(asked.plan(case)).case_class is CaseClass.IN_CONTRACT


@pytest.mark.parametrize("name", [*PLAIN, HINTED])
def test_relations_are_compared_on_small_cases(name: str) -> None:
    """Not on those of many requests, which are launched once more for each."""
    assert max(case.sizes["num_requests"] for case in related_for(name)) <= 8


# ---- whole tables --------------------------------------------------------------------------------


def fills(pages: int) -> Callable[[Facts], bool]:
    """A request in contract has exactly as many pages, the last of them in part."""
    return lambda f: (
        f.sound
        and any(
            len(s.columns(f.page_size)) == pages
            and s.first_token % f.page_size == 0
            and (s.last_token + 1) % f.page_size > 0
            for s in f.spans
        )
    )


@pytest.mark.parametrize("name", DRAWN)
def test_requests_fill_whole_tables(name: str) -> None:
    """As report 28 has it, of 16 pages; and of other powers of two, and next to them."""
    reached = {pages for pages in TABLE_PAGES if count(name, fills(pages))}
    assert len(reached) >= len(TABLE_PAGES) - 2
    assert reached & {63, 64, 65}
    assert reached & {127, 128, 129}


@pytest.mark.parametrize("name", PLAIN)
def test_every_whole_table_is_launched_in_every_campaign(name: str) -> None:
    """One case has them all."""
    asked = operation(name)
    plan = asked.plan(examples_for(name)["28-whole-tables"])
    facts = Facts(plan, asked.expect(plan))
    assert all(fills(pages)(facts) for pages in TABLE_PAGES)


@pytest.mark.parametrize("name", DRAWN)
def test_whole_tables_are_of_small_pages(name: str) -> None:
    """They are long, but not large."""
    rows = [
        sum(span.row_count for span in f.spans)
        for f in drawn(name)
        if f.spans and all(s.row_count > f.page_size for s in f.spans)
        if any(fills(pages)(f) for pages in TABLE_PAGES)
    ]
    assert max(rows) < 2**13


# ---- wide entries and pages ----------------------------------------------------------------------


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_entries_have_more_elements_than_a_block_has_threads(element_bytes: int) -> None:
    """Whatever the size of one."""
    wide = [
        f
        for f in drawn(COPY)
        if f.row.size and f.element_bytes == element_bytes and f.entry_bytes // element_bytes > 1024
    ]
    assert len(wide) >= 2


@pytest.mark.parametrize("name", DRAWN)
def test_pages_are_sometimes_larger_than_256_kib(name: str) -> None:
    """Such as 256 tokens of 1,152 bytes."""

    def large(f: Facts) -> bool:
        entry = f.sizes["head_dim"] + 4 if "head_dim" in f.sizes else f.entry_bytes
        return bool(f.row.size) and f.page_size * entry > 2**18

    assert count(name, large) >= 2


# ---- shapes in use -------------------------------------------------------------------------------

IN_USE = {
    COPY: [
        {"entry_bytes": 1152, "element_bytes": 2, "page_size_tokens": 64},
        {"entry_bytes": 576, "element_bytes": 1, "page_size_tokens": 64},
    ],
    DEQUANT: [
        {"entry_elements": n, "kv_dtype": 1, "dst_dtype": int(to), "page_size_tokens": 64}
        for n, to in (
            (576, Dtype.BF16),
            (576, Dtype.F16),
            (512, Dtype.BF16),
            (320, Dtype.BF16),
        )
    ],
    INDEXER: [{"head_dim": 128, "quant_block": 128, "page_size_tokens": 64}],
}
IN_USE[HINTED] = IN_USE[INDEXER]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(name, sizes, marks=[] if name == COPY else pytest.mark.slow)
        for name, listed in IN_USE.items()
        for sizes in listed
    ],
)
def test_shapes_in_use_are_drawn_whole(name: str, sizes: dict[str, int]) -> None:
    """More than once, in contract and hostile together."""
    assert count(name, sizes_are(**sizes)) >= 2


@pytest.mark.parametrize("name", [*PLAIN, HINTED])
def test_shapes_in_use_are_launched_with_hostile_values(name: str) -> None:
    """Padding, no page, past the table's last row, a negative sequence start: each counts."""
    asked = operation(name)
    cases = {n: c for n, c in examples_for(name).items() if n.startswith("production-")}
    assert cases
    for case in cases.values():
        plan = asked.plan(case)
        facts = Facts(plan, asked.expect(plan))
        assert facts.hostile
        assert int(facts.columns.max()) == facts.width
        assert facts.page_requests[facts.columns == facts.width].tolist() == [facts.requests - 1]
        assert {-1, facts.sizes["num_pages"]} <= set(facts.ids.tolist())
        assert min(facts.seq_starts or ()) == -1
        assert facts.row.size
