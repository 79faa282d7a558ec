"""hang: a launch ends, in the time that its worker is given."""

from __future__ import annotations

from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.verdict import Failure

#: `Death.how` of a worker that was killed because its launch did not end.
HANG = "hang"


class HangJudgement(Judgement):
    name = "hang"
    unit = "launches"
    summary = "the launch ends"

    def applies(self, run: Run) -> bool:
        return True

    def judge(self, run: Run) -> Judged:
        ended = len(run.observation.launches)
        death = run.observation.death
        if death is None or death.how != HANG:
            return Judged((), ended + (death is not None))
        which = death.launch or f"launch {ended + 1} of the case"
        details = {"access": death.detail, "means": f"{which} did not end"}
        return Judged((Failure(self.name, "the launch does not end", (HANG,), details),), ended + 1)
