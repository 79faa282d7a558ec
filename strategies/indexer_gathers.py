"""Gathers from the indexer's cache, operation (d): from drawn choices to cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.batches import TABLE_PAGES
from pagefuzz.strategies.boundaries import Crossing
from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.classes import check_limit, classes
from pagefuzz.strategies.gather_cases import (
    COUNTS,
    TABLE_EXTENT,
    alignments,
    arguments,
    gather_case,
    vector_bytes,
)
from pagefuzz.strategies.gathers import (
    LEAST_LIMIT_BYTES,
    Gather,
    GatherChoices,
    gather_choices,
)
from pagefuzz.strategies.hostility import IndexValues
from pagefuzz.strategies.indexer_corners import STRIDES, row_bytes
from pagefuzz.strategies.indexer_pages import LAYOUTS, quant_block, wrong_pages
from pagefuzz.strategies.oddities import begin_oddly, drawn, oddly
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.productions import Production, productions
from pagefuzz.strategies.refusals import Lie, Surface, lies, reach, rows_bytes
from pagefuzz.strategies.strides import rounded_up

#: What reaches a boundary of 32-bit arithmetic -> weight; see `gathers.QUANTITIES`.
QUANTITIES = {
    "dst row": 15,
    "src page": 14,
    "packed page": 20,
    "dst stride": 9,
    "page stride": 9,
    "scale offset": 16,  # a page whose keys begin below the boundary, and its scales past it
    "table stride": 16,
    "column": 12,
    "token": 6,
    "row index": 4,
    "page id": 5,
}

#: Legal but unusual -> weight.
ODDITIES = {
    "none": 66,
    "ignored strides": 14,  # strides of dimensions of size <= 1 hold nonsense
    "key types": 6,  # dst_k is of another type of one byte
    "unread seq_starts": 5,  # those of requests without rows hold nonsense
    "null where empty": 5,  # a null pointer for every buffer of no bytes
    "absent arguments": 4,  # dtype and rank of an absent buffer hold nonsense
}

#: Pages of a request, at most, and its rows, at least.
_MOST_TABLE_PAGES = TABLE_PAGES[-1]

#: An index vector that only some have.
HINTS = "token_to_seq"

#: Every reason for a refusal.
REASONS = (
    *("dtype", "rank", "head_dim", "quant_block", "page_layout", "page_size_tokens"),
    *("size_range", "has_terminal", "dst_rows", "negative_stride", "stride_overflow"),
    *("extent", "null_pointer", "alignment", "page_stride", "not_nested", "overlap"),
)

_TILED16 = 1
_UNIT = 4
#: At overflow scale: keeps rows countable.
_LEAST_ROW_STRIDE = 1024
#: head_dim 16, one scale: the least that a token takes.
_LEAST_TOKEN_BYTES = 20

_LEADERS = weighted({"dst_k": 50, "dst_scale": 52})
_HEADS = skewed((50, range(16, 129, 16)), (30, (128, 128, 192, 256)), (20, range(16, 1025, 16)))
_BLOCKS = skewed((50, (0,)), (50, range(1, 40)))
_KEY_PADDINGS = skewed((60, (0,)), (25, range(1, 17)), (15, range(17, 300)))
_SCALE_PADDINGS = skewed((60, (0,)), (40, range(1, 20)))
_SPARE_ROWS = skewed((70, (0,)), (30, range(1, 12)))
_ODDITIES = weighted(ODDITIES)
_JUNK = st.sampled_from(range(17))
_KEY_TYPES = (Dtype.E4M3, Dtype.E5M2)
#: A head of 128 in one block, in pages of 64 tokens.
PRODUCTION = Production(64, 128)
_PRODUCTIONS = productions({PRODUCTION: 1})
_ALIGNMENTS = alignments({"src": 4, "dst_k": 1, "dst_scale": 4})


@dataclass(frozen=True)
class _Shape:
    """What is drawn of this operation alone.

    layout          page_layout
    block           which divisor of the head is its quant block, the head itself first
    leader          the destination whose row stride the shared choices are about
    key_padding     bytes between the rows of dst_k, where it does not lead
    scale_padding   words between those of dst_scale
    spare_rows      of the destination that does not lead
    """

    layout: int
    block: int
    leader: str
    key_padding: int
    scale_padding: int
    spare_rows: int


@st.composite
def _shapes(draw: st.DrawFn) -> _Shape:
    shape = _Shape(
        draw(LAYOUTS),
        draw(_BLOCKS),
        draw(_LEADERS),
        draw(_KEY_PADDINGS),
        draw(_SCALE_PADDINGS),
        draw(_SPARE_ROWS),
    )
    event(f"layout: {'tiled16' if shape.layout else 'flat'}")
    return shape


class IndexerGather(Gather):
    """Entries are a token's keys and scales; pages are dense inside, rows are in two places."""

    def __init__(
        self, choices: GatherChoices, shape: _Shape, limit_bytes: int, most_rows: int
    ) -> None:
        self.shape, self.layout, self.most_rows = shape, shape.layout, most_rows
        super().__init__(choices, limit_bytes)

    def _fit_entry(self) -> None:
        size, head, block = (
            self._drawn_page_size(),
            self.choices.entry_bytes,
            self.shape.block,
        )
        room = self.limit_bytes - LEAST_LIMIT_BYTES
        quantity = self.quantity
        if quantity in ("row index", "page id") and room < 2**31 * _LEAST_TOKEN_BYTES:
            quantity = self.quantity = ""
        if quantity in ("row index", "page id", "dst row"):
            head, block = 16, 0
        if quantity in ("column", "page id"):
            size, self.layout = 1, 0
        elif quantity == "token":
            size = max(size, 2) if 4 * (2**31 // max(size, 2)) <= room else 4096
        if self.layout == _TILED16:
            size = rounded_up(size, 16)
        self.page_size_tokens = size
        self._set_head(head, block)
        most = self.choices.most_page_bytes
        if size * self.entry_bytes > most:
            self._set_head(head, 0)
        if size * self.entry_bytes > most:
            self._set_head(max(16, (most // size - 4) // 16 * 16), 0)

    def _set_head(self, head: int, block: int) -> None:
        self.head_dim, self.quant_block = head, quant_block(head, block)
        self.groups = head // self.quant_block
        self.entry_bytes = head + 4 * self.groups

    def _fit_batch(self) -> None:
        super()._fit_batch()
        if self.entry_bytes != self.head_dim + 4 * self.groups:  # cut, as there are many rows
            self._set_head(16, 0)

    def _row_bytes(self) -> int:
        row = self.head_dim if self.shape.leader == "dst_k" else 4 * self.groups
        return max(row, _LEAST_ROW_STRIDE) if self.quantity == "dst row" else row

    def _fit_rows(self) -> None:
        super()._fit_rows()
        shape, lead = self.shape, self.dst_row_stride_bytes
        if self.quantity:
            keys, scales = self.head_dim, 4 * self.groups
        else:
            keys = self.head_dim + shape.key_padding
            scales = 4 * (self.groups + shape.scale_padding)
        self.row_strides = {"dst_k": keys, "dst_scale": scales, shape.leader: lead}
        other = self.index.num_tokens + (0 if self.quantity else shape.spare_rows)
        self.rows = {"dst_k": other, "dst_scale": other, shape.leader: self.dst_rows}

    def leave_one_row(self) -> None:
        super().leave_one_row()
        if not self.quantity:
            self.rows = dict.fromkeys(self.rows, self.index.num_tokens)

    def own_sizes(self) -> dict[str, int]:
        """Sizes that no other gather has."""
        return {
            "dst_k_rows": self.rows["dst_k"],
            "dst_k_row_stride_bytes": self.row_strides["dst_k"],
            "dst_scale_rows": self.rows["dst_scale"],
            "dst_scale_row_stride_bytes": self.row_strides["dst_scale"],
            "head_dim": self.head_dim,
            "quant_block": self.quant_block,
            "page_layout": self.layout,
        }

    def _fit_pages(self) -> None:
        super()._fit_pages()
        needed = self.page_size_tokens * self.entry_bytes
        if self.quantity == "page id":
            self.page_stride_bytes = needed
        elif self.quantity == "scale offset":
            last, limit = 1 + self.crossing.extra, self.boundary.offset_bytes
            keys = self.page_size_tokens * self.head_dim
            if self.crossing.below:  # the page ends at the boundary or just below
                stride = (limit - needed) // last // _UNIT * _UNIT
            else:
                stride = rounded_up(-(-(limit - keys) // last), _UNIT)
            self.contents = Values("reversed")
            self._put_first(last)
            self.index.num_pages, self.page_stride_bytes = last + 1, stride
        self.page_stride_bytes = max(self.page_stride_bytes, needed)


@dataclass(frozen=True)
class Variant:
    """An operation of this kind, and what is drawn for it alone.

    crossings  what reaches a boundary of 32-bit arithmetic
    most_rows  one launch has, about; more take too long to run
    page_sizes, heads  the only ones that are drawn, ascending; empty: any. Where each has a kernel
               compiled, any would take too long; blocks are then but a few, too
    add        adds index values of its own to those of a case; told whether it shall be hostile
    """

    operation: str
    crossings: SearchStrategy[Crossing]
    most_rows: int = 2**31
    page_sizes: Sequence[int] = ()
    heads: Sequence[int] = ()
    add: Callable[[st.DrawFn, IndexValues, bool], Mapping[str, Values]] | None = None

    def fitted(self, choices: GatherChoices) -> GatherChoices:
        """Choices with fewer rows, sizes and heads, where one has to do with few."""
        if self.most_rows < _MOST_TABLE_PAGES:
            choices = choices.without_whole_tables()
        most, batch, rows = self.most_rows, choices.batch, choices.destination
        # More than 64 requests are a situation of their own. Whole pages each would be many rows.
        requests = min(batch.request_count, max(most, 66))
        snap = batch.snap if requests <= most // 4 else "free"
        return replace(
            choices,
            page_size_tokens=_listed(choices.page_size_tokens, self.page_sizes),
            entry_bytes=_listed(choices.entry_bytes, self.heads),
            batch=replace(batch, request_count=requests, snap=snap),
            destination=replace(
                rows,
                first_start=min(rows.first_start, most // 3),
                extra_tokens=min(rows.extra_tokens, most // 3),
            ),
        )


def _listed(value: int, listed: Sequence[int]) -> int:
    """The largest one that is listed and not above a value."""
    return max((one for one in listed if one <= value), default=value)


def indexer_cases(
    variant: Variant, *, hostile: bool, refused: bool, limit_bytes: int
) -> SearchStrategy[Case]:
    """Cases of a variant: three in five in contract (a quarter of them at overflow scale), one in
    four hostile, the others refused; about 35 draws each.

    Shrinks towards one request of one row in a flat pool of one page of one slot of 16 keys and a
    scale, dense, without optional arguments. A case loses, in this order, its class, its layout and
    what is odd about head and rows, then what every gather loses.

    Arguments, and what it raises: see `registry.cases_for`.
    """
    check_limit(limit_bytes)
    return _cases(variant, classes(hostile=hostile, refused=refused), limit_bytes)


@st.composite
def _cases(
    draw: st.DrawFn, variant: Variant, classes: SearchStrategy[str], limit_bytes: int
) -> Case:
    case_class = draw(classes)
    event(f"class: {case_class}")
    shape = draw(_shapes())
    # One destination reaches a boundary, the other needs at most a sixteenth of its bytes.
    limit_bytes -= limit_bytes // 16
    choices = draw(
        gather_choices(
            st.just(_UNIT),
            _HEADS,
            case_class=case_class,
            limit_bytes=limit_bytes,
            crossings=variant.crossings,
        )
    )
    production = draw(_PRODUCTIONS)
    if production is not None:
        choices, shape = production.of(choices), replace(shape, block=0)
    if variant.heads and shape.block:
        shape = replace(shape, block=(1, 2, -1)[shape.block % 3])
    gather = IndexerGather(variant.fitted(choices), shape, limit_bytes, variant.most_rows)
    oddity, junk = drawn(draw, case_class, _ODDITIES, _JUNK)
    bases = _ALIGNMENTS if variant.add is None else {**_ALIGNMENTS, HINTS: 4}
    placed = draw(placements(bases, shape.leader))
    begin_oddly(gather, oddity, junk, one_row_in=3)
    added = {} if variant.add is None else variant.add(draw, gather.index, case_class == "hostile")
    case = gather_case(variant.operation, gather, gather.own_sizes(), placed, hints=added)
    if case_class == "refused":
        return draw(lies(surface(case)))
    if oddity == "key types":
        case = replace(case, overrides={"dst_k.dtype": int(_KEY_TYPES[junk % 2])})
    return oddly(surface(case), oddity, junk)


# ---- refusals ------------------------------------------------------------------------------------


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    sizes, rows = case.sizes, row_bytes(case.sizes)
    pool = reach(case, STRIDES)["page_stride_bytes"]
    pool += sizes["page_size_tokens"] * sum(rows.values())
    needed = {"src": pool if sizes["num_pages"] else 0, **rows_bytes(case, **rows)}
    hints = {HINTS: 4 * sizes["num_tokens"]} if HINTS in case.values else {}
    return {**needed, **vector_bytes(case), **hints}


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    sizes, needed, rows = case.sizes, required_bytes(case), row_bytes(case.sizes)
    types = {"src": (Dtype.U8, 3), "dst_k": (Dtype.U8, 2), "dst_scale": (Dtype.F32, 2)}
    hints = {HINTS: 4} if HINTS in case.values else {}
    passed = arguments(case, {**types, HINTS: (Dtype.I32, 1)}, needed, {**_ALIGNMENTS, **hints})
    passed["dst_k"] = replace(passed["dst_k"], other_dtypes=_KEY_TYPES)
    return Surface(
        case=case,
        arguments=passed,
        destinations=("dst_k", "dst_scale"),
        strides=STRIDES,
        extents={
            "page_stride_bytes": ("num_pages",),
            "dst_k_row_stride_bytes": ("num_tokens", "dst_k_rows", "dst_scale_rows"),
            "dst_scale_row_stride_bytes": ("num_tokens", "dst_scale_rows", "dst_k_rows"),
            "table_row_stride": TABLE_EXTENT,
        },
        counts=COUNTS,
        own=_own_lies(sizes, rows),
    )


def _own_lies(sizes: Mapping[str, int], rows: Mapping[str, int]) -> Mapping[str, list[Lie]]:
    tokens = max(sizes["num_tokens"], 1)
    page = sizes["page_size_tokens"] * sum(rows.values())
    pages = max(sizes["num_pages"], 2)
    told: dict[str, list[dict[str, int]]] = {
        **wrong_pages(sizes["head_dim"]),
        "dst_rows": [
            {f"{name}_rows": fewer, "num_tokens": tokens}
            for name in rows
            for fewer in (tokens - 1, -1)
        ],
        "page_stride": [
            {"page_stride_bytes": stride, "num_pages": pages} for stride in (page - 4, 0)
        ],
        "not_nested": [
            {f"{name}_row_stride_bytes": stride, f"{name}_rows": max(tokens, 2)}
            for name, row in rows.items()
            for stride in (row - _ALIGNMENTS[name], 0)
        ],
    }
    return {
        reason: [Lie(reason, overrides) for overrides in lies_of]
        for reason, lies_of in told.items()
    }
