"""The detection layers: which are in force, and what each examined of a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from ci.tests.planted import case_of

from pagefuzz import check
from pagefuzz.harness.campaign.events import Progress, decode, encode
from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.campaign.result import ENOUGH_CASES, UnitResult
from pagefuzz.harness.doctor import Examination, Fact
from pagefuzz.harness.layers import BY_NAME, FEW_CASES, LAYERS, in_force
from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.observation import flags_of
from pagefuzz.oracles.registry import judgements, operation
from pagefuzz.oracles.verdict import CaseClass, Verdict

#: Of every build on every backend.
EVERYWHERE = {
    "reference, bit-exact",
    "whole-buffer byte diff",
    "red zones",
    "two fills",
    "repeats",
    "related launches",
    "counters",
    "launch limits",
    "read-only sources",
    "worker deaths",
}


def relaunched_case() -> Case:
    """In contract, launched 2 + 5 + 3 times."""
    return replace(case_of("missing-barrier"), relations=("order", "repeat"))


def without_guards(case: Case) -> Case:
    """The same case between red zones."""
    names = operation(case.operation).plan(case).buffer_names()
    places = {name: Placement(guard="none") for name in names}
    return replace(case, placements=places)


def test_names_are_unique_and_judgements_known() -> None:
    """A layer takes its figures from judgements that exist, or from a launch."""
    assert len(BY_NAME) == len(LAYERS)
    for layer in LAYERS:
        assert set(layer.judgements) <= set(judgements()), layer.name
        assert set(layer.hears) <= set(judgements()), layer.name
        assert not (layer.judgements and (layer.amount or layer.hears)), layer.name


@pytest.mark.parametrize(
    ("backend", "build", "also"),
    [
        (
            "host",
            "checked",
            {"guard pages", "orders of threads", "checked build", "checked index type"},
        ),
        ("cuda", "checked", {"guard pages", "checked build", "checked index type"}),
        ("host", "release", {"guard pages", "orders of threads"}),
        ("cuda", "release", {"guard pages"}),
        ("host", "ubsan", {"guard pages", "orders of threads", "UBSan"}),
        ("host", "release,asan", {"orders of threads", "AddressSanitizer"}),
    ],
)
def test_layers_in_force(backend: str, build: str, also: set[str]) -> None:
    """What a build asks for must examine something; what it cannot have is not missed."""
    found = in_force(operation("cp_gather_cache"), flags_of(backend, build))
    assert set(found) == EVERYWHERE | also


def test_layers_of_a_triton_kernel() -> None:
    """Interpreted: checked, but neither its arithmetic nor its order; what it compiles is seen."""
    hinted = operation("cp_gather_indexer_k_quant_cache_hinted")
    found = set(in_force(hinted, flags_of("host", "checked,triton")))
    assert found == EVERYWHERE | {"guard pages", "checked build", "compilation keys"}


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_a_copy_within_a_cache_is_repeated_too(backend: str) -> None:
    """Whatever it runs on: nobody chooses the order of a GPU, where repeats are all that is left to
    show a race between its waves."""
    assert "repeats" in in_force(operation("copy_blocks"), flags_of(backend, "checked"))


def test_every_layer_examines_what_it_is_asked_to() -> None:
    """Launches and amounts of one case are those of the launches that were made of it."""
    verdict = check(relaunched_case(), "bundled:page")
    assert verdict.clean
    assert verdict.launches == 10
    launches = {name: one[0] for name, one in verdict.layers.items()}
    assert launches == {
        "reference, bit-exact": 2,
        "whole-buffer byte diff": 2,
        "red zones": 10,
        "two fills": 2,
        "repeats": 3,
        "orders of threads": 5,
        "related launches": 0,
        "counters": 2 if verdict.checked.get("counts") else 0,
        "launch limits": 10,
        "guard pages": 10,
        "read-only sources": 10,
        "worker deaths": 2,
        "checked build": 2,
        "checked index type": 2,
    }
    amounts = {name: one[1] for name, one in verdict.layers.items()}
    for layer, judgement in (
        ("reference, bit-exact", "output"),
        ("whole-buffer byte diff", "untouched"),
        ("two fills", "poison"),
        ("repeats", "repeat"),
        ("orders of threads", "order"),
        ("checked build", "bounds"),
        ("checked index type", "overflow"),
    ):
        assert amounts[layer] == verdict.checked[judgement] > 0, layer
    for layer in ("red zones", "guard pages", "read-only sources"):
        assert amounts[layer] > 0, layer
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_without_guards_the_layer_examined_nothing() -> None:
    """Buffers between red zones lie at no guard: it is not counted, whatever is on by default."""
    verdict = check(without_guards(relaunched_case()), "bundled:page")
    assert verdict.clean
    assert verdict.layers["guard pages"] == (0, 0)
    assert verdict.layers["red zones"][0] == 10
    unit = _unit(verdict.layers, cases=FEW_CASES, layers=("guard pages", "red zones"))
    assert unit.vacuous(()) == [f"op/s: guard pages examined nothing in {FEW_CASES} cases"]


def test_a_refused_launch_is_examined_by_no_guard() -> None:
    """No thread ran: nothing could have been touched."""
    case = replace(relaunched_case(), relations=(), overrides={"num_requests": -1})
    verdict = check(case, "bundled:page")
    assert (verdict.clean, verdict.case_class) == (True, CaseClass.REFUSED)
    for layer in ("guard pages", "red zones", "read-only sources", "checked build"):
        assert verdict.layers[layer] == (0, 0), layer


def _unit(
    examined: Mapping[str, tuple[int, int]], *, cases: int, layers: tuple[str, ...]
) -> UnitResult:
    """That many cases in contract, all of which together came to these figures."""
    classes = {str(CaseClass.IN_CONTRACT): cases}
    totals = Progress(cases=cases, classes=classes, layers=dict(examined))
    return UnitResult(Unit("op", "s", True), cases, totals, layers=layers)


@pytest.mark.parametrize("name", [layer.name for layer in LAYERS])
def test_any_layer_in_force_that_did_nothing_is_no_pass(name: str) -> None:
    """Launches without an amount are nothing, too; one that examined something is silent."""
    text = BY_NAME[name].text
    for examined in ({}, {name: (0, 0)}, {name: (7, 0)}):
        unit = _unit(examined, cases=ENOUGH_CASES, layers=(name,))
        assert unit.vacuous(()) == [f"op/s: {text} examined nothing in {ENOUGH_CASES} cases"]
    assert not _unit({name: (1, 1)}, cases=ENOUGH_CASES, layers=(name,)).vacuous(())
    assert not _unit({}, cases=ENOUGH_CASES, layers=()).vacuous(())


def test_few_cases_of_many_that_could_not_run_are_no_pass() -> None:
    """What was drawn counts: few cases are excused where few were asked for only."""
    unit = _unit({}, cases=1, layers=("repeats",))
    assert unit.vacuous(()) == []
    unit.totals.not_run = ENOUGH_CASES - 1
    text = BY_NAME["repeats"].text
    assert unit.vacuous(()) == [f"op/s: {text} examined nothing in 1 case"]


def test_a_layer_speaks_for_its_judgements() -> None:
    """One thing that was not done is one sentence; a judgement without a layer keeps its own."""
    unit = _unit({}, cases=ENOUGH_CASES, layers=("checked build",))
    assert unit.vacuous(("bounds", "refusal")) == [
        "op/s: checked build (bounds) examined nothing in 100 cases",
        "op/s: refusal examined nothing in 100 cases",
    ]


def test_a_judgement_that_hears_a_layer_is_not_blind() -> None:
    """UBSan counts no operations: its records are what it is asked for. Without them, and where
    the checked index type should have counted, it is one sentence."""
    unit = _unit({"UBSan": (7, 7)}, cases=ENOUGH_CASES, layers=("UBSan",))
    assert unit.vacuous(("overflow",)) == []
    unit = _unit({"UBSan": (0, 0)}, cases=ENOUGH_CASES, layers=("UBSan",))
    assert unit.vacuous(("overflow",)) == ["op/s: UBSan examined nothing in 100 cases"]
    both = ("checked index type", "UBSan")
    unit = _unit({"UBSan": (7, 7)}, cases=ENOUGH_CASES, layers=both)
    assert unit.vacuous(("overflow",)) == [
        "op/s: checked index type (overflow) examined nothing in 100 cases"
    ]


@pytest.mark.parametrize(
    ("name", "enough"),
    [
        ("red zones", 1),
        ("whole-buffer byte diff", 1),
        ("guard pages", FEW_CASES),
        ("orders of threads", ENOUGH_CASES),
    ],
)
def test_how_few_cases_are_enough(name: str, enough: int) -> None:
    """A few cases may have nothing for a layer that not every case is for."""
    assert _unit({}, cases=enough, layers=(name,)).vacuous(())
    fewer = _unit({}, cases=max(enough - 1, 1), layers=(name,))
    assert bool(fewer.vacuous(())) == (enough == 1)


def test_figures_travel_and_add_up() -> None:
    """From a runner to the command, and over all shards."""
    one = Progress(cases=1, layers={"guard pages": (2, 30)})
    event = decode(encode(one))
    assert event == one
    total = Progress(layers={"red zones": (1, 1)})
    total.add(one)
    total.add(one)
    assert total.layers == {"red zones": (1, 1), "guard pages": (4, 60)}


def test_doctor_says_why_a_layer_is_not_there() -> None:
    """That of its backend before its own; nothing of one that is there."""
    facts = (Fact("triton", False, "no triton here"), Fact("AddressSanitizer", True, "lib"))
    found = Examination(facts, {"host": "", "cuda": "no GPU here"})
    keys, asan, checked = (
        BY_NAME[name] for name in ("compilation keys", "AddressSanitizer", "checked build")
    )
    assert found.why_not(keys, "host") == "no triton here"
    assert found.why_not(keys, "cuda") == found.why_not(checked, "cuda") == "no GPU here"
    assert found.why_not(asan, "host") == found.why_not(checked, "host") == ""
    assert [found.layer_on(asan, b) for b in ("host", "cuda")] == ["yes", "-"]
    assert found.layer_on(keys, "host") == "no"
