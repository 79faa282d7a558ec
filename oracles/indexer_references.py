"""The references of operation (d): the contract vectorised, as a loop, and in torch.

Rows find their request through starts; where a launch takes hints, only through the row's hint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from pagefuzz.oracles import contents
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.expectation import (
    Contested,
    Counts,
    Expectation,
    Expected,
    Footprint,
)
from pagefuzz.oracles.indexer_gather import FLAT, TILED16, IndexerGather, pages_of
from pagefuzz.oracles.indexer_pages import WORD_BYTES
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, Plan
from pagefuzz.oracles.pages import Pages, counts
from pagefuzz.oracles.refusals import is_absent
from pagefuzz.oracles.rows import PADDING_PAGE, Int64s, RowMap
from pagefuzz.oracles.verdict import CaseClass

#: Source and tables above this are not made into tensors.
_MOST_TENSOR_BYTES = 2**28


class IndexerReferences(IndexerGather):
    """Expectation of a gather from the indexer's cache."""

    # ---- what an operation adds ------------------------------------------------------------------

    def hints(self, plan: Plan) -> Mapping[int, int] | None:
        """Row -> its hint, of every row that a request covers; None where a launch takes none."""
        return None

    def counts_of(self, plan: Plan, rows: RowMap, pages: Pages) -> Counts | None:
        return counts(rows, pages)

    # ---- the contract, vectorised ----------------------------------------------------------------

    def expect(self, plan: Plan) -> Expectation:
        if refusals := self.refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        arguments, seed = plan.arguments, plan.case.seed
        shape = pages_of(arguments)
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
            counts=self.counts_of(plan, rows, pages),
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
        table, starts = integers(plan, "block_table"), integers(plan, "starts")
        seq_starts = None
        if not is_absent(plan.buffers["seq_starts"]):
            seq_starts = integers(plan, "seq_starts")
        hints = self.hints(plan)

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
                if hints is not None and hints[row] != r:
                    sound = False
                    continue
                # With hints, only the first row of a page or request counts for it.
                counts_it = hints is None or row == clamp(start(r))
                if seq_start < 0:
                    sound = False
                    if counts_it:
                        skipped.add((r, None))
                    continue
                q, o = divmod(seq_start + row - start(r), size)
                counts_it |= o == 0
                if q >= a["table_width"]:
                    sound = False
                    if counts_it:
                        skipped.add((r, q))
                    continue
                read_table.add(r * table_stride + q)
                page = table[r * table_stride + q]
                if not 0 <= page < a["num_pages"]:
                    sound = False
                    if counts_it:
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
            if hints is not None:
                footprints["token_to_seq"] = Footprint(_set_of(range(4 * tokens)))
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
            case_class=CaseClass.IN_CONTRACT if sound else CaseClass.HOSTILE,
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
        required = self.required(a)
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
        for element, page in integers(plan, "block_table").items():
            table[element] = page
        table_stride = a["table_row_stride"] if a["num_requests"] > 1 else 0
        table = table.as_strided((a["num_requests"], a["table_width"]), (table_stride, 1))
        starts = torch.tensor(list(integers(plan, "starts").values()), dtype=torch.int64)
        seq_starts = torch.zeros(a["num_requests"], dtype=torch.int64)
        if not is_absent(plan.buffers["seq_starts"]):
            seq_starts = torch.tensor(list(integers(plan, "seq_starts").values()))
        bounds = starts.clamp(0, a["num_tokens"]).tolist()
        if not a["has_terminal"]:
            bounds.append(a["num_tokens"])
        exact_rows = a["num_tokens"]
        for k in range(a["num_requests"]):
            if bounds[k + 1] < bounds[k]:
                exact_rows = min(bounds[k + 1 :])
                break
        strides = {name: stride for name, (stride, _) in self.rows_of(a).items()}
        hints = self.hints(plan)
        for r in range(a["num_requests"]):
            if seq_starts[r] < 0:
                continue
            row = torch.arange(bounds[r], max(bounds[r], min(bounds[r + 1], exact_rows)))
            if hints is not None:
                row = row[torch.tensor([hints[i] for i in row.tolist()], dtype=torch.int64) == r]
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


def integers(plan: Plan, buffer: str) -> dict[int, int]:
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
