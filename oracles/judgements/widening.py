"""widening: a block table may have any number of columns, and any space between its rows."""

from __future__ import annotations

import numpy as np

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.gather import GatherOperation
from pagefuzz.oracles.index_values import INT32
from pagefuzz.oracles.layout import Image, Plan
from pagefuzz.oracles.observation import RelatedPlan
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.relation import RelationJudgement, choose

_MOST_COLUMNS = 9


class WideningJudgement(RelationJudgement):
    name = "widening"
    summary = "no output changes when the block table is wider, its rows further apart"
    when = "when the table is wider"

    def derive(
        self, operation: Operation, plan: Plan, expectation: Expectation
    ) -> RelatedPlan | None:
        """The further columns hold poison, which is no page."""
        assert isinstance(operation, GatherOperation)
        a = plan.arguments
        width = a["table_width"] + 1 + choose(plan, self.name, "columns", _MOST_COLUMNS)
        if width not in INT32:
            return None
        arguments = {**a, "table_width": width}
        change = f"the table has {width} columns in place of {a['table_width']}"
        stride = 0
        if a["num_requests"] > 1:
            stride = width + choose(plan, self.name, "gap", _MOST_COLUMNS)
            stride += stride == a["table_row_stride"]
            arguments["table_row_stride"] = stride
            change += f", its rows are {stride} elements apart in place of {a['table_row_stride']}"
        rows = operation.row_map(plan)
        table = Image.of_elements(
            rows.page_request * stride + rows.page_column,
            operation.pages(plan, rows).page_id.astype(np.int32),
        )
        derived = operation.rearranged(plan, arguments, {"block_table": table})
        if derived is None:
            return None
        return RelatedPlan(derived, operation.expect(derived), change)
