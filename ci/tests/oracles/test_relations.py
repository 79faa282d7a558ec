"""Relations: what is derived asks for the same output, and a launch that gives another is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ci.tests.oracles.test_judgements import other_byte, record
from ci.tests.strategies.conftest import drawn_from

from pagefuzz.oracles import contents, registry
from pagefuzz.oracles.case import Case, CaseError, Placement, Values
from pagefuzz.oracles.differences import compare
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.free_nans import FreeNans
from pagefuzz.oracles.judging import judge
from pagefuzz.oracles.layout import Bytes, Dtype, Plan
from pagefuzz.oracles.observation import AccessFault, RelatedPlan, Site, Status
from pagefuzz.oracles.page_copies import PageCopyOperation
from pagefuzz.oracles.relation import asked_for, relation_judgements, relations_of
from pagefuzz.oracles.traced_gather import TracedGather
from pagefuzz.oracles.writes import WriteOperation
from pagefuzz.strategies.registry import cases_for

Memory = Mapping[str, Any]
MakeBench = Callable[[Case], Any]

RELATIONS = tuple(relation_judgements())
RELAUNCHES = ("order", "repeat")
#: Those that have the payload of sources elsewhere.
MOVING = ("renaming", "restriding")
#: Those with another plan, which must be in contract.
REPLANNED = tuple(name for name in RELATIONS if name not in RELAUNCHES)


@pytest.fixture
def write_case() -> Case:
    """Three tokens, one of them padding, to a cache of eight padded pages."""
    sizes = {
        "num_tokens": 3,
        "kv_c_rows": 3,
        "k_pe_rows": 3,
        "kv_c_row_stride_bytes": 64,
        "k_pe_row_stride_bytes": 16,
        "kv_c_elements": 16,
        "k_pe_elements": 4,
        "page_size_tokens": 2,
        "num_pages": 8,
        "page_stride_bytes": 176,
        "slot_stride_bytes": 80,
        "input_dtype": int(Dtype.F32),
        "kv_dtype": 0,
    }
    return Case("concat_and_cache_mla", sizes, {"slot_mapping": Values.literal(3, -1, 0)}, seed=1)


# ---- what is derived -----------------------------------------------------------------------------


def same_places(expectation: Expectation, derived: RelatedPlan) -> bool:
    """Whether the related plan writes where it is said to: at the places it moves runs to, or at
    the same ones."""
    for part, expected in expectation.expected.items():
        name = expected.buffer or part
        begins = expected.offsets
        for runs in derived.moved.get(name, ()):
            begins = np.sort(runs.new_begins)
        if not np.array_equal(begins, derived.expectation.expected[part].offsets):
            return False
    return True


def same_output(expectation: Expectation, derived: RelatedPlan) -> bool:
    """Whether the reference wants the same bytes of both plans, at the places of each."""
    for part, expected in expectation.expected.items():
        other = derived.expectation.expected[part]
        places, values = bytes_of(expected.offsets, expected.values.shape[1]), expected.values
        new_places = bytes_of(other.offsets, other.values.shape[1])
        before = dict(zip(places.tolist(), values.ravel().tolist(), strict=True))
        after = dict(zip(new_places.tolist(), other.values.ravel().tolist(), strict=True))
        if moved := derived.moved.get(expected.buffer or part):
            old = np.concatenate([bytes_of(runs.begins, runs.size_bytes) for runs in moved])
            new = np.concatenate([bytes_of(runs.new_begins, runs.size_bytes) for runs in moved])
            to = dict(zip(old.tolist(), new.tolist(), strict=True))
            before = {to[place]: value for place, value in before.items() if place in to}
            after = {place: value for place, value in after.items() if place in before}
        if before != after:
            return False
    return True


def bytes_of(begins: npt.NDArray[np.int64], size_bytes: int) -> npt.NDArray[np.int64]:
    """The offset of each byte of runs of that size."""
    return (begins[:, None] + np.arange(size_bytes)).ravel()


def copied_pages(plan: Plan, expectation: Expectation) -> list[Bytes]:
    """What the source of every page that is copied holds, in the order of destinations."""
    operation = registry.operation(plan.case.operation)
    assert isinstance(operation, PageCopyOperation)
    source, _ = operation.caches(plan.arguments)
    buffer, readable = plan.buffers[source.name], expectation.footprint(source.name).may_read
    pages, size = operation.page_pairs(plan).moves[:, 0], plan.arguments["page_bytes"]
    return [
        contents.initial_bytes(buffer, readable, plan.case.seed, 0, at, at + size)
        for at in operation.page_offsets(plan, source, pages).ravel()[:64].tolist()
    ]


def mapped_payload(plan: Plan, expectation: Expectation) -> list[Bytes]:
    """What src holds of every entry, in the order of rows."""
    operation = registry.operation(plan.case.operation)
    assert isinstance(operation, TracedGather)
    rows = operation.row_map(plan)
    page = operation.pages(plan, rows).page_id[rows.page]
    buffer, readable = plan.buffers["src"], expectation.footprint("src").may_read
    seed, out = plan.case.seed, []
    for offsets, size in operation.entry_pieces(plan, page, rows.slot):
        out += [
            contents.initial_bytes(buffer, readable, seed, 0, at, at + size)
            for at in offsets[:64].ravel().tolist()
        ]
    return out


@pytest.mark.parametrize("name", registry.operations())
def test_related_plans_ask_for_the_same_output(name: str) -> None:
    """Of drawn cases: the reference of the related plan has the same bytes, and the payload of
    renamed pages went with them. Each relation of the operation applies to some of them."""
    operation = registry.operation(name)
    strategy = cases_for(name, hostile=False, refused=False)
    applied = dict.fromkeys(relations_of(operation), 0)
    for drawn in drawn_from(strategy, 30, 3, name):
        plan, expectation = drawn.plan, drawn.expectation
        for relation in applied:
            for derived in relation_judgements()[relation].related(operation, plan, expectation):
                applied[relation] += 1
                assert derived.change
                assert derived.plan.case is plan.case
                held = mapped_payload if isinstance(operation, TracedGather) else copied_pages
                if relation in MOVING and not isinstance(operation, WriteOperation):
                    wanted = held(plan, expectation)
                    found = held(derived.plan, derived.expectation)
                    assert all(map(np.array_equal, wanted, found))
                    assert same_places(expectation, derived), (relation, drawn.case)
                elif derived.plan is not plan:
                    assert same_output(expectation, derived), (relation, drawn.case)
    assert min(applied.values()) > 0, applied


def test_hostile_refused_and_empty_cases_are_not_related(base_case: Case, bench: MakeBench) -> None:
    """Only a case in contract that writes something must give the same in another form; launched
    again as it is, a hostile one must too."""
    hostile = replace(base_case, values={**base_case.values, "starts": Values.literal(1, 7, 5, 18)})
    refused = replace(base_case, overrides={"has_terminal": 2})
    empty = base_case.with_sizes(num_tokens=0)
    for case in (hostile, refused, empty):
        related = RELAUNCHES if case is hostile else ()
        run = bench(replace(case, relations=RELATIONS)).run()
        assert {one.relation for one in run.observation.related} == set(related)
        assert set(judge(run).checked) & set(RELATIONS) == set(related)


def test_entries_that_share_bytes_are_not_renamed(base_case: Case, bench: MakeBench) -> None:
    """Their payload would have to be in two places."""
    case = replace(base_case, relations=("renaming",)).with_sizes(slot_stride_bytes=8)
    assert not bench(case).run().observation.related


def test_what_is_changed_follows_from_the_seed(base_case: Case, bench: MakeBench) -> None:
    """A replay does the same; another seed something else."""
    changes = {}
    for seed in (5, 5, 6):
        made = bench(replace(base_case, relations=RELATIONS, seed=seed))
        related = made.run().observation.related
        found = {
            name: [one.derived.change for one in related if one.relation == name]
            for name in RELATIONS
        }
        assert all(found.values())
        assert changes.setdefault(seed, found) == found
    seeded = set(RELATIONS) - {"repeat"}
    assert all(changes[5][name] != changes[6][name] for name in seeded)


def test_an_unknown_relation_is_named(base_case: Case, write_case: Case) -> None:
    """So is one that an operation has nothing to relate by."""
    gather, write = (registry.operation(case.operation) for case in (base_case, write_case))
    with pytest.raises(CaseError, match="relations names 'poison'; cp_gather_cache has order"):
        asked_for(replace(base_case, relations=("poison",)), gather)
    with pytest.raises(CaseError, match="'splitting'; concat_and_cache_mla has order, rebasing"):
        asked_for(replace(write_case, relations=("splitting",)), write)


# ---- what is judged ------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", RELATIONS)
def test_another_byte_in_the_related_launch(
    base_case: Case, bench: MakeBench, relation: str
) -> None:
    """The first byte that differs is told with its place, both values and what was changed."""

    def change(after: Memory) -> None:
        after["dst"].put(16 * 9 + 7, other_byte(after["dst"].get(16 * 9 + 7)[0]))

    made = bench(replace(base_case, relations=(relation,)))
    assert judge(made.run()).clean
    verdict = judge(made.run(related_change=change))
    (failure,) = verdict.failures
    assert failure.identity == f"{relation}:dst"
    related, *_ = made.run().observation.related
    assert related.derived.change in failure.details["means"]
    assert "request 2, row 9 -> token 5 -> page" in failure.details["means"]
    assert failure.details["access"].startswith("dst row 9, byte 7 (offset 151): 0x")
    assert failure.details["effect"] == "1 byte of dst changed"


@pytest.mark.parametrize(
    "relation", [*RELAUNCHES, "renaming", "workspace", "rebasing", "restriding"]
)
def test_another_byte_in_the_related_write(
    write_case: Case, bench: MakeBench, relation: str
) -> None:
    """A writer's cell is compared with the cell of the renamed page."""

    def change(after: Memory) -> None:
        derived = made.run().observation.related[0].derived
        at = 80  # token 2 is stored in slot 0 of page 0
        for runs in derived.moved.get("cache", ()):
            at = dict(zip(runs.begins.tolist(), runs.new_begins.tolist(), strict=True))[0] + 80
        at -= 80
        after["cache"].put(at, other_byte(after["cache"].get(at)[0]))

    made = bench(replace(write_case, relations=(relation,)))
    assert judge(made.run()).clean
    (failure,) = judge(made.run(related_change=change)).failures
    assert failure.identity == f"{relation}:cache"
    assert "cache page 0 slot 0, byte 0 (offset 0): 0x" in failure.details["access"]
    assert "token 2 -> slot 0 -> page 0 offset 0" in failure.details["means"]
    if relation == "renaming":
        assert "at page" in failure.details["access"]


