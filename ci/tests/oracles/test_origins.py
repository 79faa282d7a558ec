"""A copy in a wrong place names the entry or the input that it was taken from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from ci.tests.strategies.conftest import Drawn, drawn_from

from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.judging import judge
from pagefuzz.strategies.registry import cases_for

MakeBench = Callable[[Case], Any]

#: Operation -> destination -> what its bytes must be for a copy to be one.
COPIES: Mapping[str, Mapping[str, Callable[[Mapping[str, int]], bool]]] = {
    "cp_gather_cache": {"dst": lambda a: True},
    "gather_and_maybe_dequant_cache": {"dst": lambda a: a["kv_dtype"] == 0},
    "cp_gather_indexer_k_quant_cache": {"dst_k": lambda a: True, "dst_scale": lambda a: True},
    "concat_and_cache_mla": {"cache": lambda a: a["kv_dtype"] == 0},
    "reshape_and_cache_flash": {
        "key_cache": lambda a: a["kv_dtype"] == 0,
        "value_cache": lambda a: a["kv_dtype"] == 0,
    },
}
PLACES = [(name, buffer) for name, buffers in COPIES.items() for buffer in buffers]

#: Shorter runs may turn up by chance, and are then not told.
CERTAIN_BYTES = 16


def wanted(drawn: Drawn, buffer: str) -> bool:
    """A small case in contract that copies two different runs to the buffer. Pages that all lie in
    one place have as many names."""
    expected = drawn.expectation.expected[buffer]
    return (
        COPIES[drawn.case.operation][buffer](drawn.plan.arguments)
        and drawn.plan.arguments.get("page_stride_bytes") != 0
        and expected.contested is None
        and sum(one.memory_bytes for one in drawn.plan.buffers.values()) < 2**19
        and len(np.unique(expected.values, axis=0)) > 1
    )


def copied(drawn: Drawn, buffer: str, other: int) -> Callable[[Mapping[str, Any]], None]:
    """Puts what belongs in another run of the buffer into its first."""
    expected = drawn.expectation.expected[buffer]
    root, begin = drawn.plan.base(buffer)
    return lambda after: after[root].put(
        int(expected.offsets[0]) + begin, expected.values[other].tobytes()
    )


@pytest.mark.parametrize(("name", "buffer"), PLACES)
def test_a_run_of_another_names_it(bench: MakeBench, name: str, buffer: str) -> None:
    """The first run gets the bytes of another one; the report says whose they are."""
    operation = registry.operation(name)
    strategy = cases_for(name, hostile=False, refused=False)
    told = certain = 0
    for drawn in drawn_from(strategy, 60, 11, name):
        if not wanted(drawn, buffer):
            continue
        made, expected = bench(drawn.case), drawn.expectation.expected[buffer]
        other = int(np.flatnonzero((expected.values != expected.values[0]).any(axis=1))[0])
        verdict = judge(made.run(copied(drawn, buffer, other)))
        failure = next(f for f in verdict.failures if f.judgement == "output")
        mapping = operation.mapping(drawn.plan, buffer, int(expected.offsets[other]))
        assert mapping is not None
        # "request 0, row 3 -> token 17 -> page 4 slot 1", "token 3 -> slot 2 -> ..."
        is_write = mapping.startswith("token ")
        source = mapping.split(" -> ")[0 if is_write else -1].split(";")[0]
        origin = failure.details["means"].partition("it holds ")[2]
        first = int(np.flatnonzero(expected.values[0] != expected.values[other])[0])
        if expected.values.shape[1] - first >= CERTAIN_BYTES:
            certain += 1
            assert origin, failure
        if origin:
            told += 1
            row = source.replace("token ", "row ") if is_write else source
            assert row in origin or source in origin, (mapping, failure)
    assert certain
    assert told >= certain


def test_a_byte_between_rows_has_no_origin() -> None:
    """A short stray store behind the row of a tiled page is reported, not searched for."""
    name = "cp_gather_indexer_k_quant_cache"
    operation = registry.operation(name)
    told = 0
    for drawn in drawn_from(cases_for(name, hostile=False, refused=False), 200, 3, name):
        a = drawn.plan.arguments
        behind = a["dst_k_row_stride_bytes"] - a["head_dim"]
        if a["num_tokens"] > 1 and a["dst_k_rows"] > 1 and behind > 0:
            told += 1
            at = a["head_dim"] + behind - 1
            assert operation.origin(drawn.plan, "dst_k", at, np.array([90], np.uint8)) is None
    assert told > 10
