"""Minimises a failing case as data, without knowing its operation.

Hypothesis minimises the choices that a case was drawn with. This goes on from there on the case
itself, and is all there is for a case that was not drawn: a reported one, or one that was seen
while another finding was being minimised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from pagefuzz.oracles.case import Case, Placement, Values

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

Weight = tuple[int, int, int, str]


def weight(case: Case) -> Weight:
    """Orders cases by simplicity: how many numbers a reader meets, then how large they are.

    A size of 0 counts as more than 1: a table without columns, or rows that lie on one another,
    raise a question that has nothing to do with the fault.
    """
    numbers = [size or 2 for size in case.sizes.values()]
    numbers += case.overrides.values()
    for values in case.values.values():
        for parameter in values.parameters.values():
            numbers += parameter if isinstance(parameter, tuple) else (parameter,)
        # An edited element is a position as well as a value.
        numbers += [*values.edits.keys(), *values.edits.values()]
    for placement in case.placements.values():
        numbers += [value for value in placement.to_json().values() if isinstance(value, int)]
        if placement.over is not None:
            numbers += [placement.over[1]]
        if placement.guard != Placement().guard:
            numbers += [1]
    count = len(numbers) + len(case.relations)
    return count, sum(map(abs, numbers)), case.seed, case.dumps()


def simplify(case: Case, still_fails: Callable[[Case], bool]) -> Case:
    """The simplest case reached from `case` by steps after each of which `still_fails` holds.

    `still_fails` may raise to end the search; whoever asks then knows the best case from its own
    calls. Each step lowers `weight`, so that the search ends.
    """
    tried = {case.dumps()}
    progressing = True
    while progressing:
        progressing = False
        for step in (_fewer_parts, _fewer_elements, _smaller_numbers):
            candidates, taken = step(case), 0
            while (candidate := next(candidates, None)) is not None:
                taken += 1
                text = candidate.dumps()
                if text in tried or weight(candidate) >= weight(case):
                    continue
                tried.add(text)
                if still_fails(candidate):
                    case, progressing = candidate, True
                    # Goes on about where it was, since what was refused before mostly still is;
                    # the next pass comes back to it.
                    taken = max(0, taken - _STEP_BACK)
                    candidates = islice(step(case), taken, None)
    return case


#: Enough to come back to the first candidates of the number that was just made smaller.
_STEP_BACK = 4


def _fewer_parts(case: Case) -> Iterator[Case]:
    """Without a relation, a placement, an override, an edit or an optional buffer; with a plainer
    recipe."""
    for name in case.relations:
        yield replace(case, relations=tuple(n for n in case.relations if n != name))
    if case.placements:
        yield replace(case, placements={})
    for name in case.placements:
        yield replace(case, placements=_without(case.placements, name))
    for name in case.overrides:
        yield replace(case, overrides=_without(case.overrides, name))
    for name, values in case.values.items():
        yield replace(case, values=_without(case.values, name))
        if values.edits:
            yield _with_values(case, name, replace(values, edits={}))
        for index in values.edits:
            yield _with_values(case, name, replace(values, edits=_without(values.edits, index)))
        if values.recipe in ("permuted", "reversed", "shared"):
            yield _with_values(case, name, replace(values, recipe="identity", parameters={}))
        if values.recipe in ("literal", "cumulative", "ramp"):
            constant = Values("constant", {"value": 0}, values.edits)
            yield _with_values(case, name, constant)


def _fewer_elements(case: Case) -> Iterator[Case]:
    """Shorter vectors, alone or together with the size that counts their elements."""
    for size_name, size in case.sizes.items():
        each = {name: _counted_by(size, values) for name, values in case.values.items()}
        if not any(each.values()):
            continue
        # That a vector is twice as long may be a coincidence: then it is better left as it is.
        most_each = (2, 1) if 2 in each.values() else (1,)
        for begin, end in _spans(size):
            shorter = case.with_sizes(**{size_name: size - (end - begin)})
            for most in most_each:
                cut = shorter
                for name, n in each.items():
                    if 0 < n <= most:
                        fewer = _cut(case.values[name], n * begin, n * end)
                        cut = _with_values(cut, name, fewer)
                yield cut
    for name, values in case.values.items():
        for elements in values.parameters.values():
            if isinstance(elements, tuple):
                for begin, end in _spans(len(elements)):
                    yield _with_values(case, name, _cut(values, begin, end))


def _counted_by(size: int, values: Values) -> int:
    """How many elements of a vector belong to each of what a size may count: 1, with a terminal one
    or without; 2 of pairs; 0 if it does not count them."""
    lengths = [len(p) for p in values.parameters.values() if isinstance(p, tuple)]
    if values.recipe in ("constant", "ramp") and values.edits:
        lengths.append(max(values.edits) + 1)  # at least
    if any(size - 1 <= length <= size + 1 for length in lengths):
        return 1
    return 2 if size and 2 * size in lengths else 0


def _cut(values: Values, begin: int, end: int) -> Values:
    """Without the elements [begin, end); later edits move up."""
    parameters = {
        key: parameter[:begin] + parameter[end:] if isinstance(parameter, tuple) else parameter
        for key, parameter in values.parameters.items()
    }
    edits = {
        index if index < begin else index - (end - begin): value
        for index, value in values.edits.items()
        if not begin <= index < end
    }
    return Values(values.recipe, parameters, edits)


def _smaller_numbers(case: Case) -> Iterator[Case]:
    """Each number nearer to zero."""
    for name, size in case.sizes.items():
        for smaller in _towards_zero(size) if size else (1,):  # see `weight`
            yield case.with_sizes(**{name: smaller})
    for name, values in case.values.items():
        for key, parameter in values.parameters.items():
            if isinstance(parameter, int):
                for smaller in _towards_zero(parameter):
                    yield _with_parameter(case, name, key, smaller)
                continue
            for position, element in enumerate(parameter):
                for smaller in _towards_zero(element):
                    changed = (*parameter[:position], smaller, *parameter[position + 1 :])
                    yield _with_parameter(case, name, key, changed)
        for index, value in values.edits.items():
            for smaller in _towards_zero(value):
                edits = {**values.edits, index: smaller}
                yield _with_values(case, name, replace(values, edits=edits))
    for name, placement in case.placements.items():
        for key, value in placement.to_json().items():
            for smaller in _towards_zero(value) if isinstance(value, int) else ():
                data = {**placement.to_json(), key: smaller}
                changed_placement = Placement.from_json(data, name)
                yield replace(case, placements={**case.placements, name: changed_placement})
    for name, value in case.overrides.items():
        for smaller in _towards_zero(value):
            yield replace(case, overrides={**case.overrides, name: smaller})
    for smaller in (0, 1):
        yield replace(case, seed=smaller)


def _towards_zero(value: int) -> Iterator[int]:
    """Bold steps first: 0, 1, then ever nearer to `value` (a binary search, step by step)."""
    sign = -1 if value < 0 else 1
    magnitude = abs(value)
    for smaller in (0, 1):
        if smaller < magnitude:
            yield sign * smaller
    gap = magnitude // 2
    while gap > 0:
        if magnitude - gap > 1:
            yield sign * (magnitude - gap)
        gap //= 2


def _spans(length: int) -> Iterator[tuple[int, int]]:
    """Runs of positions to leave out: halves, quarters, ..., single ones; the last ones first."""
    span = (length + 1) // 2
    while span > 0:
        for begin in range(length - span, -1, -span):
            yield begin, begin + span
        span //= 2


def _without(mapping: Mapping[_Key, _Value], key: _Key) -> dict[_Key, _Value]:
    return {other: value for other, value in mapping.items() if other != key}


def _with_values(case: Case, name: str, values: Values) -> Case:
    return replace(case, values={**case.values, name: values})


def _with_parameter(case: Case, name: str, key: str, parameter: int | tuple[int, ...]) -> Case:
    values = case.values[name]
    return _with_values(
        case, name, replace(values, parameters={**values.parameters, key: parameter})
    )
