"""Index types: every operator records a wrap at exactly its limit, with operands and line."""

from __future__ import annotations

import pytest
from ci.tests.kernels.conftest import OK, load

SOURCE = """
#include "common/index.h"
#include "common/launch.h"
#include "common/object.h"

extern "C" {
// pagefuzz-abi: begin
int pf_apply(int bits, int is_signed, int operation, int64_t a, int64_t b, int64_t *result);
int pf_narrow(int from, int to, int64_t a, int64_t *result);
int pf_lines(int what);
// pagefuzz-abi: end
}

#ifdef PF_CHECKED
template <class T> int64_t raw(pf::Index<T> value) { return static_cast<int64_t>(value.value()); }
#endif
template <class T> int64_t raw(T value) { return static_cast<int64_t>(value); }

template <class T>
__global__ void apply(int operation, T a, T b, int64_t* result) {
  switch (operation) {
    case 0: *result = raw(a + b); break;  // line: 0
    case 1: *result = raw(a - b); break;  // line: 1
    case 2: *result = raw(a * b); break;  // line: 2
    case 3: *result = raw(a << b); break;  // line: 3
    case 4: *result = raw(-a); break;  // line: 4
    case 5: *result = raw(a / b); break;  // line: 5
    case 6: *result = raw(a % b); break;  // line: 6
    case 7: *result = raw(a += b); break;  // line: 7
    case 8: *result = raw(a -= b); break;  // line: 8
    case 9: *result = raw(a *= b); break;  // line: 9
    case 10: *result = raw(a /= b); break;  // line: 10
    case 11: *result = raw(++a); break;  // line: 11
  }
}

template <class From, class To>
__global__ void narrow(From a, int64_t* result) {
  *result = raw(pf::narrow<To>(a));  // line: narrow
}

__global__ void lines(int what) {
  using pf::index32;
  using pf::index64;
  const index32 big = 2000000000;
  const index32 one = 1;
  if (what == 0) {
    const index32 sum = one +  // lines: sum
                        big +
                        big;  // end: sum
    (void)sum;
  } else if (what == 1) {
    const index64 mixed = index64(1) + one * (big  // lines: mixed
                                              * one
                                              * 2);  // end: mixed
    (void)mixed;
  } else if (what == 2) {
    const index64 wide = big * index64(2);  // 64-bit: silent
    const bool less = 1 < big && big > 1 && index64(3) != big && wide == wide && wide >= 2;
    (void)less;
  } else if (what == 3) {
    const index32 left = 3 * big;  // line: left
    (void)left;
  }
}

template <class T>
int run(int operation, int64_t a, int64_t b, int64_t* result) {
  pf_message message;
  using Plain = decltype(T{}.value());
  return pf::launch(apply<T>, {dim3(1), dim3(1)}, nullptr, &message, operation,
                    T(static_cast<Plain>(a)), T(static_cast<Plain>(b)), result);
}

PF_EXPORT int pf_apply(int bits, int is_signed, int operation, int64_t a, int64_t b,
                       int64_t* result) {
  if (bits == 32 && is_signed) return run<pf::index32>(operation, a, b, result);
  if (bits == 32) return run<pf::uindex32>(operation, a, b, result);
  if (is_signed) return run<pf::index64>(operation, a, b, result);
  return run<pf::uindex64>(operation, a, b, result);
}

template <class From, class To>
int run_narrow(int64_t a, int64_t* result) {
  pf_message message;
  using Plain = decltype(From{}.value());
  return pf::launch(narrow<From, To>, {dim3(1), dim3(1)}, nullptr, &message,
                    From(static_cast<Plain>(a)), result);
}

template <class From>
int narrow_to(int to, int64_t a, int64_t* result) {
  switch (to) {
    case 0: return run_narrow<From, pf::index32>(a, result);
    case 1: return run_narrow<From, pf::uindex32>(a, result);
    case 2: return run_narrow<From, pf::index64>(a, result);
    default: return run_narrow<From, pf::uindex64>(a, result);
  }
}

PF_EXPORT int pf_narrow(int from, int to, int64_t a, int64_t* result) {
  switch (from) {
    case 0: return narrow_to<pf::index32>(to, a, result);
    case 1: return narrow_to<pf::uindex32>(to, a, result);
    case 2: return narrow_to<pf::index64>(to, a, result);
    default: return narrow_to<pf::uindex64>(to, a, result);
  }
}

PF_EXPORT int pf_lines(int what) {
  pf_message message;
  return pf::launch(lines, {dim3(1), dim3(1)}, nullptr, &message, what);
}
"""