def test_a_related_launch_that_is_refused(base_case: Case, bench: MakeBench) -> None:
    """What is accepted once has to be accepted in every related form."""
    made = bench(replace(base_case, relations=("rebasing",)))
    (failure,) = judge(made.run(related_status=Status.REFUSED)).failures
    assert failure.identity == "rebasing:REFUSED"
    assert "bases moved" in failure.details["means"]


def test_a_fault_in_the_related_launch_alone(base_case: Case, bench: MakeBench) -> None:
    """The checked build names its line; one that both launches have is that of `bounds`."""
    fault = AccessFault(3, "src", 8, 4, "read", Site("kernel.cu", 7, (0, 0, 0), (1, 0, 0)))
    made = bench(replace(base_case, relations=("widening",)))
    only_related = made.run(build="checked", record=record(), related_record=record(fault))
    (failure,) = judge(only_related).failures
    assert failure.identity == "widening:fault:kernel.cu:7"
    assert failure.details["access"] == "read of src, bytes 8..11, which is forbidden"
    assert "kernel.cu:7" in failure.details["where"]
    both = judge(made.run(build="checked", record=record(fault)))
    assert {failure.judgement for failure in both.failures} == {"bounds"}


def test_poison_sees_a_destination_that_is_read(base_case: Case, bench: MakeBench) -> None:
    """What depends on the old value of a destination differs between the fills."""

    def change(after: Memory) -> None:
        after["dst"].put(16 * 3, bytes([after["dst"].old[16 * 3 + 96] ^ 0x0F]))

    verdict = judge(bench(base_case).run(change))
    assert "poison:dst" in {failure.identity for failure in verdict.failures}


