"""A matrix that goes on where another run was stopped, and what it does not go on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagefuzz.harness import injection
from pagefuzz.harness.check import Checker
from pagefuzz.harness.cli import main
from pagefuzz.harness.commands.matrix import _alone_in
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.injection import KINDS, Cell, Key, suitable_cases, trials
from pagefuzz.harness.matrix_report import MatrixReport
from pagefuzz.harness.running import Injection
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import Verdict

OPERATION = "copy_blocks"
BUFFERS = len(registry.operation(OPERATION).buffers)
ASKED = ["matrix", "--device", "host", "--op", OPERATION, "--layer", "guard"]
ASKED += ["--kind", "read past", "--tries", "3"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases of all accesses that were made."""
    inside, cases = Checker.check, []

    def check(checker: Checker, case: Case, *, injection: Injection | None = None) -> Verdict:
        cases.append(case)
        return inside(checker, case, injection=injection)

    monkeypatch.setattr(Checker, "check", check)
    return cases


def report(folder: Path) -> Any:
    return json.loads((folder / "matrix.json").read_text())


def cases_of(*numbers: int) -> list[str]:
    guard = [layer for layer in injection.LAYERS if layer.name == "guard"]
    found = trials(OPERATION, 3, guard, KINDS[:1])
    return sorted(trial.case.dumps() for trial in found if trial.number in numbers)


