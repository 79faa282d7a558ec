"""Cases of (c) cp_gather_and_upconvert_fp8_kv_cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Dtype, Plan
from pagefuzz.oracles.operations.cp_gather_and_upconvert_fp8_kv_cache import (
    CODES,
    RECORD_BYTES,
    ROW_BYTES,
    CpGatherAndUpconvertFp8KvCache,
)
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.boundaries import crossings
from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.classes import check_limit, classes
from pagefuzz.strategies.corners import GATHER_CORNERS, Corners
from pagefuzz.strategies.fixed_gathers import (
    hostile_productions,
    long_batches,
    more_requests,
    upconverted,
)
from pagefuzz.strategies.gather_cases import Entries
from pagefuzz.strategies.gathers import (
    DEFAULT_LIMIT_BYTES,
    QUANTITIES,
    Form,
    Gather,
    gather_choices,
)
from pagefuzz.strategies.oddities import begin_oddly, drawn, oddly
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.refusals import Surface, lies, wrong_stride
from pagefuzz.strategies.scales import bits, scales
from pagefuzz.strategies.told import Told, corners_of, refused_for

OPERATION = "cp_gather_and_upconvert_fp8_kv_cache"

#: Legal but unusual -> weight.
ODDITIES = {
    "none": 63,
    "ignored strides": 13,  # strides of dimensions of size <= 1 hold nonsense
    "far starts": 8,  # starts that lie at num_tokens or beyond become 2^31 - 1
    "unread seq_starts": 7,  # those of requests without rows hold nonsense
    "null where empty": 6,  # a null pointer for every buffer of no bytes
    "absent arguments": 3,  # dtype and rank of an absent buffer hold nonsense
}

_FORM = Form(row_bytes=ROW_BYTES, row_element_bytes=2, cache_element_bytes=1, fixed_entry=True)
_ENTRIES = Entries(src_unit=4, dst_unit=2)
#: 2^31 records or rows need terabytes.
_CROSSINGS = crossings(
    {name: weight for name, weight in QUANTITIES.items() if name not in ("row index", "page id")}
)
_ODDITIES = weighted(ODDITIES)
_JUNK = st.sampled_from(range(16))
_UNITS, _RECORDS, _SCALES = st.just(4), st.just(RECORD_BYTES), scales()


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """Cases of this operation: three in five in contract (a quarter of them at overflow scale), one
    in four hostile, the others refused; about 30 draws each.

    Shrinks towards one request of one row in a pool of one page of one record with any scales, and
    on the way there as the cases of cp_gather_cache do.

    Arguments, and what it raises: see `registry.cases_for`.
    """
    check_limit(limit_bytes)
    return _cases(classes(hostile=hostile, refused=refused), limit_bytes)


@st.composite
def _cases(draw: st.DrawFn, classes: SearchStrategy[str], limit_bytes: int) -> Case:
    case_class = draw(classes)
    event(f"class: {case_class}")
    choices = draw(
        gather_choices(
            _UNITS,
            _RECORDS,
            case_class=case_class,
            limit_bytes=limit_bytes,
            crossings=_CROSSINGS,
        )
    )
    gather = Gather(choices, limit_bytes, _FORM)
    words = draw(_SCALES)
    oddity, junk = drawn(draw, case_class, _ODDITIES, _JUNK)
    placed = draw(placements(_ENTRIES.alignments, "dst"))
    begin_oddly(gather, oddity, junk)
    case = _ENTRIES.case(OPERATION, gather, {}, placed)
    if words is not None:
        case = replace(case, values={**case.values, "src": Values.literal(*words)})
    told = surface(case)
    return draw(lies(told)) if case_class == "refused" else oddly(told, oddity, junk)


# ---- reports -------------------------------------------------------------------------------------


def _reported(
    starts: tuple[int, ...],
    *,
    page_size_tokens: int = 1,
    seq_starts: tuple[int, ...] | None = None,
    words: tuple[int, ...] | None = None,
    terminal: bool = True,
    pages: tuple[int, ...] | None = None,
    relations: tuple[str, ...] = (),
) -> Case:
    """Dense records, a table as wide as a request needs, rows up to the last start."""
    requests = len(starts) - 1
    last = max(b - a for a, b in pairwise(starts))
    width = max(-(-last // page_size_tokens), 1)
    values = {"block_table": Values("identity"), "starts": Values.literal(*starts)}
    if not terminal:
        values["starts"] = Values.literal(*starts[:-1])
    if seq_starts is not None:
        values["seq_starts"] = Values.literal(*seq_starts)
    values["counts"] = Values.literal(0, 0)
    if words is not None:
        values["src"] = Values.literal(*words)
    if pages is not None:
        values["block_table"] = Values.literal(*pages)
    sizes = {
        "num_requests": requests,
        "num_tokens": starts[-1],
        "page_size_tokens": page_size_tokens,
        "num_pages": requests * width,
        "table_width": width,
        "table_row_stride": width,
        "page_stride_bytes": page_size_tokens * RECORD_BYTES,
        "slot_stride_bytes": RECORD_BYTES,
        "dst_rows": starts[-1],
        "dst_row_stride_bytes": ROW_BYTES,
        "has_terminal": int(terminal),
    }
    return Case(OPERATION, sizes, values, relations=relations)


_RECORDS_OF = upconverted(RECORD_BYTES, ROW_BYTES)

#: Inputs of public reports, by the number of the report. 2: one page past the last row of the
#: table. 5: the first start is above 0. 22: the page of the first row is the padding id; CTAs of
#: eight warps have the ninth row in its place. 23: two pages, in several orders. 26: scales that
#: are no powers of two. 29: requests without rows. Those without a number nobody reported.
REPORTED: Mapping[str, Callable[[], Case]] = {
    "2-past-the-table": lambda: _reported((0, 16, 32), page_size_tokens=16, seq_starts=(0, 1)),
    "5-first-start-16": lambda: _reported((16, 48), page_size_tokens=16),
    "5-first-start-16-no-terminal": lambda: _reported(
        (16, 48), page_size_tokens=16, terminal=False
    ),
    "22-rejected-row": lambda: _reported((0, 9), pages=(-1, *range(1, 9)), relations=("repeat",)),
    "23-two-pages": lambda: _reported((0, 2), pages=(1, 0), relations=("order",)),
    "26-scale-0.75": lambda: _reported((0, 4), words=(bits(0.75), bits(1.0))),
    "29-empty-among-others": lambda: _reported((0, 3, 3, 5), page_size_tokens=2),
    "29-all-empty": lambda: _reported((0, 0, 0)).with_sizes(num_tokens=4, dst_rows=4),
    # Each of 256 threads looks for the owner of each page.
    **long_batches(OPERATION, _RECORDS_OF, quick=False),
    **hostile_productions(OPERATION, [("records-64", 64, _RECORDS_OF)]),
}
ON_GPU: Mapping[str, Callable[[], Case]] = more_requests(OPERATION, _RECORDS_OF)


# ---- refusals ------------------------------------------------------------------------------------


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    return _ENTRIES.required_bytes(case, RECORD_BYTES, ROW_BYTES)


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    less = RECORD_BYTES - 4
    record_stride = [
        *wrong_stride(case, "record_stride", "slot_stride_bytes", "page_size_tokens", less, 0),
        *wrong_stride(case, "record_stride", "page_stride_bytes", "num_pages", less, 0),
    ]
    types = {"src": (Dtype.U8, 3), "dst": (Dtype.BF16, 2)}
    own = {"record_stride": record_stride}
    return _ENTRIES.surface(case, required_bytes(case), types, ROW_BYTES, own)


# ---- corners -------------------------------------------------------------------------------------

#: Of all gathers, what a record of 656 bytes cannot be in: entries of other sizes, elements of the
#: cache other than bytes, 2^31 records or rows.
_IMPOSSIBLE = (
    "cache: strides aligned beyond the entry",  # records and rows are multiples of 16
    "cache: entries that share bytes",
    "base: src at its least alignment",
    "base: dst at its least alignment",
    "base: odd address",
    "element",
    "element type",
    "entry",
    "refused: element_bytes",
    "refused: entry_bytes",
    "boundary: row 2^31 - 2",
    "boundary: page 2^31 - 2",
    *(
        f"boundary: {quantity} {side} {limit} elements"
        for quantity in ("src page", "packed page", "slot")
        for side in ("past", "below")
        for limit in ("2^31", "2^32")
    ),
)


def _entries(plan: Plan, expectation: Expectation) -> npt.NDArray[np.uint8]:
    """uint8 [n, 656]: records of the rows that must be written, each once."""
    found = operation(OPERATION)
    assert isinstance(found, CpGatherAndUpconvertFp8KvCache)
    if expectation.case_class is CaseClass.REFUSED or not expectation.expected["dst"].offsets.size:
        return np.empty((0, RECORD_BYTES), np.uint8)
    rows = found.row_map(plan)
    pages = found.pages(plan, rows)
    page_stride, slot_stride, _ = found.effective_strides(plan.arguments)
    at = pages.page_id[rows.page] * page_stride + rows.slot * slot_stride
    return found.entries_at(plan, np.unique(at[pages.valid[rows.page]]))


def _scale_corner(
    holds: Callable[[npt.NDArray[np.float32]], bool],
) -> Callable[[Plan, Expectation], bool]:
    def corner(plan: Plan, expectation: Expectation) -> bool:
        entries = _entries(plan, expectation)
        words = np.ascontiguousarray(entries[:, CODES : CODES + 16]).view(np.float32)
        return bool(words.size) and bool(holds(words))

    return corner


def _magnitudes_differ(words: npt.NDArray[np.float32]) -> bool:
    with np.errstate(all="ignore"):
        exponents = np.sort(np.frexp(words)[1], axis=1)
    return bool(np.isfinite(words).all() and (np.diff(exponents, axis=1) >= 2).all())


def _all_codes(plan: Plan, expectation: Expectation) -> bool:
    return np.unique(_entries(plan, expectation)[:, :CODES]).size == 256


def _records(holds: Callable[[Mapping[str, int]], bool]) -> Callable[[Plan, Expectation], bool]:
    return lambda plan, expectation: (
        expectation.case_class is not CaseClass.REFUSED
        and bool(expectation.expected["dst"].offsets.size)
        and holds(plan.arguments)
    )


def _placed(buffer: str, modulus: int, rest: int) -> Callable[[Plan, Expectation], bool]:
    return lambda plan, expectation: (
        expectation.case_class is not CaseClass.REFUSED
        and bool(expectation.expected["dst"].offsets.size)
        and plan.case.placement(buffer).offset_bytes % modulus == rest
    )


def _overlap(sizes: Mapping[str, int]) -> bool:
    pages, slots = sizes["num_pages"] > 1, sizes["page_size_tokens"] > 1
    shifted = sizes["page_stride_bytes"] % max(sizes["slot_stride_bytes"], 1)
    reach = (sizes["page_size_tokens"] - 1) * sizes["slot_stride_bytes"] + RECORD_BYTES
    return pages and slots and shifted > 0 and sizes["page_stride_bytes"] < reach


#: Name -> whether a case is in that corner.
CORNERS: Corners = {
    **{
        name: holds
        for name, holds in GATHER_CORNERS.items()
        if name not in _IMPOSSIBLE and name.split(":")[0] not in _IMPOSSIBLE
    },
    **corners_of(Told, refused_for("record_stride")),
    "base: src at 4 past 8": _placed("src", 8, 4),
    "base: dst at 2 past 4": _placed("dst", 4, 2),
    "records: padded to no multiple of 8": _records(
        lambda s: s["page_size_tokens"] > 1 and s["slot_stride_bytes"] % 8 == 4
    ),
    "records: pages that cut records of others": _records(_overlap),
    "codes: all 256": _all_codes,
    "scales: distinct magnitudes in a record": _scale_corner(_magnitudes_differ),
    "scales: NaN": _scale_corner(lambda words: bool(np.isnan(words).any())),
    "scales: infinite": _scale_corner(lambda words: bool(np.isinf(words).any())),
    "scales: zero": _scale_corner(lambda words: bool((words == 0).any())),
    "scales: negative zero": _scale_corner(
        lambda words: bool(((words == 0) & np.signbit(words)).any())
    ),
    "scales: negative": _scale_corner(lambda words: bool((words < 0).any())),
    "scales: subnormal": _scale_corner(
        lambda words: bool(((words != 0) & (np.abs(words) < 2.0**-126)).any())
    ),
    "scales: one everywhere": _scale_corner(lambda words: bool((words == 1).all())),
}
