"""launch: what is not refused gets launched, and every barrier is reached."""

from __future__ import annotations

import re

from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.observation import Launch, Status
from pagefuzz.oracles.verdict import Failure

#: As the host emulation writes it; `Site` has the same.
_SITE = re.compile(r", (?P<place>[^\s,]+:\d+), block (?P<block>\(\S+\)) thread (?P<thread>\(\S+\))")

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
        launches, related = run.observation.launches, run.observation.related
        failures = [self._failure(x, "") for x in launches if x.status in _TITLES]
        # What else a related launch may fail in is for its relation to say.
        failures += [
            self._failure(one.launch, one.derived.change)
            for one in related
            if one.launch.status is Status.BARRIER_FAULT
        ]
        return Judged(tuple(failures), len(launches) + len(related))

    def _failure(self, launch: Launch, change: str) -> Failure:
        details = _details(launch)
        if change:
            details["means"] = change
        return Failure(self.name, _TITLES[launch.status], (launch.status.name,), details)


def _details(launch: Launch) -> dict[str, str]:
    """The launcher's sentence, and the place in the source that it names."""
    text, where = launch.message or "no message", ""
    if (site := _SITE.search(text)) is not None:
        where = f"{site['place']}  block {site['block']} thread {site['thread']}"
        text = text[: site.start()] + text[site.end() :]
    details = {"access": f"returned {launch.status.name}: {text}", "where": where}
    return {label: value for label, value in details.items() if value}
