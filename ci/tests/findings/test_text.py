"""The text of a finding, as it is printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pagefuzz.harness.cli import patience_s

AT_80 = """\
BOUNDS  read past block_table
        cp_gather_cache · bundled:page-as-merged · host · checked build
case    R=1  BS=1  W=1  starts=[0, 1]  seq_starts=[1]  entry 1 B, dense, seed 0
        class: hostile
access  reads 4 bytes at block_table[1] (bytes 4..7 of 4); the row ends at
        column 0
where   kernels/operations/cp_gather_cache.cu:88  block (0,0,0) thread (0,0,0)
means   request 0, row 0 -> token 1 -> logical page 1 of 1
effect  no byte changed
seen    bounds (checked build), output (two fills against the reference); looked
        and saw nothing: overflow, untouched; 10 of 10 further runs failed the
        same way
again   pagefuzz replay findings/bounds-block_table-1f3a.json
        pytest findings/test_bounds_block_table_1f3a.py"""

PATH = Path("findings/bounds-block_table-1f3a.json")


def test_at_80_columns(over_read):
    """Every field in its place, wrapped at 80 columns."""
    assert over_read().text(80, PATH) == AT_80


def test_at_120_columns(over_read):
    """A wide terminal has the title and the subject on one line."""
    first = over_read().text(120, PATH).splitlines()[0]
    assert first.startswith("BOUNDS  read past block_table   ")
    assert first.endswith("   cp_gather_cache · bundled:page-as-merged · host · checked build")
    assert len(first) == 120


@pytest.mark.parametrize("width", [60, 80, 100, 132])
def test_never_wider_than_asked_for(over_read, width):
    """No line is longer than the terminal, file names apart."""
    lines = over_read().text(width, PATH).split("again   ")[0].splitlines()
    assert max(map(len, lines)) <= width


def test_without_a_file_there_is_nothing_to_rerun(over_read):
    """A finding that could not be stored has no reproduction lines."""
    assert "pagefuzz replay" not in over_read().text(80)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.0, "1s"), (1.5, "1.5s"), (12345.678, "12345.678s"), (86400.0, "86400s")],
)
def test_rerun_lines_wait_as_long_as_the_run_did(over_read, seconds, text):
    """In a form that the command takes; the default is not spelled out (`AT_80`)."""
    lines = over_read(hang_after_s=seconds).text(80, PATH).splitlines()
    assert lines[-2] == f"again   pagefuzz replay {PATH} --hang-after {text}"
    assert patience_s(text) == seconds


def test_a_release_build_says_what_it_cannot_see(over_read):
    """Who could not look is said."""
    failing = over_read()
    verdict = failing.verdict
    consequence = verdict.failures[1]
    blind = type(verdict)(
        verdict.outcome, verdict.case_class, (consequence,), checked={"output": 1}, launches=2
    )
    text = over_read(verdict=blind, build="release").text(200)
    assert "blind without a checked build: bounds, overflow" in text


CUDA_TRITON = {"subject": "bundled:triton", "backend": "cuda", "flags": ("cuda", "triton")}


@pytest.mark.parametrize(
    ("changes", "built", "blind"),
    [
        (CUDA_TRITON, "cuda · triton build (not checked)", "blind without a checked build: "),
        ({**CUDA_TRITON, "build": "release"}, "cuda · triton build", "blind without a checked "),
        ({"flags": ("checked", "triton")}, "host · checked,triton build", "blind: "),
        ({"flags": ("checked",)}, "host · checked build", "blind: "),
        ({"flags": ("checked", "cuda"), "backend": "cuda"}, "cuda · checked build", "blind: "),
        ({"flags": ("release",), "build": "release"}, "host · release build", "blind without "),
        ({"flags": ()}, "host · checked build", "blind: "),  # a file from before
    ],
)
def test_what_was_asked_for_is_not_what_was_built(over_read, changes, built, blind):
    """The head says what the object is; who did not look is blind, whatever was asked for."""
    whole = over_read(**changes)
    assert f" · {built}   " in f"{whole.text(300).splitlines()[0]}   "
    assert "blind" not in whole.text(300)
    verdict = whole.verdict
    unseen = type(verdict)(
        verdict.outcome, verdict.case_class, verdict.failures[1:], checked={"output": 1}
    )
    assert f"; {blind}" in over_read(**changes, verdict=unseen).text(300)
    assert "bounds, overflow" in over_read(**changes, verdict=unseen).text(300)
    half = type(verdict)(
        verdict.outcome, verdict.case_class, verdict.failures[1:], checked={"bounds": 1}
    )
    assert ": overflow; 10 of 10" in over_read(**changes, verdict=half).text(300)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"repeats": 3}, "3 of 10 further runs failed the same way"),
        ({"runs": 0}, "not repeated"),
        ({"minimised": False}, "10 of 10 further runs failed the same way; not fully minimised"),
        ({"minimised": False, "not_minimised": "so and so"}, "not fully minimised, so and so"),
        (
            {"repeats_hang_after_s": 1.5},
            "10 of 10 further runs failed the same way, each launch given 1.5 s",
        ),
    ],
)
def test_what_is_uncertain_is_said(over_read, changes, said):
    """How often it repeats, and whether it is minimal."""
    assert said in over_read(**changes).text(200)


def test_a_path_is_quoted_for_the_shell(over_read, tmp_path):
    """Both rerun lines can be pasted, whatever the folder is called."""
    path = tmp_path / "it's a folder" / "x-1.json"
    *_, replay, pytest_line = over_read().text(80, path).splitlines()
    assert shlex.split(replay) == ["again", "pagefuzz", "replay", str(path)]
    assert shlex.split(pytest_line) == ["pytest", str(path.with_name("test_x_1.py"))]


@pytest.mark.parametrize(
    ("backend", "build", "option"),
    [
        ("host", "release", " --build checked"),
        ("cuda", "release", " --build checked"),
        ("cuda", "checked", " --device host"),
        ("host", "checked", None),
    ],
)
def test_what_has_no_line_says_which_replay_may_name_it(over_read, backend, build, option):
    """A wrong byte or a lost context does not say who did it; an access with its line does."""
    failing = over_read(backend=backend, build=build)
    assert "where   pagefuzz" not in failing.text(80, PATH)
    (_, wrong_byte), verdict = failing.verdict.failures, failing.verdict
    assert "where" not in wrong_byte.details
    nameless = type(verdict)(verdict.outcome, verdict.case_class, (wrong_byte,), checked={})
    failing = over_read(backend=backend, build=build, verdict=nameless)
    *_, last = failing.text(80, PATH).splitlines()
    if option is None:
        assert last.startswith("        pytest ")
    else:
        assert last == f"where   pagefuzz replay {PATH}{option}"
    assert "--build" not in failing.text(80)
