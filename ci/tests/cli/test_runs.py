"""The installed command on real subjects, on the host."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagefuzz.harness.findings import Finding, assert_fixed, load_finding
from pagefuzz.harness.reporters.summary import Summary
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import CaseClass, Failure, Outcome, Verdict

HOST = ("--device", "host", "--op", "cp_gather_cache")
GATE = ("--profile", "gate")  # the same cases whatever ran before
FAULTY = ("--subject", "bundled:page-as-merged")
TWINS = Path(__file__).parent.parent / "twins"

#: Makes its standard input the terminal that it is under the control of, and becomes pagefuzz.
UNDER_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "pagefuzz", *sys.argv[1:]])
"""


def _under_terminal(
    folder: Path, *arguments: str, **environment: str
) -> tuple[subprocess.Popen[bytes], int]:
    """The command, and the other end of its terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", UNDER_TERMINAL, *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "CI"} | environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    return process, ours


def _summary(folder: Path) -> Summary:
    return Summary.from_json(json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def _last_paragraph(text: str) -> str:
    """On one line."""
    lines = text.splitlines()
    begin = max(i for i, line in enumerate(lines) if line.startswith("the finding "))
    assert max(map(len, lines[begin:])) <= 80
    return " ".join(lines[begin:])


def test_clean_run(cli, tmp_path):
    """The sound subjects are clean; what each judgement examined and the rate are printed."""
    done = cli("fuzz", *HOST, *GATE, "--cases", "100", "--report", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"[\d,]+ cases, [\d,]+ launches .*: \d+ cases a second a core", done.stdout)
    assert "clean: nothing was found" in done.stdout
    for judgement in ("output", "untouched", "bounds", "overflow", "counts", "refusal", "death"):
        assert re.search(rf"^{judgement}  .*\d", done.stdout, re.M), judgement
    summary = _summary(tmp_path / "out")
    assert summary.exit_code == 0
    assert set(summary.subjects) == {
        "cp_gather_cache/bundled:page",
        "cp_gather_cache/bundled:token",
    }
    for subject in summary.subjects.values():
        assert subject.cases >= 100
        assert subject.checked["output"] > 0
        assert {"guard pages", "checked build", "orders of threads"} <= set(subject.layers)
        for name, layer in subject.layers.items():
            assert min(layer.launches, layer.amount) > 0, name
            assert re.search(rf"^{name} +[\d,]+( |$)", done.stdout, re.M), name
        assert set(subject.classes) == {"in contract", "hostile", "refused"}
    assert {"hypothesis", "torch", "host compiler"} <= set(summary.versions)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["summary.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_clean_run_of_a_ubsan_build(cli):
    """UBSan looked at launches and said nothing: a pass."""
    one = ("--subject", "bundled:page", "--build", "ubsan")
    done = cli("fuzz", *HOST, *GATE, *one, "--cases", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^UBSan +[1-9]", done.stdout, re.M)
    assert re.search(r"^overflow +by UBSan$", done.stdout, re.M)  # which counts no operations


def test_the_same_cases_again(cli, tmp_path):
    """Two runs of a profile with a fixed seed examine the same, to the byte."""
    for name in ("one", "two"):
        cli("fuzz", *HOST, *GATE, "--cases", "30", "--report", name)
    one, two = (_summary(tmp_path / name).subjects for name in ("one", "two"))
    assert {n: (s.cases, s.classes, s.checked) for n, s in one.items()} == {
        n: (s.cases, s.classes, s.checked) for n, s in two.items()
    }


def test_nightly_draws_new_cases(cli, tmp_path):
    """Each nightly run has a seed of its own, in CI too, which is printed and can be given."""
    seeds = []
    for name in ("one", "two"):
        done = cli(
            *("fuzz", *HOST, "--profile", "nightly", "--cases", "20", "--report", name),
            env={"CI": "true"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        seeds.append(_summary(tmp_path / name).seed)
        assert f"seed {seeds[-1]}" in done.stdout
    assert seeds[0] != seeds[1]


def test_no_hostile(cli, tmp_path):
    """--no-hostile: no hostile case is run, reported ones included."""
    done = cli("fuzz", *HOST, *GATE, "--cases", "40", "--no-hostile", "--report", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no hostile cases" in done.stdout
    for subject in _summary(tmp_path / "out").subjects.values():
        assert set(subject.classes) == {"in contract", "refused"}


def test_a_finding_from_fuzz_to_replay(cli, tmp_path):
    """The faulty schedule: exit 1, a minimised finding in a file, which replay reproduces, and
    which says on a sound subject that it does not reproduce."""
    done = cli("fuzz", *HOST, *FAULTY, "--cases", "50", "--report", "out")
    assert done.returncode == 1, done.stdout + done.stderr
    (path,) = (tmp_path / "out" / "findings").glob("bounds-*.json")
    finding = load_finding(path)
    assert finding.case.sizes["num_requests"] <= 2
    assert (finding.repeats, finding.runs, finding.minimised) == (10, 10, True)
    assert finding.flags == ("checked",)
    assert _summary(tmp_path / "out").findings[0].file == f"findings/{path.name}"

    shown = str(path.relative_to(tmp_path))
    assert f"pagefuzz replay {shown}" in done.stdout
    again = cli("replay", shown)
    assert again.returncode == 1
    assert again.stdout.startswith("BOUNDS  read past block_table")
    elsewhere = cli("replay", shown, "--subject", "bundled:page")
    assert elsewhere.returncode == 0
    where = re.escape(finding.failure.details["where"].split("  ")[0])
    assert re.search(
        rf"^the finding does not reproduce: expected BOUNDS read past block_table at {where} "
        r"\([a-z ]+ case\); seen instead: the case passed$",
        _last_paragraph(elsewhere.stdout),
    )


def test_a_finding_that_fails_in_another_way(cli, tmp_path):
    """Exit 1, with what was expected and what was seen instead, in words."""
    case = Case.from_json(json.loads((TWINS / "table-over-read.json").read_text())["case"])
    hang = Failure("hang", "the launch does not end", ("hang",))
    found = Finding(
        *("cp_gather_cache", "bundled:page-as-merged", "host", "host", "checked", case),
        Verdict(Outcome.FAILED, CaseClass.HOSTILE, (hang,)),
    )
    done = cli("replay", str(found.save(tmp_path / "findings")))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(
        r"^the finding does not reproduce: expected HANG the launch does not end \(hostile case\); "
        r"seen instead: BOUNDS .+ at kernels/\S+:\d+ \(hostile case\)$",
        _last_paragraph(done.stdout),
    )
    assert "hang:hang" not in done.stdout


def test_a_generated_test_fails_until_the_fault_is_fixed(cli, tmp_path):
    """The test beside a finding fails on the faulty subject and passes on a sound one."""
    cli("fuzz", *HOST, *FAULTY, "--cases", "5", "--report", "out")
    folder = tmp_path / "out" / "findings"
    (path,) = folder.glob("bounds-*.json")

    def run_test() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    failing = run_test()
    assert failing.returncode == 1
    assert "BOUNDS  read past block_table" in failing.stdout
    data = json.loads(path.read_text())
    data["subject"] = "bundled:page"
    path.write_text(json.dumps(data))
    assert run_test().returncode == 0


@pytest.mark.slow
def test_both_reported_faults_are_found(cli, tmp_path):
    """--keep-going on the faulty schedule: the table read past the row and the int32 wrap of a
    product, with both operands, each in a case of at most two requests."""
    done = cli("fuzz", *HOST, *FAULTY, "--keep-going", "--time", "90s", "--report", "out")
    assert done.returncode == 1
    findings = [load_finding(p) for p in (tmp_path / "out" / "findings").glob("[!t]*.json")]
    found = {finding.failure.title: finding for finding in findings}
    assert found["read past block_table"].case.sizes["page_size_tokens"] == 1
    assert re.search(
        r"\d+ \* \d+ in int32", found["int32 multiplication wraps"].failure.details["access"]
    )
    # On a busy machine a hostile case may also be found to hang: a death has no line.
    timed = [f for f in findings if f.failure.judgement in ("bounds", "overflow")]
    assert len(timed) >= 2
    for finding in timed:
        assert finding.case.sizes["num_requests"] <= 2, finding.text()
        assert "kernels/operations/cp_gather_cache.cu:" in finding.failure.details["where"]


def test_interrupted(cli, tmp_path):
    """Ctrl-C on the command: exit 2 without findings, summary and last line included."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pagefuzz", "fuzz", *HOST, "--time", "5m", "--report", "out"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("profile"):
            break
    time.sleep(2)
    os.kill(process.pid, signal.SIGINT)
    began = time.monotonic()
    rest, problems = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == 2
    assert "interrupted before the run was finished: not a pass" in rest
    assert "Traceback" not in problems
    assert _summary(tmp_path / "out").interrupted


