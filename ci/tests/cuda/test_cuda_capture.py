"""Launchers under CUDA-graph capture: they take a stream, and neither allocate nor wait."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.cuda

#: Its own process: CUDA never starts in the one that runs the tests. argv: the schedule.
CAPTURED = """
import sys
import numpy as np
import torch
from pagefuzz.harness.build import BuildSpec, build
from pagefuzz.harness.native import BuiltObject
from pagefuzz.harness.subjects import subject
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.observation import Status

PAGES, PAGE, ENTRY, ROWS = 6, 4, 32, 13
case = Case(
    "cp_gather_cache",
    {
        "num_requests": 2, "num_tokens": ROWS, "page_size_tokens": PAGE, "num_pages": PAGES,
        "table_width": 3, "table_row_stride": 3, "page_stride_bytes": PAGE * ENTRY,
        "slot_stride_bytes": ENTRY, "dst_rows": ROWS, "dst_row_stride_bytes": ENTRY,
        "entry_bytes": ENTRY, "element_bytes": 4, "has_terminal": 1,
    },
    {"block_table": Values("reversed"), "starts": Values.literal(0, 5, ROWS),
     "seq_starts": Values.literal(2, 1), "counts": Values.literal(7, 9)},
)
chosen = subject("bundled:" + sys.argv[1], case.operation)
shared_object = build(chosen.source, BuildSpec("cuda", frozenset()))
native = BuiltObject(shared_object, chosen.source, case.operation, chosen.symbol)
plan = registry.operation(case.operation).plan(case)
table = [PAGES - 1 - i for i in range(6)]
buffers = {
    "src": torch.zeros(PAGES, PAGE, ENTRY, dtype=torch.uint8, device="cuda"),
    "dst": torch.zeros(ROWS, ENTRY, dtype=torch.uint8, device="cuda"),
    "block_table": torch.tensor(table, dtype=torch.int32, device="cuda"),
    "starts": torch.tensor([0, 5, ROWS], dtype=torch.int32, device="cuda"),
    "seq_starts": torch.tensor([2, 1], dtype=torch.int32, device="cuda"),
    "counts": torch.tensor([7, 9], dtype=torch.int64, device="cuda"),
}
addresses = {name: tensor.data_ptr() for name, tensor in buffers.items()}
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    native.marshal(plan, addresses, torch.cuda.current_stream().cuda_stream)
    status, message = native.launch()
assert status is Status.OK, message
assert not buffers["dst"].any(), "it ran while it was captured"
rows = [(0, 2 + i) for i in range(5)] + [(1, 1 + i) for i in range(8)]
for seed in (1, 2):
    torch.manual_seed(seed)
    buffers["src"].copy_(torch.randint(0, 256, buffers["src"].shape, dtype=torch.uint8))
    graph.replay()
    torch.cuda.synchronize()
    src = buffers["src"].cpu()
    want = torch.stack([src[table[r * 3 + p // PAGE], p % PAGE] for r, p in rows])
    assert torch.equal(buffers["dst"].cpu(), want), seed
assert buffers["counts"].tolist() == [7, 9]
print("captured and replayed")
"""


@pytest.mark.parametrize("schedule", ["page", "token"])
def test_a_captured_launch_replays(schedule: str) -> None:
    """A launch captured into a graph runs with each replay, on what memory holds then."""
    done = subprocess.run(
        [sys.executable, "-c", CAPTURED, schedule],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.endswith("captured and replayed\n"), done.stderr
