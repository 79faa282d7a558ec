"""Runs of bytes that writers store, in order of their offsets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.layout import Bytes
from pagefuzz.oracles.rows import Int64s


def sorted_runs(
    offsets: Int64s, values: Bytes
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Runs by offset; of one offset in the order of tokens."""
    flat = offsets.ravel()
    order = np.argsort(flat, kind="stable")
    return flat[order], values.reshape(flat.size, values.shape[-1])[order]


def listed_runs(runs: list[tuple[int, bytes]], size_bytes: int) -> tuple[Int64s, Bytes]:
    """Runs of `size_bytes`, given as (offset, bytes), by offset."""
    runs = sorted(runs, key=lambda run: run[0])
    raw = np.frombuffer(b"".join(data for _, data in runs), dtype=np.uint8)
    return np.array([at for at, _ in runs], dtype=np.int64), raw.reshape(len(runs), size_bytes)
