"""Cases under a compute-sanitizer, which is a stand-in: processes, attribution, findings."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pagefuzz.harness.build import BuildSpec, commands
from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.commands import second_opinion
from pagefuzz.harness.commands.second_opinion import backend_and_build
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import assert_fixed, load_finding
from pagefuzz.harness.reporters.figures import amount
from pagefuzz.harness.running import Assignment
from pagefuzz.harness.sanitizers import watching
from pagefuzz.harness.sanitizers.cases import LIMIT_BYTES, cases_of
from pagefuzz.harness.sanitizers.opinion import Opinion, opinion
from pagefuzz.harness.sanitizers.reports import parse
from pagefuzz.harness.sanitizers.watched import Launched
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import CaseClass
from pagefuzz.strategies.reported import examples_for

OPERATION = "cp_gather_cache"
UNIT = Unit(OPERATION, "bundled:page", hostile=True)
NOBODY = "no case holds this"
FAULTY_SEED = 4242
FAULTY = f'"seed": {FAULTY_SEED}'


def plain_case() -> Case:
    """A small case in contract whose table has memory."""
    operation = registry.operation(OPERATION)
    for case in examples_for(OPERATION).values():
        plan = operation.plan(case)
        sizes = [buffer.memory_bytes for buffer in plan.buffers.values()]
        if (
            sum(sizes) < LIMIT_BYTES
            and plan.buffers["block_table"].memory_bytes
            and operation.expect(plan).case_class is CaseClass.IN_CONTRACT
        ):
            return case
    raise AssertionError("there is one")


def cases(*seeds: int) -> list[Case]:
    return [replace(plain_case(), seed=seed) for seed in seeds]


def asked(seeds: tuple[int, ...], **options: bool) -> Opinion:
    return opinion("memcheck", UNIT, cases(*seeds), backend="host", build="release", **options)


@pytest.mark.parametrize(
    ("way", "seeds"),
    [
        ("", (1, FAULTY_SEED)),
        ("late", (FAULTY_SEED, 2)),
        pytest.param("late", (1, 2, FAULTY_SEED, 4, 5, 6), marks=pytest.mark.slow),
    ],
)
def test_a_report_is_of_the_case_that_shows_it_alone(fake_sanitizer, way, seeds):
    """Printed at once or at the end: the finding has the case, buffer and line."""
    fake_sanitizer(FAULTY, way)
    found = asked(seeds)
    (finding,) = found.findings
    assert finding.case.seed == FAULTY_SEED
    assert finding.failure.judgement == "memcheck"
    assert finding.failure.title.endswith("past block_table")
    assert finding.failure.details["where"].startswith("kernels/operations/cp_gather_cache.cu:88")
    assert (finding.repeats, finding.runs) == (1, 1)
    text = " ".join(finding.text().split())
    assert text.startswith("MEMCHECK Invalid __global__ read of size 4 bytes, past block_table")
    assert "memcheck (compute-sanitizer)" in text
    assert "1 of 1 further runs, of this case alone, failed the same way; as it was drawn" in text


def test_a_report_that_does_not_repeat_is_a_finding(fake_sanitizer):
    """It names the case that was running, and says that it did not repeat."""
    fake_sanitizer(FAULTY, "only together")
    (finding,) = asked((1, FAULTY_SEED)).findings
    assert finding.case.seed == FAULTY_SEED
    assert finding.repeats == 0
    assert finding.runs >= 1
    said = "0 of 1 further runs, of this case alone, failed the same way; nor was it reported of "
    assert f"{said}1 other case launched alone; as it was drawn" in " ".join(finding.text().split())


@pytest.mark.parametrize(
    ("way", "faulty", "said"),
    [
        ("no summary", NOBODY, "memcheck ended without a summary"),
        ("dies", NOBODY, "ended without a summary (ended by signal 9)"),
        ("does not start", FAULTY, "Target application terminated before first instrumented"),
        ("miscounts", FAULTY, "memcheck counts 0 errors and describes 1"),
    ],
)
def test_no_clean_account_is_no_opinion(fake_sanitizer, way, faulty, said):
    """Whatever else was printed; what the account itself denies is no report."""
    fake_sanitizer(faulty, way)
    with pytest.raises(CannotCheckError) as raised:
        asked((FAULTY_SEED,))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("no summary", "memcheck ended without a summary"),
        ("dies", "ended without a summary (ended by signal 9)"),
    ],
)
def test_a_report_without_an_account_is_a_finding(fake_sanitizer, way, said):
    """And what is missing is a problem."""
    fake_sanitizer(FAULTY, way)
    found = asked((FAULTY_SEED,))
    (finding,) = found.findings
    assert (finding.case.seed, finding.runs) == (FAULTY_SEED, 0)
    (problem,) = found.problems
    assert said in problem
    assert found.cases == 1


def test_nothing_watched_is_no_opinion(fake_sanitizer):
    """Cases that were not run are no pass."""
    fake_sanitizer(NOBODY)
    with pytest.raises(CannotCheckError, match="watched nothing"):
        opinion("memcheck", UNIT, [], backend="host", build="release")


def test_a_process_that_takes_too_long_is_ended(fake_sanitizer):
    """No case is taken for clean then."""
    fake_sanitizer(NOBODY)
    from pagefuzz.harness.check import Checker

    with Checker(OPERATION, "bundled:page", "host", "release") as checker:
        watcher = watching.Watcher("memcheck", checker.assignment, timeout_s=0.2)
        with pytest.raises(CannotCheckError, match=r"did not come to an end within 0\.2 s"):
            watcher.watch({0: plain_case()})


@pytest.mark.parametrize(("printed", "is_blind"), [("========= X\n", False), ("", True)])
def test_a_tool_must_see_its_canary(monkeypatch, printed, is_blind):
    """Silence about a deliberate fault is blindness."""
    monkeypatch.setattr(watching, "build", lambda *_: Path("canaries.so"))
    monkeypatch.setattr(watching, "run", lambda *_: parse(printed))
    if is_blind:
        with pytest.raises(CannotCheckError, match="did not report the deliberate fault"):
            watching.prove("racecheck")
    else:
        assert watching.prove("racecheck") == 1


def test_the_canaries_compile_with_nvcc(tmp_path, monkeypatch):
    """Release, sm_90, and not one warning."""
    monkeypatch.setenv("PAGEFUZZ_CUDA_ARCH", "90")
    (command,) = commands(watching.CANARIES, BuildSpec.parse("cuda", "release"), tmp_path / "o.so")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "warning" not in done.stdout + done.stderr


def test_a_launch_that_breaks_the_device_ends_its_process_only(monkeypatch):
    """The other cases are launched in another one, and what no tool has a word for is a report."""
    started = []

    def run(job, folder, timeout_s):
        started.append(list(job.cases))
        lines = []
        for number in job.cases:
            broken = number == 1
            status = None if broken else 0
            lines.append(Launched(number, "a GPU", status, "launch failure" if broken else ""))
            if broken:
                break
        Path(job.results).write_text("".join(one.dumps() + "\n" for one in lines))
        return parse("========= ERROR SUMMARY: 0 errors\n")

    monkeypatch.setattr(watching, "run", run)
    assignment = Assignment(OPERATION, "", "", "", "cuda", "release", promises_containment=True)
    seen = watching.Watcher("memcheck", assignment).watch(dict(enumerate(cases(1, 2, 3, 4))))
    assert started == [[0, 1, 2, 3], [2, 3]]
    assert seen.launches == 4
    (report,) = seen.reports
    assert (report.case, report.kind) == (1, "the device reports launch failure")


def test_printing_without_end_is_no_opinion(monkeypatch):
    """The process is ended long before its time is up: what it prints would fill the memory."""
    monkeypatch.setattr(watching, "MOST_PRINTED_BYTES", 2**20)
    with pytest.raises(CannotCheckError, match="yes and what it watched printed more than 1 MiB"):
        watching._run(["yes"], 600.0)


@pytest.mark.parametrize(
    ("program", "timeout_s", "code"), [("echo x; exit 3", 60.0, 3), ("echo x; sleep 60", 0.5, None)]
)
def test_a_process_has_a_code_or_had_to_be_ended(program, timeout_s, code):
    """With what it printed until then."""
    assert watching._run(["sh", "-c", program], timeout_s) == (code, "x\n")


def test_a_hang_names_its_case(fake_sanitizer, monkeypatch):
    """What had begun and not ended when time was up."""
    fake_sanitizer(FAULTY)
    printed = "========= COMPUTE-SANITIZER\n[pagefuzz begin 0]\n"
    monkeypatch.setattr(watching, "_run", lambda *_: (None, printed))
    with pytest.raises(CannotCheckError, match=f"did not come to an end.*in the launch.*{FAULTY}"):
        asked((FAULTY_SEED,))


def test_an_interrupted_run_is_no_pass(fake_sanitizer, tmp_path, capsys):
    """Exit code 2, or 1 if something had been found."""
    fake_sanitizer(FAULTY)
    run = second_opinion._Run("memcheck", "host", "release", tmp_path, keep_going=False)
    run.interrupt()
    assert run.end() == 2
    run.watch(UNIT, lambda: cases(FAULTY_SEED))
    assert run.end() == 1
    assert "interrupted" in capsys.readouterr().err


def interrupted_once(flag: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody presses Ctrl-C while a process is waited for, as soon as there is such a file."""
    inside = subprocess.Popen.wait

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None and flag.exists():
            flag.unlink()
            raise KeyboardInterrupt
        return inside(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)


