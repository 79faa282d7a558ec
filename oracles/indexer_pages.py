"""Pages of the indexer's cache: the key bytes of all tokens, then their scales.

key byte d of slot o     flat: o * D + d
                         tiled: (o div 16) * 16 * D + (d div 16) * 256 + (o mod 16) * 16 + d mod 16
scale word g of slot o   slots * D + 4 * (o * G + g)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagefuzz.oracles.rows import Int64s

TILE = 16
WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class IndexerPages:
    """Sizes in bytes: `keys` and `scales` of one token; `stride` of pages, 0 if it is ignored."""

    stride: int
    slots: int
    keys: int
    scales: int
    is_tiled: bool

    @property
    def page_bytes(self) -> int:
        return self.slots * (self.keys + self.scales)

    def key_pieces(self, page: Int64s, slot: Int64s) -> tuple[Int64s, int]:
        """int64 [n, pieces]: where the runs begin of which a token's keys are made, in the order of
        a row; and how long each is."""
        base = page * self.stride
        if not self.is_tiled:
            return (base + slot * self.keys)[:, None], self.keys
        tile, inside = np.divmod(slot, TILE)
        first = base + tile * (TILE * self.keys) + inside * TILE
        column = np.arange(self.keys // TILE, dtype=np.int64)
        return first[:, None] + (column * (TILE * TILE))[None, :], TILE

    def scale_words(self, page: Int64s, slot: Int64s) -> Int64s:
        """int64 [n]: where a token's scales begin; they are one run."""
        return page * self.stride + self.slots * self.keys + slot * self.scales

    def place(self, offset_bytes: int, page_count: int) -> tuple[int, int | None, str]:
        """Page, slot (None: it belongs to none) and what of it a byte is; offset_bytes >= 0."""
        page = min(offset_bytes // self.stride, page_count - 1) if self.stride else 0
        inside = offset_bytes - page * self.stride
        if inside >= self.page_bytes:
            return page, None, f"byte {inside - self.page_bytes} behind its {self.page_bytes}"
        if inside >= (keys := self.slots * self.keys):
            slot, byte = divmod(inside - keys, self.scales)
            return page, slot, f"scale {byte // WORD_BYTES}, byte {byte % WORD_BYTES}"
        if not self.is_tiled:
            slot, byte = divmod(inside, self.keys)
            return page, slot, f"key byte {byte}"
        tile, rest = divmod(inside, TILE * self.keys)
        column, rest = divmod(rest, TILE * TILE)
        slot, byte = divmod(rest, TILE)
        return page, tile * TILE + slot, f"key byte {column * TILE + byte}"
