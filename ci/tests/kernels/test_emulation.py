"""The host emulation: orders, barriers, launch limits, and when a thread costs a stack."""

from __future__ import annotations

import numpy as np
import pytest
from ci.tests.kernels.conftest import BARRIER_FAULT, LAUNCH_FAILED, OK, REFUSED, Object, load

from pagefuzz.harness.build import BuildSpec, build
from pagefuzz.harness.errors import CannotCheckError

SOURCE = """
#include "common/launch.h"
#include "common/object.h"

extern "C" {
// pagefuzz-abi: begin
int pf_run(int what, const int64_t *grid, const int64_t *block, int64_t shared, int opt_in,
           int32_t *out, pf_message *message);
int64_t pf_stacks(void);
// pagefuzz-abi: end
}

static int32_t position;

__global__ void trace(int32_t* out) {
  const unsigned cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[position++] = static_cast<int32_t>(cta * 10000 + thread);
}

__global__ void reverse_twice(int32_t* out) {
  __shared__ int32_t cells[1024];
  for (int round = 0; round < 2; ++round) {
    cells[threadIdx.x] = out[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = cells[blockDim.x - 1 - threadIdx.x] + 1;
    __syncthreads();
  }
}

__global__ void race(int32_t* out) {
  __shared__ int32_t cells[1024];
  const unsigned cell = blockIdx.x * blockDim.x + threadIdx.x;
  cells[threadIdx.x] = 1 + static_cast<int32_t>(cell);
  out[cell] = cells[(threadIdx.x + 1) % blockDim.x];  // no barrier before it
}

// What the next warp brings, in the second of two phases.
template <bool block_waits>
__global__ void next_warp(int32_t* out) {
  __shared__ int32_t cells[1024];
  cells[threadIdx.x] = -1;
  __syncthreads();
  cells[threadIdx.x] = static_cast<int32_t>(threadIdx.x);
  if (block_waits) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  out[threadIdx.x] = cells[(threadIdx.x + 32) % blockDim.x];
}

__global__ void divergent(int32_t*) {
  if (threadIdx.x == 3) {
    __syncthreads();  // here: three
  } else {
    __syncthreads();  // here: others
  }
}

__global__ void one_ends(int32_t*) {
  if (threadIdx.x == 5) return;
  __syncthreads();  // here: not all
}

__global__ void warp_rounds(int32_t* out) {
  __shared__ int32_t cells[128];
  const unsigned lane = threadIdx.x % 32;
  const unsigned rounds = 1 + threadIdx.x / 32;  // each warp its own number
  for (unsigned round = 0; round < rounds; ++round) {
    cells[threadIdx.x] = static_cast<int32_t>(round * 100 + lane);
    __syncwarp();
    out[threadIdx.x] = cells[threadIdx.x - lane + 31 - lane];
    __syncwarp();
  }
  __syncthreads();
}

__global__ void warp_divergent(int32_t*) {
  if (threadIdx.x % 32 == 7) {
    __syncthreads();  // here: block
  } else {
    __syncwarp();  // here: warp
  }
}

// Each warp its own number of exchanges, two in a row without a barrier between.
__global__ void warp_largest(int32_t* out) {
  const unsigned lane = threadIdx.x % 32;
  unsigned largest = 0;
  for (unsigned round = 0; round <= threadIdx.x / 32; ++round) {
    const unsigned mine = (lane * 7 + 5 * round) % 32 + 100 * round;
    largest = __reduce_max_sync(~0u, mine) * 1000 + __reduce_max_sync(~0u, 31 - lane + round);
  }
  out[threadIdx.x] = static_cast<int32_t>(largest);
}

__global__ void warp_largest_of_some(int32_t*) {
  __reduce_max_sync(0xFFFFu, threadIdx.x);  // here: mask
}

__global__ void warp_largest_diverges(int32_t*) {
  if (threadIdx.x % 32 != 9) __reduce_max_sync(~0u, threadIdx.x);  // here: left out
}

__global__ void shared_keeps(int32_t* out) {
  __shared__ int32_t kept;
  out[blockIdx.x] = kept;
  kept = 100 + static_cast<int32_t>(blockIdx.x);
}

PF_EXPORT int64_t pf_stacks(void) { return pf::host::stacks_created; }

dim3 size(const int64_t* s) {
  const auto part = [&](int axis) { return static_cast<unsigned>(s[axis]); };
  return dim3(part(0), part(1), part(2));
}

PF_EXPORT int pf_run(int what, const int64_t* grid, const int64_t* block, int64_t shared,
                     int opt_in, int32_t* out, pf_message* message) {
  void (*const kernels[])(int32_t*) = {
      trace,        reverse_twice,  race,         divergent,    one_ends,
      warp_rounds,  warp_divergent, shared_keeps, warp_largest, warp_largest_of_some,
      warp_largest_diverges, next_warp<true>, next_warp<false>};
  position = 0;
  const pf::LaunchShape shape = {size(grid), size(block), shared, opt_in != 0};
  return pf::launch(kernels[what], shape, nullptr, message, out);
}
"""

