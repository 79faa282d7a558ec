"""Pairs of pages to copy: chains, cycles and what hangs on them, before pages have numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.strategies.choices import skewed, weighted

PADDING = -1
INT64_MAX, INT64_MIN = 2**63 - 1, -(2**63)

Pair = tuple[int, int]

#: How pairs hang together -> weight.
SHAPES = {
    "apart": 24,  # no page is named twice
    "chains": 22,  # each page goes to the next
    "cycles": 22,
    "branched cycles": 14,  # pages on a cycle go elsewhere too, and from there on
    "one to many": 12,
    "hundreds": 6,  # apart, more than one launch takes
}
#: What is special about the list as a whole -> weight.
LISTS = {"none": 88, "no pairs": 6, "only padding": 5, "no pages": 5}
#: Order of the list -> weight.
ORDERS = {"as built": 40, "reversed": 30, "mixed": 30}
#: Which numbers pages get -> weight.
NUMBERINGS = {"ascending": 45, "permuted": 35, "descending": 20}
#: What stands in a page's place in a hostile case -> weight.
HOSTILE = {
    "just past": 20,
    "minus two": 15,
    "wraps to a page": 15,
    "far past": 12,
    "int32 edge": 12,
    "lowest": 8,
    "highest": 12,
}
#: Which id is the hostile one; beside -1 the pair is padding all the same -> weight.
SIDES = {"source": 34, "destination": 34, "both": 16, "beside -1": 16}

_SHAPES, _LISTS = weighted(SHAPES), weighted(LISTS)
_ORDERS, _NUMBERINGS = weighted(ORDERS), weighted(NUMBERINGS)
_LENGTHS = skewed((24, (1,)), (56, range(2, 5)), (20, range(5, 7)))
_COMPONENTS = skewed((60, (1,)), (40, range(2, 4)))
_EXTRAS = skewed((60, (0,)), (40, range(1, 4)))
_REPEATS = skewed((75, (0,)), (25, range(1, 3)))
_STILLS = skewed((80, (0,)), (20, range(1, 4)))
_FIRSTS = skewed((70, (0,)), (30, range(1, 10)))
_EDITS = tuple(
    (
        weighted({**HOSTILE, "highest": HOSTILE["highest"] + nth}),
        weighted({**SIDES, "both": SIDES["both"] + nth}),
        skewed((1, range(33 + nth))),
        weighted({False: 60, True: 40 + nth}),
    )
    for nth in range(3)
)


@dataclass(frozen=True)
class Edit:
    """kind: key of `HOSTILE`; side: key of `SIDES`; amount: how far, and where in the list."""

    kind: str
    side: str
    amount: int

    def page(self, num_pages: int) -> int:
        """An id that is neither a page's nor -1."""
        edge = (2**31 + self.amount, -(2**31) - self.amount)[self.amount % 2]
        return {
            "just past": num_pages,
            "minus two": -2 - self.amount // 8,
            "wraps to a page": 2**32 * (1 + self.amount % 2) + self.amount % max(num_pages, 1),
            "far past": num_pages + 1 + self.amount * 7,
            "int32 edge": edge if edge < 0 or edge >= num_pages else num_pages,
            "lowest": INT64_MIN + self.amount // 16,
            "highest": INT64_MAX - self.amount // 16,
        }[self.kind]


