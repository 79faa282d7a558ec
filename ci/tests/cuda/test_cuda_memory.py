"""The driver and the memory on it, in a process of its own: this one must not touch CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagefuzz.harness import devices

pytestmark = pytest.mark.cuda

TOUCH = Path(__file__).with_name("touch.cu")

# What both scripts begin with: an arena, and a kernel that touches one byte. argv: touch.cu, and of
# the second one the size
PREAMBLE = """
import os, sys
from pathlib import Path
import numpy as np
from pagefuzz.harness.build import BuildSpec, build
from pagefuzz.harness.memory.arena import SMALL_BYTES, DeviceFaultError, DoesNotFitError
from pagefuzz.harness.memory.cuda import WHOLE_BYTES, CudaArena
from pagefuzz.harness.memory.driver import Driver
from pagefuzz.harness.native import BuiltObject
from pagefuzz.harness.subjects import parse_abi, subject
from pagefuzz.oracles.case import Case, Placement
from pagefuzz.oracles.expectation import Expectation, Footprint
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Image, Plan, PlannedBuffer, Role
from pagefuzz.oracles.verdict import CaseClass

READ, STORE, FLIP = range(3)
TOUCH = Path(sys.argv[1])
release = BuildSpec("cuda", frozenset())
page = subject("bundled:page", "cp_gather_cache")
page_object, touch_object = build(page.source, release), build(TOUCH, release)
SMALL, LARGE, SPARSE = 96, 5 * 2**20 + 8, 3 * 2**30 + 16
assert SMALL < SMALL_BYTES < LARGE < WHOLE_BYTES < SPARSE

def start():
    global driver, touch_library, ffi
    driver = Driver()
    driver.use_device()
    ffi = parse_abi(TOUCH)
    touch_library = ffi.dlopen(str(touch_object))
    native = BuiltObject(page_object, page.source, page.operation, page.symbol)
    return CudaArena(driver, native.scan)

def touch(address, kind):
    assert touch_library.pf_touch(ffi.cast("void *", address), kind) == 0

def buffer(name, role, size, **place):
    return PlannedBuffer(name, role, size, size, 1, 1, Placement(**place), False, Image.empty())

def plan_of(*buffers):
    return Plan(Case("test", {}, seed=1), {}, {b.name: b for b in buffers})

def expectation_of(**footprints):
    return Expectation(CaseClass.IN_CONTRACT, footprints=footprints)

def seen(arena):
    found = {name: sorted(chunk.offset_bytes + int(i) for chunk in chunks
                          for i in np.flatnonzero(chunk.before != chunk.after))
             for name, chunks in arena.collect().chunks.items()}
    return {name: offsets for name, offsets in found.items() if offsets}
"""

# Flips bytes in small, large and sparse memory, in windows and beside them, at either end.
CHANGES = """
arena = start()
TOP = 2**40
small, large = buffer("a", Role.DESTINATION, SMALL), buffer("b", Role.DESTINATION, LARGE)
sparse, huge = buffer("c", Role.DESTINATION, SPARSE), buffer("d", Role.DESTINATION, TOP)
odd = buffer("e", Role.DESTINATION, 101, offset_bytes=3, guard="none")
plan = plan_of(small, large, sparse, huge, odd)
footprints = {"c": Footprint(must_write=IntervalSet([2**31], [2**31 + 64])),
              "d": Footprint(must_write=IntervalSet([2**39], [2**39 + 64]))}
for repeat in (0, 1):
    for fill, launched in ((0, plan), (1, plan.mirrored())):
        addresses = arena.place(launched, expectation_of(**footprints))
        for name, address in addresses.items():
            assert address % 256 == launched.buffers[name].base_offset_bytes, name
        beside = -300_000 if fill == 0 else 300_000  # in the granule of a small buffer
        flips = {"a": sorted([0, SMALL - 1, beside]), "b": [0, 2_500_000, LARGE - 1],
                 "c": [0, 2**31 + 5, 2**31 + 300_000, SPARSE - 1], "d": [0, 2**39 + 1, TOP - 1],
                 "e": [-70_000, -1, 101, 50_000]}
        arena.fill(fill)
        assert not seen(arena)
        arena.fill(fill)
        for name, offsets in flips.items():
            for offset in offsets:
                touch(addresses[name] + offset, FLIP)
        arena.synchronise()
        found = seen(arena)
        assert found == flips, (fill, found)
print(f"{arena.allocated_bytes / 2**20:.0f} MiB, {arena.address_bytes / 2**40:.2f} TiB",
      file=sys.stderr)
assert arena.allocated_bytes < 2**30
try:
    arena.place(plan_of(buffer("x", Role.SOURCE, 2**57)), expectation_of())
