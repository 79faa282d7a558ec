"""What a run looks like while it goes on and when it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from pagefuzz.harness.campaign.events import Progress
from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.campaign.result import Result, UnitResult
from pagefuzz.harness.layers import BY_NAME
from pagefuzz.harness.reporters.ending import ending
from pagefuzz.harness.reporters.figures import amount, duration, shown_subjects
from pagefuzz.harness.reporters.live import LiveReporter
from pagefuzz.harness.reporters.plain import PlainReporter
from pagefuzz.harness.reporters.summary import LayerSummary, MemorySummary, SubjectSummary, Summary

ENDING = """\
operation/subject             cases  launches  cases/s/core  not run  findings
cp_gather_cache/bundled:page  1,200     2,400           120        3         0

checked        bundled:page
output              32.5 MB
bounds   123,456 operations

layer               launches          examined
red zones              2,400            1.2 MB
guard pages          nothing
worker deaths          2,400
checked index type     2,400  1,234 operations

not run, cp_gather_cache/bundled:page: 3 cases: it does not fit into memory

1,200 cases, 2,400 launches (2.0 a case): 120 cases a second a core
clean: nothing was found in 10 s"""


def _result() -> Result:
    totals = Progress(
        cases=1200,
        launches=2400,
        not_run=3,
        seconds=10.0,
        checked={"output": 32_450_000, "bounds": 123_456},
        layers={
            "red zones": (2400, 1_228_800),
            "worker deaths": (2400, 2400),
            "checked index type": (2400, 1234),
        },
        reasons={"it does not fit into memory": 3},
    )
    unit = UnitResult(
        Unit("cp_gather_cache", "bundled:page", True), 1200, totals, layers=("guard pages",)
    )
    return Result({unit.unit.name: unit}, seconds=10.0)


def test_ending():
    """A table a unit, what each judgement and layer examined, why cases were not run, one last
    line."""
    units = {"output": "bytes", "bounds": "operations", "death": "cases"}
    assert ending(_result(), units) == ENDING


def test_ending_of_many_units_fits():
    """With more subjects than columns fit, one column is for all of them."""
    unit = next(iter(_result().units.values()))
    many = Result(
        {
            f"op/{name}": UnitResult(Unit("op", name, True), 1, unit.totals)
            for name in (f"twin:a-rather-long-name-{i}" for i in range(5))
        }
    )
    text = ending(many, {"output": "bytes", "bounds": "operations"})
    assert "all subjects" in text
    assert "162.2 MB" in text
    assert re.search(r"^red zones +12,000 +6\.1 MB$", text, re.M)


def test_layers_fit_80_columns():
    """All of them, after days."""
    result = _result()
    (unit,) = result.units.values()
    unit.layers = tuple(BY_NAME)
    unit.totals.layers = dict.fromkeys(BY_NAME, (10**12, 10**18))
    text = ending(result, {})
    assert max(map(len, text.splitlines())) <= 80
    for name in BY_NAME:
        assert re.search(rf"^{name} +1,000,000,000,000( |$)", text, re.M), name


@pytest.mark.parametrize("operation", ["cp_gather_cache", "gather_and_maybe_dequant_cache"])
@pytest.mark.parametrize("name", ["x", "indexer-write-page-stride-from-shape", "y" * 70])
@pytest.mark.parametrize("count", [1, 3])
def test_subjects_with_long_paths_fit_80_columns(operation, name, count):
    """The path in short, its file whole; figures never cut. The longest name has a line to
    itself, wider than any terminal if it must be."""
    long = Progress(cases=12_345_678, launches=98_765_432, not_run=11_111, seconds=1000.0)
    long.checked = {"output": 10**15}
    names = [f"twin:/a/rather/long/path/to/the/twins/of/somebody/{i}/{name}.toml"
             for i in range(count)]  # fmt: skip
    result = Result(
        {f"{operation}/{n}": UnitResult(Unit(operation, n, True), 1, long) for n in names}
    )
    lines = ending(result, {"output": "bytes"}).splitlines()
    assert all(len(line) <= 80 or line.strip().endswith(f"{name}.toml") for line in lines)
    if len(name) < 40:
        assert max(map(len, lines)) <= 80
    figures = r" +12,345,678 +98,765,432 +12346 +11,111 +0$"
    assert len([line for line in lines if re.search(figures, line)]) == count
    shown = [line.split()[0] for line in lines if line.startswith("  twin:")]
    assert len(set(shown)) == count
    assert all(one.endswith(f"/{name}.toml") for one in shown)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["twin:/a/b/x.toml"], ["twin:.../x.toml"]),
        (["bundled:page", "twin:x.toml"], ["bundled:page", "twin:x.toml"]),
        (["twin:/aa/bb/cc/x.toml", "twin:/aa/bb/dd/x.toml"],
         ["twin:.../cc/x.toml", "twin:.../dd/x.toml"]),
        (["twin:a/x.toml", "twin:b/x.toml"], ["twin:a/x.toml", "twin:b/x.toml"]),
        (["twin:/a/x.toml", "twin:/a/x.toml"], ["twin:/a/x.toml"] * 2),  # it is short
        (["op/twin:/aa/bb/cc/x.toml"], ["op/twin:.../x.toml"]),
    ],
)  # fmt: skip
def test_shown_subjects(names, shown):
    """Only as long as it must be to tell files apart; what is no path is whole."""
    assert shown_subjects(names) == shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"), (7380, "2 h 03 min")],
)
def test_durations(seconds, text):
    """Seconds, minutes, hours."""
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (1, "launches", "1 launch"),
        (1, "cases", "1 case"),
        (1, "accesses", "1 access"),
        (2, "cases", "2 cases"),
        (9_999, "bytes", "9,999 bytes"),
        (10_000, "bytes", "10.0 kB"),
        (2_150_000_000, "bytes", "2.1 GB"),
        (10**19, "bytes", "10000.0 PB"),
    ],
)
def test_amounts(number, unit, text):
    """Counts with their noun, bytes with a prefix."""
    assert amount(number, unit) == text


def _summary() -> dict:
    layers = {"guard pages": LayerSummary(2, 900, "bytes")}
    subject = SubjectSummary(1, 2, 0, 0, 0.5, 2.0, {"output": 9}, layers, {"hostile": 1}, {}, 0, [])
    summary = Summary(
        pagefuzz_summary=1,
        command=["pagefuzz", "fuzz"],
        profile="smoke",
        seed=0,
        backend="host",
        device="host",
        build="checked",
        versions={"pagefuzz": "0.1.0"},
        commit=None,
        seconds=1.0,
        memory=MemorySummary(2**40, 2**20, 0, 2**28),
        judgement_units={"output": "bytes"},
        subjects={"op/bundled:page": subject},
        findings=[],
        problems=[],
        interrupted=False,
        exit_code=0,
    )
    return json.loads(json.dumps(asdict(summary)))


def test_a_finding_in_place_of_another_says_so(capsys):
    """The same fault of the same unit: once more, and not of another unit."""
    reporter = PlainReporter([], {})
    other = UnitResult(Unit("cp_gather_cache", "bundled:token", True), 1)
    finding = SimpleNamespace(identity="bounds:dst", text=lambda width, path: "BOUNDS  past dst")
    said = []
    for unit in (*_result().units.values(), other, *_result().units.values()):
        reporter.finding(None, unit, finding, None)
        said.append("in place of it" in capsys.readouterr().out)
    assert said == [False, False, True]


def test_summary_round_trip():
    """What is written can be read back."""
    assert asdict(Summary.from_json(_summary())) == _summary()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.pop("seed"), "summary.seed"),
        (lambda d: d.update(extra=1), "summary.extra"),
        (lambda d: d.update(seed="0"), "summary.seed"),
        (lambda d: d.update(pagefuzz_summary=2), "summary.pagefuzz_summary"),
        (lambda d: d["subjects"]["op/bundled:page"].pop("cases"), "bundled:page.cases"),
        (
            lambda d: d["subjects"]["op/bundled:page"]["layers"]["guard pages"].pop("launches"),
            "bundled:page.layers.guard pages.launches",
        ),
        (lambda d: d["subjects"]["op/bundled:page"].update(checked=3), "bundled:page.checked"),
    ],
)
def test_malformed_summaries(change, field):
    """A summary that is not as its schema says is refused, naming the field."""
    data = _summary()
    change(data)
    with pytest.raises(ValueError, match=re.escape(field)):
        Summary.from_json(data)


def test_live_terminal(tmp_path: Path):
    """On a terminal the progress changes in place, never wider than it, and the end stays."""
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "CI"}
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pagefuzz", "fuzz", "--op", "cp_gather_cache"),
            *("--device", "host", "--time", "7s"),
        ],
        cwd=tmp_path,
        env={**env, "COLUMNS": "80", "LINES": "40", "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        close_fds=True,
    )
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            output += chunk
    except OSError:  # how the end of a terminal reads on Linux
        pass
    os.close(ours)
    assert process.wait() == 0, output.decode()
    text = output.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "\x1b[" in text
    assert re.search(r"cp_gather_cache/bundled:page .*left", plain)
    assert "clean: nothing was found" in plain
    assert max(len(line) for line in re.split(r"[\r\n]+", plain)) <= 80


LONG = "/srv/reports/of/kernels/nightly-reports/2026-11-30/findings/bounds-block_table-a3ac.json"


def _live(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What a live reporter on a terminal of 80 columns wrote there, of a rerun line and a problem;
    and what it wrote to standard error."""
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    console = Console(file=stdout, width=80, force_terminal=True, highlight=False)
    reporter = LiveReporter([], {}, console)
    campaign = SimpleNamespace(result=_result(), elapsed_s=1.0, time_s=None)
    reporter.begin(campaign)
    reporter.tick(campaign)
    reporter.note(campaign, f"again   pagefuzz replay {LONG} --hang-after 5s")
    reporter.problem(campaign, f"cannot store a finding in {LONG}", "the detail")
    reporter.tick(campaign)
    reporter.end(campaign)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stdout.getvalue()), stderr.getvalue()


def test_a_line_to_be_pasted_is_not_folded(monkeypatch):
    """At any width of the terminal."""
    on_terminal, _ = _live(io.StringIO(), monkeypatch)
    assert f"again   pagefuzz replay {LONG} --hang-after 5s\n" in on_terminal
    assert "clean: nothing was found" in on_terminal


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_problems_go_to_standard_error(monkeypatch):
    """To the real one, unless that is the terminal: there they stand whole above the table."""
    problem = f"pagefuzz: cannot store a finding in {LONG}\nthe detail\n"
    on_terminal, in_file = _live(io.StringIO(), monkeypatch)
    assert in_file == problem
    assert "pagefuzz: cannot" not in on_terminal
    on_terminal, in_file = _live(_Terminal(), monkeypatch)
    assert problem in on_terminal
    assert in_file == ""
