"""Views: free in release builds, exact to the byte in checked ones."""

from __future__ import annotations

import re
import struct
import subprocess

import numpy as np
import pytest
from ci.tests.kernels.conftest import BARRIER_FAULT, LAUNCH_FAILED, OK, REFUSED, load

from pagefuzz.harness.build import KERNELS, BuildSpec, commands, compiler

SOURCE = """
#include "common/launch.h"
#include "common/object.h"
#include "common/vectors.h"
#include "common/views.h"

extern "C" {
// pagefuzz-abi: begin
int pf_touch(int kind, int width, pf_array *array, int64_t offset, uint8_t *seen,
             pf_message *message);
int pf_mixed(pf_array *array, pf_message *message);
int pf_many(pf_array *array, pf_message *message);
// pagefuzz-abi: end
}

using pf::index64;

template <int kBytes>
__global__ void touch(int kind, pf_array array, index64 offset, uint8_t* seen) {
  using Value = typename pf::VectorOf<kBytes>::type;
  if (kind == PF_READ) {
    const Value value = pf::ReadBytes<2>(array).load<Value>(offset);  // here: read
    std::memcpy(seen, &value, sizeof(value));
  } else if (kind == PF_WRITE) {
    Value value;
    std::memset(&value, 0xEE, sizeof(value));
    pf::WriteBytes<2>(array).store<Value>(offset, value);  // here: write
  } else if (kind == PF_ATOMIC) {
    pf::CounterView<2>(array).add(static_cast<int>(offset.value() / 8), 5);  // here: add
  } else {
    const uint32_t value = pf::ReadView<uint32_t, 2>(array).load(offset / 4);  // here: element
    std::memcpy(seen, &value, sizeof(value));
  }
}

__global__ void mixed(pf_array array) {
  const pf::ReadBytes<2> bytes(array);
  const index64 large = INT64_MAX;
  const index64 wrapped = large + threadIdx.x + 1;
  bytes.load<uint8_t>(wrapped);
  bytes.load<uint8_t>(-1);
  bytes.load<uint8_t>(large);
}

__global__ void many(pf_array array) {
  const pf::ReadBytes<2> bytes(array);
  for (int round = 0; round < 3; ++round) {
    bytes.load<uint8_t>(0);
    bytes.load<uint8_t>(1);
    bytes.load<uint8_t>(2);
    bytes.load<uint8_t>(3);
    bytes.load<uint8_t>(4);
    bytes.load<uint8_t>(5);
    bytes.load<uint8_t>(6);
    bytes.load<uint8_t>(7);
    bytes.load<uint8_t>(8);
    bytes.load<uint8_t>(9);
  }
}

PF_EXPORT int pf_touch(int kind, int width, pf_array* array, int64_t offset, uint8_t* seen,
                       pf_message* message) {
  const auto kernel = [&] {
    switch (width) {
      case 16: return touch<16>;
      case 8: return touch<8>;
      case 4: return touch<4>;
      case 2: return touch<2>;
      default: return touch<1>;
    }
  }();
  return pf::launch(kernel, {dim3(1), dim3(1)}, nullptr, message, kind, *array, offset, seen);
}
PF_EXPORT int pf_mixed(pf_array* array, pf_message* message) {
  return pf::launch(mixed, {dim3(1), dim3(2)}, nullptr, message, *array);
}
PF_EXPORT int pf_many(pf_array* array, pf_message* message) {
  return pf::launch(many, {dim3(2), dim3(4)}, nullptr, message, *array);
}
"""

READ, WRITE, ATOMIC, ELEMENT = range(4)
KINDS = {READ: "read", WRITE: "write", ATOMIC: "add", ELEMENT: "element"}


def line_of(marker):
    return next(n for n, line in enumerate(SOURCE.splitlines(), 1) if f"here: {marker}" in line)


