"""What a launcher of a Triton kernel takes and returns, what it refuses, and how it launches.

The Python form of `kernels/abi/common.h` and `kernels/common/refusals.h`: the same arguments, codes
and rules.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# enum pf_status
OK, REFUSED, LAUNCH_FAILED = 0, 1, 2

# enum pf_dtype
U8, I32, I64, F32, E4M3, E5M2 = 1, 5, 6, 9, 10, 11

_NAMES = {U8: "u8", I32: "i32", I64: "i64", F32: "f32", E4M3: "e4m3", E5M2: "e5m2"}
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1

#: A status code, and one sentence where it is not `OK`.
Result = tuple[int, str]


class Array(NamedTuple):
    """A buffer argument.

    data          address of element 0, 0 if absent
    extent_bytes  bytes from there that belong to the argument
    dtype, rank   of the caller's tensor, dtype as one of the codes above
    """

    data: int
    extent_bytes: int
    dtype: int
    rank: int

    @property
    def absent(self) -> bool:
        """An optional buffer that was not passed."""
        return self.data == 0 and self.extent_bytes == 0


class Pointer:
    """What a kernel gets of a buffer: an address, and the type of what it loads or stores there."""

    def __init__(self, array: Array, dtype: Any) -> None:
        # Triton asks the driver about every address but null, and an empty array may have any.
        self._address = array.data if array.extent_bytes else 0
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._address


class RefusedError(Exception):
    """The arguments break the operation's contract; the message is one sentence."""


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RefusedError(otherwise)


def in_range(name: str, value: int, low: int, high: int) -> None:
    require(low <= value <= high, f"{name} is {value}, it must lie in {low}..{high}")


def count(name: str, value: int) -> None:
    """A number of requests, tokens, pages or columns."""
    in_range(name, value, 0, _INT32_MAX)


def typed(name: str, array: Array, rank: int, *dtypes: int) -> None:
    require(array.rank == rank, f"{name} has rank {array.rank}, it must have rank {rank}")
    wanted = " or ".join(_NAMES[dtype] for dtype in dtypes)
    got = _NAMES.get(array.dtype, "another dtype")
    require(array.dtype in dtypes, f"{name} is {got} (code {array.dtype}), it must be {wanted}")


def stride(name: str, value: int, unit: int, least: int = 0) -> None:
    """A stride that counts: a multiple of `unit`, at least `least`, what lies a stride apart."""
    require(value >= 0, f"{name} is {value}, it must not be negative")
    require(value % unit == 0, f"{name} is {value}, it must be a multiple of {unit}")
    require(value >= least, f"{name} is {value}: what lies that far apart has {least} bytes")


def extent(name: str, array: Array, needed: int) -> None:
    require(
        needed <= _INT64_MAX,
        f"sizes and strides of {name} need {needed} bytes, more than an int64 can count",
    )
    require(
        array.extent_bytes >= needed,
        f"{name} has an extent of {array.extent_bytes} bytes, its sizes and strides need {needed}",
    )


def base(name: str, array: Array, alignment: int) -> None:
    """Null only if empty; aligned; of no negative extent."""
    require(array.extent_bytes >= 0, f"{name} has an extent of {array.extent_bytes} bytes")
    require(
        array.data != 0 or array.extent_bytes == 0,
        f"{name} is a null pointer with an extent of {array.extent_bytes} bytes",
    )
    require(
        array.data % alignment == 0,
        f"the address of {name} is not a multiple of {alignment} bytes",
    )


def disjoint(name: str, array: Array, other_name: str, other: Array) -> None:
    """Their ranges share no byte; an empty one meets nothing."""
    meet = (
        min(array.extent_bytes, other.extent_bytes) > 0
        and array.data < other.data + other.extent_bytes
        and other.data < array.data + array.extent_bytes
    )
    require(not meet, f"the memory of {name} overlaps that of {other_name}, which is read")


def launch(kernel: Any, programs: int, stream: int, arguments: tuple[Any, ...]) -> Result:
    """Starts `programs` programs of one warp on a stream, compiled first where they have to be.

    arguments  of the kernel, in order, compile-time ones included
    stream     a cudaStream_t as an integer
    """
    grid = (programs, 1, 1)
    try:
        compiled = kernel.warmup(*arguments, grid=grid, num_warps=1)
        if compiled is None:  # the interpreter: it compiles nothing and has no streams
            kernel[grid](*arguments, num_warps=1)
        else:
            compiled[grid](*arguments, stream=stream)
    except Exception as error:  # noqa: BLE001 - Triton's errors have no type in common
        return LAUNCH_FAILED, f"{type(error).__name__}: {' '.join(str(error).split()):.400}"
    return OK, ""