def test_the_terminal_goes_away(tmp_path):
    """A terminal that is closed ends the run in an orderly way: exit 2, with its summary."""
    process, terminal = _under_terminal(
        tmp_path, "fuzz", *HOST, "--time", "5m", "--report", "out", TERM="xterm"
    )
    seen = b""
    while b"cases/s/core" not in seen:  # the live table
        seen += os.read(terminal, 4096)
    time.sleep(2)
    os.close(terminal)
    began = time.monotonic()
    assert process.wait(timeout=60) == 2
    assert time.monotonic() - began < 20
    assert _summary(tmp_path / "out").interrupted


@pytest.mark.parametrize(
    "look",
    [
        pytest.param({"TERM": "dumb", "COLUMNS": "40"}, id="dumb"),
        pytest.param(
            {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "40", "LINES": "10"},
            marks=pytest.mark.slow,
            id="no colour",
        ),
    ],
)
def test_a_poor_terminal(tmp_path, look):
    """On a dumb terminal, without colours, of 40 columns: everything is said, nothing breaks."""
    process, terminal = _under_terminal(tmp_path, "fuzz", *HOST, *FAULTY, "--cases", "5", **look)
    seen = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(terminal, 4096):
            seen += data
    text = seen.decode()
    assert process.wait(timeout=60) == 1, text
    os.close(terminal)
    assert "BOUNDS  read past block_table" in text
    assert re.search(r"1 findings? in \d+ s", text)
    assert "Traceback" not in text
    if look["TERM"] == "dumb":
        assert "\x1b" not in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)  # a colour


