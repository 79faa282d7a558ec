"""Every use of Triton's private parts, in one place, for the one version that it was written for.

Interpreted launches: Triton's interpreter runs a kernel on host memory by address, with integer
arguments as wide as the kernel declares them. A *watched* launch tests each lane of each access
against what the contract permits, before it happens, and leaves out what is forbidden.

Compilation keys: what Triton would look a compiled kernel up by, from its own hook, without
compiling.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pagefuzz.harness.errors import CannotCheckError, MissingPackageError

#: The releases whose private parts are as they are used here.
VERSION = "3.6"

_INTERPRET = "TRITON_INTERPRET"


def require_triton(what: str) -> str:
    """The installed version. Raises `MissingPackageError` if there is none, or another one."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise MissingPackageError(
            f"{what} is written in Triton, which is not installed; pip install 'pagefuzz[triton]'"
        ) from None
    if not version.startswith(f"{VERSION}."):
        raise MissingPackageError(
            f"{what} needs Triton {VERSION}, whose private parts are used to check it; "
            f"{version} is installed; pip install 'pagefuzz[triton]'"
        )
    return version


def set_mode(*, interpreted: bool) -> None:
    """Must be called before the first import of triton. Raises `CannotCheckError` after it."""
    if "triton" in sys.modules and interpreted != bool(os.environ.get(_INTERPRET)):
        raise CannotCheckError("Triton was imported in another mode; a worker must not do that")
    if interpreted:
        os.environ[_INTERPRET] = "1"
    else:
        os.environ.pop(_INTERPRET, None)


# ---- interpreted launches ------------------------------------------------------------------------

Addresses = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class Watcher(Protocol):
    """Sees every access of an interpreted launch before it happens."""

    def see(self, kind: str, buffer: str | None, at: Addresses, size_bytes: int) -> Mask:
        """Which lanes may go on.

        kind        "read", "write" or "atomic"
        buffer      that the address was computed from; None if that is not known
        at          uint64 [n], the address of each lane that is not masked off
        size_bytes  of each
        """


