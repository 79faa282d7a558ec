"""Gathers of entries to rows: what a launch must do, three times over.

Vectorised, as a loop over requests and rows, and in torch. An operation says how an entry becomes a
row, once for each of them; without more it is copied. Of the row mapping nothing is shared between
the three.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pagefuzz.oracles import contents
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.entry_gather import EntryGather
from pagefuzz.oracles.expectation import Contested, Counts, Expectation, Expected, Footprint
from pagefuzz.oracles.free_nans import FreeNans
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Bytes, Plan
from pagefuzz.oracles.origin import Origin, OriginKind
from pagefuzz.oracles.pages import counts
from pagefuzz.oracles.refusals import is_absent
from pagefuzz.oracles.rows import PADDING_PAGE, Int64s
from pagefuzz.oracles.verdict import CaseClass

if TYPE_CHECKING:
    import torch


class EntryReferences(EntryGather):
    """A gather whose rows are functions of one entry each."""

    @abstractmethod
    def element_sizes(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Bytes of an element of the source, and of the destination."""

    def converted(self, plan: Plan, entries: Bytes) -> Bytes:
        """uint8 [n, row bytes] of uint8 [n, entry bytes]."""
        return entries

    def converted_alone(self, plan: Plan, entry: bytes) -> bytes:
        """The same for one entry, written on its own."""
        return entry

    def converted_by_torch(self, plan: Plan, entries: torch.Tensor) -> torch.Tensor:
        """The same by torch, for the loop over requests there."""
        return entries

    def free_nans(self, plan: Plan, rows: Bytes) -> FreeNans | None:
        """Which elements of rows may be any NaN."""
        return None

    def entries_at(self, plan: Plan, offsets: Int64s) -> Bytes:
        """uint8 [n, entry bytes]: what src holds at each of `offsets`.

        That is payload, and over it the words of 4 bytes that the case gives (`payload_values`).
        """
        entry, _ = self.entry_bytes(plan.arguments)
        entries = contents.payload_at(plan.case.seed, offsets, entry)
        at, words = self._given(plan)
        if not at.size or not offsets.size:
            return entries
        # Entries may overlap, so that a word lies anywhere in one of them.
        order = np.argsort(offsets, kind="stable")
        low = np.searchsorted(at, offsets[order])
        count = np.searchsorted(at, offsets[order] + entry - 3) - low
        row = np.repeat(order, count)
        word = np.repeat(low - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
        entries = entries.copy()
        byte = (at[word] - offsets[row])[:, None] + np.arange(4)
        entries[row[:, None], byte] = words[word]
        return entries

    def _given(self, plan: Plan) -> tuple[Int64s, Bytes]:
        """Byte offsets, ascending, and bytes of the words of src that the case gives."""
        image = plan.buffers["src"].image
        return image.offsets, image.values

    def word_footprints(self, plan: Plan) -> dict[str, Footprint]:
        """What a launch that runs may read of `words`."""
        return {}

    def _searched_origin(
        self, plan: Plan, buffer: str, offset_bytes: int, found: Bytes
    ) -> Origin | None:
        """Compares with the same bytes of every row that a mapped entry becomes; for runs that are
        too short to be traced, or computed. None if a match could be chance."""
        mapped = self._mapped(plan)
        if mapped is None:
            return None
        rows, pages = mapped
        page_stride, slot_stride, _ = self.effective_strides(plan.arguments)
        entries = pages.page_id[rows.page] * page_stride + rows.slot * slot_stride
        entries = np.unique(entries[pages.valid[rows.page]])
        entry_bytes, row_bytes = self.entry_bytes(plan.arguments)
        _, byte = self._row_at(plan, buffer, offset_bytes)
        if not 0 <= byte < row_bytes:
            return None
        found = found[: row_bytes - byte]  # a long run goes on in other rows
        values = self.converted(plan, self.entries_at(plan, entries))
        same = np.flatnonzero((values[:, byte : byte + found.size] == found).all(axis=1))
        if not same.size or entries.size > 256**found.size // 20:
            return None
        copied = entry_bytes == row_bytes
        place = self.locate(plan, "src", int(entries[same[0]]) + (byte if copied else 0))
        if not copied:
            place = f"what {place.rpartition(', byte')[0]} becomes, byte {byte}"
        return Origin(OriginKind.ENTRY, place)

    # ---- the contract, vectorised ----------------------------------------------------------------

    def expect(self, plan: Plan) -> Expectation:
        if refusals := self.refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        arguments = plan.arguments
        entry, row_bytes = self.entry_bytes(arguments)
        page_stride, slot_stride, row_stride = self.effective_strides(arguments)
        rows = self.row_map(plan)
        pages = self.pages(plan, rows)
        hostile = self.hostile_index_values(plan, rows, pages)
        runs = bool(arguments["num_requests"] and arguments["num_tokens"])

        row, page, slot = rows.row, rows.page, rows.slot
        if not pages.valid.all():
            claims = np.flatnonzero(pages.valid[page])
            row, page, slot = row[claims], page[claims], slot[claims]
        src_offsets = pages.page_id[page] * page_stride + slot * slot_stride
        dst_offsets = row * row_stride
        values = self.converted(plan, self.entries_at(plan, src_offsets))
        src_element_bytes, dst_element_bytes = self.element_sizes(arguments)

        contested = None
        may_write = IntervalSet()
        exact: Int64s | slice = slice(None)
        if rows.first_contested_row is not None:
            is_exact = row < rows.first_contested_row
            exact = np.flatnonzero(is_exact)
            claimed = np.flatnonzero(~is_exact)
            contested = Contested(
                dst_offsets[claimed],
                values[claimed],
                dst_element_bytes,
                free_nans=self.free_nans(plan, values[claimed]),
            )
            may_write = IntervalSet.of_runs(dst_offsets[claimed], row_bytes)
        footprints = self.index_footprints(plan, pages) if runs else {}
        if runs:
            footprints["src"] = Footprint(IntervalSet.of_runs(src_offsets, entry))
            footprints["dst"] = Footprint(
                must_write=IntervalSet.of_runs(dst_offsets[exact], row_bytes), may_write=may_write
            )
            footprints |= self.word_footprints(plan)
        return Expectation(
            case_class=CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT,
            hostile=hostile,
            footprints=footprints,
            expected={
                "dst": Expected(
                    dst_offsets[exact],
                    values[exact],
                    contested,
                    self.free_nans(plan, values[exact]),
                )
            },
            counts=counts(rows, pages),
            counters={
                "mapped_rows": rows.row.size,
                "pages_touched": rows.page_request.size,
                "source_closeness": _closeness(src_offsets, src_element_bytes),
                "destination_closeness": _closeness(dst_offsets, dst_element_bytes),
            },
        )

    # ---- the contract as a loop ------------------------------------------------------------------

    def expect_by_loop(self, plan: Plan) -> Expectation:
        """Plain integers, one row at a time; shares nothing with `expect` but the payload."""
        if refusals := self.refusals(plan):
            return Expectation(CaseClass.REFUSED, refusals)
        a = plan.arguments
        requests, tokens = a["num_requests"], a["num_tokens"]
        page_size, (entry, row_bytes) = a["page_size_tokens"], self.entry_bytes(a)
        page_stride = a["page_stride_bytes"] if a["num_pages"] > 1 else 0
        slot_stride = a["slot_stride_bytes"] if page_size > 1 else 0
        row_stride = a["dst_row_stride_bytes"] if a["dst_rows"] > 1 else 0
        table_stride = a["table_row_stride"] if requests > 1 else 0
        table = integers(plan, "block_table", 4)
        starts = integers(plan, "starts", 4)
        given = integers(plan, "src", 4)
        seq_starts = (
            None if is_absent(plan.buffers["seq_starts"]) else integers(plan, "seq_starts", 4)
        )

        def start(r: int) -> int:
            return starts[r] if r < requests or a["has_terminal"] else tokens

        def clamp(value: int) -> int:
            return min(max(value, 0), tokens)

        contested_from = tokens
        decreasing = False
        for k in range(requests):
            if clamp(start(k + 1)) < clamp(start(k)):
                contested_from = min(clamp(start(i)) for i in range(k + 1, requests + 1))
                decreasing = True
                break

        readable_src: list[tuple[int, int]] = []
        readable_table: list[tuple[int, int]] = []
        must: dict[int, bytes] = {}
        claims: list[tuple[int, bytes]] = []
        padding = skipped = 0
        in_contract = all(
            start(r) >= 0 for r in range(requests + a["has_terminal"] if requests else 0)
        )
        in_contract &= all(
            start(r) <= start(r + 1) for r in range(requests if a["has_terminal"] else requests - 1)
        )
        for r in range(requests):
            first, last = clamp(start(r)), clamp(start(r + 1))
            seq_start = seq_starts[r] if seq_starts is not None else 0
            counted: set[int] = set()
            for row in range(first, last):
                if seq_start < 0:
                    in_contract = False
                    if -1 not in counted:
                        counted.add(-1)
                        skipped += 1
                    continue
                token = seq_start + (row - start(r))
                column, slot = token // page_size, token % page_size
                page_id = None
                if column < a["table_width"]:
                    element = r * table_stride + column
                    readable_table.append((4 * element, 4 * element + 4))
                    page_id = table[element]
                if page_id is None or not 0 <= page_id < a["num_pages"]:
                    in_contract = False
                    if column not in counted:
                        counted.add(column)
                        padding += page_id == PADDING_PAGE
                        skipped += page_id != PADDING_PAGE
                    continue
                at = page_id * page_stride + slot * slot_stride
                readable_src.append((at, at + entry))
                data = contents.payload(plan.case.seed, at, at + entry).copy()
                for byte in range(-at % 4, entry, 4) if given else ():
                    if (word := given.get((at + byte) // 4)) is not None:
                        data[byte : byte + 4] = list(word.to_bytes(4, "little", signed=True))
                row_data = self.converted_alone(plan, data.tobytes())
                if row < contested_from:
                    must[row * row_stride] = row_data
                else:
                    claims.append((row * row_stride, row_data))

        footprints = {}
        if requests and tokens:
            footprints = {
                "src": Footprint(_intervals(readable_src)),
                "dst": Footprint(
                    must_write=_intervals([(at, at + row_bytes) for at in must]),
                    may_write=_intervals([(at, at + row_bytes) for at, _ in claims]),
                ),
                "block_table": Footprint(_intervals(readable_table)),
                "starts": Footprint(_intervals([(0, 4 * (requests + a["has_terminal"]))])),
            }
            if seq_starts is not None:
                footprints["seq_starts"] = Footprint(_intervals([(0, 4 * requests)]))
            if not is_absent(plan.buffers["counts"]):
                pair = _intervals([(0, 16)])
                footprints["counts"] = Footprint(pair, may_write=pair)
            footprints |= self.word_footprints(plan)
        contested = None
        if decreasing:
            offsets, values = _runs(claims, row_bytes)
            contested = Contested(
                offsets,
                values,
                self.element_sizes(a)[1],
                free_nans=self.free_nans(plan, values),
            )
        offsets, values = _runs(sorted(must.items()), row_bytes)
        return Expectation(
            case_class=CaseClass.IN_CONTRACT if in_contract else CaseClass.HOSTILE,
            footprints=footprints,
            expected={
                "dst": Expected(offsets, values, contested, self.free_nans(plan, values)),
            },
            counts=None if decreasing else Counts(padding, skipped),
        )

    # ---- the contract in torch -------------------------------------------------------------------

    def expected_by_torch(self, plan: Plan) -> Mapping[str, Mapping[int, bytes]]:
        """Gathers with strided tensors that really exist.

        Raises `CaseError` if source and table are above 256 MiB.
        """
        import torch  # seconds, that a campaign need not wait for

        a = plan.arguments
        if self.refusals(plan) or not (a["num_requests"] and a["num_tokens"]):
            return {"dst": {}}
        page_stride, slot_stride, row_stride = self.effective_strides(a)
        src_bytes, table_bytes = self.payload_bytes(a)["src"], self.required(a)["block_table"]
        if (needed := src_bytes + table_bytes) > 2**28:
            raise CaseError(f"the torch reference needs {needed} bytes; it makes at most 2^28")
        payload = torch.from_numpy(contents.payload(plan.case.seed, 0, src_bytes).copy())
        for at, raw in zip(*self._given(plan), strict=True):
            payload[at : at + 4] = torch.from_numpy(raw.copy())
        cache = payload.as_strided(
            (a["num_pages"], a["page_size_tokens"], self.entry_bytes(a)[0]),
            (page_stride, slot_stride, 1),
        )
        table_stride = a["table_row_stride"] if a["num_requests"] > 1 else 0
        table = torch.full((table_bytes // 4,), -2, dtype=torch.int64)
        for element, page in integers(plan, "block_table", 4).items():
            table[element] = page
        table = table.as_strided((a["num_requests"], a["table_width"]), (table_stride, 1))

        starts = _tensor(integers(plan, "starts", 4))
        seq_starts = torch.zeros(a["num_requests"], dtype=torch.int64)
        if not is_absent(plan.buffers["seq_starts"]):
            seq_starts = _tensor(integers(plan, "seq_starts", 4))
        clamped = starts.clamp(0, a["num_tokens"])
        if not a["has_terminal"]:
            clamped = torch.cat((clamped, _tensor([a["num_tokens"]])))
        exact_rows = a["num_tokens"]
        falls = (clamped.diff() < 0).nonzero().view(-1)
        if len(falls):
            exact_rows = int(clamped[falls[0] + 1 :].min())

        out: dict[int, bytes] = {}
        for r in range(a["num_requests"]):
            if seq_starts[r] < 0:
                continue
            row = torch.arange(int(clamped[r]), max(int(clamped[r + 1]), int(clamped[r])))
            row = row[row < exact_rows]
            token = seq_starts[r] + row - starts[r]
            column = token.div(a["page_size_tokens"], rounding_mode="floor")
            row, token, column = (x[column < a["table_width"]] for x in (row, token, column))
            page_id = table[r][column]
            valid = (page_id >= 0) & (page_id < a["num_pages"])
            slot = token.remainder(a["page_size_tokens"])
            entries = self.converted_by_torch(plan, cache[page_id[valid], slot[valid]])
            for at, entry in zip((row[valid] * row_stride).tolist(), entries, strict=True):
                out[at] = entry.numpy().tobytes()
        return {"dst": out}


def integers(plan: Plan, buffer: str, width: int) -> dict[int, int]:
    """Element index -> value, of an index buffer's image."""
    image = plan.buffers[buffer].image
    return {
        at // width: int.from_bytes(raw.tobytes(), "little", signed=True)
        for at, raw in zip(image.offsets.tolist(), image.values, strict=True)
    }


def _tensor(values: Mapping[int, int] | list[int]) -> torch.Tensor:
    import torch

    items = [values[i] for i in range(len(values))]
    return torch.tensor(items, dtype=torch.int64)


def _intervals(pairs: list[tuple[int, int]]) -> IntervalSet:
    return IntervalSet([begin for begin, _ in pairs], [end for _, end in pairs])


def _runs(runs: list[tuple[int, bytes]], size_bytes: int) -> tuple[Int64s, Bytes]:
    """Offsets and values of runs of one size."""
    offsets = np.array([at for at, _ in runs], dtype=np.int64)
    raw = np.frombuffer(b"".join(data for _, data in runs), dtype=np.uint8)
    return offsets, raw.reshape(len(runs), size_bytes)


def _closeness(offsets: Int64s, element_bytes: int) -> int:
    """64 less the bits of the smallest distance between an offset and 2^31 or 2^32, bytes or
    elements; 0 if there is no offset."""
    if not offsets.size:
        return 0
    distance = min(
        int(np.abs(offsets - boundary * unit).min()) // unit
        for boundary in (2**31, 2**32)
        for unit in {1, element_bytes}
    )
    return 64 - distance.bit_length()
