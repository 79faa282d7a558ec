"""What outlives a worker: memory that it shares with its client.

It tells a launch that killed its process from a harness that died of something else, a launch that
hangs from a large case that takes long to be compared, of a fault of memory protection where it was
and which instruction of the subject it was of, how much memory the worker held, and how long its
longest launch took and the one that it is in has lasted.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import cffi
import numpy as np

from pagefuzz.harness.memory.arena import GUARD_BYTES
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Plan

#: Byte 0: the stage; 1: changes with every stage that is entered. Then `MemoryUse`, the longest
#: launch, when the last one began, how many have, `pf_fault` and the buffers.
_MEMORY_AT, _LONGEST_AT, _LAUNCHED_AT, _COUNT_AT, _FAULT_AT, _BUFFERS_AT = 8, 32, 40, 48, 64, 128
#: Of which most is never touched: only a case of very many holes needs so much.
SIZE_BYTES = 2**21

_MEMORY = struct.Struct("<3q")
_SECONDS = struct.Struct("<d")
_COUNT = struct.Struct("<q")

_ffi = cffi.FFI()


class Stage(IntEnum):
    """What a worker is doing."""

    IDLE = 0
    PREPARING = 1
    LAUNCHING = 2
    JUDGING = 3


@dataclass(frozen=True)
class Fault:
    """A fault of memory protection.

    subject       path of the object that was launched
    buffer        the nearest one; "" if none is near
    offset_bytes  from its base, or from 0
    memory_bytes  of it, workspace behind it included
    instruction   that accessed it, from the beginning of that object
    is_write      None where the processor does not tell
    hole          (begin, end) of the closed hole that it was in, from the base; None if in none
    """

    subject: str
    buffer: str
    offset_bytes: int
    memory_bytes: int
    instruction: int
    is_write: bool | None
    hole: tuple[int, int] | None = None


class BlackBox:
    """One worker's; its client has another view of the same memory."""

    def __init__(self, file: int) -> None:
        """`file` is a descriptor of `SIZE_BYTES`; it may be closed afterwards."""
        self._memory = mmap.mmap(file, SIZE_BYTES)
        self._launched: float | None = None  # when, while a launch is running

    @staticmethod
    def create() -> int:
        """A descriptor of fresh memory."""
        file = os.memfd_create("pagefuzz-blackbox", os.MFD_CLOEXEC)
        os.ftruncate(file, SIZE_BYTES)
        return file

    # ---- the worker's side --------------------------------------------------------------------

    def enter(self, stage: Stage) -> None:
        now = time.monotonic()
        if self._launched is not None:
            longest_s = max(now - self._launched, self.longest_launch_s())
            _SECONDS.pack_into(self._memory, _LONGEST_AT, longest_s)
        self._launched = now if stage is Stage.LAUNCHING else None
        if stage is Stage.LAUNCHING:
            _COUNT.pack_into(self._memory, _COUNT_AT, self.launches() + 1)
        _SECONDS.pack_into(self._memory, _LAUNCHED_AT, now)
        self._memory[1] = (self._memory[1] + 1) % 256
        self._memory[0] = stage

    def fault_address(self) -> int:
        """Where a `pf_fault` is to be written."""
        view = np.frombuffer(self._memory, np.uint8)
        return int(view.ctypes.data) + _FAULT_AT

    def note_launch(
        self,
        subject: str,
        plan: Plan,
        addresses: Mapping[str, int],
        closed: Mapping[str, IntervalSet],
    ) -> None:
        """The path of the object that is launched next, where its buffers lie, and which holes in
        them nobody may touch."""
        none = IntervalSet()
        buffers = [
            [
                name,
                addresses[name],
                buffer.placement.before_bytes,
                buffer.memory_bytes,
                list(closed.get(name, none)),
            ]
            for name, buffer in plan.buffers.items()
            if addresses[name] and buffer.placement.over is None
        ]
        text = json.dumps([subject, buffers]).encode()
        head = len(text).to_bytes(4, "little")
        self._memory[_BUFFERS_AT : _BUFFERS_AT + 4 + len(text)] = head + text

    def note_memory(self, use: MemoryUse) -> None:
        """What the worker holds when a launch begins: one that dies of it cannot say."""
        _MEMORY.pack_into(self._memory, _MEMORY_AT, *use.to_json())

    # ---- the client's side --------------------------------------------------------------------

    def reset(self) -> None:
        """Before a case is sent."""
        self._memory[0] = Stage.IDLE

    @property
    def stage(self) -> Stage:
        return Stage(self._memory[0])

    @property
    def entered(self) -> bytes:
        """The stage, and which entry into it; differs whenever a stage was entered."""
        return bytes(self._memory[:2])

    def launches(self) -> int:
        """How many have begun."""
        return int(_COUNT.unpack_from(self._memory, _COUNT_AT)[0])

    def longest_launch_s(self) -> float:
        """Of those that have come back; 0 before the first."""
        return float(_SECONDS.unpack_from(self._memory, _LONGEST_AT)[0])

    def launch_s(self) -> float:
        """How long the launch that it is in has lasted; 0 if it is in none."""
        began = _SECONDS.unpack_from(self._memory, _LAUNCHED_AT)[0]
        return float(time.monotonic() - began) if self.stage is Stage.LAUNCHING else 0.0

    def memory(self) -> MemoryUse:
        """What the worker held when its last launch began; nothing before the first."""
        return MemoryUse.from_json(_MEMORY.unpack_from(self._memory, _MEMORY_AT))

    def fault(self) -> Fault | None:
        """The fault that ended the worker, if one did and it was noted."""
        noted = np.frombuffer(bytes(self._memory[_FAULT_AT : _FAULT_AT + 24]), np.int64)
        is_write, number = np.frombuffer(noted[2:].tobytes(), np.int32).tolist()
        if not number:
            return None
        wrote = None if is_write < 0 else bool(is_write)
        return self.fault_at(int(noted[0]), int(noted[1]), wrote)

    def fault_at(self, address: int, instruction: int, is_write: bool | None) -> Fault:
        """A fault at an address, as one of the launch that was noted last."""
        size = int.from_bytes(self._memory[_BUFFERS_AT : _BUFFERS_AT + 4], "little")
        text = bytes(self._memory[_BUFFERS_AT + 4 : _BUFFERS_AT + 4 + size])
        nearest: tuple[int, str, int, int, list[list[int]]] = (GUARD_BYTES, "", 0, 0, [])
        subject, buffers = json.loads(text) if text else ("", ())
        for name, base, before_bytes, memory_bytes, holes in buffers:
            # What lies in front may be wider than a guard.
            distance = max(base - before_bytes - address, address - base - memory_bytes, 0)
            nearest = min(nearest, (distance, name, base, memory_bytes, holes))
        _, name, base, memory_bytes, holes = nearest
        at = address - base
        hole = next(((begin, end) for begin, end in holes if begin <= at < end), None)
        return Fault(subject, name, at, memory_bytes, instruction, is_write, hole)

    def close(self) -> None:
        self._memory.close()
