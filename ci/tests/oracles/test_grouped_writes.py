"""Writers that compute their scales: vectorised expectation, loop and torch say the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ci.tests.oracles.test_references import assert_same
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, CaseError, Values
from pagefuzz.oracles.grouped_writes import GroupedWrite
from pagefuzz.oracles.registry import operation
from pagefuzz.oracles.verdict import CaseClass

RECORD, INDEXER = "concat_and_cache_ds_mla", "indexer_k_quant_and_cache"
NAMES = (RECORD, INDEXER)

#: bf16 words: zeros, subnormals, floors, 336, 448, its neighbours, the largest, infinities, NaNs.
WORDS = (
    *(0, 0x8000, 1, 0x807F, 0x38D1, 0x38D2, 0x3D37, 0x3D38, 0x43A8, 0xC3E0, 0x43DF, 0x43E1),
    *(0x3F80, 0xBF81, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x00E0, 0x04E0),
)


def asked(name: str) -> GroupedWrite:
    found = operation(name)
    assert isinstance(found, GroupedWrite)
    return found


@st.composite
def small_cases(draw: st.DrawFn, name: str) -> Case:
    """Every kind of slot and any strides, small enough for a loop."""
    few = st.integers(0, 3)
    tokens, pages = draw(st.integers(0, 4)), draw(few)
    page_sizes = st.integers(1, 3)
    sizes = {"num_tokens": tokens, "num_pages": pages, "scale_kind": draw(st.integers(0, 1))}
    if name == RECORD:
        latent, rope = 128 * draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 4))
        size = draw(page_sizes)
        record = latent + latent // 32 + 2 * rope
        slot_stride = record + -record % 4 + 4 * draw(few)
        page_stride = size * slot_stride + 4 * draw(few)
        if draw(st.booleans()):
            page_stride, slot_stride = slot_stride, max(pages, 1) * slot_stride
        sizes |= {
            "kv_c_rows": tokens + draw(few),
            "k_pe_rows": tokens + draw(few),
            "kv_c_row_stride_bytes": 2 * draw(st.sampled_from([0, 1, 64, 127, 128, 256, 300])),
            "k_pe_row_stride_bytes": 2 * draw(st.integers(0, 6)),
            "kv_c_elements": latent,
            "k_pe_elements": rope,
            "slot_stride_bytes": slot_stride,
        }
    else:
        head = 16 * draw(st.sampled_from([1, 2, 3]))
        block = draw(st.sampled_from([d for d in (1, 3, 8, 16, 24, 32, 48) if head % d == 0]))
        tiled = draw(st.integers(0, 1))
        size = 16 * draw(st.integers(1, 2)) if tiled else draw(page_sizes)
        page_stride = size * (head + 4 * (head // block)) + 4 * draw(few)
        sizes |= {
            "k_rows": tokens + draw(few),
            "k_row_stride_bytes": 2 * draw(st.sampled_from([0, 1, 15, 16, 32, 48, 50])),
            "head_dim": head,
            "quant_block": block,
            "page_layout": tiled,
        }
    sizes |= {"page_size_tokens": size, "page_stride_bytes": page_stride}
    near = st.integers(-3, pages * size + 2)
    slots = draw(st.lists(near, min_size=tokens, max_size=tokens))
    values = {"slot_mapping": Values.literal(*slots)}
    if draw(st.booleans()):
        words = st.sampled_from(WORDS)
        values[asked(name).quantised] = Values.literal(
            *draw(st.lists(words, min_size=1, max_size=40))
        )
    if draw(st.booleans()):
        values["counts"] = Values.literal(5, 7)
    return Case(name, sizes, values, seed=draw(st.integers(0, 2**64 - 1)))


@pytest.mark.parametrize("name", NAMES)
def test_vectorised_equals_loop(name: str) -> None:
    """The fast expectation is the loop's, byte for byte and set for set."""

    @settings(max_examples=60, deadline=None)
    @given(small_cases(name))
    def compare(case: Case) -> None:
        plan = asked(name).plan(case)
        fast, loop = asked(name).expect(plan), asked(name).expect_by_loop(plan)
        assert_same(fast, loop)
        for part in loop.expected:
            assert fast.expected[part].buffer == loop.expected[part].buffer == "cache"
            mine, theirs = fast.expected[part].free_nans, loop.expected[part].free_nans
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or np.array_equal(mine.mask, theirs.mask)

    compare()


