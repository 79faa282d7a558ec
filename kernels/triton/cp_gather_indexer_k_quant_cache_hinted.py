"""(d) in Triton: gathers quantised keys and their scales, one program an output row.

A `token_to_seq` hint a row names the request that the row is of, in place of a search over starts.
As in every operation's file: the kernels; what the launchers refuse; the launchers.
"""

# Annotations are part of Triton's language: they must not become strings.

import types
from typing import Any

import triton
import triton.language as tl

from pagefuzz.kernels.triton.common import launching
from pagefuzz.kernels.triton.common.launching import Array, Pointer, Result

#: Arguments that may differ from launch to launch: neither their value nor its being 1 or a
#: multiple of 16, nor the alignment of a pointer, makes another kernel.
RUN_TIME = (
    *("src", "src_words", "dst_k", "dst_scale", "block_table", "token_to_seq"),
    *("starts", "seq_starts", "counts", "has_terminal", "has_seq_starts", "has_counts"),
    *("num_requests", "num_tokens", "num_pages", "table_width", "table_row_stride"),
    *("page_stride_bytes", "dst_k_row_stride_bytes", "dst_scale_row_stride_bytes"),
)

#: What the faulty form has compiled in.
COMPILED_IN = ("num_requests", "num_tokens", "num_pages", "table_width")


