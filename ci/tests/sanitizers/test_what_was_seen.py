"""What a sanitizer has reported stays reported, whatever cannot be checked afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ci.tests.planted import case_of, twin

from pagefuzz.harness import subjects
from pagefuzz.harness.campaign.journal import read_journal
from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.campaign.simplify import weight
from pagefuzz.harness.check import Checker
from pagefuzz.harness.commands import second_opinion
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import Finding
from pagefuzz.harness.sanitizers import watching
from pagefuzz.harness.sanitizers.cases import cases_of
from pagefuzz.harness.sanitizers.opinion import Opinion, opinion
from pagefuzz.harness.sanitizers.watched import Job, Launched
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import CaseClass, Outcome, Severity, Verdict

OPERATION = "cp_gather_cache"
UNIT = Unit(OPERATION, "bundled:page", hostile=True)

FAULT = """\
========= Invalid __global__ write of size 4 bytes
=========     at gather(args)+0x90 in cp_gather_cache.cu:12
=========     by thread (0,0,0) in block (0,0,0)
=========
"""
OTHER = FAULT.replace("write", "read").replace(":12", ":34")
#: What the tool says when the program has died, in a form that its reader does not know.
LAST_WORDS = """\
========= Error: process didn't terminate successfully
=========        The application may have hit an error
"""

HANGS = None  # as an exit code
BROKEN = None  # as a status


class Script:
    """Stands for the processes under the tool, and plays what becomes of each case in each.

    numbers  the cases that each process was given, in order
    """

    def __init__(self, becomes: Callable[[int, list[int]], str]) -> None:
        """becomes  number of a case and those of its process -> "ok", "hangs", "broken", with
        what is reported in front: "fault hangs" """
        self.becomes = becomes
        self.numbers: list[list[int]] = []
        self.last_words = ""
        self.summary = True

    def __call__(self, command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
        job = Job.loads(Path(command[-1]).read_text(encoding="utf-8"))
        self.numbers.append(sorted(job.cases))
        printed, errors = "", 0
        for number in sorted(job.cases):
            what = self.becomes(number, sorted(job.cases)) if job.tool else "ok"
            reports = [text for word, text in (("fault", FAULT), ("other", OTHER)) if word in what]
            errors += len(reports)
            printed += f"[pagefuzz begin {number}]\n{''.join(reports)}"
            if "hangs" in what:
                return HANGS, printed
            is_broken = "broken" in what
            launched = Launched(number, "a GPU", BROKEN if is_broken else 0, seconds=0.001)
            with open(job.results, "a", encoding="utf-8") as results:
                results.write(launched.dumps() + "\n")
            printed += f"[pagefuzz end {number}]\n"
            if is_broken:
                break
        printed += self.last_words
        if job.tool and self.summary:
            printed += f"========= ERROR SUMMARY: {errors} errors\n"
        return 86 if errors else 0, printed


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Script]:
    """`play(becomes)` lets no process start."""

    def set_up(becomes: Callable[[int, list[int]], str]) -> Script:
        script = Script(becomes)
        monkeypatch.setattr(watching, "_run", script)
        monkeypatch.setattr(watching, "watched_command", lambda tool, program: program)
        return script

    return set_up


def by_number(**becomes: str) -> Callable[[int, list[int]], str]:
    """`by_number(_2="hangs")`, whoever else is in the process."""
    return lambda number, process: becomes.get(f"_{number}", "ok")


def drawn(case_class: CaseClass) -> list[Case]:
    """Of cases that were drawn, the simplest first."""
    operation = registry.operation(OPERATION)
    every = sorted(cases_of(UNIT, 40, 0), key=weight)
    return [c for c in every if operation.expect(operation.plan(c)).case_class is case_class]


def asked(cases: Sequence[Case]) -> Opinion:
    return opinion("memcheck", UNIT, cases, backend="host", build="release", keep_going=True)


def seeds(count: int) -> list[Case]:
    case = drawn(CaseClass.IN_CONTRACT)[0]
    return [replace(case, seed=seed) for seed in range(count)]


# ---- compute-sanitizer ---------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["fault broken", "fault ok"], ids=["two processes", "one"])
def test_a_hang_does_not_undo_an_earlier_report(play, first):
    """In the process before, or in the same one."""
    play(by_number(_0=first, _1="hangs"))
    found = asked(seeds(3))
    (finding,) = found.findings
    assert (finding.case.seed, finding.repeats, finding.runs) == (0, 1, 1)
    assert finding.failure.title == "Invalid __global__ write of size 4 bytes"
    (problem,) = found.problems
    assert "memcheck did not come to an end within" in problem
    assert (found.launches, found.cases) == (1, 1)


def test_a_hang_without_a_report_is_no_opinion(play):
    """Nothing was found."""
    play(by_number(_1="hangs"))
    with pytest.raises(CannotCheckError, match="did not come to an end"):
        asked(seeds(3))


def test_a_report_and_a_hang_of_the_same_launch(play):
    """It is a finding, of that case."""
    play(by_number(_1="fault hangs"))
    found = asked(seeds(3))
    (finding,) = found.findings
    assert (finding.case.seed, finding.repeats, finding.runs) == (1, 1, 1)
    assert len(found.problems) == 2


def test_a_case_that_cannot_be_launched_alone_keeps_its_report(play):
    """As the output has it; and nothing else is launched, as each hang takes minutes."""
    script = play(
        lambda number, process: "hangs" if len(process) == 1 else ("fault", "other", "ok")[number]
    )
    found = asked(seeds(3))
    assert [(one.case.seed, one.runs) for one in found.findings] == [(0, 0), (1, 0)]
    assert script.numbers == [[0, 1, 2], [0]]
    (problem,) = found.problems
    assert problem.startswith("a case could not be launched again by itself: memcheck did not come")


def test_a_search_that_cannot_go_on_keeps_the_report(play):
    """It shows with all cases only, and half of them hang."""

    def becomes(number: int, process: list[int]) -> str:
        if len(process) == 5:
            return "fault" if number == 0 else "ok"
        return "ok" if len(process) == 1 else "hangs"

    script = play(becomes)
    found = asked(seeds(5))
    (finding,) = found.findings
    assert (finding.case.seed, finding.repeats, finding.runs) == (0, 0, 1)
    assert script.numbers == [[0, 1, 2, 3, 4], [0], [1, 2]]
    assert len(found.problems) == 1


@pytest.mark.parametrize(
    ("summary", "last_words"), [(False, ""), (False, LAST_WORDS), (True, LAST_WORDS)]
)
def test_what_a_tool_says_of_its_end_is_no_finding(play, summary, last_words):
    """Without an account only what tells of a kernel counts; with one, whatever was counted."""
    script = play(by_number())
    script.summary, script.last_words = summary, last_words
    with pytest.raises(CannotCheckError, match=r"without a summary|counts 0 errors"):
        asked(seeds(2))


def test_last_words_after_a_report_are_not_another_one(play):
    """One finding, and the problem has them."""
    script = play(by_number(_0="fault"))
    script.summary, script.last_words = False, LAST_WORDS
    found = asked(seeds(2))
    assert len(found.findings) == 1
    assert "process didn't terminate successfully" in found.problems[0]


@pytest.mark.parametrize(
    ("says", "count"), [("", 1), ("========= Internal Sanitizer Error: no\n", None)]
)
def test_a_device_that_broke_under_a_tool_that_failed_proves_nothing(play, says, count):
    """It does under one that has only no word for it."""
    script = play(by_number(_0="broken"))
    script.last_words = says
    if count is None:
        with pytest.raises(CannotCheckError, match="Internal Sanitizer Error"):
            asked(seeds(1))
    else:
        assert len(asked(seeds(1)).findings) == count


def test_a_failed_comparison_of_speed_leaves_a_unit_clean(monkeypatch, play):
    """Only the figure is missing; it is there if nothing fails."""
    script = play(by_number())
    assert asked(seeds(2)).slowdown == 1.0

    def fails(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
        tool = Job.loads(Path(command[-1]).read_text(encoding="utf-8")).tool
        return script(command, timeout_s) if tool else (-9, "")

    monkeypatch.setattr(watching, "_run", fails)
    found = asked(seeds(2))
    assert (found.slowdown, found.findings, found.problems) == (None, [], [])
    assert found.launches == 2


def test_reports_in_a_flood_are_read(monkeypatch, tmp_path):
    """The process is ended, with what it had reported first."""
    monkeypatch.setattr(watching, "MOST_PRINTED_BYTES", 2**20)
    report = tmp_path / "report"
    report.write_text(FAULT)
    with pytest.raises(watching._UnaccountedError, match="printed more than 1 MiB") as raised:
        watching._run(["sh", "-c", f"cat {report}; exec yes"], 600.0)
    (one,) = raised.value.output.reports
    assert one.where == "kernels/operations/cp_gather_cache.cu:12"


def test_half_a_line_of_a_process_that_was_ended_does_not_count():
    """It would be another fault."""
    assert watching._whole_lines(f"{FAULT}========= Inva") == FAULT
    assert watching._whole_lines("half") == ""


# ---- hostile cases on a subject that promises nothing about them ---------------------------------


@pytest.fixture
def uncontained(monkeypatch: pytest.MonkeyPatch) -> None:
    """No subject promises anything about hostile values."""
    inside = subjects.subject

    def subject(*names: str) -> subjects.Subject:
        return replace(inside(*names), promises_containment=False)

    monkeypatch.setattr(subjects, "subject", subject)


def mixed() -> list[Case]:
    """Hostile, in contract, hostile, in contract; the hostile ones are simpler."""
    hostile, sound = drawn(CaseClass.HOSTILE)[:2], drawn(CaseClass.IN_CONTRACT)[-2:]
    assert max(map(weight, hostile)) < min(map(weight, sound))
    return [hostile[0], sound[0], hostile[1], sound[1]]


@pytest.mark.parametrize("blamed", [(0, 1, 2), (0,)], ids=["both", "the hostile one only"])
def test_a_hostile_case_does_not_hide_one_in_contract(play, uncontained, blamed):
    """Whichever is simpler, and even if the output blames none in contract."""
    faulty = {0, 1, 2}
    play(lambda n, process: "fault" if n in (blamed if len(process) == 4 else faulty) else "ok")
    found = asked(mixed())
    (finding,) = found.findings
    assert finding.case == mixed()[1]
    assert finding.verdict.case_class is CaseClass.IN_CONTRACT
    assert (finding.repeats, finding.runs) == (1, 1)


def test_a_fault_of_hostile_cases_alone_is_a_note(play, uncontained):
    """Those in contract are launched once without them, however many faults there are."""
    script = play(by_number(_0="fault", _2="other"))
    found = asked(mixed())
    assert (found.findings, found.problems, len(found.notes)) == ([], [], 2)
    assert script.numbers.count([1, 3]) == 1


def test_without_a_case_in_contract_there_is_no_other_process(play, uncontained):
    """The fault is a note."""
    script = play(by_number(_0="fault"))
    found = asked(mixed()[::2])
    assert len(found.notes) == 1
    assert script.numbers == [[0, 1], [0]]


def interrupted(monkeypatch: pytest.MonkeyPatch, *blamed: int) -> None:
    printed = "".join(f"[pagefuzz begin {number}]\n{FAULT}" for number in blamed)

    def run(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
        raise watching._Stopped(printed)

    monkeypatch.setattr(watching, "_run", run)


@pytest.mark.parametrize(("blamed", "findings"), [((0, 1), 1), ((0, 2), 0)])
def test_an_interrupted_run_prefers_the_case_in_contract(
    monkeypatch, play, uncontained, blamed, findings
):
    """That only hostile ones were blamed, and no launch ended, is an interruption all the same."""
    play(by_number())
    interrupted(monkeypatch, *blamed)
    found = asked(mixed())
    assert found.was_interrupted
    assert [one.case for one in found.findings] == [mixed()[1]] * findings
    assert len(found.notes) == 1 - findings


# ---- the compiler's ------------------------------------------------------------------------------

TWIN = Unit(OPERATION, twin("table-width-unguarded"), hostile=True)
FAULTY = case_of("table-width-unguarded")


def checked(monkeypatch: pytest.MonkeyPatch, then: Mapping[int, Callable[[Verdict], Verdict]]):
    """The checker, until the check of that number."""
    inside = Checker.check
    count = 0

    def check(checker: Checker, case: Case) -> Verdict:
        nonlocal count
        count += 1
        return then.get(count, lambda verdict: verdict)(inside(checker, case))

    monkeypatch.setattr(Checker, "check", check)


def cannot(verdict: Verdict) -> Verdict:
    raise CannotCheckError("a launch left a thread running")


def as_clean(verdict: Verdict) -> Verdict:
    return replace(verdict, outcome=Outcome.CLEAN, failures=())


def as_note(verdict: Verdict) -> Verdict:
    notes = tuple(replace(one, severity=Severity.NOTE) for one in verdict.failures)
    return replace(verdict, outcome=Outcome.CLEAN, failures=notes)


def run_of(tmp_path: Path, tool: str = "ubsan") -> second_opinion._Run:
    return second_opinion._Run(tool, "host", tool, tmp_path, keep_going=True)


def journal_of(tmp_path: Path) -> list[dict]:
    return read_journal(tmp_path / "findings" / "journal.jsonl")


@pytest.mark.parametrize(
    ("first", "code", "stored"), [(None, 1, 1), (as_note, 2, 0), (as_clean, 2, 0)]
)
def test_what_cannot_be_checked_on_the_host_undoes_no_finding(
    monkeypatch, tmp_path, capsys, first, code, stored
):
    """Findings before it stay; a note or nothing before it is no pass."""
    checked(monkeypatch, {2: cannot} | ({1: first} if first else {}))
    run = run_of(tmp_path)
    run.watch(TWIN, lambda: [FAULTY] * 3)
    assert run.end() == code
    said = capsys.readouterr()
    assert "a launch left a thread running" in said.err
    assert ("ubsan watched 1 of 3 cases: " in said.err) is (first is not as_clean)
    assert ("hardening note, 1 case" in said.out) is (first is as_note)
    assert len(list((tmp_path / "findings").glob("*.json"))) == stored
    assert len(journal_of(tmp_path)) == 2 * stored  # as it was, and minimised
    problems = run.to_json([], 0)["problems"]
    assert "a launch left a thread running" in problems[TWIN.name]


def test_a_failing_case_is_in_the_journal_before_the_next_is_launched(monkeypatch, tmp_path):
    """A run that is killed then has it; it is there once, and a better one too."""
    seen = []

    def look(verdict: Verdict) -> Verdict:
        seen.append(journal_of(tmp_path))
        return as_clean(verdict)

    checked(monkeypatch, {2: look})
    run_of(tmp_path).watch(TWIN, lambda: [FAULTY, FAULTY])
    ((entry,),) = seen
    assert Case.from_json(entry["case"]) == FAULTY
    assert (entry["subject"], entry["build"]) == (TWIN.subject, "ubsan")
    texts = [json.dumps(one) for one in journal_of(tmp_path)]
    assert len(texts) == len(set(texts))
    (path,) = (tmp_path / "findings").glob("*.json")
    assert json.loads(path.read_text())["case"] in [one["case"] for one in journal_of(tmp_path)]


def test_what_a_tool_has_reported_is_in_the_journal_before_it_is_looked_for(play, tmp_path):
    """As the output has it, and then as it shows alone."""
    seen = []

    def becomes(number: int, process: list[int]) -> str:
        if len(process) == 1:
            seen.append([one["case"]["seed"] for one in journal_of(tmp_path)])
            return "fault" if number == 0 else "ok"
        return "fault" if number == 1 else "ok"

    play(becomes)
    run = second_opinion._Run("memcheck", "host", "release", tmp_path, keep_going=True)
    run.watch(UNIT, lambda: seeds(2))
    assert run.end() == 1
    assert seen[0] == [1]
    assert [one["case"]["seed"] for one in journal_of(tmp_path)] == [1, 0]


# ---- the command ---------------------------------------------------------------------------------


def a_finding() -> Finding:
    with Checker(OPERATION, TWIN.subject, "host", "ubsan") as checker:
        verdict = checker.check(FAULTY)
    return Finding(OPERATION, TWIN.subject, "host", "host", "ubsan", FAULTY, verdict)


def finds(monkeypatch: pytest.MonkeyPatch, finding: Finding, **fields: object) -> list[Unit]:
    """Every unit has that finding; those that were watched."""
    asked_of: list[Unit] = []

    def has_it(tool: str, unit: Unit, *_: object, **__: object) -> Opinion:
        asked_of.append(unit)
        return Opinion(unit, cases=1, launches=1, findings=[finding], **fields)

    monkeypatch.setattr(second_opinion, "opinion", has_it)
    return asked_of


def test_a_finding_is_saved_whatever_the_journal_says(monkeypatch, tmp_path, capsys):
    """And the other way round; either is a problem that the report has, and the code is 1."""
    finds(monkeypatch, a_finding())
    in_the_way = tmp_path / "one" / "findings" / "journal.jsonl"
    in_the_way.mkdir(parents=True)
    run = run_of(tmp_path / "one")
    run.watch(TWIN, list)
    assert run.end() == 1
    (path,) = (tmp_path / "one" / "findings").glob("*.json")
    said = capsys.readouterr()
    assert f"pagefuzz replay {path}" in said.out
    assert said.err.count("cannot store a failing case in") == 1
    assert "cannot store a failing case" in run.to_json([], 0)["problems"][TWIN.name]

    def full(finding: Finding, folder: Path) -> Path:
        raise CannotCheckError(f"cannot store a finding in {folder}: no space")

    monkeypatch.setattr(Finding, "save", full)
    run = run_of(tmp_path / "two")
    run.watch(TWIN, list)
    assert run.end() == 1
    assert len(journal_of(tmp_path / "two")) == 1
    assert "cannot store a finding" in run.to_json([], 0)["problems"][TWIN.name]


def test_problems_of_one_unit_do_not_replace_one_another(monkeypatch, tmp_path, capsys):
    """All are in the report, and are counted."""
    finding = a_finding()
    finds(monkeypatch, finding, problems=["one thing", "another", "one thing"])
    run = run_of(tmp_path)
    run.watch(TWIN, list)
    assert run.to_json([], 0)["problems"] == {TWIN.name: "one thing; another"}
    assert capsys.readouterr().err.count("one thing") == 1


@pytest.mark.parametrize("is_found", [True, False])
def test_an_interrupted_replay_keeps_what_it_has_shown(monkeypatch, capsys, is_found):
    """Exit 1 after a finding; else 2, and the other subjects are not asked in either case."""
    if is_found:
        asked_of = finds(monkeypatch, a_finding(), was_interrupted=True)
    else:
        asked_of = []

        def stopped(tool: str, unit: Unit, *_: object, **__: object) -> Opinion:
            asked_of.append(unit)
            raise KeyboardInterrupt

        monkeypatch.setattr(second_opinion, "opinion", stopped)
    code = second_opinion.replay_with_sanitizer("ubsan", FAULTY, None, None, None)
    assert code == (1 if is_found else 2)
    assert len(asked_of) == 1
    said = capsys.readouterr()
    assert "interrupted before every unit was watched" in said.err
    assert ("1 finding in 1 launch watched by ubsan" in said.out) is is_found