def test_poison_leaves_contested_bytes_alone(base_case: Case, bench: MakeBench) -> None:
    """Which claimant a contested row is of may differ from launch to launch."""
    values = {**base_case.values, "starts": Values.literal(1, 7, 5, 18)}
    made = bench(replace(base_case, values=values))
    contested = made.expectation.expected["dst"].contested
    at = int(contested.offsets[0])
    wins = iter([False, True])

    def change(after: Memory) -> None:
        if next(wins):
            after["dst"].restore(at, 12)

    verdict = judge(made.run(change))
    assert verdict.clean, verdict.failures
    assert verdict.checked["poison"] > 0


@pytest.mark.parametrize(("second", "differs"), [(b"\x81\xff", False), (b"\x80\x7f", True)])
def test_free_nans_agree_with_each_other(
    base_case: Case, bench: MakeBench, second: bytes, differs: bool
) -> None:
    """Two NaNs are the same result where any will do; a NaN and an infinity are not."""
    made = bench(base_case)
    found = iter([b"\xc0\x7f", second])
    run = made.run(lambda after: after["dst"].put(16 * 3 + 4, next(found)))
    expected = run.expectation.expected["dst"]
    mask = np.zeros((len(expected.offsets), 6), dtype=np.bool_)
    mask[int(np.flatnonzero(expected.offsets == 16 * 3)[0]), 2] = True
    free = replace(expected, free_nans=FreeNans(Dtype.BF16, mask))
    expectation = replace(run.expectation, expected={"dst": free})
    first, again = run.observation.launches
    compared = compare(run.plan, expectation, (first, again), run.plan, {})
    assert bool(compared.differences) is differs


