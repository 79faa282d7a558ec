"""copy_blocks under CUDA-graph capture: pairs are read by the launcher, pages by the graph."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.cuda

#: Its own process: CUDA never starts in the one that runs the tests.
CAPTURED = """
import numpy as np
import torch
from pagefuzz.harness.build import BuildSpec, build
from pagefuzz.harness.native import BuiltObject
from pagefuzz.harness.subjects import subject
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.observation import Status

LAYERS, PAGES, PAGE = 2, 6, 48
ids = np.array([0, 1, 1, 2, 2, 0, 1, 4, 4, 5, -1, 3, 6, 3], dtype=np.int64)
case = Case(
    "copy_blocks",
    {
        "num_pairs": 7, "num_layers": LAYERS, "num_pages": PAGES, "element_bytes": 4,
        "layer_stride_bytes": PAGES * PAGE, "page_stride_bytes": PAGE, "page_bytes": PAGE,
    },
    {"pairs": Values.literal(*ids.tolist()), "scratch": Values.literal(),
     "counts": Values.literal(7, 9)},
)
chosen = subject("bundled:page", case.operation)
shared_object = build(chosen.source, BuildSpec("cuda", frozenset()))
native = BuiltObject(shared_object, chosen.source, case.operation, chosen.symbol)
plan = registry.operation(case.operation).plan(case)
cache = torch.zeros(LAYERS, PAGES, PAGE, dtype=torch.uint8, device="cuda")
scratch = torch.zeros(PAGE, dtype=torch.uint8, device="cuda")
counts = torch.tensor([7, 9], dtype=torch.int64, device="cuda")
addresses = {"pairs": ids.ctypes.data, "cache": cache.data_ptr(), "scratch": scratch.data_ptr(),
             "counts": counts.data_ptr()}
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    native.marshal(plan, addresses, torch.cuda.current_stream().cuda_stream)
    status, message = native.launch()
assert status is Status.OK, message
ids[:] = 0
for replay in (1, 2):
    torch.manual_seed(replay)
    old = torch.randint(0, 256, cache.shape, dtype=torch.uint8)
    cache.copy_(old)
    graph.replay()
    torch.cuda.synchronize()
    want = old.clone()
    want[:, [1, 2, 0, 4, 5]] = old[:, [0, 1, 2, 1, 4]]
    assert torch.equal(cache.cpu(), want), replay
    assert counts.tolist() == [7 + replay, 9 + replay]
print("captured and replayed")
"""


def test_a_captured_copy_replays_its_pairs() -> None:
    """A cycle, its branch and a chain, with each replay; what pairs hold later changes nothing."""
    done = subprocess.run(
        [sys.executable, "-c", CAPTURED], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.endswith("captured and replayed\n"), done.stderr
