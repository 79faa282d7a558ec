"""poison: no output depends on bytes that nobody may read.

The two fills of a case hold the same payload and other bytes everywhere else, so that a destination
byte is either the same after both launches or was written by neither.
"""

from __future__ import annotations

from pagefuzz.oracles.differences import Difference, compare
from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.verdict import Failure
from pagefuzz.oracles.wording import byte_text, count_text


class PoisonJudgement(Judgement):
    name = "poison"
    unit = "bytes"
    summary = "no output changes when every byte that must not be read does"

    def applies(self, run: Run) -> bool:
        return not run.refused and len(run.finished) > 1

    def judge(self, run: Run) -> Judged:
        first, second = run.finished[:2]
        compared = compare(run.plan, run.expectation, (first, second), run.plan, {})
        failures = tuple(self._failure(run, one) for one in compared.differences)
        return Judged(failures, compared.checked_bytes)

    def _failure(self, run: Run, difference: Difference) -> Failure:
        name, offset_bytes = difference.buffer, difference.offset_bytes
        place = run.operation.locate(run.plan, name, offset_bytes)
        origin = run.operation.origin(run.plan, name, offset_bytes, difference.found)
        mapping = run.operation.mapping(run.plan, name, offset_bytes)
        return Failure(
            self.name,
            f"{name} depends on bytes that must not be read",
            (name,),
            {
                "access": f"{name} {place} (offset {offset_bytes}): "
                f"{byte_text(difference.first)} with one fill, "
                f"{byte_text(difference.second)} with the other",
                "means": "; ".join(
                    part
                    for part in (mapping, f"it holds {origin.text}" if origin is not None else "")
                    if part
                ),
                "effect": f"{count_text(difference.count, 'byte')} of {name} differ",
            },
        )
