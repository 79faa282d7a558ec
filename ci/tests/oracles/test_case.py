"""Cases survive their JSON form, and malformed ones are named in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, CaseError, Placement, Values, load_case
from pagefuzz.oracles.registry import operation

OPERATION = operation("cp_gather_cache")
I64 = st.integers(-(2**63), 2**63 - 1)
names = st.text("abcdefg_", min_size=1, max_size=6)
values = st.one_of(
    st.builds(
        lambda items, edits: Values("literal", {"values": tuple(items)}, edits),
        st.lists(I64, max_size=4),
        st.dictionaries(st.integers(0, 99), I64, max_size=3),
    ),
    st.builds(lambda a, b: Values("ramp", {"first": a, "step": b}), I64, I64),
    st.builds(
        lambda a, b: Values("cumulative", {"first": a, "steps": tuple(b)}), I64, st.lists(I64)
    ),
    st.sampled_from([Values("identity"), Values("permuted", {"seed": 3})]),
)
placements = st.builds(
    Placement,
    st.integers(0, 255),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
    st.none() | st.tuples(names, I64),
)
cases = st.builds(
    Case,
    names,
    st.dictionaries(names, I64, max_size=4),
    st.dictionaries(names, values, max_size=3),
    st.dictionaries(names, placements, max_size=3),
    st.dictionaries(names, I64, max_size=3),
    st.integers(0, 2**64 - 1),
    st.lists(names, max_size=2).map(tuple),
)


@given(cases)
def test_json_round_trip(case: Case) -> None:
    """A case read back from its text has the same text, and the same content up to defaults."""
    back = Case.from_json(json.loads(case.dumps()))
    assert back.dumps() == case.dumps()
    kept = {name: p for name, p in case.placements.items() if p != Placement()}
    assert back == replace(case, placements=kept)


def document(base: Case, **changes: Any) -> dict[str, Any]:
    return {**base.to_json(), **changes}


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"pagefuzz_case": 2}, 'needs "pagefuzz_case": 1'),
    ({"pagefuzz_case": None}, "got None"),
    ({"operation": 5}, "operation must be the name"),
    ({"sizes": [1]}, "sizes must be an object"),
    ({"sizes": {"num_requests": "3"}}, "num_requests must be an integer, got '3'"),
    ({"sizes": {"num_requests": True}}, "num_requests must be an integer, got True"),
    ({"sizes": {"num_requests": 1.0}}, "num_requests must be an integer, got 1.0"),
    ({"sizes": {"num_requests": 2**63}}, "must lie in -9223372036854775808"),
    ({"seed": -1}, "seed=-1 must lie in 0.."),
    ({"relations": "renaming"}, "relations must be a list of names, got 'renaming'"),
    ({"relations": [1]}, "relations must be a list of names, got [1]"),
    ({"extra": 1}, "the case has unknown key 'extra'"),
    ({"values": {"starts": 3}}, "values.starts must be an object"),
    ({"values": {"starts": {"recipe": "random"}}}, "must be one of literal"),
    ({"values": {"starts": {"recipe": ["literal"]}}}, "must be one of literal"),
    ({"values": {"starts": {}}}, "values.starts.recipe=None must be one of"),
    ({"values": {"starts": {"recipe": "ramp", "first": 1}}}, "needs 'step'"),
    ({"values": {"starts": {"recipe": "identity", "seed": 1}}}, "unknown key 'seed'"),
    ({"values": {"starts": {"recipe": "literal", "values": 3}}}, "must be a list of integers"),
    ({"values": {"starts": {"recipe": "literal", "values": [None]}}}, "values[0] must be an int"),
    (
        {"values": {"starts": {"recipe": "identity", "edits": {"-1": 1}}}},
        "keys are element indices",
    ),
    (
        {"values": {"starts": {"recipe": "identity", "edits": {"01": 1}}}},
        "keys are element indices",
    ),
    (
        {"values": {"starts": {"recipe": "identity", "edits": {"9" * 5000: 1}}}},
        "keys are element indices",
    ),
    ({"placements": {"src": {"offset_bytes": 256}}}, "offset_bytes=256 must lie in 0..255"),
    ({"placements": {"src": {"offset": 1}}}, "unknown key 'offset'"),
    ({"placements": {"src": {"over": ["dst"]}}}, "over must be [buffer name, offset_bytes]"),
    ({"placements": {"src": {"slack_bytes": -1}}}, "slack_bytes=-1 must lie"),
    ({"overrides": {"src.rank": None}}, "overrides.src.rank must be an integer"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[m for _, m in BROKEN])
def test_malformed_document(
    base_case: Case, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Each mistake gives one sentence that names the file and the place."""
    path = tmp_path / "case.json"
    path.write_text(json.dumps(document(base_case, **changes)))
    with pytest.raises(CaseError) as caught:
        load_case(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "\n" not in text
    assert len(text) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a JSON case file"),
        ("{", "not a JSON case file"),
        ("[" * 100_000, "not a JSON case file"),
        ('{"pagefuzz_case": ' + "9" * 5000 + "}", "not a JSON case file"),
        ("[]", "a case must be an object"),
        ("null", "a case must be an object"),
        ('{"pagefuzz_finding": 1}', "a case must be an object"),
    ],
    ids=lambda text: text[:12],
)
def test_not_a_case_file(tmp_path: Path, text: str, message: str) -> None:
    """Any other file is told to be none."""
    path = tmp_path / "case.json"
    path.write_text(text)
    with pytest.raises(CaseError, match=message):
        load_case(path)