@dataclass(frozen=True)
class PairChoices:
    """Pairs before the number of pages is known.

    shape, listed, order, numbering  keys of `SHAPES`, `LISTS`, `ORDERS`, `NUMBERINGS`
    length      of each chain or cycle, 1..6; a cycle of one is a page to itself
    components  how many of them
    padding     pairs of padding among the others
    repeats     pairs that are there twice
    stills      1: a page to itself that nobody else names; 2, 3: one that others read, if there is
    first       lowest page that is named
    """

    shape: str = "apart"
    length: int = 1
    components: int = 1
    listed: str = "none"
    order: str = "as built"
    numbering: str = "ascending"
    padding: int = 0
    repeats: int = 0
    stills: int = 0
    first: int = 0
    hostile: tuple[Edit, ...] = ()

    def cut_to_two(self) -> PairChoices:
        """At most two pairs that name two pages; the rest as it is."""
        shape = self.shape if self.shape in ("chains", "cycles", "one to many") else "apart"
        return replace(self, shape=shape, length=min(self.length, 2), components=1, stills=0)

    def _component(self, begin: int) -> list[Pair]:
        """One chain or cycle over pages begin, begin + 1, ..."""
        n = self.length
        ring = [(begin + i, begin + (i + 1) % n) for i in range(n)]
        if self.shape == "chains":
            return [(begin + i, begin + i + 1) for i in range(n)]
        if self.shape == "cycles":
            return ring
        if self.shape == "branched cycles":
            last = begin + n - 1
            return [*ring, (begin, begin + n), (last, begin + n + 1), (begin + n, begin + n + 2)]
        if self.shape == "one to many":
            return [(begin, begin + 1 + i) for i in range(n)]
        count = n if self.shape == "apart" else 150 * n + 1
        return [(begin + 2 * i, begin + 2 * i + 1) for i in range(count)]

    def _nodes(self) -> tuple[list[Pair], int]:
        """Pairs of pages numbered from 0 as they are met, and how many there are."""
        if self.listed != "none":
            return [], 1
        pairs: list[Pair] = []
        nodes = 0
        for _ in range(self.components if self.shape != "hundreds" else 1):
            pairs += self._component(nodes)
            nodes = 1 + max(max(pair) for pair in pairs)
        if self.stills:
            written = {to for _, to in pairs}
            read_only = sorted({page for page, _ in pairs} - written)
            still = read_only[0] if self.stills > 1 and read_only else nodes
            pairs.append((still, still))
            nodes = max(nodes, still + 1)
        return pairs, nodes

    @property
    def pages_needed(self) -> int:
        """So that every pair names two pages."""
        return 0 if self.listed == "no pages" else self._nodes()[1] + self.first

    @property
    def moves(self) -> int:
        return len(self._nodes()[0])

    def pairs(self, source_pages: int, destination_pages: int, *, from_end: bool) -> list[Pair]:
        """Both counts are at least `pages_needed`. from_end: the pages named are the last ones."""
        nodes, count = self._nodes()
        pairs = [
            (
                self._numbered(page, count, source_pages, from_end),
                self._numbered(to, count, destination_pages, from_end),
            )
            for page, to in nodes
        ]
        pairs += pairs[: self.repeats]
        if self.order == "reversed":
            pairs.reverse()
        elif self.order == "mixed":
            pairs = [pairs[_mixed(nth, len(pairs))] for nth in range(len(pairs))]
        legal = pairs[0] if pairs else (PADDING, PADDING)
        padding = max(self.padding, 1) if self.listed in ("only padding", "no pages") else 0
        padding = padding or (self.padding if self.listed == "none" else 0)
        for nth in range(padding):
            pair = ((PADDING, legal[1]), (legal[0], PADDING), (PADDING, PADDING))[nth % 3]
            pairs.insert((5 * nth + 1) % (len(pairs) + 1), pair)
        for edit in self.hostile:
            source, to = edit.page(source_pages), edit.page(destination_pages)
            pair = {
                "source": (source, legal[1]),
                "destination": (legal[0], to),
                "both": (source, to),
                "beside -1": (source, PADDING) if edit.amount % 2 else (PADDING, to),
            }[edit.side]
            if PADDING in legal and edit.side in ("source", "destination"):
                pair = (source, to)
            pairs.insert(edit.amount % (len(pairs) + 1), pair)
        return pairs

    def _numbered(self, node: int, count: int, pages: int, from_end: bool) -> int:
        if self.numbering == "descending":
            node = count - 1 - node
        elif self.numbering == "permuted":
            node = _mixed(node, count)
        return pages - 1 - node if from_end else self.first + node


def _mixed(nth: int, count: int) -> int:
    """An affine permutation of [0, count)."""
    factor = max(1, count * 5 // 8)
    while gcd(factor, count) != 1:
        factor += 1
    return (nth * factor + count // 2) % count


@st.composite
def pair_choices(draw: st.DrawFn, *, hostile: bool, one_cache: bool) -> PairChoices:
    """Lists of 0..900 pairs, 10 draws and 4 an edit.

    one_cache  pages of source and destination are the same: scratch and order matter

    Shrinks towards one pair of page 0 to page 1, then one without padding, repeats and pages that
    go to themselves; of a hostile one the first edit is the source just past the cache.
    """
    shape, listed = draw(_SHAPES), draw(_LISTS)
    event(f"pairs: {shape if listed == 'none' else listed}")
    choices = PairChoices(
        shape=shape,
        length=draw(_LENGTHS),
        components=draw(_COMPONENTS),
        listed=listed if not (hostile and listed == "no pairs") else "only padding",
        order=draw(_ORDERS),
        numbering=draw(_NUMBERINGS),
        padding=draw(_EXTRAS),
        repeats=draw(_REPEATS),
        stills=draw(_STILLS),
        first=draw(_FIRSTS),
        hostile=_edits(draw) if hostile else (),
    )
    if one_cache and choices.listed == "none" and "cycles" in choices.shape:
        event(f"cycle: {choices.length}")
    return choices


def _edits(draw: st.DrawFn) -> tuple[Edit, ...]:
    edits: list[Edit] = []
    for kinds, sides, amounts, more in _EDITS:
        edit = Edit(draw(kinds), draw(sides), draw(amounts))
        event(f"hostile: {edit.kind}, {edit.side}")
        edits.append(edit)
        if not draw(more):
            break
    return tuple(edits)
