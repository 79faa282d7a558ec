"""The Triton form compiled and launched on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagefuzz.harness.check import Checker
from pagefuzz.harness.findings import built_text
from pagefuzz.oracles.registry import concerned, operation
from pagefuzz.oracles.relation import relations_of
from pagefuzz.oracles.verdict import CaseClass, Outcome
from pagefuzz.strategies.registry import shapes_for
from pagefuzz.strategies.reported import examples_for, lies_for

pytestmark = pytest.mark.cuda

OPERATION = "cp_gather_indexer_k_quant_cache_hinted"
FLAGS = frozenset({"cuda", "triton"})


def test_one_compilation_serves_all_shapes() -> None:
    """Reports and twenty shapes are right; what Triton compiled for them is judged too."""
    with Checker(OPERATION, "bundled:triton", "cuda") as checker:
        assert checker.flags == FLAGS
        built = built_text("cuda", checker.build, checker.flags)
        assert built == "triton build (not checked)"
        for case in (*examples_for(OPERATION).values(), *shapes_for(OPERATION)):
            verdict = checker.check(case)
            assert verdict.outcome is Outcome.CLEAN, (case.dumps(), verdict.failures)
            assert verdict.checked["recompile"] > 80
            looked = set(verdict.checked)
            missing = set(concerned(operation(OPERATION), FLAGS)) - looked
            assert missing <= {"counts", *relations_of(operation(OPERATION))}  # not asked for
        assert checker.deaths == 0


def test_compile_time_sizes_are_found() -> None:
    """From Triton's own hook: each of the four sizes, and the second shape that was launched."""
    with Checker(OPERATION, "bundled:triton-compile-time", "cuda") as checker:
        for case in shapes_for(OPERATION)[2:4]:
            verdict = checker.check(case)
            assert {failure.judgement for failure in verdict.failures} == {"recompile"}
            named = {failure.key[0] for failure in verdict.failures}
            assert named == {"num_requests", "num_tokens", "num_pages", "table_width"}


def test_lies_are_refused() -> None:
    """Nothing is launched for arguments that must be refused."""
    with Checker(OPERATION, "bundled:triton", "cuda") as checker:
        for case in lies_for(OPERATION):
            verdict = checker.check(case)
            assert verdict.case_class is CaseClass.REFUSED
            assert verdict.outcome is Outcome.CLEAN, (case.dumps(), verdict.failures)


def test_fixed_bytes_are_those_of_the_interpreter() -> None:
    """Both backends leave the same bytes."""
    for case in shapes_for(OPERATION)[:6]:
        digests = []
        for device in ("host", "cuda"):
            with Checker(OPERATION, "bundled:triton", device) as checker:
                digests.append(checker.check_fixed_bytes(case)[1])
        assert digests[0] is not None
        assert digests[0] == digests[1]


#: Its own process: CUDA never starts in the one that runs the tests.
CAPTURED = f"""
import torch
from pagefuzz.harness.subjects import subject
from pagefuzz.harness.triton.loading import launcher_arguments, load_launcher
from pagefuzz.oracles import contents
from pagefuzz.oracles.registry import operation
from pagefuzz.strategies.registry import shapes_for

chosen = subject("bundled:triton", {OPERATION!r})
launcher = load_launcher(chosen.source, chosen.symbol, interpreted=False)
of, case = operation(chosen.operation), shapes_for({OPERATION!r})[5]
plan = of.plan(case)
expectation = of.expect(plan)
buffers = {{}}
for name, buffer in plan.buffers.items():
    if not buffer.is_null:
        raw = contents.initial_bytes(
            buffer, expectation.footprint(name).may_read, case.seed, 0, 0, buffer.required_bytes
        )
        buffers[name] = torch.from_numpy(raw.copy()).cuda()
addresses = {{name: tensor.data_ptr() for name, tensor in buffers.items()}}
for name in plan.buffers:
    addresses.setdefault(name, 0)
before = {{name: buffers[name].clone() for name in ("dst_k", "dst_scale")}}
side = torch.cuda.Stream()
assert launcher(**launcher_arguments(plan, addresses, side.cuda_stream)) == (0, "")  # compiles
side.synchronize()
for name, old in before.items():
    buffers[name].copy_(old)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    stream = torch.cuda.current_stream().cuda_stream
    assert launcher(**launcher_arguments(plan, addresses, stream)) == (0, "")
torch.cuda.synchronize()
for name, old in before.items():
    assert torch.equal(buffers[name], old), "it ran while it was captured"
graph.replay()
torch.cuda.synchronize()
for name, expected in expectation.expected.items():
    got = buffers[name].cpu().numpy()
    for at, values in zip(expected.offsets.tolist(), expected.values):
        assert (got[at : at + values.size] == values).all(), (name, at)
print("captured and replayed")
"""


def test_a_captured_launch_replays() -> None:
    """On the stream it is given; and under capture, once it is compiled."""
    done = subprocess.run(
        [sys.executable, "-c", CAPTURED], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.endswith("captured and replayed\n"), done.stderr
