"""launch: what is not refused gets launched, and every barrier is reached."""

from __future__ import annotations

from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.observation import Status
from pagefuzz.oracles.verdict import Failure

_TITLES = {
    Status.LAUNCH_FAILED: "the launch failed",
    Status.BARRIER_FAULT: "a barrier that not every thread of the CTA reached",
}


class LaunchJudgement(Judgement):
    name = "launch"
    unit = "launches"
    summary = "an accepted case launches within CUDA's limits and passes its barriers"

    def applies(self, run: Run) -> bool:
        return not run.refused and bool(run.observation.launches)

    def judge(self, run: Run) -> Judged:
        failures = tuple(
            Failure(
                self.name,
                _TITLES[launch.status],
                (launch.status.name,),
                {"access": f"returned {launch.status.name}: {launch.message or 'no message'}"},
            )
            for launch in run.observation.launches
            if launch.status in _TITLES
        )
        return Judged(failures, len(run.observation.launches))
