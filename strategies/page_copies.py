"""Page copies: what copy_blocks and swap_blocks have in common, from choices to sizes that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies import boundaries, oddities
from pagefuzz.strategies.boundaries import Boundary, Crossing
from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.gathers import LEAST_LIMIT_BYTES
from pagefuzz.strategies.page_pairs import PADDING, PairChoices, pair_choices
from pagefuzz.strategies.refusals import Argument, Lie, Surface, reach, wrong_size
from pagefuzz.strategies.strides import PACKED_PAGE_STRIDES, element_sizes, rounded_up

#: How pages lie -> weight.
LAYOUTS = {
    "dense": 40,
    "padded pages": 22,
    "padded layers": 12,
    "pages outermost": 14,  # the layers of a page are neighbours
    "packed pool": 12,
}

#: Legal but unusual -> weight.
ODDITIES = {
    "none": 70,
    "ignored strides": 12,  # strides of dimensions of size <= 1 hold nonsense
    "element type": 10,  # another of the same size
    "null where empty": 10,  # a null pointer for every buffer of no bytes
    "absent arguments": 5,  # dtype and rank of what is not passed hold nonsense
}

ELEMENT_DTYPES = {1: Dtype.U8, 2: Dtype.U16, 4: Dtype.U32, 8: Dtype.U64}
_OTHER_DTYPES = {1: Dtype.E4M3, 2: Dtype.BF16, 4: Dtype.F32, 8: Dtype.I64}

#: Pairs of reported cases: page 2 i to page 2 i + 1; only padding, but for two of 65,535.
APART = Values("ramp", {"first": 0, "step": 1})
PADDED_PAIRS = Values("constant", {"value": -1}, {0: 5, 1: 9, 2 * 65_534: 7, 2 * 65_534 + 1: 2})

_BYTES = 2**17  # of all pages that are copied, together
_LARGE_BYTES = 2**19  # of one or two that are copied alone
_ALONE = 147_456  # elements of a page that is copied with one other at most
_MOST_SCATTERED = 3  # layers at overflow scale

_LAYOUTS, _ODDITIES = weighted(LAYOUTS), weighted(ODDITIES)
#: Of the few cases with a cache of one page at most.
_FEW_PAGES_ODDITIES = weighted({**ODDITIES, "ignored strides": 150})
_OTHER_LAYOUTS = weighted({**LAYOUTS, "overlapping": 6})
_PADDINGS = skewed((80, range(1, 9)), (20, range(9, 65)))
_PAGE_ELEMENTS = skewed(
    (40, range(1, 17)),
    (30, range(17, 130)),
    (15, (132, 256, 512, 576, 1000, 1152)),
    (15, (2047, 2048, 2304, 4096, 16384, 16385, 16385, 33000, 36_864)),
    (5, (_ALONE,)),
)
_LAYERS = skewed((60, (1,)), (34, range(2, 5)), (6, (0,)))
_SPARES = skewed((50, (0,)), (50, range(1, 6)))
_OTHER_SPARES = skewed((50, (0,)), (50, range(1, 7)))
_COUNTERS = weighted({None: 30, (0, 0): 50, (5, 7): 15, (-3, 2**40): 5})
_SEEDS = st.sampled_from(range(253))
_JUNK = st.sampled_from(range(17))
_AT_SCALE = {
    "in contract": weighted({False: 72, True: 28}),
    "hostile": weighted({False: 88, True: 12}),
}
_ELEMENTS = element_sizes()
_PAIRS = {
    (hostile, one_cache): pair_choices(hostile=hostile, one_cache=one_cache)
    for hostile in (False, True)
    for one_cache in (False, True)
}


@dataclass(frozen=True)
class PageCopyChoices:
    """Everything that is drawn of a page copy, before any of it is fitted to the rest.

    layouts        key of `LAYOUTS` and padding in elements, of each cache
    spare_pages    of each cache, beyond those that pairs need
    counters       initial values of the counter pair, None if it is absent
    """

    pairs: PairChoices
    element_bytes: int
    page_elements: int
    num_layers: int
    layouts: tuple[tuple[str, int], ...]
    spare_pages: tuple[int, ...]
    counters: tuple[int, int] | None
    seed: int
    crossing: Crossing | None


@st.composite
def page_copy_choices(
    draw: st.DrawFn,
    quantities: Mapping[str, int],
    *,
    case_class: str,
    limit_bytes: int,
    one_cache: bool,
) -> PageCopyChoices:
    """Choices for a case of `case_class`, about 20 draws.

    quantities  what may reach a boundary of 32-bit arithmetic -> weight

    Shrinks towards ordinary scale, then in the order of the fields.
    """
    crossing = None
    if case_class in _AT_SCALE and boundaries.boundaries_within(_room(limit_bytes), 1):
        at_scale = draw(_AT_SCALE[case_class])
        crossing = draw(boundaries.crossings(quantities)) if at_scale else None
    pairs = draw(_PAIRS[case_class == "hostile", one_cache])
    element_bytes, page_elements = draw(_ELEMENTS), draw(_PAGE_ELEMENTS)
    layers = draw(_LAYERS) if one_cache else 1
    layouts = [draw(_LAYOUTS)] if one_cache else [draw(_OTHER_LAYOUTS), draw(_LAYOUTS)]
    padding = draw(_PADDINGS)
    spares = (draw(_SPARES),) if one_cache else (draw(_SPARES), draw(_OTHER_SPARES))
    for layout in layouts:
        event(f"cache: {layout}")
    return PageCopyChoices(
        pairs=pairs,
        element_bytes=element_bytes,
        page_elements=page_elements,
        num_layers=layers,
        layouts=tuple((layout, padding + nth) for nth, layout in enumerate(layouts)),
        spare_pages=spares,
        counters=draw(_COUNTERS),
        seed=draw(_SEEDS),
        crossing=crossing,
    )


def _room(limit_bytes: int) -> int:
    """What a boundary may take of the limit; the rest is for everything around it."""
    return limit_bytes - LEAST_LIMIT_BYTES


@dataclass
class Pool:
    """Sizes of one cache. from_end: the pages that are named are the last ones."""

    num_pages: int
    num_layers: int
    page_stride_bytes: int
    layer_stride_bytes: int
    from_end: bool = False


class PageCopy:
    """Sizes, strides and pairs fitted to each other.

    pools       one or two: of the source, then of the destination
    quantity    what reaches a boundary, "" at ordinary scale; the word before it, if any, is the
                side ("src page stride")
    """

    def __init__(self, choices: PageCopyChoices, limit_bytes: int) -> None:
        self.choices, self.element_bytes = choices, choices.element_bytes
        self.num_layers, wanted = choices.num_layers, choices.pairs
        self.quantity, side = "", 0
        if choices.page_elements == _ALONE:
            wanted, self.num_layers = wanted.cut_to_two(), min(self.num_layers, 1)
        crossing = choices.crossing
        boundary = crossing.boundary(_room(limit_bytes), self.element_bytes) if crossing else None
        if crossing is not None and boundary is not None:
            if wanted.shape == "hundreds":
                wanted = replace(wanted, shape="apart")
            if wanted.listed != "none":
                wanted = replace(wanted, listed="none")
            wanted = replace(wanted, first=0)
            self.num_layers = min(max(self.num_layers, 1), _MOST_SCATTERED)
            sides, _, self.quantity = crossing.quantity.rpartition(":")
            side = 1 if sides == "dst" else 0
            if self.quantity == "layer stride":
                self.num_layers = max(self.num_layers, 2)
            elif self.quantity in ("page", "packed page"):
                self.num_layers = 1
        self.page_bytes = self._fitted_page_bytes(wanted)
        self.pools = []
        for nth, (layout, padding) in enumerate(choices.layouts):
            pages = wanted.pages_needed
            if wanted.listed != "no pages" or nth:
                pages += choices.spare_pages[nth]
            pool = self._pool(layout, padding, pages)
            if boundary is not None and crossing is not None and nth == side:
                self._reach(pool, crossing, boundary)
            self.pools.append(pool)
        source, destination = self.pools[0], self.pools[-1]
        self.pairs = _pairs(wanted, source, destination)

    def _fitted_page_bytes(self, pairs: PairChoices) -> int:
        copied = max(pairs.moves, 1) * max(self.num_layers, 1)
        most = (_LARGE_BYTES if copied <= 2 else _BYTES) // (copied * self.element_bytes)
        return self.element_bytes * max(1, min(self.choices.page_elements, most))

    def _pool(self, layout: str, padding_elements: int, pages: int) -> Pool:
        page, padding = self.page_bytes, padding_elements * self.element_bytes
        layer = page * max(pages, 1)
        if layout == "padded pages":
            page += padding
            layer = page * max(pages, 1)
        elif layout == "padded layers":
            layer += padding
        elif layout == "pages outermost":
            layer = page + padding
            page = layer * max(self.num_layers, 1)
        elif layout == "packed pool":
            packed = PACKED_PAGE_STRIDES[padding_elements % len(PACKED_PAGE_STRIDES)]
            page = max(packed, page) if pages <= 12 else page
            layer = page * max(pages, 1)
        elif layout == "overlapping":  # legal only in a cache that is read
            page = max(page - padding, 0)
        return Pool(pages, self.num_layers, page, layer)

    def _reach(self, pool: Pool, crossing: Crossing, boundary: Boundary) -> None:
        unit, page = self.element_bytes, max(self.page_bytes, pool.page_stride_bytes)

        def at_boundary(index: int) -> int:
            return boundary.stride_bytes(index, unit) - (unit if crossing.below else 0)

        if self.quantity == "layer stride":
            pool.page_stride_bytes = page if page < 2**21 else self.page_bytes
            pool.layer_stride_bytes = at_boundary(pool.num_layers - 1)
        elif self.quantity == "page stride":
            pool.num_pages = max(pool.num_pages, 2 + crossing.extra)
            pool.page_stride_bytes = at_boundary(pool.num_pages - 1)
            pool.layer_stride_bytes = self.page_bytes
            pool.from_end = True
        else:
            if self.quantity == "packed page":
                page = max(page, PACKED_PAGE_STRIDES[crossing.extra % len(PACKED_PAGE_STRIDES)])
            page = max(page, rounded_up(boundary.first_index(2**30), unit))
            pool.page_stride_bytes, pool.layer_stride_bytes = page, unit
            pages = boundary.first_index(page) + (0 if crossing.below else 1 + crossing.extra)
            pool.num_pages = max(pool.num_pages, pages)
            pool.from_end = True

    @cached_property
    def has_cycle(self) -> bool:
        """Of a sound case in one cache."""
        pages = self.pools[0].num_pages
        source = {
            to: page for page, to in self.pairs if 0 <= min(page, to) <= max(page, to) < pages
        }
        for first in source:
            at = source[first]
            for _ in source:
                if at in (first, PADDING):
                    break
                at = source.get(at, PADDING)
            if at == first != source[first]:
                return True
        return False


def _pairs(wanted: PairChoices, source: Pool, destination: Pool) -> list[tuple[int, int]]:
    """Pages of each cache are counted from the end where that is where a boundary lies."""
    pairs = wanted.pairs(
        source.num_pages, destination.num_pages, from_end=source.from_end or destination.from_end
    )
    if len({id(source), id(destination)}) == 1 or source.from_end == destination.from_end:
        return pairs

    def from_begin(page: int, pages: int) -> int:
        return pages - 1 - page if 0 <= page < pages else page

    return [
        (
            page if source.from_end else from_begin(page, source.num_pages),
            to if destination.from_end else from_begin(to, destination.num_pages),
        )
        for page, to in pairs
    ]


def listed(pairs: Sequence[tuple[int, int]]) -> Values:
    return Values.literal(*(page for pair in pairs for page in pair))


# ---- oddities ------------------------------------------------------------------------------------


@st.composite
def oddly(draw: st.DrawFn, surface: Surface, payload: Sequence[str]) -> Case:
    """The surface's case with something unusual about it that changes nothing, in 1 or 2 draws."""
    sizes = surface.case.sizes
    counts = [size for size, _ in surface.strides.values() if size.endswith("num_pages")]
    few_pages = any(sizes[size] <= 1 for size in counts)
    oddity = draw(_FEW_PAGES_ODDITIES if few_pages else _ODDITIES)
    case = oddities.oddly(surface, oddity, draw(_JUNK) if oddity != "none" else 0)
    if oddity == "element type":
        other = int(_OTHER_DTYPES[sizes["element_bytes"]])
        case = replace(case, overrides={f"{name}.dtype": other for name in payload})
    return case


