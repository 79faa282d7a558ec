"""Sentences about rows, table entries and index vectors of a gather."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.case import Values
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.rows import RowMap

_SHOWN = 6


def claim_text(plan: Plan, rows: RowMap, claim: int, page_id: int | None) -> str:
    """ "request 0, row 3 -> token 17 -> page 4 slot 1"; without a page id, the logical page."""
    page = int(rows.page[claim])
    if page_id is None:
        column, width = int(rows.page_column[page]), plan.arguments["table_width"]
        target = f"logical page {column} of {width}"
    elif not 0 <= page_id < plan.arguments["num_pages"]:
        target = f"page id {page_id}, no page of {plan.arguments['num_pages']}"
    else:
        target = f"page {page_id} slot {rows.slot[claim]}"
    return (
        f"request {rows.request[claim]}, row {rows.row[claim]} -> token {rows.token[claim]} "
        f"-> {target}"
    )


def claim_of_table_element(
    rows: RowMap, elements: npt.NDArray[np.int64], element: int
) -> int | None:
    """The first claim that looks `element` of the table up; `elements` is one a page."""
    at = np.flatnonzero(elements == element)
    return None if not at.size else int(np.searchsorted(rows.page, at[0]))


def table_element_text(plan: Plan, element: int, column: int | None) -> str:
    """ "row 0, column 2; the row ends at column 1". `column` is that of the claim, if there is one:
    it tells an over-read of one row from a read of the next."""
    arguments = plan.arguments
    requests, width = arguments["num_requests"], arguments["table_width"]
    stride = arguments["table_row_stride"] if requests > 1 else 0
    if column is not None:
        row = (element - column) // stride if stride else 0
    else:
        row = min(max(element // stride, 0), requests - 1) if stride else 0
        column = element - row * stride
    if column < 0:
        return "in front of the table"
    if column >= width:
        end = f"the row ends at column {width - 1}" if width else "the row has no columns"
        return f"row {row}, column {column}; {end}"
    return f"row {row}, column {column}, which no row of dst maps"


def vector_text(values: npt.NDArray[np.int64]) -> str:
    """ "[0, 3, 9]"; a long one shows its ends."""
    items = values.tolist()
    if len(items) > 2 * _SHOWN:
        left_out = len(items) - 2 * _SHOWN + 2
        shown = [
            *map(str, items[: _SHOWN - 1]),
            f"... {left_out} more",
            *map(str, items[1 - _SHOWN :]),
        ]
        return f"[{', '.join(shown)}]"
    return f"[{', '.join(map(str, items))}]"


def table_text(values: Values) -> str:
    """ "permuted (seed 3), 2 edits"."""
    parameters = ", ".join(
        f"{name} {value}" for name, value in values.parameters.items() if isinstance(value, int)
    )
    if values.recipe == "literal":
        literal = values.parameters["values"]
        assert isinstance(literal, tuple)
        text = vector_text(np.array(literal, dtype=np.int64))
    else:
        text = values.recipe + (f" ({parameters})" if parameters else "")
    if values.edits:
        text += f" with {len(values.edits)} edited"
    return text
