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

from pagefuzz.oracles.indexer_references import IndexerReferences


class CpGatherIndexerKQuantCache(IndexerReferences):
    name = "cp_gather_indexer_k_quant_cache"
    summary = "copies quantised indexer keys and their scales through a block table"
