"""Relations: judgements that launch a case again in a form that must not change its output.

They need no reference. A case names those it is launched for (`Case.relations`); what exactly is
changed follows from the case's seed, so that a replay and a minimised case do the same.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod

from pagefuzz.oracles.case import Case, CaseError
from pagefuzz.oracles.differences import Difference, compare
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import (
    AccessFault,
    CheckRecord,
    IndexFault,
    Launch,
    Related,
    RelatedPlan,
    Status,
)
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.verdict import CaseClass, Failure
from pagefuzz.oracles.wording import byte_text, count_text, range_text

#: The fill of the launches that are compared.
FILL = 0


class RelationJudgement(Judgement):
    """Compares a launch with those of related plans, byte for byte.

    when  completes the title of a finding: "dst changes ..."
    """

    unit = "bytes"
    when: str

    def concerns(self, operation: Operation, flags: frozenset[str]) -> bool:
        return self.name in operation.relations

    @abstractmethod
    def derive(
        self, operation: Operation, plan: Plan, expectation: Expectation
    ) -> RelatedPlan | None:
        """A related plan of a case in contract that writes something; None if there is none."""

    def related(
        self, operation: Operation, plan: Plan, expectation: Expectation
    ) -> tuple[RelatedPlan, ...]:
        """What `derive` makes, to be launched one after another; of any case: nothing if it is not
        in contract or writes nothing.

        Raises `ValueError` if what was derived is not in contract: that is a fault of pagefuzz.
        """
        if expectation.case_class is not CaseClass.IN_CONTRACT or not writes(plan, expectation):
            return ()
        derived = self.derive(operation, plan, expectation)
        if derived is None:
            return ()
        if derived.expectation.case_class is not CaseClass.IN_CONTRACT:
            raise ValueError(
                f"{self.name} makes a case of {operation.name} {derived.expectation.case_class}: "
                f"{derived.expectation.refusals or derived.expectation.hostile}"
            )
        return (derived,)

    def as_case(self, operation: Operation, plan: Plan, expectation: Expectation) -> Case | None:
        """The related launch as a case of its own, which names no relation; None where there is
        none, or where a case cannot say what is different."""
        return None

    def applies(self, run: Run) -> bool:
        return self._first(run) is not None and bool(self._second(run))

    def judge(self, run: Run) -> Judged:
        first = self._first(run)
        assert first is not None
        failures: list[Failure] = []
        checked = 0
        for related in self._second(run):
            derived, launch = related.derived, related.launch
            failures += self._own_failures(first, related)
            if launch.status is Status.OK:
                compared = compare(
                    run.plan, run.expectation, (first, launch), derived.plan, derived.moved
                )
                checked += compared.checked_bytes
                failures += [self._failure(run, derived, one) for one in compared.differences]
        return Judged(tuple(failures), checked)

    def _first(self, run: Run) -> Launch | None:
        return next((launch for launch in run.finished if launch.fill == FILL), None)

    def _second(self, run: Run) -> list[Related]:
        return [related for related in run.observation.related if related.relation == self.name]

    def _own_failures(self, first: Launch, related: Related) -> list[Failure]:
        """What goes wrong in the related launch alone."""
        launch, change = related.launch, related.derived.change
        if launch.status is not Status.OK:
            said = launch.message or "no message"
            return [
                Failure(
                    self.name,
                    f"{launch.status.name} {self.when}",
                    (launch.status.name,),
                    {
                        "access": f"returned {launch.status.name}: {said}",
                        "means": f"{change}; without that, it returned OK",
                    },
                )
            ]
        record, usual = launch.record, first.record
        if record is None or usual is None:
            return []
        known = {(fault.site.file, fault.site.line) for fault in _faults(usual)}
        new = [x for x in _faults(record) if (x.site.file, x.site.line) not in known]
        return [
            Failure(
                self.name,
                f"a fault {self.when}",
                ("fault", fault.site.file, str(fault.site.line)),
                {
                    "access": _fault_text(fault),
                    "where": str(fault.site),
                    "means": f"{change}; without that, the line does nothing wrong",
                },
            )
            for fault in new[:1]
        ]

    def _failure(self, run: Run, derived: RelatedPlan, difference: Difference) -> Failure:
        name, offset_bytes = difference.buffer, difference.offset_bytes
        place = run.operation.locate(run.plan, name, offset_bytes)
        there = ""
        if difference.second_offset_bytes != offset_bytes:
            new = run.operation.locate(derived.plan, name, difference.second_offset_bytes)
            there = f" at {new} (offset {difference.second_offset_bytes})"
        mapping = run.operation.mapping(run.plan, name, offset_bytes)
        return Failure(
            self.name,
            f"{name} changes {self.when}",
            (name,),
            {
                "access": f"{name} {place} (offset {offset_bytes}): "
                f"{byte_text(difference.first)}, but {byte_text(difference.second)}{there} "
                f"{self.when}",
                "means": "; ".join(part for part in (derived.change, mapping) if part),
                "effect": f"{count_text(difference.count, 'byte')} of {name} changed",
            },
        )


def _faults(record: CheckRecord) -> list[AccessFault | IndexFault]:
    """As they happened."""
    faults: list[AccessFault | IndexFault] = [*record.access_faults, *record.index_faults]
    return sorted(faults, key=lambda fault: fault.sequence)


def _fault_text(fault: AccessFault | IndexFault) -> str:
    if isinstance(fault, AccessFault):
        begin = fault.offset_bytes
        where = range_text(begin, begin + fault.size_bytes)
        return f"{fault.kind} of {fault.buffer}, {where}, which is forbidden"
    return f"{fault.a} {fault.operation} {fault.b} in {fault.type_name} gave {fault.result}"


def writes(plan: Plan, expectation: Expectation) -> bool:
    """Whether a launch must write anything to a destination."""
    return any(
        expectation.footprint(name).must_write
        for name, buffer in plan.buffers.items()
        if buffer.role.is_destination
    )


def choose(plan: Plan, relation: str, what: str, count: int) -> int:
    """One of `count`, fixed by the case's seed."""
    text = f"{plan.case.seed}/{relation}/{what}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % count


def relation_judgements() -> dict[str, RelationJudgement]:
    """Every relation by name."""
    from pagefuzz.oracles.registry import judgements  # which imports every relation

    return {n: one for n, one in judgements().items() if isinstance(one, RelationJudgement)}


def relations_of(operation: Operation) -> dict[str, RelationJudgement]:
    """The relations that have something to relate in cases of an operation."""
    return {n: one for n, one in relation_judgements().items() if n in operation.relations}


def asked_for(case: Case, operation: Operation) -> dict[str, RelationJudgement]:
    """The relations that a case names. Raises `CaseError` for an unknown name, or for one of which
    the operation has nothing."""
    known = relations_of(operation)
    for name in case.relations:
        if name not in known:
            raise CaseError(
                f"relations names {name!r}; {operation.name} has {', '.join(known) or 'none'}"
            )
    return {name: known[name] for name in case.relations}
