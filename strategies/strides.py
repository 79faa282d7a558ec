"""Strides of caches and destinations, and the sizes of pages and entries they follow from."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.strategies.choices import skewed, weighted

MAX_PAGE_SIZE_TOKENS = 4096
ELEMENT_BYTES = (1, 2, 4, 8)
#: Page strides of packed pools in bytes: two from reports, a power of two, one that is odd in
#: everything but its element alignment. Multiples of 8.
PACKED_PAGE_STRIDES = (1_039_680, 1_002_240, 2**20, 1_000_008)

#: What entries and rows that are aligned beyond their element are multiples of, in bytes.
STRIDE_ALIGNMENTS = (16, 8, 4, 2)

#: Stands for a second draw from the whole range.
_ANY = 0

_PAGE_SIZES = skewed(
    (42, range(1, 9)),
    (20, (11, 13, 15, 16, 16, 16, 17, 20, 24, 27, 31, 32, 32, 33)),
    (20, (47, 63, 64, 64, 64, 65, 96, 100, 127, 128, 128, 129, 255, 256, 257)),
    (8, (511, 512, 513, 1000, 1023, 1024, 2048, 4095, 4096, 4096)),
    (10, (_ANY,)),
)
_ANY_PAGE_SIZE = st.sampled_from(range(1, MAX_PAGE_SIZE_TOKENS + 1))
#: More than 1,024 elements of 8 bytes, or just as many: a thread each takes a second turn.
WIDE_ENTRY_BYTES = (8192, 8200, 16_384)
_ENTRY_BYTES = skewed(
    (36, range(1, 17)),
    (26, range(17, 129)),
    (26, (132, 512, 528, 576, 576, 640, 656, 1024, 1152, 2304)),
    (6, WIDE_ENTRY_BYTES),
    (12, (_ANY,)),
)
_ANY_ENTRY_BYTES = st.sampled_from(range(1, 5001))

#: Layout of a paged cache -> weight.
CACHES = {
    "dense": 40,
    "aligned": 8,
    "padded entry": 14,
    "padded page": 14,
    "padded both": 8,
    "slots first": 5,
    "packed pool": 6,
    "overlapping": 5,
}
_CACHES = weighted(CACHES)
_PADDING_ELEMENTS = skewed((70, range(1, 9)), (25, range(9, 65)))
_ROW_PADDING_ELEMENTS = skewed((70, (0,)), (22, range(1, 9)), (8, range(9, 65)))


@st.composite
def page_sizes(draw: st.DrawFn) -> int:
    """Tokens a page, 1..4096: powers of two, their neighbours and anything else; 1 or 2 draws.

    Shrinks towards 1, and to the smallest size of a common one that will do.
    """
    return draw(_PAGE_SIZES) or draw(_ANY_PAGE_SIZE)


def element_sizes() -> SearchStrategy[int]:
    """Bytes of one element: 1, 2, 4 or 8; 1 draw. Shrinks towards 1."""
    return _ELEMENT_SIZES


_ELEMENT_SIZES = st.sampled_from(ELEMENT_BYTES)


@st.composite
def entry_sizes(draw: st.DrawFn) -> int:
    """Bytes of one entry, 1..5000 or wide, to be rounded up to an element; 1 or 2 draws.

    Shrinks towards 1.
    """
    return draw(_ENTRY_BYTES) or draw(_ANY_ENTRY_BYTES)


def rounded_up(value: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


@dataclass(frozen=True)
class CacheStrides:
    """Layout of a paged cache before its sizes are known.

    kind              key of `CACHES`
    padding_elements  between entries or pages; for a packed pool the index of its page stride; of
                      aligned ones the index of the alignment
    """

    kind: str = "dense"
    padding_elements: int = 0

    @property
    def alignment_bytes(self) -> int:
        """That of entries and destination rows that are padded to more than their element; else
        1. A copy as wide as the strides allow is then too wide for the end of an entry."""
        if self.kind != "aligned":
            return 1
        return STRIDE_ALIGNMENTS[self.padding_elements % len(STRIDE_ALIGNMENTS)]

    def row_stride(self, entry_bytes: int, element_bytes: int, padding_elements: int) -> int:
        """Of the destination, in bytes, a multiple of the element."""
        unit = max(element_bytes, self.alignment_bytes)
        return rounded_up(entry_bytes + padding_elements * element_bytes, unit)

    def resolve(
        self, entry_bytes: int, element_bytes: int, page_size_tokens: int, num_pages: int
    ) -> tuple[int, int]:
        """(page stride, slot stride) in bytes, multiples of the element."""
        padding = self.padding_elements * element_bytes
        slot, page = entry_bytes, page_size_tokens * entry_bytes
        if self.kind in ("padded entry", "padded both"):
            slot += padding
            page = page_size_tokens * slot
        if self.kind in ("padded page", "padded both"):
            page += padding
        if self.kind == "aligned":
            slot = rounded_up(entry_bytes, max(element_bytes, self.alignment_bytes))
            page = page_size_tokens * slot
        if self.kind == "packed pool":
            packed = PACKED_PAGE_STRIDES[self.padding_elements % len(PACKED_PAGE_STRIDES)]
            page = max(page, packed)
        if self.kind == "slots first":
            slot, page = entry_bytes * max(1, num_pages), entry_bytes
        if self.kind == "overlapping":
            # Pages, or entries, that share bytes: legal in a cache that is only read.
            if self.padding_elements % 2:
                page = 0 if self.padding_elements == 1 else page // 2
            else:
                slot = max(0, entry_bytes - padding)
            page = page // element_bytes * element_bytes
        return page, slot


@st.composite
def cache_strides(draw: st.DrawFn) -> CacheStrides:
    """Layouts of a paged cache; 1 or 2 draws. Shrinks towards a dense one, then less padding."""
    kind = draw(_CACHES)
    event(f"cache: {kind}")
    return CacheStrides(kind, 0 if kind in ("dense", "slots first") else draw(_PADDING_ELEMENTS))


def row_paddings() -> SearchStrategy[int]:
    """Elements between two destination rows, 0..64, mostly 0; 1 draw. Shrinks towards 0."""
    return _ROW_PADDING_ELEMENTS
