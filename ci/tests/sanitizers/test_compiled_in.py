"""Sanitizers of the host compiler: `--sanitizer asan` and `ubsan`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from ci.tests.planted import case_of, twin

from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.check import Checker
from pagefuzz.harness.commands import second_opinion
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import load_finding
from pagefuzz.harness.reporters.figures import amount
from pagefuzz.harness.reporters.summary import MemorySummary
from pagefuzz.harness.sanitizers.opinion import Opinion, opinion
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import Outcome, Verdict

ONE = ("fuzz", "--op", "cp_gather_cache", "--sanitizer")


def said(done):
    return done.stdout + done.stderr


def test_a_clean_second_opinion(cli, tmp_path):
    """Exit 0, with how many launches were watched, on the terminal and in a file."""
    done = cli(*ONE, "asan", "--subject", "bundled:page", "--cases", "20", "--report", "out")
    assert done.returncode == 0, said(done)
    assert "asan  host, asan build; 20 cases a unit, seed 0" in done.stdout
    assert "launches watched by asan" in done.stdout.splitlines()[-1]
    written = json.loads((tmp_path / "out" / "sanitizer.json").read_text())
    (unit,) = written["units"].values()
    assert unit["launches"] >= 40
    assert unit["findings"] == []
    layer = unit["layers"]["AddressSanitizer"]
    assert min(layer["launches"], layer["amount"]) > 0
    assert re.search(rf"^AddressSanitizer +{layer['launches']} +\d", done.stdout, re.M)
    memory = MemorySummary(**written["memory"])
    assert memory.arena_address_bytes > memory.arena_host_bytes > 0 == memory.device_bytes
    shown = amount(memory.resident_bytes, "bytes")
    assert re.search(rf"^memory at most: buffers .* worker {shown}$", done.stdout, re.M)


def test_a_build_that_does_not_look_is_no_opinion(monkeypatch, tmp_path, capsys):
    """Launches without UBSan's record are not its own: exit 2, and the table says nothing."""
    inside = Checker.check

    def check(checker: Checker, case: Case) -> Verdict:
        verdict = inside(checker, case)
        assert verdict.layers["UBSan"][0]
        return replace(verdict, layers={**verdict.layers, "UBSan": (0, 0)})

    monkeypatch.setattr(Checker, "check", check)
    run = second_opinion._Run("ubsan", "host", "ubsan", tmp_path, keep_going=False)
    unit = Unit("cp_gather_cache", "bundled:page", hostile=True)
    run.watch(unit, lambda: [case_of("table-width-unguarded")])
    assert run.end() == 2
    said = capsys.readouterr()
    assert "ubsan examined nothing" in said.err
    assert re.search("^UBSan +nothing$", said.out, re.M)


def planted_case(folder: Path, name: str) -> str:
    """A file with the case that shows a planted fault."""
    path = folder / "case.json"
    path.write_text(case_of(name).dumps())
    return str(path)


def test_a_read_past_the_table_is_reported(cli, tmp_path):
    """AddressSanitizer names it, with its line; exit 1."""
    name = "table-width-unguarded"
    done = cli(
        *("replay", planted_case(tmp_path, name), "--sanitizer", "asan", "--subject", twin(name))
    )
    assert done.returncode == 1, said(done)
    assert "DEATH  AddressSanitizer" in done.stdout
    assert "cp_gather_cache.cu:" in done.stdout


@pytest.mark.slow
def test_a_finding_is_minimised_stored_and_replayed(cli, tmp_path):
    """From drawn cases to a finding file, a journal and the same again."""
    done = cli(*ONE, "asan", "--subject", "twin:table-width-unguarded", "--cases", "40")
    assert done.returncode == 1, said(done)
    (path,) = (tmp_path / "findings").glob("death-*.json")
    finding = load_finding(path)
    assert (finding.build, finding.failure.judgement) == ("asan", "death")
    assert finding.repeats == finding.runs > 0
    assert (tmp_path / "findings" / "journal.jsonl").exists()
    assert cli("replay", str(path)).returncode == 1
    sound = cli("replay", str(path), "--sanitizer", "asan", "--subject", "bundled:page")
    assert sound.returncode == 0, said(sound)


