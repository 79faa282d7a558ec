"""(d) cp_gather_indexer_k_quant_cache: copies quantised keys and their scales to rows, bit for bit.

The contract, with D = head_dim key bytes and G = head_dim / quant_block scale words a token:

    b = clamp(starts[r], 0, num_tokens)
    e = clamp(starts[r + 1], 0, num_tokens)     # the last request without a terminal: num_tokens
    for row in [b, e):
        p = seq_starts[r] + (row - starts[r])
        q, o = divmod(p, page_size_tokens)
        base = block_table[r * table_row_stride + q] * page_stride_bytes
        dst_k[row, d] = src[base + key(o, d)]                        # d in [0, D), bytes
        dst_scale[row, g] = src[base + page_size_tokens * D + 4 * (o * G + g)]   # words of 4 bytes

    page_layout 0, flat:     key(o, d) = o * D + d
    page_layout 1, tiled16:  key(o, d) = (o div 16) * 16 * D + (d div 16) * 256
                                       + (o mod 16) * 16 + (d mod 16)

Decisions where contracts.md is open, beside those of all gathers (`oracles/gather.py`):

* The destinations have rows of their own (dst_k_rows, dst_scale_rows), each at least num_tokens;
  the row stride of one is ignored if its own rows are <= 1.
* Required bytes: src 0 if num_pages == 0, else (num_pages - 1) * page_stride_bytes +
  page_size_tokens * (D + 4G); a destination 0 if num_tokens == 0, else (num_tokens - 1) * its row
  stride + D, or + 4G. The bytes of a page of padding behind the last one need not exist.
* src is u8 of rank 3; dst_k u8, e4m3 or e5m2 and dst_scale f32, both of rank 2.
* Alignment 4 holds for src and dst_scale, and for their strides that are not ignored, even where an
  extent is 0; a null pointer is aligned. dst_k may lie anywhere.
* page_stride_bytes too small is refused only where it counts, num_pages > 1.
* A destination must nest: its row stride, unless ignored, is at least its row.
* page_layout other than 0 and 1 is refused; quant_block must be positive.
* Whether the two destinations meet each other is not looked at.
* Contested elements are bytes of dst_k and words of dst_scale: the two of a row may come from
  different claimants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np

from pagefuzz.oracles import contents, gather_text
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.expectation import (
    Contested,
    Counts,
    Expectation,
    Expected,
    Footprint,
    Refusal,
)
from pagefuzz.oracles.gather import BLOCK_TABLE, COUNTS, SEQ_STARTS, STARTS, GatherOperation
from pagefuzz.oracles.indexer_pages import TILE, WORD_BYTES, IndexerPages
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import BufferRole, Bytes, Dtype, Plan, Role
from pagefuzz.oracles.origin import Origin
from pagefuzz.oracles.pages import counts
from pagefuzz.oracles.refusals import (
    Found,
    check_dtype,
    check_overlaps,
    check_pointer,
    check_rank,
    check_stride_alignment,
    is_absent,
)
from pagefuzz.oracles.rows import PADDING_PAGE, Int64s
from pagefuzz.oracles.traced_gather import TracedGather
from pagefuzz.oracles.verdict import CaseClass

FLAT, TILED16 = 0, 1
MAX_HEAD_DIM = 1024

_KEY_DTYPES = (Dtype.U8, Dtype.E4M3, Dtype.E5M2)
_READ_ONLY = ("src", "block_table", "starts", "seq_starts", "counts")

#: Source and tables above this are not made into tensors.
_MOST_TENSOR_BYTES = 2**28


def _pages(sizes: Mapping[str, int]) -> IndexerPages:
    keys = sizes["head_dim"]
    return IndexerPages(
        sizes["page_stride_bytes"] if sizes["num_pages"] > 1 else 0,
        sizes["page_size_tokens"],
        keys,
        WORD_BYTES * (keys // max(sizes["quant_block"], 1)),
        sizes["page_layout"] == TILED16,
    )


class CpGatherIndexerKQuantCache(TracedGather):
    name = "cp_gather_indexer_k_quant_cache"
    summary = "copies quantised indexer keys and their scales through a block table"
    sizes = (
        "num_requests",
        "num_tokens",
        "page_size_tokens",
        "num_pages",
        "table_width",
        "table_row_stride",
        "page_stride_bytes",
        "dst_k_rows",
        "dst_k_row_stride_bytes",
        "dst_scale_rows",
        "dst_scale_row_stride_bytes",
        "head_dim",
        "quant_block",
        "page_layout",
        "has_terminal",
    )
    buffers = (
        BufferRole("src", Role.SOURCE),
        BufferRole("dst_k", Role.DESTINATION),
        BufferRole("dst_scale", Role.DESTINATION),
        BLOCK_TABLE,
        STARTS,
        SEQ_STARTS,
        COUNTS,
    )
    ranges: ClassVar[Mapping[str, tuple[str, range]]] = {
        **GatherOperation.ranges,
        "page_layout": ("page_layout", range(2)),
    }
    unmeasurable: ClassVar[frozenset[str]] = frozenset({"head_dim", "quant_block"})

    # ---- arguments -----------------------------------------------------------------------------

    def strides(self, sizes: Mapping[str, int]) -> dict[str, int]:
        counted = {
            "page_stride_bytes": "num_pages",
            "dst_k_row_stride_bytes": "dst_k_rows",
            "dst_scale_row_stride_bytes": "dst_scale_rows",
        }
        return {name: sizes[name] for name, size in counted.items() if sizes[size] > 1}

    def rows_of(self, sizes: Mapping[str, int]) -> Mapping[str, tuple[int, int]]:
        shape, strides = _pages(sizes), self.strides(sizes)
        return {
            "dst_k": (strides.get("dst_k_row_stride_bytes", 0), shape.keys),
            "dst_scale": (strides.get("dst_scale_row_stride_bytes", 0), shape.scales),
        }

    def payload_bytes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        shape, pages, tokens = _pages(sizes), sizes["num_pages"], sizes["num_tokens"]
        needed = {"src": (pages - 1) * shape.stride + shape.page_bytes if pages else 0}
        for name, (stride, row) in self.rows_of(sizes).items():
            needed[name] = (tokens - 1) * stride + row if tokens else 0
        return needed

    def row_bytes(self, sizes: Mapping[str, int]) -> int:
        return sum(row for _, row in self.rows_of(sizes).values())

    def payload_types(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        return {"src": (Dtype.U8, 3), "dst_k": (Dtype.U8, 2), "dst_scale": (Dtype.F32, 2)}

    def clamped(self, sizes: Mapping[str, int]) -> dict[str, int]:
        laid = {**sizes, **{name: max(value, 0) for name, value in self.strides(sizes).items()}}
        laid["head_dim"] = min(max(sizes["head_dim"], 1), 2 * MAX_HEAD_DIM)
        laid["quant_block"] = min(max(sizes["quant_block"], 1), laid["head_dim"])
        return laid

    def payload_refusals(self, found: Found, plan: Plan) -> None:
        arguments, buffers = plan.arguments, plan.buffers
        head, block = arguments["head_dim"], arguments["quant_block"]
        tokens, size = arguments["num_tokens"], arguments["page_size_tokens"]
        whole = head % 16 == 0 and 16 <= head <= MAX_HEAD_DIM
        if not whole:
            text = f"head_dim={head} must be a multiple of 16 in 16..{MAX_HEAD_DIM}"
            found.append(Refusal("head_dim", text))
        if block <= 0 or (whole and head % block):
            found.append(Refusal("quant_block", f"quant_block={block} must divide head_dim={head}"))
        if arguments["page_layout"] == TILED16 and size % TILE:
            text = f"page_size_tokens={size} must be a multiple of 16 in page_layout 1"
            found.append(Refusal("page_size_tokens", text))
        for name in ("dst_k_rows", "dst_scale_rows"):
            if tokens > arguments[name]:
                text = f"num_tokens={tokens} is more than {name}={arguments[name]}"
                found.append(Refusal("dst_rows", text))
        types = {"src": ((Dtype.U8,), 3), "dst_k": (_KEY_DTYPES, 2), "dst_scale": ((Dtype.F32,), 2)}
        for name, (dtypes, rank) in types.items():
            check_dtype(found, buffers[name], dtypes)
            check_rank(found, buffers[name], rank)
            check_pointer(found, plan, name, 1 if name == "dst_k" else WORD_BYTES)
        strides = self.strides(arguments)
        strides.pop("dst_k_row_stride_bytes", None)
        check_stride_alignment(found, strides, WORD_BYTES)
        if not self.unmeasurable & {refusal.reason for refusal in found}:
            self._check_fits(found, arguments)
        for name in ("dst_k", "dst_scale"):
            check_overlaps(found, plan, name, _READ_ONLY)

    def _check_fits(self, found: Found, sizes: Mapping[str, int]) -> None:
        """Pages and rows lie apart. A negative stride has a reason of its own."""
        strides, needed = self.strides(sizes), _pages(sizes).page_bytes
        page_stride = strides.get("page_stride_bytes", needed)
        if 0 <= page_stride < needed:
            text = f"page_stride_bytes={page_stride} is below the {needed} bytes of a page"
            found.append(Refusal("page_stride", text))
        for name, (_, row) in self.rows_of(sizes).items():
            stride = strides.get(f"{name}_row_stride_bytes", row)
            if 0 <= stride < row:
                text = f"{name}_row_stride_bytes={stride} is below the {row} bytes of a row"
                found.append(Refusal("not_nested", text))

    # ---- the contract, vectorised ----------------------------------------------------------------

    def expect(self, plan: Plan) -> Expectation:
        if refusals := self.refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        arguments, seed = plan.arguments, plan.case.seed
        shape = _pages(arguments)
        rows = self.row_map(plan)
        pages = self.pages(plan, rows)
        hostile = self.hostile_index_values(plan, rows, pages)
        runs = bool(arguments["num_requests"] and arguments["num_tokens"])

        claims = np.flatnonzero(pages.valid[rows.page])
        row, slot = rows.row[claims], rows.slot[claims]
        page = pages.page_id[rows.page[claims]]
        pieces, piece_bytes = shape.key_pieces(page, slot)
        words = shape.scale_words(page, slot)
        sources = {
            "dst_k": contents.payload_at(seed, pieces.ravel(), piece_bytes).reshape(
                row.size, shape.keys
            ),
            "dst_scale": contents.payload_at(seed, words, shape.scales),
        }
        is_exact = np.ones(row.size, dtype=np.bool_)
        if rows.first_contested_row is not None:
            is_exact = row < rows.first_contested_row
        footprints = self.index_footprints(plan, pages) if runs else {}
        if runs:
            footprints["src"] = Footprint(
                IntervalSet.of_runs(pieces, piece_bytes).union(
                    IntervalSet.of_runs(words, shape.scales)
                )
            )
        expected = {}
        for name, (stride, row_bytes) in self.rows_of(arguments).items():
            at, values = row * stride, sources[name]
            contested = None
            if rows.first_contested_row is not None:
                element = 1 if name == "dst_k" else WORD_BYTES
                contested = Contested(at[~is_exact], values[~is_exact], element)
            expected[name] = Expected(at[is_exact], values[is_exact], contested)
            if runs:
                footprints[name] = Footprint(
                    must_write=IntervalSet.of_runs(at[is_exact], row_bytes),
                    may_write=IntervalSet.of_runs(at[~is_exact], row_bytes),
                )
        return Expectation(
            case_class=CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT,
            hostile=hostile,
            footprints=footprints,
            expected=expected,
            counts=counts(rows, pages),
            counters={
                "mapped_rows": rows.row.size,
                "pages_touched": rows.page_request.size,
                "source_closeness": _closeness(pieces, words),
                "destination_closeness": _closeness(
                    *(row * stride for stride, _ in self.rows_of(arguments).values())
                ),
            },
        )

    # ---- the contract as a loop ------------------------------------------------------------------

    def expect_by_loop(self, plan: Plan) -> Expectation:
        """Plain integers, one row at a time; shares nothing with `expect` but the payload."""
        if refusals := self.refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        a, seed = plan.arguments, plan.case.seed
        requests, tokens, size = a["num_requests"], a["num_tokens"], a["page_size_tokens"]
        head, groups = a["head_dim"], a["head_dim"] // a["quant_block"]
        page_stride = a["page_stride_bytes"] if a["num_pages"] > 1 else 0
        key_stride = a["dst_k_row_stride_bytes"] if a["dst_k_rows"] > 1 else 0
        scale_stride = a["dst_scale_row_stride_bytes"] if a["dst_scale_rows"] > 1 else 0
        table_stride = a["table_row_stride"] if requests > 1 else 0
        table, starts = _integers(plan, "block_table"), _integers(plan, "starts")
        seq_starts = None
        if not is_absent(plan.buffers["seq_starts"]):
            seq_starts = _integers(plan, "seq_starts")

        def start(r: int) -> int:
            return starts[r] if r < requests or a["has_terminal"] else tokens

        def clamp(value: int) -> int:
            return 0 if value < 0 else min(value, tokens)

        def copied(offsets: list[int]) -> bytes:
            return contents.payload_at(seed, np.array(offsets), 1).tobytes()

        told = [starts[r] for r in range(requests + a["has_terminal"])] if requests else []
        sound = all(s >= 0 for s in told) and told == sorted(told)
        falls = [k for k in range(requests) if clamp(start(k + 1)) < clamp(start(k))]
        exact_rows = tokens
        if falls:
            exact_rows = min(clamp(start(i)) for i in range(falls[0] + 1, requests + 1))

        read_src: set[int] = set()
        read_table: set[int] = set()
        exact: dict[int, tuple[bytes, bytes]] = {}
        claimed: list[tuple[int, tuple[bytes, bytes]]] = []
        padding: set[tuple[int, int | None]] = set()
        skipped: set[tuple[int, int | None]] = set()
        for r in range(requests):
            seq_start = 0 if seq_starts is None else seq_starts[r]
            for row in range(clamp(start(r)), clamp(start(r + 1))):
                if seq_start < 0:
                    skipped.add((r, None))
                    continue
                q, o = divmod(seq_start + row - start(r), size)
                if q >= a["table_width"]:
                    skipped.add((r, q))
                    continue
                read_table.add(r * table_stride + q)
                page = table[r * table_stride + q]
                if not 0 <= page < a["num_pages"]:
                    (padding if page == PADDING_PAGE else skipped).add((r, q))
                    continue
                keys, scales = [], []
                for d in range(head):
                    at = page * page_stride
                    if a["page_layout"] == FLAT:
                        at += o * head + d
                    else:
                        at += (o // 16) * 16 * head + (d // 16) * 256 + (o % 16) * 16 + d % 16
                    keys.append(at)
                for g in range(groups):
                    word = page * page_stride + size * head + 4 * (o * groups + g)
                    scales += [word, word + 1, word + 2, word + 3]
                read_src.update(keys, scales)
                if row < exact_rows:
                    exact[row] = copied(keys), copied(scales)
                else:
                    claimed.append((row, (copied(keys), copied(scales))))

        pair = _set_of(range(16))
        footprints = {}
        if requests and tokens:
            footprints = {
                "src": Footprint(_set_of(read_src)),
                "block_table": Footprint(_set_of(4 * e + b for e in read_table for b in range(4))),
                "starts": Footprint(_set_of(range(4 * len(told)))),
            }
            if seq_starts is not None:
                footprints["seq_starts"] = Footprint(_set_of(range(4 * requests)))
            if not is_absent(plan.buffers["counts"]):
                footprints["counts"] = Footprint(pair, may_write=pair)
        expected = {}
        layouts = {"dst_k": (key_stride, head, 1), "dst_scale": (scale_stride, 4 * groups, 4)}
        for which, (name, (stride, width, element)) in enumerate(layouts.items()):
            must = [(row * stride, exact[row][which]) for row in sorted(exact)]
            may = [(row * stride, values[which]) for row, values in claimed]
            contested = Contested(*_stacked(may, width), element) if falls else None
            expected[name] = Expected(*_stacked(must, width), contested)
            if requests and tokens:
                footprints[name] = Footprint(
                    must_write=_set_of(at + b for at, _ in must for b in range(width)),
                    may_write=_set_of(at + b for at, _ in may for b in range(width)),
                )
        return Expectation(
            case_class=CaseClass.IN_CONTRACT
            if sound and not padding and not skipped
            else CaseClass.HOSTILE,
            footprints=footprints,
            expected=expected,
            counts=None if falls else Counts(len(padding), len(skipped)),
        )

    # ---- the contract in torch -------------------------------------------------------------------

    def expected_by_torch(self, plan: Plan) -> Mapping[str, Mapping[int, bytes]]:
        """Pages as tensors that really exist, their tiles put in order by a transposition.

        Raises `CaseError` if source and table are above 256 MiB.
        """
        import torch  # seconds, that a campaign need not wait for

        a = plan.arguments
        out: dict[str, dict[int, bytes]] = {"dst_k": {}, "dst_scale": {}}
        if self.refusals(plan) or not (a["num_requests"] and a["num_tokens"]):
            return out
        required = self._required(a)
        if (needed := required["src"] + required["block_table"]) > _MOST_TENSOR_BYTES:
            raise CaseError(f"the torch reference needs {needed} bytes; it makes at most 2^28")
        pages, size, head = a["num_pages"], a["page_size_tokens"], a["head_dim"]
        groups = head // a["quant_block"]
        raw = torch.from_numpy(contents.payload(plan.case.seed, 0, required["src"]).copy())
        page_stride = a["page_stride_bytes"] if pages > 1 else 1
        whole = raw.as_strided((pages, size * (head + 4 * groups)), (page_stride, 1))
        keys, scales = whole[:, : size * head], whole[:, size * head :]
        if a["page_layout"] == TILED16:
            # [tile of slots, tile of bytes, slot, byte], of which the middle two change places.
            keys = keys.reshape(pages, size // 16, head // 16, 16, 16).transpose(2, 3)
        keys, scales = keys.reshape(pages, size, head), scales.reshape(pages, size, 4 * groups)

        table = torch.full((required["block_table"] // 4,), -2, dtype=torch.int64)
        for element, page in _integers(plan, "block_table").items():
            table[element] = page
        table_stride = a["table_row_stride"] if a["num_requests"] > 1 else 0
        table = table.as_strided((a["num_requests"], a["table_width"]), (table_stride, 1))
        starts = torch.tensor(list(_integers(plan, "starts").values()), dtype=torch.int64)
        seq_starts = torch.zeros(a["num_requests"], dtype=torch.int64)
        if not is_absent(plan.buffers["seq_starts"]):
            seq_starts = torch.tensor(list(_integers(plan, "seq_starts").values()))
        bounds = starts.clamp(0, a["num_tokens"]).tolist()
        if not a["has_terminal"]:
            bounds.append(a["num_tokens"])
        exact_rows = a["num_tokens"]
        for k in range(a["num_requests"]):
            if bounds[k + 1] < bounds[k]:
                exact_rows = min(bounds[k + 1 :])
                break
        strides = {name: stride for name, (stride, _) in self.rows_of(a).items()}
        for r in range(a["num_requests"]):
            if seq_starts[r] < 0:
                continue
            row = torch.arange(bounds[r], max(bounds[r], min(bounds[r + 1], exact_rows)))
            token = seq_starts[r] + row - starts[r]
            row, token = (x[token < a["table_width"] * size] for x in (row, token))
            ids = table[r][token // size]
            valid = (ids >= 0) & (ids < pages)
            at = ids[valid], token[valid] % size
            for name, source in (("dst_k", keys[at]), ("dst_scale", scales[at])):
                offsets = (row[valid] * strides[name]).tolist()
                out[name].update(
                    (offset, value.numpy().tobytes())
                    for offset, value in zip(offsets, source, strict=True)
                )
        return out

    # ---- texts -----------------------------------------------------------------------------------

    def slot_of(self, plan: Plan, offset_bytes: int) -> tuple[int, int]:
        pages = _pages(plan.arguments)
        page, slot, _ = pages.place(offset_bytes, plan.arguments["num_pages"])
        return page, -1 if slot is None else slot

    def slot_place(self, plan: Plan, offset_bytes: int) -> str:
        pages = _pages(plan.arguments)
        page, slot, what = pages.place(offset_bytes, plan.arguments["num_pages"])
        return f"page {page}, {what}" if slot is None else f"page {page} slot {slot}, {what}"

    def source_of(
        self, plan: Plan, buffer: str, page_id: Int64s, slot: Int64s, byte: int
    ) -> Int64s:
        pages = _pages(plan.arguments)
        if buffer == "dst_scale":
            return pages.scale_words(page_id, slot) + byte
        pieces, piece_bytes = pages.key_pieces(page_id, slot)
        found: Int64s = pieces[:, byte // piece_bytes] + byte % piece_bytes
        return found

    def entry_pieces(
        self, plan: Plan, page_id: Int64s, slot: Int64s
    ) -> tuple[tuple[Int64s, int], ...]:
        pages = _pages(plan.arguments)
        words = pages.scale_words(page_id, slot)[:, None]
        return pages.key_pieces(page_id, slot), (words, pages.scales)

    def origin(self, plan: Plan, buffer: str, offset_bytes: int, found: Bytes) -> Origin | None:
        if buffer == "dst_k" and plan.arguments["page_layout"] == TILED16:
            # Of the bytes of a row only those of one tile lie side by side in a page.
            _, byte = self._row_at(plan, buffer, offset_bytes)
            found = found[: TILE - byte % TILE]
        return super().origin(plan, buffer, offset_bytes, found)

    def describe(self, plan: Plan) -> str:
        a, shape = plan.arguments, _pages(plan.arguments)
        dense = {
            "page_stride_bytes": ("cb", shape.page_bytes),
            "dst_k_row_stride_bytes": ("d0(k)", shape.keys),
            "dst_scale_row_stride_bytes": ("d0(scale)", shape.scales),
        }
        padded = [
            f"{dense[name][0]}={stride}"
            for name, stride in self.strides(a).items()
            if stride != dense[name][1]
        ]
        layout = "tiled16" if shape.is_tiled else "flat"
        payload = (
            f"D={a['head_dim']} Q={a['quant_block']} {layout}, {' '.join(padded) or 'dense'}, "
            f"seed {plan.case.seed}"
        )
        return "  ".join([*gather_text.index_parts(plan), payload, *gather_text.oddities(plan)])


def _integers(plan: Plan, buffer: str) -> dict[int, int]:
    """Element index -> int32, of an index buffer's image."""
    image = plan.buffers[buffer].image
    return {
        at // 4: int.from_bytes(raw.tobytes(), "little", signed=True)
        for at, raw in zip(image.offsets.tolist(), image.values, strict=True)
    }


def _set_of(offsets: Iterable[int]) -> IntervalSet:
    each = np.fromiter(offsets, dtype=np.int64)
    return IntervalSet.of_runs(each, 1)


def _stacked(runs: list[tuple[int, bytes]], size_bytes: int) -> tuple[Int64s, Bytes]:
    """Offsets and values of runs of one size."""
    values = np.frombuffer(b"".join(data for _, data in runs), dtype=np.uint8)
    return np.array([at for at, _ in runs], dtype=np.int64), values.reshape(-1, size_bytes)


def _closeness(*offsets: Int64s) -> int:
    """64 less the bits of the smallest distance between an offset and 2^31 or 2^32, bytes or words
    of 4; 0 if there is no offset."""
    distances = [
        int(np.abs(each - limit * unit).min()) // unit
        for each in offsets
        if each.size
        for limit in (2**31, 2**32)
        for unit in (1, WORD_BYTES)
    ]
    return 64 - min(distances).bit_length() if distances else 0
