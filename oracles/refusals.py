"""Rules that arguments of any operation must keep; a launcher must refuse those that do not.

Each function adds what it finds to a list. All arithmetic is on Python integers, so that nothing
can wrap here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pagefuzz.oracles.expectation import Refusal
from pagefuzz.oracles.index_values import INT64
from pagefuzz.oracles.layout import Dtype, Plan, PlannedBuffer

Found = list[Refusal]

_DTYPE_NAMES = {int(dtype): dtype.name for dtype in Dtype}


def dtype_name(code: int) -> str:
    return _DTYPE_NAMES.get(code, f"unknown dtype {code}")


def is_absent(buffer: PlannedBuffer) -> bool:
    """Whether an optional argument is left out."""
    return buffer.is_null and buffer.extent_bytes == 0


def check_dtype(found: Found, buffer: PlannedBuffer, legal: Collection[int]) -> None:
    if buffer.dtype not in legal:
        names = " or ".join(dtype_name(code) for code in legal)
        found.append(
            Refusal("dtype", f"{buffer.name} is {dtype_name(buffer.dtype)}, it must be {names}")
        )


def check_rank(found: Found, buffer: PlannedBuffer, rank: int) -> None:
    if buffer.rank != rank:
        found.append(
            Refusal("rank", f"{buffer.name} has {buffer.rank} dimensions, it must have {rank}")
        )


def check_rows(found: Found, sizes: Mapping[str, int], *counts: str) -> None:
    """Destinations, each with its number of rows, have room for num_tokens."""
    tokens = sizes["num_tokens"]
    for name in counts:
        if tokens > sizes[name]:
            text = f"num_tokens={tokens} is more than {name}={sizes[name]}"
            found.append(Refusal("dst_rows", text))


def check_ranges(
    found: Found, arguments: Mapping[str, int], legal: Mapping[str, tuple[str, range]]
) -> bool:
    """Argument -> (reason, legal range). Returns whether all lie in theirs."""
    before = len(found)
    for name, (reason, allowed) in legal.items():
        value = arguments[name]
        if value not in allowed:
            found.append(
                Refusal(
                    reason,
                    f"{name}={value} lies outside {allowed.start}..{allowed.stop - 1}",
                )
            )
    return len(found) == before


def check_strides(found: Found, strides: Mapping[str, int]) -> bool:
    """`strides` holds those that are not ignored. Returns whether none is negative."""
    before = len(found)
    for name, stride in strides.items():
        if stride < 0:
            found.append(Refusal("negative_stride", f"{name}={stride} is negative"))
    return len(found) == before


def check_extents(found: Found, plan: Plan, required: Mapping[str, int]) -> None:
    """`required` holds bytes by buffer, as exact integers."""
    for name, required_bytes in required.items():
        buffer = plan.buffers[name]
        if required_bytes not in INT64:
            found.append(
                Refusal(
                    "stride_overflow",
                    f"sizes and strides of {name} need {required_bytes} bytes, more than int64",
                )
            )
        elif buffer.extent_bytes < required_bytes:
            found.append(
                Refusal(
                    "extent",
                    f"{name} has {buffer.extent_bytes} bytes, sizes and strides need "
                    f"{required_bytes}",
                )
            )


def check_pointer(found: Found, plan: Plan, name: str, alignment_bytes: int) -> None:
    """A null pointer has no extent, an extent is not negative, a base is aligned."""
    buffer = plan.buffers[name]
    if buffer.extent_bytes < 0:
        found.append(Refusal("extent", f"{name} has {buffer.extent_bytes} bytes"))
    if buffer.is_null:
        if buffer.extent_bytes != 0:
            found.append(
                Refusal("null_pointer", f"{name} is null and has {buffer.extent_bytes} bytes")
            )
    elif plan.base_alignment_offset_bytes(name) % alignment_bytes:
        found.append(
            Refusal("alignment", f"the base of {name} is not a multiple of {alignment_bytes} bytes")
        )


def check_stride_alignment(found: Found, strides: Mapping[str, int], alignment_bytes: int) -> None:
    for name, stride in strides.items():
        if stride % alignment_bytes:
            found.append(
                Refusal("alignment", f"{name}={stride} is not a multiple of {alignment_bytes}")
            )


def check_overlaps(found: Found, plan: Plan, destination: str, others: Sequence[str]) -> None:
    """The destination's range must meet no other; empty ranges meet nothing."""
    root, begin = plan.base(destination)
    extent_bytes = plan.buffers[destination].extent_bytes
    if plan.buffers[destination].is_null or extent_bytes <= 0:
        return
    for name in others:
        other_root, other_begin = plan.base(name)
        other_extent_bytes = plan.buffers[name].extent_bytes
        if other_root != root or plan.buffers[name].is_null or other_extent_bytes <= 0:
            continue
        if begin < other_begin + other_extent_bytes and other_begin < begin + extent_bytes:
            found.append(Refusal("overlap", f"the bytes of {destination} meet those of {name}"))