@pytest.mark.parametrize(
    ("seeds", "late", "case_seed"),
    [((1, FAULTY_SEED), False, FAULTY_SEED), ((FAULTY_SEED, 2, 3), True, 3)],
    ids=["at once", "late"],
)
def test_reports_before_an_interruption_are_findings(
    fake_sanitizer, monkeypatch, tmp_path, capsys, seeds, late, case_seed
):
    """Of the case that the output makes them one of: nobody waits for another run."""
    flag = tmp_path / "flag"
    fake_sanitizer(FAULTY, way=f"{'late, ' if late else ''}waits, {flag}")
    interrupted_once(flag, monkeypatch)
    run = second_opinion._Run("memcheck", "host", "release", tmp_path, keep_going=False)
    with pytest.raises(KeyboardInterrupt):
        run.watch(UNIT, lambda: cases(*seeds))
    run.interrupt()
    assert run.end() == 1
    assert "not repeated" in " ".join(capsys.readouterr().out.split())
    (stored,) = (tmp_path / "findings").glob("memcheck-*.json")
    assert load_finding(stored).case.seed == case_seed
    assert len((tmp_path / "findings" / "journal.jsonl").read_text().splitlines()) == 1


def test_an_interruption_without_reports_is_one(fake_sanitizer, monkeypatch, tmp_path):
    """Nothing is known of the unit then."""
    flag = tmp_path / "flag"
    fake_sanitizer(NOBODY, way=f"waits, {flag}")
    interrupted_once(flag, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        asked((1, 2))


def test_an_interruption_while_the_case_is_looked_for_loses_no_report(fake_sanitizer, monkeypatch):
    """The run with all cases has told; the first with one case alone is interrupted."""
    fake_sanitizer(FAULTY)
    watch = watching.Watcher.watch

    def interrupted(watcher: watching.Watcher, shown: dict[int, Case]) -> watching.Watched:
        if len(shown) == 1:
            raise watching.Interrupted(watching.Watched())
        return watch(watcher, shown)

    monkeypatch.setattr(watching.Watcher, "watch", interrupted)
    found = asked((1, FAULTY_SEED))
    assert found.was_interrupted
    (finding,) = found.findings
    assert finding.case.seed == FAULTY_SEED
    assert (finding.repeats, finding.runs) == (0, 0)


def test_no_progress_is_no_opinion(monkeypatch):
    """A process that came to the end of no case and said nothing."""
    monkeypatch.setattr(watching, "run", lambda *_: parse("========= ERROR SUMMARY: 0 errors\n"))
    assignment = Assignment(OPERATION, "", "", "", "cuda", "release", promises_containment=True)
    with pytest.raises(CannotCheckError, match="came to the end of no case"):
        watching.Watcher("memcheck", assignment).watch({0: plain_case()})


@pytest.mark.parametrize("faulty", [NOBODY, FAULTY])
def test_the_test_of_a_finding_asks_the_tool_again(fake_sanitizer, monkeypatch, tmp_path, faulty):
    """It fails until the tool is silent; an ordinary launch would say nothing."""
    fake_sanitizer(FAULTY)
    (finding,) = asked((FAULTY_SEED,)).findings
    path = finding.save(tmp_path / "findings")
    proved = []
    monkeypatch.setattr("pagefuzz.harness.sanitizers.opinion.prove", proved.append)
    fake_sanitizer(faulty)
    if faulty == NOBODY:
        assert_fixed(path)
    else:
        with pytest.raises(AssertionError, match="not fixed:\nMEMCHECK"):
            assert_fixed(path)
    assert proved == ["memcheck"]


@pytest.mark.parametrize(("faulty", "code"), [(NOBODY, 0), (FAULTY, 1)])
def test_a_command_tells_and_stores(fake_sanitizer, monkeypatch, tmp_path, capsys, faulty, code):
    """Exit code, last line, finding, journal and the line to replay with."""
    fake_sanitizer(faulty)
    monkeypatch.setattr(second_opinion, "prove", lambda tool: 1)
    run = second_opinion._Run("memcheck", "host", "release", tmp_path, keep_going=False)
    run.prove()
    run.watch(UNIT, lambda: cases(1, FAULTY_SEED))
    assert run.end() == code
    printed = capsys.readouterr().out
    unfolded = " ".join(printed.split())
    assert f"{OPERATION}/bundled:page: 2 cases, 2 launches watched" in unfolded
    assert ("times slower than without" in unfolded) is not bool(code)
    report = run.to_json(["fuzz"], 0)
    assert report["units"][UNIT.name]["launches"] == 2
    assert report["problems"] == {}
    plan = registry.operation(OPERATION).plan(plain_case())
    size = 2 * sum(buffer.memory_bytes for buffer in plan.buffers.values())
    assert report["units"][UNIT.name]["layers"] == {
        "compute-sanitizer": {"launches": 2, "amount": size, "unit": "bytes"}
    }
    held = report["memory"]
    assert held["arena_address_bytes"] > 0
    assert held["resident_bytes"] > 2**20
    assert f" worker {amount(held['resident_bytes'], 'bytes')} " in unfolded
    shown = re.escape(amount(size, "bytes"))
    assert re.search(rf"^compute-sanitizer +2 +{shown}$", printed, re.M)
    if not code:
        assert "clean: nothing was reported of 2 launches watched by memcheck" in printed
        assert not (tmp_path / "findings").exists()
        return
    (path,) = (tmp_path / "findings").glob("memcheck-*.json")
    assert f"pagefuzz replay {path}" in printed
    finding = load_finding(path)
    assert (finding.case.seed, finding.sanitizer) == (FAULTY_SEED, "memcheck")
    (line,) = (tmp_path / "findings" / "journal.jsonl").read_text().splitlines()
    assert json.loads(line)["identity"] == finding.identity


def test_a_unit_that_was_not_checked_is_no_pass(fake_sanitizer, monkeypatch, tmp_path, capsys):
    """Exit code 2, and the reason on stderr."""
    fake_sanitizer(NOBODY, "no summary")
    run = second_opinion._Run("memcheck", "host", "release", tmp_path, keep_going=False)
    run.watch(UNIT, lambda: cases(1))
    assert run.end() == 2
    said = capsys.readouterr()
    assert "without a summary" in said.err
    assert re.search("^compute-sanitizer +nothing$", said.out, re.M)
    assert "memory at most" not in said.out


def test_the_cases_are_those_of_the_seed():
    """Reported ones first, none that a launcher refuses, hostile ones where they are wanted."""
    operation = registry.operation(OPERATION)
    drawn = cases_of(UNIT, 30, 5)
    assert drawn == cases_of(UNIT, 30, 5)
    classes = {operation.expect(operation.plan(case)).case_class for case in drawn}
    assert classes == {CaseClass.IN_CONTRACT, CaseClass.HOSTILE}
    sound = cases_of(replace(UNIT, hostile=False), 30, 5)
    assert {operation.expect(operation.plan(case)).case_class for case in sound} == {
        CaseClass.IN_CONTRACT
    }
    assert len(drawn) > 30


@pytest.mark.parametrize(
    ("tool", "device", "build", "said"),
    [
        ("memcheck", "host", None, "memcheck watches kernels on cuda only"),
        ("asan", "cuda", None, "asan watches kernels on host only"),
        ("racecheck", None, "checked", "a checked build suppresses each access"),
        ("asan", None, "checked,asan", "a checked build suppresses each access"),
    ],
)
def test_what_a_sanitizer_cannot_watch_is_refused(tool, device, build, said):
    """In one sentence, before anything runs."""
    with pytest.raises(CannotCheckError, match=said):
        backend_and_build(tool, device, build)


def test_the_build_has_the_sanitizer_of_the_compiler():
    """It is a flag of the object."""
    assert backend_and_build("asan", None, None) == ("host", "asan")
    assert backend_and_build("ubsan", "auto", "coverage") == ("host", "coverage,ubsan")