class Memory:
    """64 + 4096 bytes whose base lies so that `aligned_at` is a multiple of 64."""

    def __init__(self, loaded, aligned_at=0):
        self.loaded = loaded
        raw = np.zeros(4096 + 192, np.uint8)
        begin = -(raw.ctypes.data + aligned_at) % 64 + 64
        self.bytes = raw[begin : begin + 4096]
        self.bytes[:] = np.arange(4096) % 251 + 1
        self.array = loaded.ffi.new("pf_array *")
        self.array.data = loaded.ffi.cast("void *", self.bytes.ctypes.data)
        self.array.extent_bytes = 4096
        self.message = loaded.ffi.new("pf_message *")
        self.raw = raw

    def touch(self, kind, width, offset, intervals):
        """Returns (status, record, bytes seen)."""
        readable = intervals if kind != WRITE else []
        writable = intervals if kind in (WRITE, ATOMIC) else []
        self.loaded.begin({2: (readable, writable)})
        seen = np.full(16, 0x77, np.uint8)
        status = self.loaded.lib.pf_touch(
            kind,
            width,
            self.array,
            offset,
            self.loaded.ffi.cast("uint8_t *", seen.ctypes.data),
            self.message,
        )
        return status, self.loaded.end(), seen


@pytest.fixture(scope="module")
def checked(small_source):
    return load(small_source("views.cu", SOURCE), "checked")


CASES = [(READ, w) for w in (1, 2, 4, 8, 16)] + [(WRITE, w) for w in (1, 2, 4, 8, 16)]
CASES += [(ATOMIC, 8), (ELEMENT, 4)]


@pytest.mark.parametrize(("kind", "width"), CASES)
def test_accesses_are_exact_at_both_edges_of_an_interval(checked, kind, width):
    """Silent on the first and last bytes inside; a fault one byte before, one past, and outside."""
    first, end = 320, 320 + 4 * width
    intervals = [(0, 8), (first, end), (2048, 2056)]
    memory = Memory(checked)
    # A counter's offset is an element's: a whole one is the least that it can be off.
    step = width if kind in (ATOMIC, ELEMENT) else 1
    for offset in (first, end - width):
        status, record, _ = memory.touch(kind, width, offset, intervals)
        assert (status, record.access_fault_count) == (OK, 0)
        assert (record.accesses, record.accessed_bytes) == (1, width)
    for offset in (first - step, first - width, end - width + step, end, 96, -width, 2**33):
        before = memory.bytes.copy()
        status, record, seen = memory.touch(kind, width, offset, intervals)
        assert status == OK
        assert record.access_fault_count == 1
        (fault,) = record.access_faults
        assert (fault.buffer, fault.offset_bytes, fault.size_bytes) == (2, offset, width)
        assert fault.kind == (READ if kind == ELEMENT else kind)
        assert (fault.file, fault.line) == ("views.cu", line_of(KINDS[kind]))
        assert (memory.bytes == before).all(), "a forbidden store must be suppressed"
        if kind in (READ, ELEMENT):
            assert (seen[:width] == 0).all(), "a forbidden load gives 0"


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_one_access_may_not_span_two_intervals(checked, width):
    """A hole of one byte inside a wide access is a fault."""
    memory = Memory(checked)
    hole = 256 + width // 2
    _, record, _ = memory.touch(READ, width, 256, [(0, hole), (hole + 1, 512)])
    assert record.access_fault_count == 1
    _, record, _ = memory.touch(READ, width, 256, [(0, 512)])
    assert record.access_fault_count == 0


def test_allowed_accesses_reach_memory(checked):
    """Loads give what is there, stores and additions change it."""
    memory = Memory(checked)
    _, _, seen = memory.touch(READ, 16, 64, [(0, 4096)])
    assert (seen == memory.bytes[64:80]).all()
    memory.touch(WRITE, 4, 64, [(0, 4096)])
    assert (memory.bytes[64:68] == 0xEE).all()
    counter = memory.bytes[128:136].view(np.int64)
    before = int(counter[0])
    memory.touch(ATOMIC, 8, 128, [(0, 4096)])
    assert counter[0] == before + 5


