"""What copy_blocks and swap_blocks have in common: whole pages go to other pages, as pairs say.

Planning, refusals, footprints, class and counts. An operation says where its pages lie.

Decisions where contracts.md is open, for both operations:

* A page has page_bytes bytes of payload, 1..2^31-1 and a multiple of element_bytes (1, 2, 4 or 8).
  Bases of caches, and strides that are not ignored, are multiples of element_bytes; both caches and
  scratch have each any dtype of that size, since pages are moved as bytes. pairs is aligned to 8
  bytes and has rank 2.
* Ignored strides are never examined: those of a dimension of size <= 1.
* A cache needs 0 bytes if one of its dimensions is 0; a cache that is written must nest. pairs
  needs 16 * num_pairs.
* With num_pairs == 0 a launch reads nothing. Without pages every pair that is not padding is
  skipped.
* pairs are read by the launcher, before it returns: a captured launch replays the pairs of its
  capture. They keep their class all the same: an id that is neither -1 nor a page's makes a case
  hostile, beside a -1 too, where the pair is padding.
* What pairs hold is examined last: pairs that contradict each other, and cycles without scratch,
  are refused only where everything else is sound.
* counts is absent when its pointer is null and its extent 0; dtype and rank are then not examined.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pagefuzz.oracles import contents, index_values
from pagefuzz.oracles.case import Case, CaseError
from pagefuzz.oracles.cells import Cells
from pagefuzz.oracles.expectation import Counts, Expectation, Expected, Footprint, Refusal
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import BufferRole, Bytes, Dtype, Image, Plan, Role
from pagefuzz.oracles.page_copy_text import PageCopyText
from pagefuzz.oracles.page_pairs import PADDING_PAGE, PagePairs
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
from pagefuzz.oracles.rows import MAX_CLAIMS, Int64s
from pagefuzz.oracles.verdict import CaseClass

if TYPE_CHECKING:
    import torch

PAIRS = BufferRole("pairs", Role.INDEX, host=True)
COUNTS = BufferRole("counts", Role.COUNTERS, optional=True)

ELEMENT_DTYPES = {1: Dtype.U8, 2: Dtype.U16, 4: Dtype.U32, 8: Dtype.U64}

_COUNT = range(2**31)
_TORCH_BYTES = 2**26


class PageCopyOperation(PageCopyText):
    """An operation that copies the pages that pairs name."""

    counted = (
        "pair with the padding id -1 on either side",
        "pair with an id that names no page",
    )

    #: Sizes that count something.
    numbers: ClassVar[tuple[str, ...]]
    #: Ranks of the caches, and of scratch where there is one.
    ranks: ClassVar[Mapping[str, int]]

    @abstractmethod
    def cycle_refusals(self, plan: Plan, *, has_cycle: bool) -> tuple[Refusal, ...]:
        """What a cycle needs and does not have."""

    @abstractmethod
    def staging(self, plan: Plan, *, has_cycle: bool) -> Mapping[str, Footprint]:
        """Footprints of memory that is neither cache nor pairs."""

    # ---- planning --------------------------------------------------------------------------------

    @property
    def ranges(self) -> Mapping[str, tuple[str, range]]:
        """Size -> (refusal reason, legal range)."""
        numbers = dict.fromkeys(self.numbers, ("size_range", _COUNT))
        return MappingProxyType({**numbers, "page_bytes": ("page_bytes", range(1, 2**31))})

    def clamped(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes as they are, or the nearest with which memory can be laid out."""
        out = dict(sizes)
        for name, (_, legal) in self.ranges.items():
            out[name] = min(max(sizes[name], legal.start), legal.stop - 1)
        if out["element_bytes"] not in ELEMENT_DTYPES:
            out["element_bytes"] = 1
        for name in self.counted_strides(out):
            out[name] = max(sizes[name], 0)
        return out

    def counted_strides(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Strides that are not ignored."""
        return tuple(
            name
            for cells in dict.fromkeys(self.caches(sizes))
            for name, count in cells.dimensions
            if count > 1
        )

    def required(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Required bytes of every buffer, optional ones as if present; exact integers."""
        required = {cells.name: cells.required_bytes(sizes) for cells in self.caches(sizes)}
        for name in self.ranks:
            required.setdefault(name, sizes["page_bytes"])
        return required | {"pairs": 16 * sizes["num_pairs"], "counts": 16}

    def _plan(self, case: Case) -> Plan:
        for name, values in case.values.items():
            empty = values.recipe == "literal" and not values.parameters["values"]
            if name in self.ranks and not (name == "scratch" and empty):
                raise CaseError(
                    f"{name} holds payload; values may name pairs, counts, and scratch, which an "
                    "empty literal makes present"
                )
        if "pairs" not in case.values:
            raise CaseError(f"values of {self.name} needs 'pairs'; it is not optional")
        laid = self.clamped(case.sizes)
        dtype = ELEMENT_DTYPES[laid["element_bytes"]]
        types = {name: (int(dtype), rank) for name, rank in self.ranks.items()}
        types |= {"pairs": (Dtype.I64, 2), "counts": (Dtype.I64, 1)}
        required = self.required(laid)
        sound = laid == dict(case.sizes)
        buffers = planned_buffers(case, self.buffers, required, types, sound=sound)
        arguments = {name: case.overrides.get(name, case.sizes[name]) for name in self.sizes}
        plan = Plan(case, arguments, buffers)
        refused = bool(self.argument_refusals(plan))
        sizes = case.sizes if refused else arguments
        images = {}
        for name, count in (("pairs", 2 * sizes["num_pairs"]), ("counts", 2)):
            if name in case.values and not (refused and sizes["num_pairs"] not in _COUNT):
                elements = index_values.vector(case.values[name], count, index_values.INT64, name)
                images[name] = Image.of_elements(np.arange(count, dtype=np.int64), elements)
        plan = Plan(case, arguments, buffers).with_images(images)
        if not self.refusals(plan):
            check_memory(plan, sum(required.values()))
            self._check_payload(plan)
        return plan

    def _check_payload(self, plan: Plan) -> None:
        pages = len(self.page_pairs(plan).moves) * self._layers(plan.arguments).size
        if pages > MAX_CLAIMS or pages * plan.arguments["page_bytes"] > MAX_PAYLOAD_BYTES:
            raise CaseError(
                f"{pages} pages of {plan.arguments['page_bytes']} bytes are copied; at most "
                f"{MAX_CLAIMS} of {MAX_PAYLOAD_BYTES} bytes together can be expanded"
            )

    # ---- refusals --------------------------------------------------------------------------------

    def argument_refusals(self, plan: Plan) -> tuple[Refusal, ...]:
        """Those that do not depend on what pairs holds."""
        found: Found = []
        a, buffers = plan.arguments, plan.buffers
        measurable = check_ranges(found, a, self.ranges)
        laid = self.clamped(a)
        unit = laid["element_bytes"]
        if a["element_bytes"] not in ELEMENT_DTYPES:
            found.append(
                Refusal("element_bytes", f"element_bytes={a['element_bytes']} is not 1, 2, 4 or 8")
            )
        if a["page_bytes"] % unit:
            found.append(
                Refusal("page_bytes", f"page_bytes={a['page_bytes']} is not a multiple of {unit}")
            )
        strides = {name: a[name] for name in self.counted_strides(laid)}
        measurable &= check_strides(found, strides)
        for name, stride in strides.items():
            if stride % unit:
                found.append(Refusal("alignment", f"{name}={stride} is not a multiple of {unit}"))
        optional = [role.name for role in self.buffers if role.optional]
        absent = [name for name in optional if is_absent(buffers[name])]
        same_size = [dtype for dtype in Dtype if dtype.size_bytes == unit]
        types = {name: (rank, unit, same_size) for name, rank in self.ranks.items()}
        types |= {"pairs": (2, 8, [Dtype.I64]), "counts": (1, 8, [Dtype.I64])}
        for name, (rank, alignment, dtypes) in types.items():
            check_pointer(found, plan, name, alignment)
            if name not in absent:
                check_dtype(found, buffers[name], dtypes)
                check_rank(found, buffers[name], rank)
        destination = self.caches(laid)[1]
        if measurable:
            required = self.required(a) | dict.fromkeys(absent, 0)
            required.pop("scratch", None)  # only a cycle needs it
            check_extents(found, plan, required)
            if not destination.nests(a):
                found.append(
                    Refusal("not_nested", f"pages of {destination.name} overlap: its strides")
                )
        written = {role.name for role in self.buffers if role.role.is_destination}
        others = [role.name for role in self.buffers if role.name not in written]
        for name in sorted(written):
            check_overlaps(found, plan, name, others)
        return tuple(found)

    def refusals(self, plan: Plan) -> tuple[Refusal, ...]:
        if found := self.argument_refusals(plan):
            return found
        pairs = self.page_pairs(plan)
        if pairs.conflict is not None:
            return (_conflict(*pairs.conflict),)
        return self.cycle_refusals(plan, has_cycle=bool(pairs.on_cycle.any()))

    # ---- the contract, vectorised ----------------------------------------------------------------

    def page_pairs(self, plan: Plan) -> PagePairs:
        """pairs as they lie in memory, of a plan whose arguments are sound."""
        image = plan.buffers["pairs"].image
        ids = image.values.view(np.int64).ravel() if image.offsets.size else np.empty(0, np.int64)
        source, destination = self.caches(plan.arguments)
        return PagePairs.of(
            ids.reshape(-1, 2),
            source.dimensions[-1][1],
            destination.dimensions[-1][1],
            one_cache=source == destination,
        )

    def page_offsets(self, plan: Plan, cells: Cells, pages: Int64s) -> Int64s:
        """int64 [layers, pages]: where each page begins in every layer."""
        *_, page_stride = cells.strides(plan.arguments)
        layer_stride = cells.strides(plan.arguments)[0] if len(cells.dimensions) > 1 else 0
        layers = self._layers(plan.arguments)
        return layers[:, None] * layer_stride + pages[None, :] * page_stride

    def _layers(self, sizes: Mapping[str, int]) -> Int64s:
        layers = [count for _, count in self.caches(sizes)[0].dimensions[:-1]]
        return np.arange(layers[0] if layers else 1, dtype=np.int64)

    def expect(self, plan: Plan) -> Expectation:
        if refusals := self.refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        pairs = self.page_pairs(plan)
        source, destination = self.caches(plan.arguments)
        begin = self.page_offsets(plan, source, pairs.moves[:, 0]).ravel()
        to = self.page_offsets(plan, destination, pairs.moves[:, 1]).ravel()
        order = np.argsort(to)
        origin = plan.buffers[source.name].payload_origin_bytes
        values = contents.payload_at(
            plan.case.seed, begin[order] + origin, plan.arguments["page_bytes"]
        )
        hostile = _hostile(pairs)
        return Expectation(
            case_class=CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT,
            hostile=hostile,
            footprints=self._footprints(plan, begin, to, has_cycle=bool(pairs.on_cycle.any())),
            expected={destination.name: Expected(to[order], values)},
            counts=pairs.counts,
            counters={
                "copied_pages": len(pairs.moves),
                "pages_on_cycles": int(pairs.on_cycle.sum()),
            },
        )

    def _footprints(
        self, plan: Plan, begin: Int64s, to: Int64s, *, has_cycle: bool
    ) -> dict[str, Footprint]:
        if not plan.arguments["num_pairs"]:
            return {}
        size = plan.arguments["page_bytes"]
        source, destination = self.caches(plan.arguments)
        out = {"pairs": Footprint(IntervalSet([0], [16 * plan.arguments["num_pairs"]]))}
        read, written = IntervalSet.of_runs(begin, size), IntervalSet.of_runs(to, size)
        out[source.name] = Footprint(may_read=read)
        mine = out.get(destination.name, Footprint())
        out[destination.name] = replace(mine, must_write=written)
        if not is_absent(plan.buffers["counts"]):
            pair = IntervalSet([0], [16])
            out["counts"] = Footprint(pair, may_write=pair)
        return {**out, **self.staging(plan, has_cycle=has_cycle)}

    # ---- the contract in torch -------------------------------------------------------------------

    def expected_by_torch(self, plan: Plan) -> Mapping[str, Mapping[int, bytes]]:
        """Gathers all pages at once, then scatters them, in strided tensors that really exist;
        `CaseError` above 64 MiB."""
        import torch  # seconds, that a campaign need not wait for

        source, destination = self.caches(plan.arguments)
        if self.refusals(plan):
            return {destination.name: {}}
        pairs = torch.from_numpy(self.page_pairs(plan).pairs.copy())
        counts = torch.tensor([cells.dimensions[-1][1] for cells in (source, destination)])
        kept = pairs[((pairs >= 0) & (pairs < counts)).all(dim=1)]
        if source == destination:
            kept = kept[kept[:, 0] != kept[:, 1]]
        read = self._strided(plan, source)
        written, where = read, self._strided(plan, destination, numbered=True)
        if source != destination:
            written = self._strided(plan, destination)
        written[kept[:, 1]] = read[kept[:, 0]].clone()
        runs: dict[int, bytes] = {}
        for page in sorted(set(kept[:, 1].tolist())):
            begins = where[page].reshape(-1, where.shape[-1])[:, 0].tolist()
            pages = written[page].reshape(-1, written.shape[-1])
            runs |= {at: one.numpy().tobytes() for at, one in zip(begins, pages, strict=True)}
        return {destination.name: dict(sorted(runs.items()))}

    def _strided(self, plan: Plan, cells: Cells, *, numbered: bool = False) -> torch.Tensor:
        """[pages, layers, page_bytes] of a cache's payload, or of its byte offsets."""
        import torch

        needed = cells.required_bytes(plan.arguments)
        if needed > _TORCH_BYTES:
            raise CaseError(
                f"the torch reference needs {needed} bytes; it makes at most {_TORCH_BYTES}"
            )
        shape = [count for _, count in cells.dimensions] + [cells.run_bytes]
        strides = (*cells.strides(plan.arguments), 1)
        if numbered:
            flat = torch.arange(needed)
        else:
            origin = plan.buffers[cells.name].payload_origin_bytes
            held = contents.payload(plan.case.seed, origin, origin + needed)
            flat = torch.from_numpy(held.copy())
        return flat.as_strided(shape, strides).movedim(-2, 0)

    # ---- the contract as a loop ------------------------------------------------------------------

    def expect_by_loop(self, plan: Plan) -> Expectation:
        """Pair by pair in plain integers; pages are read first, then written."""
        if refusals := self.argument_refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        a = plan.arguments
        source, destination = self.caches(a)
        raw = [int.from_bytes(v.tobytes(), "little", signed=True) for v in self._ids(plan)]
        padding = skipped = 0
        sides = [cells.dimensions[-1][1] for cells in (source, destination)]
        hostile = any(not -1 <= page < sides[nth % 2] for nth, page in enumerate(raw))
        writers: dict[int, set[int]] = {}
        for nth in range(a["num_pairs"]):
            page, to = raw[2 * nth], raw[2 * nth + 1]
            if PADDING_PAGE in (page, to):
                padding += 1
            elif 0 <= page < sides[0] and 0 <= to < sides[1]:
                writers.setdefault(to, set()).add(page)
            else:
                skipped += 1
        for to in sorted(writers):
            if len(writers[to]) > 1:
                first, second, *_ = sorted(writers[to])
                return Expectation(CaseClass.REFUSED, (_conflict(first, second, to),))
        one_cache = source == destination
        from_page = {to: page for to, (page,) in writers.items() if not one_cache or page != to}
        has_cycle = one_cache and any(_comes_back(from_page, page) for page in from_page)
        if refusals := self.cycle_refusals(plan, has_cycle=has_cycle):
            return Expectation(CaseClass.REFUSED, refusals)
        origin, size = plan.buffers[source.name].payload_origin_bytes, a["page_bytes"]
        begins: list[int] = []
        runs: list[tuple[int, Bytes]] = []
        for layer in range(a.get("num_layers", 1)):
            for to, page in from_page.items():
                begin = _place(a, source, layer, page)
                held = contents.payload(plan.case.seed, origin + begin, origin + begin + size)
                begins.append(begin)
                runs.append((_place(a, destination, layer, to), held))
        runs.sort(key=lambda run: run[0])
        to_offsets = np.array([at for at, _ in runs], dtype=np.int64)
        values = np.array([held for _, held in runs], dtype=np.uint8).reshape(len(runs), size)
        from_offsets = np.array(begins, dtype=np.int64)
        return Expectation(
            case_class=CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT,
            hostile=("an id that is neither -1 nor a page's",) if hostile else (),
            footprints=self._footprints(plan, from_offsets, to_offsets, has_cycle=has_cycle),
            expected={destination.name: Expected(to_offsets, values)},
            counts=Counts(padding, skipped),
        )

    def _ids(self, plan: Plan) -> Bytes:
        return plan.buffers["pairs"].image.values


def _place(sizes: Mapping[str, int], cells: Cells, layer: int, page: int) -> int:
    index = [layer, page][-len(cells.dimensions) :]
    return sum(
        i * sizes[name]
        for i, (name, count) in zip(index, cells.dimensions, strict=True)
        if count > 1
    )


def _comes_back(from_page: Mapping[int, int], page: int) -> bool:
    at = from_page[page]
    for _ in from_page:
        if at == page:
            return True
        if at not in from_page:
            return False
        at = from_page[at]
    return False


def _conflict(first: int, second: int, to: int) -> Refusal:
    return Refusal("conflict", f"pages {first} and {second} are both to be copied to page {to}")


def _hostile(pairs: PagePairs) -> tuple[str, ...]:
    wrong = np.flatnonzero(pairs.is_hostile)
    if not wrong.size:
        return ()
    page, to = pairs.pairs[wrong[0]].tolist()
    return (f"pair {wrong[0]} ({page} -> {to}) names a page that does not exist",)
