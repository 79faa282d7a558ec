"""Gathers from the indexer's cache, operation (d): from drawn choices to cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.boundaries import INT32_MAX, INT32_MIN, Crossing
from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.classes import check_limit, classes
from pagefuzz.strategies.gathers import (
    LEAST_LIMIT_BYTES,
    Gather,
    GatherChoices,
    gather_choices,
)
from pagefuzz.strategies.hostility import IndexValues
from pagefuzz.strategies.indexer_corners import STRIDES, row_bytes
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.refusals import Argument, Lie, Surface, lies
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
_PAGE_BYTES = 2**18
#: At overflow scale: keeps rows countable.
_LEAST_ROW_STRIDE = 1024
#: head_dim 16, one scale: the least that a token takes.
_LEAST_TOKEN_BYTES = 20

_LAYOUTS = weighted({0: 50, 1: 51})
_LEADERS = weighted({"dst_k": 50, "dst_scale": 52})
_HEADS = skewed((50, range(16, 129, 16)), (30, (128, 128, 192, 256)), (20, range(16, 1025, 16)))
_BLOCKS = skewed((50, (0,)), (50, range(1, 40)))
_KEY_PADDINGS = skewed((60, (0,)), (25, range(1, 17)), (15, range(17, 300)))
_SCALE_PADDINGS = skewed((60, (0,)), (40, range(1, 20)))
_SPARE_ROWS = skewed((70, (0,)), (30, range(1, 12)))
_ODDITIES = weighted(ODDITIES)
_JUNK = st.sampled_from(range(17))
_STRIDE_JUNK = (-1, 0, 3, INT32_MIN, 2**63 - 1, -(2**63), 2**32)
_SEQ_JUNK = (-7, INT32_MIN, INT32_MAX)
_KEY_TYPES = (Dtype.E4M3, Dtype.E5M2)


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
        draw(_LAYOUTS),
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
            self.choices.page_size_tokens,
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
        if size * self.entry_bytes > _PAGE_BYTES:
            self._set_head(head, 0)
        if size * self.entry_bytes > _PAGE_BYTES:
            self._set_head(max(16, (_PAGE_BYTES // size - 4) // 16 * 16), 0)

    def _set_head(self, head: int, block: int) -> None:
        blocks = [size for size in range(head, 0, -1) if head % size == 0]
        self.head_dim, self.quant_block = head, blocks[block % len(blocks)]
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

    hostile, refused  whether cases of that class may be drawn; without both, all are in contract
    limit_bytes       bound on the memory of all buffers of a case together

    Shrinks towards one request of one row in a flat pool of one page of one slot of 16 keys and a
    scale, dense, without optional arguments. A case loses, in this order, its class, its layout and
    what is odd about head and rows, then what every gather loses.

    Raises `InvalidArgument` for `limit_bytes` below 64 MiB.
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
    if variant.heads and shape.block:
        shape = replace(shape, block=(1, 2, -1)[shape.block % 3])
    gather = IndexerGather(variant.fitted(choices), shape, limit_bytes, variant.most_rows)
    oddity = draw(_ODDITIES) if case_class != "refused" else "none"
    junk = draw(_JUNK) if oddity != "none" else 0
    alignments = ALIGNMENTS if variant.add is None else {**ALIGNMENTS, HINTS: 4}
    placed = draw(placements(alignments, shape.leader))
    if oddity != "none":
        event(f"oddity: {oddity}")
        if oddity in _BEFORE:
            _BEFORE[oddity](gather, junk)
    added = {} if variant.add is None else variant.add(draw, gather.index, case_class == "hostile")
    case = _case(variant.operation, gather, choices, placed, added)
    if oddity in _AFTER:
        case = _AFTER[oddity](case, junk)
    return draw(lies(surface(case))) if case_class == "refused" else case


ALIGNMENTS = {
    "src": 4,
    "dst_k": 1,
    "dst_scale": 4,
    "block_table": 4,
    "starts": 4,
    "seq_starts": 4,
    "counts": 8,
}


def _case(
    operation: str,
    gather: IndexerGather,
    choices: GatherChoices,
    placed: Mapping[str, Placement],
    added: Mapping[str, Values],
) -> Case:
    index = gather.index
    values = {"block_table": gather.table, **added, "starts": Values.literal(*index.starts)}
    if index.seq_starts is not None:
        values["seq_starts"] = Values.literal(*index.seq_starts)
    if choices.counters is not None:
        values["counts"] = Values.literal(*choices.counters)
    present = ("src", "dst_k", "dst_scale", *values)
    return Case(
        operation=operation,
        sizes={
            "num_requests": index.num_requests,
            "num_tokens": index.num_tokens,
            "page_size_tokens": gather.page_size_tokens,
            "num_pages": index.num_pages,
            "table_width": index.table_width,
            "table_row_stride": index.table_row_stride,
            "page_stride_bytes": gather.page_stride_bytes,
            "dst_k_rows": gather.rows["dst_k"],
            "dst_k_row_stride_bytes": gather.row_strides["dst_k"],
            "dst_scale_rows": gather.rows["dst_scale"],
            "dst_scale_row_stride_bytes": gather.row_strides["dst_scale"],
            "head_dim": gather.head_dim,
            "quant_block": gather.quant_block,
            "page_layout": gather.layout,
            "has_terminal": choices.destination.has_terminal,
        },
        values=values,
        placements={name: place for name, place in placed.items() if name in present},
        seed=choices.seed,
    )


# ---- oddities ------------------------------------------------------------------------------------


def _unread_seq_starts(gather: IndexerGather, junk: int) -> None:
    index = gather.index
    live = {span.request for span in index.spans()}
    if index.seq_starts is not None:
        for request in set(range(index.num_requests)) - live:
            index.seq_starts[request] = _SEQ_JUNK[(junk + request) % len(_SEQ_JUNK)]


def _single_row(gather: IndexerGather, junk: int) -> None:
    """Sometimes one row is left, so that row strides are ignored too."""
    if junk % 3 == 2 and not gather.quantity:
        gather.index.num_tokens = min(gather.index.num_tokens, 1)
        gather.rows = dict.fromkeys(gather.rows, gather.index.num_tokens)


def _ignored_strides(case: Case, junk: int) -> Case:
    ignored = [name for name, (size, _) in STRIDES.items() if case.sizes[size] <= 1]
    return case.with_sizes(
        **{name: _STRIDE_JUNK[(junk + at) % len(_STRIDE_JUNK)] for at, name in enumerate(ignored)}
    )


def _key_types(case: Case, junk: int) -> Case:
    return replace(case, overrides={"dst_k.dtype": int(_KEY_TYPES[junk % 2])})


def _null_where_empty(case: Case, _: int) -> Case:
    empty = [name for name, needed in required_bytes(case).items() if needed == 0]
    kept = {name: place for name, place in case.placements.items() if name not in empty}
    return replace(case, placements=kept, overrides={f"{name}.data": 0 for name in empty})


def _absent_arguments(case: Case, junk: int) -> Case:
    absent = [name for name in ("seq_starts", "counts") if name not in case.values]
    told = {f"{name}.{part}": junk - 1 for name in absent for part in ("dtype", "rank")}
    return replace(case, overrides=told)


_BEFORE: Mapping[str, Callable[[IndexerGather, int], None]] = {
    "unread seq_starts": _unread_seq_starts,
    "ignored strides": _single_row,
}
_AFTER: Mapping[str, Callable[[Case, int], Case]] = {
    "ignored strides": _ignored_strides,
    "key types": _key_types,
    "null where empty": _null_where_empty,
    "absent arguments": _absent_arguments,
}


# ---- refusals ------------------------------------------------------------------------------------


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    sizes, rows = case.sizes, row_bytes(case.sizes)
    step = {name: sizes[name] if sizes[size] > 1 else 0 for name, (size, _) in STRIDES.items()}
    pages, tokens = sizes["num_pages"], sizes["num_tokens"]
    requests, width = sizes["num_requests"], sizes["table_width"]
    page = sizes["page_size_tokens"] * sum(rows.values())
    needed = {"src": (pages - 1) * step["page_stride_bytes"] + page if pages else 0}
    for name, row in rows.items():
        needed[name] = (tokens - 1) * step[f"{name}_row_stride_bytes"] + row if tokens else 0
    table = (requests - 1) * step["table_row_stride"] + width
    return {
        **needed,
        "block_table": 4 * table if requests and width else 0,
        "starts": 4 * (requests + sizes["has_terminal"]) if requests else 0,
        "seq_starts": 4 * requests if "seq_starts" in case.values else 0,
        "counts": 16 if "counts" in case.values else 0,
        **({HINTS: 4 * tokens} if HINTS in case.values else {}),
    }


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    sizes, needed, rows = case.sizes, required_bytes(case), row_bytes(case.sizes)
    types = {
        "src": (Dtype.U8, 3),
        "dst_k": (Dtype.U8, 2),
        "dst_scale": (Dtype.F32, 2),
        "block_table": (Dtype.I32, 2),
        "starts": (Dtype.I32, 1),
        "seq_starts": (Dtype.I32, 1),
        "counts": (Dtype.I64, 1),
    }
    if HINTS in case.values:
        types[HINTS] = (Dtype.I32, 1)
    arguments = {
        name: Argument(
            int(dtype),
            rank,
            needed[name],
            ALIGNMENTS.get(name, 4),
            is_absent=name in ("seq_starts", "counts") and name not in case.values,
            other_dtypes=_KEY_TYPES if name == "dst_k" else (),
        )
        for name, (dtype, rank) in types.items()
    }
    return Surface(
        case=case,
        arguments=arguments,
        destinations=("dst_k", "dst_scale"),
        strides=STRIDES,
        extents={
            "page_stride_bytes": ("num_pages",),
            "dst_k_row_stride_bytes": ("num_tokens", "dst_k_rows", "dst_scale_rows"),
            "dst_scale_row_stride_bytes": ("num_tokens", "dst_scale_rows", "dst_k_rows"),
            "table_row_stride": ("num_requests", "table_width"),
        },
        counts=("num_requests", "num_tokens", "num_pages", "table_width"),
        own=_own_lies(sizes, rows),
    )


def _own_lies(sizes: Mapping[str, int], rows: Mapping[str, int]) -> Mapping[str, list[Lie]]:
    head, tokens = sizes["head_dim"], max(sizes["num_tokens"], 1)
    page = sizes["page_size_tokens"] * sum(rows.values())
    pages = max(sizes["num_pages"], 2)
    told: dict[str, list[dict[str, int]]] = {
        "head_dim": [{"head_dim": v} for v in (head + 8, 0, -16, 1040, 2**32 + 16)],
        "quant_block": [{"quant_block": v} for v in (2 * head, 0, -1, 2**32 + 1)],
        "page_layout": [{"page_layout": v} for v in (2, -1, 2**32)],
        "page_size_tokens": [
            *({"page_size_tokens": v} for v in (0, 4097, -1, 2**31, 2**32 + 1)),
            *({"page_layout": 1, "page_size_tokens": v} for v in (1, 24, 4095)),
        ],
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
            for stride in (row - ALIGNMENTS[name], 0)
        ],
    }
    return {
        reason: [Lie(reason, overrides) for overrides in lies_of]
        for reason, lies_of in told.items()
    }
