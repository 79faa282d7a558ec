"""Reported cases: inputs with which others found faults, restated as cases.

The numbers are those of the reports; what a report leaves open is as simple as it can be. A case
whose name ends in `good` is the last one that the faulty kernel still got right. Campaigns run them
as explicit examples before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pagefuzz.oracles import registry as oracles
from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.relation import relations_of
from pagefuzz.strategies import registry

_CASES: dict[str, dict[str, Callable[[], Case]]] = {}


def _reported(operation: str, name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Registers a case under the number of its report and a short name."""

    def register(case: Callable[[], Case]) -> Callable[[], Case]:
        _CASES.setdefault(operation, {})[name] = case
        return case

    return register


def examples_for(operation: str, backend: str = "host") -> Mapping[str, Case]:
    """Reported cases of an operation by name; those in its own module (`REPORTED`) are among them,
    and, on a GPU, those that take too long elsewhere (`ON_GPU`). Empty if there are none."""
    cases = {**_CASES.get(operation, {}), **registry.reported_for(operation)}
    if backend == "cuda":
        cases |= registry.gpu_cases_for(operation)
    return {name: case() for name, case in cases.items()}


def lies_for(operation: str) -> list[Case]:
    """Every lie about one reported case of an operation: of those with most to lie about, the one
    of the smallest sizes.

    A given lie is drawn about once in a thousand cases: too seldom for a launcher that misses it to
    be found in minutes. Empty if nothing was reported.
    """
    told: list[Case] = []
    for case in sorted(examples_for(operation).values(), key=lambda case: sum(case.sizes.values())):
        if any(placement.over is not None for placement in case.placements.values()):
            continue  # a lie about one buffer would be one about both
        if "starts" in case.values:  # a gather: lies about sequence starts too
            at_zero = {"seq_starts": Values("constant", {"value": 0})}
            case = replace(case, values={**at_zero, **case.values})
        lies = registry.lies_about(case) if case.sizes.get("num_requests", 1) <= 8 else []
        if len(lies) > len(told):
            told = lies
    return told


#: Tokens, or pairs, of a reported case above which it is not launched for relations, which small
#: cases show.
_MOST_RELATED_TOKENS = 1000


def _tokens(case: Case) -> int:
    """Or requests, where there are more of them; of copies of pages, pairs."""
    return max(case.sizes.get(name, 0) for name in ("num_tokens", "num_requests", "num_pairs"))


def related_for(operation: str) -> list[Case]:
    """For each relation of an operation the smallest reported case that it applies to, so that a
    short campaign has something to compare. Without those that apply to no reported case."""
    judged = oracles.operation(operation)
    left = relations_of(judged)
    found = []
    for case in sorted(examples_for(operation).values(), key=_tokens):
        if not left or _tokens(case) > _MOST_RELATED_TOKENS:
            break
        plan = judged.plan(case)
        expectation = judged.expect(plan)
        for name, relation in list(left.items()):
            if relation.related(judged, plan, expectation):
                found.append(replace(case, relations=(name,)))
                del left[name]
    return found


def _gather(
    *,
    starts: Values,
    num_requests: int,
    num_tokens: int,
    page_size_tokens: int = 1,
    num_pages: int = 1,
    table_width: int = 1,
    table_row_stride: int | None = None,
    entry_bytes: int = 1,
    element_bytes: int = 1,
    page_stride_bytes: int | None = None,
    table: Values | None = None,
    seq_starts: Values | None = None,
) -> Case:
    """A case of cp_gather_cache with a terminal value, dense where nothing else is said."""
    values = {"block_table": table or Values("identity"), "starts": starts}
    if seq_starts is not None:
        values["seq_starts"] = seq_starts
    values["counts"] = Values.literal(0, 0)
    if page_stride_bytes is None:
        page_stride_bytes = page_size_tokens * entry_bytes
    return Case(
        operation="cp_gather_cache",
        sizes={
            "num_requests": num_requests,
            "num_tokens": num_tokens,
            "page_size_tokens": page_size_tokens,
            "num_pages": num_pages,
            "table_width": table_width,
            "table_row_stride": table_width if table_row_stride is None else table_row_stride,
            "page_stride_bytes": page_stride_bytes,
            "slot_stride_bytes": entry_bytes,
            "dst_rows": num_tokens,
            "dst_row_stride_bytes": entry_bytes,
            "entry_bytes": entry_bytes,
            "element_bytes": element_bytes,
            "has_terminal": 1,
        },
        values=values,
    )


# ---- 1: logical page never compared with the table width -----------------------------------------


