"""Writes: what the writers of operation (e) have in common, from drawn choices to sizes that fit.

As with gathers, choices are drawn independently of each other and fitted afterwards: the number of
pages from the slots that are named, coordinates at overflow scale from the boundary to reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies import boundaries
from pagefuzz.strategies.boundaries import INT32_MAX, Crossing
from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.gathers import LEAST_LIMIT_BYTES
from pagefuzz.strategies.refusals import Argument, Lie
from pagefuzz.strategies.slots import SlotMapping, slot_mappings
from pagefuzz.strategies.strides import (
    PACKED_PAGE_STRIDES,
    CacheStrides,
    cache_strides,
    page_sizes,
    rounded_up,
)

#: What reaches a boundary of 32-bit arithmetic -> weight.
QUANTITIES = {
    "page": 22,  # page * page stride (of a dense cache: slot * entry), by way of the page count
    "packed page": 18,  # the same with page strides of about a million bytes
    "page stride": 14,  # a page stride of the boundary, its half, third or quarter
    "slot stride": 18,  # a slot stride likewise
    "input row": 18,  # token * row stride of the inputs
    "slot index": 10,  # num_pages = 2^31 - 1: slots beyond int32
}

#: Buffers that may be absent.
OPTIONAL = ("scale", "k_scale", "v_scale", "counts")
#: Sizes in 0..2^31-1.
COUNTS = ("num_tokens", "num_pages")

_NOTHING_INSTEAD: Mapping[str, str] = MappingProxyType({})
_NO_SCALES: Mapping[str, Values] = MappingProxyType({})

_BYTES = 2**18  # of a page, and of all tokens together
_MOST_SCATTERED = 24  # tokens that lie megabytes apart each cost a page of real memory
_LARGE_PAGE_BYTES = 2**22  # of one in every cache together, where few slots are named
_SPARE_BYTES = 2**20  # of rows that no token has, unless one has more

_PAGES = skewed((60, (0,)), (40, range(1, 5)))
_SPARE_ROWS = skewed((60, (0,)), (30, range(1, 6)), (10, range(6, 70)))
_ROW_PADDINGS = skewed((62, (0,)), (20, range(1, 9)), (8, range(9, 65)), (10, (-1, -2)))
#: Of the second input: the first one's, or its own.
_AS_FIRST = -3
_SECOND_SPARE_ROWS = skewed((55, (_AS_FIRST,)), (20, (0,)), (25, range(1, 6)))
_SECOND_PADDINGS = skewed(
    (52, (_AS_FIRST,)), (23, (0,)), (16, range(1, 9)), (4, range(9, 65)), (5, (-1, -2))
)
#: 0: as drawn; else which of the shapes that an operation is known to run with.
_PRODUCTION = skewed((94, (0,)), (6, range(1, 13)))
_COUNTERS = weighted({None: 30, (0, 0): 50, (5, 7): 15, (-3, 2**40): 5})
_SEEDS = st.sampled_from(range(253))
_AT_SCALE = {
    "in contract": weighted({False: 72, True: 28}),
    "hostile": weighted({False: 88, True: 12}),
}
_MAPPINGS = {hostile: slot_mappings(hostile=hostile) for hostile in (False, True)}
_CROSSINGS = boundaries.crossings(QUANTITIES)
_PAGE_SIZES, _CACHES = page_sizes(), cache_strides()


@dataclass(frozen=True)
class WriteChoices:
    """Everything that is drawn of a write, before any of it is fitted to the rest.

    spare_pages    beyond those that the slots need
    spare_rows     of each input, beyond the tokens of slot_mapping
    row_paddings   of each input, elements between rows; -1: they overlap, -2: all are the same row
    counters       initial values of the counter pair, None if it is absent
    production     0: sizes are as drawn; else one that `produced` turns into a shape
    """

    page_size_tokens: int
    mapping: SlotMapping
    spare_pages: int
    spare_rows: tuple[int, ...]
    row_paddings: tuple[int, ...]
    cache: CacheStrides
    counters: tuple[int, int] | None
    seed: int
    crossing: Crossing | None
    production: int = 0

    def produced(
        self, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[WriteChoices, tuple[int, ...] | None]:
        """Choices with the page size of one of `shapes`, and what that says beside it; as they are,
        and None, but for a few. Page size first in a shape; each has something beside it."""
        if not self.production:
            return self, None
        page_size_tokens, *shape = shapes[(self.production - 1) % len(shapes)]
        return replace(self, page_size_tokens=page_size_tokens), tuple(shape)

    def with_tokens(self, num_tokens: int) -> WriteChoices:
        return replace(self, mapping=replace(self.mapping, num_tokens=num_tokens))


@st.composite
def write_choices(
    draw: st.DrawFn, *, case_class: str, limit_bytes: int, inputs: int = 2
) -> WriteChoices:
    """Choices for a case of `case_class`, with one or two inputs, about 18 draws.

    Shrinks towards ordinary scale, then in the order of the fields.
    """
    crossing = None
    if case_class in _AT_SCALE and boundaries.boundaries_within(_room(limit_bytes), 1):
        crossing = draw(_CROSSINGS) if draw(_AT_SCALE[case_class]) else None
    choices = WriteChoices(
        page_size_tokens=draw(_PAGE_SIZES),
        mapping=draw(_MAPPINGS[case_class == "hostile"]),
        spare_pages=draw(_PAGES),
        spare_rows=_of_each(draw, inputs, _SPARE_ROWS, _SECOND_SPARE_ROWS),
        row_paddings=_of_each(draw, inputs, _ROW_PADDINGS, _SECOND_PADDINGS),
        cache=draw(_CACHES),
        counters=draw(_COUNTERS),
        seed=draw(_SEEDS),
        crossing=crossing,
        production=draw(_PRODUCTION),
    )
    event(f"inputs: {'longer than' if any(choices.spare_rows) else 'as long as'} slot_mapping")
    event(f"sizes: {'of production' if choices.production else 'any'}")
    return choices


def _of_each(
    draw: st.DrawFn, inputs: int, first: SearchStrategy[int], second: SearchStrategy[int]
) -> tuple[int, ...]:
    """A value of each input. Shrinks towards the same one for both."""
    found = draw(first)
    if inputs == 1:
        return (found,)
    other = draw(second)
    return found, found if other == _AS_FIRST else other


def _room(limit_bytes: int) -> int:
    """What a boundary may take of the limit; the rest is for everything around it."""
    return limit_bytes - LEAST_LIMIT_BYTES


class Write:
    """Sizes and slots fitted to each other.

    slots                  every token's
    page_size_tokens, num_pages, page_stride_bytes, slot_stride_bytes
    input_rows             of each input, at least as many as tokens
    quantity               what reaches a boundary, "" at ordinary scale
    """

    def __init__(
        self,
        choices: WriteChoices,
        limit_bytes: int,
        *,
        entry_bytes: int,
        element_bytes: int,
        input_bytes: int,
        input_element_bytes: int,
        page_multiple_tokens: int = 1,
        caches: int = 1,
        instead: Mapping[str, str] = _NOTHING_INSTEAD,
    ) -> None:
        """entry_bytes of a slot and input_bytes of a token's rows, of elements of that size.

        page_multiple_tokens  what page sizes are multiples of
        caches                that reach a boundary together
        instead               a quantity that the operation does not have -> the one in its place
        """
        self.choices, self.entry_bytes, self.unit = choices, entry_bytes, element_bytes
        self.input_unit, self.page_multiple = input_element_bytes, page_multiple_tokens
        self.quantity, self._cache_room = "", _room(limit_bytes) // caches
        mapping = choices.mapping
        tokens = min(mapping.num_tokens, max(1, _BYTES // max(entry_bytes, input_bytes)))
        crossing = choices.crossing
        if crossing is not None:
            quantity = instead.get(crossing.quantity, crossing.quantity)
            crossing = replace(crossing, quantity=quantity)
            # Two inputs reach it together.
            is_input = crossing.quantity == "input row"
            room = _room(limit_bytes) // 2 if is_input else self._cache_room
            boundary = crossing.boundary(room, self.input_unit if is_input else element_bytes)
            if boundary is not None:
                self.quantity, self.boundary, self.crossing = crossing.quantity, boundary, crossing
                tokens = min(max(tokens, 2), _MOST_SCATTERED)
                if is_input and not crossing.extra:  # the last row begins there to the byte
                    tokens = 1 + (1 << ((tokens - 1).bit_length() - 1))
                mapping = replace(mapping, tail=0, hole_every=0)
        # Of a large page only what lies near named slots has memory.
        few = tokens <= _MOST_SCATTERED or choices.production
        most = _LARGE_PAGE_BYTES // caches if few else _BYTES
        self.page_size_tokens = self._page_size(
            min(choices.page_size_tokens, max(1, most // entry_bytes))
        )
        self.mapping = replace(mapping, num_tokens=tokens)
        self._fit_pages()
        at_end = self.quantity in ("page", "packed page", "page stride", "slot stride")
        self.slots = self.mapping.slots(
            self.page_size_tokens, self.num_pages, from_end=at_end or self.quantity == "slot index"
        )
        self.num_tokens = tokens
        spare = max(1, _SPARE_BYTES // input_bytes)
        self.input_rows = tuple(tokens + min(rows, spare) for rows in choices.spare_rows)

    def _page_size(self, tokens: int) -> int:
        return rounded_up(tokens, self.page_multiple)

    def _fit_pages(self) -> None:
        choices, size, entry, unit = (
            self.choices,
            self.page_size_tokens,
            self.entry_bytes,
            self.unit,
        )
        mapping, strides = self.mapping, choices.cache
        if strides.kind == "overlapping":  # legal only in a cache that is read
            strides = CacheStrides()
        span = mapping.num_tokens if mapping.order != "one slot" else 1
        named = span + mapping.first if mapping.num_tokens else 0
        pages = -(-named // size) + choices.spare_pages
        if strides.kind == "packed pool":
            pages = min(pages, 6)
        page_stride, slot_stride = strides.resolve(entry, unit, size, pages)
        if self.quantity in ("page", "packed page"):
            if strides.kind == "slots first":
                page_stride, slot_stride = size * entry, entry
            if self.quantity == "packed page":
                packed = PACKED_PAGE_STRIDES[self.crossing.extra % len(PACKED_PAGE_STRIDES)]
                page_stride = max(packed, page_stride)
            page_stride = max(page_stride, rounded_up(self.boundary.first_index(2**30), unit))
            pages = self.boundary.first_index(page_stride)
            pages += 0 if self.crossing.below else 1 + self.crossing.extra
        elif self.quantity == "page stride":
            last = 1 + self.crossing.extra
            pages, slot_stride = last + 1, entry
            page_stride = self.stride_at_boundary(last, unit, further=False)
        elif self.quantity == "slot stride":
            self.page_size_tokens = size = self._page_size(max(2, size))
            pages, page_stride = 1 + self.crossing.extra, entry
            slot_stride = self.stride_at_boundary(size - 1, unit)
        elif self.quantity == "slot index":
            self.page_size_tokens = size = self._page_size(min(size, 4))
            most = self._cache_room // (size * entry)
            pages = min(INT32_MAX - self.crossing.extra // 2, most)
            page_stride, slot_stride = size * entry, entry
        self.num_pages = max(pages, 0)
        self.page_stride_bytes, self.slot_stride_bytes = page_stride, slot_stride

    def stride_at_boundary(self, index: int, alignment_bytes: int, *, further: bool = True) -> int:
        """The stride that puts `index` just past the boundary, or just below it."""
        stride = self.boundary.stride_bytes(index, alignment_bytes)
        if self.crossing.below:
            return stride - alignment_bytes
        return stride + (self.crossing.extra * alignment_bytes if further else 0)

    def row_stride_bytes(self, nth: int, row_bytes: int) -> int:
        """Of the nth input, with rows of that size."""
        if self.quantity == "input row":
            return self.stride_at_boundary(self.num_tokens - 1, self.input_unit)
        padding = self.choices.row_paddings[nth]
        if padding == -2:
            return 0
        if padding == -1:
            return max(row_bytes - self.input_unit, 0)
        return row_bytes + padding * self.input_unit

    def inputs(self, **row_bytes: int) -> dict[str, int]:
        """Rows and row strides of all inputs, with rows of that size."""
        return {
            **{f"{n}_rows": rows for n, rows in zip(row_bytes, self.input_rows, strict=True)},
            **{
                f"{name}_row_stride_bytes": self.row_stride_bytes(nth, size)
                for nth, (name, size) in enumerate(row_bytes.items())
            },
        }

    def case(
        self,
        operation: str,
        sizes: Mapping[str, int],
        placed: Mapping[str, Placement],
        scales: Mapping[str, Values] = _NO_SCALES,
    ) -> Case:
        """What was fitted, as a case.

        sizes   all but num_tokens
        placed  placements; those of absent buffers are left out
        """
        values = {"slot_mapping": Values.literal(*self.slots), **scales}
        if self.choices.counters is not None:
            values["counts"] = Values.literal(*self.choices.counters)
        absent = [name for name in OPTIONAL if name not in values]
        return Case(
            operation=operation,
            sizes={"num_tokens": self.num_tokens, **sizes},
            values=values,
            placements={name: place for name, place in placed.items() if name not in absent},
            seed=self.choices.seed,
        )


# ---- refusals ------------------------------------------------------------------------------------

INDEX_ARGUMENTS = ("slot_mapping", "counts")


def index_arguments(case: Case) -> dict[str, Argument]:
    """slot_mapping and counts, as the lies see them."""
    has_counts = "counts" in case.values
    i64 = int(Dtype.I64)
    return {
        "slot_mapping": Argument(i64, 1, 8 * case.sizes["num_tokens"], 8),
        "counts": Argument(i64, 1, 16 if has_counts else 0, 8, is_absent=not has_counts),
    }


def row_lies(case: Case, *rows: str) -> list[Lie]:
    """Inputs with fewer rows than slot_mapping has tokens."""
    tokens = max(case.sizes["num_tokens"], 1)
    return [
        Lie("input_rows", {name: fewer, "num_tokens": tokens})
        for name in rows
        for fewer in (tokens - 1, 0, -1)
    ]
