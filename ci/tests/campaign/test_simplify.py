"""Minimising a case as data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagefuzz.harness.campaign.simplify import simplify, weight
from pagefuzz.oracles.case import Case, Placement, Values

MANY = Case(
    "operation",
    {"requests": 998, "width": 1024, "page": 16},
    values={
        "starts": Values.literal(*range(998), 1831),
        "table": Values("permuted", {"seed": 9}, {3: -1}),
        "seq_starts": Values("ramp", {"first": 15, "step": 3}, {997: 15967}),
        "counts": Values.literal(0, 0),
    },
    placements={"dst": Placement(offset_bytes=5, after_bytes=64)},
    overrides={"dst.rank": 3},
    seed=77,
)


def _vector(case: Case, name: str, count: int) -> list[int] | None:
    """The elements that the case says; None if it is no case."""
    values = case.values.get(name, Values("constant", {"value": 0}))
    if values.recipe == "literal":
        elements = list(values.parameters["values"])
    elif values.recipe == "ramp":
        first, step = values.parameters["first"], values.parameters["step"]
        elements = [first + step * i for i in range(count)]
    else:
        elements = [values.parameters["value"]] * count
    if len(elements) != count or any(index >= count for index in values.edits):
        return None
    for index, value in values.edits.items():
        elements[index] = value
    return elements


def _reads_past_the_row(case: Case) -> bool:
    requests, width, page = (case.sizes[n] for n in ("requests", "width", "page"))
    starts = _vector(case, "starts", requests + 1)
    seq_starts = _vector(case, "seq_starts", requests)
    if starts is None or seq_starts is None or page < 1:
        return False
    return any(
        starts[r + 1] > starts[r]
        and (seq_starts[r] + starts[r + 1] - starts[r] - 1) // page >= width
        for r in range(requests)
    )


def test_a_case_of_a_thousand_requests():
    """A report with 998 requests comes down to one, whatever its vectors are made of."""
    assert _reads_past_the_row(MANY)
    simple = simplify(MANY, _reads_past_the_row)
    assert simple.sizes == {"requests": 1, "width": 1, "page": 1}
    assert not simple.placements
    assert not simple.overrides
    assert "counts" not in simple.values
    assert simple.seed == 0


def test_pairs_are_left_out_together():
    """Two elements of a vector belong to each of what its size counts."""
    pairs = (0, 1, 0, 1, 1, 0, 2, 2)
    many = Case("operation", {"pairs": 4}, values={"pairs": Values.literal(*pairs)})

    def copies_back(case: Case) -> bool:
        found = _vector(case, "pairs", 2 * case.sizes["pairs"])
        return found is not None and (1, 0) in zip(found[::2], found[1::2], strict=True)

    simple = simplify(many, copies_back)
    assert simple.sizes == {"pairs": 1}
    assert simple.values["pairs"].parameters["values"] == (1, 0)


def test_a_vector_that_is_twice_as_long_by_chance_is_left_alone():
    """It belongs to another size: leaving out elements of it, too, would not be a case."""
    many = Case(
        "operation",
        {"requests": 2, "tokens": 4},
        values={"starts": Values.literal(0, 2, 4), "owner": Values.literal(5, 6, 7, 8)},
    )

    def needs_every_token(case: Case) -> bool:
        starts = _vector(case, "starts", case.sizes["requests"] + 1)
        owner = _vector(case, "owner", case.sizes["tokens"])
        if not case.sizes["requests"] or starts is None:
            return False
        return starts[-1] == 4 and owner == [5, 6, 7, 8]

    assert simplify(many, needs_every_token).sizes == {"requests": 1, "tokens": 4}


@pytest.mark.slow
def test_what_does_not_fail_is_left_alone():
    """If nothing simpler fails, the case is returned as it is."""
    assert simplify(MANY, lambda case: case == MANY) == MANY


def test_each_step_is_simpler():
    """Every accepted step lowers the weight, so that the search ends."""
    accepted = [MANY]

    def still_fails(case: Case) -> bool:
        if not _reads_past_the_row(case):
            return False
        accepted.append(case)
        return True

    simplify(MANY, still_fails)
    weights = [weight(case) for case in accepted]
    assert weights == sorted(weights, reverse=True)
    assert len(set(weights)) == len(weights)


@pytest.mark.parametrize("limit", [2, 3, 1000, 2**31 - 1, 2**40])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_comes_down_to_its_limit(limit, sign):
    """A size or value ends at the smallest that fails, on both sides of zero."""

    def fails(case: Case) -> bool:
        return abs(case.sizes["page"]) >= limit and sign * case.sizes["page"] > 0

    case = MANY.with_sizes(page=sign * limit * 3)
    assert simplify(case, fails).sizes["page"] == sign * limit


def test_an_override_over_another_buffer_is_dropped():
    """A buffer that lies over another one is placed plainly if that is enough."""
    case = replace(MANY, placements={"dst": Placement(over=("src", 8))})
    assert simplify(case, lambda c: c.sizes["page"] >= 1).placements == {}


def test_a_relation_stays_only_if_it_is_needed() -> None:
    """A fault that one relation shows keeps that one; any other loses both."""
    case = replace(MANY, relations=("renaming", "widening"))
    needed = simplify(case, lambda one: "widening" in one.relations)
    assert needed.relations == ("widening",)
    assert simplify(case, lambda one: one.sizes["page"] == 16).relations == ()
