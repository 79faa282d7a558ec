"""Subjects are found by themselves, and what does not fit together fails the run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagefuzz.harness import subjects
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.triton import declared

OPERATION = "cp_gather_cache"
HINTED = "cp_gather_indexer_k_quant_cache_hinted"
CACHED = (subjects.bundled, subjects.subjects, subjects.parse_abi, declared.launchers)
REPLACE = "[[replace]]\nfind = 'a'\nwith = 'b'\n"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of `kernels/` that a test may change."""
    folder = tmp_path / "kernels"
    for name in ("abi", "operations", "triton"):
        shutil.copytree(subjects.KERNELS / name, folder / name)
    (folder / "twins").mkdir()
    monkeypatch.setattr(subjects, "KERNELS", folder)
    for function in CACHED:
        function.cache_clear()
    yield folder
    for function in CACHED:
        function.cache_clear()


def change(folder: Path, find: str, replacement: str) -> None:
    path = folder / "operations" / f"{OPERATION}.cu"
    text = path.read_text()
    assert find in text
    path.write_text(text.replace(find, replacement, 1))


def test_bundled_subjects_are_read_from_the_fragment() -> None:
    """The three schedules of the raw gather are there with what their comments say."""
    by_name = {s.name: s for s in subjects.subjects() if s.operation == OPERATION}
    page = by_name["bundled:page"]
    assert (page.operation, page.symbol) == (OPERATION, f"pf_{OPERATION}_page")
    assert page.promises_containment
    assert not page.faults
    merged = by_name["bundled:page-as-merged"]
    assert merged.symbol == f"pf_{OPERATION}_page_as_merged"
    assert "no table-width guard" in merged.faults
    assert by_name["bundled:token"].schedule == "token"


def test_an_unknown_subject_lists_what_there_is() -> None:
    """The error names every subject, and the way to name a twin's file."""
    with pytest.raises(CannotCheckError, match=r"unknown subject 'bundled:pgae'.*bundled:page, "):
        subjects.subject("bundled:pgae")
    with pytest.raises(CannotCheckError, match=r"is one of .*cp_gather_cache.*, not of unheard_of"):
        subjects.subject("bundled:page", "unheard_of")


def test_a_twin_is_known_elsewhere_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its name has the whole path, with which a finding is replayed from any folder."""
    source = next((subjects.KERNELS / "twins").glob("*.toml"))
    (tmp_path / "my twin.toml").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    name = subjects.subject("twin:my twin.toml").name
    monkeypatch.chdir("/")
    assert name == f"twin:{tmp_path / 'my twin.toml'}"
    assert subjects.subject(name).name == name


def test_the_registry_agrees_with_the_kernels() -> None:
    """Every operation is bound as it stands."""
    subjects.check_registry()


@pytest.mark.parametrize(
    ("find", "replacement", "complaint"),
    [
        ("  int64_t num_pages;\n", "", "field 10 .* is table_width .* has num_pages"),
        ("int64_t dst_rows;", "int32_t dst_rows;", "is dst_rows of type int32_t"),
        ("pf_array starts; ", "pf_array beginnings; ", "is beginnings of type pf_array"),
        ("  void *stream;\n", "  void *stream;\n  int64_t more;\n", "is more of type int64_t"),
        ("} pf_cp_gather_cache_args;", "} pf_arguments;", "not C that cffi can parse"),
        ("// pagefuzz-abi: end", "// the end", "ABI fragment must stand between"),
        ("schedule: token", "schedule: tokens", "must be launched by pf_cp_gather_cache_tokens"),
        ("contains: yes", "contains: perhaps", "must be yes or no"),
        ("summary: one", "sumary: one", "lacks a line 'summary: ...'"),
    ],
)
def test_a_planted_mismatch_fails_the_registry(
    planted: Path, find: str, replacement: str, complaint: str
) -> None:
    """An operation that cannot be bound is named, with the field and what each side has there."""
    change(planted, find, replacement)
    with pytest.raises(CannotCheckError, match=complaint):
        subjects.check_registry()


@pytest.mark.parametrize(
    ("find", "replacement", "complaint"),
    [
        ("    num_pages: int,\n", "", "parameter 11 of pf_.* is table_width of type int"),
        ("    starts: Array,", "    beginnings: Array,", "is beginnings of type Array"),
        ("    starts: Array,", "    starts: int,", "is starts of type int, .* starts of type Arr"),
        ("    stream: int,\n", "", "parameter 23 of pf_.* is nothing"),
        ("schedule: triton\n", "schedule: tritium\n", "must be launched by pf_.*_tritium"),
        ("contains: yes", "contains: perhaps", "must be yes or no"),
        ("def pf_", "def pg_", "declares no launcher"),
        ("def pf_", "def ", "is not Python"),
    ],
)
def test_a_planted_mismatch_of_a_triton_kernel_fails_the_registry(
    planted: Path, find: str, replacement: str, complaint: str
) -> None:
    """The parameters of a launcher in Python are bound like the fields of a struct in C."""
    path = planted / "triton" / f"{HINTED}.py"
    text = path.read_text()
    assert find in text
    if complaint == "is not Python":
        replacement = "def 1"
    path.write_text(text.replace(find, replacement))
    with pytest.raises(CannotCheckError, match=complaint):
        subjects.check_registry()


def test_an_operation_has_one_kernel_source(planted: Path) -> None:
    """A .cu and a .py of one name are two, of which neither may be left out in silence."""
    cuda = planted / "operations" / f"{OPERATION}.cu"
    shutil.copy(planted / "triton" / f"{HINTED}.py", planted / "triton" / f"{OPERATION}.py")
    with pytest.raises(CannotCheckError, match=f"{OPERATION} has two kernel sources"):
        subjects.check_registry()
    assert cuda.exists()


def test_an_operation_without_a_kernel_fails_the_registry(planted: Path) -> None:
    """Neither an operation without a .cu nor a .cu without an operation goes unnoticed."""
    source = planted / "operations" / f"{OPERATION}.cu"
    shutil.copy(source, source.with_stem("stranger"))
    with pytest.raises(CannotCheckError, match=r"stranger is in .* no operation of that name"):
        subjects.check_registry()
    source.with_stem("stranger").unlink()
    source.unlink()
    with pytest.raises(CannotCheckError, match=f"no kernels/operations/{OPERATION}.cu"):
        subjects.check_registry()


def test_twins_inherit_from_the_schedule_they_change(planted: Path) -> None:
    """A twin is found by name and by path, promises what its schedule does and says its fault."""
    text = f'operation = "{OPERATION}"\nschedule = "page"\nbreaks = "loses the last row"\n{REPLACE}'
    path = planted / "twins" / "lost-row.toml"
    path.write_text(text)
    for name in ("twin:lost-row", f"twin:{path}"):
        twin = subjects.subject(name)
        assert twin.name == name
        assert twin.twin == path
        assert twin.symbol == f"pf_{OPERATION}_page"
        assert twin.promises_containment
        assert twin.faults == "loses the last row"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("operation = 3", "needs"),
        ("not toml", "not TOML"),
        (f'operation="x"\nschedule="page"\nbreaks="y"\n{REPLACE}', "changes a bundled schedule"),
    ],
)
def test_a_malformed_twin_is_one_clear_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    """What is wrong with a twin's file is said, and the file named."""
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(CannotCheckError, match=rf"odd\.toml.*{complaint}"):
        subjects.subject(f"twin:{path}")
    with pytest.raises(CannotCheckError, match=r"cannot read the twin .*missing\.toml"):
        subjects.subject(f"twin:{tmp_path / 'missing.toml'}")
