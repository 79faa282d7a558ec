"""death: a worker answered, instead of being killed by what it launched."""

from __future__ import annotations

from pagefuzz.oracles.judgement import Judged, Judgement, Run
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
        if death is None:
            return Judged((), survived)
        access = f"{death.how}: {death.detail}" if death.detail else death.how
        launches = "launch" if survived == 1 else "launches"
        details = {
            "access": access,
            "means": f"the process that launched died after {survived} finished {launches}",
        }
        failure = Failure(self.name, f"{death.how} during the launch", (death.how,), details)
        return Judged((failure,), survived + 1)
