"""What a Triton launcher has compiled, for which values and shapes."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.triton import private
from pagefuzz.harness.triton.loading import Launcher, launcher_arguments, load_launcher
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.observation import Compilation
from pagefuzz.oracles.operation import Operation
from pagefuzz.strategies.registry import shapes_for

#: Compute capability that keys are asked for without a GPU.
OFFLINE_CAPABILITY = 90

#: Values that compilers like to treat as special, their neighbours, and the widths of integers.
COUNTS = (1, 15, 16, 17, 2**31 - 1)
STRIDES = (*COUNTS, 2**31)

#: Addresses modulo 16, all aligned to the largest element.
_ALIGNMENTS = (0, 8)

SHAPE = "shape"


class _Elsewhere:
    """A pointer to another address."""

    def __init__(self, pointer: Any, address: int) -> None:
        self.dtype, self._address = pointer.dtype, address

    def data_ptr(self) -> int:
        return self._address


def compilations(
    launcher: Launcher, operation: Operation, shapes: Sequence[Case]
) -> tuple[Compilation, ...]:
    """Groups of launches that differ in one argument, and one of all shapes.

    Nothing is launched or compiled. Raises `CannotCheckError` if a shape cannot be launched, or no
    argument of the kernel is one that follows the batch.
    """
    calls = [(shape_text(operation, case), _call(launcher, operation, case)) for case in shapes]
    if not calls:
        raise CannotCheckError(f"{operation.name} has no shapes to compile its Triton form for")
    found = [Compilation(SHAPE, text, call.key()) for text, call in calls]
    call = calls[0][1]
    told = dict(zip(call.names, call.arguments, strict=True))
    varied = [name for name in operation.run_time if name in told]
    if not varied:
        raise CannotCheckError(
            f"no parameter of the Triton kernel is called like one of {operation.run_time}"
        )
    for name in varied:
        values = STRIDES if "stride" in name else COUNTS
        found += [
            Compilation(name, str(value), call.key(**{name: value}))
            for value in (told[name], *values)
        ]
    for name, pointer in told.items():
        if hasattr(pointer, "data_ptr"):
            found += [
                Compilation(
                    f"the alignment of {name}",
                    f"an address of {alignment} modulo 16",
                    call.key(**{name: _Elsewhere(pointer, 2**32 + alignment)}),
                )
                for alignment in _ALIGNMENTS
            ]
    return tuple(found)


def shape_text(operation: Operation, case: Case) -> str:
    return " ".join(f"{name}={case.sizes[name]}" for name in operation.run_time)


def _call(launcher: Launcher, operation: Operation, case: Case) -> private.Call:
    plan = operation.plan(case)
    addresses = {
        name: 2**44 + index * 2**42 + buffer.placement.offset_bytes
        for index, (name, buffer) in enumerate(plan.buffers.items())
    }
    with private.recorded_calls() as calls:
        code, said = launcher(**launcher_arguments(plan, addresses))
    if code != 0 or len(calls) != 1:
        raise CannotCheckError(
            f"the launcher of {operation.name} must launch one kernel for {case.dumps()}; it "
            f"launched {len(calls)} and returned {code} ({said or 'no message'})"
        )
    return calls[0]


def to_json(found: Sequence[Compilation]) -> list[list[Any]]:
    return [[one.varies, one.value, dict(one.key)] for one in found]


def from_json(data: Sequence[Sequence[Any]]) -> tuple[Compilation, ...]:
    shared: dict[str, Mapping[str, str]] = {}
    return tuple(
        # One object for equal keys: comparing them is then free.
        Compilation(varies, value, shared.setdefault(json.dumps(key), key))
        for varies, value, key in data
    )


def compilations_without_a_gpu(
    path: Path, symbol: str, operation: str, kept: Path
) -> tuple[Compilation, ...]:
    """What the launcher of a module has compiled for a GPU that need not be there.

    Works it out in a child of this process, which must not have imported triton yet: one that
    interprets kernels cannot compile any. The answer is kept in the file `kept`. Raises
    `CannotCheckError` with what the child said.
    """
    if not kept.exists():
        text = _from_a_child(lambda: _offline(path, symbol, operation))
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(kept)
    return from_json(json.loads(kept.read_text(encoding="utf-8")))


def _offline(path: Path, symbol: str, operation: str) -> str:
    launcher = load_launcher(path, symbol, interpreted=False)
    private.use_offline_target(OFFLINE_CAPABILITY)
    found = compilations(launcher, registry.operation(operation), shapes_for(operation))
    return json.dumps(to_json(found))


def _from_a_child(work: Callable[[], str]) -> str:
    """What `work` returns in a forked copy of this process. Raises the `CannotCheckError` that it
    raises, and one if the copy dies."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read_end)
            try:
                code, said = 0, work()
            except CannotCheckError as error:
                code, said = 2, str(error)
            with os.fdopen(write_end, "w", encoding="utf-8") as pipe:
                pipe.write(said)
        except BaseException:  # noqa: BLE001 - nothing may run on into the parent's code
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if (code := os.waitstatus_to_exitcode(status)) == 0:
        return said
    raise CannotCheckError(said or f"the process that asks for compilation keys ended with {code}")