TRACE, REVERSE, RACE, DIVERGENT, ONE_ENDS, WARP_ROUNDS, WARP_DIVERGENT, SHARED_KEEPS = range(8)
WARP_LARGEST, WARP_LARGEST_OF_SOME, WARP_LARGEST_DIVERGES, NEXT_WARP, NEXT_WARP_RACE = range(8, 13)
FORWARD, BACKWARD, SHUFFLED, INTERLEAVED = range(4)


class Machine:
    """The object, with launches as calls."""

    def __init__(self, loaded: Object) -> None:
        self.loaded = loaded
        self.message = ""

    def run(self, what, grid=(1, 1, 1), block=(1, 1, 1), shared=0, opt_in=0, out=None):
        ffi = self.loaded.ffi
        if out is None:
            out = np.zeros(4096, np.int32)
        message = ffi.new("pf_message *")
        status = self.loaded.lib.pf_run(
            what,
            ffi.new("int64_t[3]", grid),
            ffi.new("int64_t[3]", block),
            shared,
            opt_in,
            ffi.cast("int32_t *", out.ctypes.data),
            message,
        )
        self.message = ffi.string(message.text).decode()
        return status

    def order(self, kind, seed=0):
        assert self.loaded.lib.pf_set_order(kind, seed) == OK


@pytest.fixture(scope="module")
def source(small_source):
    return small_source("emulated.cu", SOURCE)


@pytest.fixture
def machine(source):
    machine = Machine(load(source, "release"))
    yield machine
    machine.order(FORWARD)


def line_of(marker):
    return next(n for n, line in enumerate(SOURCE.splitlines(), 1) if f"here: {marker}" in line)


def traced(machine, ctas, threads):
    """The sequence of (cta, thread) in which they ran."""
    out = np.full(ctas * threads, -1, np.int32)
    assert machine.run(TRACE, (ctas, 1, 1), (threads, 1, 1), out=out) == OK
    return [divmod(int(value), 10000) for value in out]


def test_forward_and_reverse_order(machine):
    """Forward takes CTAs and threads as they are numbered, reverse backwards."""
    machine.order(FORWARD)
    plain = traced(machine, 3, 40)
    assert plain == [(cta, thread) for cta in range(3) for thread in range(40)]
    machine.order(BACKWARD)
    assert traced(machine, 3, 40) == plain[::-1]


def test_interleaved_order_takes_lane_zero_of_every_warp_first(machine):
    """Lane 0 of warps 0, 1, 2, then lane 1, ...; the short last warp drops out when it is done."""
    machine.order(INTERLEAVED)
    threads = [thread for _, thread in traced(machine, 1, 70)]
    wanted = [warp * 32 + lane for lane in range(32) for warp in range(3) if warp * 32 + lane < 70]
    assert threads == wanted


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 70, 1000])
def test_shuffled_order_is_a_permutation_that_depends_on_the_seed(machine, count):
    """Every CTA and thread runs once, in an order that the seed fixes."""
    machine.order(SHUFFLED, 1)
    first = traced(machine, 2, count)
    assert sorted(first) == [(cta, thread) for cta in range(2) for thread in range(count)]
    assert traced(machine, 2, count) == first
    if count > 30:
        machine.order(SHUFFLED, 2)
        assert traced(machine, 2, count) != first
        machine.order(FORWARD)
        assert traced(machine, 2, count) != first


def test_dimensions_reach_the_kernel(machine):
    """Grids and blocks of three dimensions number their members as CUDA does."""
    out = np.full(2 * 3 * 4 * 24, -1, np.int32)
    assert machine.run(TRACE, (2, 3, 4), (4, 3, 2), out=out) == OK
    assert sorted(out) == [cta * 10000 + thread for cta in range(24) for thread in range(24)]


def test_an_unknown_order_is_refused(machine):
    """pf_set_order knows four orders."""
    assert machine.loaded.lib.pf_set_order(4, 0) == REFUSED
    assert machine.loaded.lib.pf_set_order(-1, 0) == REFUSED