def test_missing_or_binary_file(tmp_path: Path) -> None:
    """A file that cannot be read, or is no text, gives the same kind of sentence."""
    with pytest.raises(CaseError, match="cannot read the case file"):
        load_case(tmp_path / "none.json")
    with pytest.raises(CaseError, match="cannot read the case file"):
        load_case(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CaseError, match="not a JSON case file"):
        load_case(tmp_path / "binary.json")


def test_case_inside_a_finding(base_case: Case, tmp_path: Path) -> None:
    """A finding file holds its case."""
    path = tmp_path / "finding.json"
    path.write_text(json.dumps({"pagefuzz_finding": 1, "case": base_case.to_json()}))
    assert load_case(path) == base_case


PLAN_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"operation": "other"}, "the case is of 'other'"),
    ({"sizes": {"num_requests": 3}}, "sizes of cp_gather_cache lacks"),
    ({"values": {"starts": Values.literal(1, 7, 7, 18)}}, "needs 'block_table'"),
    ({"values": {"block_table": Values("identity")}}, "needs 'starts'"),
    ({"values": {"src": Values("identity")}}, "needs 'block_table'"),
    ({"overrides": {"src.size": 1}}, "names unknown 'src.size'"),
    ({"overrides": {"src.data": 16}}, "must be 0, a null pointer"),
    ({"placements": {"cache": Placement()}}, "names unknown buffer 'cache'"),
    ({"placements": {"src": Placement(over=("src", 0))}}, "must name another buffer"),
    ({"placements": {"src": Placement(over=("xyz", 0))}}, "must name another buffer"),
    ({"placements": {"src": Placement(over=("dst", -4))}}, "must lie in dst's memory"),
    ({"placements": {"src": Placement(1, over=("dst", 0))}}, "no workspace of its own"),
    ({"overrides": {"src.extent_bytes": 10**6}}, "src is said to have 1000000 bytes, it has"),
]


@pytest.mark.parametrize(("changes", "message"), PLAN_ERRORS, ids=[m for _, m in PLAN_ERRORS])
def test_case_that_does_not_fit_the_operation(
    base_case: Case, changes: dict[str, Any], message: str
) -> None:
    """What only the operation can know is told when the case is planned."""
    with pytest.raises(CaseError, match=message):
        OPERATION.plan(replace(base_case, **changes))


