"""What the writers of operation (e) have in common: rows of inputs go to the slots of paged caches.

Planning, the refusals that do not depend on what is stored, the slot mapping, footprints, class and
counts, and what happens where several tokens name one slot. An operation says which inputs and
caches it has and what it stores of a token.

Decisions where contracts.md is open, for all writers:

* Ignored strides are never examined, whatever their value: those of an input with at most one row,
  of pages if num_pages <= 1, of slots if page_size_tokens <= 1, of heads if there is at most one.
* An input needs the bytes of its first num_tokens rows, 0 if num_tokens == 0; its rows may overlap.
  A cache needs 0 bytes if num_pages == 0, slot_mapping 8 * num_tokens.
* Every cache must nest, however few tokens there are. That two caches share no byte is the
  caller's duty; they may interleave, and lie in one buffer.
* With num_tokens == 0 a launch reads nothing; num_pages == 0 only makes every slot out of range.
* counts is absent when its pointer is null and its extent 0; dtype and rank are then not examined.
* Where several tokens name one slot and one would store the same bytes as any other of them, the
  cell is must-write; elsewhere each element is one of theirs, and never what was there before. If
  the cell has parts, this holds for each part.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pagefuzz.oracles import contents, index_values
from pagefuzz.oracles.case import Case, CaseError
from pagefuzz.oracles.cells import PADDING_SLOT, Cells, Part, Rows, Slots
from pagefuzz.oracles.expectation import (
    Contested,
    Counts,
    Expectation,
    Expected,
    Footprint,
    Refusal,
)
from pagefuzz.oracles.free_nans import FreeNans
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import BufferRole, Bytes, Dtype, Image, Plan, Role
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.planning import MAX_PAYLOAD_BYTES, check_memory, planned_buffers
from pagefuzz.oracles.refusals import (
    Found,
    check_dtype,
    check_extents,
    check_overlaps,
    check_pointer,
    check_ranges,
    check_rank,
    check_strides,
    is_absent,
)
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.oracles.write_text import WriteText
from pagefuzz.oracles.written_runs import listed_runs, sorted_runs

if TYPE_CHECKING:
    import torch

SLOT_MAPPING = BufferRole("slot_mapping", Role.INDEX)
COUNTS = BufferRole("counts", Role.COUNTERS, optional=True)

COUNT = range(2**31)


class WriteOperation(WriteText):
    """An operation that stores tokens in the slots that slot_mapping names."""

    relations: ClassVar[frozenset[str]] = Operation.relations | {"renaming"}
    counted = (
        "token of the padding slot -1",
        "token whose slot does not exist",
    )

    #: Inputs that a case may hold values for.
    payload_values: ClassVar[frozenset[str]] = frozenset()

    #: Argument -> (refusal reason, legal range); strides are not among them.
    ranges: ClassVar[Mapping[str, tuple[str, range]]] = MappingProxyType(
        {
            "num_tokens": ("size_range", COUNT),
            "num_pages": ("size_range", COUNT),
            "page_size_tokens": ("page_size_tokens", range(1, 4097)),
        }
    )

    # ---- what an operation adds ------------------------------------------------------------------

    @abstractmethod
    def inputs(self, sizes: Mapping[str, int]) -> tuple[Rows, ...]: ...

    @abstractmethod
    def caches(self, sizes: Mapping[str, int]) -> tuple[Cells, ...]: ...

    @abstractmethod
    def scalars(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Bytes of every other, optional read-only buffer (scales), as if present."""

    @abstractmethod
    def reads_scalars(self, sizes: Mapping[str, int]) -> bool: ...

    @abstractmethod
    def types(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """dtype and rank of inputs, caches and scalars."""

    @abstractmethod
    def own_refusals(self, found: Found, plan: Plan) -> None:
        """Adds the refusals of dtypes and ranks of inputs, caches and scalars."""

    @abstractmethod
    def own_images(
        self, plan: Plan, sizes: Mapping[str, int], slots: Slots | None
    ) -> dict[str, Image]:
        """Contents of scalars, and of inputs that are not plain payload.

        slots  None for a case that must be refused
        """

    @abstractmethod
    def computed_dtype(self, plan: Plan, part: Part) -> Dtype | None:
        """Of elements that are computed, so that a NaN may be any; None if all are copied."""

    @abstractmethod
    def encode(self, plan: Plan, token: Int64s) -> Mapping[str, Bytes]:
        """What tokens store in every part of every cache: uint8 [tokens, runs of a slot,
        run_bytes]."""

    @abstractmethod
    def encode_by_loop(self, plan: Plan, token: int) -> Mapping[str, list[bytes]]:
        """The same of one token, element by element, in plain Python."""

    # ---- planning --------------------------------------------------------------------------------

    def clamped(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes as they are, or the nearest with which memory can be laid out."""
        out = dict(sizes)
        for name, (_, legal) in self.ranges.items():
            out[name] = min(max(sizes[name], legal.start), legal.stop - 1)
        for name in self._counted_strides(out):
            out[name] = max(sizes[name], 0)
        return out

    def _counted_strides(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Strides that are not ignored -> alignment."""
        strides = {
            rows.stride: rows.element_bytes for rows in self.inputs(sizes) if sizes[rows.rows] > 1
        }
        for cells in self.caches(sizes):
            for name, count in cells.dimensions:
                if count > 1:
                    strides[name] = cells.element_bytes
        return strides

    def required(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Required bytes of every buffer, the optional one as if present; exact integers."""
        tokens = sizes["num_tokens"]
        required = {
            rows.name: (tokens - 1) * rows.stride_bytes(sizes) + rows.row_bytes if tokens else 0
            for rows in self.inputs(sizes)
        }
        required |= {cells.name: cells.required_bytes(sizes) for cells in self.caches(sizes)}
        required |= self.scalars(sizes)
        return required | {"slot_mapping": 8 * tokens, "counts": 16}

    def _plan(self, case: Case) -> Plan:
        payload = {buffer.name for buffer in self.buffers if buffer.role is not Role.INDEX}
        for name in case.values:
            if name in payload - {"counts"} - self.payload_values:
                raise CaseError(f"{name} holds payload; values may name indices, scales and counts")
        if "slot_mapping" not in case.values:
            raise CaseError(f"values of {self.name} needs 'slot_mapping'; it is not optional")
        laid = self.clamped(case.sizes)
        types = {**self.types(laid), "slot_mapping": (Dtype.I64, 1), "counts": (Dtype.I64, 1)}
        required = self.required(laid)
        sound = laid == dict(case.sizes)
        alignments = {cells.name: cells.element_bytes for cells in self.caches(laid)}
        buffers = planned_buffers(
            case, self.buffers, required, types, sound=sound, alignments=alignments
        )
        arguments = {name: case.overrides.get(name, case.sizes[name]) for name in self.sizes}
        plan = Plan(case, arguments, buffers)
        refused = bool(self.refusals(plan))
        if not refused:
            check_memory(plan, sum(required.values()))
        for add in (self._index_images, self._own_images):
            images = add(plan, case.sizes if refused else arguments, refused)
            plan = plan.with_images(images)
        return plan

    def _index_images(
        self, plan: Plan, sizes: Mapping[str, int], refused: bool
    ) -> dict[str, Image]:
        values, images = plan.case.values, {}
        counts = {"slot_mapping": sizes["num_tokens"], "counts": 2}
        if refused and counts["slot_mapping"] not in COUNT:
            return {}
        for name, count in counts.items():
            if name in values:
                elements = index_values.vector(values[name], count, index_values.INT64, name)
                images[name] = Image.of_elements(np.arange(count, dtype=np.int64), elements)
        return images

    def _own_images(self, plan: Plan, sizes: Mapping[str, int], refused: bool) -> dict[str, Image]:
        slots = None if refused else self.slots(plan)
        if slots is not None:
            row_bytes = sum(rows.row_bytes for rows in self.inputs(sizes))
            if (payload_bytes := slots.token.size * row_bytes) > MAX_PAYLOAD_BYTES:
                raise CaseError(
                    f"the tokens of the case hold {payload_bytes} bytes; at most "
                    f"{MAX_PAYLOAD_BYTES} can be expanded"
                )
        return self.own_images(plan, sizes, slots)

    # ---- refusals --------------------------------------------------------------------------------

    def refusals(self, plan: Plan) -> tuple[Refusal, ...]:
        found: Found = []
        a, buffers = plan.arguments, plan.buffers
        measurable = check_ranges(found, a, self.ranges)
        laid = self.clamped(a)
        inputs, caches = self.inputs(laid), self.caches(laid)
        strides = self._counted_strides(laid)
        measurable &= check_strides(found, {name: a[name] for name in strides})
        for name, unit in strides.items():
            if a[name] % unit:
                found.append(Refusal("alignment", f"{name}={a[name]} is not a multiple of {unit}"))
        for rows in inputs:
            if a[rows.rows] < a["num_tokens"]:
                found.append(
                    Refusal(
                        "input_rows",
                        f"{rows.rows}={a[rows.rows]} is less than num_tokens={a['num_tokens']}",
                    )
                )
        self.own_refusals(found, plan)
        optional = ("counts", *self.scalars(laid))
        absent = [name for name in optional if is_absent(buffers[name])]
        scalars = dict.fromkeys(self.scalars(laid), 4)
        units = {rows.name: rows.element_bytes for rows in inputs}
        units |= {cells.name: cells.element_bytes for cells in caches} | scalars
        for name, unit in {**units, "slot_mapping": 8, "counts": 8}.items():
            check_pointer(found, plan, name, unit)
        for name in ("slot_mapping", "counts"):
            if name not in absent:
                check_dtype(found, buffers[name], (Dtype.I64,))
                check_rank(found, buffers[name], 1)
        if measurable:
            required = self.required(a) | dict.fromkeys(absent, 0)
            check_extents(found, plan, required)
            for cells in caches:
                if not cells.nests(a):
                    found.append(
                        Refusal("not_nested", f"entries of {cells.name} overlap: its strides")
                    )
        others = [rows.name for rows in inputs] + ["slot_mapping", *scalars, "counts"]
        for cells in caches:
            check_overlaps(found, plan, cells.name, others)
        return tuple(found)

    # ---- the contract, vectorised ----------------------------------------------------------------

    def slots(self, plan: Plan) -> Slots:
        """slot_mapping as it lies in memory."""
        image = plan.buffers["slot_mapping"].image
        slot = image.values.view(np.int64).ravel() if image.offsets.size else np.empty(0, np.int64)
        size = plan.arguments["page_size_tokens"]
        token = np.flatnonzero((slot >= 0) & (slot < plan.arguments["num_pages"] * size))
        return Slots(slot, token, slot[token] // size, slot[token] % size)

    def stored_runs(self, plan: Plan, slots: Slots) -> tuple[tuple[str, Int64s, int], ...]:
        """Where the written tokens of `slots` go: for each part of a destination the destination's
        name, int64 [tokens, runs of a slot] and the bytes of a run."""
        return tuple(
            (
                cells.name,
                cells.begins(plan.arguments, part, slots.page, slots.offset),
                part.run_bytes,
            )
            for cells in self.caches(plan.arguments)
            for part in cells.parts
        )

    def input_bytes(self, plan: Plan, name: str, offsets: Int64s, size_bytes: int) -> Bytes:
        """uint8 [n, size_bytes]: what an input holds at each of `offsets`, readable ones."""
        buffer = plan.buffers[name]
        image = buffer.image
        if not image.offsets.size:
            origin = buffer.payload_origin_bytes
            return contents.payload_at(plan.case.seed, offsets + origin, size_bytes)
        width = image.values.shape[1]
        each = offsets[:, None] + np.arange(0, size_bytes, width, dtype=np.int64)
        at = np.searchsorted(image.offsets, each)
        return image.values[at].reshape(offsets.size, size_bytes)

    def expect(self, plan: Plan) -> Expectation:
        if refusals := self.refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        a = plan.arguments
        slots = self.slots(plan)
        hostile = self._hostile(plan, slots)
        stored = self.encode(plan, slots.token)
        footprints = {}
        if a["num_tokens"]:
            footprints = self._read_footprints(plan, slots.token)
        expected = {}
        _, claimant, claims = np.unique(
            slots.slot[slots.token], return_inverse=True, return_counts=True
        )
        first = np.full(claims.size, slots.token.size, dtype=np.int64)
        np.minimum.at(first, claimant, np.arange(slots.token.size))
        for cells in self.caches(a):
            must, may = IntervalSet(), IntervalSet()
            for part in cells.parts:
                offsets = cells.begins(a, part, slots.page, slots.offset)
                values = stored[part.name]
                same = (values == values[first[claimant]]).all(axis=(1, 2))
                agreed = np.ones(claims.size, dtype=np.bool_)
                np.logical_and.at(agreed, claimant, same)
                exact = first[agreed]
                torn = np.flatnonzero(~agreed[claimant])
                contested = None
                if torn.size:
                    runs = sorted_runs(offsets[torn], values[torn])
                    contested = self._contested(plan, part, *runs)
                expected[part.name] = self._exact(
                    plan, cells, part, *sorted_runs(offsets[exact], values[exact]), contested
                )
                must = must.union(IntervalSet.of_runs(offsets[exact].ravel(), part.run_bytes))
                may = may.union(IntervalSet.of_runs(offsets[torn].ravel(), part.run_bytes))
            footprints[cells.name] = Footprint(must_write=must, may_write=may)
        self._lend(plan, footprints)
        return Expectation(
            case_class=CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT,
            hostile=hostile,
            footprints=footprints,
            expected=expected,
            counts=slots.counts,
            counters={
                "written_tokens": slots.token.size,
                "slots_contested": int((claims > 1).sum()),
            },
        )

    def _contested(self, plan: Plan, part: Part, offsets: Int64s, values: Bytes) -> Contested:
        computed = self.computed_dtype(plan, part)
        nans = FreeNans.of(values, computed) if computed else None
        return Contested(offsets, values, part.element_bytes, old_allowed=False, free_nans=nans)

    def _exact(
        self,
        plan: Plan,
        cells: Cells,
        part: Part,
        offsets: Int64s,
        values: Bytes,
        contested: Contested | None,
    ) -> Expected:
        computed = self.computed_dtype(plan, part)
        nans = FreeNans.of(values, computed) if computed else None
        buffer = "" if part.name == cells.name else cells.name
        return Expected(offsets, values, contested, nans, buffer)

    def _read_footprints(self, plan: Plan, token: Int64s) -> dict[str, Footprint]:
        """Everything but the caches, of a launch that has tokens."""
        a = plan.arguments
        out = {"slot_mapping": Footprint(IntervalSet([0], [8 * a["num_tokens"]]))}
        for name, needed in self.scalars(a).items() if self.reads_scalars(a) else ():
            out[name] = Footprint(IntervalSet([0], [needed]))
        for rows in self.inputs(a):
            runs = IntervalSet.of_runs(token * rows.stride_bytes(a), rows.row_bytes)
            out[rows.name] = Footprint(runs)
        if not is_absent(plan.buffers["counts"]):
            pair = IntervalSet([0], [16])
            out["counts"] = Footprint(pair, may_write=pair)
        return out

    def _lend(self, plan: Plan, footprints: dict[str, Footprint]) -> None:
        """A cache that lies in another's memory: what is written there changes that memory."""
        for name, buffer in plan.buffers.items():
            if buffer.placement.over is None or name not in footprints:
                continue
            root, begin = buffer.placement.over
            written = footprints[name].writable
            shifted = IntervalSet(written.begin + begin, written.end + begin)
            mine = footprints.get(root, Footprint())
            footprints[root] = replace(mine, lent=mine.lent.union(shifted))

    def _hostile(self, plan: Plan, slots: Slots) -> tuple[str, ...]:
        wrong = np.ones(slots.slot.size, dtype=np.bool_)
        wrong[slots.token] = False
        wrong &= slots.slot != PADDING_SLOT
        if not wrong.any():
            return ()
        token = int(np.flatnonzero(wrong)[0])
        pages, size = plan.arguments["num_pages"], plan.arguments["page_size_tokens"]
        return (f"slot_mapping[{token}]={slots.slot[token]} is no slot of {pages} x {size}",)

    # ---- the contract in torch -------------------------------------------------------------------

    def scattered_by_torch(
        self, plan: Plan, name: str, stored: Callable[[int], torch.Tensor]
    ) -> dict[int, bytes]:
        """Stores the uint8 bytes of each token in a strided tensor, and reads must-write runs back.

        Raises `CaseError` if the cache is above 256 MiB.
        """
        a = plan.arguments
        if self.refusals(plan):
            return {}
        (cells,) = (cells for cells in self.caches(a) if cells.name == name)
        shape = [count for _, count in cells.dimensions] + [cells.run_bytes]
        where = self.addresses_by_torch(plan, cells).as_strided(shape, (*cells.strides(a), 1))
        return self.scattered_to(plan, cells, where, stored)

    def addresses_by_torch(self, plan: Plan, cells: Cells) -> torch.Tensor:
        """int64 [required bytes] 0, 1, 2, ...: views of it are addresses. Raises `CaseError` if the
        cache is above 256 MiB."""
        import torch  # seconds, that a campaign need not wait for

        needed = cells.required_bytes(plan.arguments)
        if needed > 2**28:
            raise CaseError(f"the torch reference needs {needed} bytes; it makes at most 2^28")
        return torch.arange(needed)

    def scattered_to(
        self, plan: Plan, cells: Cells, where: torch.Tensor, stored: Callable[[int], torch.Tensor]
    ) -> dict[int, bytes]:
        """The same of one part of a cell, by the addresses of its bytes.

        where   int64 [num_pages, page_size_tokens, ..., run_bytes]
        stored  what a token stores there, uint8
        """
        import torch

        a = plan.arguments
        cache = torch.zeros(cells.required_bytes(a), dtype=torch.uint8)
        slots = torch.from_numpy(self.slots(plan).slot.copy())
        pages = slots.div(a["page_size_tokens"], rounding_mode="floor")
        inside = (slots >= 0) & (pages < a["num_pages"])
        torn: set[int] = set()
        last: dict[int, torch.Tensor] = {}
        for token in inside.nonzero().view(-1).tolist():
            slot, values = int(slots[token]), stored(token).reshape(where.shape[2:])
            if slot in last and not torch.equal(last[slot], values):
                torn.add(slot)
            last[slot] = values
            cache[where[slot // a["page_size_tokens"], slot % a["page_size_tokens"]]] = values
        out: dict[int, bytes] = {}
        for slot in sorted(set(last) - torn):
            runs = where[divmod(slot, a["page_size_tokens"])].reshape(-1, where.shape[-1])
            for run in runs:
                out[int(run[0])] = cache[run].numpy().tobytes()
        return dict(sorted(out.items()))

    # ---- the contract as a loop ------------------------------------------------------------------

    def expect_by_loop(self, plan: Plan) -> Expectation:
        """Token by token in plain integers."""
        if refusals := self.refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        a = plan.arguments
        raw = plan.buffers["slot_mapping"].image.values
        slots = [int.from_bytes(cell.tobytes(), "little", signed=True) for cell in raw]
        size, hostile = a["page_size_tokens"], False
        padding = skipped = 0
        written: list[int] = []
        claims: dict[str, dict[int, list[list[bytes]]]] = {
            part.name: {} for cells in self.caches(a) for part in cells.parts
        }
        for token, slot in enumerate(slots):
            if slot == -1:
                padding += 1
            elif slot < 0 or slot >= a["num_pages"] * size:
                skipped += 1
                hostile = True
            else:
                written.append(token)
                for name, runs in self.encode_by_loop(plan, token).items():
                    claims[name].setdefault(slot, []).append(runs)
        footprints = {}
        if slots:
            footprints = self._read_footprints(plan, np.array(written, dtype=np.int64))
        expected = {}
        for cells in self.caches(a):
            written_runs, torn_runs = IntervalSet(), IntervalSet()
            for part in cells.parts:
                must: list[tuple[int, bytes]] = []
                torn: list[tuple[int, bytes]] = []
                for slot, several in claims[part.name].items():
                    starts = self.begins_by_loop(a, cells, part, slot // size, slot % size)
                    agreed = all(runs == several[0] for runs in several)
                    for runs in several[:1] if agreed else several:
                        where = must if agreed else torn
                        where += zip(starts, runs, strict=True)
                contested = None
                if torn:
                    contested = self._contested(plan, part, *listed_runs(torn, part.run_bytes))
                expected[part.name] = self._exact(
                    plan, cells, part, *listed_runs(must, part.run_bytes), contested
                )
                for at, run in must:
                    written_runs = written_runs.union(IntervalSet([at], [at + len(run)]))
                for at, run in torn:
                    torn_runs = torn_runs.union(IntervalSet([at], [at + len(run)]))
            footprints[cells.name] = Footprint(must_write=written_runs, may_write=torn_runs)
        self._lend(plan, footprints)
        return Expectation(
            case_class=CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT,
            footprints=footprints,
            expected=expected,
            counts=Counts(padding, skipped),
        )

    def begins_by_loop(
        self, sizes: Mapping[str, int], cells: Cells, part: Part, page: int, slot: int
    ) -> list[int]:
        """Where the runs of a part begin, in the order of `encode_by_loop`."""
        page_stride, slot_stride, *inner = cells.strides(sizes)
        starts = [page * page_stride + slot * slot_stride + part.begin_bytes]
        for (_, count), stride in zip(cells.dimensions[2:], inner, strict=True):
            starts = [at + i * stride for at in starts for i in range(count)]
        return starts
