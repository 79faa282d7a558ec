"""Pages of the indexer's cache, as its gather and its writer draw them and lie about them."""

from __future__ import annotations

from pagefuzz.strategies.choices import weighted

#: page_layout: flat, tiled16.
LAYOUTS = weighted({0: 50, 1: 51})


def quant_block(head: int, nth: int) -> int:
    """The nth divisor of a head from the largest on, and again from there after the last."""
    blocks = [size for size in range(head, 0, -1) if head % size == 0]
    return blocks[nth % len(blocks)]


def wrong_pages(head: int) -> dict[str, list[dict[str, int]]]:
    """Reason -> sizes of heads and pages that no launcher may take. head: of a sound case."""
    return {
        "head_dim": [{"head_dim": v} for v in (head + 8, 0, -16, 1040, 2**32 + 16)],
        "quant_block": [{"quant_block": v} for v in (2 * head, 0, -1, 2**32 + 1)],
        "page_layout": [{"page_layout": v} for v in (2, -1, 2**32)],
        "page_size_tokens": [
            *({"page_size_tokens": v} for v in (0, 4097, -1, 2**31, 2**32 + 1)),
            *({"page_layout": 1, "page_size_tokens": v} for v in (1, 24, 4095)),
        ],
    }
