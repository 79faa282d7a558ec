"""The injection matrix: every layer sees what it promises, and no more."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pagefuzz.harness import injection, matrix_report
from pagefuzz.harness.check import Checker
from pagefuzz.harness.cli import main
from pagefuzz.harness.commands import matrix as command
from pagefuzz.harness.commands.matrix import table
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.injection import (
    KINDS,
    LAYERS,
    Cell,
    Kind,
    examine,
    in_hole,
    injections,
    suitable_cases,
    trials,
    with_hole,
)
from pagefuzz.harness.memory.cuda import WHOLE_BYTES
from pagefuzz.harness.running import Injection
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, load_case
from pagefuzz.oracles.verdict import Verdict

OPERATION = "cp_gather_cache"


@pytest.fixture(scope="module")
def matrix() -> injection.Matrix:
    return examine(OPERATION, "bundled:token", "host")


def test_every_cell_is_as_promised(matrix: injection.Matrix) -> None:
    """Whatever is wrong in a launch of a sound kernel, the layers see what they say they see."""
    assert [(key, cell.wrong) for key, cell in matrix.items() if not cell.kept] == []
    assert len(matrix) > 100
    assert {buffer for buffer, _, _ in matrix} == {
        buffer.name for buffer in registry.operation(OPERATION).buffers
    }


def test_guards_see_reads_whose_value_is_thrown_away(matrix: injection.Matrix) -> None:
    """Of every buffer, past the end and before the start; the byte diff sees none of them."""
    for (buffer, kind, layer), cell in matrix.items():
        if kind in (Kind("read", "past"), Kind("read", "before")):
            assert cell.seen == (0 if layer == "diff" else cell.tries), (buffer, kind, layer)


def test_a_launch_without_an_injection_is_clean() -> None:
    """The objects of the matrix find nothing by themselves, and nothing is left injected."""
    case = suitable_cases(OPERATION, 1)[0]
    with Checker(OPERATION, "bundled:token", "host", "inject") as checker:
        assert checker.check(case).clean
        over = Injection("block_table", 2**35, 4, "read")
        assert [f.title for f in checker.check(case, injection=over).failures] == [
            "read past block_table"
        ]
        assert checker.check(case).clean


def test_other_builds_do_not_inject() -> None:
    """An object without the flag refuses, rather than let an access pass for unseen."""
    case = suitable_cases(OPERATION, 1)[0]
    with (
        Checker(OPERATION, "bundled:token", "host", "release") as checker,
        pytest.raises(CannotCheckError, match="pf_inject"),
    ):
        checker.check(case, injection=Injection("block_table", 0, 4, "read"))


def test_one_run_goes_on_where_another_was_stopped() -> None:
    """All cells have had their second try before any has its third."""
    whole = trials(OPERATION, 4, LAYERS[:1])
    rest = trials(OPERATION, 4, LAYERS[:1], skip=2)
    assert rest == whole[-len(rest) :]
    before = Counter(trial.key for trial in whole[: -len(rest)])
    assert set(before.values()) == {2}
    assert before + Counter(trial.key for trial in rest) == Counter(trial.key for trial in whole)


def test_accesses_are_forbidden_and_aligned() -> None:
    """No injected access touches a byte that the contract allows for its kind."""
    one = registry.operation(OPERATION)
    for case in suitable_cases(OPERATION, 3):
        plan = one.plan(case)
        expectation = one.expect(plan)
        for buffer in plan.buffers.values():
            if not buffer.memory_bytes:
                continue
            for kind, made in injections(plan, expectation, buffer):
                footprint = expectation.footprint(buffer.name)
                allowed = footprint.may_read if kind.access == "read" else footprint.changeable
                begin, end = made.offset_bytes, made.offset_bytes + made.size_bytes
                assert not allowed.mask(begin, end).any()
                assert made.offset_bytes % made.size_bytes == 0


def test_accesses_in_holes_are_forbidden_and_aligned() -> None:
    """They lie in the workspace behind their buffer, far from both its ends."""
    one = registry.operation(OPERATION)
    for case in suitable_cases(OPERATION, 1):
        for name in (
            buffer.name for buffer in one.plan(case).buffers.values() if not buffer.is_null
        ):
            buffer = one.plan(with_hole(case, name)).buffers[name]
            made = list(in_hole(buffer))
            assert [kind.access for kind, _ in made] == ["read", "write"]
            for _, access in made:
                assert access.offset_bytes % access.size_bytes == 0
                assert access.offset_bytes > buffer.required_bytes + WHOLE_BYTES
                assert access.offset_bytes < buffer.memory_bytes - WHOLE_BYTES


def test_a_layer_that_does_not_keep_its_promise_is_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A guard that is said to see reads inside buffers: found out, with the case."""
    monkeypatch.setattr(injection.Layer, "promises", lambda *_: True)
    monkeypatch.chdir(tmp_path)  # for the cases
    assert main(["matrix", "--device", "host", "--op", OPERATION]) == 1
    said = capsys.readouterr()
    assert "cells not as promised" in said.out
    assert "!" in said.out
    found = re.search(
        r"read inside dst, try 1: the layer guard promises to see it; seen: nothing; "
        r"the case is in (\S+)$",
        said.err,
        re.M,
    )
    assert found, said.err
    assert load_case(found[1]).operation == OPERATION


