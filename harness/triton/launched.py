"""A Triton kernel behind the interface of a built object, interpreted or on a GPU.

Used inside a worker only, which then has Triton in one of its two modes for good.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pagefuzz.harness.build import cache_folder
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.objects import Store
from pagefuzz.harness.triton import keys, private
from pagefuzz.harness.triton.loading import launcher_arguments, load_launcher
from pagefuzz.harness.triton.watching import FootprintWatcher
from pagefuzz.oracles import registry
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import CheckRecord, Compilation, Status
from pagefuzz.strategies.registry import shapes_for


class TritonObject:
    """One loaded module and one launcher in it; see `objects.LaunchObject`.

    flags  "triton", with "cuda" on a GPU or, interpreted, perhaps "checked"; "inject" on both
    """

    def __init__(
        self,
        path: Path,
        source: Path,
        operation: str,
        symbol: str,
        flags: frozenset[str],
        keys_path: Path | None,
    ) -> None:
        """`path` is the module to load, `source` the bundled one that it was made of; what it
        compiles is kept in `keys_path`, without a GPU. Raises `CannotCheckError`."""
        self.flags = flags
        self._path = path
        self._shown = "/".join(("kernels", *source.parts[-2:]))
        self._operation = registry.operation(operation)
        self._interpreter: private.Interpreter | None = None
        self._watcher: FootprintWatcher | None = None
        self._arguments: dict[str, Any] = {}
        self._touch: Callable[[], tuple[int, str]] | None = None
        self._touching = False
        if "cuda" in flags:
            os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder().parent / "triton"))
        elif keys_path is None:
            raise CannotCheckError(f"{path} comes without a place for its compilation keys")
        else:  # before Triton is imported here
            self._compilations = keys.compilations_without_a_gpu(path, symbol, operation, keys_path)
        self._launcher = load_launcher(path, symbol, interpreted="cuda" not in flags)
        self._launched: dict[tuple[int, ...], list[Compilation]] = {}
        if "cuda" in flags:
            shapes = shapes_for(operation)
            self._compilations = keys.compilations(self._launcher, self._operation, shapes)
            private.on_compilation(self._compiled)
        else:
            self._interpreter = private.Interpreter()
            self._interpreter.install()

    @property
    def keeps_record(self) -> bool:
        return "checked" in self.flags

    def marshal(self, plan: Plan, addresses: Mapping[str, int], stream: int = 0) -> None:
        self._plan, self._addresses = plan, addresses
        self._arguments = launcher_arguments(plan, addresses, stream)
        if self._interpreter is not None:
            names = {addresses[name]: name for name in plan.buffers if addresses[name]}
            self._interpreter.buffers = names

    def launch(self) -> tuple[Status, str]:
        code, said = self._launcher(**self._arguments)
        if code == Status.OK and self._touch is not None:
            self._touching = True
            code, said = self._touch()
            self._touching = False
        try:
            return Status(code), said
        except ValueError:
            raise CannotCheckError(
                f"the launcher returned {code}, which is no status ({said or 'no message'})"
            ) from None

    def begin_check(self, plan: Plan, expectation: Expectation, store: Store) -> None:
        assert self._interpreter is not None, "a compiled kernel is not checked"
        interpreter = self._interpreter
        self._watcher = interpreter.watcher = FootprintWatcher(
            plan,
            expectation,
            self._addresses,
            self._path,
            self._shown,
            lambda: interpreter.program,
        )

    def end_check(self, plan: Plan) -> CheckRecord:
        assert self._watcher is not None, "begin_check comes first"
        return self._watcher.record()

    def compilations(self) -> tuple[Compilation, ...]:
        """Keys over values and shapes; on a GPU also those that the launches of this object had
        compiled, of kernels with the compile-time arguments of this one."""
        return (*self._compilations, *self._launched.get(self._compile_time(), ()))

    def _compile_time(self) -> tuple[int, ...]:
        follows = self._operation.run_time
        return tuple(self._plan.arguments[n] for n in self._operation.sizes if n not in follows)

    def _compiled(self, key: Mapping[str, str]) -> None:
        """Triton has compiled a kernel for the launch that is under way."""
        if self._touching:  # not the subject's
            return
        shape = keys.shape_text(self._operation, self._plan.case)
        launched = self._launched.setdefault(self._compile_time(), [])
        launched.append(Compilation("the batch of a launch", shape, key))

    def set_order(self, order: int, seed: int) -> None:
        """Neither a GPU nor the interpreter has one to choose."""
        raise CannotCheckError("the order of a Triton kernel's programs cannot be chosen")

    def inject(
        self, buffer: int, address: int, offset_bytes: int, size_bytes: int, kind: str
    ) -> None:
        """As of a native object, by a launch that follows the kernel's."""
        if "inject" not in self.flags:
            raise CannotCheckError(f"{self._shown} was not built to inject accesses")
        from pagefuzz.kernels.triton.common.touching import touch

        self._touch = partial(touch, address, offset_bytes, size_bytes, kind)

    def catch_faults(self, address: int) -> None:
        """A fault of memory protection is only a death: it happens inside NumPy, or on a GPU."""

    def dump_coverage(self) -> None:
        """Triton kernels have no coverage build."""
