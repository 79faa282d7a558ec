"""Every bf16 through the writers that compute their scales: kernel, vectors, exact loop, torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pagefuzz.harness.check import Checker
from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import Outcome

RECORD, INDEXER = "concat_and_cache_ds_mla", "indexer_k_quant_and_cache"
GROUP = 128
ROW = {RECORD: 512, INDEXER: 1024}
_LARGEST, _INFINITY = 0x7F7F, 0x7F80


def case_of(name: str, scale_kind: int, words: list[int]) -> Case:
    """Groups of 128 in one row after another, row t in slot t."""
    tokens = -(-len(words) // ROW[name])
    common = {"num_tokens": tokens, "num_pages": 1, "page_size_tokens": tokens}
    common |= {"page_stride_bytes": 0, "scale_kind": scale_kind}
    if name == RECORD:
        own = {f"{side}_rows": tokens for side in ("kv_c", "k_pe")}
        own |= {"kv_c_elements": 512, "kv_c_row_stride_bytes": 1024, "slot_stride_bytes": 656}
        own |= {"k_pe_elements": 64, "k_pe_row_stride_bytes": 128}
    else:
        own = {"k_rows": tokens, "k_row_stride_bytes": 2048, "page_layout": 0}
        own |= {"head_dim": 1024, "quant_block": GROUP}
    values = {
        "slot_mapping": Values("ramp", {"first": 0, "step": 1}),
        {RECORD: "kv_c", INDEXER: "k"}[name]: Values.literal(*words),
    }
    return Case(name, {**common, **own}, values)


def by_themselves(words: list[int]) -> list[int]:
    """Groups of numbers next to each other: each is near its group's largest."""
    return words + [0] * (-len(words) % GROUP)


def under_a_lead(words: list[int], binades: int) -> list[int]:
    """Groups led by a number that many binades above the largest of its others."""
    out: list[int] = []
    for at in range(0, len(words), GROUP - 1):
        others = words[at : at + GROUP - 1]
        finite = [word & 0x7FFF for word in others if word & 0x7FFF < _INFINITY]
        lead = min(max(finite, default=0) + GROUP * binades, _LARGEST)
        out += [lead, *others]
    return by_themselves(out)


def boundaries() -> list[int]:
    """Groups with one largest number: around every 448 * 2^k, around 1e-4 and 448e-4, and the ends
    of the finite numbers."""
    tops = [((127 + 8 + k) << 7) | 0x60 for k in range(-135, 119)]
    tops += [0x38D1, 0x3D37, 0, 0x80, _LARGEST]
    near = [top + step for top in tops for step in (-1, 0, 1) if 0 <= top + step <= _INFINITY]
    return [word for top in near for word in (top, *(top % (i + 2) for i in range(GROUP - 1)))]


def split(words: list[int]) -> Iterator[list[int]]:
    """As many groups as a case may hold values, at most."""
    for at in range(0, len(words), 2**15):
        yield words[at : at + 2**15]


def bytes_of(expectation: Expectation) -> dict[str, dict[int, bytes]]:
    return {
        name: {at: run.tobytes() for at, run in zip(one.offsets.tolist(), one.values, strict=True)}
        for name, one in expectation.expected.items()
    }


def check(checker: Checker, case: Case, *, references: bool) -> int:
    """Kernel and vectorised reference, the other two if asked for; gives the values compared."""
    verdict = checker.check(case)
    assert verdict.outcome is Outcome.CLEAN, verdict.failures
    asked = operation(case.operation)
    plan = asked.plan(case)
    fast = bytes_of(asked.expect(plan))
    if references:
        assert fast == bytes_of(asked.expect_by_loop(plan))
        assert fast == asked.expected_by_torch(plan)
    return verdict.checked["output"]


@pytest.mark.parametrize("scale_kind", [0, 1])
@pytest.mark.parametrize("name", [RECORD, INDEXER])
def test_numbers_of_every_magnitude(name: str, scale_kind: int) -> None:
    """Every 31st bf16, by itself and far below its group's largest."""
    words = list(range(0, 2**16, 31))
    with Checker(name, "bundled:token") as checker:
        for groups in (by_themselves(words), under_a_lead(words, 5), under_a_lead(words, 13)):
            for part in split(groups):
                assert check(checker, case_of(name, scale_kind, part), references=True) > 4000


@pytest.mark.slow
@pytest.mark.parametrize("scale_kind", [0, 1])
@pytest.mark.parametrize("name", [RECORD, INDEXER])
def test_every_number(name: str, scale_kind: int) -> None:
    """All 65,536 bf16 by themselves and 0 to 18 binades below their group's largest."""
    words = list(range(2**16))
    with Checker(name, "bundled:token", build="release") as checker:
        for part in split(by_themselves(words)):
            check(checker, case_of(name, scale_kind, part), references=True)
        for binades in range(19):
            for part in split(under_a_lead(words, binades)):
                references = binades in (0, 8, 9, 17)
                check(checker, case_of(name, scale_kind, part), references=references)


@pytest.mark.parametrize("scale_kind", [0, 1])
@pytest.mark.parametrize("name", [RECORD, INDEXER])
def test_scales_around_every_boundary(name: str, scale_kind: int) -> None:
    """Where a scale becomes the next power of two, the floors, zero and infinity."""
    words = boundaries()
    with Checker(name, "bundled:token", build="release") as checker:
        seen = set()
        for part in split(words):
            case = case_of(name, scale_kind, part)
            check(checker, case, references=False)
            asked = operation(name)
            expected = asked.expect(asked.plan(case)).expected["scales"].values
            seen |= set(np.ascontiguousarray(expected).view(np.float32).ravel().tolist())
    assert float("inf") in seen
    powers = {value for value in seen if np.frexp(value)[0] == 0.5}
    assert (powers | {float("inf")} == seen) == (scale_kind == 1)
    assert len(powers) > 100
