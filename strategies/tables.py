"""Block tables: width, row stride and which page ids they hold."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.oracles.case import Values
from pagefuzz.strategies.choices import skewed, weighted

#: Order of page ids -> weight; recipes of `Values`.
CONTENTS = {"identity": 40, "reversed": 15, "permuted": 30, "shared": 15}
#: Row stride against the width -> weight.
ROW_STRIDES = {"exact": 60, "column slice": 22, "broadcast": 10, "overlapping": 8}

_CONTENTS = weighted(CONTENTS)
_ROW_STRIDES = weighted(ROW_STRIDES)
_SPARE_COLUMNS = skewed((60, (0,)), (25, range(1, 5)), (10, range(5, 65)))
_EXTRA = skewed((60, range(1, 9)), (30, range(9, 1025)))
_SEEDS = st.sampled_from(range(255))


@dataclass(frozen=True)
class BlockTable:
    """A table before the number of mapped columns is known.

    spare_columns   columns beyond those that are mapped
    contents        key of `CONTENTS`; seed is that of `permuted`
    row_stride      key of `ROW_STRIDES`; extra is the elements between rows of a column slice
    """

    spare_columns: int = 0
    contents: str = "identity"
    seed: int = 0
    row_stride: str = "exact"
    extra: int = 1

    def row_stride_elements(self, width: int) -> int:
        if self.row_stride == "column slice":
            return width + self.extra
        if self.row_stride == "broadcast":
            return 0
        if self.row_stride == "overlapping":
            return max(0, width - self.extra)
        return width

    def values(self) -> Values:
        return Values(self.contents, {"seed": self.seed} if self.contents == "permuted" else {})


@st.composite
def block_tables(draw: st.DrawFn) -> BlockTable:
    """Tables of exact or greater width, dense, sliced, overlapping or broadcast; 3 to 5 draws.

    Shrinks towards an identity table of exact width and dense rows.
    """
    spare_columns = draw(_SPARE_COLUMNS)
    contents = draw(_CONTENTS)
    seed = draw(_SEEDS) if contents == "permuted" else 0
    row_stride = draw(_ROW_STRIDES)
    extra = draw(_EXTRA) if row_stride in ("column slice", "overlapping") else 1
    event(f"table: {contents}")
    event(f"table rows: {row_stride}")
    return BlockTable(spare_columns, contents, seed, row_stride, extra)