def test_kinds_and_layers_are_named_once() -> None:
    """The table has a column for each kind and a letter for each layer."""
    assert len({kind.name for kind in KINDS}) == len(KINDS) == 10
    assert len({layer.name for layer in LAYERS}) == len(LAYERS) == 3


def test_the_table_fits_80_columns() -> None:
    """With all kinds, and the longest name that a buffer has."""
    for name in {buffer.name for one in registry.operations().values() for buffer in one.buffers}:
        seen = {(name, kind, layer.name): Cell(promised=True) for kind in KINDS for layer in LAYERS}
        lines = table(seen, KINDS).splitlines()
        assert max(map(len, lines)) <= 80, name
        assert lines[2].split() == [name, *["GDC"] * len(KINDS)]


TRITON = "cp_gather_indexer_k_quant_cache_hinted"


@pytest.mark.parametrize(
    "kinds", [KINDS[:2], pytest.param(KINDS, marks=pytest.mark.slow)], ids=["near reads", "all"]
)
def test_a_triton_kernel_has_the_same_matrix(kinds: tuple[Kind, ...]) -> None:
    """An access follows its launch by a kernel of its own; the layers see it in the interpreter."""
    cells = examine(TRITON, "bundled:triton", "host", jobs=2, kinds=kinds)
    assert [(key, cell.wrong) for key, cell in cells.items() if not cell.kept] == []
    assert {layer for _, _, layer in cells} == {layer.name for layer in LAYERS}
    assert all(
        cells["token_to_seq", kind, "checked"].seen for kind in kinds if kind.where != "inside"
    )


def test_a_triton_kernel_that_was_not_built_to_inject_refuses() -> None:
    """As a native object does."""
    case = suitable_cases(TRITON, 1)[0]
    with (
        Checker(TRITON, "bundled:triton", "host", "release") as checker,
        pytest.raises(CannotCheckError, match="not built to inject"),
    ):
        checker.check(case, injection=Injection("src", 0, 1, "read"))


def test_a_part_of_the_matrix_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """By names of layers and kinds; another one is told which there are."""
    asked = ["matrix", "--device", "host", "--op", OPERATION, "--tries", "2", "--jobs", "2"]
    assert main([*asked, "--layer", "guard", "--kind", "read past", "--kind", "read before"]) == 0
    said = capsys.readouterr().out
    buffers = len(registry.operation(OPERATION).buffers)
    assert f"{2 * 2 * buffers} injected accesses in {2 * buffers} cells, 0 cells" in said
    assert re.search(r"^ +read read\n +past before\nsrc +G-- +G--$", said, re.M)
    assert main([*asked, "--layer", "wall"]) == 2
    assert "unknown layer 'wall'; there is guard, diff, checked" in capsys.readouterr().err


def interrupt_after(monkeypatch: pytest.MonkeyPatch, launches: int) -> None:
    """Ends the run from the keyboard once so many accesses were made."""
    inside = Checker.check
    launched: list[Case] = []

    def check(checker: Checker, case: Case, *, injection: Injection | None = None) -> Verdict:
        if len(launched) == launches:
            raise KeyboardInterrupt
        launched.append(case)
        return inside(checker, case, injection=injection)

    monkeypatch.setattr(Checker, "check", check)