def _gather_row(
    src,
    src_words,
    dst_k,
    dst_scale,
    block_table,
    token_to_seq,
    starts,
    seq_starts,
    counts,
    num_requests: tl.int64,
    num_tokens: tl.int64,
    num_pages: tl.int64,
    table_width: tl.int64,
    table_row_stride: tl.int64,
    page_stride_bytes: tl.int64,
    dst_k_row_stride_bytes: tl.int64,
    dst_scale_row_stride_bytes: tl.int64,
    has_terminal: tl.int64,
    has_seq_starts: tl.int64,
    has_counts: tl.int64,
    page_size_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    groups: tl.constexpr,
    page_layout: tl.constexpr,
    key_tile: tl.constexpr,
    scale_tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(token_to_seq + row).to(tl.int64)
    if (request < 0) | (request >= num_requests):
        return
    start = tl.load(starts + request).to(tl.int64)
    has_end = (request + 1 < num_requests) | (has_terminal != 0)
    told_end = tl.load(starts + request + 1, mask=has_end, other=0).to(tl.int64)
    row_end = tl.minimum(tl.where(has_end, told_end, num_tokens), num_tokens)
    row_begin = tl.minimum(tl.maximum(start, 0), num_tokens)
    if (row < row_begin) | (row >= row_end):  # the hint is wrong
        return
    # A page counts once, with its first row: the request's first or that of slot 0.
    first_row = (has_counts != 0) & (row == row_begin)
    seq_start = tl.load(seq_starts + request, mask=has_seq_starts != 0, other=0).to(tl.int64)
    if seq_start < 0:
        tl.atomic_add(counts + 1, 1, mask=first_row, sem="relaxed")
        return
    position = seq_start + (row - start)
    page = position // page_size_tokens
    slot = position % page_size_tokens
    first_of_page = (has_counts != 0) & ((row == row_begin) | (slot == 0))
    if page >= table_width:
        tl.atomic_add(counts + 1, 1, mask=first_of_page, sem="relaxed")
        return
    physical = tl.load(block_table + request * table_row_stride + page).to(tl.int64)
    if (physical < 0) | (physical >= num_pages):
        which = tl.where(physical == -1, 0, 1)
        tl.atomic_add(counts + which, 1, mask=first_of_page, sem="relaxed")
        return
    keys = physical * page_stride_bytes
    byte = tl.arange(0, key_tile)
    if page_layout == 0:
        place = slot * head_dim + byte
    else:
        tile = slot // 16 * 16 * head_dim + byte // 16 * 256
        place = tile + slot % 16 * 16 + byte % 16
    copied = tl.load(src + keys + place, mask=byte < head_dim)
    tl.store(dst_k + row * dst_k_row_stride_bytes + byte, copied, mask=byte < head_dim)
    # Words of 4 bytes: pages and rows of scales begin at multiples of them.
    scales = (keys + page_size_tokens * head_dim) // 4
    group = tl.arange(0, scale_tile)
    words = tl.load(src_words + scales + slot * groups + group, mask=group < groups)
    to = row * (dst_scale_row_stride_bytes // 4)
    tl.store(dst_scale + to + group, words, mask=group < groups)


def _compiled_in(function: Any, *names: str) -> Any:
    """The same function with more compile-time arguments."""
    other = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    other.__annotations__ = {**function.__annotations__, **dict.fromkeys(names, tl.constexpr)}
    return other


gather_rows = triton.jit(_gather_row, do_not_specialize=RUN_TIME)
gather_rows_compile_time = triton.jit(
    _compiled_in(_gather_row, *COMPILED_IN),
    do_not_specialize=[name for name in RUN_TIME if name not in COMPILED_IN],
)


# ---- launchers' side -----------------------------------------------------------------------------


def _check(arrays: dict[str, Array], a: dict[str, int]) -> None:
    """Raises `RefusedError` for the first thing that is wrong."""
    head, block, size = a["head_dim"], a["quant_block"], a["page_size_tokens"]
    launching.in_range("head_dim", head, 16, 1024)
    launching.require(head % 16 == 0, f"head_dim is {head}, it must be a multiple of 16")
    launching.require(
        block > 0 and head % block == 0, f"quant_block is {block}, it must divide head_dim = {head}"
    )
    launching.in_range("page_layout", a["page_layout"], 0, 1)
    launching.in_range("page_size_tokens", size, 1, 4096)
    launching.require(
        a["page_layout"] == 0 or size % 16 == 0,
        f"page_size_tokens is {size}, page_layout 1 needs a multiple of 16",
    )
    for name in ("num_requests", "num_tokens", "num_pages", "table_width"):
        launching.count(name, a[name])
    launching.in_range("has_terminal", a["has_terminal"], 0, 1)
    tokens = a["num_tokens"]
    for name in ("dst_k", "dst_scale"):
        rows = a[f"{name}_rows"]
        launching.require(tokens <= rows, f"num_tokens is {tokens}, {name} has only {rows} rows")

    launching.typed("src", arrays["src"], 3, launching.U8)
    key_dtypes = (launching.U8, launching.E4M3, launching.E5M2)
    launching.typed("dst_k", arrays["dst_k"], 2, *key_dtypes)
    launching.typed("dst_scale", arrays["dst_scale"], 2, launching.F32)
    launching.typed("block_table", arrays["block_table"], 2, launching.I32)
    for name in ("token_to_seq", "starts"):
        launching.typed(name, arrays[name], 1, launching.I32)
    for name, dtype in (("seq_starts", launching.I32), ("counts", launching.I64)):
        if not arrays[name].absent:
            launching.typed(name, arrays[name], 1, dtype)

    scale_bytes = 4 * (head // block)
    page_bytes = size * (head + scale_bytes)
    strides = _strides(a)
    launching.stride("table_row_stride", strides["table_row_stride"], 1)
    least = page_bytes if a["num_pages"] > 1 else 0
    launching.stride("page_stride_bytes", strides["page_stride_bytes"], 4, least)
    for name, row_bytes, unit in (("dst_k", head, 1), ("dst_scale", scale_bytes, 4)):
        least = row_bytes if a[f"{name}_rows"] > 1 else 0
        launching.stride(
            f"{name}_row_stride_bytes", strides[f"{name}_row_stride_bytes"], unit, least
        )

    requests, pages, width = a["num_requests"], a["num_pages"], a["table_width"]
    needed = {
        "src": (pages - 1) * strides["page_stride_bytes"] + page_bytes if pages else 0,
        "dst_k": (tokens - 1) * strides["dst_k_row_stride_bytes"] + head,
        "dst_scale": (tokens - 1) * strides["dst_scale_row_stride_bytes"] + scale_bytes,
        "block_table": 4 * ((requests - 1) * strides["table_row_stride"] + width),
        "token_to_seq": 4 * tokens,
        "starts": 4 * (requests + a["has_terminal"]) if requests else 0,
        "seq_starts": 0 if arrays["seq_starts"].absent else 4 * requests,
        "counts": 0 if arrays["counts"].absent else 16,
    }
    if not tokens:
        needed |= {"dst_k": 0, "dst_scale": 0}
    if not (requests and width):
        needed["block_table"] = 0
    for name, needed_bytes in needed.items():
        launching.extent(name, arrays[name], needed_bytes)
    for name, array in arrays.items():
        launching.base(name, array, {"dst_k": 1, "counts": 8}.get(name, 4))
    read = [name for name in arrays if name not in ("dst_k", "dst_scale")]
    for name in ("dst_k", "dst_scale"):
        for other in read:
            launching.disjoint(name, arrays[name], other, arrays[other])


def _strides(a: dict[str, int]) -> dict[str, int]:
    """Strides that are ignored count as 0: there is but one row, or page, to be at."""
    sizes = {
        "table_row_stride": "num_requests",
        "page_stride_bytes": "num_pages",
        "dst_k_row_stride_bytes": "dst_k_rows",
        "dst_scale_row_stride_bytes": "dst_scale_rows",
    }
    return {name: a[name] if a[size] > 1 else 0 for name, size in sizes.items()}


def _launch(kernel: Any, arrays: dict[str, Array], a: dict[str, int], stream: int) -> Result:
    try:
        _check(arrays, a)
    except launching.RefusedError as refusal:
        return launching.REFUSED, str(refusal)
    if a["num_tokens"] == 0 or a["num_requests"] == 0:
        return launching.OK, ""
    strides, groups = _strides(a), a["head_dim"] // a["quant_block"]
    arguments = (
        Pointer(arrays["src"], tl.uint8),
        Pointer(arrays["src"], tl.uint32),
        Pointer(arrays["dst_k"], tl.uint8),
        Pointer(arrays["dst_scale"], tl.uint32),
        Pointer(arrays["block_table"], tl.int32),
        Pointer(arrays["token_to_seq"], tl.int32),
        Pointer(arrays["starts"], tl.int32),
        Pointer(arrays["seq_starts"], tl.int32),
        Pointer(arrays["counts"], tl.int64),
        a["num_requests"],
        a["num_tokens"],
        a["num_pages"],
        a["table_width"],
        strides["table_row_stride"],
        strides["page_stride_bytes"],
        strides["dst_k_row_stride_bytes"],
        strides["dst_scale_row_stride_bytes"],
        a["has_terminal"],
        int(not arrays["seq_starts"].absent),
        int(not arrays["counts"].absent),
        a["page_size_tokens"],
        a["head_dim"],
        groups,
        a["page_layout"],
        triton.next_power_of_2(a["head_dim"]),
        triton.next_power_of_2(groups),
    )
    return launching.launch(kernel, a["num_tokens"], stream, arguments)


def _split(arguments: dict[str, Any]) -> tuple[dict[str, Array], dict[str, int], int]:
    stream = arguments.pop("stream")
    arrays = {name: one for name, one in arguments.items() if isinstance(one, Array)}
    sizes = {name: one for name, one in arguments.items() if name not in arrays}
    return arrays, sizes, stream


def pf_cp_gather_indexer_k_quant_cache_hinted_triton(
    src: Array,
    dst_k: Array,
    dst_scale: Array,
    block_table: Array,
    token_to_seq: Array,
    starts: Array,
    seq_starts: Array,
    counts: Array,
    num_requests: int,
    num_tokens: int,
    page_size_tokens: int,
    num_pages: int,
    table_width: int,
    table_row_stride: int,
    page_stride_bytes: int,
    dst_k_rows: int,
    dst_k_row_stride_bytes: int,
    dst_scale_rows: int,
    dst_scale_row_stride_bytes: int,
    head_dim: int,
    quant_block: int,
    page_layout: int,
    has_terminal: int,
    stream: int,
) -> Result:
    """
    schedule: triton
    contains: yes
    summary: one program per output row, its request from the row's hint; one compilation for all
        shapes
    """
    return _launch(gather_rows, *_split(locals()))


def pf_cp_gather_indexer_k_quant_cache_hinted_triton_compile_time(
    src: Array,
    dst_k: Array,
    dst_scale: Array,
    block_table: Array,
    token_to_seq: Array,
    starts: Array,
    seq_starts: Array,
    counts: Array,
    num_requests: int,
    num_tokens: int,
    page_size_tokens: int,
    num_pages: int,
    table_width: int,
    table_row_stride: int,
    page_stride_bytes: int,
    dst_k_rows: int,
    dst_k_row_stride_bytes: int,
    dst_scale_rows: int,
    dst_scale_row_stride_bytes: int,
    head_dim: int,
    quant_block: int,
    page_layout: int,
    has_terminal: int,
    stream: int,
) -> Result:
    """
    schedule: triton-compile-time
    contains: yes
    faults: rows, requests, table width and page count are compile-time arguments
    summary: the same kernel as it was: one compilation for each new prompt
    """
    return _launch(gather_rows_compile_time, *_split(locals()))
