"""recompile: nothing that follows the batch is compiled into a kernel."""

from __future__ import annotations

from collections.abc import Mapping

from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.observation import Compilation
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.verdict import Failure

_SHOWN = 4


class RecompileJudgement(Judgement):
    name = "recompile"
    unit = "keys"
    summary = "no value that follows the batch enters the key by which a kernel is compiled"

    def concerns(self, operation: Operation, flags: frozenset[str]) -> bool:
        return "triton" in flags and bool(operation.run_time)

    def applies(self, run: Run) -> bool:
        # Without rows or requests nothing is launched: such a case is no example of anything.
        runs = bool(run.finished) and bool(run.expectation.footprints)
        return runs and bool(run.observation.compilations)

    def judge(self, run: Run) -> Judged:
        compilations = run.observation.compilations
        groups: dict[str, list[Compilation]] = {}
        for one in compilations:
            groups.setdefault(one.varies, []).append(one)
        failures = []
        blamed: set[str] = set()
        # Arguments first: what they explain of shapes and batches is not said again.
        for varies in sorted(groups, key=lambda name: name not in run.operation.run_time):
            first = groups[varies][0]
            for other in groups[varies][1:]:
                differing = _differences(first.key, other.key)
                if not set(differing) <= blamed:
                    blamed |= set(differing)
                    failures.append(self._failure(first, other, differing))
                    break
        return Judged(tuple(failures), len(compilations))

    def _failure(self, first: Compilation, other: Compilation, differing: list[str]) -> Failure:
        shown = "; ".join(
            f"{name} is {first.key.get(name, 'not there')!r} in one key, "
            f"{other.key.get(name, 'not there')!r} in the other"
            for name in differing[:_SHOWN]
        )
        return Failure(
            self.name,
            f"{first.varies} enters the compilation key",
            (first.varies,),
            {
                "access": f"compiled for {first.varies} = {first.value}, then anew for "
                f"{other.value}: {shown}",
                "where": f"parameter {' and '.join(differing)} of the kernel",
                "means": "one compilation must serve every batch",
            },
        )


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Parameters that have different parts in two keys."""
    if one == other:
        return []
    names = dict.fromkeys((*one, *other))
    return [name for name in names if one.get(name) != other.get(name)]