def test_what_was_examined_before_an_interruption_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the table and in the report; the run is no pass."""
    interrupt_after(monkeypatch, 3)
    asked = ["matrix", "--device", "host", "--op", OPERATION, "--layer", "guard"]
    assert main([*asked, "--report", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "3 injected accesses in 3 cells, 0 cells not as promised" in said.out
    assert "interrupted: what is above was examined" in said.err
    report = json.loads((tmp_path / "matrix.json").read_text())
    assert report["was_interrupted"]
    assert len(report["cells"]) == 3


def test_a_report_that_cannot_be_written_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of a disk that is full by then: one sentence after the table, no internal error."""

    def write_whole(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(matrix_report, "write_whole", write_whole)
    monkeypatch.setattr(command, "_WRITE_EVERY_S", 0)
    asked = ["matrix", "--device", "host", "--op", OPERATION, "--layer", "guard"]
    assert main([*asked, "--kind", "read past", "--report", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "0 cells not as promised" in said.out
    assert said.err.startswith("pagefuzz: cannot write ")
    assert "No space left on device" in said.err
    assert "internal error" not in said.err


def test_an_operation_that_cannot_be_examined_does_not_cost_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Such as a Triton kernel where there is no Triton: the rest is examined and reported."""
    inside = Checker.__init__

    def begin(checker: Checker, operation: str, *others: Any, **named: Any) -> None:
        if operation == "copy_blocks":
            raise CannotCheckError("there is no such compiler")
        inside(checker, operation, *others, **named)

    monkeypatch.setattr(Checker, "__init__", begin)
    asked = ["matrix", "--device", "host", "--op", "copy_blocks", "--op", OPERATION]
    asked += ["--layer", "guard", "--kind", "read past", "--report", str(tmp_path)]
    assert main(asked) == 2
    assert "there is no such compiler" in capsys.readouterr().err
    report = json.loads((tmp_path / "matrix.json").read_text())
    assert {cell["operation"] for cell in report["cells"]} == {OPERATION}
    assert report["problems"] == ["there is no such compiler"]


@pytest.mark.parametrize(("launches", "code", "sentence"), [(0, 2, "nothing was"), (3, 1, "what")])
def test_an_interrupted_matrix_says_what_it_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    launches: int,
    code: int,
    sentence: str,
) -> None:
    """As of a campaign: what was found counts, and is exit code 1."""
    interrupt_after(monkeypatch, launches)
    monkeypatch.setattr(injection.Layer, "promises", lambda *_: False)
    monkeypatch.chdir(tmp_path)  # for the cases of what is found
    asked = ["matrix", "--device", "host", "--op", OPERATION, "--layer", "guard"]
    assert main([*asked, "--kind", "read past"]) == code
    assert f"pagefuzz: interrupted: {sentence}" in capsys.readouterr().err


def test_what_is_not_as_promised_is_a_sentence_and_a_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No case in the sentence: it is in a file that `load_case` reads, and in the report; the
    command beside it makes that try again."""
    monkeypatch.setattr(injection.Layer, "promises", lambda *_: False)
    monkeypatch.chdir(tmp_path)
    asked = ["matrix", "--device", "host", "--op", OPERATION, "--layer", "guard"]
    asked += ["--kind", "read past", "--tries", "2", "--skip", "1"]
    assert main([*asked, "--report", "out"]) == 1
    said = capsys.readouterr().err.splitlines()
    buffers = len(registry.operation(OPERATION).buffers)
    assert len(said) == 2 * buffers
    assert all("{" not in line and len(line) < 300 for line in said)
    found = re.fullmatch(
        rf"pagefuzz: not as promised: {OPERATION}/(\S+): read past src, try 2: the layer guard "
        r"promises to see nothing; seen: read past src; the case is in (out/findings/\S+\.json)",
        said[0],
    )
    assert found, said[0]
    assert said[1] == (
        f"  again: pagefuzz matrix --device host --op {OPERATION} --subject {found[1]} "
        "--layer guard --kind 'read past' --tries 2 --skip 1"
    )
    (cell,) = (
        cell
        for cell in json.loads(Path("out/matrix.json").read_text())["cells"]
        if cell["buffer"] == "src"
    )
    (wrong,) = cell["wrong"]
    assert Case.from_json(wrong["case"]) == load_case(found[2])
    assert (wrong["try"], wrong["seen"]) == (2, "read past src")
    assert wrong["injection"]["kind"] == "read"
    assert main([*shlex.split(said[1])[2:], "--report", "again"]) == 1
    again = sorted(one.name for one in Path("again/findings").iterdir())
    assert again == sorted(one.name for one in Path("out/findings").iterdir())
    assert load_case(Path("again/findings", Path(found[2]).name)) == load_case(found[2])


def test_cases_that_cannot_be_stored_hide_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Said once, beside what is not as promised; exit 1 all the same."""
    monkeypatch.setattr(injection.Layer, "promises", lambda *_: False)
    monkeypatch.chdir(tmp_path)
    Path("findings").write_text("a file is in the way")
    asked = ["matrix", "--device", "host", "--op", OPERATION, "--layer", "guard"]
    assert main([*asked, "--kind", "read past"]) == 1
    said = capsys.readouterr().err
    assert "seen: read past src; the case is not stored\n" in said
    assert said.count("cannot store cases in findings") == 1
