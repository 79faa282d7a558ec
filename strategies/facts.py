"""Facts: what the oracle says of a gather, in the words that corners are written in."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from pagefuzz.oracles.entry_references import EntryReferences
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.gather import GatherOperation, Pages
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.rows import Int64s, RowMap
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.rows import Span, spans
from pagefuzz.strategies.told import Told


class Facts(Told):
    """What corners look at, each computed when first asked for.

    `row`, `page_id` and `slot` are int64 [n] over rows whose mapping is valid.
    """

    def __init__(self, plan: Plan, expectation: Expectation) -> None:
        super().__init__(plan, expectation)
        self.case = plan.case
        self.sound = expectation.case_class is CaseClass.IN_CONTRACT

    @property
    def requests(self) -> int:
        return self.sizes["num_requests"]

    @property
    def tokens(self) -> int:
        return self.sizes["num_tokens"]

    @property
    def page_size(self) -> int:
        return self.sizes["page_size_tokens"]

    @property
    def width(self) -> int:
        return self.sizes["table_width"]

    @property
    def entry_bytes(self) -> int:
        """Of a slot's payload."""
        return self._entry[0]

    @property
    def row_bytes(self) -> int:
        return self._entry[1]

    @property
    def element_bytes(self) -> int:
        """Of the cache; 4, its alignment, where it is a tensor of bytes."""
        return self.sizes.get("element_bytes", 4)

    @property
    def row_element_bytes(self) -> int:
        """Of the destination."""
        assert isinstance(self._operation, EntryReferences)
        return self._operation.element_sizes(self.sizes)[1]

    @cached_property
    def _entry(self) -> tuple[int, int]:
        assert isinstance(self._operation, EntryReferences)
        return self._operation.entry_bytes(self.sizes)

    @cached_property
    def _operation(self) -> GatherOperation:
        found = operation(self.case.operation)
        assert isinstance(found, GatherOperation)
        return found

    @cached_property
    def _vectors(self) -> tuple[list[int], list[int] | None]:
        if not self.requests:
            return [], None
        starts, seq_starts = self._operation.index_vectors(self.plan)
        return starts.tolist(), None if seq_starts is None else seq_starts.tolist()

    @property
    def starts(self) -> list[int]:
        return self._vectors[0]

    @property
    def seq_starts(self) -> list[int] | None:
        return self._vectors[1]

    @cached_property
    def spans(self) -> list[Span]:
        return spans(self.starts, self.seq_starts, self.requests, self.tokens)

    @cached_property
    def live(self) -> set[int]:
        return {span.request for span in self.spans}

    @cached_property
    def _rows(self) -> RowMap:
        return self._operation.row_map(self.plan)

    @cached_property
    def pages(self) -> Pages:
        """Of every mapped (request, logical page)."""
        return self._operation.pages(self.plan, self._rows)

    @cached_property
    def columns(self) -> Int64s:
        return self._rows.page_column if self.spans else np.empty(0, np.int64)

    @cached_property
    def page_requests(self) -> Int64s:
        return self._rows.page_request if self.spans else np.empty(0, np.int64)

    @cached_property
    def ids(self) -> Int64s:
        """Page ids looked up inside the table."""
        return self.pages.page_id[self.pages.in_table] if self.spans else np.empty(0, np.int64)

    @cached_property
    def _valid(self) -> Int64s:
        return np.flatnonzero(self.pages.valid[self._rows.page])

    @property
    def row(self) -> Int64s:
        return self._rows.row[self._valid]

    @property
    def page_id(self) -> Int64s:
        return self.pages.page_id[self._rows.page[self._valid]]

    @property
    def slot(self) -> Int64s:
        return self._rows.slot[self._valid]

    @property
    def token(self) -> Int64s:
        return self._rows.token[self._valid]

    def stride(self, name: str, size: str) -> int:
        return self.sizes[name] if self.sizes[size] > 1 else 0

    def placed(self, buffer: str) -> tuple[int, int, int, int]:
        place = self.case.placement(buffer)
        return place.offset_bytes, place.before_bytes, place.slack_bytes, place.after_bytes
