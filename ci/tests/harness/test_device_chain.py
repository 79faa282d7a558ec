"""Whole cases in memory of the cuda backend: the host's kernels, over a driver of the host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TWINS = Path(__file__).parents[1] / "twins"

#: Its own process: a fault handler of the object stays installed. argv: the twins
SCRIPT = """
import json, sys
from pathlib import Path
from hypothesis import HealthCheck, Phase, given, settings
from ci.tests.harness.fake_driver import FakeDriver
from pagefuzz.harness.build import BuildSpec, build
from pagefuzz.harness.memory.cuda import CudaArena
from pagefuzz.harness.running import Assignment, Runner
from pagefuzz.harness.subjects import subject
from pagefuzz.harness.workers.blackbox import BlackBox
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import Outcome
from pagefuzz.strategies.registry import cases_for

def pair(name, flags):
    chosen = subject(name, "cp_gather_cache")
    path = build(chosen.source, BuildSpec.parse("host", flags), twin=chosen.twin)
    assigned = Assignment(chosen.operation, chosen.symbol, str(path), str(chosen.source), "host",
                          flags, True)
    host, device = (Runner(assigned, BlackBox(BlackBox.create())) for _ in range(2))
    fake = FakeDriver(2**33)
    device._arena = CudaArena(fake, fake.scan)
    return host, device

host, device = pair("bundled:page", "checked")
cases = 0

@settings(max_examples=25, deadline=None, database=None, derandomize=True,
          phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(cases_for("cp_gather_cache", hostile=True, refused=True, limit_bytes=2**32))
def agree(case):
    global cases
    cases += 1
    one, other = (runner.run(case, with_fixed_bytes=True) for runner in (host, device))
    assert one.verdict.outcome == other.verdict.outcome, case.dumps()
    assert one.fixed_bytes == other.fixed_bytes, case.dumps()

agree()
assert cases >= 25
gaps = Case.from_json(json.loads(Path(sys.argv[1], "gap-store.json").read_text())["case"])
assert device.run(gaps.with_sizes(page_stride_bytes=2**40)).verdict.clean
held = device.memory()
assert held.arena_bytes == device._arena.allocated_bytes > 0 and held.resident_bytes > 2**20
fake = FakeDriver(2**33)
device._arena = CudaArena(fake, fake.scan, limit_bytes=2**20)
beyond = device.run(gaps).verdict
assert beyond.outcome is Outcome.NOT_RUN and "bytes of device memory, the limit" in beyond.not_run
for twin, flags in (("wrong-output", "release"), ("gap-store", "checked")):
    text = Path(sys.argv[1], twin + ".json").read_text()
    case = Case.from_json(json.loads(text)["case"])
    found = [[failure.to_json() for failure in runner.run(case).verdict.failures]
             for runner in pair(f"twin:{sys.argv[1]}/{twin}.toml", flags)]
    assert found[0] and found[0] == found[1], found
print("equal")
"""


@pytest.mark.slow
def test_cases_are_judged_as_in_host_memory(root: Path) -> None:
    """Drawn cases agree in every fixed byte, faulty kernels in what is wrong; a source of 3 TiB is
    gathered from, and a case beyond a limit is not run."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})" + SCRIPT, TWINS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr
