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
from typing import Any

import cffi
import numpy as np

from pagefuzz.harness.memory.arena import GUARD_BYTES
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.objects import LaunchObject
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

#: `pf_fault.is_write` where the address is not known either.
_NO_ADDRESS = -2

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
    offset_bytes  from its base, or from 0; None if the processor does not tell the address
    memory_bytes  of it, workspace behind it included
    instruction   that accessed it, from the beginning of that object
    is_write      None where the processor does not tell
    hole          (begin, end) of the closed hole that it was in, from the base; None if in none
    mapped        (begin, end) of the buffer's region, from the base, which a launch may read
    """

    subject: str
    buffer: str
    offset_bytes: int | None
    memory_bytes: int
    instruction: int
    is_write: bool | None
    hole: tuple[int, int] | None = None
    mapped: tuple[int, int] | None = None


@dataclass(frozen=True)
class NotedLaunch:
    """Which launch of a case one is.

    text    "the second launch", ...; "" of the first
    is_own  whether it is of the case's own plan
    """

    text: str = ""
    is_own: bool = True


class BlackBox:
    """One worker's; its client has another view of the same memory."""

    def __init__(self, file: int, *, outlives: bool = False) -> None:
        """file      a descriptor of `SIZE_BYTES`; it may be closed afterwards
        outlives  whether somebody reads it once a fault has ended this process
        """
        self._memory = mmap.mmap(file, SIZE_BYTES)
        self._outlives = outlives
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

    def catch_faults(self, launched: LaunchObject) -> None:
        """Has the faults of an object's launches noted here. Its handler is there until the process
        ends, and so must the object be: where nobody reads what it notes, there is none."""
        if self._outlives:
            view = np.frombuffer(self._memory, np.uint8)
            launched.catch_faults(int(view.ctypes.data) + _FAULT_AT)

    def note_launch(
        self,
        subject: str,
        plan: Plan,
        addresses: Mapping[str, int],
        closed: Mapping[str, IntervalSet],
        mapped: Mapping[str, tuple[int, int]],
        launch: NotedLaunch,
    ) -> None:
        """The path of the object that is launched next, where its buffers lie, which holes in them
        nobody may touch, where their regions end (`Arena.mapped`), and which launch it is."""
        none = IntervalSet()
        buffers = [
            [
                name,
                addresses[name],
                buffer.placement.before_bytes,
                buffer.memory_bytes,
                list(closed.get(name, none)),
                mapped.get(name),
            ]
            for name, buffer in plan.buffers.items()
            if addresses[name] and buffer.placement.over is None
        ]
        text = json.dumps([subject, launch.text, launch.is_own, buffers]).encode()
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
        instruction = int(noted[1])
        if is_write == _NO_ADDRESS:
            return Fault(self._noted()[0], "", None, 0, instruction, None)
        wrote = None if is_write < 0 else bool(is_write)
        return self.fault_at(int(noted[0]), instruction, wrote)

    def _noted(self) -> tuple[str, NotedLaunch, list[Any]]:
        """What `note_launch` was told: the object, which launch, the buffers."""
        size = int.from_bytes(self._memory[_BUFFERS_AT : _BUFFERS_AT + 4], "little")
        text = bytes(self._memory[_BUFFERS_AT + 4 : _BUFFERS_AT + 4 + size])
        if not text:
            return "", NotedLaunch(), []
        subject, launch, is_own, buffers = json.loads(text)
        return subject, NotedLaunch(launch, is_own), buffers

    def launch(self) -> NotedLaunch:
        """The last one."""
        return self._noted()[1]

    def fault_at(self, address: int, instruction: int, is_write: bool | None) -> Fault:
        """A fault at an address, as one of the launch that was noted last."""
        subject, _, buffers = self._noted()
        nearest: tuple[int, str, list[Any]] = (GUARD_BYTES, "", [0, 0, 0, [], None])
        for name, *about in buffers:
            # What lies in front may be wider than a guard.
            base, before_bytes, memory_bytes, *_ = about
            distance = max(base - before_bytes - address, address - base - memory_bytes, 0)
            nearest = min(nearest, (distance, name, about))
        _, name, (base, _, memory_bytes, holes, mapped) = nearest
        at = address - base
        hole = next(((begin, end) for begin, end in holes if begin <= at < end), None)
        region = None if mapped is None else (mapped[0], mapped[1])
        return Fault(subject, name, at, memory_bytes, instruction, is_write, hole, region)

    def close(self) -> None:
        self._memory.close()
