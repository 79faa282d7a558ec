"""What a worker prints: kept where it says why a process ended, and bounded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from ci.misbehaving import ENDLESS_NOISE, GIBIBYTE_OF_NOISE, REPORT_AND_NOISE, case_of

from pagefuzz.harness.running import Assignment
from pagefuzz.harness.workers import output
from pagefuzz.harness.workers.client import Worker
from pagefuzz.harness.workers.output import KEPT_BYTES, LIMIT_BYTES, OutputFile
from pagefuzz.oracles.observation import Death

pytestmark = pytest.mark.usefixtures("own_servers")

PRINTED_BYTES = 2**30

#: All that may be held of it: what is kept, and what comes while a busy machine looks elsewhere.
MOST_BYTES = 2**29

LINE = b"a line of thirty-two bytes ......\n"


@dataclass
class Seen:
    """Of an output file, whenever it was about to be cut back or was read."""

    held_bytes: int = 0
    printed_bytes: int = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    bound, text = OutputFile.bound, OutputFile.text

    def look(file: OutputFile) -> None:
        found.held_bytes = max(found.held_bytes, file.held_bytes)
        found.printed_bytes = max(found.printed_bytes, os.fstat(file.descriptor).st_size)

    def looked_bound(file: OutputFile) -> None:
        look(file)
        bound(file)

    def looked_text(file: OutputFile) -> str:
        look(file)
        return text(file)

    monkeypatch.setattr(OutputFile, "bound", looked_bound)
    monkeypatch.setattr(OutputFile, "text", looked_text)
    return found


@pytest.fixture
def file() -> Iterator[OutputFile]:
    with OutputFile() as made:
        yield made


def say(file: OutputFile, said: bytes) -> None:
    while said:
        said = said[os.write(file.descriptor, said) :]


def test_a_gibibyte_is_not_held(worker: Worker, seen: Seen) -> None:
    """Its last words are there all the same."""
    death = worker.run(case_of(GIBIBYTE_OF_NOISE))
    assert isinstance(death, Death)
    assert death.how == "SIGBUS"
    assert death.detail.splitlines()[-1] == "the last words"
    assert seen.printed_bytes > PRINTED_BYTES
    assert seen.held_bytes < MOST_BYTES


def test_a_report_outlives_what_is_printed_after_it(worker: Worker, seen: Seen) -> None:
    """It is named and told from its first line on."""
    death = worker.run(case_of(REPORT_AND_NOISE))
    assert isinstance(death, Death)
    assert death.how == "AddressSanitizer made-up"
    assert death.detail.startswith("==1==ERROR: AddressSanitizer: made-up on address 0x1\n")
    assert seen.held_bytes < MOST_BYTES


def test_printing_without_end_is_a_hang(assignment: Assignment, seen: Seen) -> None:
    """Judged as one that is silent; the next case starts with nothing."""
    worker = Worker(assignment, timeout_s=1)
    try:
        death = worker.run(case_of(ENDLESS_NOISE))
        assert isinstance(death, Death)
        assert death.how == "hang"
        assert death.detail.splitlines()[-1].endswith("xxx")
        assert seen.printed_bytes > LIMIT_BYTES
        assert seen.held_bytes < MOST_BYTES
        assert not isinstance(worker.run(case_of(1)), Death)
    finally:
        worker.close()


def test_a_little_is_kept_whole(file: OutputFile) -> None:
    """Up to the limit nothing is let go, and the last 64 KiB are told."""
    said = LINE * (LIMIT_BYTES // len(LINE))
    say(file, said)
    file.bound()
    assert file.held_bytes >= len(said)
    assert file.text() == said[-KEPT_BYTES:].decode()


def test_much_is_let_go_but_the_end(file: OutputFile) -> None:
    """Time and again: no more than the limit is left, and the end goes on where it was."""
    for _ in range(3):
        say(file, LINE * (3 * LIMIT_BYTES // len(LINE)))
        file.bound()
        assert file.held_bytes < LIMIT_BYTES
        say(file, b"the end")
        assert file.text().endswith(LINE.decode() + "the end")
        assert len(file.text()) == KEPT_BYTES
    file.clear()
    assert (file.text(), file.held_bytes) == ("", 0)


@pytest.mark.parametrize("before_bytes", [0, 2**20 - 10, LIMIT_BYTES, 2 * LIMIT_BYTES + 5])
@pytest.mark.parametrize("is_bound", [False, True])
def test_a_report_is_kept_wherever_it_is(
    file: OutputFile, before_bytes: int, is_bound: bool
) -> None:
    """Let go or still there, across what is searched at once; the next case forgets it."""
    report = b"==7==ERROR: AddressSanitizer: heap-buffer-overflow\n    #0 where\n"
    noise = b"." * 63 + b"\n"
    say(file, b"." * max(0, before_bytes - 1) + b"\n" + report)
    for _ in range(3):
        say(file, noise * (LIMIT_BYTES // len(noise)))
        if is_bound:
            file.bound()
    text = file.text()
    assert text.startswith(report.decode())
    assert text.endswith(noise.decode())
    file.clear()
    say(file, b"another case")
    assert file.text() == "another case"


def test_what_is_let_go_at_once_is_searched_from_its_end(
    file: OutputFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is bounded, so that it keeps up with any printing."""
    monkeypatch.setattr(output, "_SEARCHED_BYTES", 2**20)
    say(file, b"ERROR: AddressSanitizer: lost\n" + LINE * (LIMIT_BYTES // len(LINE)))
    say(file, b"ERROR: AddressSanitizer: found\n" + LINE * (2**19 // len(LINE)))
    file.bound()
    assert file.text().startswith("ERROR: AddressSanitizer: found\n")
