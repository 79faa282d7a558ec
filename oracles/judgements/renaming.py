"""renaming: physical pages may have any ids; the output depends on what they hold."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np

from pagefuzz.oracles import contents
from pagefuzz.oracles.cells import Slots
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.index_values import int32s
from pagefuzz.oracles.layout import Image, Plan
from pagefuzz.oracles.observation import Moved, RelatedPlan
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.relation import FILL, RelationJudgement, choose
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.traced_gather import TracedGather
from pagefuzz.oracles.writes import WriteOperation

_SHOWN = 4


class _Names:
    """New ids: page p becomes (shift - p) mod num_pages."""

    def __init__(self, plan: Plan, used: Int64s) -> None:
        """used  int64 [n], the ids in use, distinct; at least one of them gets another name."""
        self._pages = plan.arguments["num_pages"]
        self._shift = choose(plan, RenamingJudgement.name, "shift", self._pages)
        if np.array_equal(self.of(used), used):
            self._shift = (self._shift + 1) % self._pages
        shown = [f"{old}->{new}" for old, new in zip(used, self.of(used[:_SHOWN]), strict=False)]
        more = ", ..." if used.size > _SHOWN else ""
        self.text = f"pages renamed {', '.join(shown)}{more}"

    def of(self, page: Int64s) -> Int64s:
        new: Int64s = (self._shift - page) % self._pages
        return new


class RenamingJudgement(RelationJudgement):
    name = "renaming"
    summary = "no output changes when physical pages change places and the ids follow"
    when = "when pages are renamed"

    def derive(
        self, operation: Operation, plan: Plan, expectation: Expectation
    ) -> RelatedPlan | None:
        if plan.arguments["num_pages"] < 2:
            return None
        if isinstance(operation, TracedGather):
            return _gathered(operation, plan, expectation)
        assert isinstance(operation, WriteOperation)
        return _written(operation, plan)


def _gathered(operation: TracedGather, plan: Plan, expectation: Expectation) -> RelatedPlan | None:
    """The payload of every mapped entry moves with its page.

    None where entries share bytes, before or after: these would have to be in two places.
    """
    rows = operation.row_map(plan)
    pages = operation.pages(plan, rows)
    size = plan.arguments["page_size_tokens"]
    page, slot = np.divmod(np.unique(pages.page_id[rows.page] * size + rows.slot), size)
    names = _Names(plan, np.unique(page))
    old = operation.entry_pieces(plan, page, slot)
    new = operation.entry_pieces(plan, names.of(page), slot)
    if _overlap(old) or _overlap(new):
        return None
    table = plan.buffers["block_table"]
    ids = names.of(int32s(table.image)).astype(np.int32)
    renamed = replace(table, image=Image.of_elements(table.image.offsets // 4, ids))
    mapped = Plan(plan.case, plan.arguments, {**plan.buffers, "block_table": renamed})
    # The payload of `mapped` is not where its table says, so that only footprints are right.
    footprints = operation.expect(mapped)
    source = plan.buffers["src"]
    image = _moved_payload(plan, expectation, old, new)
    buffers = {**mapped.buffers, "src": replace(source, image=image)}
    return RelatedPlan(Plan(plan.case, plan.arguments, buffers), footprints, names.text)


def _overlap(pieces: tuple[tuple[Int64s, int], ...]) -> bool:
    begin = np.concatenate([offsets.ravel() for offsets, _ in pieces])
    end = np.concatenate([offsets.ravel() + size_bytes for offsets, size_bytes in pieces])
    order = np.argsort(begin)
    return bool((end[order][:-1] > begin[order][1:]).any())


def _moved_payload(
    plan: Plan,
    expectation: Expectation,
    old: tuple[tuple[Int64s, int], ...],
    new: tuple[tuple[Int64s, int], ...],
) -> Image:
    """What the source holds at each piece of `old`, at its place in `new`."""
    source, readable = plan.buffers["src"], expectation.footprint("src").may_read
    width = gcd(*(size_bytes for _, size_bytes in old))
    offsets, values = [], []
    for (begins, size_bytes), (new_begins, _) in zip(old, new, strict=True):
        order = np.argsort(begins.ravel())
        held = contents.initial_blocks(
            source, readable, plan.case.seed, FILL, begins.ravel()[order], size_bytes
        )
        within = np.arange(0, size_bytes, width, dtype=np.int64)
        offsets.append((new_begins.ravel()[order][:, None] + within).ravel())
        values.append(held.reshape(-1, width))
    at = np.concatenate(offsets)
    order = np.argsort(at)
    return Image(at[order], np.concatenate(values)[order])


def _written(operation: WriteOperation, plan: Plan) -> RelatedPlan | None:
    """Slots follow their pages; what tokens store is then found in the renamed pages.

    Slots that several tokens name are left out: which of them wins is free.
    """
    slots = operation.slots(plan)
    names = _Names(plan, np.unique(slots.page))
    size = plan.arguments["page_size_tokens"]
    slot = slots.slot.copy()
    slot[slots.token] = names.of(slots.page) * size + slots.offset
    mapping = plan.buffers["slot_mapping"]
    image = Image.of_elements(mapping.image.offsets // 8, slot)
    buffers = {**plan.buffers, "slot_mapping": replace(mapping, image=image)}
    derived = Plan(plan.case, plan.arguments, buffers)
    _, nth, claims = np.unique(slots.slot[slots.token], return_inverse=True, return_counts=True)
    alone = np.flatnonzero(claims[nth] == 1)
    old, new = _only(slots, alone), _only(operation.slots(derived), alone)
    moved: dict[str, tuple[Moved, ...]] = {}
    for (name, begins, size_bytes), (_, new_begins, _) in zip(
        operation.stored_runs(plan, old), operation.stored_runs(derived, new), strict=True
    ):
        runs = Moved(begins.ravel(), new_begins.ravel(), size_bytes)
        moved[name] = (*moved.get(name, ()), runs)
    return RelatedPlan(derived, operation.expect(derived), names.text, moved)


def _only(slots: Slots, which: Int64s) -> Slots:
    return Slots(slots.slot, slots.token[which], slots.page[which], slots.offset[which])