@dataclass
class Interpreter:
    """The interpreter of this process, changed for all kernels.

    buffers  address of a buffer's base -> its name, for the launch that follows
    watcher  of the launches that follow; None: accesses are not looked at
    """

    buffers: Mapping[int, str] = field(default_factory=dict)
    watcher: Watcher | None = None

    def install(self) -> None:
        """Replaces what runs a kernel and what touches memory. Once a process."""
        from triton.runtime import interpreter as triton_interpreter

        self._theirs = triton_interpreter
        self._builder = triton_interpreter.interpreter_builder
        # Triton would add each sum again in 64 bits, only to drop the result.
        self._builder.options = triton_interpreter.InterpreterOptions(sanitize_overflow=False)
        self._pointer_type = _pointer_type()
        self._patched: set[Any] = set()
        self._load = self._builder.create_masked_load
        self._store = self._builder.create_masked_store
        self._rmw = self._builder.create_atomic_rmw
        self._cas = self._builder.create_atomic_cas
        self._bitcast = self._builder.create_bitcast
        self._builder.create_masked_load = self._watched_load
        self._builder.create_masked_store = self._watched_store
        self._builder.create_atomic_rmw = self._watched_rmw
        self._builder.create_atomic_cas = self._watched_cas
        self._builder.create_bitcast = self._traced_bitcast
        triton_interpreter.InterpretedFunction.run = self._runner()

    # ---- launches --------------------------------------------------------------------------------

    def _runner(self) -> Callable[..., None]:
        def run(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            if not warmup:
                self._run(function, arguments, grid, options)

        return run

    def _run(
        self, function: Any, arguments: Sequence[Any], grid: Any, options: Mapping[str, Any]
    ) -> None:
        body = function.rewrite()
        if body not in self._patched:
            # The language stays patched: this process interprets, and does nothing else with it.
            self._theirs._patch_lang(body)
            self._patched.add(body)
        named = dict(zip(function.arg_names, arguments, strict=False))
        named |= {name: value for name, value in options.items() if name in function.arg_names}
        annotations = function.fn.__annotations__
        values = {name: self._value(value, annotations.get(name)) for name, value in named.items()}
        grid = tuple(grid) + (1,) * (3 - len(grid))
        self._builder.set_grid_dim(*grid)
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    self._builder.set_grid_idx(x, y, z)
                    body(**values)

    def _value(self, value: Any, annotation: Any) -> Any:
        """An argument as a kernel sees it: a pointer, an integer of its declared type, or, where
        the parameter is a compile-time one, the value itself."""
        import triton.language as tl

        if annotation is tl.constexpr:
            return value
        if hasattr(value, "data_ptr"):
            address = value.data_ptr()
            element = value.dtype if isinstance(value.dtype, tl.dtype) else tl.dtype(value.dtype)
            kind = self._pointer_type(element, self.buffers.get(address))
            data = np.array([address], dtype=np.uint64)
            return tl.tensor(self._theirs.TensorHandle(data, kind), kind)
        if isinstance(value, int) and isinstance(annotation, tl.dtype):
            data = np.array([value], dtype=self._theirs._get_np_dtype(annotation))
            return tl.tensor(self._theirs.TensorHandle(data, annotation), annotation)
        return self._theirs._implicit_cvt(value)

    @property
    def program(self) -> tuple[int, int, int]:
        """Ids of the program that runs."""
        x, y, z = self._builder.grid_idx
        return x, y, z

    # ---- accesses --------------------------------------------------------------------------------

    def _allowed(self, kind: str, pointers: Any, mask: Any) -> Any:
        """The mask without the lanes that the watcher does not let through."""
        if self.watcher is None or not mask.data.any():
            return mask
        size_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        at, lanes = np.broadcast_arrays(pointers.data, mask.data)
        buffer = getattr(pointers.dtype, "buffer", None)
        good = self.watcher.see(kind, buffer, at[lanes], size_bytes)
        if good.all():
            return mask
        left = lanes.copy()
        left[lanes] = good
        return self._theirs.TensorHandle(left, mask.dtype)

    def _watched_load(self, pointers: Any, mask: Any, *others: Any) -> Any:
        return self._load(pointers, self._allowed("read", pointers, mask), *others)

    def _watched_store(self, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        return self._store(pointers, value, self._allowed("write", pointers, mask), *others)

    def _watched_rmw(self, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask = self._allowed("atomic", pointer, mask)
        return self._rmw(operation, pointer, value, mask, *rest)

    def _watched_cas(self, pointer: Any, compared: Any, value: Any, *rest: Any) -> Any:
        whole = self._theirs.TensorHandle(np.ones_like(pointer.data, dtype=bool), None)
        if not self._allowed("atomic", pointer, whole).data.all():
            return self._theirs.TensorHandle(np.zeros_like(compared.data), compared.dtype.scalar)
        return self._cas(pointer, compared, value, *rest)

    def _traced_bitcast(self, source: Any, kind: Any) -> Any:
        """A pointer to other elements still points into its buffer."""
        made = self._bitcast(source, kind)
        buffer = getattr(source.dtype, "buffer", None)
        if buffer is not None and hasattr(made.dtype, "element_ty"):
            made.dtype = self._pointer_type(made.dtype.element_ty, buffer)
        return made


def _pointer_type() -> Any:
    """Triton's pointer type, with the name of the buffer that it points into."""
    import triton.language as tl

    class BufferPointer(tl.pointer_type):  # type: ignore[misc]
        def __init__(self, element: Any, buffer: str | None) -> None:
            super().__init__(element)
            self.buffer = buffer

    return BufferPointer


# ---- compilation keys ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of a kernel: the parameters' names, and what was passed for each."""

    kernel: Any
    names: tuple[str, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    def key(self, **changed: Any) -> dict[str, str]:
        """The parts of the compilation key by parameter, with some arguments changed.

        What the key holds beside parameters is under "(other)". Nothing is compiled.
        """
        arguments = [
            changed.get(name, value) for name, value in zip(self.names, self.arguments, strict=True)
        ]
        with recorded_keys() as keys:
            self.kernel.warmup(*arguments, grid=(1, 1, 1), **self.options)
        if len(keys) != 1:
            raise CannotCheckError("Triton did not say what it would compile a kernel for")
        return keys[0]


def use_offline_target(capability: int) -> None:
    """Makes Triton believe in a GPU of that compute capability: to compile for, not to use."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Nowhere:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

    driver.set_active(Nowhere())


@contextmanager
def recorded_keys() -> Iterator[list[dict[str, str]]]:
    """While it is open, what Triton wants to compile is recorded, not compiled."""
    from triton import knobs

    keys: list[dict[str, str]] = []

    def hook(*, key: str, compile: Mapping[str, Any], **_: Any) -> bool:
        keys.append(_parts(key, compile))
        return True

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        yield keys
    finally:
        knobs.runtime.jit_cache_hook = before


def on_compilation(tell: Callable[[dict[str, str]], None]) -> None:
    """Calls `tell` with the key of every kernel that Triton has compiled, or found in its files."""
    from triton import knobs

    def hook(*, key: str, compile: Mapping[str, Any], **_: Any) -> None:
        tell(_parts(key, compile))

    knobs.runtime.jit_post_compile_hook = hook


@contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """While it is open, kernels are neither launched nor compiled: their calls are recorded."""
    from triton.runtime.jit import JITFunction

    calls: list[Call] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if warmup:
            names = tuple(kernel.arg_names)
            calls.append(Call(kernel, names, tuple(arguments), dict(options)))

    before, JITFunction.run = JITFunction.run, run
    try:
        yield calls
    finally:
        JITFunction.run = before


def _parts(key: str, compiled: Mapping[str, Any]) -> dict[str, str]:
    """Parameter -> what of it is in a key: its type, its value if that is compiled in, what the
    compiler may assume of it."""
    signature, attributes = compiled["signature"], compiled["configs"][0]
    parts = {}
    for index, (name, kind) in enumerate(signature.items()):
        text = str(kind)
        if (index,) in compiled["constants"]:
            text = f"the value {compiled['constants'][index,]}"
        for attribute in attributes.get((index,), ()):
            text += f", {attribute[0].removeprefix('tt.')} {attribute[1]}"
        parts[name] = text
    # The options; the list of parameters before them is what `parts` says.
    parts["(other)"] = key.rpartition("]")[2]
    return parts