@pytest.mark.parametrize("name", NAMES)
def test_torch_equals_loop(name: str) -> None:
    """Views of one torch tensor, torch's amax, division and conversion give the loop's bytes."""

    @settings(max_examples=40, deadline=None)
    @given(small_cases(name))
    def compare(case: Case) -> None:
        plan = asked(name).plan(case)
        loop = asked(name).expect_by_loop(plan)
        by_torch = asked(name).expected_by_torch(plan)
        for part, runs in by_torch.items():
            if loop.case_class is CaseClass.REFUSED:
                assert runs == {}
                continue
            expected = loop.expected[part]
            pairs = zip(expected.offsets.tolist(), expected.values, strict=True)
            assert runs == {at: value.tobytes() for at, value in pairs}
        assert set(by_torch) >= set(loop.expected)

    compare()


def _written(case: Case, part: int) -> np.ndarray:
    """Runs of a part of the cell that must be written, if the case is not refused."""
    found = asked(case.operation)
    plan = found.plan(case)
    (cells,) = found.caches(plan.arguments)
    expected = found.expect(plan).expected.get(cells.parts[part].name)
    return np.empty((0, 4), np.uint8) if expected is None else expected.values


def _scales(case: Case) -> np.ndarray:
    return np.ascontiguousarray(_written(case, 1)).view(np.float32)


def _contested(case: Case, *parts: int) -> bool:
    found = asked(case.operation)
    plan = found.plan(case)
    expected = list(found.expect(plan).expected.values())
    return len(expected) > 1 and [
        nth for nth, one in enumerate(expected) if one.contested is not None
    ] == list(parts)


CORNERS: dict[str, Callable[[Case], bool]] = {
    "scale: infinite": lambda case: bool(np.isinf(_scales(case)).any()),
    "scale: exactly 1": lambda case: bool((_scales(case) == 1).any()),
    "scale: several of a token": lambda case: bool((_scales(case) != _scales(case)[:, :1]).any()),
    "codes: NaN": lambda case: bool((_written(case, 0) == 0x7F).any()),
    "codes: -0": lambda case: bool((_written(case, 0) == 0x80).any()),
    "codes: the maximum": lambda case: bool((_written(case, 0) == 0x7E).any()),
    "contested: codes and scales": lambda case: _contested(case, 0, 1),
    "contested: codes alone": lambda case: _contested(case, 0),
}


