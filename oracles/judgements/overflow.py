"""overflow: no index arithmetic wraps, no conversion loses bits."""

from __future__ import annotations

from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.observation import IndexFault
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.verdict import Failure

_NOUNS = {
    "+": ("addition", "sum"),
    "-": ("subtraction", "difference"),
    "*": ("multiplication", "product"),
    "<<": ("left shift", "result"),
    "/": ("division", "quotient"),
    "neg": ("negation", "result"),
}


class OverflowJudgement(Judgement):
    name = "overflow"
    unit = "operations"
    summary = "no index arithmetic wraps and no conversion of an index loses bits"

    def concerns(self, operation: Operation, flags: frozenset[str]) -> bool:
        # Triton's arithmetic is not ours to look into.
        return bool(flags & {"checked", "ubsan"}) and "triton" not in flags

    def applies(self, run: Run) -> bool:
        return any(launch.record is not None for launch in run.observation.launches)

    def judge(self, run: Run) -> Judged:
        records = [x.record for x in run.observation.launches if x.record is not None]
        failures = [
            self._failure(run, fault) for record in records for fault in record.index_faults
        ]
        if not failures and any(record.index_fault_count for record in records):
            failures.append(Failure(self.name, "wraps, none recorded", ("unrecorded",)))
        return Judged(tuple(failures), sum(record.operations for record in records))

    def _failure(self, run: Run, fault: IndexFault) -> Failure:
        exact = _exact(fault)
        if fault.operation == "narrow":
            title = f"conversion to {fault.type_name} loses bits"
            access = f"{exact} converted to {fault.type_name} gave {fault.result}"
        else:
            noun, result = _NOUNS[fault.operation]
            title = f"{fault.type_name} {noun} wraps"
            access = (
                f"{_formula(fault)} in {fault.type_name} gave {fault.result}; "
                f"the true {result} is {exact}"
            )
        details = {"access": access, "where": str(fault.site)}
        if means := _meaning(run, exact):
            details["means"] = means
        return Failure(
            self.name,
            title,
            (fault.operation, fault.type_name, f"{fault.site.file}:{fault.site.line}"),
            details,
            sequence=fault.sequence,
        )


def _operands(fault: IndexFault) -> tuple[int, int]:
    """Operands as the operation's type reads them; unsigned 64-bit ones arrive as bit patterns."""
    if fault.type_name == "uint64":
        return fault.a % 2**64, fault.b % 2**64
    return fault.a, fault.b


def _exact(fault: IndexFault) -> int:
    a, b = _operands(fault)
    match fault.operation:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "<<":
            return a << min(max(b, 0), 128)
        case "/":
            # C division truncates; the only wrap is the lowest value by -1.
            return a // b if b else 0
        case "neg":
            return -a
        case "narrow":
            return fault.a
    raise ValueError(f"unknown index operation {fault.operation!r}")


def _formula(fault: IndexFault) -> str:
    a, b = _operands(fault)
    return f"-({a})" if fault.operation == "neg" else f"{a} {fault.operation} {b}"


def _meaning(run: Run, exact: int) -> str | None:
    """What the exact value is, if it is the offset of a byte that the contract maps."""
    for name in run.plan.buffers:
        footprint = run.expectation.footprint(name)
        for allowed in (footprint.must_write, footprint.may_read):
            if exact >= 2**31 - 1 and allowed.contains(exact, exact + 1):
                place = run.operation.locate(run.plan, name, exact)
                mapping = run.operation.mapping(run.plan, name, exact)
                return f"byte {exact} of {name} is {place}" + (f": {mapping}" if mapping else "")
    return None