def test_no_try_is_made_twice(
    made: list[Case], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of three, the last of each buffer was made before; together they are all."""
    into = ["--report", str(tmp_path)]
    assert main([*ASKED, *into, "--skip", "2"]) == 0
    assert sorted(case.dumps() for case in made) == cases_of(3)
    made.clear()
    assert main([*ASKED, *into, "--resume"]) == 0
    assert sorted(case.dumps() for case in made) == cases_of(1, 2)
    said = capsys.readouterr().out
    assert f"resumed  {BUFFERS} accesses were made before, by commit " in said
    assert f"{3 * BUFFERS} injected accesses in {BUFFERS} cells, 0 cells not as promised" in said
    found = report(tmp_path)
    assert [run["accesses"] for run in found["runs"]] == [BUFFERS, 2 * BUFFERS]
    assert [cell["tried"] for cell in found["cells"]] == ["1-3"] * BUFFERS
    assert [(cell["seen"], cell["tries"]) for cell in found["cells"]] == [(3, 3)] * BUFFERS
    made.clear()
    assert main([*ASKED, *into, "--resume"]) == 0
    assert made == []
    assert report(tmp_path)["runs"] == found["runs"]


def test_without_resume_all_is_made_again(made: list[Case], tmp_path: Path) -> None:
    """And the report is of that run alone."""
    for _ in range(2):
        made.clear()
        assert main([*ASKED, "--report", str(tmp_path)]) == 0
        assert len(made) == 3 * BUFFERS
    assert len(report(tmp_path)["runs"]) == 1


def test_what_other_runs_found_stays(made: list[Case], tmp_path: Path) -> None:
    """Of other kinds and operations than this run is asked for."""
    into = ["--report", str(tmp_path), "--resume"]  # there is nothing to go on with yet
    assert main([*ASKED, *into]) == 0
    first = report(tmp_path)["cells"]
    other = ["matrix", "--device", "host", "--op", "swap_blocks", "--layer", "diff", "--tries", "3"]
    assert main([*other, "--kind", "write past", *into]) == 0
    found = report(tmp_path)
    assert found["cells"][: len(first)] == first
    assert {cell["operation"] for cell in found["cells"]} == {OPERATION, "swap_blocks"}
    assert set(found["cases"]) == {OPERATION, "swap_blocks"}


def test_what_was_not_as_promised_still_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A finding of an earlier run is one of this run, with its case."""
    monkeypatch.chdir(tmp_path)
    into = ["--report", str(tmp_path)]
    with monkeypatch.context() as patched:
        patched.setattr(injection.Layer, "promises", lambda *_: False)
        assert main([*ASKED, *into, "--skip", "2"]) == 1
        first = capsys.readouterr().err
        wrong = [cell["wrong"] for cell in report(tmp_path)["cells"]]
        assert [one["try"] for (one,) in wrong] == [3] * BUFFERS
        assert main([*ASKED, *into, "--skip", "2", "--resume"]) == 1
        assert capsys.readouterr().err == first
        assert [cell["wrong"] for cell in report(tmp_path)["cells"]] == wrong
        assert main([*ASKED, *into, "--resume"]) == 1
        assert set(first.splitlines()) < set(capsys.readouterr().err.splitlines())
        assert len({*map(len, (cell["wrong"] for cell in report(tmp_path)["cells"])), 3}) == 1
    assert main([*ASKED, *into, "--resume"]) == 1  # what was found counts, whatever else happens
    said = capsys.readouterr().err
    assert "the layer guard promises something else of read past" in said


def test_cells_of_fewer_tries_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drawing brings no more cases; not where all were made, nor of what was left out."""
    said = "cells of fewer tries: no more cases have such a place"
    assert main([*ASKED, "--skip", "1"]) == 0
    assert said not in capsys.readouterr().out
    cases = suitable_cases(OPERATION, 3)
    monkeypatch.setattr(injection, "suitable_cases", lambda *_: cases[:2])
    assert main(ASKED) == 0
    assert f"{BUFFERS} {said}\n" in capsys.readouterr().out


def test_the_cases_are_the_same_whatever_was_drawn_before() -> None:
    """In processes of their own, without what this one's conftest sets: a report is gone on with
    by a run of other operations."""
    text = """
import sys
from pagefuzz.harness.matrix_report import _digest
from pagefuzz.harness.injection import suitable_cases
print(*(_digest(suitable_cases(name, 3)) for name in sys.argv[1:]))
"""
    told = []
    for names in ([OPERATION], ["concat_and_cache_mla", OPERATION]):
        command = [sys.executable, "-c", text, *names]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        told.append(found.split()[-1])
    assert told[0] == told[1]


def test_kill_9_loses_a_few_seconds(tmp_path: Path) -> None:
    """The report is written meanwhile, is no whole one, and can be gone on with."""
    command = [sys.executable, "-m", "pagefuzz", *ASKED[:-1], "80", "--report", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 60
        while not (tmp_path / "matrix.json").exists():
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(run.pid, signal.SIGKILL)
    found = report(tmp_path)
    assert found["was_interrupted"]
    accesses = sum(cell["tries"] for cell in found["cells"])
    assert 0 < accesses < 80 * BUFFERS
    again = MatrixReport.read(tmp_path / "matrix.json", "host", 80)
    assert again.accesses == again.accesses_before == accesses


def changed(at: str, value: object) -> Callable[[Any], object]:
    """A change of a report; `at` is a dotted path into it."""

    def change(data: Any) -> object:
        *path, last = [int(word) if word.isdecimal() else word for word in at.split(".")]
        inner = data
        for word in path:
            inner = inner[word]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
        return data

    return change


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("whole")
    assert main([*ASKED, "--report", str(folder)]) == 0
    return (folder / "matrix.json").read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed("device", "NVIDIA H200"), "is of another device, NVIDIA H200; this one is host"),
        (changed("tries", 4), "is of a run with --tries 4; to go on give as many"),
        (changed(f"cases.{OPERATION}", "0"), f"{OPERATION}: the report is of other cases than"),
        (
            changed("pagefuzz_matrix", 1),
            "is no report of `pagefuzz matrix` to go on with: it is of",
        ),
        (changed("pagefuzz_matrix", None), "it has no pagefuzz_matrix"),
        (changed("cells", None), "it lacks 'cells'"),
        (changed("cells", {"a": 1}), "is no report"),
        (changed("runs", [1]), "is no report"),
        (changed("runs.0.accesses", 1), f"its cells have {3 * BUFFERS} accesses, its runs 1"),
        (changed("runs.0.accesses", "1"), "accesses must be a number from 0, got '1'"),
        (changed("cells.0.tries", 2), "its tries do not add up"),
        (changed("cells.0.seen", 4), "its tries do not add up"),
        (changed("cells.0.access", "read Past"), "there is no 'read Past' in a layer 'guard'"),
        (changed("cells.0.tried", "0-2"), "'0-2' are no numbers of 3 tries"),
        (changed("cells.0.tried", "2-4"), "'2-4' are no numbers of 3 tries"),
        (changed("cells.0.tried", "3-2"), "'3-2' are no numbers of 3 tries"),
        (changed("cells.0.tried", ", 1"), "'' are no numbers of 3 tries"),
        (changed("cells.0.tried", "1-9999999999"), "are no numbers of 3 tries"),
        (changed("cells.0.tried", "a-b"), "'a-b' are no numbers of 3 tries"),
        (changed("cells.0.tried", 3), "is no report"),
        (changed("cells.0.wrong", [{"case": {}}]), "a case of it is none: "),
        (changed("cells.0.wrong", [{}]), "it lacks 'case'"),
        (changed("cells.0.as_promised", False), "its tries do not add up"),
        (changed("cells.0.buffer", "dst"), f"'{OPERATION}' has no buffer 'dst'"),
        (changed("cells.0.operation", "copy"), "'copy' has no buffer '"),
        (changed("cases", {}), f"it does not say of which cases and object {OPERATION} is"),
        (changed("objects", {}), f"it does not say of which cases and object {OPERATION} is"),
        (
            changed(f"objects.{OPERATION}/bundled:page/guard", "0"),
            "its sources or its compiler are",
        ),
        (lambda data: {**data, "cells": data["cells"][:1] * 2}, "it has a cell twice"),
        (lambda _: [1], "it has no pagefuzz_matrix"),
    ],
)
def test_what_cannot_be_gone_on_with(
    change: Callable[[Any], object],
    said: str,
    whole: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """One sentence, exit 2; a report that cannot be read is left as it is."""
    text = json.dumps(change(json.loads(whole)))
    (tmp_path / "matrix.json").write_text(text)
    assert main([*ASKED, "--report", str(tmp_path), "--resume"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "Traceback" not in line
    if "other cases" not in said and "sources" not in said:
        assert (tmp_path / "matrix.json").read_text() == text


@pytest.mark.parametrize("text", ["", "{", "\xff", "[" * 100_000])
def test_a_file_that_is_no_report(text: str, tmp_path: Path) -> None:
    """As it may be after a crash of something else."""
    (tmp_path / "matrix.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CannotCheckError, match="is no report of `pagefuzz matrix` to go on with"):
        MatrixReport.read(tmp_path / "matrix.json", "host", 3)


def test_two_runs_cannot_share_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each would write what the other does not know."""
    with _alone_in(tmp_path):
        assert main([*ASKED, "--report", str(tmp_path)]) == 2
    assert "another run writes its report into " in capsys.readouterr().err
    assert main([*ASKED, "--report", str(tmp_path)]) == 0


def test_what_was_left_out_is_not_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By --skip, or as another kind was asked for."""
    into = ["--report", str(tmp_path), "--resume"]
    assert main([*ASKED, *into, "--skip", "2"]) == 0
    assert main([*ASKED[:-4], "--kind", "read before", "--tries", "3", *into]) == 0
    assert "cells of fewer tries" not in capsys.readouterr().out


def test_a_changed_subject_is_examined_anew(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What another object has shown says nothing of this one."""
    twin = tmp_path / "x.toml"
    for word in ("one", "other"):
        twin.write_text(
            f'operation = "{OPERATION}"\nschedule = "page"\nbreaks = "nothing"\n'
            f"[[replace]]\nfind = '#include \"common/nesting.h\"'\n"
            f"with = '#include \"common/nesting.h\"  // {word}'\n"
        )
        asked = [*ASKED, "--subject", f"twin:{twin}", "--report", str(tmp_path), "--resume"]
        code = main(asked)
        assert code == (0 if word == "one" else 2), capsys.readouterr().err
    assert "its sources or its compiler are others than when" in capsys.readouterr().err


def test_resume_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """Which is not guessed."""
    assert main([*ASKED, "--resume"]) == 2
    assert "--resume goes on with what is in a folder; name it" in capsys.readouterr().err


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    """All that a cell has, whatever tries were made."""
    (case, *_) = suitable_cases(OPERATION, 3)
    key: Key = ("cache", KINDS[0], "guard")
    wrong = injection.Wrong(9, case, Injection("cache", -1, 1, "read"), "nothing")
    cell = Cell(promised=True, seen=4, tried={1, 2, 3, 7, 9}, wrong=[wrong])
    made = MatrixReport("host", 10)
    made.cells_of(OPERATION, "bundled:page", {"guard": "x"})[key] = cell
    made.write(tmp_path / "matrix.json")
    assert '"tried": "1-3, 7, 9"' in (tmp_path / "matrix.json").read_text()
    again = MatrixReport.read(tmp_path / "matrix.json", "host", 10)
    assert again.cells == made.cells
    assert again.accesses_before == 5