@pytest.mark.parametrize("name", NAMES)
def test_small_cases_reach_every_corner(name: str) -> None:
    """The equalities above are worth as much as the cases that they are tried on."""
    missing = set(CORNERS)

    @seed(1)
    @settings(
        max_examples=600,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(small_cases(name))
    def look(case: Case) -> None:
        if missing and not asked(name).refusals(asked(name).plan(case)):
            missing.difference_update({corner for corner in missing if CORNERS[corner](case)})

    look()
    assert missing == set()


def one_group(name: str, scale_kind: int, *words: int) -> tuple[float, bytes]:
    """The scale and the codes of one token of one group."""
    sizes = {
        RECORD: {
            **{f"{n}_rows": 1 for n in ("kv_c", "k_pe")},
            **{f"{n}_row_stride_bytes": 0 for n in ("kv_c", "k_pe")},
            "kv_c_elements": 128,
            "k_pe_elements": 1,
            "slot_stride_bytes": 0,
        },
        INDEXER: {
            "k_rows": 1,
            "k_row_stride_bytes": 0,
            "head_dim": 16,
            "quant_block": 16,
            "page_layout": 0,
        },
    }[name]
    common = {"num_tokens": 1, "num_pages": 1, "page_size_tokens": 1, "page_stride_bytes": 0}
    values = {"slot_mapping": Values.literal(0), asked(name).quantised: Values.literal(*words)}
    case = Case(name, {**sizes, **common, "scale_kind": scale_kind}, values)
    codes: bytes = _written(case, 0)[0].tobytes()[: len(words)]
    return float(_scales(case)[0, 0]), codes


INFINITE = float("inf")
SMALL = float(np.float32(1e-4))


@pytest.mark.parametrize(
    ("name", "scale_kind", "words", "scale", "codes"),
    [
        (RECORD, 0, (0x43A8,), 0.75, "7e"),  # 336
        (RECORD, 1, (0x43A8,), 1.0, "7a"),  # 336 is a tie between 320 and 352
        (RECORD, 0, (0x43E0,), 1.0, "7e"),  # 448
        (RECORD, 1, (0x43E0,), 1.0, "7e"),  # an exact power of two stays
        (RECORD, 1, (0x43E1,), 2.0, "76"),  # 450 / 2 = 225
        (RECORD, 1, (0x43DF,), 1.0, "7e"),  # 446
        (RECORD, 0, (0, 0x8000), 2.0**-126, "0080"),
        (RECORD, 1, (0, 0x8000), 2.0**-13, "0080"),
        (RECORD, 0, (0x0001, 0x0080), 2.0**-126, "0438"),  # 2^-133 and 2^-126, no flush to zero
        (RECORD, 0, (0x7FC0, 0x3F80), float(np.float32(1 / np.float32(448))), "7f7e"),
        (RECORD, 0, (0x7FC0,), 2.0**-126, "7f"),
        (RECORD, 0, (0xFF80, 0x3F80, 0xBF80), INFINITE, "7f0080"),
        (RECORD, 1, (0x7F80,), INFINITE, "7f"),
        (INDEXER, 0, (0x43A8,), 0.75, "7e"),
        (INDEXER, 1, (0x43A8,), 1.0, "7a"),
        (INDEXER, 0, (0, 0x8000), float(np.float32(SMALL) / np.float32(448)), "0080"),
        (INDEXER, 1, (0,), 2.0**-22, "00"),
        (INDEXER, 1, (0x43E0,), 1.0, "7e"),
        (INDEXER, 1, (0x43E1,), 2.0, "76"),
        (INDEXER, 0, (0x7F80, 0xFF7F), INFINITE, "7f80"),
        (INDEXER, 0, (0x7FC0,), float(np.float32(SMALL) / np.float32(448)), "7f"),
    ],
)
def test_known_groups(
    name: str, scale_kind: int, words: tuple[int, ...], scale: float, codes: str
) -> None:
    """Scales and codes worked out by hand."""
    assert one_group(name, scale_kind, *words) == (scale, bytes.fromhex(codes))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale_kind", [0, 1])
def test_scales_of_every_magnitude(name: str, scale_kind: int) -> None:
    """All bf16 magnitudes but NaNs: bits, exact arithmetic and torch give one scale."""
    import torch

    amax = (np.arange(0x7F81, dtype=np.uint32) << 16).view(np.float32)
    found = asked(name)
    fast = found.scales(amax, scale_kind)
    assert fast.tolist() == [found.scale_by_loop(value, scale_kind) for value in amax.tolist()]
    assert fast.tolist() == found.scales_by_torch(torch.from_numpy(amax), scale_kind).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_values_of_the_input_are_bf16_bits(name: str) -> None:
    """Anything else is a malformed case, and raw inputs take no values."""
    (case,) = [find(small_cases(name), lambda case: asked(name).quantised in case.values)]
    quantised = asked(name).quantised

    def with_values(buffer: str, values: Values) -> Case:
        return Case(name, case.sizes, {**case.values, buffer: values})

    for values, message in (
        (Values.literal(65536), "bf16 bits are 0..65535"),
        (Values.literal(-1), "bf16 bits are 0..65535"),
        (Values.literal(), "there must be 1..65536"),
        (Values("constant", {"value": 0}), "its values are 'literal' bf16 bits"),
    ):
        with pytest.raises(CaseError, match=message):
            asked(name).plan(with_values(quantised, values))
    with pytest.raises(CaseError, match="cache holds payload"):
        asked(name).plan(with_values("cache", Values.literal(0)))
