"""Legal but unusual gathers: nonsense where nobody looks, null pointers where nothing is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pagefuzz.oracles.case import Case
from pagefuzz.strategies.boundaries import INT32_MAX, INT32_MIN
from pagefuzz.strategies.gathers import Gather

#: Stride -> (size that must exceed 1 for it to count, alignment in bytes).
Strides = Mapping[str, tuple[str, int]]

_STRIDE_JUNK = (-1, 0, 3, INT32_MIN, 2**63 - 1, -(2**63), 2**32)
_SEQ_JUNK = (-7, INT32_MIN, INT32_MAX)


def far_starts(gather: Gather, junk: int) -> None:
    """Starts at num_tokens and beyond mean the same wherever they lie."""
    index = gather.index
    far = INT32_MAX if junk % 2 == 0 else min(index.num_tokens + 1 + junk, INT32_MAX)
    for at in range(len(index.starts) - 1, 0, -1):
        if index.starts[at] < index.num_tokens:
            break
        index.starts[at] = max(index.starts[at], far)


def unread_seq_starts(gather: Gather, junk: int) -> None:
    """Nobody reads the sequence start of a request without rows on its account."""
    index = gather.index
    live = {span.request for span in index.spans()}
    if index.seq_starts is not None:
        for request in set(range(index.num_requests)) - live:
            index.seq_starts[request] = _SEQ_JUNK[(junk + request) % len(_SEQ_JUNK)]


def single_row(gather: Gather, junk: int) -> None:
    """Sometimes one row is left, so that the destination's row stride is ignored too."""
    if junk % 4 == 3 and not gather.quantity:
        gather.index.num_tokens = min(gather.index.num_tokens, 1)
        gather.dst_rows = gather.index.num_tokens


def ignored_strides(case: Case, strides: Strides, junk: int) -> Case:
    """Strides of dimensions of size <= 1 hold nonsense."""
    ignored = [name for name, (size, _) in strides.items() if case.sizes[size] <= 1]
    return case.with_sizes(
        **{name: _STRIDE_JUNK[(junk + at) % len(_STRIDE_JUNK)] for at, name in enumerate(ignored)}
    )


def null_where_empty(case: Case, required_bytes: Mapping[str, int]) -> Case:
    """A null pointer for every buffer of no bytes."""
    empty = [name for name, needed in required_bytes.items() if needed == 0]
    kept = {name: place for name, place in case.placements.items() if name not in empty}
    return replace(case, placements=kept, overrides={f"{name}.data": 0 for name in empty})


def absent_arguments(case: Case, optional: Sequence[str], junk: int) -> Case:
    """dtype and rank of absent buffers hold nonsense."""
    absent = [name for name in optional if name not in case.values]
    return replace(
        case,
        overrides={f"{name}.{part}": junk - 1 for name in absent for part in ("dtype", "rank")},
    )


def required_bytes(
    case: Case, strides: Strides, entry_bytes: int, row_bytes: int
) -> dict[str, int]:
    """What every buffer of a gather of entries needs; absent ones 0."""
    sizes = case.sizes
    reach = {
        name: (sizes[size] - 1) * sizes[name] if sizes[size] > 1 else 0
        for name, (size, _) in strides.items()
    }
    tokens, requests, width = sizes["num_tokens"], sizes["num_requests"], sizes["table_width"]
    row_stride = sizes["dst_row_stride_bytes"] if sizes["dst_rows"] > 1 else 0
    pool = reach["page_stride_bytes"] + reach["slot_stride_bytes"] + entry_bytes
    return {
        "src": pool if sizes["num_pages"] else 0,
        "dst": (tokens - 1) * row_stride + row_bytes if tokens else 0,
        "block_table": 4 * (reach["table_row_stride"] + width) if requests and width else 0,
        "starts": 4 * (requests + sizes["has_terminal"]) if requests else 0,
        "seq_starts": 4 * requests if "seq_starts" in case.values else 0,
        "counts": 16 if "counts" in case.values else 0,
    }
