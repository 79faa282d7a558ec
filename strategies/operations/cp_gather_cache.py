"""Cases of (a) cp_gather_cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.classes import check_limit, classes
from pagefuzz.strategies.corners import GATHER_CORNERS, Corners
from pagefuzz.strategies.fixed_gathers import (
    copied,
    hostile_productions,
    long_batches,
    more_requests,
    width_528,
)
from pagefuzz.strategies.gather_cases import Entries
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES, Gather, gather_choices
from pagefuzz.strategies.oddities import begin_oddly, drawn, oddly
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.productions import Production, productions
from pagefuzz.strategies.refusals import Surface, lies, wrong_size
from pagefuzz.strategies.strides import element_sizes, entry_sizes

OPERATION = "cp_gather_cache"

#: Legal but unusual -> weight.
ODDITIES = {
    "none": 57,
    "ignored strides": 13,  # strides of dimensions of size <= 1 hold nonsense
    "far starts": 8,  # starts that lie at num_tokens or beyond become 2^31 - 1
    "unread seq_starts": 7,  # those of requests without rows hold nonsense
    "element types": 6,  # a float or integer dtype of the element's size
    "null where empty": 6,  # a null pointer for every buffer of no bytes
    "absent arguments": 3,  # dtype and rank of an absent buffer hold nonsense
}

_ODDITIES = weighted(ODDITIES)
_JUNK = st.sampled_from(range(16))
_ELEMENT_TYPES = {
    1: (Dtype.U8, Dtype.E4M3, Dtype.E5M2),
    2: (Dtype.U16, Dtype.F16, Dtype.BF16),
    4: (Dtype.U32, Dtype.F32, Dtype.I32),
    8: (Dtype.U64, Dtype.I64),
}
_ELEMENT_SIZES, _ENTRY_SIZES = element_sizes(), entry_sizes()

#: Latent entries (512 + 64 values, of 2 bytes, 1 or 4), records of fp8, half of keys and values.
PRODUCTIONS = {
    Production(64, 1152, 2): 4,
    Production(64, 576, 1): 2,
    Production(256, 1152, 2): 1,
    Production(64, 2304, 4): 1,
    Production(64, 656, 1): 1,
    Production(16, 2048, 2): 1,
}
_PRODUCTIONS = productions(PRODUCTIONS)


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """Cases of cp_gather_cache: three in five in contract (a quarter of them at overflow scale),
    one in four hostile, the others refused; about 30 draws each.

    Shrinks towards one request of one row in a pool of one page of one 1-byte slot: an identity
    table of one column, no seq_starts, no counts, everything dense, seed 0, no placement. A case
    loses, in this order, its class, its scale, page size, element and entry, requests, their
    lengths, sequence starts and strides; what lies past a boundary shrinks to the first index that
    reaches it.

    Arguments, and what it raises: see `registry.cases_for`.
    """
    check_limit(limit_bytes)
    return _cases(classes(hostile=hostile, refused=refused), limit_bytes)


@st.composite
def _cases(draw: st.DrawFn, classes: SearchStrategy[str], limit_bytes: int) -> Case:
    case_class = draw(classes)
    event(f"class: {case_class}")
    choices = draw(
        gather_choices(_ELEMENT_SIZES, _ENTRY_SIZES, case_class=case_class, limit_bytes=limit_bytes)
    )
    production = draw(_PRODUCTIONS)
    if production is not None:
        choices = production.of(choices)
    gather = Gather(choices, limit_bytes)
    oddity, junk = drawn(draw, case_class, _ODDITIES, _JUNK)
    element_bytes = gather.element_bytes
    entries = _entries(element_bytes)
    placed = draw(placements(entries.alignments, "dst"))
    begin_oddly(gather, oddity, junk)
    own = {"entry_bytes": gather.entry_bytes, "element_bytes": element_bytes}
    case = entries.case(OPERATION, gather, own, placed)
    if case_class == "refused":
        return draw(lies(surface(case)))
    if oddity == "element types":
        types = _ELEMENT_TYPES[element_bytes]
        dtype = int(types[1 + junk % (len(types) - 1)])
        case = replace(case, overrides={"src.dtype": dtype, "dst.dtype": dtype})
    return oddly(surface(case), oddity, junk)


def _entries(element_bytes: int) -> Entries:
    return Entries(element_bytes, element_bytes)


# ---- fixed cases ---------------------------------------------------------------------------------

_ONE_BYTE = copied(1, 1)
REPORTED: Mapping[str, Callable[[], Case]] = {
    "27-width-528": lambda: width_528(OPERATION),
    **long_batches(OPERATION, _ONE_BYTE),
    **hostile_productions(
        OPERATION,
        (
            (
                f"{one.entry_bytes}-bytes-{one.page_size_tokens}",
                one.page_size_tokens,
                copied(one.entry_bytes, one.element_bytes),
            )
            for one in PRODUCTIONS
        ),
    ),
}
ON_GPU: Mapping[str, Callable[[], Case]] = more_requests(OPERATION, _ONE_BYTE)


# ---- refusals ------------------------------------------------------------------------------------


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    entry = case.sizes["entry_bytes"]
    return _entries(case.sizes["element_bytes"]).required_bytes(case, entry, entry)


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    element_bytes, entry = case.sizes["element_bytes"], case.sizes["entry_bytes"]
    payload = int(_ELEMENT_TYPES[element_bytes][0])
    wrong_entries = [0, -element_bytes, 2**31 * -element_bytes]
    if element_bytes > 1:  # the smaller one fits strides and extents: nothing else refuses it
        wrong_entries += [entry + element_bytes // 2, entry - element_bytes // 2]
    return _entries(element_bytes).surface(
        case,
        required_bytes(case),
        {"src": (payload, 3), "dst": (payload, 2)},
        entry,
        {
            "element_bytes": wrong_size("element_bytes", 3, 0, 16, -1, 2**32 + 1),
            "entry_bytes": wrong_size("entry_bytes", *wrong_entries),
        },
    )


# ---- corners -------------------------------------------------------------------------------------

#: Name -> whether a case is in that corner.
CORNERS: Corners = GATHER_CORNERS
