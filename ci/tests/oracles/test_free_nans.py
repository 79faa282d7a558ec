"""A wanted NaN passes as any NaN of its type, and as nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagefuzz.harness.running import fixed_bytes
from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.free_nans import FreeNans, nans
from pagefuzz.oracles.judging import judge
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.verdict import Outcome

CODES = {
    Dtype.E4M3: ([0x7F, 0xFF], [0x7E, 0xFE, 0, 0x80]),
    Dtype.E5M2: ([0x7D, 0x7E, 0x7F, 0xFD], [0x7C, 0xFC, 0x7B, 0]),
    Dtype.F16: ([0x7C01, 0x7FFF, 0xFC01], [0x7C00, 0xFC00, 0x7BFF, 0]),
    Dtype.BF16: ([0x7F81, 0x7FFF, 0xFFC0], [0x7F80, 0xFF80, 0]),
    Dtype.F32: ([0x7F800001, 0xFFC00000], [0x7F800000, 0xFF800000, 0x007FFFFF]),
}


@pytest.mark.parametrize("dtype", CODES)
def test_nans_are_told_from_numbers_and_infinities(dtype: Dtype) -> None:
    """Codes next to the NaNs of each type are none."""
    for codes, wanted in zip(CODES[dtype], (True, False), strict=True):
        words = np.array(codes, dtype=f"<u{dtype.size_bytes}")
        found = nans(words.view(np.uint8).reshape(1, -1), dtype)
        assert found.shape == (1, len(codes))
        assert (found == wanted).all()


def test_computed_elements_alone_are_free() -> None:
    """A NaN that is copied keeps its bits; without any free NaN there is no mask."""
    values = np.array([[0x7FC0, 0x3F80, 0x7FC0]], dtype="<u2").view(np.uint8)
    free = FreeNans.of(values, Dtype.BF16, np.array([True, True, False]))
    assert free is not None
    assert free.mask.tolist() == [[True, False, False]]
    assert FreeNans.of(values, Dtype.BF16, np.array([False, True, False])) is None


def with_nan(expectation: Expectation) -> Expectation:
    """An expectation of bf16 rows in which element 2 of row 3 is a NaN with free bits."""
    expected = expectation.expected["dst"]
    row, element = int(np.flatnonzero(expected.offsets == 16 * 3)[0]), 2
    values = expected.values.copy()
    mask = np.zeros((values.shape[0], values.shape[1] // 2), dtype=np.bool_)
    values[row, 2 * element : 2 * element + 2] = 0xC0, 0x7F
    mask[row, element] = True
    expected = replace(expected, values=values, free_nans=FreeNans(Dtype.BF16, mask))
    return replace(expectation, expected={"dst": expected})


@pytest.mark.parametrize(
    ("found", "title"),
    [
        (b"\xc0\x7f", None),
        (b"\x81\xff", None),
        (b"\x80\x7f", "expected any NaN of BF16"),
        (b"\x00\x00", "expected any NaN of BF16"),
    ],
)
def test_output_judges_by_nan_ness(
    base_case: Case, bench: Any, found: bytes, title: str | None
) -> None:
    """Any NaN passes where one is wanted; an infinity or a number does not."""
    made = bench(base_case)
    run = made.run(lambda after: after["dst"].put(16 * 3 + 4, found))
    verdict = judge(replace(run, expectation=with_nan(run.expectation)))
    assert verdict.outcome is (Outcome.CLEAN if title is None else Outcome.FAILED)
    if title is not None:
        (failure,) = verdict.failures
        assert failure.judgement == "output"
        assert title in failure.details["access"]


def test_a_nan_where_none_is_wanted_fails(base_case: Case, bench: Any) -> None:
    """The mask frees its own elements only."""
    run = bench(base_case).run(lambda after: after["dst"].put(16 * 3 + 4, b"\xc0\x7f\xc0\x7f"))
    verdict = judge(replace(run, expectation=with_nan(run.expectation)))
    (failure,) = verdict.failures
    assert failure.identity.startswith("output:dst")
    assert "row 3, byte 6" in failure.details["access"]


@pytest.mark.parametrize(("found", "fits"), [(b"\x55", False), (b"\x7f", True), (b"\xff", True)])
def test_contested_elements_by_nan_ness(
    base_case: Case, bench: Any, found: bytes, fits: bool
) -> None:
    """A claimant's NaN may be any NaN."""
    starts = Values.literal(0, 8, 2, 10)
    base_case = base_case.with_sizes(element_bytes=1)
    made = bench(replace(base_case, values={**base_case.values, "starts": starts}))
    run = made.run(lambda after: after["dst"].put(16 * 4 + 5, found))
    expected = run.expectation.expected["dst"]
    contested = expected.contested
    assert contested is not None
    mask = np.zeros(contested.values.shape, dtype=np.bool_)
    values = contested.values.copy()
    claim = int(np.flatnonzero(contested.offsets == 64)[0])
    mask[claim, 5], values[claim, 5] = True, 0x7F
    contested = replace(contested, values=values, free_nans=FreeNans(Dtype.E4M3, mask))
    expectation = replace(run.expectation, expected={"dst": replace(expected, contested=contested)})
    verdict = judge(replace(run, expectation=expectation))
    torn = any(f.identity == "output:dst:torn contested" for f in verdict.failures)
    assert torn is not fits


def test_digests_compare_nans_by_position(base_case: Case, bench: Any) -> None:
    """Two NaNs give one digest; a NaN and a number, or two numbers, do not."""
    made = bench(base_case)
    digests = []
    for found in (b"\xc0\x7f", b"\x81\xff", b"\x80\x7f", b"\x00\x00"):
        run = made.run(lambda after, found=found: after["dst"].put(16 * 3 + 4, found))
        expectation = with_nan(run.expectation)
        digests.append(fixed_bytes(run.plan, expectation, run.observation.launches).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
