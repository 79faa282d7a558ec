"""A case that fails in a related launch alone, told as that launch alone."""

from __future__ import annotations

from collections.abc import Callable

from pagefuzz.harness.findings import cause
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.relation import relation_judgements
from pagefuzz.oracles.verdict import Verdict


def directly(
    case: Case, verdict: Verdict, judge: Callable[[Case], Verdict]
) -> tuple[Case, Verdict]:
    """The related launch as a case of its own, if that fails too: it needs no comparison, and often
    a line of source says where. Else the case as it is.

    judge  by a process that has launched nothing else: what other launches have left is no part of
           a case
    """
    failure = cause(verdict)
    if failure is None or failure.judgement not in relation_judgements():
        return case, verdict
    operation = registry.operation(case.operation)
    plan = operation.plan(case)
    relation = relation_judgements()[failure.judgement]
    other = relation.as_case(operation, plan, operation.expect(plan))
    if other is None:
        return case, verdict
    direct = judge(other)
    return (case, verdict) if cause(direct) is None else (other, direct)
