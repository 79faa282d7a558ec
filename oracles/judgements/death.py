"""death: a worker answered, instead of being killed by what it launched."""

from __future__ import annotations

from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.judgements.hang import HANG
from pagefuzz.oracles.observation import DeathAccess
from pagefuzz.oracles.verdict import Failure


class DeathJudgement(Judgement):
    name = "death"
    unit = "launches"
    summary = "the launch does not kill its process or its CUDA context"

    def applies(self, run: Run) -> bool:
        return True

    def judge(self, run: Run) -> Judged:
        survived = len(run.observation.launches)
        death = run.observation.death
        if death is None or death.how == HANG:
            return Judged((), survived)
        if death.access is not None and death.access.buffer:
            return Judged((self._at_a_buffer(run, death.how, death.access),), survived + 1)
        access = f"{death.how}: {death.detail}" if death.detail else death.how
        if death.access is not None:
            verb = _VERBS[death.access.is_write]
            access = f"{access}: {verb} at address {death.access.offset_bytes:#x}, no buffer's"
        launches = "launch" if survived == 1 else "launches"
        details = {
            "access": access,
            "where": death.access.where if death.access is not None else "",
            "means": f"the process that launched died after {survived} finished {launches}",
        }
        details = {label: text for label, text in details.items() if text}
        failure = Failure(self.name, f"{death.how} during the launch", (death.how,), details)
        return Judged((failure,), survived + 1)

    def _at_a_buffer(self, run: Run, how: str, access: DeathAccess) -> Failure:
        """A fault of memory protection, which happens beside a buffer or on a read-only one."""
        verb, buffer, at = _VERBS[access.is_write], access.buffer, access.offset_bytes
        inside = 0 <= at < access.memory_bytes
        side = "inside" if inside else "before" if at < 0 else "past"
        page = "a page mapped read-only" if inside else "a page that nobody may touch"
        details = {
            "access": f"{verb}s {buffer} at byte {at} of {access.memory_bytes}: {how}, {page}",
            "where": access.where,
            "means": (run.operation.mapping(run.plan, buffer, at) or "") if inside else "",
        }
        details = {label: text for label, text in details.items() if text}
        return Failure(self.name, f"{verb} {side} {buffer}", (how, buffer, verb, side), details)


_VERBS = {True: "write", False: "read", None: "access"}
