"""Round trips: a writer's case as its own strategy draws it, perhaps moves of its pages, gathers.

A writer comes with the views that readers may take of its caches, a reader with the sizes that
follow from a view. A pair is two names; what is read is drawn here, alike for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.round_trip import Gather, RoundTrip, pair_name
from pagefuzz.strategies import registry
from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES, LEAST_LIMIT_BYTES
from pagefuzz.strategies.hints import hints
from pagefuzz.strategies.hostility import IndexValues
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.quantising import input_dtypes, scales
from pagefuzz.strategies.round_trip_moves import moves
from pagefuzz.strategies.round_trip_views import (
    CODES,
    ROPE,
    WHOLE_CELLS,
    WRITERS,
    View,
    as_upconverted,
    distinct,
    literal_of,
)

#: Pools of several layers: how many, which of them is this one -> weight.
LAYERS = {(1, 0): 70, (2, 1): 8, (3, 1): 10, (5, 4): 6, (4, 0): 6}
#: What a reader reads -> weight.
ORDERS = {"as written": 40, "reversed": 20, "shuffled": 40}

_MOST_PAGES = 12
_MOST_ROWS = 400
_MOST_BYTES = 2**18  # of all rows
_MOST_INTERPRETED_ROWS = 12  # of a Triton kernel: each takes a millisecond or two
_POOL_BYTES = 2**26  # of a pool of several layers
_ROWS = ("dst_rows", "dst_k_rows", "dst_scale_rows")
_LONG_PAGE = 64  # tokens: of longer pages only what is near written slots is read

_LAYERS, _ORDERS = weighted(LAYERS), weighted(ORDERS)
_PAGES_EACH = skewed((45, (1,)), (55, range(2, 5)))
_SPARE_PAGES = skewed((60, (0,)), (40, (1, 2)))
_SEEDS = st.sampled_from(range(97))
_FEW = tuple(skewed((60 + nth, (0,)), (40, (1, 2, 3))) for nth in range(5))
_STARTS = weighted({"absent": 35, "in a page": 40, "past pages": 25})
_HOLES = weighted({"none": 84, "a page": 16})
_EMPTY = weighted({"none": 80, "first": 7, "between": 7, "last": 6})
_TERMINAL = weighted({1: 61, 0: 39})
_PADDING = skewed((64, (0,)), (36, range(1, 9)))
_OWN_SCALE = weighted({True: 84, False: 17})
_WIDE = weighted({True: 66, False: 35})
_SCALES, _RESULTS = scales(), input_dtypes()


@dataclass(frozen=True)
class Reading:
    """Which rows a gather asks for.

    starts      with the terminal value where there is one
    table       page ids, a row a request
    seq_starts  None if absent
    """

    starts: tuple[int, ...]
    table: tuple[tuple[int, ...], ...]
    seq_starts: tuple[int, ...] | None
    num_tokens: int
    has_terminal: int
    spare_columns: int
    spare_rows: int
    num_pages: int

    def values(self) -> dict[str, Values]:
        found = {
            "block_table": Values.literal(*(page for row in self.table for page in row)),
            "starts": Values.literal(*self.starts),
        }
        if self.seq_starts is not None:
            found["seq_starts"] = Values.literal(*self.seq_starts)
        return found

    def sizes(self, writer: Case) -> dict[str, int]:
        width = len(self.table[0]) if self.table else 0
        return {
            "num_requests": len(self.table),
            "num_tokens": self.num_tokens,
            "page_size_tokens": writer.sizes["page_size_tokens"],
            "num_pages": self.num_pages,
            "table_width": width,
            "table_row_stride": width + self.spare_columns,
            "has_terminal": self.has_terminal,
        }


@dataclass(frozen=True)
class Own:
    """What a reader has beside its rows: sizes, alignments of its destinations in bytes, values."""

    sizes: Mapping[str, int]
    alignments: Mapping[str, int]
    values: Mapping[str, Values] = field(default_factory=dict)


# ---- readers -------------------------------------------------------------------------------------


def _copy(draw: st.DrawFn, case: Case, view: View, reading: Reading) -> Own:
    unit = view.unit if draw(_WIDE) else 1
    padding = draw(_PADDING) * unit
    sizes = {
        "entry_bytes": view.entry_bytes,
        "element_bytes": unit,
        "dst_row_stride_bytes": view.entry_bytes + padding,
    }
    return Own(sizes, {"dst": unit})


def _dequantise(draw: st.DrawFn, case: Case, view: View, reading: Reading) -> Own:
    """By the scale that the writer had, one time in six by another."""
    elements, values = view.entry_bytes // view.unit, {}
    result = view.dtype
    if view.scale is not None:
        result = draw(_RESULTS)
        values["scale"] = Values.literal(view.scale if draw(_OWN_SCALE) else draw(_SCALES))
    unit = Dtype(result).size_bytes
    sizes = {
        "entry_elements": elements,
        "kv_dtype": view.kv_dtype,
        "dst_dtype": result,
        "dst_row_stride_bytes": (elements + draw(_PADDING)) * unit,
    }
    return Own(sizes, {"dst": unit}, values)


def _upconvert(draw: st.DrawFn, case: Case, view: View, reading: Reading) -> Own:
    return Own({"dst_row_stride_bytes": 2 * (CODES + ROPE + draw(_PADDING))}, {"dst": 2})


def _indexer(draw: st.DrawFn, case: Case, view: View, reading: Reading) -> Own:
    keys = case.sizes["head_dim"]
    sizes = {name: case.sizes[name] for name in ("head_dim", "quant_block", "page_layout")}
    sizes["dst_k_row_stride_bytes"] = keys + draw(_PADDING)
    sizes["dst_scale_row_stride_bytes"] = view.entry_bytes - keys + 4 * draw(_PADDING)
    return Own(sizes, {"dst_k": 1, "dst_scale": 4})


def _hinted_indexer(draw: st.DrawFn, case: Case, view: View, reading: Reading) -> Own:
    """Each row that a request covers has a right hint."""
    own = _indexer(draw, case, view, reading)
    index = IndexValues(
        len(reading.table),
        reading.num_tokens,
        case.sizes["page_size_tokens"],
        list(reading.starts),
        None if reading.seq_starts is None else list(reading.seq_starts),
    )
    return replace(own, values={"token_to_seq": hints(draw, index, hostile=False)})


Reads = Callable[[st.DrawFn, Case, View, Reading], Own]

#: By operation, of the writer's case, a view of it and the rows that are asked for.
READERS: Mapping[str, Reads] = {
    "cp_gather_cache": _copy,
    "gather_and_maybe_dequant_cache": _dequantise,
    "cp_gather_and_upconvert_fp8_kv_cache": _upconvert,
    "cp_gather_indexer_k_quant_cache": _indexer,
    "cp_gather_indexer_k_quant_cache_hinted": _hinted_indexer,
}

#: Readers that are interpreted on the host.
_INTERPRETED = ("cp_gather_indexer_k_quant_cache_hinted",)

#: Readers whose records are wider than those that writers are drawn with -> at most so many times:
#: 656 bytes in place of 132. A cache grows with them.
_WIDENED = {"cp_gather_and_upconvert_fp8_kv_cache": 5}

#: Every (writer, reader); those of which both are there are checked.
PAIRS = (
    ("concat_and_cache_mla", "cp_gather_cache"),
    ("concat_and_cache_mla", "gather_and_maybe_dequant_cache"),
    ("reshape_and_cache_flash", "cp_gather_cache"),
    ("reshape_and_cache_flash", "gather_and_maybe_dequant_cache"),
    ("concat_and_cache_ds_mla", "cp_gather_cache"),
    ("concat_and_cache_ds_mla", "cp_gather_and_upconvert_fp8_kv_cache"),
    ("indexer_k_quant_and_cache", "cp_gather_indexer_k_quant_cache"),
    ("indexer_k_quant_and_cache", "cp_gather_indexer_k_quant_cache_hinted"),
)


def pairs() -> tuple[str, ...]:
    """Names of all pairs, "WRITER/READER"."""
    there = registry.operations()
    return tuple(pair_name(*pair) for pair in PAIRS if set(pair) <= set(there))


# ---- trips ---------------------------------------------------------------------------------------


def round_trips(pair: str, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> SearchStrategy[RoundTrip]:
    """Round trips of one pair, in contract but for table entries of -1; about 40 draws each.

    limit_bytes  bound on the memory of the writer's buffers together; 64 MiB leaves out what lies
                 at 32-bit boundaries

    Shrinks as the writer's cases do, then towards one request of one row. Raises
    `InvalidArgument` for an unknown pair.
    """
    if pair not in pairs():
        raise InvalidArgument(f"pair={pair!r} must be one of {', '.join(pairs())}")
    writer, reader = pair.split("/")
    return _round_trips(writer, reader, limit_bytes)


@st.composite
def _round_trips(draw: st.DrawFn, writer: str, reader: str, limit_bytes: int) -> RoundTrip:
    if reader in _WIDENED:
        limit_bytes = max(LEAST_LIMIT_BYTES, limit_bytes // _WIDENED[reader])
    case = draw(registry.cases_for(writer, hostile=False, refused=False, limit_bytes=limit_bytes))
    if writer in WHOLE_CELLS:
        case = distinct(case)
    if reader in _WIDENED:
        case = as_upconverted(case)
    case = _in_layers(case, *draw(_LAYERS))
    views = WRITERS[writer](draw, case)
    written = _written(case)
    arranged = moves(draw, case, list(written))
    reading = _reading(
        draw,
        case,
        arranged.written(written),
        num_pages=arranged.num_pages,
        row_bytes=sum(view.entry_bytes for view in views),
        most_rows=_MOST_INTERPRETED_ROWS if reader in _INTERPRETED else _MOST_ROWS,
    )
    gathers = []
    for first in views if len(views) < 3 else _alike(draw, views):
        view = arranged.seen(first)
        own = READERS[reader](draw, case, view, reading)
        sizes = {
            **reading.sizes(case),
            **dict.fromkeys(_ROWS, reading.num_tokens + reading.spare_rows),
            "page_stride_bytes": view.page_stride_bytes,
            "slot_stride_bytes": view.slot_stride_bytes,
            **own.sizes,
        }
        placed = draw(placements(own.alignments, next(iter(own.alignments))))
        gathers.append(
            Gather(
                Case(
                    reader,
                    {name: sizes[name] for name in operation(reader).sizes},
                    {**reading.values(), **own.values},
                    placed,
                    seed=case.seed,
                ),
                view.cache,
                view.first_byte,
                arranged.second,
            )
        )
    return RoundTrip(case, tuple(gathers), arranged.moves)


def _alike(draw: st.DrawFn, views: Sequence[View]) -> Sequence[View]:
    """Of many views, a few: each costs draws and a launch."""
    first = draw(_SEEDS) % len(views)
    return [views[(first + step) % len(views)] for step in range(min(3, len(views)))]


def _in_layers(case: Case, layers: int, layer: int) -> Case:
    """The caches as one layer of pools of several, whose pages lie side by side; as they are where
    pages are not the outermost dimension, or the pool would be too large."""
    strides = [name for name in case.sizes if name.endswith("page_stride_bytes")]
    caches = [name.replace("page_stride_bytes", "cache").removeprefix("_") for name in strides]
    pages, step = case.sizes["num_pages"], [case.sizes[name] for name in strides]
    if layers == 1 or pages < 2 or len(set(step)) > 1 or step[0] * layers * pages > _POOL_BYTES:
        return case
    inner = [
        (count, case.sizes[name.replace("page_stride", part)])
        for name in strides
        for part, count in (
            ("slot_stride", case.sizes["page_size_tokens"]),
            ("head_stride", case.sizes.get("num_heads", 1)),
        )
        if count > 1 and name.replace("page_stride", part) in case.sizes
    ]
    if any(count * stride > step[0] for count, stride in inner):
        return case
    event(f"layers: {layers}")
    placed = dict(case.placements)
    for name in caches:
        own = case.placement(name)
        if own.over is None:
            placed[name] = replace(
                own,
                before_bytes=own.before_bytes + layer * step[0],
                after_bytes=own.after_bytes + layers * step[0],
            )
    wider = case.with_sizes(**dict.fromkeys(strides, layers * step[0]))
    return replace(wider, placements=placed)


def _written(case: Case) -> dict[int, tuple[int, int]]:
    """Page -> first and last offset that a token goes to."""
    size, num_pages = case.sizes["page_size_tokens"], case.sizes["num_pages"]
    span: dict[int, tuple[int, int]] = {}
    for slot in literal_of(case, "slot_mapping"):
        if 0 <= slot < num_pages * size:
            page, offset = divmod(slot, size)
            low, high = span.get(page, (offset, offset))
            span[page] = min(low, offset), max(high, offset)
    return span


def _reading(
    draw: st.DrawFn,
    case: Case,
    span: Mapping[int, tuple[int, int]],
    *,
    num_pages: int,
    row_bytes: int,
    most_rows: int,
) -> Reading:
    """Rows near what was written, in pages of any order, and some that nobody wrote.

    span       page -> first and last offset of what tokens stored and now lies there
    num_pages  of the cache that is read
    """
    size = case.sizes["page_size_tokens"]
    pages = list(span)[:_MOST_PAGES]
    spare = (page for page in range(min(num_pages, 2 * _MOST_PAGES)) if page not in span)
    unwritten = max(draw(_SPARE_PAGES), 0 if pages else 1)
    pages += [page for page, _ in zip(spare, range(unwritten), strict=False)]
    order, seed = draw(_ORDERS), draw(_SEEDS)
    if order == "reversed":
        pages.reverse()
    elif order == "shuffled":
        pages.sort(key=lambda page: (page * 0x9E3779B1 + (seed + 1) * 0x85EBCA77) % 2**32)
    each = draw(_PAGES_EACH) if size <= _LONG_PAGE else 1
    chunks = [pages[at : at + each] for at in range(0, len(pages), each)]
    kind = draw(_STARTS)
    if size > _LONG_PAGE and kind == "absent":
        kind = "in a page"
    event(f"seq_starts: {kind}")
    lead, before, behind, spare_rows, spare_columns = (draw(few) for few in _FEW)
    left = min(most_rows, max(1, _MOST_BYTES // max(row_bytes, 1)))
    rows: list[tuple[list[int], int, int]] = []  # table row, seq_start, length
    for chunk in chunks:
        first, last = span.get(chunk[0], (0, 0)), span.get(chunk[-1], (0, size - 1))
        skipped = 0 if kind == "absent" else max(0, first[0] - before)
        end = min(last[1] + 1 + behind, size)
        length = min(left, max(0, (len(chunk) - 1) * size + end - skipped))
        if kind == "past pages":
            chunk, skipped = [chunk[-1], *chunk], skipped + size
        rows.append((chunk, skipped, length))
        left -= length
    if draw(_HOLES) == "a page" and rows:
        event("table: a page of padding")
        rows[seed % len(rows)][0][-1] = -1
    empty = draw(_EMPTY)
    if empty != "none" and rows:
        where = {"first": 0, "between": len(rows) // 2, "last": len(rows)}[empty]
        rows.insert(where, ([0], 0, 0))
    width = max((len(chunk) for chunk, _, _ in rows), default=0)
    has_terminal = draw(_TERMINAL)
    starts = [lead]
    for _, _, length in rows:
        starts.append(starts[-1] + length)
    num_tokens = starts[-1] + (spare_rows if has_terminal else 0)
    return Reading(
        starts=tuple(starts if has_terminal else starts[:-1]),
        table=tuple(tuple(chunk + [0] * (width - len(chunk))) for chunk, _, _ in rows),
        seq_starts=None if kind == "absent" else tuple(skipped for _, skipped, _ in rows),
        num_tokens=num_tokens,
        has_terminal=has_terminal,
        spare_columns=spare_columns,
        spare_rows=spare_columns,
        num_pages=num_pages,
    )
