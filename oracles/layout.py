"""How a case lies in memory: the arguments a launcher gets and the bytes behind them.

A `Plan` is derived from a case by its operation, before anything is judged; from here on the plan,
not the case, is the truth: what a contract says is computed from the plan's final arguments and
from the index values that are really in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.case import BASE_ALIGNMENT_BYTES, Case, Placement

Bytes = npt.NDArray[np.uint8]


#: No operation asks for more: the counters are elements of 8 bytes.
MOST_ALIGNMENT_BYTES = 8


class Dtype(IntEnum):
    """Element types, with the codes of `enum pf_dtype` in the C ABI."""

    U8 = 1
    U16 = 2
    U32 = 3
    U64 = 4
    I32 = 5
    I64 = 6
    F16 = 7
    BF16 = 8
    F32 = 9
    E4M3 = 10
    E5M2 = 11

    @property
    def size_bytes(self) -> int:
        return _DTYPE_BYTES[self]


_DTYPE_BYTES = {
    Dtype.U8: 1,
    Dtype.U16: 2,
    Dtype.U32: 4,
    Dtype.U64: 8,
    Dtype.I32: 4,
    Dtype.I64: 8,
    Dtype.F16: 2,
    Dtype.BF16: 2,
    Dtype.F32: 4,
    Dtype.E4M3: 1,
    Dtype.E5M2: 1,
}


class Role(StrEnum):
    SOURCE = "source"  # payload, read only
    INDEX = "index"  # table, starts, slots, hints, scales: read only
    DESTINATION = "destination"  # written, never read before it is written
    IN_PLACE = "in place"  # payload that is read and written over
    COUNTERS = "counters"  # read-modify-write

    @property
    def holds_payload(self) -> bool:
        """Where it may be read; elsewhere poison."""
        return self in (Role.SOURCE, Role.IN_PLACE)

    @property
    def is_destination(self) -> bool:
        """Its poison is that of a destination: complements in the two fills."""
        return self in (Role.DESTINATION, Role.IN_PLACE)


@dataclass(frozen=True)
class BufferRole:
    """One buffer argument of an operation, in ABI order.

    host  plain host memory on every backend: the launcher itself reads it
    """

    name: str
    role: Role
    optional: bool = False
    host: bool = False


@dataclass(frozen=True)
class Image:
    """Bytes a buffer holds before the launch, where they are not poison or payload.

    `offsets` int64 [n], ascending, from the buffer's base; `values` uint8 [n, w], w bytes at each.
    """

    offsets: npt.NDArray[np.int64]
    values: Bytes

    @classmethod
    def of_elements(
        cls, element_indices: npt.ArrayLike, elements: npt.NDArray[np.generic]
    ) -> Image:
        """Elements (int32 or int64, [n]) at element indices (in units of the element's size)."""
        width = elements.dtype.itemsize
        indices = np.asarray(element_indices, dtype=np.int64)
        raw = np.ascontiguousarray(elements).view(np.uint8).reshape(len(indices), width)
        return cls(indices * width, raw)

    @classmethod
    def empty(cls) -> Image:
        return cls(np.empty(0, np.int64), np.empty((0, 1), np.uint8))


@dataclass(frozen=True)
class PlannedBuffer:
    """One buffer as it lies in memory and as it is passed.

    required_bytes  what sizes and strides need, before overrides
    extent_bytes    what the launcher is told (after overrides)
    dtype, rank     what the launcher is told; a plain int, since a refused case may pass nonsense
    is_null         a null pointer is passed
    image           explicit contents; every other byte is payload or poison (`contents`)
    payload_origin_bytes  where in the case's payload stream that of this buffer begins
    alignment_bytes  what the base is a multiple of, at least: an element, or more if the operation
                asks for more
    host            as in `BufferRole`
    """

    name: str
    role: Role
    required_bytes: int
    extent_bytes: int
    dtype: int
    rank: int
    placement: Placement
    is_null: bool
    image: Image
    payload_origin_bytes: int = 0
    alignment_bytes: int = 1
    host: bool = False

    @property
    def memory_bytes(self) -> int:
        """Bytes of real memory from the base on, workspace behind it included; 0 if it has none."""
        if self.placement.over is not None:
            return 0
        return self.required_bytes + self.placement.slack_bytes + self.placement.after_bytes

    @property
    def base_offset_bytes(self) -> int:
        """The base's address modulo `BASE_ALIGNMENT_BYTES`.

        Beside a guard it follows from the size: what lies there, workspace included, ends (begins)
        less than `alignment_bytes` from the guard, and no whole element has room in between; less
        than 16 bytes where a misalignment is asked for.
        """
        wanted = self.placement.offset_bytes
        if self.placement.guard == "none":
            return wanted
        step = 16 if wanted else self.alignment_bytes
        if self.placement.guard == "start":
            near = self.placement.before_bytes
            return (near + (wanted - near) % step) % BASE_ALIGNMENT_BYTES
        near = -self.memory_bytes
        return (near - (near - wanted) % step) % BASE_ALIGNMENT_BYTES


@dataclass(frozen=True)
class Plan:
    """arguments: every scalar the launcher gets, by ABI name, after overrides.
    buffers: in ABI order, absent optional ones included (null, extent 0)."""

    case: Case
    arguments: Mapping[str, int]
    buffers: Mapping[str, PlannedBuffer]

    def buffer_names(self) -> tuple[str, ...]:
        return tuple(self.buffers)

    def base(self, name: str) -> tuple[str, int]:
        """The buffer whose memory holds the base of `name`, and the base's byte offset in it.

        Buffers of different memory never meet; a launcher cannot tell more either.
        """
        over = self.buffers[name].placement.over
        return (name, 0) if over is None else over

    def base_alignment_offset_bytes(self, name: str) -> int:
        """The base's address modulo `BASE_ALIGNMENT_BYTES`."""
        root, offset_bytes = self.base(name)
        return (self.buffers[root].base_offset_bytes + offset_bytes) % BASE_ALIGNMENT_BYTES

    def with_images(self, images: Mapping[str, Image]) -> Plan:
        """The same with other explicit contents of the buffers that are named."""
        buffers = {
            name: replace(buffer, image=images.get(name, buffer.image))
            for name, buffer in self.buffers.items()
        }
        return replace(self, buffers=buffers)

    def mirrored(self) -> Plan:
        """The same with every buffer against the guard at its other end, as near as can be."""
        swapped = {"end": "start", "start": "end", "none": "none"}
        buffers = {}
        for name, buffer in self.buffers.items():
            guard = swapped[buffer.placement.guard]
            offset_bytes = buffer.placement.offset_bytes if guard == "none" else 0
            placement = replace(buffer.placement, guard=guard, offset_bytes=offset_bytes)
            buffers[name] = replace(buffer, placement=placement)
        return replace(self, buffers=buffers)
