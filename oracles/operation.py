"""What an operation owns: its arguments, its contract and its references. One file each.

An operation registers itself by being defined in a module of `oracles/operations/`; nothing else
has to be touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from pagefuzz.oracles.case import Case, CaseError
from pagefuzz.oracles.expectation import Expectation, Refusal
from pagefuzz.oracles.layout import BufferRole, Bytes, Plan
from pagefuzz.oracles.origin import Origin


class Operation(ABC):
    """One row of contracts.md.

    name       as in contracts.md, and in the C ABI (`pf_<name>_args`)
    summary    one line for `pagefuzz list`
    sizes      ABI names of every scalar argument, in ABI order (the stream is not one of them)
    buffers    every buffer argument, in ABI order; its position is its id in checked builds
    run_time   sizes that follow the batch: one compiled kernel must serve every value of them
    counted    what each of the counter pair counts, to complete "one count for each ..."
    relations  names of the relation judgements that have something to relate in its cases
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]]
    buffers: ClassVar[tuple[BufferRole, ...]]
    run_time: ClassVar[tuple[str, ...]] = ()
    counted: ClassVar[tuple[str, str]] = (
        "request and logical page with mapped rows that holds the padding id -1",
        "request and logical page with mapped rows that cannot be copied",
    )
    relations: ClassVar[frozenset[str]] = frozenset(
        {"workspace", "rebasing", "restriding", "repeat", "order"}
    )

    def plan(self, case: Case) -> Plan:
        """Lays a case out. Raises `CaseError` if the case names other sizes or buffers than the
        operation has, or if it is too large to be expanded (index values are materialised)."""
        self._check_names(case)
        return self._plan(case)

    @abstractmethod
    def _plan(self, case: Case) -> Plan: ...

    @abstractmethod
    def refusals(self, plan: Plan) -> tuple[Refusal, ...]:
        """Every reason for which a launcher must refuse the plan's arguments; empty if none."""

    @abstractmethod
    def expect(self, plan: Plan) -> Expectation:
        """The contract's answer, vectorised. Refused plans get an expectation without writes."""

    @abstractmethod
    def expect_by_loop(self, plan: Plan) -> Expectation:
        """The same, written as the contract's loop over requests and rows: the plain truth."""

    @abstractmethod
    def expected_by_torch(self, plan: Plan) -> Mapping[str, Mapping[int, bytes]]:
        """Destination -> byte offset of each must-write run -> its bytes, by torch indexing."""

    @abstractmethod
    def locate(self, plan: Plan, buffer: str, offset_bytes: int) -> str:
        """The place of a byte in its buffer: "row 3, byte 5", "page 4 slot 1, byte 0", or for a
        table entry "row 0, column 2; the row ends at column 1"."""

    @abstractmethod
    def mapping(self, plan: Plan, buffer: str, offset_bytes: int) -> str | None:
        """How the contract comes to a byte: "request 0, row 0 -> token 1 -> logical page 1 of 1";
        None if it belongs to no row."""

    @abstractmethod
    def origin(self, plan: Plan, buffer: str, offset_bytes: int, found: Bytes) -> Origin | None:
        """Where bytes come from that were found at a wrong place of any buffer; None if it cannot
        be told."""

    @abstractmethod
    def describe(self, plan: Plan) -> str:
        """The case on one line, with the field's symbols: "R=1  BS=1  W=1  starts=[0, 1] ..."."""

    def _check_names(self, case: Case) -> None:
        if case.operation != self.name:
            raise CaseError(f"the case is of {case.operation!r}, not of {self.name!r}")
        if set(case.sizes) != set(self.sizes):
            missing = sorted(set(self.sizes) - set(case.sizes))
            extra = sorted(set(case.sizes) - set(self.sizes))
            wrong = f"lacks {missing[0]!r}" if missing else f"has unknown {extra[0]!r}"
            raise CaseError(f"sizes of {self.name} {wrong}; it takes {', '.join(self.sizes)}")
        names = {buffer.name for buffer in self.buffers}
        for where in ("values", "placements"):
            if unknown := sorted(set(getattr(case, where)) - names):
                raise CaseError(
                    f"{where} of {self.name} names unknown buffer {unknown[0]!r}; "
                    f"it has {', '.join(b.name for b in self.buffers)}"
                )
        legal = set(self.sizes) | {
            f"{name}.{part}" for name in names for part in ("dtype", "rank", "extent_bytes", "data")
        }
        if unknown := sorted(set(case.overrides) - legal):
            raise CaseError(
                f"overrides of {self.name} names unknown {unknown[0]!r}; it may name a size or "
                "<buffer>.dtype, .rank, .extent_bytes, .data"
            )