@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("threads", [1, 33, 256, 1024])
def test_barriers_that_all_threads_reach_are_silent(machine, order, threads):
    """Two rounds of reversal through shared memory give the same in every order."""
    machine.order(order, 5)
    out = np.arange(threads, dtype=np.int32)
    assert machine.run(REVERSE, (3, 1, 1), (threads, 1, 1), out=out) == OK
    assert machine.message == ""
    assert (out == np.arange(threads) + 6).all()


def test_a_missing_barrier_shows_in_another_order(machine):
    """Reading a neighbour's cell before it is written gives different results in two orders."""
    results = []
    for order in (FORWARD, BACKWARD):
        machine.order(order)
        out = np.zeros(128, np.int32)
        assert machine.run(RACE, (2, 1, 1), (64, 1, 1), out=out) == OK
        results.append(out)
    assert (results[0] != results[1]).any()


def test_a_barrier_of_a_warp_is_none_of_its_block(machine):
    """Also in a later phase: in the orders in which warps go ahead, what others bring is not there
    yet; with the barrier of the block it is in every order."""
    wanted = [(thread + 32) % 96 for thread in range(96)]
    right = []
    for order in range(4):
        machine.order(order, 3)
        out = np.zeros(96, np.int32)
        assert machine.run(NEXT_WARP, (2, 1, 1), (96, 1, 1), out=out) == OK
        assert out.tolist() == wanted
        assert machine.run(NEXT_WARP_RACE, (2, 1, 1), (96, 1, 1), out=out) == OK
        if out.tolist() == wanted:
            right.append(order)
    assert right == [FORWARD, INTERLEAVED]


def test_a_divergent_barrier_is_a_fault_that_names_both_sites(machine):
    """Threads of one CTA at two __syncthreads() end the launch."""
    assert machine.run(DIVERGENT, (2, 1, 1), (8, 1, 1)) == BARRIER_FAULT
    assert machine.message == (
        "divergent barrier: in block (0,0,0) thread (0,0,0) waits at "
        f"emulated.cu:{line_of('others')}, thread (3,0,0) waits at emulated.cu:{line_of('three')}"
    )


def test_a_barrier_that_one_thread_never_reaches_is_a_fault(machine):
    """A thread that ended before the barrier of the others ends the launch."""
    assert machine.run(ONE_ENDS, (2, 1, 1), (8, 1, 1)) == BARRIER_FAULT
    assert machine.message == (
        "barrier not reached by every thread: in block (0,0,0) thread (0,0,0) waits at "
        f"emulated.cu:{line_of('not all')}, thread (5,0,0) has ended"
    )
    # The emulation is in order again.
    assert machine.run(ONE_ENDS, (2, 1, 1), (5, 1, 1)) == OK


