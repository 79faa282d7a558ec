"""Gathers: what operations (a) to (d) have in common, from drawn choices to sizes that fit.

Choices are drawn independently of each other, from fixed ranges, and fitted afterwards: simplifying
one of them leaves the others as they are, and any combination is a case. What is derived: starts
from lengths, the table's width from the columns that are mapped, the number of pages from its
entries, coordinates at overflow scale from the boundary they are to reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Values
from pagefuzz.strategies import boundaries, hostility
from pagefuzz.strategies.batches import Batch, batches
from pagefuzz.strategies.boundaries import INT32_MAX, Crossing
from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.destinations import Destination, destinations
from pagefuzz.strategies.hostility import IndexValues
from pagefuzz.strategies.sequences import SequenceStarts, sequence_starts
from pagefuzz.strategies.strides import (
    MAX_PAGE_SIZE_TOKENS,
    PACKED_PAGE_STRIDES,
    CacheStrides,
    cache_strides,
    page_sizes,
    rounded_up,
)
from pagefuzz.strategies.tables import BlockTable, block_tables

#: Memory of one case, all buffers together: the default bound, and the least one to ask for.
#: By default two caches reach `boundaries.FAR_BYTES` together: all of it is address space, on a GPU
#: too, and memory only where something is compared.
DEFAULT_LIMIT_BYTES = 2**41 + 2**30
LEAST_LIMIT_BYTES = 2**26

#: What reaches a boundary -> weight. What counts in int32 does not get as far as the far one.
QUANTITIES = {
    "dst row": 15,  # row * row stride, by way of the first start
    "src page": 16,  # page * page stride, by way of the number of pages
    "packed page": 18,  # the same with page strides of about a million bytes
    "dst stride": 9,  # a row stride as large as the boundary allows
    "page stride": 9,  # a page stride of the boundary, its half, third or quarter
    "slot stride": 22,  # a slot stride likewise
    "table stride": 16,  # request * table row stride
    "column": 12,  # logical page, by way of seq_starts
    "token": 6,  # position in the sequence
    "row index": 4,  # num_tokens = 2^31 - 1
    "page id": 5,  # num_pages = 2^31 - 1
}

_ROW_BYTES = 2**16  # of mapped rows, usually
_MOST_ROW_BYTES = 2**18
_PAGE_BYTES = 2**18
#: Of a page of which few slots are mapped: the others are no memory.
_SPARSE_PAGE_BYTES = 2**21
_FEW_ROWS = 3
#: Of requests that fill whole tables, all of them together, beyond the first.
_TABLE_ROWS = 2**11
_POOL_BYTES = 2**18
_MOST_COLUMNS = 2**14  # of all requests together, outside overflow scale
#: At overflow scale: these keep rows countable, for grids that are sized from num_tokens.
_LEAST_ROW_STRIDE = 1024
_MOST_FAR_ROWS = 2**23
_MOST_PACKED_PAGES = 6
#: Rows that lie megabytes apart each cost a page of real memory.
_MOST_SCATTERED_ROWS = 32

_PAGES = skewed((60, (0,)), (22, range(1, 5)), (18, (-1, -2, -3)))
_SEEDS = st.sampled_from(range(256))
_AT_SCALE = {
    "in contract": weighted({False: 72, True: 28}),
    "hostile": weighted({False: 90, True: 10}),
}
_COUNTERS = weighted({None: 30, (0, 0): 50, (5, 7): 15, (-3, 2**40): 5})


@dataclass(frozen=True)
class GatherChoices:
    """Everything that is drawn of a gather, before any of it is fitted to the rest.

    entry_bytes  is rounded up to an element, and cut where pages or rows would grow too large
    pages        spare pages if positive; if negative, minus how many pages the whole table shares
    counters     initial values of the counter pair, None if it is absent
    is_production  whether sizes are those of a shape that is in use, which are not cut
    """

    page_size_tokens: int
    element_bytes: int
    entry_bytes: int
    batch: Batch
    sequence: SequenceStarts
    destination: Destination
    table: BlockTable
    pages: int
    cache: CacheStrides
    counters: tuple[int, int] | None
    seed: int
    crossing: Crossing | None
    hostile: tuple[hostility.Edit, ...]
    is_production: bool = False

    @property
    def most_page_bytes(self) -> int:
        """Of a page's entries, without what lies between them."""
        sparse = self.is_production or self.batch.longest <= _FEW_ROWS
        return _SPARSE_PAGE_BYTES if sparse else _PAGE_BYTES

    def without_whole_tables(self) -> GatherChoices:
        if self.batch.shape != "whole tables":
            return self
        return replace(self, batch=replace(self.batch, shape="one", request_count=1))


