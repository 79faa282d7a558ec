"""Profiles and options of the test-suite.

`slow` tests run with --all only. `cuda` tests without a GPU are *not run*, which the summary says
with their number; asked for by name (`-m cuda`), they fail the session instead.
"""

from __future__ import annotations

import os
import re
import signal

import pytest
from hypothesis import settings

from pagefuzz.harness.campaign.drawing import draw_from_the_seed_alone

NO_GPU = "not run: no GPU"

# The same examples every time, and no deadline: builds and worker starts take as long as they take.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")
draw_from_the_seed_alone()

# What is ignored, as under nohup, would be in every process that a test starts; a handler is not.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests that are marked slow too")


def pytest_report_header(config: pytest.Config) -> list[str]:
    import pagefuzz

    set_here = [f"{name}={value}" for name, value in os.environ.items() if "PAGEFUZZ" in name]
    return [f"pagefuzz {pagefuzz.__version__}: {pagefuzz.__file__}", *sorted(set_here)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all") and "slow" not in config.getoption("markexpr"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if item not in slow]
    cuda = [item for item in items if item.get_closest_marker("cuda")]
    if cuda and not _has_gpu():
        for item in cuda:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if count := _not_run(terminalreporter):
        terminalreporter.write_line(f"{count} cuda tests NOT RUN: no GPU", yellow=True, bold=True)
        if _asked_for_cuda(config):
            terminalreporter.write_line("they were asked for: the session fails", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and _asked_for_cuda(session.config) and _not_run(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _asked_for_cuda(config: pytest.Config) -> bool:
    return re.search(r"(?<!not )\bcuda\b", config.getoption("markexpr")) is not None


def _not_run(reporter: pytest.TerminalReporter) -> int:
    skipped = reporter.stats.get("skipped", [])
    return sum(isinstance(r.longrepr, tuple) and NO_GPU in r.longrepr[2] for r in skipped)


def _has_gpu() -> bool:
    from pagefuzz.harness.devices import machine

    return machine().gpu is not None
