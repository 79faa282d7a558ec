"""restriding: the same sizes may come with any legal strides, launch after launch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from math import gcd

import numpy as np

from pagefuzz.oracles import contents
from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.cells import Slots
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Bytes, Dtype, Image, Plan, PlannedBuffer
from pagefuzz.oracles.nests import Nest
from pagefuzz.oracles.observation import Moved, RelatedPlan
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.page_copies import PageCopyOperation
from pagefuzz.oracles.planning import MAX_MEMORY_BYTES
from pagefuzz.oracles.refusals import is_absent
from pagefuzz.oracles.relation import RelationJudgement, choose
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.traced_gather import TracedGather
from pagefuzz.oracles.writes import WriteOperation

_TABLE = "block_table"

#: Bytes that strides may have to be multiples of, beside those of their element.
_COARSER = (4, 8)

#: A buffer may grow so many times, or to so many bytes; a cache whose pages are all at one place,
#: legal where it is only read, would come to any size.
_GROWTH, _SMALL_BYTES = 3, 2**24

#: Runs of a buffer: int64 [n, pieces] offsets, and the bytes of each piece.
Pieces = tuple[tuple[Int64s, int], ...]


class RestridingJudgement(RelationJudgement):
    name = "restriding"
    summary = "no output changes when the same sizes are launched again with other strides"
    when = "with other strides"

    def derive(
        self, operation: Operation, plan: Plan, expectation: Expectation
    ) -> RelatedPlan | None:
        """Every run keeps what it holds, wherever it lies now; None if no stride counts."""
        nests = _nests(operation, plan.arguments)
        names = [name for nest in nests for name, _ in nest.counted]
        if not names:
            return None
        for wanted in (_some(plan, names), names):
            derived = _restrided(operation, plan, nests, wanted)
            if derived.arguments != plan.arguments:
                return _related(operation, plan, derived, names)
        return None

    def as_case(self, operation: Operation, plan: Plan, expectation: Expectation) -> Case | None:
        """With the other strides as its sizes; what memory holds follows from the seed again."""
        for derived in self.related(operation, plan, expectation):
            placements = dict(plan.case.placements)
            for name, buffer in derived.plan.buffers.items():
                usual, place = plan.buffers[name].placement, buffer.placement
                if (place.over, place.after_bytes) != (usual.over, usual.after_bytes):
                    own = placements.get(name, Placement())
                    placements[name] = replace(own, over=place.over, after_bytes=place.after_bytes)
            sizes = {name: derived.plan.arguments[name] for name in plan.case.sizes}
            return replace(plan.case, sizes=sizes, placements=placements, relations=())
        return None


def _some(plan: Plan, names: list[str]) -> list[str]:
    """All strides, one alone, or some of them: what is kept may know any part of them."""
    pick = partial(choose, plan, RestridingJudgement.name)
    match pick("how many", 3):
        case 0:
            return names
        case 1:
            return [names[pick("which", len(names))]]
    return [name for name in names if pick(f"{name} too", 2)] or names


def _nests(operation: Operation, sizes: Mapping[str, int]) -> tuple[Nest, ...]:
    """What of an operation has strides, none of them twice."""
    if isinstance(operation, TracedGather):
        rows = (
            Nest(name, ((f"{name}_row_stride_bytes", sizes[f"{name}_rows"]),), row_bytes)
            for name, (_, row_bytes) in operation.rows_of(sizes).items()
        )
        table = Nest(_TABLE, (("table_row_stride", sizes["num_requests"]),), sizes["table_width"])
        return Nest.of_cells(operation.source_cells(sizes)), *rows, table
    assert isinstance(operation, WriteOperation | PageCopyOperation)
    cells = tuple(Nest.of_cells(one) for one in dict.fromkeys(operation.caches(sizes)))
    if isinstance(operation, PageCopyOperation):
        return cells
    return *(Nest.of_rows(rows, sizes) for rows in operation.inputs(sizes)), *cells


# ---- other strides ---------------------------------------------------------------------------


def _restrided(
    operation: Operation, plan: Plan, nests: tuple[Nest, ...], wanted: Collection[str]
) -> Plan:
    """The plan with other strides, as many of those that are wanted as its memory allows; contents
    are left where they were."""
    shared = {
        name
        for buffer in plan.buffers.values()
        if buffer.placement.over is not None
        for name in (buffer.name, buffer.placement.over[0])
    }
    derived = plan
    for nest in nests:
        if nest.buffer not in shared and not {name for name, _ in nest.counted}.isdisjoint(wanted):
            derived = _with_others(operation, derived, nest, wanted)
    together = [nest for nest in nests if nest.buffer in shared]
    if not {name for nest in together for name, _ in nest.counted}.isdisjoint(wanted):
        derived = _multiplied(operation, derived, together)
    return derived


def _with_others(operation: Operation, plan: Plan, nest: Nest, wanted: Collection[str]) -> Plan:
    """The plan as it is if there is no memory."""
    a = plan.arguments
    pick = partial(choose, plan, RestridingJudgement.name)
    unit = 1 if nest.buffer == _TABLE else Dtype(plan.buffers[nest.buffer].dtype).size_bytes
    for coarse in dict.fromkeys((unit, *_COARSER)):
        # Coarser until nothing is misaligned, as the operation would have it.
        derived = _resized(operation, plan, {**a, **nest.others(a, wanted, coarse, pick)})
        if derived is not None and not operation.refusals(derived):
            return derived
    return plan


def _multiplied(operation: Operation, plan: Plan, nests: list[Nest]) -> Plan:
    """Of caches in one buffer: all their strides, and the distance between them; the plan as it is
    if there is no memory."""
    factor = 2 + choose(plan, RestridingJudgement.name, "factor", 2)
    arguments = dict(plan.arguments)
    for nest in nests:
        arguments |= nest.multiplied(plan.arguments, factor)
    buffers = dict(plan.buffers)
    for name, buffer in plan.buffers.items():
        if buffer.placement.over is not None:
            root, begin = buffer.placement.over
            place = replace(buffer.placement, over=(root, factor * begin))
            buffers[name] = replace(buffer, placement=place)
    derived = _resized(operation, replace(plan, buffers=buffers), arguments)
    return plan if derived is None or operation.refusals(derived) else derived


def _resized(operation: Operation, plan: Plan, arguments: Mapping[str, int]) -> Plan | None:
    """The plan with those arguments, each buffer as long as they need; None if one would be much
    longer, or all of them too long."""
    assert isinstance(operation, TracedGather | WriteOperation | PageCopyOperation)
    required = operation.required(arguments)
    buffers = {}
    for name, buffer in plan.buffers.items():
        if not is_absent(buffer):
            old = buffer.required_bytes
            if required[name] > max(_GROWTH * old, _SMALL_BYTES):
                return None
            buffer = replace(
                buffer,
                required_bytes=required[name],
                extent_bytes=buffer.extent_bytes + required[name] - old,
            )
        buffers[name] = buffer
    for buffer in list(buffers.values()):
        if buffer.placement.over is not None:
            root, begin = buffer.placement.over
            lent = buffers[root]
            more = max(begin + buffer.extent_bytes - lent.memory_bytes, 0)
            place = replace(lent.placement, after_bytes=lent.placement.after_bytes + more)
            buffers[root] = replace(lent, placement=place)
    if sum(buffer.memory_bytes for buffer in buffers.values()) > MAX_MEMORY_BYTES:
        return None
    return Plan(plan.case, arguments, buffers)


# ---- the same contents at their new places -----------------------------------------------------


def _related(operation: Operation, plan: Plan, derived: Plan, names: list[str]) -> RelatedPlan:
    old, new = plan.arguments, derived.arguments
    changed = [f"{name} {old[name]} -> {new[name]}" for name in names if new[name] != old[name]]
    if isinstance(operation, TracedGather):
        related = _gathered(operation, plan, derived)
    elif isinstance(operation, WriteOperation):
        related = _written(operation, plan, derived)
    else:
        assert isinstance(operation, PageCopyOperation)
        related = _copied(operation, plan, derived)
    return replace(related, change=f"other strides: {', '.join(changed)}")


def _gathered(operation: TracedGather, plan: Plan, derived: Plan) -> RelatedPlan:
    """The table has its ids, src the payload of mapped entries, at their new places."""
    a = derived.arguments
    rows = operation.row_map(plan)
    pages = operation.pages(plan, rows)
    images = {}
    if (stride := a["table_row_stride"]) != plan.arguments["table_row_stride"]:
        element = rows.page_request * stride + rows.page_column
        images[_TABLE] = Image.of_elements(element, pages.page_id.astype(np.int32))
    size = a["page_size_tokens"]
    page, slot = np.divmod(np.unique(pages.page_id[rows.page] * size + rows.slot), size)
    old, new = (operation.entry_pieces(one, page, slot) for one in (plan, derived))
    src = {} if _same(old, new) else {"src": _moved_image(plan, "src", old, new)}
    # What src holds is not what a reference makes of its place, so that only footprints are right.
    plain = derived.with_images(images | dict.fromkeys(src, Image.empty()))
    footprints = operation.expect(plain)
    written, moved = np.unique(rows.row), {}
    for name, (row_stride, row_bytes) in operation.rows_of(plan.arguments).items():
        new_stride, _ = operation.rows_of(a)[name]
        if new_stride != row_stride:
            runs = Moved(written * row_stride, written * new_stride, row_bytes)
            moved[name] = (runs,)
    return RelatedPlan(plain.with_images(src), footprints, "", moved)


def _written(operation: WriteOperation, plan: Plan, derived: Plan) -> RelatedPlan:
    """Inputs have their rows at their new places, the cells that are compared lie at theirs."""
    a, new = plan.arguments, derived.arguments
    slots = operation.slots(plan)
    images = {}
    for rows, new_rows in zip(operation.inputs(a), operation.inputs(new), strict=True):
        stride = rows.stride_bytes(a)
        if new_rows.stride_bytes(new) != stride:
            held = operation.input_bytes(plan, rows.name, slots.token * stride, rows.row_bytes)
            images[rows.name] = Image(slots.token * new_rows.stride_bytes(new), held)
    derived = derived.with_images(images)
    _, first = np.unique(slots.slot[slots.token], return_index=True)
    each = Slots(slots.slot, slots.token[first], slots.page[first], slots.offset[first])
    changed = {
        before.name
        for before, after in zip(operation.caches(a), operation.caches(new), strict=True)
        if before.strides(a) != after.strides(new)
    }
    moved: dict[str, tuple[Moved, ...]] = {}
    for (name, begins, size_bytes), (_, new_begins, _) in zip(
        operation.stored_runs(plan, each), operation.stored_runs(derived, each), strict=True
    ):
        if name in changed:
            runs = Moved(begins.ravel(), new_begins.ravel(), size_bytes)
            moved[name] = (*moved.get(name, ()), runs)
    return RelatedPlan(derived, operation.expect(derived), "", moved)


def _copied(operation: PageCopyOperation, plan: Plan, derived: Plan) -> RelatedPlan:
    """Pages that are copied are at their new places, and go to such."""
    moves = operation.page_pairs(plan).moves
    size = plan.arguments["page_bytes"]
    source, destination = operation.caches(plan.arguments)
    new_source, new_destination = operation.caches(derived.arguments)
    pages = np.unique(moves[:, 0])
    old = ((operation.page_offsets(plan, source, pages), size),)
    new = ((operation.page_offsets(derived, new_source, pages), size),)
    images = {} if _same(old, new) else {source.name: _moved_image(plan, source.name, old, new)}
    to = operation.page_offsets(plan, destination, moves[:, 1]).ravel()
    new_to = operation.page_offsets(derived, new_destination, moves[:, 1]).ravel()
    moved = {} if np.array_equal(to, new_to) else {destination.name: (Moved(to, new_to, size),)}
    footprints = operation.expect(derived)
    return RelatedPlan(derived.with_images(images), footprints, "", moved)


def _same(old: Pieces, new: Pieces) -> bool:
    return all(np.array_equal(a, b) for (a, _), (b, _) in zip(old, new, strict=True))


def _moved_image(plan: Plan, name: str, old: Pieces, new: Pieces) -> Image:
    """What a buffer holds at each piece of `old`, at its place in `new`."""
    width = gcd(*(size_bytes for _, size_bytes in old))
    offsets, values = [], []
    for (begins, size_bytes), (new_begins, _) in zip(old, new, strict=True):
        held = _held(plan, plan.buffers[name], begins.ravel(), size_bytes)
        within = np.arange(0, size_bytes, width, dtype=np.int64)
        offsets.append((new_begins.ravel()[:, None] + within).ravel())
        values.append(held.reshape(-1, width))
    at = np.concatenate(offsets)
    order = np.argsort(at)
    return Image(at[order], np.concatenate(values)[order])


def _held(plan: Plan, buffer: PlannedBuffer, begins: Int64s, size_bytes: int) -> Bytes:
    """uint8 [n, size_bytes]: what may be read at each of `begins`, which may overlap: payload, and
    over it what the case gives."""
    origin = buffer.payload_origin_bytes
    held = contents.payload_at(plan.case.seed, begins + origin, size_bytes).copy()
    at, values = buffer.image.offsets, buffer.image.values
    if not at.size:
        return held
    width = values.shape[1]
    low = np.searchsorted(at, begins - width + 1)
    count = np.searchsorted(at, begins + size_bytes) - low
    row = np.repeat(np.arange(begins.size), count)
    nth = np.repeat(low - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
    byte = (at[nth] - begins[row])[:, None] + np.arange(width)
    inside = (byte >= 0) & (byte < size_bytes)
    held[np.broadcast_to(row[:, None], byte.shape)[inside], byte[inside]] = values[nth][inside]
    return held