@dataclass(frozen=True)
class Form:
    """What an operation fixes of entries and rows.

    row_bytes        of every row; 0: a row is a copy of its entry, in size and element
    row_element_bytes, cache_element_bytes  what overflow scale counts in beside bytes; 0: as above
    fixed_entry      the entry has its size whatever it costs, and slots and pages lie at least
                     that far apart
    row_factor       by what the operation multiplies row strides
    """

    row_bytes: int = 0
    row_element_bytes: int = 0
    cache_element_bytes: int = 0
    fixed_entry: bool = False
    row_factor: int = 1


COPY = Form()


@st.composite
def gather_choices(
    draw: st.DrawFn,
    element_sizes: SearchStrategy[int],
    entry_sizes: SearchStrategy[int],
    *,
    case_class: str,
    limit_bytes: int,
    crossings: SearchStrategy[Crossing] | None = None,
) -> GatherChoices:
    """Choices for a case of `case_class`, about 25 draws.

    `crossings` are those of all `QUANTITIES` if None.

    Overflow scale is reached by one in four cases in contract and one in ten hostile ones, if
    `limit_bytes` allows any. Shrinks towards ordinary scale, then in the order of the fields.
    """
    crossing = None
    if case_class in _AT_SCALE and boundaries.boundaries_within(_room(limit_bytes), 1):
        of = _CROSSINGS if crossings is None else crossings
        crossing = draw(of) if draw(_AT_SCALE[case_class]) else None
    page_size_tokens = draw(page_sizes())
    event(f"page size: {_magnitude(page_size_tokens)}")
    return GatherChoices(
        page_size_tokens=page_size_tokens,
        element_bytes=draw(element_sizes),
        entry_bytes=draw(entry_sizes),
        batch=draw(_BATCHES),
        sequence=draw(_SEQUENCES),
        destination=draw(_DESTINATIONS),
        table=draw(_TABLES),
        pages=draw(_PAGES),
        cache=draw(_CACHES),
        counters=draw(_COUNTERS),
        seed=draw(_SEEDS),
        crossing=crossing,
        hostile=draw(_EDITS) if case_class == "hostile" else (),
    )


_BATCHES, _SEQUENCES, _DESTINATIONS = batches(), sequence_starts(), destinations()
_TABLES, _CACHES, _EDITS = block_tables(), cache_strides(), hostility.edits()
_CROSSINGS = boundaries.crossings(QUANTITIES)


def _magnitude(page_size_tokens: int) -> str:
    return next(
        name
        for top, name in ((1, "1"), (8, "2..8"), (64, "9..64"), (4096, "65..4096"))
        if page_size_tokens <= top
    )


def _room(limit_bytes: int) -> int:
    """What a boundary may take of the limit; the rest is for everything around it."""
    return limit_bytes - LEAST_LIMIT_BYTES


