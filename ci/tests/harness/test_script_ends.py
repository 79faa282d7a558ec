"""How scripts end, and where their reports go."""

from __future__ import annotations

from pathlib import Path

import pytest
from ci.reports import exit_code, require_report

from pagefuzz.harness.errors import CannotCheckError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CannotCheckError("no GPU"), "could not try: no GPU\n"),
        (KeyboardInterrupt(), "could not try: interrupted\n"),
        (MemoryError(), "could not try: this machine has no memory left\n"),
        (KeyError("x"), "could not try: internal error: KeyError: 'x'; please report it\n"),
    ],
)
def test_whatever_goes_wrong_is_no_result(
    error: BaseException, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 and a sentence; Python's own exit code of an exception is 1, a result."""

    def run() -> int:
        raise error

    assert exit_code(run, "could not try") == 2
    assert capsys.readouterr().err.endswith(said)


def test_a_report_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    """A folder in its place, and a file in place of its folder."""
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "report.json"):
        with pytest.raises(CannotCheckError, match=r"cannot write"):
            require_report(path)
    require_report(tmp_path / "new" / "report.json")
    require_report(None)
