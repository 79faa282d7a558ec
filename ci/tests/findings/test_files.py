"""Findings on disk."""

from __future__ import annotations

import ast
import json
from dataclasses import replace

import pytest

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import Finding, load_finding
from pagefuzz.oracles.case import CaseError, load_case
from pagefuzz.oracles.verdict import Failure, Outcome


def test_round_trip(over_read, tmp_path):
    """What is read back is what was written, and a case file too."""
    finding = over_read()
    path = finding.save(tmp_path)
    assert load_finding(path) == finding
    assert load_case(path) == finding.case
    assert json.loads(path.read_text())["pagefuzz_finding"] == 1


def test_how_long_a_launch_was_waited_for_is_kept(over_read, tmp_path):
    """In seconds; a file from before there was such a field has none."""
    finding = over_read(hang_after_s=2.5, repeats_hang_after_s=1.5, not_minimised="so and so")
    path = finding.save(tmp_path)
    assert load_finding(path) == finding
    data = json.loads(path.read_text())
    for name in ("hang_after_s", "repeats_hang_after_s", "not_minimised"):
        del data[name]
    path.write_text(json.dumps(data))
    old = load_finding(path)
    assert (old.hang_after_s, old.repeats_hang_after_s, old.not_minimised) == (None, None, "")


def test_names_say_what_it_is(over_read, tmp_path):
    """Kind, buffer and four hex digits; the test beside it has the same name and is Python."""
    finding = over_read()
    path = finding.save(tmp_path)
    assert path.name == f"bounds-block_table-{finding.digest[:4]}.json"
    test = tmp_path / f"test_bounds_block_table_{finding.digest[:4]}.py"
    names = [n.name for n in ast.parse(test.read_text()).body if isinstance(n, ast.FunctionDef)]
    assert names == [test.stem]
    assert {p.name for p in tmp_path.iterdir()} == {path.name, test.name}


def test_saving_again_replaces(over_read, tmp_path):
    """The same finding with a better case keeps its file."""
    first = over_read(minimised=False).save(tmp_path)
    second = over_read(minimised=True).save(tmp_path)
    assert first == second
    assert load_finding(second).minimised


def test_a_collision_of_digits_loses_nothing(over_read, tmp_path):
    """Another finding with the same four digits gets a longer name."""
    finding, other = over_read(), over_read(subject="bundled:token")
    taken = tmp_path / f"{finding.stem()}.json"
    taken.write_text(json.dumps(other.to_json()))
    path = finding.save(tmp_path)
    assert path != taken
    assert load_finding(taken) == other
    assert load_finding(path) == finding


def test_backends_and_builds_are_different_findings(over_read):
    """The same fault seen on another backend or in another build does not overwrite the first."""
    digests = {
        over_read(**changes).digest
        for changes in ({}, {"backend": "cuda"}, {"build": "release"}, {"subject": "twin:x"})
    }
    assert len(digests) == 4


def test_nowhere_to_write(over_read, tmp_path):
    """One sentence that names the folder, and nothing left half-written."""
    folder = tmp_path / "file"
    folder.write_text("")
    with pytest.raises(CannotCheckError, match=r"cannot store a finding in .*file: "):
        over_read().save(folder)


def test_a_full_disk(over_read, tmp_path, monkeypatch):
    """Writing stops half-way: the old file stays whole, and no temporary one is left."""
    path = over_read(minimised=False).save(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CannotCheckError, match="No space left on device"):
        over_read(minimised=True).save(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert not load_finding(path).minimised


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.pop("verdict"), "lacks 'verdict'"),
        (lambda d: d.update(pagefuzz_finding=99), "schema version"),
        (lambda d: d.update(case={}), "pagefuzz_case"),
        (lambda d: d["verdict"].update(failures=[]), "a verdict that failed"),
        (lambda d: d["verdict"].update(outcome="splendid"), "splendid"),
        (lambda d: d.update(runs=float("inf")), "malformed"),
        (lambda d: d.update(flags="checked"), "flags must be a list of names, got 'checked'"),
        (lambda d: d.update(operation="x"), "is of 'x', but its case of 'cp_gather_cache'"),
        *(
            (
                lambda d, name=name, odd=odd: d.update({name: odd}),
                f"{name} must be seconds from 1 to 86400, or null, got",
            )
            for name in ("hang_after_s", "repeats_hang_after_s")
            for odd in ("1s", True, 0, 0.5, 86401, float("nan"), [2])
        ),
    ],
)
def test_malformed_findings(over_read, tmp_path, change, sentence):
    """A finding that is not whole is refused with the file's name and one sentence."""
    data = over_read().to_json()
    change(data)
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(data))
    with pytest.raises(CaseError, match=rf"odd\.json: .*{sentence}"):
        load_finding(path)


def test_hardening_notes_are_no_findings(over_read):
    """A verdict with nothing but notes has no cause."""
    finding = over_read()
    clean = replace(finding.verdict, outcome=Outcome.CLEAN)
    with pytest.raises(ValueError, match="verdict that failed"):
        _ = replace(finding, verdict=clean).failure


def test_a_title_names_the_file(over_read):
    """Without a buffer among the keys the title is in the name."""
    finding = over_read()
    death = Failure("death", "the worker died", ("SIGSEGV",))
    other = Finding(**{**vars(finding), "verdict": replace(finding.verdict, failures=(death,))})
    assert other.stem().startswith("death-the-worker-died-")
