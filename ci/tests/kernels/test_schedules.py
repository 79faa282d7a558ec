"""The schedules of cp_gather_cache against the loop of contracts.md, in checked builds."""

from __future__ import annotations

import numpy as np
import pytest
from ci.tests.kernels.conftest import CP_GATHER_CACHE, OK, Case, Launch, load, sparse, wanted

CONTAINED = ("page", "token")
SCHEDULES = (*CONTAINED, "page-as-merged")


@pytest.fixture(scope="module")
def loaded():
    loaded = load(CP_GATHER_CACHE)
    yield loaded
    loaded.lib.pf_set_order(0, 0)


def random_case(rng: np.random.Generator, hostile: bool) -> Case:
    """A few requests over small pages, any strides and alignment."""
    element_bytes = int(rng.choice([1, 2, 4, 8]))
    entry_bytes = element_bytes * int(rng.integers(1, 13))
    page_size = int(rng.choice([1, 2, 3, 4, 7, 16]))
    num_pages = int(rng.integers(1, 9))
    requests = int(rng.integers(1, 6))
    lengths = rng.integers(0, 3 * page_size + 2, requests) * rng.integers(0, 2, requests)
    first = int(rng.choice([0, 0, 1, 5]))
    starts = [first, *(first + np.cumsum(lengths)).tolist()]
    has_terminal = int(rng.integers(0, 2))
    num_tokens = max(starts[-1] + int(rng.integers(-3, 3)), 0)
    if not has_terminal:
        starts.pop()
    seq_starts = rng.integers(0, 2 * page_size + 1, requests).tolist()
    if rng.integers(0, 4) == 0:
        seq_starts = None
    longest = max(num_tokens, 1) + max(seq_starts or [0])
    width = -(-longest // page_size)
    table = rng.integers(0, num_pages, (requests, width))
    if hostile:
        table = np.where(rng.integers(0, 4, table.shape) == 0, -1, table)
        illegal = rng.choice([num_pages, -2, 2**31 - 1, -(2**31)], table.shape)
        table = np.where(rng.integers(0, 4, table.shape) == 0, illegal, table)
        table = table[:, : int(rng.integers(0, width + 1))]
        if rng.integers(0, 2):
            starts[0] -= int(rng.integers(1, 9))
        if seq_starts and rng.integers(0, 2):
            seq_starts[int(rng.integers(0, requests))] = int(rng.choice([-1, -(2**31), 2**31 - 1]))
    unit = element_bytes

    def padded(size: int) -> int:
        return size + unit * int(rng.choice([0, 0, 1, 5]))

    slot_stride = padded(entry_bytes)
    return Case(
        starts=starts,
        table=table.tolist(),
        num_tokens=num_tokens,
        page_size_tokens=page_size,
        num_pages=num_pages,
        entry_bytes=entry_bytes,
        element_bytes=element_bytes,
        seq_starts=seq_starts,
        has_terminal=has_terminal,
        counts=bool(rng.integers(0, 4)),
        dst_rows=num_tokens + int(rng.integers(0, 3)),
        table_row_stride=table.shape[1] + int(rng.choice([0, 3])),
        slot_stride_bytes=slot_stride,
        page_stride_bytes=padded(page_size * slot_stride),
        dst_row_stride_bytes=padded(entry_bytes),
        src_offset=unit * int(rng.integers(0, 16 // unit)),
        dst_offset=unit * int(rng.integers(0, 16 // unit)),
    )


def check(loaded, launch, schedule, exact_counts=True):
    want = wanted(launch)
    launch.object.begin(want.permissions)
    assert launch.run(schedule) == OK, launch.text
    record = launch.object.end()
    assert record.access_faults == (), (launch.case, schedule)
    assert record.index_faults == (), (launch.case, schedule)
    assert (launch.dst == want.dst).all(), (launch.case, schedule)
    if launch.counts is not None and exact_counts:
        assert tuple(launch.counts) == want.counts, (launch.case, schedule)
    return record


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_contract_cases_are_exact_and_touch_nothing_else(loaded, schedule):
    """200 random cases in all orders; checked at one byte, with no fault and no wrap."""
    rng = np.random.default_rng(1)
    accesses = 0
    for number in range(200):
        loaded.lib.pf_set_order(number % 4, number)
        launch = Launch(loaded, random_case(rng, hostile=False), seed=number)
        accesses += check(loaded, launch, schedule).accesses
    assert accesses > 10_000


@pytest.mark.parametrize("schedule", CONTAINED)
def test_hostile_cases_are_contained_and_counted(loaded, schedule):
    """200 random cases: bad pages and ids, short tables, negative starts and seq_starts."""
    rng = np.random.default_rng(2)
    total = np.zeros(2, np.int64)
    for number in range(200):
        loaded.lib.pf_set_order(number % 4, number)
        launch = Launch(loaded, random_case(rng, hostile=True), seed=number)
        check(loaded, launch, schedule)
        if launch.counts is not None:
            total += launch.counts
    assert (total > 50).all()


def claims(launch):
    """Row -> set of (table cell, source offset) of every request that maps it, by the loop."""
    c = launch.case
    bounds = [min(max(start, 0), c.num_tokens) for start in c.starts]
    if not c.has_terminal:
        bounds.append(c.num_tokens)
    rows = {row: set() for row in range(c.num_tokens)}
    for r in range(len(bounds) - 1):
        for row in range(bounds[r], bounds[r + 1]):
            seq_start = c.seq_starts[r] if c.seq_starts is not None else 0
            page, slot = divmod(seq_start + row - c.starts[r], c.page_size_tokens)
            if seq_start >= 0 and page < launch.width:
                physical = c.table[r][page]
                if 0 <= physical < c.num_pages:
                    rows[row].add(physical * launch.cb + slot * launch.ce)
    falls = [k for k in range(len(bounds) - 1) if bounds[k + 1] < bounds[k]]
    least = min(bounds[falls[0] + 1 :]) if falls else c.num_tokens
    return rows, least


@pytest.mark.parametrize("schedule", CONTAINED)
def test_decreasing_starts_leave_the_rows_below_the_least_one_exact(loaded, schedule):
    """300 random cases: rows below m are exact, rows above are old or a claimant's."""
    rng = np.random.default_rng(3)
    below = 0
    for number in range(300):
        loaded.lib.pf_set_order(number % 4, number)
        case = random_case(rng, hostile=bool(number % 2))
        case.entry_bytes = case.element_bytes = 1
        case.slot_stride_bytes = case.dst_row_stride_bytes = 1
        case.page_stride_bytes = case.page_size_tokens
        case.src_offset = case.dst_offset = 0
        case.starts = rng.integers(-2, case.num_tokens + 4, len(case.starts)).tolist()
        if number % 3:
            case.starts[: len(case.starts) // 2] = sorted(case.starts[: len(case.starts) // 2])
        launch = Launch(loaded, case, seed=number)
        rows, least = claims(launch)
        old = launch.dst.copy()
        loaded.begin({b: ([(0, 2**40)], [(0, 2**40)]) for b in range(6)})
        assert launch.run(schedule) == OK
        record = loaded.end()
        assert record.access_faults == ()
        assert record.index_faults == ()
        for row, sources in rows.items():
            values = {int(launch.src[source]) for source in sources}
            if row < least:
                below += 1
                assert len(values) <= 1
                assert launch.dst[row] in (values or {int(old[row])}), (case, row)
            else:
                assert int(launch.dst[row]) in values | {int(old[row])}, (case, row)
    assert below > 500


@pytest.mark.parametrize("schedule", CONTAINED)
def test_counts_are_added_to_and_optional(loaded, schedule):
    """One count a (request, page) with rows; what was there stays."""
    case = Case(
        starts=[0, 4, 8, 12],
        table=[[-1, 0], [7, -5], [0, 0]],
        num_tokens=12,
        page_size_tokens=2,
        num_pages=4,
        entry_bytes=3,
        seq_starts=[0, 1, -1],
    )
    launch = Launch(loaded, case)
    launch.counts[:] = (1000, 2000)
    loaded.begin(wanted(launch).permissions)
    assert launch.run(schedule) == OK
    # Request 0: page 0 is padding. 1: pages 0 and 1 bad, page 2 past the table. 2: seq_start < 0.
    assert launch.counts.tolist() == [1001, 2004]


@pytest.mark.parametrize("schedule", CONTAINED)
@pytest.mark.parametrize("starts", [[0, 2], [2**31 - 3, 2**31 - 1]])
def test_a_late_first_start_or_a_huge_num_tokens_costs_nothing(loaded, schedule, starts):
    """Rows and tasks that no request covers are not walked."""
    case = Case(
        starts=starts,
        table=[[0]],
        num_tokens=1,
        page_size_tokens=2,
        num_pages=1,
        entry_bytes=1,
    )
    launch = Launch(loaded, case)
    launch.replace("dst", sparse(2**31 - 1))
    launch.args.num_tokens = launch.args.dst_rows = 2**31 - 1
    loaded.begin({b: ([(0, 2**40)], [(0, 2**40)]) for b in range(6)})
    assert launch.run(schedule) == OK, launch.text
    record = loaded.end()
    assert (record.access_faults, record.index_faults) == ((), ())
    assert record.accesses < 10_000
    assert (launch.dst[starts[0] : starts[0] + 2] == launch.src).all()


def test_an_empty_tail_of_tasks_is_jumped_over(loaded):
    """N of 2^31 - 1 rows that all lie past the table: one count of pages, few accesses."""
    case = Case(
        starts=[0],
        table=[[0]],
        num_tokens=1,
        page_size_tokens=1,
        num_pages=1,
        entry_bytes=1,
        has_terminal=0,
        seq_starts=[5],
    )
    launch = Launch(loaded, case)
    launch.args.num_tokens = launch.args.dst_rows = 2**31 - 1
    launch.args.dst_row_stride_bytes = 1
    launch.replace("dst", sparse(2**31 - 1))
    loaded.begin({2: ([], []), 3: ([(0, 4)], []), 4: ([(0, 4)], []), 5: ([(0, 16)], [(0, 16)])})
    for schedule in CONTAINED:
        launch.counts[:] = 0
        assert launch.run(schedule) == OK, launch.text
        assert launch.counts.tolist() == [0, 2**31 - 1]
    record = loaded.end()
    assert record.access_faults == ()
    assert record.accesses < 10_000
