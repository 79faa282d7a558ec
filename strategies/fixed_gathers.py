"""Fixed cases of gathers that nobody reported, and that are drawn too seldom for a short campaign.

Many requests cost time that a campaign has once, not in every sixteenth case. Guards that a path of
its own for a shape in use may lack are as many as there are shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.batches import MOST_REQUESTS, TABLE_PAGES

Made = Callable[[], Case]
#: Sizes that one operation has beside those of every gather: of rows, and of pages.
OwnSizes = Callable[[int, int], Mapping[str, int]]

_SOME_REQUESTS = 2049
#: More than CTAs fit on the y or z axis of a grid; on the host a launch takes seconds.
_GRID_LIMIT = 65_535
_HALF = 0x3F000000  # fp32 bits of 1/2


# ---- what operations have of their own -----------------------------------------------------------


def copied(entry_bytes: int, element_bytes: int) -> OwnSizes:
    """(a): dense entries."""
    return lambda rows, page: {
        "page_stride_bytes": page * entry_bytes,
        "slot_stride_bytes": entry_bytes,
        "dst_rows": rows,
        "dst_row_stride_bytes": entry_bytes,
        "entry_bytes": entry_bytes,
        "element_bytes": element_bytes,
    }


def dequantised(kv_dtype: int, dst_dtype: int, elements: int) -> OwnSizes:
    """(b): dense entries of as many values."""
    row = Dtype(dst_dtype).size_bytes * elements
    entry = elements if kv_dtype else row
    return lambda rows, page: {
        "page_stride_bytes": page * entry,
        "slot_stride_bytes": entry,
        "dst_rows": rows,
        "dst_row_stride_bytes": row,
        "entry_elements": elements,
        "kv_dtype": kv_dtype,
        "dst_dtype": dst_dtype,
    }


def upconverted(record_bytes: int, row_bytes: int) -> OwnSizes:
    """(c): dense records."""
    return lambda rows, page: {
        "page_stride_bytes": page * record_bytes,
        "slot_stride_bytes": record_bytes,
        "dst_rows": rows,
        "dst_row_stride_bytes": row_bytes,
    }


def indexed(head_dim: int) -> OwnSizes:
    """(d): dense flat pages, a scale a token."""
    return lambda rows, page: {
        "page_stride_bytes": page * (head_dim + 4),
        "dst_k_rows": rows,
        "dst_k_row_stride_bytes": head_dim,
        "dst_scale_rows": rows,
        "dst_scale_row_stride_bytes": 4,
        "head_dim": head_dim,
        "quant_block": head_dim,
        "page_layout": 0,
    }


def _case(
    operation: str,
    own: OwnSizes,
    starts: Values,
    *,
    requests: int,
    rows: int,
    width: int,
    page: int = 1,
    pages: int = 4,
    table: Values | None = None,
    seq_starts: Values | None = None,
) -> Case:
    sizes = own(rows, page)
    values = {"block_table": table or Values("shared"), "starts": starts}
    if seq_starts is not None:
        values["seq_starts"] = seq_starts
    if "kv_dtype" in sizes:
        values["scale"] = Values.literal(_HALF)
    values["counts"] = Values.literal(0, 0)
    shared = {
        "num_requests": requests,
        "num_tokens": rows,
        "page_size_tokens": page,
        "num_pages": pages,
        "table_width": width,
        "table_row_stride": width,
    }
    return Case(operation, {**shared, **sizes, "has_terminal": 1}, values)


# ---- long batches --------------------------------------------------------------------------------


def _one_row_each(operation: str, own: OwnSizes) -> Case:
    ramp = Values("ramp", {"first": 0, "step": 1})
    return _case(operation, own, ramp, requests=MOST_REQUESTS, rows=MOST_REQUESTS, width=1)


def _rows_of_the_last(operation: str, own: OwnSizes, requests: int, width: int = 2) -> Case:
    """Two rows, in the last columns of the last request; the others have none."""
    return _case(
        operation,
        own,
        Values("constant", {"value": 0}, {requests: 2}),
        requests=requests,
        rows=2,
        width=width,
        seq_starts=Values("constant", {"value": 0}, {requests - 1: width - 2}),
    )


def long_batches(operation: str, own: OwnSizes, *, quick: bool = True) -> Mapping[str, Made]:
    """Requests that fill whole tables; 1,025 whose table has 2^31 columns and more, all rows
    together. Of a `quick` operation, one that takes less than 0.1 s a launch on the host, 1,025 of
    a row each, and 2,049, too."""
    wide = 2**31 // (MOST_REQUESTS - 1)
    found: dict[str, Made] = {
        "28-whole-tables": partial(whole_tables, operation, own),
        "many-columns": partial(_rows_of_the_last, operation, own, MOST_REQUESTS, wide),
    }
    if quick:
        few = partial(_rows_of_the_last, operation, own, _SOME_REQUESTS)
        found[f"many-{MOST_REQUESTS}-requests"] = partial(_one_row_each, operation, own)
        found[f"many-{_SOME_REQUESTS}-requests"] = few
    return found


def more_requests(operation: str, own: OwnSizes) -> Mapping[str, Made]:
    """Cases that are launched on a GPU alone: on the host a launch of theirs takes too long."""
    return {
        f"many-{requests}-requests": partial(_rows_of_the_last, operation, own, requests)
        for requests in (16_384, _GRID_LIMIT, _GRID_LIMIT + 1)
    }


def more_rows(operation: str, own: OwnSizes) -> Mapping[str, Made]:
    """Report 30: rows on the y axis of a grid. For a kernel that runs a program for each row."""

    def case(rows: int) -> Case:
        page = 4096
        starts = Values.literal(0, rows)
        width = -(-rows // page)
        return _case(operation, own, starts, requests=1, rows=rows, width=width, page=page)

    return {f"30-{rows}-rows": partial(case, rows) for rows in (_GRID_LIMIT, _GRID_LIMIT + 1)}


def whole_tables(operation: str, own: OwnSizes) -> Case:
    """Report 28 and beyond: requests of as many pages as `batches.TABLE_PAGES` has, of two tokens
    each; the last page of each request has one."""
    starts = [0, *accumulate(2 * pages - 1 for pages in TABLE_PAGES)]
    width = max(TABLE_PAGES)
    return _case(
        operation,
        own,
        Values.literal(*starts),
        requests=len(TABLE_PAGES),
        rows=starts[-1],
        width=width,
        page=2,
        pages=width,
        table=Values("permuted", {"seed": 1}),
    )


def width_528(operation: str) -> Case:
    """Report 27 on a copy: entries of 528 bytes, which tiles of 128 do not end with."""
    starts = Values.literal(0, 2)
    return _case(operation, copied(528, 1), starts, requests=1, rows=2, width=2, page=2)


# ---- shapes in use -------------------------------------------------------------------------------


def _hostile(operation: str, own: OwnSizes, page: int) -> Case:
    """Rows on both sides of a page's end, a padding page, a page that is none, a sequence start
    below 0, rows on both sides of the table's end, behind which there is nothing."""
    pages = 4
    return _case(
        operation,
        own,
        Values.literal(0, 2, 3, 4, 5, 8),
        requests=5,
        rows=8,
        width=2,
        page=page,
        pages=pages,
        table=Values.literal(0, 1, -1, 2, pages, 3, 2, 3, 0, 1),
        seq_starts=Values.literal(page - 1, 0, 0, -1, 2 * page - 2),
    )


def hostile_productions(
    operation: str, shapes: Iterable[tuple[str, int, OwnSizes]]
) -> Mapping[str, Made]:
    """A hostile case of each shape: (name, tokens of a page, what it has of its own)."""
    return {
        f"production-{name}": partial(_hostile, operation, own, page) for name, page, own in shapes
    }
