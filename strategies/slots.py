"""Slot mappings: which slot of a paged cache each token goes to, and which hold no slot at all."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.strategies.choices import skewed, weighted

PADDING = -1
INT64_MAX, INT64_MIN = 2**63 - 1, -(2**63)

#: Order of slots -> weight.
ORDERS = {"ascending": 40, "permuted": 30, "descending": 12, "repeated": 10, "one slot": 8}
#: What stands in a slot's place in a hostile case -> weight.
HOSTILE = {
    "just past": 20,
    "minus two": 15,
    "wraps to a slot": 15,
    "page below": 12,
    "far past": 12,
    "int32 edge": 10,
    "lowest": 8,
    "highest": 8,
}

_ORDERS = weighted(ORDERS)
_TOKENS = skewed(
    (60, range(1, 7)), (28, range(7, 40)), (7, (0, 64, 65, 127, 128)), (3, (300,)), (3, (1025,))
)
_FIRST = skewed((60, (0,)), (40, range(1, 30)))
_TAILS = skewed((64, (0,)), (26, range(1, 5)), (10, (400,)))
_HOLES = weighted({0: 75, 2: 10, 3: 15})
_EDITS = tuple(
    (
        weighted({**HOSTILE, "highest": HOSTILE["highest"] + nth}),
        skewed((1, (0, 1, 2)), (1, range(64 + nth))),
        skewed((1, range(33 + nth))),
        weighted({False: 60, True: 40 + nth}),
    )
    for nth in range(3)
)


@dataclass(frozen=True)
class Edit:
    """kind: key of `HOSTILE`; place: which token; amount: how far."""

    kind: str
    place: int
    amount: int

    def slot(self, page_size_tokens: int, num_pages: int) -> int:
        capacity = page_size_tokens * num_pages
        return {
            "just past": capacity,
            "minus two": -2 - self.amount // 8,
            "wraps to a slot": 2**32 * (1 + self.amount % 2) + self.amount % max(capacity, 1),
            "page below": -page_size_tokens * (1 + self.amount // 8) - self.amount % 2 - 1,
            "far past": capacity + 1 + self.amount * page_size_tokens,
            "int32 edge": (2**31 + self.amount, -(2**31) - self.amount)[self.amount % 2]
            if capacity <= 2**31
            else capacity + self.amount,
            "lowest": INT64_MIN + self.amount // 16,
            "highest": INT64_MAX - self.amount // 16,
        }[self.kind]


@dataclass(frozen=True)
class SlotMapping:
    """A mapping before the cache's size is known.

    num_tokens, order
    first        of the slots in use, counted from the end of the order's beginning
    tail         tokens of padding at the end (of graph padding)
    hole_every   every so manieth token is padding too; 0: none
    hostile      edits
    """

    num_tokens: int
    order: str = "ascending"
    first: int = 0
    tail: int = 0
    hole_every: int = 0
    hostile: tuple[Edit, ...] = ()

    def slots(self, page_size_tokens: int, num_pages: int, *, from_end: bool = False) -> list[int]:
        """Every token's slot. from_end: the slots in use are the cache's last."""
        capacity = page_size_tokens * num_pages
        count, tokens = min(self.num_tokens, capacity), self.num_tokens
        if not capacity:
            slots = [PADDING] * tokens
        else:
            span = min(capacity, max(2 * count, page_size_tokens))
            begin = capacity - span if from_end else min(self.first, capacity - span)
            slots = [self._nth(token, count, span) for token in range(tokens)]
            if from_end:
                slots = [span - 1 - slot for slot in slots]
            slots = [begin + slot for slot in slots]
        for token in range(tokens):
            in_tail = token >= tokens - self.tail
            in_hole = self.hole_every and token % self.hole_every == 1
            if in_tail or in_hole:
                slots[token] = PADDING
        for edit in self.hostile if tokens else ():
            slots[edit.place % tokens] = edit.slot(page_size_tokens, num_pages)
        return slots

    def _nth(self, token: int, count: int, span: int) -> int:
        """Of `span` slots the one of a token; `count` of them are enough for every token."""
        token %= count
        if self.order == "descending":
            return count - 1 - token
        if self.order == "permuted":
            # An odd stride over a power of two not below the span, cut to the span.
            power = 1 << (span - 1).bit_length() if span > 1 else 1
            mixed = (token * 0x9E3779B1 + 7) % power
            return mixed if mixed < span else mixed % span
        if self.order == "repeated":
            return token // 2
        return 0 if self.order == "one slot" else token


@st.composite
def slot_mappings(draw: st.DrawFn, *, hostile: bool) -> SlotMapping:
    """Mappings of 0..1,025 tokens, 5 draws and 4 an edit.

    Shrinks towards one token in slot 0, then without padding; of a hostile one the first edit is
    the slot just past the cache.
    """
    num_tokens, order = draw(_TOKENS), draw(_ORDERS)
    event(f"slots: {order}")
    first, tail, holes = draw(_FIRST), draw(_TAILS), draw(_HOLES)
    edits: list[Edit] = []
    if hostile:
        num_tokens = max(num_tokens, 1)
        for kinds, places, amounts, more in _EDITS:
            kind = draw(kinds)
            event(f"hostile: {kind}")
            edits.append(Edit(kind, draw(places), draw(amounts)))
            if not draw(more):
                break
    return SlotMapping(num_tokens, order, first, tail, holes, tuple(edits))
