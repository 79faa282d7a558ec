"""A worker: loads one subject, runs case after case, answers with small messages.

It may die at any moment; whoever asked notices and starts another.
"""

from __future__ import annotations

import os
import socket
import traceback
from typing import Any, Protocol, TypeVar

import cffi

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.arena import DeviceFaultError, DoesNotFitError
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.own_process import SpoiledProcessError
from pagefuzz.harness.round_trips import RoundTripAssignment, RoundTripRunner
from pagefuzz.harness.running import Answer, Assignment, Injection, Runner
from pagefuzz.harness.workers.blackbox import BlackBox, Stage
from pagefuzz.harness.workers.protocol import Message, receive, send
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.verdict import Outcome, Verdict

T = TypeVar("T")


def serve(channel: socket.socket, box_file: int, assignment: dict[str, Any]) -> int:
    """Runs cases until the stream ends; the exit code."""
    box = BlackBox(box_file, outlives=True)
    os.close(box_file)
    try:
        runner = runner_of(assignment, box)
    except (CannotCheckError, DeviceFaultError, DoesNotFitError, MemoryError) as error:
        said = str(error) or "a worker has not enough memory to start"
        send(channel, {"cannot_check": said})
        return 0
    send(channel, {"ready": runner.device})
    try:
        while (message := receive(channel)) is not None:
            box.enter(Stage.PREPARING)
            answer = _answer(runner, message)
            if box.stage is Stage.JUDGING:
                use_heap(_FEW)
            # Until it is sent: a launch may have closed the channel too.
            about = {"number": message.get("number"), "memory": runner.memory().to_json()}
            send(channel, {**answer, **about})
            if "death" in answer or "spoiled" in answer:
                return 0  # the context is lost, or so: nothing more can be launched from here
            box.enter(Stage.IDLE)
    except BrokenPipeError:
        pass
    runner.close()
    use_heap(_MORE_THAN_KEPT)
    return 0


def use_heap(count: int) -> None:
    """Asks for memory of many sizes, so many blocks of each, and gives it back: a heap that a
    launch has damaged ends the process here, where that is seen, and does not pass for a sound one.
    """
    sizes = [size for size in _HEAP_SIZES for _ in range(count)]
    for block in [_libc.malloc(size) for size in sizes]:
        _libc.free(block)


#: Of blocks, in bytes: all that the C library keeps by size, then to where it maps each anew.
_HEAP_SIZES = (*range(16, 1040, 16), *(2**power - 64 for power in range(11, 18)))

#: The C library keeps 7 blocks of a size, once they are freed, for whoever asks next.
_FEW, _MORE_THAN_KEPT = 2, 8

_ffi = cffi.FFI()
_ffi.cdef("void *malloc(size_t size); void free(void *block);")
_libc: Any = _ffi.dlopen(None)


class Runs(Protocol[T]):
    """What a worker drives: one that checks cases, or one that checks round trips."""

    device: str

    def parse(self, data: object) -> T: ...

    def run(
        self, case: T, *, with_fixed_bytes: bool = False, injection: Injection | None = None
    ) -> Answer: ...

    def memory(self) -> MemoryUse: ...

    def close(self) -> None: ...


def runner_of(assignment: dict[str, Any], box: BlackBox) -> Runs[Any]:
    """Loads what an assignment names. Raises `CannotCheckError`, `DeviceFaultError`,
    `DoesNotFitError` or `MemoryError`."""
    if "reader" in assignment:
        return RoundTripRunner(RoundTripAssignment.from_json(assignment), box)
    return Runner(Assignment(**assignment), box)


def _answer(runner: Runs[Any], message: Message) -> Message:
    try:
        case = runner.parse(message["case"])
        injected = message.get("injection")
        answer = runner.run(
            case,
            with_fixed_bytes=message.get("with_fixed_bytes", False),
            injection=None if injected is None else Injection(**injected),
        )
    except CaseError as error:
        return {"case_error": str(error)}
    except SpoiledProcessError as error:
        return {"cannot_check": str(error), "spoiled": True}
    except CannotCheckError as error:
        return {"cannot_check": str(error)}
    except DeviceFaultError as error:
        return {"death": {"how": error.name, "detail": str(error)}}
    except MemoryError:
        not_run = Verdict(Outcome.NOT_RUN, None, not_run="its worker has not enough memory for it")
        return {"verdict": not_run.to_json(), "fixed_bytes": None}
    except Exception:  # noqa: BLE001 - a fault of the harness is reported, not taken for a death
        lines = traceback.format_exc().strip().splitlines()
        where = next((line.strip() for line in reversed(lines) if 'File "' in line), "")
        return {"cannot_check": f"the harness failed in a worker: {lines[-1]} ({where})"}
    return {
        "verdict": answer.verdict.to_json(),
        "fixed_bytes": None if answer.fixed_bytes is None else answer.fixed_bytes.to_json(),
    }