@_reported("cp_gather_cache", "1-past-last-row")
def past_last_row() -> Case:
    """Report 1: table [998, 1024], BS 16, starts[997]=997, starts[998]=1831, seq_starts[997]=15967.

    The requests before have one row each. Request 997 maps tokens 15,967 to 16,800: the first page
    past its row, which is the table's last, is q = 1,024.
    """
    return _gather(
        starts=Values("ramp", {"first": 0, "step": 1}, {998: 1831}),
        seq_starts=Values("constant", {"value": 0}, {997: 15967}),
        num_requests=998,
        num_tokens=1831,
        page_size_tokens=16,
        num_pages=1024,
        table_width=1024,
        table=Values("shared"),
    )


# ---- 3: row * entry_bytes in int32 ---------------------------------------------------------------


def _one_row(row: int, entry_bytes: int, element_bytes: int) -> Case:
    return _gather(
        starts=Values.literal(row, row + 1),
        num_requests=1,
        num_tokens=row + 1,
        entry_bytes=entry_bytes,
        element_bytes=element_bytes,
    )


@_reported("cp_gather_cache", "3-entry-2304-good")
def entry_2304_good() -> Case:
    """Report 3, entries of 576 fp32: row 932,067, the last good one, begins below 2^31."""
    return _one_row(932_067, 2304, 4)


@_reported("cp_gather_cache", "3-entry-2304-bad")
def entry_2304_bad() -> Case:
    """Report 3, entries of 576 fp32: row 932,068 is the first bad one, written below dst."""
    return _one_row(932_068, 2304, 4)


@_reported("cp_gather_cache", "3-entry-2304-silent")
def entry_2304_silent() -> Case:
    """Report 3, entries of 576 fp32: from row 1,864,136 on early rows are overwritten silently."""
    return _one_row(1_864_136, 2304, 4)


@_reported("cp_gather_cache", "3-entry-1152-good")
def entry_1152_good() -> Case:
    """Report 3, entries of 576 bf16: the row before the first bad one."""
    return _one_row(1_864_135, 1152, 2)


@_reported("cp_gather_cache", "3-entry-1152-bad")
def entry_1152_bad() -> Case:
    """Report 3, entries of 576 bf16: row 1,864,136 is the first bad one."""
    return _one_row(1_864_136, 1152, 2)


@_reported("cp_gather_cache", "3-entry-576-good")
def entry_576_good() -> Case:
    """Report 3, entries of 576 bytes: the row before the first bad one."""
    return _one_row(3_728_270, 576, 1)


@_reported("cp_gather_cache", "3-entry-576-bad")
def entry_576_bad() -> Case:
    """Report 3, entries of 576 bytes: row 3,728,271 is the first bad one."""
    return _one_row(3_728_271, 576, 1)


@_reported("cp_gather_cache", "3-row-after-last-good")
def row_after_last_good() -> Case:
    """Report 3: one request over the last good and the first bad row of 2304 bytes."""
    return _gather(
        starts=Values.literal(932_067, 932_069),
        num_requests=1,
        num_tokens=932_069,
        num_pages=2,
        table_width=2,
        entry_bytes=2304,
        element_bytes=4,
    )


# ---- 7: K and V share one buffer, offsets in int32 elements --------------------------------------


def _shared_pool(page: int) -> Case:
    # BS * 2 * heads * dim = 16 * 2 * 8 * 128 = 32,768 elements of 2 bytes from page to page; an
    # entry is the K half of a token, the V halves of a page follow its K halves.
    return _gather(
        starts=Values.literal(0, 1),
        num_requests=1,
        num_tokens=1,
        page_size_tokens=16,
        num_pages=page + 1,
        entry_bytes=8 * 128 * 2,
        element_bytes=2,
        page_stride_bytes=32_768 * 2,
        table=Values.literal(page),
    )


@_reported("cp_gather_cache", "7-shared-pool-good")
def shared_pool_good() -> Case:
    """Report 7: page 65,535 of a pool of 32,768 elements a page is right."""
    return _shared_pool(65_535)


@_reported("cp_gather_cache", "7-shared-pool-bad")
def shared_pool_bad() -> Case:
    """Report 7: page 65,536 begins at element 2^31 and wraps."""
    return _shared_pool(65_536)


# ---- 11: unsigned 32-bit elements ----------------------------------------------------------------


def _unsigned_pool(page: int) -> Case:
    # 16 slots of 1,024 elements of 1 byte: a page stride of 16,384 elements.
    return _gather(
        starts=Values.literal(0, 1),
        num_requests=1,
        num_tokens=1,
        page_size_tokens=16,
        num_pages=page + 1,
        entry_bytes=1024,
        table=Values.literal(page),
    )


