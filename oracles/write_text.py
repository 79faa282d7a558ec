"""What a byte of a writer's buffers is called, and where bytes in a wrong place come from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pagefuzz.oracles import contents
from pagefuzz.oracles.gather_text import oddities, vector_text
from pagefuzz.oracles.layout import Bytes, Dtype, Plan, Role
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.origin import Origin, OriginKind

if TYPE_CHECKING:
    from pagefuzz.oracles.cells import Cells, Rows, Slots
    from pagefuzz.oracles.rows import Int64s


class WriteText(Operation):
    """The sentences of a writer; `writes.WriteOperation` is what they speak of."""

    @abstractmethod
    def inputs(self, sizes: Mapping[str, int]) -> tuple[Rows, ...]: ...

    @abstractmethod
    def caches(self, sizes: Mapping[str, int]) -> tuple[Cells, ...]: ...

    @abstractmethod
    def slots(self, plan: Plan) -> Slots: ...

    @abstractmethod
    def encode(self, plan: Plan, token: Int64s) -> Mapping[str, Bytes]: ...

    @abstractmethod
    def payload_text(self, plan: Plan) -> str:
        """What `describe` says of elements and encoding."""

    def locate(self, plan: Plan, buffer: str, offset_bytes: int) -> str:
        if (cells := self._cache(plan, buffer)) is not None:
            return _cell_place(plan, cells, offset_bytes)
        for rows in self.inputs(plan.arguments):
            if rows.name == buffer:
                stride = rows.stride_bytes(plan.arguments)
                row, byte = divmod(offset_bytes, stride) if stride else (0, offset_bytes)
                of = "" if byte < rows.row_bytes else f" of a row of {rows.row_bytes}"
                return f"row {row}, byte {byte}{of}"
        unit, count = {
            "slot_mapping": (8, plan.arguments["num_tokens"]),
            "counts": (8, 2),
        }.get(buffer, (4, plan.buffers[buffer].required_bytes // 4))
        return f"element {offset_bytes // unit} of {count}"

    def mapping(self, plan: Plan, buffer: str, offset_bytes: int) -> str | None:
        if self.refusals(plan):
            return None
        slots = self.slots(plan)
        if buffer == "slot_mapping":
            token = offset_bytes // 8
            known = 0 <= token < slots.slot.size
            return f"token {token} -> slot {slots.slot[token]}" if known else None
        if (cells := self._cache(plan, buffer)) is not None:
            page, slot, _ = cells.place(plan.arguments, offset_bytes)
            tokens = slots.token[(slots.page == page) & (slots.offset == slot)].tolist()
            if not tokens or cells.element(plan.arguments, offset_bytes) is None:
                return "no token is stored there"
        else:
            tokens = self._tokens_of_row(plan, slots, buffer, offset_bytes)
        if tokens is None:
            return None
        size = plan.arguments["page_size_tokens"]
        return (
            "; ".join(
                f"token {token} -> slot {slots.slot[token]} -> page {slots.slot[token] // size} "
                f"offset {slots.slot[token] % size}"
                for token in tokens[:3]
            )
            or "no token that is stored has it"
        )

    def _tokens_of_row(
        self, plan: Plan, slots: Slots, buffer: str, offset_bytes: int
    ) -> list[int] | None:
        for rows in self.inputs(plan.arguments):
            if rows.name == buffer:
                begin = slots.token * rows.stride_bytes(plan.arguments)
                inside = (begin <= offset_bytes) & (offset_bytes < begin + rows.row_bytes)
                found: list[int] = slots.token[inside].tolist()
                return found
        return None

    def origin(self, plan: Plan, buffer: str, offset_bytes: int, found: Bytes) -> Origin | None:
        cells = self._cache(plan, buffer)
        if cells is not None:
            _, begin = plan.base(buffer)
            at = np.array([offset_bytes + begin], dtype=np.int64)
            for fill in contents.FILLS:
                old = contents.destination_poison_at(plan.case.seed, fill, at, found.size)
                if np.array_equal(old[0], found):
                    return Origin(OriginKind.OLD, "what was there before")
        if not found.any():
            return Origin(OriginKind.ZEROS, "zeros")
        if (traced := contents.trace(plan.case.seed, found)) is not None:
            return self._traced_origin(plan, traced)
        if cells is None or self.refusals(plan):
            return None
        return self._stored_origin(plan, cells, offset_bytes, found)

    def _traced_origin(self, plan: Plan, traced: contents.Trace) -> Origin | None:
        if traced.role is Role.DESTINATION:
            return Origin(OriginKind.FORBIDDEN, "what a cache held before")
        if not traced.is_payload:
            return Origin(OriginKind.FORBIDDEN, "bytes of an input that no stored token has")
        for buffer in plan.buffers.values():
            at = traced.offset_bytes - buffer.payload_origin_bytes
            if buffer.role is Role.SOURCE and 0 <= at < max(buffer.memory_bytes, 1):
                return Origin(
                    OriginKind.ENTRY, f"{buffer.name} {self.locate(plan, buffer.name, at)}"
                )
        return None

    def _stored_origin(
        self, plan: Plan, cells: Cells, offset_bytes: int, found: Bytes
    ) -> Origin | None:
        """Compares with the same bytes of what every token stores; None if it could be chance."""
        element = cells.element(plan.arguments, offset_bytes)
        if element is None:
            return None
        part, run, at = element
        slots = self.slots(plan)
        stored = self.encode(plan, slots.token)[part.name][:, run, at : at + found.size]
        seen = found[: stored.shape[1]]
        same = np.flatnonzero((stored[:, : seen.size] == seen).all(axis=1))
        if not same.size or slots.token.size > 256**seen.size // 20:
            return None
        return Origin(OriginKind.ENTRY, f"what token {slots.token[same[0]]} stores")

    def describe(self, plan: Plan) -> str:
        a = plan.arguments
        parts = [
            f"T={a['num_tokens']}",
            f"BS={a['page_size_tokens']}",
            f"NB={a['num_pages']}",
        ]
        image = plan.buffers["slot_mapping"].image
        if image.offsets.size:
            parts.append(f"slots={vector_text(image.values.view(np.int64).ravel())}")
        parts.append(self.payload_text(plan))
        dense = {}
        for rows in self.inputs(a):
            if a[rows.rows] > 1:
                dense[rows.stride] = rows.row_bytes
            if a[rows.rows] != a["num_tokens"]:
                parts.append(f"{rows.rows}={a[rows.rows]}")
        for cells in self.caches(a):
            inner = cells.run_bytes
            for name, count in [*reversed(cells.dimensions[2:]), *cells.dimensions[1:2]]:
                dense[name], inner = inner, inner * max(count, 1)
            dense[cells.dimensions[0][0]] = inner
        strides = self._counted_strides(a)
        padded = [f"{n}={a[n]}" for n, usual in dense.items() if n in strides and a[n] != usual]
        parts.append(f"{' '.join(padded) or 'dense'}, seed {plan.case.seed}")
        return "  ".join([*parts, *oddities(plan)])

    @abstractmethod
    def _counted_strides(self, sizes: Mapping[str, int]) -> dict[str, int]: ...

    def _cache(self, plan: Plan, buffer: str) -> Cells | None:
        return next((c for c in self.caches(plan.arguments) if c.name == buffer), None)


def dtype_text(code: int) -> str:
    known = {int(dtype): dtype.name.lower() for dtype in Dtype}
    return known.get(code, f"dtype {code}")


def _cell_place(plan: Plan, cells: Cells, offset_bytes: int) -> str:
    if offset_bytes < 0:
        return "in front of page 0"
    required_bytes = cells.required_bytes(plan.arguments)
    if offset_bytes >= required_bytes:
        return f"past its {required_bytes} bytes"
    page, slot, what = cells.place(plan.arguments, offset_bytes)
    return f"page {page}{'' if slot is None else f' slot {slot}'}, {what}"
