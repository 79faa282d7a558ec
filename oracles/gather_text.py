"""Sentences about rows, table entries and index vectors of a gather."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.case import Placement, Values
from pagefuzz.oracles.index_values import int32s
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.pages import Pages
from pagefuzz.oracles.rows import RowMap

_SHOWN = 6


def claim_text(plan: Plan, rows: RowMap, pages: Pages, claim: int) -> str:
    """ "request 0, row 3 -> token 17 -> page 4 slot 1", or how far the claim gets."""
    page = int(rows.page[claim])
    page_id = int(pages.page_id[page])
    if not pages.in_table[page]:
        column, width = int(rows.page_column[page]), plan.arguments["table_width"]
        target = f"logical page {column} of {width}"
    elif not pages.valid[page]:
        target = f"page id {page_id}, no page of {plan.arguments['num_pages']}"
    else:
        target = f"page {page_id} slot {rows.slot[claim]}"
    return (
        f"request {rows.request[claim]}, row {rows.row[claim]} -> token {rows.token[claim]} "
        f"-> {target}"
    )


def table_claim(rows: RowMap, pages: Pages, element: int) -> int | None:
    """The first claim that looks `element` of the table up, past the end of its row included."""
    at = np.flatnonzero(pages.element == element)
    return None if not at.size else int(np.searchsorted(rows.page, at[0]))


def index_place(
    plan: Plan, mapped: tuple[RowMap, Pages] | None, buffer: str, offset_bytes: int
) -> str:
    """The place of a byte of the table, starts, seq_starts, counts or a vector of 4-byte elements.

    mapped  is None for a case that must be refused
    """
    if buffer == "block_table":
        element, column = offset_bytes // 4, None
        if mapped is not None and (claim := table_claim(*mapped, element)) is not None:
            rows = mapped[0]
            column = int(rows.page_column[rows.page[claim]])
        return _table_place(plan, element, column)
    requests = plan.arguments["num_requests"]
    element_bytes, count = {
        "starts": (4, requests + plan.arguments["has_terminal"]),
        "seq_starts": (4, requests),
        "counts": (8, 2),
    }.get(buffer, (4, plan.buffers[buffer].required_bytes // 4))
    return f"element {offset_bytes // element_bytes} of {count}"


def _table_place(plan: Plan, element: int, column: int | None) -> str:
    """ "row 0, column 2; the row ends at column 1". `column` is that of the claim, if there is one:
    it tells an over-read of one row from a read of the next."""
    arguments = plan.arguments
    requests, width = arguments["num_requests"], arguments["table_width"]
    stride = arguments["table_row_stride"] if requests > 1 else 0
    mapped = column is not None
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
    return f"row {row}, column {column}" + ("" if mapped else ", which no row of dst maps")


def index_parts(plan: Plan) -> list[str]:
    """What `describe` says of sizes, vectors and table."""
    a, values = plan.arguments, plan.case.values
    requests, stride = a["num_requests"], a["table_row_stride"]
    pitch = f" bt={stride}" if requests > 1 and stride != a["table_width"] else ""
    parts = [
        f"R={requests}",
        f"N={a['num_tokens']}",
        f"BS={a['page_size_tokens']}",
        f"NB={a['num_pages']}",
        f"W={a['table_width']}{pitch}",
    ]
    for name in ("starts", "seq_starts"):
        if name in values:
            parts.append(f"{name}={vector_text(int32s(plan.buffers[name].image))}")
    if not a["has_terminal"]:
        parts.append("no terminal")
    parts.append(f"table {table_text(values['block_table'])}")
    return parts


def oddities(plan: Plan) -> list[str]:
    """What is not as usual about placements and arguments."""
    parts = []
    for name, buffer in plan.buffers.items():
        placement = buffer.placement
        if placement.offset_bytes:
            parts.append(f"{name} +{placement.offset_bytes} B")
        if placement.guard != Placement().guard:
            parts.append(f"{name} guard {placement.guard}")
        if placement.over is not None:
            parts.append(f"{name} over {placement.over[0]} +{placement.over[1]} B")
    parts += [f"{name}:={value}" for name, value in plan.case.overrides.items()]
    return parts


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