except DoesNotFitError as error:
    assert str(error).startswith("x: no device address space"), error
else:
    raise AssertionError("128 PiB fit")
arena.place(plan, expectation_of(**footprints))
arena.close()
assert arena.allocated_bytes == arena.address_bytes == 0
print("seen")
"""

# One access a process; this one forks before CUDA starts, and its children say how they fared.
FAULTS = """
def outcome(size, role, mirrored, offset, kind, place):
    arena = start()
    plan = plan_of(buffer("x", role, size, **place))
    address = arena.place(plan.mirrored() if mirrored else plan, expectation_of())["x"]
    arena.fill(0)
    arena.synchronise()
    try:
        touch(address + offset, kind)
        arena.synchronise()
    except DeviceFaultError as error:
        return error.name
    return "none"

FAULT, SOURCE, DESTINATION = "illegal memory access", Role.SOURCE, Role.DESTINATION
wrong = 0
size = {"small": SMALL, "large": LARGE, "sparse": SPARSE}[sys.argv[2]]
# In the middle of a sparse buffer nothing is mapped.
middle = FAULT if size == SPARSE else "none"
# A slice of a workspace: 5 bytes in front, 3 behind what the launcher is told.
slice = {"before_bytes": 5, "slack_bytes": 4, "after_bytes": 3}
for role, mirrored, offset, kind, want, *place in (
    (SOURCE, False, size // 2, READ, middle),
    (DESTINATION, False, size // 2, READ, middle),
    (DESTINATION, True, size // 2, STORE, middle),
    (SOURCE, False, size - 1, READ, "none"),
    (SOURCE, True, 0, READ, "none"),
    (DESTINATION, False, size - 1, STORE, "none"),
    (DESTINATION, True, 0, STORE, "none"),
    (SOURCE, False, size, READ, FAULT),
    (SOURCE, True, -1, READ, FAULT),
    (DESTINATION, False, size, STORE, FAULT),
    (DESTINATION, True, -1, STORE, FAULT),
    (SOURCE, False, 2**35, READ, FAULT),
    (SOURCE, False, -(2**35), READ, FAULT),
    (DESTINATION, True, 2**35, STORE, FAULT),
    (DESTINATION, True, -(2**35), STORE, FAULT),
    (SOURCE, False, size - 1, STORE, FAULT),
    (SOURCE, False, size // 2, STORE, FAULT),
    (SOURCE, True, 0, STORE, FAULT),
    (Role.INDEX, False, 0, STORE, FAULT),
    (SOURCE, False, size + 6, READ, "none", slice),
    (SOURCE, False, size + 7, READ, FAULT, slice),
    (DESTINATION, False, size + 7, STORE, FAULT, slice),
    (SOURCE, True, -5, READ, "none", slice),
    (SOURCE, True, -6, READ, FAULT, slice),
):
    sys.stdout.flush()
    ends = os.pipe()
    child = os.fork()
    if not child:
        os.write(ends[1], outcome(size, role, mirrored, offset, kind, *(place or [{}])).encode())
        os._exit(0)
    os.close(ends[1])
    _, status = os.waitpid(child, 0)
    got = os.read(ends[0], 100).decode()
    os.close(ends[0])
    if got != want:
        wrong += 1
        print(f"{size} {role} {mirrored} {offset} {kind} {place}: {got or status}, not {want}")
print(f"{wrong} wrong")
"""


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, str(TOUCH), *arguments],
        env={"CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ},  # contexts in half the time
        capture_output=True,
        text=True,
        check=False,
    )


def test_writes_are_seen_where_they_fell() -> None:
    """In pools, in whole regions, in the windows of sparse ones and beside them, 2^40 bytes among
    them, with 1 GiB of memory."""
    done = run_script(CHANGES)
    assert done.stdout == "seen\n", done.stderr


@pytest.mark.parametrize("size", ["small", "large", "sparse"])
def test_accesses_outside_and_stores_to_sources_fault(size: str) -> None:
    """One byte past either end, of a workspace too, far past, in a hole, and any store where the
    launch may not write: an illegal memory access. The first and last byte can be touched."""
    done = run_script(FAULTS, size)
    assert done.stdout == "0 wrong\n", done.stdout + done.stderr


def test_the_probe_describes_the_gpu() -> None:
    """Name, compute capability and memory of what the tests run on."""
    gpu = devices.machine().gpu
    assert gpu is not None, devices.machine().no_gpu
    assert gpu.name
    assert gpu.compute_capability >= (8, 0)
    assert gpu.memory_bytes > 2**30
    assert devices.resolve_device("auto") == "cuda"
