"""Results that must be a NaN and may be any: contracts fix neither its payload nor its sign."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.layout import Bytes, Dtype

Mask = npt.NDArray[np.bool_]

#: Unsigned type of the element, and the magnitude above which it is a NaN.
_NANS_ABOVE: dict[Dtype, tuple[npt.DTypeLike, int]] = {
    Dtype.E4M3: (np.uint8, 0x7E),
    Dtype.E5M2: (np.uint8, 0x7C),
    Dtype.F16: (np.uint16, 0x7C00),
    Dtype.BF16: (np.uint16, 0x7F80),
    Dtype.F32: (np.uint32, 0x7F800000),
}


def nans(runs: Bytes, dtype: Dtype) -> Mask:
    """bool [n, elements]: which elements of uint8 [n, run_bytes] are NaNs of that type."""
    unsigned, above = _NANS_ABOVE[dtype]
    words = np.ascontiguousarray(runs).view(unsigned)
    sign = 1 << (8 * dtype.size_bytes - 1)
    mask: Mask = (words & words.dtype.type(sign - 1)) > above
    return mask


@dataclass(frozen=True)
class FreeNans:
    """Of the values of some runs.

    dtype  of the elements a run is made of, from its first byte on
    mask   bool [n, run_bytes / element bytes]: the elements that must be a NaN of `dtype`
    """

    dtype: Dtype
    mask: Mask

    @classmethod
    def of(cls, values: Bytes, dtype: Dtype, computed: Mask | None = None) -> FreeNans | None:
        """The NaNs among `values`, uint8 [n, run_bytes]; None if there are none.

        `computed`, broadcast to the elements: which of them are computed; a copy keeps its NaN.
        """
        mask = nans(values, dtype)
        if computed is not None:
            mask &= computed
        return cls(dtype, mask) if mask.any() else None

    def passes(self, found: Bytes) -> Mask:
        """bool [n, elements]: which of them may be any NaN, and are one."""
        return self.mask & nans(found, self.dtype)

    def pass_bytes(self, found: Bytes) -> Mask:
        """The same, bool [n, run_bytes]."""
        return np.repeat(self.passes(found), self.dtype.size_bytes, axis=1)

    def covers(self, row: int, byte: int) -> bool:
        """Whether a byte belongs to an element that may be any NaN."""
        return bool(self.mask[row, byte // self.dtype.size_bytes])

    def canonical(self, found: Bytes) -> Bytes:
        """`found` with one and the same NaN wherever one is wanted and found."""
        out = found.copy()
        out[self.pass_bytes(found)] = 0xFF
        return out