VALUE_ERRORS: list[tuple[str, Values, str]] = [
    ("starts", Values.literal(1, 2), "starts needs 4 values, the recipe 'literal' has 2"),
    ("starts", Values("cumulative", {"first": 0, "steps": (1,)}), "starts needs 4 values"),
    ("starts", Values("identity"), "starts cannot have recipe 'identity'"),
    ("starts", Values("ramp", {"first": 0}), "needs the integer 'step'"),
    ("starts", Values.literal(1, 2, 3, 2**31), r"starts\[3\]=2147483648 must lie in"),
    ("starts", Values("ramp", {"first": 0, "step": 2**30}), r"starts\[2\]=2147483648"),
    ("starts", Values("constant", {"value": 1}, {4: 1}), "an edit at element 4"),
    ("starts", Values("constant", {"value": 1}, {1: -(2**31) - 1}), r"starts\[1\]=-2147483649"),
    ("seq_starts", Values("constant", {"value": 2**31}), r"seq_starts\[0\]=2147483648"),
    ("counts", Values.literal(0, 2**63), r"counts\[1\]=9223372036854775808"),
    ("counts", Values.literal(0), "counts needs 2 values"),
    ("block_table", Values.literal(1, 2), "block_table needs 3 x 4 = 12 values"),
    ("block_table", Values.literal(*[2**31] * 12), r"block_table\[0\]=2147483648"),
    ("block_table", Values("ramp", {"first": 0, "step": 1}), "a table's is one of"),
    ("block_table", Values("permuted"), "needs the integer 'seed'"),
    ("block_table", Values("identity", edits={12: 1}), "an edit at element 12"),
    ("block_table", Values("identity", edits={-1: 1}), "an edit at element -1"),
    ("block_table", Values("identity", edits={2**70: 1}), "an edit at element 1180591620717"),
    ("block_table", Values("identity", edits={3: 2**31}), r"block_table\[3\]=2147483648"),
]


@pytest.mark.parametrize(
    ("name", "wrong", "message"), VALUE_ERRORS, ids=[m for _, _, m in VALUE_ERRORS]
)
def test_values_that_cannot_be_expanded(
    base_case: Case, name: str, wrong: Values, message: str
) -> None:
    """A recipe of the wrong kind, length or range is told with its buffer and element."""
    with pytest.raises(CaseError, match=message):
        OPERATION.plan(replace(base_case, values={**base_case.values, name: wrong}))


@pytest.mark.parametrize(
    ("sizes", "starts", "message"),
    [
        ({"num_requests": 2**31 - 1}, Values("constant", {"value": 0}), "at most 4194304"),
        (
            {"num_tokens": 2**22, "dst_rows": 2**22},
            Values.literal(0, 2**22, 2**22, 2**22),
            "maps 4194304 rows",
        ),
        (
            {
                "num_tokens": 2**20,
                "dst_rows": 2**20,
                "entry_bytes": 2**13,
                "slot_stride_bytes": 2**13,
                "page_stride_bytes": 2**15,
                "dst_row_stride_bytes": 2**13,
            },
            Values.literal(0, 2**20, 2**20, 2**20),
            "hold 8589934592 bytes; at most",
        ),
        ({"page_stride_bytes": 2**41}, Values.literal(1, 7, 7, 18), "bytes of memory; at most"),
    ],
    ids=["elements", "rows", "payload", "memory"],
)
def test_absurd_expansions(
    base_case: Case, sizes: dict[str, int], starts: Values, message: str
) -> None:
    """A case that no run could hold is an error with the figure, not a machine that swaps."""
    case = base_case.with_sizes(**sizes)
    case = replace(case, values={**case.values, "starts": starts})
    if "num_requests" in sizes:
        case = replace(case, values={k: v for k, v in case.values.items() if k != "seq_starts"})
    with pytest.raises(CaseError, match=message):
        OPERATION.plan(case)
