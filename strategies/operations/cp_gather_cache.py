"""Cases of (a) cp_gather_cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies import oddities
from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.classes import check_limit, classes
from pagefuzz.strategies.corners import GATHER_CORNERS, Corners
from pagefuzz.strategies.gathers import (
    DEFAULT_LIMIT_BYTES,
    Gather,
    GatherChoices,
    gather_choices,
)
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.refusals import Argument, Lie, Surface, lies
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


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """Cases of cp_gather_cache: three in five in contract (a quarter of them at overflow scale),
    one in four hostile, the others refused; about 30 draws each.

    hostile, refused  whether cases of that class may be drawn; without both, all are in contract
    limit_bytes       bound on the memory of all buffers of a case together

    Shrinks towards one request of one row in a pool of one page of one 1-byte slot: an identity
    table of one column, no seq_starts, no counts, everything dense, seed 0, no placement. A case
    loses, in this order, its class, its scale, page size, element and entry, requests, their
    lengths, sequence starts and strides; what lies past a boundary shrinks to the first index that
    reaches it.

    Raises `InvalidArgument` for `limit_bytes` below 64 MiB.
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
    gather = Gather(choices, limit_bytes)
    oddity = draw(_ODDITIES) if case_class != "refused" else "none"
    junk = draw(_JUNK) if oddity != "none" else 0
    placed = draw(placements(_alignments(gather.element_bytes), "dst"))
    if oddity != "none":
        event(f"oddity: {oddity}")
        if oddity in _BEFORE:
            _BEFORE[oddity](gather, junk)
    case = _case(gather, choices, placed)
    if oddity in _AFTER:
        case = _AFTER[oddity](case, junk)
    return draw(lies(surface(case))) if case_class == "refused" else case


def _alignments(element_bytes: int) -> dict[str, int]:
    return {
        "src": element_bytes,
        "dst": element_bytes,
        "block_table": 4,
        "starts": 4,
        "seq_starts": 4,
        "counts": 8,
    }


def _case(gather: Gather, choices: GatherChoices, placed: Mapping[str, Placement]) -> Case:
    index = gather.index
    values = {"block_table": gather.table, "starts": Values.literal(*index.starts)}
    if index.seq_starts is not None:
        values["seq_starts"] = Values.literal(*index.seq_starts)
    if choices.counters is not None:
        values["counts"] = Values.literal(*choices.counters)
    present = ("src", "dst", *values)
    return Case(
        operation=OPERATION,
        sizes={
            "num_requests": index.num_requests,
            "num_tokens": index.num_tokens,
            "page_size_tokens": gather.page_size_tokens,
            "num_pages": index.num_pages,
            "table_width": index.table_width,
            "table_row_stride": index.table_row_stride,
            "page_stride_bytes": gather.page_stride_bytes,
            "slot_stride_bytes": gather.slot_stride_bytes,
            "dst_rows": gather.dst_rows,
            "dst_row_stride_bytes": gather.dst_row_stride_bytes,
            "entry_bytes": gather.entry_bytes,
            "element_bytes": gather.element_bytes,
            "has_terminal": choices.destination.has_terminal,
        },
        values=values,
        placements={name: place for name, place in placed.items() if name in present},
        seed=choices.seed,
    )


# ---- oddities ------------------------------------------------------------------------------------


def _ignored_strides(case: Case, junk: int) -> Case:
    return oddities.ignored_strides(case, _strides(case), junk)


def _element_types(case: Case, junk: int) -> Case:
    types = _ELEMENT_TYPES[case.sizes["element_bytes"]]
    dtype = int(types[1 + junk % (len(types) - 1)])
    return replace(case, overrides={"src.dtype": dtype, "dst.dtype": dtype})


def _null_where_empty(case: Case, _: int) -> Case:
    return oddities.null_where_empty(case, required_bytes(case))


def _absent_arguments(case: Case, junk: int) -> Case:
    return oddities.absent_arguments(case, ("seq_starts", "counts"), junk)


_BEFORE: Mapping[str, Callable[[Gather, int], None]] = {
    "far starts": oddities.far_starts,
    "unread seq_starts": oddities.unread_seq_starts,
    "ignored strides": oddities.single_row,
}
_AFTER: Mapping[str, Callable[[Case, int], Case]] = {
    "ignored strides": _ignored_strides,
    "element types": _element_types,
    "null where empty": _null_where_empty,
    "absent arguments": _absent_arguments,
}


# ---- refusals ------------------------------------------------------------------------------------


def _strides(case: Case) -> dict[str, tuple[str, int]]:
    """Stride -> (size that must exceed 1 for it to count, alignment in bytes)."""
    element_bytes = case.sizes["element_bytes"]
    return {
        "page_stride_bytes": ("num_pages", element_bytes),
        "slot_stride_bytes": ("page_size_tokens", element_bytes),
        "dst_row_stride_bytes": ("dst_rows", element_bytes),
        "table_row_stride": ("num_requests", 1),
    }


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    entry = case.sizes["entry_bytes"]
    return oddities.required_bytes(case, _strides(case), entry, entry)


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    sizes, needed = case.sizes, required_bytes(case)
    element_bytes, entry = sizes["element_bytes"], sizes["entry_bytes"]
    payload = int(_ELEMENT_TYPES[element_bytes][0])
    types = {
        "src": (payload, 3),
        "dst": (payload, 2),
        "block_table": (int(Dtype.I32), 2),
        "starts": (int(Dtype.I32), 1),
        "seq_starts": (int(Dtype.I32), 1),
        "counts": (int(Dtype.I64), 1),
    }
    alignments = _alignments(element_bytes)
    arguments = {
        name: Argument(
            dtype,
            rank,
            needed[name],
            alignments[name],
            is_absent=name in ("seq_starts", "counts") and name not in case.values,
        )
        for name, (dtype, rank) in types.items()
    }
    entries = [0, -element_bytes, 2**31 * -element_bytes]
    if element_bytes > 1:  # the smaller one fits strides and extents: nothing else refuses it
        entries += [entry + element_bytes // 2, entry - element_bytes // 2]
    rows = max(sizes["num_tokens"], 1)
    own = {
        "element_bytes": [
            Lie("element_bytes", {"element_bytes": value}) for value in (3, 0, 16, -1, 2**32 + 1)
        ],
        "entry_bytes": [Lie("entry_bytes", {"entry_bytes": value}) for value in entries],
        "dst_rows": [
            Lie("dst_rows", {"dst_rows": rows - 1, "num_tokens": rows}),
            Lie("dst_rows", {"dst_rows": 0, "num_tokens": rows}),
        ],
        "not_nested": [
            Lie("not_nested", {"dst_row_stride_bytes": stride, "dst_rows": max(rows, 2)})
            for stride in (entry - element_bytes, 0)
        ],
    }
    return Surface(
        case=case,
        arguments=arguments,
        destinations=("dst",),
        strides=_strides(case),
        extents={
            "page_stride_bytes": ("num_pages",),
            "slot_stride_bytes": ("page_size_tokens", "num_pages"),
            "dst_row_stride_bytes": ("num_tokens", "dst_rows"),
            "table_row_stride": ("num_requests", "table_width"),
        },
        counts=("num_requests", "num_tokens", "num_pages", "table_width"),
        own=own,
    )


# ---- corners -------------------------------------------------------------------------------------

#: Name -> whether a case is in that corner.
CORNERS: Corners = GATHER_CORNERS
