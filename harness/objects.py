"""What a worker launches, whatever it is made of: a shared object of a .cu, or a Triton kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import CheckRecord, Compilation, Status

Store = Callable[[npt.NDArray[np.int64]], int]
"""Copies int64 values to where the kernel can read them and returns their address there."""


class LaunchObject(Protocol):
    """One loaded kernel and one launcher of it."""

    @property
    def flags(self) -> frozenset[str]:
        """What it was built as, such as "cuda", "checked", "triton"."""

    @property
    def keeps_record(self) -> bool:
        """Whether a launch must stand between `begin_check` and `end_check`."""

    def marshal(self, plan: Plan, addresses: Mapping[str, int], stream: int = 0) -> None:
        """Sets the arguments of the next launches. `addresses` holds the base of every buffer; 0
        for one without memory. Raises `CaseError` for a number that an argument cannot hold."""

    def launch(self) -> tuple[Status, str]:
        """Calls the launcher; what it returned, and its sentence."""

    def begin_check(self, plan: Plan, expectation: Expectation, store: Store) -> None:
        """Installs what the contract permits as the permissions of the next launch."""

    def end_check(self, plan: Plan) -> CheckRecord:
        """Waits for the launch and reads what was recorded of it."""

    def compilations(self) -> tuple[Compilation, ...]:
        """What is compiled for which launches; empty for what is compiled ahead of them all."""

    def set_order(self, order: int, seed: int) -> None:
        """Order of CTAs and threads for the launches that follow (`enum pf_order`). Raises
        `CannotCheckError` for an object whose order nobody can choose."""

    def inject(
        self, buffer: int, address: int, offset_bytes: int, size_bytes: int, kind: str
    ) -> None:
        """Makes an access the last one of every launch from now on. Raises `CannotCheckError` for
        an object that was not built for that."""

    def catch_faults(self, address: int) -> None:
        """From now on a fault of memory protection is noted at `address`, if the object can."""

    def dump_coverage(self) -> None:
        """Writes what gcov counted so far (coverage builds)."""