@_reported("cp_gather_cache", "11-unsigned-good")
def unsigned_good() -> Case:
    """Report 11: page 262,143 of 16,384 elements begins below 2^32."""
    return _unsigned_pool(262_143)


@_reported("cp_gather_cache", "11-unsigned-bad")
def unsigned_bad() -> Case:
    """Report 11: page 262,144 of 16,384 elements begins at 2^32 and wraps to page 0."""
    return _unsigned_pool(262_144)


# ---- 14: the table is a column slice -------------------------------------------------------------


@_reported("cp_gather_cache", "14-column-slice")
def column_slice() -> Case:
    """Report 14: rows lie 4 columns apart, of which 2 belong to the table."""
    return _gather(
        starts=Values.literal(0, 2, 4, 6),
        num_requests=3,
        num_tokens=6,
        num_pages=6,
        table_width=2,
        table_row_stride=4,
    )


# ---- 29: requests of no rows ---------------------------------------------------------------------


@_reported("cp_gather_cache", "23-two-pages")
def two_pages() -> Case:
    """Report 23: whoever does not wait for the page that another thread looks up has that of the
    page before, in some order of threads."""
    case = _gather(
        starts=Values.literal(0, 1, 2),
        num_requests=2,
        num_tokens=2,
        num_pages=2,
        entry_bytes=64,
        element_bytes=2,
        table=Values.literal(1, 0),
    )
    return replace(case, relations=("order",))


def _lengths(*lengths: int) -> Case:
    return _gather(
        starts=Values("cumulative", {"first": 0, "steps": lengths}),
        num_requests=len(lengths),
        num_tokens=sum(lengths),
        page_size_tokens=2,
        num_pages=2 * len(lengths),
        table_width=2,
    )


@_reported("cp_gather_cache", "29-empty-among-others")
def empty_among_others() -> Case:
    """Report 29: a request without rows between two that have some."""
    return _lengths(3, 0, 2)


@_reported("cp_gather_cache", "29-empty-first")
def empty_first() -> Case:
    """Report 29: the first request has no rows."""
    return _lengths(0, 3)


@_reported("cp_gather_cache", "29-empty-last")
def empty_last() -> Case:
    """Report 29: the last request has no rows."""
    return _lengths(3, 0)


@_reported("cp_gather_cache", "29-all-empty")
def all_empty() -> Case:
    """Report 29: no request has rows, although there is room for some."""
    case = _lengths(0, 0, 0)
    return case.with_sizes(num_tokens=4, dst_rows=4)


# ---- gather_and_maybe_dequant_cache --------------------------------------------------------------


def _dequant(length: int, *, page_size_tokens: int, table_width: int, seq_start: int) -> Case:
    """One request of E4M3 codes, 64 to a token, to bf16 at scale 1/2."""
    return Case(
        operation="gather_and_maybe_dequant_cache",
        sizes={
            "num_requests": 1,
            "num_tokens": length,
            "page_size_tokens": page_size_tokens,
            "num_pages": table_width,
            "table_width": table_width,
            "table_row_stride": table_width,
            "page_stride_bytes": page_size_tokens * 64,
            "slot_stride_bytes": 64,
            "dst_rows": length,
            "dst_row_stride_bytes": 128,
            "entry_elements": 64,
            "kv_dtype": 1,
            "dst_dtype": 8,
            "has_terminal": 1,
        },
        values={
            "block_table": Values("reversed"),
            "starts": Values.literal(0, length),
            "seq_starts": Values.literal(seq_start),
            "scale": Values.literal(0x3F000000),
            "counts": Values.literal(0, 0),
        },
    )


@_reported("gather_and_maybe_dequant_cache", "4-past-the-row")
def maybe_dequant_past_the_row() -> Case:
    """Report 4: table [1, 2], BS 64, seq_starts [128], starts [0, 65]: both pages lie past it."""
    return _dequant(65, page_size_tokens=64, table_width=2, seq_start=128)


def _sixteen_pages(length: int) -> Case:
    return _dequant(length, page_size_tokens=16, table_width=16, seq_start=0)


@_reported("gather_and_maybe_dequant_cache", "28-240-tokens")
def tokens_240() -> Case:
    """Report 28, 15 full pages of 16: right."""
    return _sixteen_pages(240)


@_reported("gather_and_maybe_dequant_cache", "28-241-tokens")
def tokens_241() -> Case:
    """Report 28, the sixteenth page has one token: wrong."""
    return _sixteen_pages(241)