@pytest.mark.slow
def test_launches_need_not_be_isolated(cli, tmp_path):
    """--no-isolate: the same cases, the same figures, and it says so."""
    summaries = []
    for name in ("isolate", "no-isolate"):
        done = cli(
            *("fuzz", *HOST, "--subject", "bundled:page", *GATE, "--cases", "30"),
            *("--jobs", "1", f"--{name}", "--report", name),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("not isolated" in done.stdout) == (name == "no-isolate")
        assert re.search(r"^memory at most: buffers .* worker .* MB$", done.stdout, re.M)
        summaries.append(_summary(tmp_path / name))
    one, other = (summary.subjects["cp_gather_cache/bundled:page"] for summary in summaries)
    assert (one.cases, one.classes, one.checked) == (other.cases, other.classes, other.checked)
    for summary in summaries:
        assert summary.memory.arena_address_bytes > summary.memory.arena_host_bytes > 0
        assert summary.memory.resident_bytes > 2**20
        assert summary.memory.device_bytes == 0


@pytest.mark.slow
def test_a_fault_that_is_not_isolated_is_no_pass(cli, tmp_path):
    """The runner dies of it: exit 2, with the signal and the case, which then fails isolated."""
    shutil.copy(TWINS / "null-dereference.toml", tmp_path)
    subject = ("--subject", "twin:null-dereference.toml")
    done = cli("fuzz", "--device", "host", *subject, *GATE, "--cases", "300", "--no-isolate")
    assert done.returncode == 2, done.stdout + done.stderr
    found = re.search(
        r"its runner died before it was done \(SIGSEGV\); the case that it was\s+checking is in "
        r"(\S+)",
        done.stderr,
    )
    assert found, done.stderr
    again = cli("replay", found[1], "--device", "host", *subject)
    assert again.returncode == 1, again.stdout + again.stderr
    assert again.stdout.startswith("DEATH ")


def test_a_report_that_cannot_be_written_hides_no_finding(cli, tmp_path):
    """Findings are exit 1 even where neither they nor the summary can be stored."""
    (tmp_path / "report" / "summary.json").mkdir(parents=True)
    (tmp_path / "report" / "findings").write_text("a file is in the way")
    done = cli("fuzz", *HOST, *FAULTY, "--cases", "5", "--report", "report")
    assert done.returncode == 1
    assert "BOUNDS  read past block_table" in done.stdout
    assert "cannot store a finding in report/findings" in done.stderr
    assert "cannot write report/summary.json" in done.stderr


@pytest.mark.parametrize(
    ("redirected", "subject", "code"),
    [
        ("| true", FAULTY, 1),
        ("2>&1 | true", ("--subject", "bundled:page"), 2),
        (">/dev/full", ("--subject", "bundled:page"), 2),
        pytest.param(">/dev/full 2>&1", FAULTY, 1, marks=pytest.mark.slow),
    ],
)
def test_a_log_that_cannot_be_written_ends_no_run(tmp_path, redirected, subject, code):
    """A reader that is gone, or a full disk: all cases are checked, and the summary is there."""
    fuzz = [sys.executable, "-m", "pagefuzz", "fuzz", *HOST, *subject, "--cases", "5"]
    fuzz += ["--report", "out"]
    command = f"(sleep 0.2; {shlex.join(fuzz)}; echo $? >code) {redirected}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert (tmp_path / "code").read_text() == f"{code}\n", done.stderr
    summary = _summary(tmp_path / "out")
    assert summary.exit_code == code
    assert len(summary.findings) == (code == 1)
    (said,) = summary.problems
    assert re.fullmatch("cannot write the output: (Broken pipe|No space left on device)", said)
    if "2>&1" not in redirected:
        assert done.stderr == f"pagefuzz: {said}\n"


def test_a_report_folder_that_cannot_be_made(cli, tmp_path):
    """Said before anything runs, not at the end of the night."""
    (tmp_path / "report").write_text("a file is in the way")
    for folder in ("report", "report/deeper"):
        done = cli("fuzz", *HOST, "--profile", "nightly", "--report", folder)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith(f"pagefuzz: cannot write reports into {folder}: ")
        assert len(done.stderr.splitlines()) == 1


def test_debug_profile(cli):
    """Every case on a line, and Hypothesis' statistics."""
    done = cli("fuzz", *HOST, "--subject", "bundled:page", "--profile", "debug")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('"pagefuzz_case":1') >= 20
    assert "- during generate phase" in done.stdout
    assert "class: in contract" in done.stdout


def test_a_hang_is_replayed_with_the_patience_it_was_found_with(cli, tmp_path):
    """Not a minute a launch: replay takes --hang-after as fuzz does."""
    twin = f"twin:{TWINS / 'hang-on-padding.toml'}"
    case = json.loads((TWINS / "hang-on-padding.json").read_text())["case"]
    (tmp_path / "case.json").write_text(json.dumps(case))
    began = time.monotonic()
    done = cli("replay", "case.json", "--device", "host", "--subject", twin, "--hang-after", "2s")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("HANG  the launch does not end")
    assert "no answer for 2 s" in done.stdout
    assert time.monotonic() - began < 50


@pytest.mark.slow
def test_a_hang_for_which_there_is_no_time_is_no_pass(cli, tmp_path):
    """A launch that has not ended when time is up, long before it is a hang: its case is one."""
    twin = f"twin:{TWINS / 'hang-on-padding.toml'}"
    done = cli("fuzz", "--device", "host", "--subject", twin, "--time", "15s", "--jobs", "1")
    assert done.returncode == 2, done.stdout + done.stderr
    (path,) = (tmp_path / "findings").glob("unended-*.json")
    assert path.name in done.stderr
    done = cli("replay", path, "--device", "host", "--subject", twin, "--hang-after", "2s")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("HANG  the launch does not end")


def test_a_finding_is_waited_for_as_long_as_it_says(cli, tmp_path):
    """Unless --hang-after is given: by replay, and by the test beside it."""
    found = Finding(
        operation="cp_gather_cache",
        subject=f"twin:{TWINS / 'hang-on-padding.toml'}",
        backend="host",
        device="host",
        build="checked",
        case=Case.from_json(json.loads((TWINS / "hang-on-padding.json").read_text())["case"]),
        verdict=Verdict(
            Outcome.FAILED,
            CaseClass.HOSTILE,
            (Failure("hang", "the launch does not end", ("hang",)),),
        ),
        hang_after_s=2.0,
    )
    path = found.save(tmp_path / "findings")
    for given, waited in (([], "2 s"), (["--hang-after", "1s"], "1 s")):
        done = cli("replay", str(path), *given)
        assert done.returncode == 1, done.stdout + done.stderr
        assert f"no answer for {waited}" in done.stdout
        assert f".json --hang-after {waited.replace(' ', '')}\n" in done.stdout
    with pytest.raises(AssertionError, match="no answer for 2 s"):
        assert_fixed(path)
