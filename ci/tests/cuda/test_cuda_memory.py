"""The driver and the memory on it, in a process of its own: this one must not touch CUDA."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagefuzz.harness import devices

pytestmark = pytest.mark.cuda

# Places a small and a large buffer, flips bytes with memsets as a launch would, and collects.
SCRIPT = """
import numpy as np
from pagefuzz.harness.build import BuildSpec, build
from pagefuzz.harness.memory.cuda import CudaArena
from pagefuzz.harness.memory.driver import Driver
from pagefuzz.harness.native import BuiltObject
from pagefuzz.harness.subjects import subject
from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.expectation import Expectation, Footprint
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Image, Plan, PlannedBuffer, Role
from pagefuzz.oracles.verdict import CaseClass

page = subject("bundled:page", "cp_gather_cache")
driver = Driver()
driver.use_device()
built = BuiltObject(build(page.source, BuildSpec("cuda")), page.source, page.operation, page.symbol)
arena = CudaArena(driver, built.scan)

def buffer(name, size, **place):
    return PlannedBuffer(name, Role.SOURCE, size, size, 1, 1, Placement(**place), False,
                         Image.empty())

big = 5 * 2**30 + 7
plan = Plan(Case("test", {}, seed=1), {}, {"a": buffer("a", 100, offset_bytes=3),
                                           "b": buffer("b", big, offset_bytes=9)})
expectation = Expectation(CaseClass.IN_CONTRACT,
                          footprints={"b": Footprint(may_read=IntervalSet([2**32], [2**32 + 64]))})
addresses = arena.place(plan, expectation)
assert addresses["a"] % 256 == 3 and addresses["b"] % 256 == 9
strays = {"a": [-1, 100], "b": [-2, 5, 2**31, 2**32 + 3, big + 1]}
for fill in (0, 1):
    arena.fill(fill)
    assert not arena.collect().chunks
    arena.fill(fill)
    one = np.empty(1, np.uint8)
    for name, offsets in strays.items():
        for offset in offsets:
            driver.copy_out(one, addresses[name] + offset)
            driver.copy_in(addresses[name] + offset, one ^ 1)
    arena.synchronise()
    seen = {name: sorted(chunk.offset_bytes + int(i) for chunk in chunks
                         for i in np.flatnonzero(chunk.before != chunk.after))
            for name, chunks in arena.collect().chunks.items()}
    assert seen == strays, seen
print("seen")
"""


def test_writes_are_seen_where_they_fell() -> None:
    """In a slab and in 5 GiB, inside windows, outside them and in red zones."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.stdout == "seen\n", done.stderr


def test_the_probe_describes_the_gpu() -> None:
    """Name, compute capability and memory of what the tests run on."""
    gpu = devices.machine().gpu
    assert gpu is not None, devices.machine().no_gpu
    assert gpu.name
    assert gpu.compute_capability >= (8, 0)
    assert gpu.memory_bytes > 2**30
    assert devices.resolve_device("auto") == "cuda"