def test_warp_barriers_wait_for_the_warp_only(machine):
    """Warps may pass __syncwarp() different numbers of times before they meet again."""
    for order in range(4):
        machine.order(order, 9)
        out = np.zeros(128, np.int32)
        assert machine.run(WARP_ROUNDS, (1, 1, 1), (128, 1, 1), out=out) == OK, machine.message
        wanted = [(i // 32) * 100 + 31 - i % 32 for i in range(128)]
        assert out.tolist() == wanted


def test_a_warp_split_over_two_kinds_of_barrier_is_a_fault(machine):
    """One lane at __syncthreads() while its warp waits at __syncwarp()."""
    assert machine.run(WARP_DIVERGENT, (1, 1, 1), (32, 1, 1)) == BARRIER_FAULT
    assert machine.message == (
        "divergent barrier: in block (0,0,0) thread (0,0,0) waits at "
        f"emulated.cu:{line_of('warp')}, thread (7,0,0) waits at emulated.cu:{line_of('block')}"
    )


def test_a_warp_finds_its_largest_value(machine):
    """Every lane gets it, in any order of threads, one exchange after another."""
    for order in range(4):
        machine.order(order, 5)
        out = np.zeros(128, np.int32)
        assert machine.run(WARP_LARGEST, (2, 1, 1), (32, 4, 1), out=out[:32]) == OK
        assert machine.run(WARP_LARGEST, (1, 1, 1), (128, 1, 1), out=out) == OK, machine.message
        rounds = np.arange(128) // 32
        assert out.tolist() == ((31 + 100 * rounds) * 1000 + 31 + rounds).tolist()


@pytest.mark.parametrize(
    ("block", "kernel", "message"),
    [
        (32, WARP_LARGEST_OF_SOME, "a warp of 32 threads exchanges by mask 65535"),
        (48, WARP_LARGEST, "a warp of 16 threads exchanges by mask 4294967295"),
    ],
)
def test_parts_of_a_warp_do_not_exchange(machine, block, kernel, message):
    """What is not emulated is a fault with the line, not a wrong value."""
    out = np.zeros(48, np.int32)
    assert machine.run(kernel, (1, 1, 1), (block, 1, 1), out=out) == BARRIER_FAULT
    assert message in machine.message
    assert "emulated.cu:" in machine.message


def test_a_lane_that_stays_away_from_an_exchange_is_a_fault(machine):
    """As at a barrier."""
    assert machine.run(WARP_LARGEST_DIVERGES, (1, 1, 1), (32, 1, 1)) == BARRIER_FAULT
    assert f"waits at emulated.cu:{line_of('left out')}" in machine.message


def test_shared_memory_keeps_what_the_previous_cta_left(machine):
    """As on hardware, nothing clears it."""
    out = np.zeros(4, np.int32)
    assert machine.run(SHARED_KEEPS, (4, 1, 1), (1, 1, 1), out=out) == OK
    assert out.tolist()[1:] == [100, 101, 102]


def test_only_threads_that_wait_cost_a_stack(small_source):
    """16 CTAs of 1,024 threads without a barrier use one stack; with one, a stack a thread."""
    machine = Machine(load(small_source("stacks.cu", SOURCE + "// its own state\n"), "release"))
    out = np.zeros(16 * 1024, np.int32)
    assert machine.run(TRACE, (16, 1, 1), (1024, 1, 1), out=out) == OK
    assert machine.loaded.lib.pf_stacks() == 1
    assert machine.run(REVERSE, (4, 1, 1), (64, 1, 1), out=out) == OK
    assert machine.loaded.lib.pf_stacks() == 64
    assert machine.run(REVERSE, (4, 1, 1), (100, 1, 1), out=out) == OK
    assert machine.loaded.lib.pf_stacks() == 100


@pytest.mark.parametrize(
    ("grid", "block", "shared", "opt_in", "sentence"),
    [
        ((0, 1, 1), (1, 1, 1), 0, 0, "invalid configuration argument: grid.x = 0 is below 1"),
        ((2**31, 1, 1), (1, 1, 1), 0, 0, "grid.x = 2147483648 is above 2147483647"),
        ((1, 65536, 1), (1, 1, 1), 0, 0, "grid.y = 65536 is above 65535"),
        ((1, 1, 65536), (1, 1, 1), 0, 0, "grid.z = 65536 is above 65535"),
        ((1, 1, 0), (1, 1, 1), 0, 0, "grid.z = 0 is below 1"),
        ((1, 1, 1), (1025, 1, 1), 0, 0, "block.x = 1025 is above 1024"),
        ((1, 1, 1), (1, 1025, 1), 0, 0, "block.y = 1025 is above 1024"),
        ((1, 1, 1), (1, 1, 65), 0, 0, "block.z = 65 is above 64"),
        ((1, 1, 1), (0, 1, 1), 0, 0, "block.x = 0 is below 1"),
        ((1, 1, 1), (32, 33, 1), 0, 0, "threads per block = 1056 is above 1024"),
        ((1, 1, 1), (1, 1, 1), 49153, 0, "49153 bytes of dynamic shared memory"),
        ((1, 1, 1), (1, 1, 1), 232449, 1, "232449 bytes of dynamic shared memory"),
    ],
)
def test_launches_that_cuda_refuses_fail(machine, grid, block, shared, opt_in, sentence):
    """One past each of CUDA's limits fails in CUDA's words, and nothing runs."""
    out = np.full(8, -1, np.int32)
    assert machine.run(TRACE, grid, block, shared, opt_in, out) == LAUNCH_FAILED
    assert sentence in machine.message
    assert (out == -1).all()


@pytest.mark.parametrize(
    ("grid", "block", "shared", "opt_in"),
    [
        ((1, 65535, 1), (1, 1, 1), 0, 0),
        ((1, 1, 65535), (1, 1, 1), 0, 0),
        ((1, 1, 1), (1024, 1, 1), 49152, 0),
        ((1, 1, 1), (1, 1024, 1), 232448, 1),
        ((1, 1, 1), (4, 4, 64), 0, 0),
    ],
)
def test_launches_at_the_limits_run(machine, grid, block, shared, opt_in):
    """Exactly at each limit the launch runs."""
    out = np.zeros(70000, np.int32)
    assert machine.run(TRACE, grid, block, shared, opt_in, out) == OK


def test_an_intrinsic_that_is_not_emulated_does_not_compile(small_source):
    """Nothing is emulated by accident."""
    source = small_source(
        "shuffles.cu",
        '#include "common/object.h"\n'
        "__global__ void k(int* out) { *out = __shfl_sync(~0u, *out, 0); }\n",
    )
    with pytest.raises(CannotCheckError, match="__shfl_sync"):
        build(source, BuildSpec.parse("host", "release"))
