"""Placements: where buffers begin, and the workspaces they are slices of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from pagefuzz.oracles.case import Placement
from pagefuzz.strategies.choices import skewed, weighted

#: Kind -> weight. `off`: bases 1..15 bytes past 16, in multiples of the alignment.
#:
#: `red zones`: one buffer lies between red zones, where one launch has both its ends watched, with
#: no byte between an end and what is watched. Few cases, and one buffer of them: a guard sees reads
#: there too, and names the line in any build; of red zones only writes are seen.
KINDS = {
    "none": 50,
    "one off": 15,
    "all off": 14,
    "workspace": 15,
    "everything": 6,
    "red zones": 7,
}

_KINDS = weighted(KINDS)
_STEPS = st.sampled_from(range(1, 16))
_BUFFERS = st.sampled_from(range(24))
_BYTES = skewed((60, range(1, 17)), (30, range(17, 300)), (5, range(300, 4097)))


def _offset(step: int, alignment: int) -> int:
    """A multiple of `alignment` in 0..15 that is not 0 where one exists, and `step` if aligned."""
    return max(step - step % alignment, min(alignment, 15) if alignment < 16 else 0) % 16


def _one_of(slot: int, names: Sequence[str], destination: str) -> str:
    """Two slots in three go to the destination and the first buffer, the wide ones that are
    copied."""
    return (destination, names[0], names[slot // 3 % len(names)])[slot % 3]


@st.composite
def placements(
    draw: st.DrawFn, alignments: Mapping[str, int], destination: str
) -> dict[str, Placement]:
    """Placements of the buffers of `alignments` (name -> alignment in bytes, 1..8), 1 to 4 draws.

    `destination` names the buffer that is most often a slice of a workspace: bytes before it, an
    extent beyond what is needed, bytes after it. Shrinks towards no placement at all, then one
    buffer off alignment by its alignment. Raises `InvalidArgument` if `destination` is no buffer.
    """
    if destination not in alignments:
        raise InvalidArgument(f"destination={destination!r} must be one of {list(alignments)}")
    kind = draw(_KINDS)
    event(f"placement: {kind}")
    names = list(alignments)
    if kind == "none":
        return {}
    if kind in ("one off", "red zones"):
        name = _one_of(draw(_BUFFERS), names, destination)
        step, alignment = draw(_STEPS), alignments[name]
        if kind == "one off":
            return {name: Placement(_offset(step, alignment))}
        return {name: Placement((step - 1) // alignment * alignment, guard="none")}
    if kind == "all off":
        step = draw(_STEPS)
        return {
            name: Placement(_offset((step + 2 * index) % 15 + 1, alignments[name]))
            for index, name in enumerate(names)
        }
    step, size = draw(_STEPS), draw(_BYTES)
    if kind == "workspace":
        which = step % 4  # 0: all three, else one of them
        return {
            destination: Placement(
                before_bytes=size if which in (0, 1) else 0,
                slack_bytes=size if which in (0, 2) else 0,
                after_bytes=size if which in (0, 3) else 0,
            )
        }
    return {
        name: Placement(
            _offset((step + index) % 15 + 1, alignments[name]),
            size * (index + 1) % 97,
            size * (index + 2) % 61,
            size * (index + 3) % 83,
        )
        for index, name in enumerate(names)
    }
