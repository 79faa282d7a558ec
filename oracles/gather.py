"""What the gathers, operations (a) to (d), have in common.

Planning, the refusals that do not depend on the payload, the row mapping through table, starts and
seq_starts, the footprint of the index buffers, class and counts. An operation adds its payload:
extents, dtypes, footprint of source and destination, expected bytes.

Decisions where contracts.md is open, for all gathers:

* Ignored strides are never examined, whatever their value: `table_row_stride` if num_requests <= 1,
  `page_stride_bytes` if num_pages <= 1, `slot_stride_bytes` if page_size_tokens <= 1 and a
  destination's row stride if its rows are <= 1. They count as 0 in extents.
* starts needs 4 * (num_requests + has_terminal) bytes, but 0 if there are no requests.
* An optional buffer is absent when its pointer is null and its extent 0; dtype and rank of an
  absent buffer are not examined.
* With num_tokens == 0 or num_requests == 0 a launch reads nothing at all, so that nothing is
  readable, starts and counters included. The case is hostile all the same if its starts are.
* In contract speaks of `starts` as they are, unclamped: a decrease among values that all clamp to
  num_tokens makes a case hostile, but changes nothing that is expected of it.
* Where starts decrease, claims on rows >= m may be handled, so that what they map is readable.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from pagefuzz.oracles import index_values
from pagefuzz.oracles.case import Case, CaseError, Values
from pagefuzz.oracles.expectation import Footprint, Refusal
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import BufferRole, Dtype, Image, Plan, PlannedBuffer, Role
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.pages import Pages as Pages
from pagefuzz.oracles.pages import look_up
from pagefuzz.oracles.planning import MAX_MEMORY_BYTES, MAX_PAYLOAD_BYTES, planned_buffers
from pagefuzz.oracles.refusals import (
    Found,
    check_dtype,
    check_extents,
    check_pointer,
    check_ranges,
    check_rank,
    check_strides,
    is_absent,
)
from pagefuzz.oracles.rows import Int64s, RowMap, map_rows

_COUNT = range(2**31)

BLOCK_TABLE = BufferRole("block_table", Role.INDEX)
STARTS = BufferRole("starts", Role.INDEX)
SEQ_STARTS = BufferRole("seq_starts", Role.INDEX, optional=True)
COUNTS = BufferRole("counts", Role.COUNTERS, optional=True)

_INDEX_BUFFERS: Mapping[str, tuple[Dtype, int]] = MappingProxyType(
    {
        "block_table": (Dtype.I32, 2),
        "starts": (Dtype.I32, 1),
        "seq_starts": (Dtype.I32, 1),
        "counts": (Dtype.I64, 1),
    }
)


class GatherOperation(Operation):
    """An operation that copies cache entries to destination rows through a block table."""

    relations: ClassVar[frozenset[str]] = Operation.relations | {
        "renaming",
        "splitting",
        "widening",
    }

    #: Argument -> (refusal reason, legal range); strides are not among them.
    ranges: ClassVar[Mapping[str, tuple[str, range]]] = MappingProxyType(
        {
            "num_requests": ("size_range", _COUNT),
            "num_tokens": ("size_range", _COUNT),
            "num_pages": ("size_range", _COUNT),
            "table_width": ("size_range", _COUNT),
            "page_size_tokens": ("page_size_tokens", range(1, 4097)),
            "has_terminal": ("has_terminal", range(2)),
        }
    )

    #: Sources of whose payload a case may give a part; the operation says which (`_images`).
    payload_values: ClassVar[frozenset[str]] = frozenset()

    #: Index buffers of the operation's own, of a fixed number of elements, such as a scale: name ->
    #: dtype and elements. Their values are given as integers of that size.
    words: ClassVar[Mapping[str, tuple[Dtype, int]]] = MappingProxyType({})

    #: Buffers whose base must be a multiple of more than their element -> bytes.
    alignments: ClassVar[Mapping[str, int]] = MappingProxyType({})

    #: Reasons of `payload_refusals` after which extents mean nothing.
    unmeasurable: ClassVar[frozenset[str]] = frozenset({"entry_bytes"})

    # ---- what an operation adds --------------------------------------------------------------

    @abstractmethod
    def strides(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The source and destination strides that are not ignored, by name."""

    @abstractmethod
    def payload_bytes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Required bytes of every source and destination, exact, from sizes in their ranges."""

    @abstractmethod
    def row_bytes(self, sizes: Mapping[str, int]) -> int:
        """Payload bytes that one mapped row moves, for a bound on what is expanded."""

    @abstractmethod
    def payload_types(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """dtype and rank of every source and destination."""

    @abstractmethod
    def payload_refusals(self, found: Found, plan: Plan) -> None:
        """Adds the refusals of the operation's own arguments and buffers."""

    @abstractmethod
    def clamped(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """All sizes, the operation's own ones moved to values with which memory can be laid out."""

    def reads_words(self, sizes: Mapping[str, int]) -> bool:
        """Whether a launch that runs may read the buffers of `words`; elsewhere they are poison."""
        return True

    # ---- planning ----------------------------------------------------------------------------

    def _plan(self, case: Case) -> Plan:
        for name in ("block_table", "starts"):
            if name not in case.values:
                raise CaseError(f"values of {self.name} needs {name!r}; it is not optional")
        index_buffers = self._index_buffers()
        for name in case.values:
            if name not in index_buffers and name not in self.payload_values:
                raise CaseError(f"{name} holds payload; values may name {', '.join(index_buffers)}")
        laid = self._laid_out(case.sizes)
        plan = Plan(
            case,
            {name: case.overrides.get(name, case.sizes[name]) for name in self.sizes},
            self._buffers(case, laid, sound=laid == dict(case.sizes)),
        )
        refused = bool(self.refusals(plan))
        if not refused:
            self._check_memory(plan)
        images = self._images(plan, case.sizes if refused else plan.arguments, refused)
        return plan.with_images(images)

    def _index_buffers(self) -> dict[str, tuple[Dtype, int]]:
        """dtype and rank of every index buffer, counters included."""
        return {**_INDEX_BUFFERS, **{name: (dtype, 1) for name, (dtype, _) in self.words.items()}}

    def _laid_out(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes as they are, or the nearest with which memory can be laid out."""
        laid = self.clamped(sizes)
        for name, (_, legal) in self.ranges.items():
            # Above a range a layout still exists, but counts of 2^31 and more have none.
            highest = legal.stop - 1 if legal == _COUNT or name == "has_terminal" else 2**31 - 1
            laid[name] = min(max(sizes[name], legal.start), highest)
        if sizes["num_requests"] > 1:  # an ignored stride stays as it is: the layout is sound
            laid["table_row_stride"] = max(sizes["table_row_stride"], 0)
        return laid

    def required(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Required bytes of every buffer, optional ones as if present; exact integers."""
        requests, width = sizes["num_requests"], sizes["table_width"]
        row_stride = sizes["table_row_stride"] if requests > 1 else 0
        required = self.payload_bytes(sizes)
        required["block_table"] = (
            4 * ((requests - 1) * row_stride + width) if requests and width else 0
        )
        required["starts"] = 4 * (requests + sizes["has_terminal"]) if requests else 0
        required["seq_starts"] = 4 * requests
        required["counts"] = 16
        required |= {name: dtype.size_bytes * n for name, (dtype, n) in self.words.items()}
        return required

    def _buffers(
        self, case: Case, laid: Mapping[str, int], *, sound: bool
    ) -> dict[str, PlannedBuffer]:
        required = self.required(laid)
        types: dict[str, tuple[int, int]] = {
            **self.payload_types(laid),
            **self._index_buffers(),
        }
        return planned_buffers(
            case, self.buffers, required, types, sound=sound, alignments=self.alignments
        )

    def _check_memory(self, plan: Plan) -> None:
        """What the launcher is told of a case that it must accept has to be true."""
        total = sum(self.required(self._laid_out(plan.case.sizes)).values())
        if total > MAX_MEMORY_BYTES:
            raise CaseError(
                f"the case needs {total} bytes of memory; at most {MAX_MEMORY_BYTES} are laid out"
            )
        for name, buffer in plan.buffers.items():
            if buffer.placement.over is not None:
                raise CaseError(
                    f"placements.{name}.over: only a case that must be refused may place a buffer "
                    "over another"
                )
            if buffer.extent_bytes > buffer.memory_bytes:
                raise CaseError(
                    f"{name} is said to have {buffer.extent_bytes} bytes, it has "
                    f"{buffer.memory_bytes}, and nothing else makes the case refused"
                )

    def _images(self, plan: Plan, sizes: Mapping[str, int], refused: bool) -> dict[str, Image]:
        """Index values, where they may be read: elsewhere a launch would find the same in both
        fills. Those of a refused case follow its sizes, if these can be laid out; its table is
        poison, since nobody may read it."""
        values = plan.case.values
        if refused and any(
            sizes[name] not in self.ranges[name][1] for name in ("num_requests", "has_terminal")
        ):
            return {}
        requests = sizes["num_requests"]
        images = {}
        vectors = {}
        starts_count = requests + sizes["has_terminal"] if requests else 0
        counts = {"starts": starts_count, "seq_starts": requests, "counts": 2}
        counts |= {name: count for name, (_, count) in self.words.items()}
        for name, count in counts.items():
            if name not in values:
                continue
            wide = name == "counts"
            legal = index_values.INT64 if wide else index_values.INT32
            if name == "starts" and not requests:
                continue  # a lone terminal value has no memory and no reader
            vectors[name] = index_values.vector(values[name], count, legal, name)
            if name in self.words and not (refused or self.reads_words(sizes)):
                continue  # poison, so that a launch that reads it all the same is seen
            elements = vectors[name] if wide else vectors[name].astype(np.int32)
            images[name] = Image.of_elements(np.arange(count, dtype=np.int64), elements)
        if refused or not requests or not sizes["num_tokens"]:
            return images
        absent = is_absent(plan.buffers["seq_starts"])
        rows = _map(sizes, vectors["starts"], None if absent else vectors["seq_starts"])
        if (payload_bytes := rows.row.size * self.row_bytes(sizes)) > MAX_PAYLOAD_BYTES:
            raise CaseError(
                f"the rows of the case hold {payload_bytes} bytes; at most {MAX_PAYLOAD_BYTES} "
                "can be expanded"
            )
        images["block_table"] = self._table_image(values["block_table"], sizes, rows)
        return images

    def _table_image(self, values: Values, sizes: Mapping[str, int], rows: RowMap) -> Image:
        """The entries that some row maps; all others stay poison, an illegal id.

        The table [num_requests, table_width] is laid down row by row at the row stride, so that a
        later row overwrites an earlier one where the stride is below the width.
        """
        requests, width = sizes["num_requests"], sizes["table_width"]
        stride = sizes["table_row_stride"] if requests > 1 else 0
        inside = rows.page_column < width
        element = np.unique((rows.page_request * stride + rows.page_column)[inside])
        if stride:
            row = np.minimum(element // stride, requests - 1)
        else:
            row = np.full(element.shape, requests - 1, dtype=np.int64)
        entries = index_values.table_entries(
            values,
            row,
            element - row * stride,
            rows=requests,
            width=width,
            num_pages=sizes["num_pages"],
            name="block_table",
        )
        return Image.of_elements(element, entries.astype(np.int32))

    # ---- related plans -----------------------------------------------------------------------

    def rearranged(
        self, plan: Plan, arguments: Mapping[str, int], images: Mapping[str, Image]
    ) -> Plan | None:
        """A plan of a case in contract with other arguments and index values; None if its memory
        would not be laid out. An absent buffer among `images` becomes present."""
        required = self.required(arguments)
        if sum(required.values()) > MAX_MEMORY_BYTES:
            return None
        types = self._index_buffers()
        buffers = {}
        for name, buffer in plan.buffers.items():
            image = images.get(name)
            if image is not None and is_absent(buffer):
                dtype, rank = types[name]
                buffer = replace(buffer, is_null=False, dtype=int(dtype), rank=rank)
            if not is_absent(buffer):
                more = required[name] - buffer.required_bytes
                buffer = replace(
                    buffer,
                    required_bytes=required[name],
                    extent_bytes=buffer.extent_bytes + more,
                    image=buffer.image if image is None else image,
                )
            buffers[name] = buffer
        return Plan(plan.case, arguments, buffers)

    def split_images(self, plan: Plan, request: int, row: int) -> Mapping[str, Image]:
        """Index buffers beside table, starts and seq_starts that are others once `request` is two
        requests, the second of which begins at `row`."""
        return {}

    # ---- refusals ----------------------------------------------------------------------------

    def refusals(self, plan: Plan) -> tuple[Refusal, ...]:
        found: Found = []
        arguments, buffers = plan.arguments, plan.buffers
        strides = self.strides(arguments)
        if arguments["num_requests"] > 1:
            strides["table_row_stride"] = arguments["table_row_stride"]
        measurable = check_ranges(found, arguments, self.ranges)
        measurable &= check_strides(found, strides)
        before = len(found)
        self.payload_refusals(found, plan)
        measurable &= all(refusal.reason not in self.unmeasurable for refusal in found[before:])
        optional = {role.name for role in self.buffers if role.optional}
        for name, (dtype, rank) in self._index_buffers().items():
            if name in buffers:
                if not (name in optional and is_absent(buffers[name])):
                    check_dtype(found, buffers[name], (dtype,))
                    check_rank(found, buffers[name], rank)
                check_pointer(found, plan, name, dtype.size_bytes)
        if measurable:
            required = self.required(arguments)
            for name in optional:
                if is_absent(buffers[name]):
                    required[name] = 0
            check_extents(found, plan, required)
        return tuple(found)

    # ---- the contract, vectorised --------------------------------------------------------------

    def index_vectors(self, plan: Plan) -> tuple[Int64s, Int64s | None]:
        """starts and seq_starts (None if absent) as they lie in memory."""
        seq_starts = plan.buffers["seq_starts"]
        return (
            index_values.int32s(plan.buffers["starts"].image),
            None if is_absent(seq_starts) else index_values.int32s(seq_starts.image),
        )

    def row_map(self, plan: Plan) -> RowMap:
        starts, seq_starts = self.index_vectors(plan)
        return _map(plan.arguments, starts, seq_starts)

    def pages(self, plan: Plan, rows: RowMap) -> Pages:
        """Looks the pages of every claim up in the table as it lies in memory."""
        return look_up(plan, rows)

    def index_footprints(self, plan: Plan, pages: Pages) -> dict[str, Footprint]:
        """What a launch that runs (some request, some token) may touch of the index buffers."""
        requests = plan.arguments["num_requests"]
        readable_starts = requests + plan.arguments["has_terminal"]
        out = {
            "block_table": Footprint(IntervalSet.of_runs(pages.element[pages.in_table] * 4, 4)),
            "starts": Footprint(IntervalSet([0], [4 * readable_starts])),
        }
        if not is_absent(plan.buffers["seq_starts"]):
            out["seq_starts"] = Footprint(IntervalSet([0], [4 * requests]))
        if not is_absent(plan.buffers["counts"]):
            pair = IntervalSet([0], [16])
            out["counts"] = Footprint(pair, may_write=pair)
        return out

    def hostile_index_values(self, plan: Plan, rows: RowMap, pages: Pages) -> tuple[str, ...]:
        """One sentence for each kind of hostile value."""
        starts, seq_starts = self.index_vectors(plan)
        out = []
        if starts.size and (lowest := int(starts.min())) < 0:
            out.append(f"starts[{int(starts.argmin())}]={lowest} is negative")
        if (decreases := np.flatnonzero(starts[1:] < starts[:-1])).size:
            r = int(decreases[0])
            out.append(f"starts[{r + 1}]={starts[r + 1]} is below starts[{r}]={starts[r]}")
        if rows.negative_requests.size and seq_starts is not None:
            r = int(rows.negative_requests[0])
            out.append(f"request {r} has rows and seq_starts[{r}]={seq_starts[r]}")
        if not pages.valid.all():
            out.extend(self._hostile_pages(plan, rows, pages))
        return tuple(out)

    def _hostile_pages(self, plan: Plan, rows: RowMap, pages: Pages) -> list[str]:
        out = []
        if (past := np.flatnonzero(~pages.in_table)).size:
            r, q = int(rows.page_request[past[0]]), int(rows.page_column[past[0]])
            out.append(
                f"request {r} reaches logical page {q} of a table of "
                f"{plan.arguments['table_width']} columns"
            )
        if (wrong := np.flatnonzero(pages.in_table & ~pages.valid)).size:
            r, q = int(rows.page_request[wrong[0]]), int(rows.page_column[wrong[0]])
            out.append(
                f"block_table[{r}, {q}]={pages.page_id[wrong[0]]} is no page of "
                f"{plan.arguments['num_pages']}"
            )
        return out


def _map(sizes: Mapping[str, int], starts: Int64s, seq_starts: Int64s | None) -> RowMap:
    return map_rows(
        starts,
        seq_starts,
        num_requests=sizes["num_requests"],
        num_tokens=sizes["num_tokens"],
        page_size_tokens=sizes["page_size_tokens"],
    )
