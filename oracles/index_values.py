"""Recipes of index buffers, expanded to integers.

Vectors are materialised; tables are evaluated only at the entries asked for, so that a table of
2^31 columns costs what its mapped columns cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd

import numpy as np

from pagefuzz.oracles.case import CaseError, Values
from pagefuzz.oracles.layout import Image
from pagefuzz.oracles.rows import Int64s

#: Above this, a vector or a literal table is not materialised.
MAX_ELEMENTS = 2**22

INT32 = range(-(2**31), 2**31)
INT64 = range(-(2**63), 2**63)

_VECTOR_RECIPES = ("literal", "constant", "ramp", "cumulative")
_TABLE_RECIPES = ("literal", "identity", "reversed", "permuted", "shared")


def vector(values: Values, count: int, legal: range, name: str) -> Int64s:
    """int64 [count]: the elements of a vector.

    `legal` is the range of the element type. Raises `CaseError`, naming the buffer, if the recipe
    does not make vectors, makes another number of elements, or leaves `legal`.
    """
    if count > MAX_ELEMENTS:
        raise CaseError(f"{name} has {count} elements; at most {MAX_ELEMENTS} can be expanded")
    recipe = values.recipe
    if recipe == "constant":
        elements = [_number(values, "value", name)] * count
    elif recipe == "ramp":
        first, step = _number(values, "first", name), _number(values, "step", name)
        elements = [first + step * i for i in range(count)]
    elif recipe == "cumulative":
        steps = _numbers(values, "steps", name)
        elements = list(accumulate(steps, initial=_number(values, "first", name)))
    elif recipe == "literal":
        elements = list(_numbers(values, "values", name))
    else:
        raise CaseError(
            f"{name} cannot have recipe {recipe!r}; a vector's is one of "
            f"{', '.join(_VECTOR_RECIPES)}"
        )
    if len(elements) != count:
        raise CaseError(f"{name} needs {count} values, the recipe {recipe!r} has {len(elements)}")
    for index, value in values.edits.items():
        if not 0 <= index < count:
            raise CaseError(f"{name} has an edit at element {index}, it has {count} elements")
        elements[index] = value
    _check_range(elements, legal, name)
    return np.array(elements, dtype=np.int64)


def table_entries(
    values: Values, row: Int64s, column: Int64s, *, rows: int, width: int, num_pages: int, name: str
) -> Int64s:
    """int64 [n]: the page ids at (row[i], column[i]) of the int32 table [rows, width].

    Entry i = row * width + column of `identity` is i mod num_pages; `reversed` counts down from the
    last page; `permuted` is an affine permutation of the pages, (a * i + b) mod num_pages with a
    prime to num_pages; `shared` gives every row the pages 0, 1, 2, ... A pool of no pages gives 0.
    Raises `CaseError`, naming the buffer.
    """
    index = row * width + column
    recipe = values.recipe
    entries: Int64s
    if recipe == "literal":
        literal = _numbers(values, "values", name)
        if len(literal) != rows * width:
            raise CaseError(
                f"{name} needs {rows} x {width} = {rows * width} values, the recipe 'literal' has "
                f"{len(literal)}"
            )
        _check_range(literal, INT32, name)
        entries = np.array(literal, dtype=np.int64)[index]
    elif recipe not in _TABLE_RECIPES:
        raise CaseError(
            f"{name} cannot have recipe {recipe!r}; a table's is one of {', '.join(_TABLE_RECIPES)}"
        )
    elif num_pages == 0:
        entries = np.zeros(index.shape, dtype=np.int64)
    elif recipe == "shared":
        entries = column % num_pages
    elif recipe == "permuted":
        factor, shift = _affine(_number(values, "seed", name), num_pages)
        entries = (index % num_pages * factor + shift) % num_pages
    else:
        entries = index % num_pages
        if recipe == "reversed":
            entries = num_pages - 1 - entries
    if values.edits:
        edited = sorted(values.edits)
        if edited[0] < 0 or edited[-1] >= rows * width:
            wrong = edited[0] if edited[0] < 0 else edited[-1]
            raise CaseError(
                f"{name} has an edit at element {wrong}; it has {rows} x {width} elements"
            )
        elements = [values.edits[i] for i in edited]
        _check_range(elements, INT32, name, edited)
        at, written = np.array(edited, dtype=np.int64), np.array(elements, dtype=np.int64)
        found = np.minimum(np.searchsorted(at, index), at.size - 1)
        entries = np.where(at[found] == index, written[found], entries)
    return entries


def int32s(image: Image) -> Int64s:
    """The elements of an int32 buffer's image, in its order."""
    if not image.offsets.size:
        return np.empty(0, dtype=np.int64)
    return image.values.view(np.int32).ravel().astype(np.int64)


def _affine(seed: int, num_pages: int) -> tuple[int, int]:
    """A factor prime to `num_pages`, and a shift."""
    mixed = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 % 2**64
    factor = 1 + (mixed >> 32) % num_pages
    while gcd(factor, num_pages) != 1:
        factor += 1
    return factor % num_pages, (mixed & 0xFFFFFFFF) % num_pages


def _check_range(
    elements: Sequence[int], legal: range, name: str, indices: Sequence[int] | None = None
) -> None:
    if elements and not (min(elements) in legal and max(elements) in legal):
        at, value = next((i, v) for i, v in enumerate(elements) if v not in legal)
        index = at if indices is None else indices[at]
        raise CaseError(f"{name}[{index}]={value} must lie in {legal.start}..{legal.stop - 1}")


def _number(values: Values, key: str, name: str) -> int:
    value = values.parameters.get(key)
    if not isinstance(value, int):
        raise CaseError(f"{name} with recipe {values.recipe!r} needs the integer {key!r}")
    return value


def _numbers(values: Values, key: str, name: str) -> tuple[int, ...]:
    value = values.parameters.get(key)
    if not isinstance(value, tuple):
        raise CaseError(f"{name} with recipe {values.recipe!r} needs the list {key!r}")
    if len(value) > MAX_ELEMENTS:
        raise CaseError(f"{name} has {len(value)} elements; at most {MAX_ELEMENTS} can be expanded")
    return value
