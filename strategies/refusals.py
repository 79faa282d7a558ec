"""Refusals: lies about a sound layout that every launcher must see through.

A lie changes arguments after everything was laid out (`Case.overrides`), or moves a buffer to where
it must not be, so that the memory behind the arguments stays sound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.layout import Dtype

#: Every reason tag of the gathers' contracts.
REASONS = (
    "dtype",
    "rank",
    "element_bytes",
    "entry_bytes",
    "page_size_tokens",
    "size_range",
    "has_terminal",
    "dst_rows",
    "negative_stride",
    "stride_overflow",
    "extent",
    "null_pointer",
    "alignment",
    "not_nested",
    "overlap",
)

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)


@dataclass(frozen=True)
class Argument:
    """A buffer as the lies see it.

    dtype, rank       what a sound case passes
    required_bytes    what its sizes need, 0 if absent
    alignment_bytes   of its base
    is_absent         an optional buffer that is not passed
    other_dtypes      that a launcher accepts too
    is_spare          passed and perhaps not needed: its extent is the operation's own business
    """

    dtype: int
    rank: int
    required_bytes: int
    alignment_bytes: int
    is_absent: bool = False
    other_dtypes: Sequence[int] = ()
    is_spare: bool = False


@dataclass(frozen=True)
class Lie:
    """overrides to add, placements and values to replace; for the reason tag `reason`."""

    reason: str
    overrides: Mapping[str, int] = field(default_factory=dict)
    placements: Mapping[str, Placement] = field(default_factory=dict)
    values: Mapping[str, Values] = field(default_factory=dict)

    def told(self, case: Case) -> Case:
        return replace(
            case,
            overrides={**case.overrides, **self.overrides},
            placements={**case.placements, **self.placements},
            values={**case.values, **self.values},
        )


def reach(case: Case, strides: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """Stride -> what it adds to an extent. strides: name -> (size that counts, ...)."""
    sizes = case.sizes
    return {
        name: (sizes[size] - 1) * sizes[name] if sizes[size] > 1 else 0
        for name, (size, _) in strides.items()
    }


def rows_bytes(case: Case, **row_bytes: int) -> dict[str, int]:
    """What inputs or destinations need of which num_tokens rows of that size count."""
    sizes, tokens = case.sizes, case.sizes["num_tokens"]
    needed = {}
    for name, row in row_bytes.items():
        stride = sizes[f"{name}_row_stride_bytes"] if sizes[f"{name}_rows"] > 1 else 0
        needed[name] = (tokens - 1) * stride + row if tokens else 0
    return needed


def wrong_size(name: str, *values: int) -> list[Lie]:
    """Values that a size may not have, for the reason that is named like it."""
    return [Lie(name, {name: value}) for value in values]


def wrong_stride(case: Case, reason: str, name: str, size: str, *values: int) -> list[Lie]:
    """Values that a stride may not have where it counts: with a size of 2 or more."""
    least = max(case.sizes[size], 2)
    return [Lie(reason, {name: value, size: least}) for value in values]


@dataclass(frozen=True)
class Surface:
    """What of a case can be lied about.

    arguments     every buffer, in ABI order; `destinations` and all others may not meet
    strides       stride -> (size that must exceed 1 for it to count, alignment in bytes)
    extents       stride -> sizes that must exceed 1 for it to be part of an extent
    counts        sizes that lie in 0..2^31-1
    own           lies that only this operation knows
    """

    case: Case
    arguments: Mapping[str, Argument]
    destinations: Sequence[str]
    strides: Mapping[str, tuple[str, int]]
    extents: Mapping[str, Sequence[str]]
    counts: Sequence[str]
    own: Mapping[str, Sequence[Lie]]

    def at_least(self, value: int, *sizes: str) -> dict[str, int]:
        """The overrides that make sizes large enough for a stride to count; empty if they are."""
        return {size: value for size in sizes if self.case.sizes[size] < value}

    def knows(self, reason: str) -> bool:
        """Whether the operation has what a lie of this reason is about."""
        return reason not in ("has_terminal", "page_size_tokens") or reason in self.case.sizes

    def present(self) -> dict[str, Argument]:
        return {name: one for name, one in self.arguments.items() if not one.is_absent}


def _dtypes(surface: Surface) -> list[Lie]:
    lies = []
    for name, argument in surface.present().items():
        size = Dtype(argument.dtype).size_bytes
        others = [d for d in Dtype if d.size_bytes != size]
        legal = (argument.dtype, *argument.other_dtypes)
        others += [d for d in Dtype if d.size_bytes == size and d not in legal]
        codes = (others[0], others[-1], 0, max(Dtype) + 1, -1)
        lies += [Lie("dtype", {f"{name}.dtype": int(code)}) for code in codes]
    return lies


def _ranks(surface: Surface) -> list[Lie]:
    return [
        Lie("rank", {f"{name}.rank": rank})
        for name, argument in surface.present().items()
        for rank in (argument.rank + 1, argument.rank - 1, -1)
    ]


def _size_ranges(surface: Surface) -> list[Lie]:
    return [
        Lie("size_range", {name: value})
        for name in surface.counts
        for value in (-1, 2**31, 2**32, INT64_MIN, INT64_MAX)
    ]


def _page_sizes(_: Surface) -> list[Lie]:
    return wrong_size("page_size_tokens", 0, 4097, -1, 2**31, 2**32 + 1)


def _terminals(surface: Surface) -> list[Lie]:
    # Room for two terminal values, so that starts is not too short as well.
    starts = surface.case.placement("starts")
    longer = {"starts": replace(starts, slack_bytes=starts.slack_bytes + 4)}
    return [
        Lie("has_terminal", {"has_terminal": 2}, longer),
        *(Lie("has_terminal", {"has_terminal": value}) for value in (-1, 2**32)),
    ]


def _negative_strides(surface: Surface) -> list[Lie]:
    return [
        Lie("negative_stride", {name: value, **surface.at_least(2, size)})
        for name, (size, alignment) in surface.strides.items()
        for value in (-alignment, INT64_MIN)
    ]


def _stride_overflows(surface: Surface) -> list[Lie]:
    # The third index at 2^62 is the first that int64 does not hold.
    return [
        Lie("stride_overflow", {name: value, **surface.at_least(3, *sizes)})
        for name, sizes in surface.extents.items()
        for value in (2**62, 2**63 - 8)
    ]


def _extents(surface: Surface) -> list[Lie]:
    lies = []
    for name, argument in surface.present().items():
        needed = 0 if argument.is_spare else argument.required_bytes
        values = (needed - 1, 0, -1, INT64_MIN) if needed else (-1, INT64_MIN)
        lies += [Lie("extent", {f"{name}.extent_bytes": value}) for value in values]
    return lies


def _null_pointers(surface: Surface) -> list[Lie]:
    return [
        Lie(
            "null_pointer",
            {f"{name}.data": 0, f"{name}.extent_bytes": argument.required_bytes or 1},
        )
        for name, argument in surface.arguments.items()
    ]


def _alignments(surface: Surface) -> list[Lie]:
    lies = []
    for name, argument in surface.present().items():
        unit, now = argument.alignment_bytes, surface.case.placement(name)
        lies += [
            Lie("alignment", {}, {name: replace(now, offset_bytes=now.offset_bytes + off)})
            for off in sorted({1, unit // 2, unit - 1} - {0})
            if unit > 1
        ]
    for name, (size, unit) in surface.strides.items():
        if unit > 1:
            value = surface.case.sizes[name] // unit * unit + unit // 2
            lies.append(Lie("alignment", {name: abs(value), **surface.at_least(2, size)}))
    return lies


def _overlaps(surface: Surface) -> list[Lie]:
    lies = []
    for name in surface.destinations:
        mine = surface.arguments[name].required_bytes
        for other, argument in surface.present().items():
            theirs, unit = argument.required_bytes, surface.arguments[name].alignment_bytes
            if other in surface.destinations or not mine or not theirs:
                continue
            last = (theirs - 1) // unit * unit
            lies += [Lie("overlap", {}, {name: Placement(over=(other, at))}) for at in (0, last)]
            # The other way round: its first byte is the destination's last aligned ones.
            back = (mine - 1) // argument.alignment_bytes * argument.alignment_bytes
            lies.append(Lie("overlap", {}, {other: Placement(over=(name, back))}))
    return lies


_LIES: Mapping[str, Callable[[Surface], list[Lie]]] = {
    "dtype": _dtypes,
    "rank": _ranks,
    "size_range": _size_ranges,
    "page_size_tokens": _page_sizes,
    "has_terminal": _terminals,
    "negative_stride": _negative_strides,
    "stride_overflow": _stride_overflows,
    "extent": _extents,
    "null_pointer": _null_pointers,
    "alignment": _alignments,
    "overlap": _overlaps,
}

_REASONS = st.sampled_from(range(120))
_PICKS = st.sampled_from(range(240))


def lies_by_reason(surface: Surface) -> Mapping[str, Sequence[Lie]]:
    """Every lie that can be told about the surface's case. A reason without any is one that this
    case cannot have: nothing can overlap a destination of no bytes."""
    told = {reason: tell(surface) for reason, tell in _LIES.items() if surface.knows(reason)}
    return {**told, **surface.own}


@st.composite
def lies(draw: st.DrawFn, surface: Surface) -> Case:
    """The surface's case with one lie told, in 2 draws.

    Every reason is as likely as any other; a reason that the case cannot have gives way to a wrong
    page_size_tokens, or a wrong count where there is none. Shrinks towards the first reason (a
    wrong dtype) and the first of its lies (that of the first buffer).
    """
    reasons = [reason for reason in _LIES if surface.knows(reason)] + list(surface.own)
    reason = reasons[draw(_REASONS) % len(reasons)]
    pick = draw(_PICKS)
    told = surface.own[reason] if reason in surface.own else _LIES[reason](surface)
    if not told:
        reason = "page_size_tokens" if surface.knows("page_size_tokens") else "size_range"
        told = _LIES[reason](surface)
    event(f"refused: {reason}")
    return told[pick % len(told)].told(surface.case)