def test_without_a_runtime_there_is_no_opinion(cli, tmp_path):
    """Exit 2: a compiler that has no AddressSanitizer."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-print-file-name=*) echo libasan.so;; *) exec g++ "$@";; esac\n'
    )
    compiler.chmod(0o755)
    done = cli(
        *(*ONE, "asan", "--subject", "bundled:page", "--cases", "1"),
        env={"PAGEFUZZ_CXX": str(compiler)},
    )
    assert done.returncode == 2, said(done)
    assert "comes without AddressSanitizer's runtime" in done.stderr


@pytest.mark.slow
def test_a_signed_overflow_is_a_finding(cli, tmp_path):
    """UBSan sees the 32-bit offset of a twin, and nothing in the kernel itself."""
    name = "copy-int32-page-offset"
    replay = ("replay", planted_case(tmp_path, name), "--sanitizer", "ubsan", "--subject")
    faulty = cli(*replay, twin(name))
    assert faulty.returncode == 1, said(faulty)
    assert "OVERFLOW" in faulty.stdout
    sound = cli(*replay, "bundled:page")
    assert sound.returncode == 0, said(sound)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sanitizer", "memcheck"), "there is no GPU to check on"),
        (("--sanitizer", "asan", "--time", "3s"), "asan is shown a number of cases"),
        (("--sanitizer", "asan", "--jobs", "2"), "asan watches one process at a time"),
        (("--sanitizer", "asan", "--hang-after", "3s"), "leave --hang-after out"),
        (("--sanitizer", "asan", "--no-isolate"), "leave --no-isolate out"),
        (("--sanitizer", "asan", "--gpu-memory", "1GiB"), "leave --gpu-memory out"),
        (("--sanitizer", "asan", "--build", "checked"), "a checked build suppresses"),
        (("--sanitizer", "asan", "--device", "cuda"), "asan watches kernels on host only"),
        (
            ("--sanitizer", "asan", "--op", "cp_gather_indexer_k_quant_cache_hinted"),
            "is a Triton kernel, which asan cannot watch",
        ),
    ],
)
def test_what_cannot_be_done_is_said(cli, arguments, sentence):
    """Exit 2 and one sentence, before anything runs."""
    done = cli("fuzz", *arguments, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2, said(done)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("tool", ["asan", "ubsan"])
@pytest.mark.parametrize("subject", [(), ("--subject", "bundled:triton")])
def test_a_triton_case_is_refused_by_name(cli, tmp_path, tool, subject):
    """Of `replay` too, asked for or because its operation has nothing else."""
    case = planted_case(tmp_path, "triton-read-past-hints")
    done = cli("replay", case, "--sanitizer", tool, *subject)
    assert done.returncode == 2, said(done)
    assert f"hinted/bundled:triton is a Triton kernel, which {tool} cannot watch" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("given", [("--hang-after", "3s"), ("--no-isolate",)])
def test_replay_refuses_what_a_sanitizer_would_not_heed(cli, tmp_path, given):
    """As `fuzz` does."""
    case = planted_case(tmp_path, "table-width-unguarded")
    done = cli("replay", case, "--sanitizer", "asan", *given)
    assert done.returncode == 2, said(done)
    assert f"asan has a process of its own: leave {given[0]} out" in done.stderr


def test_an_unknown_sanitizer_is_refused(cli):
    """As any other choice."""
    done = cli("fuzz", "--sanitizer", "valgrind")
    assert done.returncode == 2
    assert "invalid choice: 'valgrind'" in done.stderr


def test_interrupted_within_a_unit(monkeypatch, tmp_path, capsys):
    """What failed until then is a finding; without any, nothing of the unit counts."""
    inside = Checker.check
    left = 1

    def check(checker: Checker, case: Case) -> Verdict:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return inside(checker, case)

    monkeypatch.setattr(Checker, "check", check)
    case = case_of("table-width-unguarded")
    unit = Unit("cp_gather_cache", twin("table-width-unguarded"), hostile=True)
    run = second_opinion._Run("ubsan", "host", "ubsan", tmp_path, keep_going=False)
    with pytest.raises(KeyboardInterrupt):
        run.watch(unit, lambda: [case, case])
    run.interrupt()
    assert run.end() == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "1 case, 1 launch watched" in said
    assert "not repeated" in said
    assert len(list((tmp_path / "findings").glob("*.json"))) == 1


@pytest.mark.parametrize(
    ("subject", "code"), [("bundled:page", 2), (twin("table-width-unguarded"), 1)]
)
def test_a_report_that_cannot_be_written(tmp_path, capsys, subject, code):
    """Is no pass, and does not undo a finding."""
    run = second_opinion._Run("ubsan", "host", "ubsan", None, keep_going=False)
    unit = Unit("cp_gather_cache", subject, hostile=True)
    run.watch(unit, lambda: [case_of("table-width-unguarded")])
    run.report(tmp_path, ["fuzz"], 0)
    assert run.end() == code
    assert capsys.readouterr().err == f"pagefuzz: cannot write {tmp_path}: Is a directory\n"


@pytest.mark.parametrize(("needs_others", "repeats"), [(False, 10), (True, 0)])
def test_each_repeat_is_in_a_fresh_worker(monkeypatch, needs_others, repeats):
    """What fails only after other cases in its worker says that it did not fail again."""
    inside, restart = Checker.check, Checker.restart
    since = 0

    def check(checker: Checker, case: Case) -> Verdict:
        nonlocal since
        since += 1
        verdict = inside(checker, case)
        if needs_others and since == 1:
            return replace(verdict, outcome=Outcome.CLEAN, failures=())
        return verdict

    def restarted(checker: Checker) -> None:
        nonlocal since
        since = 0
        restart(checker)

    monkeypatch.setattr(Checker, "check", check)
    monkeypatch.setattr(Checker, "restart", restarted)
    (finding,) = opinion_of_a_fault().findings
    assert (finding.repeats, finding.runs) == (repeats, 10)
    assert f"{repeats} of 10 further runs failed the same way" in finding.text(width=300)


def test_a_finding_that_cannot_be_repeated_is_kept(monkeypatch):
    """And why it was not is said."""
    inside, left = Checker.check, 2

    def check(checker: Checker, case: Case) -> Verdict:
        nonlocal left
        if not left:
            raise CannotCheckError("there is no worker any more")
        left -= 1
        return inside(checker, case)

    monkeypatch.setattr(Checker, "check", check)
    found = opinion_of_a_fault()
    assert [finding.runs for finding in found.findings] == [0]
    said = "a finding was neither minimised nor repeated: there is no worker any more"
    assert found.problems == [said]


def opinion_of_a_fault() -> Opinion:
    name = "table-width-unguarded"
    unit = Unit("cp_gather_cache", twin(name), hostile=True)
    cases = [case_of(name)] * 2
    return opinion("ubsan", unit, cases, backend="host", build="ubsan", minimise=True)
