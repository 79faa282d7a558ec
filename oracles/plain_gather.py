"""References of gathers whose rows are computed: the contract's loop, and strided torch tensors.

Neither shares anything with the vectorised expectation but the bytes that lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pagefuzz.oracles import contents
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.expectation import Contested, Counts, Expectation, Expected, Footprint
from pagefuzz.oracles.free_nans import FreeNans
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Dtype, Plan
from pagefuzz.oracles.refusals import is_absent
from pagefuzz.oracles.rows import PADDING_PAGE
from pagefuzz.oracles.verdict import CaseClass

if TYPE_CHECKING:
    import torch

#: Of an entry: the bytes of its row, and for each element whether it may be any NaN.
RowOf = Callable[[bytes], tuple[bytes, list[bool]]]


def integers(plan: Plan, buffer: str, width: int) -> dict[int, int]:
    """Element index -> value, of an index buffer's image."""
    image = plan.buffers[buffer].image
    return {
        at // width: int.from_bytes(raw.tobytes(), "little", signed=True)
        for at, raw in zip(image.offsets.tolist(), image.values, strict=True)
    }


def expect_by_loop(
    plan: Plan, entry_bytes: int, row_bytes: int, row_dtype: Dtype, row_of: RowOf
) -> Expectation:
    """Plain integers, one row at a time, for a plan that is not refused."""
    a = plan.arguments
    requests, tokens, page_size = a["num_requests"], a["num_tokens"], a["page_size_tokens"]
    page_stride = a["page_stride_bytes"] if a["num_pages"] > 1 else 0
    slot_stride = a["slot_stride_bytes"] if page_size > 1 else 0
    row_stride = a["dst_row_stride_bytes"] if a["dst_rows"] > 1 else 0
    table_stride = a["table_row_stride"] if requests > 1 else 0
    table, starts = integers(plan, "block_table", 4), integers(plan, "starts", 4)
    absent = is_absent(plan.buffers["seq_starts"])
    seq_starts = dict.fromkeys(range(requests), 0) if absent else integers(plan, "seq_starts", 4)
    src_words = integers(plan, "src", 4)

    def entry(at: int) -> bytes:
        data = bytearray(contents.payload(plan.case.seed, at, at + entry_bytes))
        for byte in range(0, entry_bytes, 4):
            if (at + byte) % 4 == 0 and (at + byte) // 4 in src_words:
                data[byte : byte + 4] = (src_words[(at + byte) // 4] % 2**32).to_bytes(4, "little")
        return bytes(data)

    def start(r: int) -> int:
        return starts[r] if r < requests or a["has_terminal"] else tokens

    def clamp(value: int) -> int:
        return min(max(value, 0), tokens)

    bounds = [clamp(start(r)) for r in range(requests + 1)] if requests else []
    falls = [k for k in range(requests) if bounds[k + 1] < bounds[k]]
    contested_from = min(bounds[falls[0] + 1 :]) if falls else tokens
    told = [starts[r] for r in range(requests + a["has_terminal"])] if requests else []
    sound = told == sorted(told) and all(value >= 0 for value in told)

    read: dict[str, list[tuple[int, int]]] = {"src": [], "block_table": []}
    must: list[tuple[int, bytes, list[bool]]] = []
    claims: list[tuple[int, bytes, list[bool]]] = []
    padding, skipped = set(), set()
    for r in range(requests):
        for row in range(bounds[r], bounds[r + 1]):
            if seq_starts[r] < 0:
                skipped.add((r, -1))
                continue
            column, slot = divmod(seq_starts[r] + (row - start(r)), page_size)
            page_id = None
            if column < a["table_width"]:
                element = r * table_stride + column
                read["block_table"].append((4 * element, 4 * element + 4))
                page_id = table[element]
            if page_id == PADDING_PAGE:
                padding.add((r, column))
            elif page_id is None or not 0 <= page_id < a["num_pages"]:
                skipped.add((r, column))
            else:
                at = page_id * page_stride + slot * slot_stride
                read["src"].append((at, at + entry_bytes))
                (must if row < contested_from else claims).append(
                    (row * row_stride, *row_of(entry(at)))
                )

    footprints = {}
    if requests and tokens:
        footprints = {name: Footprint(_intervals(pairs)) for name, pairs in read.items()}
        footprints["starts"] = Footprint(_intervals([(0, 4 * len(told))]))
        footprints["dst"] = Footprint(
            must_write=_intervals([(at, at + row_bytes) for at, _, _ in must]),
            may_write=_intervals([(at, at + row_bytes) for at, _, _ in claims]),
        )
        if not absent:
            footprints["seq_starts"] = Footprint(_intervals([(0, 4 * requests)]))
        if not is_absent(plan.buffers["counts"]):
            pair = _intervals([(0, 16)])
            footprints["counts"] = Footprint(pair, may_write=pair)
    contested = None
    if falls:
        offsets, values, free = _runs(claims, row_bytes, row_dtype)
        contested = Contested(offsets, values, row_dtype.size_bytes, free)
    offsets, values, free = _runs(sorted(must), row_bytes, row_dtype)
    return Expectation(
        case_class=CaseClass.IN_CONTRACT
        if sound and not padding and not skipped
        else CaseClass.HOSTILE,
        footprints=footprints,
        expected={"dst": Expected(offsets, values, contested, free)},
        counts=None if falls else Counts(len(padding), len(skipped)),
    )


def entries_by_torch(plan: Plan, entry_bytes: int, src_bytes: int) -> dict[int, torch.Tensor]:
    """Byte offset of each row that must be written -> its entry, uint8 [entry_bytes].

    Gathers with strided tensors that really exist, for a plan that is not refused. Raises
    `CaseError` if source and table are above 256 MiB.
    """
    import torch  # seconds, that a campaign need not wait for

    a = plan.arguments
    requests, tokens, page_size = a["num_requests"], a["num_tokens"], a["page_size_tokens"]
    if not (requests and tokens):
        return {}
    cells = (requests - 1) * a["table_row_stride"] if requests > 1 else 0
    cells += a["table_width"]
    if (needed := src_bytes + 4 * cells) > 2**28:
        raise CaseError(f"the torch reference needs {needed} bytes; it makes at most 2^28")
    payload = torch.from_numpy(contents.payload(plan.case.seed, 0, src_bytes).copy())
    image = plan.buffers["src"].image
    for at, raw in zip(image.offsets.tolist(), image.values, strict=True):
        payload[at : at + raw.size] = torch.from_numpy(raw.copy())
    cache = payload.as_strided(
        (a["num_pages"], page_size, entry_bytes),
        (
            a["page_stride_bytes"] if a["num_pages"] > 1 else 0,
            a["slot_stride_bytes"] if page_size > 1 else 0,
            1,
        ),
    )
    table = torch.full((cells,), -2, dtype=torch.int64)
    for element, page in integers(plan, "block_table", 4).items():
        table[element] = page
    table = table.as_strided(
        (requests, a["table_width"]), (a["table_row_stride"] if requests > 1 else 0, 1)
    )
    starts = _tensor(integers(plan, "starts", 4))
    seq_starts = torch.zeros(requests, dtype=torch.int64)
    if not is_absent(plan.buffers["seq_starts"]):
        seq_starts = _tensor(integers(plan, "seq_starts", 4))
    clamped = starts.clamp(0, tokens)
    if not a["has_terminal"]:
        clamped = torch.cat((clamped, torch.tensor([tokens])))
    exact_rows = tokens
    falls = (clamped.diff() < 0).nonzero().view(-1)
    if len(falls):
        exact_rows = int(clamped[falls[0] + 1 :].min())
    row_stride = a["dst_row_stride_bytes"] if a["dst_rows"] > 1 else 0

    out: dict[int, torch.Tensor] = {}
    for r in range(requests):
        if seq_starts[r] < 0:
            continue
        row = torch.arange(int(clamped[r]), max(int(clamped[r + 1]), int(clamped[r])))
        row = row[row < exact_rows]
        token = seq_starts[r] + row - starts[r]
        column = token.div(page_size, rounding_mode="floor")
        row, token, column = (x[column < a["table_width"]] for x in (row, token, column))
        page_id = table[r][column]
        valid = (page_id >= 0) & (page_id < a["num_pages"])
        slot = token.remainder(page_size)
        entries = cache[page_id[valid], slot[valid]]
        out.update(zip((row[valid] * row_stride).tolist(), entries, strict=True))
    return out


def _tensor(values: Mapping[int, int]) -> torch.Tensor:
    import torch

    return torch.tensor([values[i] for i in range(len(values))], dtype=torch.int64)


def _intervals(pairs: list[tuple[int, int]]) -> IntervalSet:
    return IntervalSet([begin for begin, _ in pairs], [end for _, end in pairs])


def _runs(
    runs: list[tuple[int, bytes, list[bool]]], row_bytes: int, dtype: Dtype
) -> tuple[np.ndarray, np.ndarray, FreeNans | None]:
    """Offsets, values and free NaNs of rows."""
    offsets = np.array([at for at, _, _ in runs], dtype=np.int64)
    raw = np.frombuffer(b"".join(data for _, data, _ in runs), dtype=np.uint8)
    mask = np.array([free for _, _, free in runs], dtype=np.bool_)
    free = FreeNans(dtype, mask) if mask.any() else None
    return offsets, raw.reshape(len(runs), row_bytes), free
