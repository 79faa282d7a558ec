"""The physical pages that a row mapping reaches through the block table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.expectation import Counts
from pagefuzz.oracles.index_values import INT32, int32s
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.rows import PADDING_PAGE, Int64s, RowMap


@dataclass(frozen=True, slots=True)
class Pages:
    """What the table holds for each page of a `RowMap`, in its order.

    element    int64 [m], r * table_row_stride + q; meaningless where the column is past the row
    in_table   bool [m], the column is below table_width
    page_id    int64 [m]; meaningless where not `in_table`
    valid      bool [m], `in_table` and the id names a page of the cache
    """

    element: Int64s
    in_table: npt.NDArray[np.bool_]
    page_id: Int64s
    valid: npt.NDArray[np.bool_]


def look_up(plan: Plan, rows: RowMap) -> Pages:
    """Looks the pages of every claim up in the table as it lies in memory."""
    arguments = plan.arguments
    stride = arguments["table_row_stride"] if arguments["num_requests"] > 1 else 0
    element = rows.page_request * stride + rows.page_column
    in_table = rows.page_column < arguments["table_width"]
    image = plan.buffers["block_table"].image
    page_id = np.full(element.shape, INT32.start, dtype=np.int64)
    if image.offsets.size:
        # The image holds every mapped element of the table; past it, any index will do.
        at = np.minimum(np.searchsorted(image.offsets, element * 4), image.offsets.size - 1)
        page_id = np.where(in_table, int32s(image)[at], page_id)
    valid = (page_id >= 0) & (page_id < arguments["num_pages"])
    return Pages(element, in_table, page_id, valid)


def counts(
    rows: RowMap, pages: Pages, counted: npt.NDArray[np.bool_] | bool = True
) -> Counts | None:
    """One count for each page that has mapped rows and cannot be copied, and one for each request
    with rows and a negative seq_start. None where starts decrease: they are unspecified then.

    counted  bool [m], whether a page counts at all
    """
    if rows.first_contested_row is not None:
        return None
    is_padding = pages.in_table & (pages.page_id == PADDING_PAGE)
    padding = int(np.count_nonzero(is_padding & counted))
    bad = int(np.count_nonzero(~pages.valid & counted))
    return Counts(padding=padding, skipped=bad - padding + rows.negative_requests.size)