def test_reading_needs_no_permission_to_write_and_the_other_way_round(checked):
    """Read and write sets are apart; an atomic needs both."""
    memory = Memory(checked)
    for kind, readable, writable, faults in (
        (READ, [(0, 64)], [], 0),
        (READ, [], [(0, 64)], 1),
        (WRITE, [], [(0, 64)], 0),
        (WRITE, [(0, 64)], [], 1),
        (ATOMIC, [(0, 64)], [(0, 64)], 0),
        (ATOMIC, [], [(0, 64)], 1),
        (ATOMIC, [(0, 64)], [], 1),
    ):
        checked.begin({2: (readable, writable)})
        seen = checked.ffi.new("uint8_t[16]")
        checked.lib.pf_touch(kind, 8, memory.array, 8, seen, memory.message)
        assert checked.end().access_fault_count == faults, (kind, readable, writable)


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_a_misaligned_access_fails_the_launch_as_on_a_gpu(checked, width):
    """x86 would let it pass; the sentence says where."""
    memory = Memory(checked)
    status, record, _ = memory.touch(READ, width, 64 + width // 2, [(0, 4096)])
    assert status == LAUNCH_FAILED
    assert record.access_fault_count == 0
    text = checked.ffi.string(memory.message.text).decode()
    assert text.startswith(f"misaligned address: read of {width} bytes at byte {64 + width // 2}")
    assert f"views.cu:{line_of('read')}" in text
    # What counts is the address, not the offset.
    status, _, _ = Memory(checked, width // 2).touch(READ, width, 64 + width // 2, [(0, 4096)])
    assert status == OK


def test_access_and_index_faults_share_one_sequence(checked):
    """The wrap comes first, the access that it leads to second."""
    memory = Memory(checked)
    checked.begin({})
    assert checked.lib.pf_mixed(memory.array, memory.message) == OK
    record = checked.end()
    assert record.index_fault_count == 2  # INT64_MAX + 0 + 1, INT64_MAX + 1
    assert [fault.sequence for fault in record.index_faults] == [1]
    assert [fault.sequence for fault in record.access_faults] == [2, 3, 4]
    assert [fault.offset_bytes for fault in record.access_faults] == [-(2**63), -1, 2**63 - 1]
    assert record.access_fault_count == 6


def test_the_first_fault_of_each_site_is_kept(checked):
    """Ten lines, eight of them kept, in order; all are counted."""
    memory = Memory(checked)
    checked.begin({2: ([(3, 4)], [])})
    assert checked.lib.pf_many(memory.array, memory.message) == OK
    record = checked.end()
    assert record.accesses == 2 * 4 * 3 * 10
    assert record.access_fault_count == 2 * 4 * 3 * 9
    assert [fault.offset_bytes for fault in record.access_faults] == [0, 1, 2, 4, 5, 6, 7, 8]
    assert [fault.sequence for fault in record.access_faults] == list(range(1, 9))
    assert {fault.block for fault in record.access_faults} == {(0, 0, 0)}
    assert {fault.thread for fault in record.access_faults} == {(0, 0, 0)}


def test_beginning_clears_the_record(checked):
    """Nothing of the last launch is left, its permissions included."""
    memory = Memory(checked)
    memory.touch(READ, 1, 0, [])
    checked.begin({})
    record = checked.end()
    assert (record.accesses, record.access_fault_count, record.access_faults) == (0, 0, ())
    assert checked.lib.pf_check_begin(checked.ffi.NULL, 0) == OK
    assert checked.lib.pf_check_begin(checked.ffi.NULL, 17) == REFUSED
    assert checked.lib.pf_check_begin(checked.ffi.NULL, -1) == REFUSED


PLAIN = """
#include "common/views.h"
extern "C" void subject(const int32_t* table, const char* from, char* to, int64_t i) {
  const uint4 value = *(const uint4*)(from + i * 16);
  *(uint4*)(to + int64_t(table[i]) * 16) = value;
}
"""
VIEWED = """
#include "common/views.h"
extern "C" void subject(pf::ReadView<int32_t, 2> table, pf::ReadBytes<0> from, pf::WriteBytes<1> to,
                        pf::index64 i) {
  const uint4 value = from.load<uint4>(i * 16);
  to.store<uint4>(static_cast<int64_t>(table.load(i)) * 16, value);
}
"""


def assembly(small_source, text):
    """Instructions of `subject`, without labels' numbers and directives; (%b,%a) is (%a,%b)."""
    source = small_source("subject.cu", text)
    (compile_command, _) = commands(
        source, BuildSpec.parse("host", "release"), source.with_suffix(".so")
    )
    words = [word for word in compile_command if word not in ("-c", "-g1")]
    words[words.index("-o") + 1] = "-"
    done = subprocess.run([*words, "-S", "-g0"], capture_output=True, text=True, check=True)
    body = re.split(r"^subject:.*$", done.stdout, flags=re.MULTILINE)[1].partition(".size")[0]
    body = re.sub(r"#.*$", "", body, flags=re.MULTILINE)
    body = re.sub(r"\((%\w+),(%\w+)\)", lambda m: f"({min(m[1], m[2])},{max(m[1], m[2])})", body)
    lines = [line.strip() for line in body.splitlines()]
    return [line for line in lines if line and not re.match(r"\.(cfi|LF)", line)]


def test_a_view_costs_nothing_on_the_host(small_source):
    """The release build makes the same instructions with views and with raw pointers."""
    plain, viewed = assembly(small_source, PLAIN), assembly(small_source, VIEWED)
    assert len(plain) > 5
    assert plain == viewed


GPU_PLAIN = """
#include "common/views.h"
extern "C" __global__ void subject(const int32_t* table, const char* from, char* to, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const uint4 value = *(const uint4*)(from + i * 16);
    *(uint4*)(to + int64_t(table[i]) * 16) = value;
  }
}
"""
GPU_VIEWED = """
#include "common/views.h"
extern "C" __global__ void subject(pf::ReadView<int32_t, 2> table, pf::ReadBytes<0> from,
                                   pf::WriteBytes<1> to, pf::index64 n) {
  for (pf::index64 i = threadIdx.x; i < n; i += blockDim.x) {
    const uint4 value = from.load<uint4>(i * 16);
    to.store<uint4>(static_cast<int64_t>(table.load(i)) * 16, value);
  }
}
"""


def machine_code(small_source, text):
    """The bytes of `subject` for sm_90: a section of the cubin, a little-endian ELF file."""
    source = small_source("subject.cu", text)
    cubin = source.with_suffix(".cubin")
    words = [*compiler("cuda"), "-std=c++20", "-O3", "-arch=sm_90", f"-I{KERNELS}", "-cubin"]
    subprocess.run([*words, str(source), "-o", str(cubin)], check=True)
    elf = cubin.read_bytes()
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        at = headers[names][4] + name
        if elf[at : elf.index(0, at)] == b".text.subject":
            return elf[offset : offset + length]
    raise AssertionError("the cubin has no section .text.subject")


@pytest.mark.slow
def test_a_view_costs_nothing_on_a_gpu(small_source):
    """The release build makes the same machine code with views and with raw pointers."""
    plain, viewed = machine_code(small_source, GPU_PLAIN), machine_code(small_source, GPU_VIEWED)
    assert len(plain) > 256
    assert plain == viewed


def test_statuses_are_those_of_the_abi(checked):
    """The constants in conftest follow the header."""
    ffi = checked.ffi
    assert ffi.typeof("enum pf_status").relements == {
        "PF_OK": OK,
        "PF_REFUSED": REFUSED,
        "PF_LAUNCH_FAILED": LAUNCH_FAILED,
        "PF_BARRIER_FAULT": BARRIER_FAULT,
    }
