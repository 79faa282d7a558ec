"""splitting: a request may be two, the second going on where the first ends."""

from __future__ import annotations

import numpy as np

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.gather import GatherOperation
from pagefuzz.oracles.index_values import INT32
from pagefuzz.oracles.layout import Image, Plan
from pagefuzz.oracles.observation import RelatedPlan
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.relation import RelationJudgement, choose
from pagefuzz.oracles.rows import Int64s


class SplittingJudgement(RelationJudgement):
    name = "splitting"
    summary = "no output changes when a request is split in two at any token"
    when = "when a request is split in two"

    def derive(
        self, operation: Operation, plan: Plan, expectation: Expectation
    ) -> RelatedPlan | None:
        """Both halves have the table row of the whole; None if no request has two rows."""
        assert isinstance(operation, GatherOperation)
        a = plan.arguments
        rows = operation.row_map(plan)
        requests, first, lengths = np.unique(rows.request, return_index=True, return_counts=True)
        long = np.flatnonzero(lengths > 1)
        if not long.size or a["num_requests"] == INT32.stop - 1:
            return None
        which = int(long[choose(plan, self.name, "request", long.size)])
        request = int(requests[which])
        claim = int(first[which] + 1 + choose(plan, self.name, "row", int(lengths[which]) - 1))
        row, token = int(rows.row[claim]), int(rows.token[claim])
        if token not in INT32:
            return None
        starts, seq_starts = operation.index_vectors(plan)
        if seq_starts is None:
            seq_starts = np.zeros(a["num_requests"], dtype=np.int64)
        images = {
            "starts": _vector(np.insert(starts, request + 1, row)),
            "seq_starts": _vector(np.insert(seq_starts, request + 1, token)),
            **operation.split_images(plan, request, row),
        }
        width = a["table_width"]
        stride = max(width, a["table_row_stride"] if a["num_requests"] > 1 else 0)
        arguments = {**a, "num_requests": a["num_requests"] + 1, "table_row_stride": stride}
        if (split := operation.rearranged(plan, arguments, images)) is None:
            return None
        pages, halves = operation.pages(plan, rows), operation.row_map(split)
        # Claims come by request, then by column, so that these keys ascend.
        keys = rows.page_request * width + rows.page_column
        whole = halves.page_request - (halves.page_request > request)
        at = np.searchsorted(keys, whole * width + halves.page_column)
        table = Image.of_elements(
            halves.page_request * stride + halves.page_column,
            pages.page_id[at].astype(np.int32),
        )
        derived = operation.rearranged(plan, arguments, {**images, "block_table": table})
        assert derived is not None
        change = f"request {request} split at row {row} (token {token})"
        return RelatedPlan(derived, operation.expect(derived), change)


def _vector(elements: Int64s) -> Image:
    return Image.of_elements(np.arange(elements.size), elements.astype(np.int32))
