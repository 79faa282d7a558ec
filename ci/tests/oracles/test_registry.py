"""Operations and judgements are found by being there."""

from __future__ import annotations

from pathlib import Path

import pytest

import pagefuzz.oracles
from pagefuzz.oracles.observation import flags_of
from pagefuzz.oracles.registry import (
    UnknownNameError,
    concerned,
    judgements,
    operation,
    operations,
)
from pagefuzz.oracles.verdict import CAUSE_ORDER


def modules(folder: str) -> set[str]:
    root = Path(pagefuzz.oracles.__path__[0]) / folder
    return {path.stem for path in root.glob("*.py")} - {"__init__"}


def test_one_module_an_operation() -> None:
    """Every module of the folder registers one operation of its name."""
    assert set(operations()) == modules("operations") >= {"cp_gather_cache"}


def test_one_module_a_judgement() -> None:
    """Every module of the folder registers one judgement of its name, ranked among causes."""
    assert set(judgements()) == modules("judgements") == set(CAUSE_ORDER)


@pytest.mark.parametrize("name", CAUSE_ORDER)
def test_judgements_say_what_they_are(name: str) -> None:
    """Each has a unit and a summary for `pagefuzz list`."""
    judgement = judgements()[name]
    assert judgement.unit in {"bytes", "operations", "launches", "counters", "keys"}
    assert judgement.summary
    assert len(judgement.summary) < 100


#: Judgement -> (the operations to which it applies not, why).
WRITERS = {
    "concat_and_cache_mla",
    "concat_and_cache_ds_mla",
    "indexer_k_quant_and_cache",
    "reshape_and_cache_flash",
}
COPIES = {"copy_blocks", "swap_blocks"}
#: Judgement -> operations whose cases give it nothing, and why.
NOTHING_TO_EXAMINE = {
    "splitting": (WRITERS | COPIES, "tokens and pairs belong to no request"),
    "widening": (WRITERS | COPIES, "slots and pairs, not a block table"),
    "renaming": (COPIES, "pairs name pages on both sides, and order matters"),
    "recompile": (set(operations()), "CUDA sources are compiled ahead of all launches"),
}


@pytest.mark.parametrize("name", operations())
def test_every_judgement_concerns_an_operation_or_has_a_reason(name: str) -> None:
    """A campaign of a checked build in which a concerned judgement examined nothing exits 2, so
    that whatever is left out here is left out on purpose."""
    left_out = set(judgements()) - set(concerned(operation(name), frozenset({"checked"})))
    assert left_out == {n for n, (names, _) in NOTHING_TO_EXAMINE.items() if name in names}


def test_records_concern_checked_builds_only() -> None:
    """What a release build cannot give to examine is not missed there; all else is."""
    gather = operation("cp_gather_cache")
    assert set(concerned(gather, frozenset({"checked"}))) >= {"bounds", "overflow", "output"}
    released = set(concerned(gather, frozenset({"release"})))
    assert released >= {"output", "untouched", "counts", "refusal", "launch", "death"}
    assert not released & {"bounds", "overflow"}
    assert "overflow" in concerned(gather, frozenset({"ubsan"}))


def test_keys_concern_triton_kernels_only() -> None:
    """Their arithmetic is not looked into; what they compile is, where sizes follow the batch."""
    hinted = operation("cp_gather_indexer_k_quant_cache_hinted")
    interpreted = set(concerned(hinted, frozenset({"checked", "triton"})))
    assert interpreted >= {"recompile", "bounds", "output"}
    assert "overflow" not in interpreted
    assert "recompile" not in concerned(hinted, frozenset({"checked"}))
    assert "recompile" not in concerned(operation("cp_gather_cache"), frozenset({"triton"}))


def test_orders_concern_the_host_emulation_only() -> None:
    """Nobody chooses the order of a GPU or of Triton's interpreter; all of them can repeat."""
    gather = operation("cp_gather_cache")
    for backend, build, ordered in (
        ("host", "checked", True),
        ("host", "release", True),
        ("cuda", "checked", False),
        ("host", "checked,triton", False),
    ):
        found = set(concerned(gather, flags_of(backend, build)))
        assert "repeat" in found
        assert ("order" in found) is ordered


def test_unknown_operation() -> None:
    """A wrong name is answered with those that exist."""
    with pytest.raises(UnknownNameError, match=r"unknown operation 'gather'; there is .*cp_gather"):
        operation("gather")
