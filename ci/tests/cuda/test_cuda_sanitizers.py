"""compute-sanitizer itself, on a GPU."""

from __future__ import annotations

import pytest
from ci.tests.planted import case_of, twin

from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.sanitizers.cases import cases_of
from pagefuzz.harness.sanitizers.opinion import opinion
from pagefuzz.harness.sanitizers.tools import COMPUTE, find_compute_sanitizer
from pagefuzz.harness.sanitizers.watching import prove

pytestmark = pytest.mark.cuda

OPERATION = "cp_gather_cache"
NAME = "table-width-unguarded"

TRITON = "cp_gather_indexer_k_quant_cache_hinted"
PAST_HINTS = "triton-read-past-hints"


def test_it_is_here():
    """Without it the other tests of this file say nothing."""
    assert find_compute_sanitizer()


@pytest.mark.parametrize("tool", COMPUTE)
def test_a_tool_reports_its_canary(tool):
    """Its deliberate fault, whatever else it may not see."""
    assert prove(tool) > 0


def test_memcheck_names_the_line_of_a_read_past_the_table():
    """With buffer, side, source line and thread."""
    unit = Unit(OPERATION, twin(NAME), hostile=True)
    found = opinion("memcheck", unit, [case_of(NAME)], backend="cuda", build="release")
    (finding,) = found.findings
    assert finding.failure.judgement == "memcheck"
    assert finding.failure.title.startswith("Invalid __global__ read")
    assert finding.failure.title.endswith("past block_table")
    assert finding.failure.details["where"].startswith("kernels/operations/cp_gather_cache.cu:")


def test_initcheck_sees_a_read_of_what_the_contract_forbids():
    """Inside a buffer, where nobody has written."""
    name = "gather-page-stride-from-shape"
    case = case_of(name)
    unit = Unit(case.operation, twin(name), hostile=True)
    found = opinion("initcheck", unit, [case], backend="cuda", build="release")
    (finding,) = found.findings
    assert finding.failure.title.startswith("Uninitialized __global__ memory read")
    assert finding.failure.key[-1] == "inside"


@pytest.mark.parametrize("tool", COMPUTE)
def test_a_sound_kernel_is_clean(tool):
    """No tool has a word for it, in contract and hostile."""
    unit = Unit(OPERATION, "bundled:page", hostile=True)
    found = opinion(tool, unit, cases_of(unit, 20, 0), backend="cuda", build="release")
    assert [finding.text() for finding in found.findings] == []
    assert found.launches >= 20
    assert found.device != "host"
    assert found.slowdown is not None
    assert found.memory.address_bytes == found.memory.arena_bytes > 0
    assert found.memory.resident_bytes > 2**20


def test_memcheck_reports_what_a_triton_kernel_reads_and_throws_away():
    """A read past the hints, with buffer, side and the kernel's own line; the form without it is
    silent on the same case."""
    case = case_of(PAST_HINTS)
    unit = Unit(TRITON, twin(PAST_HINTS), hostile=True)
    found = opinion("memcheck", unit, [case], backend="cuda", build="release")
    (finding,) = found.findings
    assert finding.failure.title.startswith("Invalid __global__ read")
    assert finding.failure.title.endswith("past token_to_seq")
    assert finding.failure.details["where"].startswith(f"kernels/triton/{TRITON}.py:")
    assert found.launches == 1
    sound = Unit(TRITON, "bundled:triton", hostile=True)
    found = opinion("memcheck", sound, [case], backend="cuda", build="release")
    assert [finding.text() for finding in found.findings] == []
    assert found.launches == 1


@pytest.mark.parametrize("tool", COMPUTE)
def test_a_sound_triton_kernel_is_clean(tool):
    """Each case is launched on the GPU, none by the interpreter: in contract and hostile."""
    unit = Unit(TRITON, "bundled:triton", hostile=True)
    found = opinion(tool, unit, cases_of(unit, 10, 0), backend="cuda", build="release")
    assert [finding.text() for finding in found.findings] == []
    assert [reason for reason in found.not_run if "the launch failed" in reason] == []
    assert found.launches >= 10
    assert found.device != "host"