ADD, SUBTRACT, MULTIPLY, SHIFT_LEFT, NEGATE, DIVIDE, NARROW = range(7)


def quotient(a, b):
    """As C divides: towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


#: pf_apply's operation -> (recorded operation, exact result in Python or None if there is none)
OPERATORS = {
    0: (ADD, lambda a, b: a + b),
    1: (SUBTRACT, lambda a, b: a - b),
    2: (MULTIPLY, lambda a, b: a * b),
    3: (SHIFT_LEFT, lambda a, b: a << b),
    4: (NEGATE, lambda a, b: -a),
    5: (DIVIDE, quotient),
    6: (DIVIDE, lambda a, b: a - quotient(a, b) * b),
    7: (ADD, lambda a, b: a + b),
    8: (SUBTRACT, lambda a, b: a - b),
    9: (MULTIPLY, lambda a, b: a * b),
    10: (DIVIDE, quotient),
    11: (ADD, lambda a, b: a + 1),
}
TYPES = [(32, True), (32, False), (64, True), (64, False)]


def limits(bits, signed):
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


def as_int64(value):
    return (value + 2**63) % 2**64 - 2**63


def wrapped(value, bits, signed):
    value %= 1 << bits
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def line_of(marker):
    return next(n for n, line in enumerate(SOURCE.splitlines(), 1) if line.endswith(f": {marker}"))


@pytest.fixture(scope="module")
def loaded(small_source):
    return load(small_source("index.cu", SOURCE), "checked")


def apply(loaded, bits, signed, operation, a, b):
    loaded.begin({})
    result = loaded.ffi.new("int64_t *")
    assert loaded.lib.pf_apply(bits, signed, operation, as_int64(a), as_int64(b), result) == OK
    return result[0], loaded.end()


def operands(bits, signed):
    low, high = limits(bits, signed)
    root = 1 << (bits // 2)
    values = {low, low + 1, high - 1, high, high // 2, high // 2 + 1, high // 3}
    values |= {0, 1, 2, 3, root - 1, root, root + 1, -1, -2, -root, low // 2, low // 2 - 1}
    return sorted(value for value in values if low <= value <= high)


@pytest.mark.parametrize(("bits", "signed"), TYPES)
@pytest.mark.parametrize("operation", OPERATORS)
def test_an_operator_records_a_wrap_at_exactly_its_limit(loaded, bits, signed, operation):
    """All pairs of boundary values: a fault if and only if the exact result does not fit."""
    recorded, exact = OPERATORS[operation]
    low, high = limits(bits, signed)
    fired = silent = 0
    for a in operands(bits, signed):
        for b in operands(bits, signed):
            if recorded == SHIFT_LEFT and not 0 <= b < bits:
                continue
            if recorded == DIVIDE and b == 0:
                continue
            value = exact(a, b)
            # A remainder of min / -1 is 0, but hardware computes the quotient, which does not fit.
            fits = low <= (quotient(a, b) if recorded == DIVIDE else value) <= high
            result, record = apply(loaded, bits, signed, operation, a, b)
            assert result == as_int64(wrapped(value, bits, signed)), (a, b)
            assert record.operations == 1
            assert record.index_fault_count == (not fits), (a, b)
            fired, silent = fired + (not fits), silent + fits
            if fits:
                continue
            (fault,) = record.index_faults
            right = 1 if operation == 11 else 0 if recorded == NEGATE else as_int64(b)
            assert (fault.a, fault.b, fault.result) == (as_int64(a), right, result)
            assert (fault.operation, fault.bits, fault.is_signed) == (recorded, bits, signed)
            assert (fault.file, fault.line) == ("index.cu", line_of(operation))
    assert silent > 0
    assert fired > 0 or (recorded == DIVIDE and not signed)


@pytest.mark.parametrize(("bits", "signed"), TYPES)
def test_sums_and_products_one_below_the_limit_are_silent(loaded, bits, signed):
    """Both sides of each limit, spelled out."""
    low, high = limits(bits, signed)
    for operation, a, b, faults in (
        (0, high, 0, 0),
        (0, high - 1, 1, 0),
        (0, high, 1, 1),
        (1, low, 0, 0),
        (1, low + 1, 1, 0),
        (1, low, 1, 1),
        (2, high // 2, 2, 0),
        (2, high // 2 + 1, 2, 1),
        (3, 1, bits - 1 - signed, 0),
        (3, 2, bits - 1, 1),
    ):
        assert apply(loaded, bits, signed, operation, a, b)[1].index_fault_count == faults


@pytest.mark.parametrize(("bits", "signed"), TYPES)
@pytest.mark.parametrize("operation", [5, 6, 10])
def test_division_by_zero_is_recorded_and_gives_zero(loaded, bits, signed, operation):
    """The host would die of it, a GPU gives garbage."""
    result, record = apply(loaded, bits, signed, operation, 7, 0)
    assert result == 0
    assert [(f.operation, f.a, f.b) for f in record.index_faults] == [(DIVIDE, 7, 0)]


@pytest.mark.parametrize(("bits", "signed"), TYPES)
def test_a_shift_by_the_width_or_more_is_recorded(loaded, bits, signed):
    """It has no meaning on either target."""
    for count in (bits, bits + 1, *([-1] if signed else [])):
        result, record = apply(loaded, bits, signed, 3, 1, count)
        assert (result, record.index_fault_count) == (0, 1)


@pytest.mark.parametrize("source", range(4))
@pytest.mark.parametrize("target", range(4))
def test_narrowing_is_recorded_when_it_loses_something(loaded, source, target):
    """Every pair of types, at the limits of both; a change of sign counts as a loss."""
    from_bits, from_signed = TYPES[source]
    bits, signed = TYPES[target]
    low, high = limits(bits, signed)
    for a in {*operands(from_bits, from_signed), low - 1, low, high, high + 1}:
        if not limits(from_bits, from_signed)[0] <= a <= limits(from_bits, from_signed)[1]:
            continue
        loaded.begin({})
        result = loaded.ffi.new("int64_t *")
        assert loaded.lib.pf_narrow(source, target, as_int64(a), result) == OK
        record = loaded.end()
        assert result[0] == as_int64(wrapped(a, bits, signed))
        assert record.index_fault_count == (not low <= a <= high), a
        if record.index_faults:
            (fault,) = record.index_faults
            assert (fault.operation, fault.a, fault.b) == (NARROW, as_int64(a), 0)
            assert (fault.bits, fault.is_signed) == (bits, signed)
            assert fault.line == line_of("narrow")


@pytest.mark.parametrize(("what", "name"), [(0, "sum"), (1, "mixed")])
def test_the_line_of_an_expression_over_several_lines_lies_in_it(loaded, what, name):
    """Compilers differ in which of its lines they name."""
    loaded.begin({})
    assert loaded.lib.pf_lines(what) == OK
    faults = loaded.end().index_faults
    assert faults
    first = next(n for n, line in enumerate(SOURCE.splitlines(), 1) if f"lines: {name}" in line)
    last = next(n for n, line in enumerate(SOURCE.splitlines(), 1) if f"end: {name}" in line)
    assert all(first <= fault.line <= last for fault in faults)


def test_mixed_types_widen_and_a_plain_left_operand_works(loaded):
    """32-bit times 64-bit is 64-bit, as with plain integers; `3 * index` is an index product."""
    loaded.begin({})
    assert loaded.lib.pf_lines(2) == OK
    assert loaded.end().index_fault_count == 0
    loaded.begin({})
    assert loaded.lib.pf_lines(3) == OK
    (fault,) = loaded.end().index_faults
    assert (fault.a, fault.b, fault.line) == (3, 2000000000, line_of("left"))