@_reported("gather_and_maybe_dequant_cache", "28-255-tokens")
def tokens_255() -> Case:
    """Report 28, the sixteenth page lacks one token: wrong."""
    return _sixteen_pages(255)


@_reported("gather_and_maybe_dequant_cache", "28-256-tokens")
def tokens_256() -> Case:
    """Report 28, 16 full pages: right."""
    return _sixteen_pages(256)


# ---- the indexer's gather: 8, 9, 10, 14, 19, 29 and 35 -------------------------------------------


def _indexer(
    *starts: int,
    table: Values,
    num_pages: int,
    page_stride_bytes: int = 8448,
    **sizes: int,
) -> Case:
    """Pages of 64 tokens of 128 key bytes and one scale: 8,448 bytes."""
    requests, tokens = len(starts) - 1, sizes.pop("num_tokens", starts[-1])
    return Case(
        operation="cp_gather_indexer_k_quant_cache",
        sizes={
            "num_requests": requests,
            "num_tokens": tokens,
            "page_size_tokens": 64,
            "num_pages": num_pages,
            "table_width": 1,
            "table_row_stride": 1,
            "page_stride_bytes": page_stride_bytes,
            "dst_k_rows": tokens,
            "dst_k_row_stride_bytes": 128,
            "dst_scale_rows": tokens,
            "dst_scale_row_stride_bytes": 4,
            "head_dim": 128,
            "quant_block": 128,
            "page_layout": 0,
            "has_terminal": 1,
            **sizes,
        },
        values={
            "block_table": table,
            "starts": Values.literal(*starts),
            "counts": Values.literal(0, 0),
        },
    )


def _packed(page: int, page_stride_bytes: int) -> Case:
    table = Values.literal(page)
    return _indexer(0, 1, table=table, num_pages=page + 1, page_stride_bytes=page_stride_bytes)


@_reported("cp_gather_indexer_k_quant_cache", "8-packed-pool-good")
def packed_pool_good() -> Case:
    """Report 8: page 2,065 of a pool of 1,039,680 bytes a page begins below 2^31."""
    return _packed(2065, 1_039_680)


@_reported("cp_gather_indexer_k_quant_cache", "8-packed-pool-bad")
def packed_pool_bad() -> Case:
    """Report 8: page 2,066 of a pool of 1,039,680 bytes a page is the first to wrap."""
    return _packed(2066, 1_039_680)


@_reported("cp_gather_indexer_k_quant_cache", "9-packed-pool-good")
def silent_pool_good() -> Case:
    """Report 9: page 2,142 of a pool of 1,002,240 bytes a page is right."""
    return _packed(2142, 1_002_240)


@_reported("cp_gather_indexer_k_quant_cache", "9-packed-pool-bad")
def silent_pool_bad() -> Case:
    """Report 9: page 2,143 of a pool of 1,002,240 bytes a page reads zeros."""
    return _packed(2143, 1_002_240)


@_reported("cp_gather_indexer_k_quant_cache", "10-scale-offset-good")
def scale_offset_good() -> Case:
    """Report 10: page 8,191 at a scale stride of 262,144 floats begins below element 2^31."""
    return _packed(8191, 4 * 262_144)


@_reported("cp_gather_indexer_k_quant_cache", "10-scale-offset-bad")
def scale_offset_bad() -> Case:
    """Report 10: page 8,192 at a scale stride of 262,144 floats begins at element 2^31."""
    return _packed(8192, 4 * 262_144)


@_reported("cp_gather_indexer_k_quant_cache", "14-column-slice")
def indexer_column_slice() -> Case:
    """Report 14: rows lie 4 columns apart, of which one belongs to the table."""
    return _indexer(0, 2, 4, 6, table=Values("identity"), num_pages=3, table_row_stride=4)


@_reported("cp_gather_indexer_k_quant_cache", "19-uncovered-rows")
def uncovered_rows() -> Case:
    """Report 19: num_tokens is larger than the last start."""
    return _indexer(0, 1, 2, table=Values("identity"), num_pages=2, num_tokens=4)


@_reported("cp_gather_indexer_k_quant_cache", "29-empty-among-others")
def indexer_empty_requests() -> Case:
    """Report 29: requests without rows, first, last and between two that have some."""
    return _indexer(0, 0, 3, 3, 5, 5, table=Values("identity"), num_pages=5)


@_reported("cp_gather_indexer_k_quant_cache", "35-padded-pages")
def padded_pages() -> Case:
    """Report 35, on the reader's side: pages of 8,448 bytes lie 8,640 apart."""
    return _indexer(
        0, 64, 128, table=Values("reversed"), num_pages=2, page_stride_bytes=8640, page_layout=1
    )
