"""The Triton form from drawn cases to verdicts, interpreted on the host."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings

from pagefuzz import check
from pagefuzz.harness import subjects
from pagefuzz.harness.check import Checker
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.registry import concerned, operation
from pagefuzz.oracles.relation import relations_of
from pagefuzz.oracles.verdict import CaseClass, Outcome, Verdict
from pagefuzz.strategies.indexer_gathers import REASONS, surface
from pagefuzz.strategies.refusals import lies_by_reason
from pagefuzz.strategies.registry import cases_for, shapes_for
from pagefuzz.strategies.reported import examples_for

OPERATION = "cp_gather_indexer_k_quant_cache_hinted"
SOURCE = subjects.KERNELS / "triton" / f"{OPERATION}.py"
FLAGS = frozenset({"checked", "triton"})


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    with Checker(OPERATION, "bundled:triton") as made:
        assert made.flags == FLAGS
        yield made


def silent_on_drawn_cases(checker: Checker, count: int) -> None:
    outcomes: Counter[tuple[CaseClass | None, Outcome]] = Counter()
    looked: Counter[str] = Counter()

    @seed(11)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases_for(OPERATION, hostile=True, refused=True))
    def run(case: Case) -> None:
        verdict = checker.check(case)
        assert verdict.outcome is Outcome.CLEAN, (case.dumps(), verdict.failures)
        outcomes[verdict.case_class, verdict.outcome] += 1
        looked.update(verdict.checked)

    run()
    assert {case_class for case_class, _ in outcomes} == set(CaseClass)
    concern = set(concerned(operation(OPERATION), FLAGS))
    few = set(relations_of(operation(OPERATION)))  # each is drawn in one case of ten
    assert concern - few <= set(looked) <= concern
    assert checker.deaths == 0


def test_the_form_is_silent_on_drawn_cases(checker: Checker) -> None:
    """25 cases of every class, overflow scale among them: nothing fails, every judgement looks."""
    silent_on_drawn_cases(checker, 25)


@pytest.mark.slow
def test_the_form_is_silent_on_many_drawn_cases(checker: Checker) -> None:
    """1,000 cases."""
    silent_on_drawn_cases(checker, 1000)


def test_every_lie_is_refused_by_the_launcher(checker: Checker) -> None:
    """Each reason, told in each way about one case with rows and every optional buffer."""
    case = find(
        cases_for(OPERATION, hostile=False, refused=False),
        lambda one: {"seq_starts", "counts"} <= set(one.values) and one.sizes["num_tokens"] > 1,
        settings=settings(database=None, phases=[Phase.generate]),
    )
    lies = lies_by_reason(surface(case))
    assert set(lies) == set(REASONS)
    for told in lies.values():
        for lie in told:
            verdict = checker.check(lie.told(case))
            assert verdict.case_class is CaseClass.REFUSED, lie
            assert verdict.outcome is Outcome.CLEAN, (lie, verdict.failures)


def test_reported_cases_are_right_here(checker: Checker) -> None:
    """Reports 8, 9, 10, 14, 19 and 29: what others got wrong; and what nobody reported."""
    reports = examples_for(OPERATION)
    numbers = {"8", "9", "10", "14", "19", "29"}
    assert {name.split("-")[0] for name in reports} == {*numbers, "many", "production"}
    for name, case in reports.items():
        verdict = checker.check(case)
        assert verdict.outcome is Outcome.CLEAN, (name, verdict.failures)
        hostile = name.startswith("production-")
        assert verdict.case_class is (CaseClass.HOSTILE if hostile else CaseClass.IN_CONTRACT)


def test_compile_time_sizes_are_found_and_all_else_is_right() -> None:
    """Report 32: each of the four sizes is named; the rows are right all the same."""
    with Checker(OPERATION, "bundled:triton-compile-time") as checker:
        for case in (shapes_for(OPERATION)[2], examples_for(OPERATION)["19-uncovered-rows"]):
            verdict = checker.check(case)
            assert verdict.outcome is Outcome.FAILED
            assert {failure.judgement for failure in verdict.failures} == {"recompile"}
            named = {failure.key[0] for failure in verdict.failures}
            assert named == {"num_requests", "num_tokens", "num_pages", "table_width"}


# ---- faults planted by hand ----------------------------------------------------------------------

MakeTwin = Callable[..., str]


@pytest.fixture
def twin(tmp_path: Path) -> MakeTwin:
    """Makes a twin of pairs (find, with); its name as a subject."""

    def make(*replacements: tuple[str, str], name: str = "planted") -> str:
        tables = "".join(
            f"\n[[replace]]\nfind = '''{find}'''\nwith = '''{other}'''\n"
            for find, other in replacements
        )
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f'operation = "{OPERATION}"\nschedule = "triton"\nbreaks = "planted"\n{tables}'
        )
        return f"twin:{path}"

    return make


def line_of(text: str) -> int:
    (found,) = [n for n, line in enumerate(SOURCE.read_text().splitlines(), 1) if text in line]
    return found


def two_requests(**values: Values) -> Case:
    """Rows 0 to 2 of two requests, in a table of one column; the second one begins at slot 1."""
    case = examples_for(OPERATION)["19-uncovered-rows"].with_sizes(
        page_size_tokens=2, page_stride_bytes=264
    )
    told = {
        "starts": Values.literal(0, 1, 3),
        "seq_starts": Values.literal(0, 1),
        "token_to_seq": Values("owners"),
        **values,
    }
    return Case(OPERATION, case.sizes, {**case.values, **told}, seed=3)


def test_a_forbidden_read_is_named_with_its_line(twin: MakeTwin) -> None:
    """A table read past its row: found though the value is thrown away, suppressed, at its line."""
    name = twin(("    if page >= table_width:", "    if page >= table_width + 1:"))
    verdict = check(two_requests(), name)
    first = verdict.failures[0]
    assert first.title == "read past block_table"
    line = line_of("physical = tl.load(block_table")
    assert first.details["where"] == (
        f"kernels/triton/{OPERATION}.py:{line}  block (2,0,0) thread (0,0,0)"
    )
    assert first.details["access"].startswith("reads 4 bytes at block_table[2] (bytes 8..11 of 8)")
    assert "request 1, row 2 -> token 2 -> logical page 1 of 1" in first.details["means"]


def test_a_forbidden_update_and_a_store_are_suppressed(twin: MakeTwin) -> None:
    """An atomic past the counters and a store past a row, each at its line; neither happens."""
    name = twin(
        ("        tl.atomic_add(counts + 1, 1, mask=first_of_page, sem=\"relaxed\")",
         "        tl.atomic_add(counts + 2, 1, mask=first_of_page, sem=\"relaxed\")"),
        ("    tl.store(dst_k + row * dst_k_row_stride_bytes + byte, copied, mask=byte < head_dim)",
         "    tl.store(dst_k + row * dst_k_row_stride_bytes + byte + 1, copied)"),
    )  # fmt: skip
    verdict = check(two_requests(counts=Values.literal(0, 0)), name)
    titles = {failure.title for failure in verdict.failures}
    assert {"atomic past counts", "write past dst_k"} <= titles or {
        "atomic past counts",
        "write of forbidden bytes of dst_k",
    } <= titles
    assert not any(failure.judgement == "untouched" for failure in verdict.failures)
    lines = {f.details["where"].split()[0] for f in verdict.failures if f.judgement == "bounds"}
    assert all(re.fullmatch(rf"kernels/triton/{OPERATION}\.py:\d+", line) for line in lines)


def test_an_unchecked_build_dies_of_what_it_does(twin: MakeTwin) -> None:
    """Interpreted without checks, a wild store is a death; the next case runs."""
    wild = ("    tl.store(dst_k + row * dst_k_row_stride_bytes + byte, copied,",
            "    tl.store(dst_k + (row + 1) * 2**34 + byte, copied,")  # fmt: skip
    with Checker(OPERATION, twin(wild), build="release") as checker:
        verdict = checker.check(two_requests())
        assert [failure.judgement for failure in verdict.failures] == ["death"]
        assert checker.check(two_requests().with_sizes(num_tokens=0)).clean
        assert checker.deaths == 1


def test_a_kernel_that_does_not_run_is_a_failed_launch(twin: MakeTwin) -> None:
    """What Triton says of it is told, as one sentence."""
    name = twin(("    byte = tl.arange(0, key_tile)", "    byte = tl.arange(0, no_such_name)"))
    verdict = check(two_requests(), name)
    first = verdict.failures[0]
    assert (first.judgement, first.key) == ("launch", ("LAUNCH_FAILED",))
    assert "no_such_name" in first.details["access"]


def found_by_drawing(name: str, wanted: set[str]) -> Verdict:
    """The first failing drawn case of a twin."""
    with Checker(OPERATION, name) as checker:
        failing = find(
            cases_for(OPERATION, hostile=True, refused=False),
            lambda case: checker.check(case).outcome is Outcome.FAILED,
            settings=settings(database=None, max_examples=2000, phases=[Phase.generate]),
        )
        verdict = checker.check(failing)
    assert verdict.failures[0].judgement in wanted
    return verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replacements", "wanted"),
    [
        ([("(request < 0) | (request >= num_requests)", "request < 0")], {"bounds"}),
        ([("    if (row < row_begin) | (row >= row_end):", "    if row < row_begin:")], {"bounds"}),
        ([(" | (slot == 0))", ")")], {"counts"}),
        ([("tl.where(physical == -1, 0, 1)", "tl.where(physical == -1, 1, 0)")], {"counts"}),
        ([("page_size_tokens * head_dim) // 4", "page_size_tokens) // 4")], {"bounds", "output"}),
        ([("physical * page_stride_bytes", "physical * (page_stride_bytes.to(tl.int32))")],
         {"bounds", "output"}),
        ([("tl.minimum(tl.maximum(start, 0), num_tokens)", "start")], {"counts"}),
    ],
    ids=["hint range", "hint cover", "first of page", "counter", "scales", "stride", "clamp"],
)  # fmt: skip
def test_drawn_cases_find_faults(
    twin: MakeTwin, replacements: list[tuple[str, str]], wanted: set[str]
) -> None:
    """A few hundred drawn cases are mostly enough; of unclamped starts one in 250 tells."""
    found_by_drawing(twin(*replacements), wanted)


# ---- builds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", ["asan", "ubsan", "coverage", "checked,coverage"])
def test_what_a_triton_kernel_cannot_be_built_as_is_said(build: str) -> None:
    """Neither compilers' sanitizers nor gcov know of it."""
    with pytest.raises(CannotCheckError, match="release, checked or inject, not as"):
        Checker(OPERATION, "bundled:triton", build=build)


def test_a_module_that_does_not_load_is_said(twin: MakeTwin) -> None:
    """The failure of its import, in one sentence, before any case runs."""
    name = twin(("import triton.language as tl", "import triton.no_language as tl"))
    with pytest.raises(CannotCheckError, match=r"cannot load .*no_language"):
        check(two_requests(), name)
