"""Objects that behave as a test needs them to, built from C with the ABI of a real operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ci.misbehaving import assignment_of, compile_into

from pagefuzz.harness.running import Assignment
from pagefuzz.harness.workers.client import Worker
from pagefuzz.harness.workers.fork_server import close_servers

Compile = Callable[..., Path]


@pytest.fixture(scope="module")
def own_servers() -> Iterator[None]:
    """A file's end is that of what it has started: for files that do harm to servers and workers.
    To start a server takes others longer than it is worth."""
    yield
    close_servers()


@pytest.fixture(scope="session")
def compile_misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles `misbehaving.c` with extra compiler arguments."""
    return lambda *arguments: compile_into(tmp_path_factory.mktemp("object"), *arguments)


@pytest.fixture(scope="session")
def misbehaving(compile_misbehaving: Compile) -> Path:
    return compile_misbehaving()


@pytest.fixture
def assignment(misbehaving: Path) -> Assignment:
    return assignment_of(misbehaving)


@pytest.fixture
def worker(assignment: Assignment) -> Iterator[Worker]:
    made = Worker(assignment, timeout_s=30)
    yield made
    made.close()