# ---- refusals ------------------------------------------------------------------------------------


def strides_of(case: Case, strides: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Stride -> (size that must exceed 1 for it to count, alignment in bytes)."""
    return {name: (size, case.sizes["element_bytes"]) for name, size in strides.items()}


def extent_bytes(case: Case, strides: Mapping[str, str]) -> int:
    """What a cache of these strides (name -> size) needs."""
    sizes = case.sizes
    if not all(sizes[size] for size in strides.values()):
        return 0
    return sum(reach(case, strides_of(case, strides)).values()) + sizes["page_bytes"]


def index_arguments(case: Case) -> dict[str, Argument]:
    """pairs and counts, as the lies see them."""
    has_counts = "counts" in case.values
    i64 = int(Dtype.I64)
    return {
        "pairs": Argument(i64, 2, 16 * case.sizes["num_pairs"], 8),
        "counts": Argument(i64, 1, 16 if has_counts else 0, 8, is_absent=not has_counts),
    }


def payload_argument(
    case: Case, rank: int, required_bytes: int, *, is_scratch: bool = False, is_absent: bool = False
) -> Argument:
    """A cache, or scratch, of raw elements."""
    unit = case.sizes["element_bytes"]
    same_size = tuple(int(dtype) for dtype in Dtype if dtype.size_bytes == unit)
    return Argument(
        int(ELEMENT_DTYPES[unit]), rank, required_bytes, unit, is_absent, same_size, is_scratch
    )


def size_lies(case: Case) -> dict[str, list[Lie]]:
    """Elements and pages of a size that there is not."""
    unit = case.sizes["element_bytes"]
    pages = [0, -1, 2**31, 2**32 + unit] + ([case.sizes["page_bytes"] + 1] if unit > 1 else [])
    return {
        "element_bytes": wrong_size("element_bytes", 0, 3, 16, -1, 2**32),
        "page_bytes": wrong_size("page_bytes", *pages),
    }


def pair_lies(case: Case, reason: str, pairs: Sequence[Sequence[tuple[int, int]]]) -> list[Lie]:
    """Other pairs in place of the case's first or last ones, all others padding; none where it has
    too few."""
    count, lies = case.sizes["num_pairs"], []
    for few in pairs:
        padding = [(PADDING, PADDING)] * (count - len(few))
        if len(few) <= count:
            lies.append(Lie(reason, values={"pairs": listed([*few, *padding])}))
            lies.append(Lie(reason, values={"pairs": listed([few[0], *padding, *few[1:]])}))
    return lies


def conflict_lies(case: Case, source_pages: int, destination_pages: int) -> list[Lie]:
    """One destination for two sources."""
    if source_pages < 2 or destination_pages < 1:
        return []
    last_page, last = source_pages - 1, destination_pages - 1
    return pair_lies(case, "conflict", [[(0, last), (last_page, last)], [(last_page, 0), (0, 0)]])


def many_pairs(
    operation: str, sizes_of: Callable[[int], Mapping[str, int]]
) -> dict[str, Callable[[], Case]]:
    """Report 30: 65,535 pairs, which fit on a grid's y axis, all but the first and last padding;
    and one more, each even page going to the next.

    sizes_of  of an operation's own, with so many pages of one byte
    """

    def case(pairs: int, listed: Values) -> Case:
        sizes = {"num_pairs": pairs, **sizes_of(2 * pairs), "page_bytes": 1, "element_bytes": 1}
        return Case(operation, sizes, {"pairs": listed, "counts": Values.literal(0, 0)})

    return {
        "30-65535-pairs": partial(case, 65_535, PADDED_PAIRS),
        "30-65536-pairs": partial(case, 65_536, APART),
    }