class Gather:
    """Sizes and index values fitted to each other.

    index                  starts, seq_starts, table sizes, num_tokens, num_pages
    table                  recipe of the table, edits included
    element_bytes, entry_bytes, page_stride_bytes, slot_stride_bytes
    dst_rows, dst_row_stride_bytes
    most_rows              that one request may ask for, or about all of them together
    """

    most_rows = 2**31

    def __init__(self, choices: GatherChoices, limit_bytes: int, form: Form = COPY) -> None:
        self.choices = choices
        self.form = form
        self.limit_bytes = limit_bytes
        self.element_bytes = choices.element_bytes
        self.quantity = ""
        crossing = choices.crossing
        if crossing is not None:
            # A table's elements are int32, whatever those of the cache.
            unit, factor = form.cache_element_bytes or self.element_bytes, 1
            if crossing.quantity in ("table stride", "column"):
                unit = 4
            elif crossing.quantity in ("dst row", "dst stride"):
                unit, factor = self.row_element_bytes, form.row_factor
            boundary = crossing.boundary(_room(limit_bytes), unit, factor=factor)
            if boundary is not None:
                self.quantity, self.boundary, self.crossing = crossing.quantity, boundary, crossing
                self.choices = choices.without_whole_tables()  # their rows would lie far apart
        self._fit_entry()
        self._fit_batch()
        self._fit_rows()
        hostility.edit_starts(self.index, choices.hostile)
        self._fit_table()
        self._fit_pages()
        hostility.edit_sized(self.index, choices.hostile)
        self.table = Values(
            self.contents.recipe, self.contents.parameters, dict(self.index.table_edits)
        )

    @property
    def row_element_bytes(self) -> int:
        return self.form.row_element_bytes or self.element_bytes

    # ---- entry and batch -----------------------------------------------------------------------

    def _fit_entry(self) -> None:
        choices, unit = self.choices, self.element_bytes
        size = self._drawn_page_size()
        entry = rounded_up(choices.entry_bytes, unit)
        if self.quantity == "dst row":
            entry = max(entry, rounded_up(_LEAST_ROW_STRIDE, unit))
        elif self.quantity == "row index":
            entry = unit
            if 2**31 * unit > _room(self.limit_bytes):
                entry = unit = self.element_bytes = 1
        elif self.quantity == "slot stride":
            size = max(size, 2)
        elif self.quantity == "column":
            size = 1
        elif self.quantity == "token":
            size = max(size, 2)
            if 4 * (2**31 // size) > _room(self.limit_bytes):
                size = MAX_PAGE_SIZE_TOKENS
        most = max(unit, choices.most_page_bytes // size // unit * unit)
        if self.quantity == "dst row":
            size = min(size, _PAGE_BYTES // entry)
        elif not self.form.fixed_entry:
            entry = min(entry, most)
        self.page_size_tokens, self.entry_bytes = size, entry

    def _drawn_page_size(self) -> int:
        """As it was drawn; less where requests are to fill many pages."""
        size, batch = self.choices.page_size_tokens, self.choices.batch
        if batch.shape == "whole tables":
            rows = self._most_table_rows() // batch.table_pages
            size = min(size, max(2, rows))  # of one slot, no page is filled in part
        return size

    def _most_table_rows(self) -> int:
        if not self.form.fixed_entry:
            return _TABLE_ROWS
        return min(_TABLE_ROWS, _MOST_ROW_BYTES // self.form.row_bytes)

    def _fit_batch(self) -> None:
        choices, size = self.choices, self.page_size_tokens
        max_rows = min(max(1, _ROW_BYTES // self._row_bytes()), self.most_rows)
        if self.quantity in ("dst stride", "slot stride"):
            max_rows = min(max_rows, _MOST_SCATTERED_ROWS)
        lengths = choices.batch.lengths(size, max_rows)
        if self.quantity:
            if self.quantity in ("column", "token"):
                lengths = lengths[:1]
            least = 2 if self.quantity == "table stride" else 1
            lengths += [1] * (least - len(lengths))
            lengths[-1] = max(lengths[-1], 1)
            if self.quantity == "dst stride" and self.crossing.extra:
                lengths = [1]  # behind one row: the stride itself lies at the boundary
            if self.quantity == "token" and not self.crossing.below:
                lengths[-1] = max(lengths[-1], 2)
        if choices.batch.shape == "whole tables":
            while len(lengths) > 1 and sum(lengths) > self._most_table_rows():
                lengths.pop()
        too_large = (total := sum(lengths)) * self.entry_bytes > _MOST_ROW_BYTES
        if too_large and not self.quantity and not self.form.fixed_entry:
            unit = self.element_bytes
            self.entry_bytes = max(unit, _MOST_ROW_BYTES // total // unit * unit)
        self.lengths = lengths
        per_request = max(4, _MOST_COLUMNS // max(1, len(lengths)))
        self.seq_starts = choices.sequence.values(lengths, size, per_request)
        if self.seq_starts is not None and choices.batch.shape == "whole tables":
            self.seq_starts = [start // size * size for start in self.seq_starts]
        if self.quantity == "slot stride":
            self.seq_starts = [-length % size for length in lengths]
        elif self.quantity == "column":
            first = self.boundary.first_index(4)
            rows = lengths[0]
            # Past the last position that int32 holds there is only the side below.
            first = min(first - rows if self.crossing.below else first, INT32_MAX - rows)
            self.seq_starts = [first]
        elif self.quantity == "token":
            rows = lengths[0]
            at_most = rows if self.crossing.below else rows - 1
            before = rows if self.crossing.below else min(1 + self.crossing.extra, at_most)
            self.seq_starts = [2**31 - before]

    # ---- rows ----------------------------------------------------------------------------------

    def _row_bytes(self) -> int:
        """The least row stride; what a destination holds of an entry."""
        return self.form.row_bytes or self.entry_bytes

    def _fit_rows(self) -> None:
        destination, total = self.choices.destination, sum(self.lengths)
        unit = self.row_element_bytes
        row_stride = self.choices.cache.row_stride(
            self._row_bytes(), unit, destination.row_padding_elements
        )
        first, spare = destination.first_start, destination.spare_rows
        extra = destination.extra_tokens
        if self.quantity == "dst row":
            extra = max(extra, 1 - total)
            least = rounded_up(self.boundary.first_index(_MOST_FAR_ROWS), 8)
            row_stride = max(row_stride, least)
            boundary_row, step = self.boundary.first_index(row_stride), self.crossing.extra
            first = boundary_row + step
            if self.crossing.below:  # with a step, the boundary lies inside the batch
                rows = total + (min(extra, 0) if destination.has_terminal else extra)
                first = boundary_row - rows + min(step, rows - 1)
        elif self.quantity:
            # The last row is where the boundary is reached: it must be mapped, and be the last.
            extra = max(extra, 0) if destination.has_terminal else 0
        if self.quantity == "row index":
            row_stride, extra, spare = self._row_bytes(), 0, 0
            first = INT32_MAX - total
        elif self.quantity == "dst stride":
            extra, spare = 0, 0
            if first + total < 2:
                first = 1
            row_stride = self._stride_at_boundary(first + total - 1, unit)
        starts = [first]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        num_tokens = max(0, starts[-1] + extra)
        if not destination.has_terminal:
            starts.pop()
        self.dst_rows = num_tokens + spare
        self.dst_row_stride_bytes = row_stride
        self.index = IndexValues(
            num_requests=len(self.lengths),
            num_tokens=num_tokens,
            page_size_tokens=self.page_size_tokens,
            starts=starts,
            seq_starts=self.seq_starts,
        )

    def leave_one_row(self) -> None:
        """One row at most, at ordinary scale."""
        if not self.quantity:
            self.index.num_tokens = min(self.index.num_tokens, 1)
            self.dst_rows = self.index.num_tokens

    def _stride_at_boundary(self, index: int, alignment_bytes: int) -> int:
        """The stride that puts `index` just past the boundary, or just below it."""
        stride = self.boundary.stride_bytes(index, alignment_bytes)
        if self.crossing.below:
            return stride - alignment_bytes
        return stride + self.crossing.extra * alignment_bytes

    # ---- table and pages -----------------------------------------------------------------------

    def _fit_table(self) -> None:
        index, table = self.index, self.choices.table
        needed = index.mapped_columns()
        if self.choices.hostile and needed > self._most_columns():
            needed = 8  # hostile starts reach far: a wide table would only hide it
        width = min(needed + table.spare_columns, INT32_MAX)
        index.table_width = hostility.narrowed(width, self.choices.hostile)
        index.table_row_stride = table.row_stride_elements(index.table_width)
        if self.quantity == "table stride":
            index.table_row_stride = self._stride_at_boundary(index.num_requests - 1, 4) // 4
        self.contents = table.values()

    def _most_columns(self) -> int:
        if self.quantity in ("column", "token"):
            return _room(self.limit_bytes) // 4
        return _MOST_COLUMNS // max(1, self.index.num_requests) + sum(self.lengths)

    def _fit_pages(self) -> None:
        choices, index, size = self.choices, self.index, self.page_size_tokens
        unit, entry, strides = self.element_bytes, self.entry_bytes, choices.cache
        cells = index.num_requests * index.table_width
        most = max(2, _POOL_BYTES // (size * entry))
        if strides.kind == "packed pool":
            most = min(most, _MOST_PACKED_PAGES)
        pages = min(cells, most)
        if choices.pages >= 0:
            pages += choices.pages
        elif cells:
            pages = min(pages, -choices.pages)
        page_stride, slot_stride = strides.resolve(entry, unit, size, pages)
        if self.quantity in ("src page", "packed page"):
            page_stride, slot_stride = self._paged(strides)
            boundary_page = self.boundary.first_index(page_stride)
            pages = boundary_page + (0 if self.crossing.below else 1)
            if self.quantity == "src page":
                pages += self.crossing.extra
        elif self.quantity == "page stride":
            last = 1 + self.crossing.extra
            pages, slot_stride = last + 1, entry
            page_stride = self.boundary.stride_bytes(last, unit)
            page_stride -= unit if self.crossing.below else 0
        elif self.quantity == "slot stride":
            slot_stride, page_stride = self._stride_at_boundary(size - 1, unit), entry
        elif self.quantity == "page id":
            pages = INT32_MAX - self.crossing.extra // 2
            fits = 2**31 * unit <= _room(self.limit_bytes)
            page_stride = unit if fits and not self.crossing.below else 0
        if self.quantity in ("src page", "packed page", "page stride", "page id"):
            # Counted down from the last page: the table's first entries lie at the boundary.
            self.contents = Values("reversed")
            self._put_first(pages - 1)
        least = entry if self.form.fixed_entry else 0
        index.num_pages = pages
        self.page_stride_bytes = max(page_stride, least)
        self.slot_stride_bytes = max(slot_stride, least)

    def _put_first(self, page: int) -> None:
        """Makes the first page that is mapped `page`, where the table's order does not."""
        index, live = self.index, self.index.spans()
        if not live:
            return
        column = live[0].first_token // self.page_size_tokens
        if 0 <= column < index.table_width:
            cell = index.cell(live[0].request, column)
            if cell:
                index.table_edits[cell] = page

    def _paged(self, strides: CacheStrides) -> tuple[int, int]:
        """Page and slot stride for a boundary that is reached by the number of pages."""
        unit, entry, size = self.element_bytes, self.entry_bytes, self.page_size_tokens
        if strides.kind in ("slots first", "overlapping"):
            strides = CacheStrides()
        page_stride, slot_stride = strides.resolve(entry, unit, size, 1)
        if self.quantity == "packed page":
            packed = PACKED_PAGE_STRIDES[self.crossing.extra % len(PACKED_PAGE_STRIDES)]
            page_stride = max(packed, page_stride)
        # num_pages stays below 2^30, whatever the boundary.
        least = self.boundary.first_index(2**30)
        return max(page_stride, rounded_up(least, unit)), slot_stride
