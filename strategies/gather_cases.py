"""From a fitted gather to a case, and what of it can be lied about: operations (a) to (d)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.gathers import Gather
from pagefuzz.strategies.refusals import Argument, Lie, Surface, reach, rows_bytes

#: dtype and rank of what every gather reads and counts beside the cache, and of a scale.
VECTOR_TYPES = MappingProxyType(
    {
        "block_table": (Dtype.I32, 2),
        "starts": (Dtype.I32, 1),
        "seq_starts": (Dtype.I32, 1),
        "scale": (Dtype.F32, 1),
        "counts": (Dtype.I64, 1),
    }
)
#: Buffers that may be absent.
OPTIONAL = ("seq_starts", "scale", "counts")
#: Sizes in 0..2^31-1.
COUNTS = ("num_requests", "num_tokens", "num_pages", "table_width")
#: What makes the table's row stride part of an extent; see `Surface`.
TABLE_EXTENT = ("num_requests", "table_width")

_NONE: Mapping[str, Values] = MappingProxyType({})


def gather_case(
    operation: str,
    gather: Gather,
    sizes: Mapping[str, int],
    placed: Mapping[str, Placement],
    *,
    hints: Mapping[str, Values] = _NONE,
    scale: Mapping[str, Values] = _NONE,
) -> Case:
    """What was fitted, as a case.

    sizes         those that not every gather has
    placed        placements; those of absent buffers are left out
    hints, scale  values that only some gathers have
    """
    index, choices = gather.index, gather.choices
    values = {"block_table": gather.table, **hints, "starts": Values.literal(*index.starts)}
    if index.seq_starts is not None:
        values["seq_starts"] = Values.literal(*index.seq_starts)
    values.update(scale)
    if choices.counters is not None:
        values["counts"] = Values.literal(*choices.counters)
    absent = [name for name in OPTIONAL if name not in values]
    return Case(
        operation=operation,
        sizes={
            "num_requests": index.num_requests,
            "num_tokens": index.num_tokens,
            "page_size_tokens": gather.page_size_tokens,
            "num_pages": index.num_pages,
            "table_width": index.table_width,
            "table_row_stride": index.table_row_stride,
            "page_stride_bytes": gather.page_stride_bytes,
            **sizes,
            "has_terminal": choices.destination.has_terminal,
        },
        values=values,
        placements={name: place for name, place in placed.items() if name not in absent},
        seed=choices.seed,
    )


def vector_bytes(case: Case) -> dict[str, int]:
    """What table, starts, seq_starts and counts need; absent ones 0."""
    sizes = case.sizes
    requests, width = sizes["num_requests"], sizes["table_width"]
    last = (requests - 1) * sizes["table_row_stride"] if requests > 1 else 0
    return {
        "block_table": 4 * (last + width) if requests and width else 0,
        "starts": 4 * (requests + sizes["has_terminal"]) if requests else 0,
        "seq_starts": 4 * requests if "seq_starts" in case.values else 0,
        "counts": 16 if "counts" in case.values else 0,
    }


def alignments(payload: Mapping[str, int], *, has_scale: bool = False) -> dict[str, int]:
    """Of every buffer's base, in bytes and in ABI order. payload: the cache's and destinations'."""
    vectors = {n: d.size_bytes for n, (d, _) in VECTOR_TYPES.items() if has_scale or n != "scale"}
    return {**payload, **vectors}


def arguments(
    case: Case,
    payload: Mapping[str, tuple[int, int]],
    required_bytes: Mapping[str, int],
    alignments: Mapping[str, int],
) -> dict[str, Argument]:
    """Every buffer that has an alignment. payload: dtype and rank of what is no vector above."""
    types = {**payload, **VECTOR_TYPES}
    found = {}
    for name, alignment in alignments.items():
        (dtype, rank), is_absent = types[name], name in OPTIONAL and name not in case.values
        needed = required_bytes[name]
        found[name] = Argument(int(dtype), rank, needed, alignment, is_absent=is_absent)
    return found


@dataclass(frozen=True)
class Entries:
    """A gather of entries to rows of one destination, operations (a) to (c).

    src_unit, dst_unit  what bases and strides of cache and destination are multiples of, bytes
    has_scale           whether there is a scale, or room for one
    """

    src_unit: int
    dst_unit: int
    has_scale: bool = False

    @property
    def alignments(self) -> dict[str, int]:
        payload = {"src": self.src_unit, "dst": self.dst_unit}
        return alignments(payload, has_scale=self.has_scale)

    @property
    def strides(self) -> dict[str, tuple[str, int]]:
        """Stride -> (size that must exceed 1 for it to count, alignment in bytes)."""
        return {
            "page_stride_bytes": ("num_pages", self.src_unit),
            "slot_stride_bytes": ("page_size_tokens", self.src_unit),
            "dst_row_stride_bytes": ("dst_rows", self.dst_unit),
            "table_row_stride": ("num_requests", 1),
        }

    def case(
        self,
        operation: str,
        gather: Gather,
        sizes: Mapping[str, int],
        placed: Mapping[str, Placement],
        *,
        row_factor: int = 1,
        scale: Mapping[str, Values] = _NONE,
    ) -> Case:
        """As `gather_case`. row_factor: by what the gather's row stride is multiplied."""
        entries = {
            "slot_stride_bytes": gather.slot_stride_bytes,
            "dst_rows": gather.dst_rows,
            "dst_row_stride_bytes": gather.dst_row_stride_bytes * row_factor,
        }
        return gather_case(operation, gather, {**entries, **sizes}, placed, scale=scale)

    def required_bytes(self, case: Case, entry_bytes: int, row_bytes: int) -> dict[str, int]:
        """What every buffer needs; absent ones 0."""
        reached = reach(case, self.strides)
        pool = reached["page_stride_bytes"] + reached["slot_stride_bytes"] + entry_bytes
        needed = {
            "src": pool if case.sizes["num_pages"] else 0,
            **rows_bytes(case, dst=row_bytes),
            **vector_bytes(case),
        }
        return {**needed, "scale": 4 if "scale" in case.values else 0} if self.has_scale else needed

    def surface(
        self,
        case: Case,
        required_bytes: Mapping[str, int],
        types: Mapping[str, tuple[int, int]],
        row_bytes: int,
        own: Mapping[str, list[Lie]],
    ) -> Surface:
        """What launchers must see through, for a sound case.

        types  dtype and rank of src and dst
        own    lies that only one operation knows; those about rows of the destination come last
        """
        rows = max(case.sizes["num_tokens"], 1)
        return Surface(
            case=case,
            arguments=arguments(case, types, required_bytes, self.alignments),
            destinations=("dst",),
            strides=self.strides,
            extents={
                "page_stride_bytes": ("num_pages",),
                "slot_stride_bytes": ("page_size_tokens", "num_pages"),
                "dst_row_stride_bytes": ("num_tokens", "dst_rows"),
                "table_row_stride": TABLE_EXTENT,
            },
            counts=COUNTS,
            own={
                **own,
                "dst_rows": [
                    Lie("dst_rows", {"dst_rows": fewer, "num_tokens": rows})
                    for fewer in (rows - 1, 0)
                ],
                "not_nested": [
                    Lie("not_nested", {"dst_row_stride_bytes": stride, "dst_rows": max(rows, 2)})
                    for stride in (row_bytes - self.dst_unit, 0)
                ],
            },
        )