def test_caches_in_one_buffer_are_compared_through_it(bench: MakeBench) -> None:
    """Of K and V interleaved, the one that a byte belongs to is named."""
    sides = {
        "rows": 2,
        "row_stride_bytes": 16,
        "page_stride_bytes": 64,
        "slot_stride_bytes": 16,
        "head_stride_bytes": 16,
    }
    sizes = {f"{side}_{name}": n for name, n in sides.items() for side in ("key", "value")} | {
        "num_tokens": 2,
        "num_heads": 1,
        "head_elements": 4,
        "scale_count": 1,
        "page_size_tokens": 2,
        "num_pages": 4,
        "input_dtype": int(Dtype.F32),
        "kv_dtype": 0,
    }
    values = {"slot_mapping": Values.literal(3, 0)}
    places = {
        "key_cache": Placement(after_bytes=32),
        "value_cache": Placement(over=("key_cache", 32)),
    }
    relations = (*RELAUNCHES, "renaming", "workspace", "rebasing", "restriding")
    made = bench(
        Case("reshape_and_cache_flash", sizes, values, places, relations=relations, seed=2)
    )
    assert judge(made.run()).clean

    def change(after: Memory) -> None:
        for at in range(32, 48):  # slot 0 of page 0, that of the values
            after["key_cache"].put(at, other_byte(after["key_cache"].get(at)[0]))

    found = {failure.identity for failure in judge(made.run(related_change=change)).failures}
    assert found >= {f"{name}:value_cache" for name in relations if name not in MOVING}
    assert not any(identity.endswith("key_cache") for identity in found)
