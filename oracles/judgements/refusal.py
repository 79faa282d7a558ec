"""refusal: what must be refused is, with a message and no effect; nothing else is."""

from __future__ import annotations

import numpy as np

from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.observation import Launch, Status
from pagefuzz.oracles.verdict import Failure
from pagefuzz.oracles.wording import byte_text, count_text


class RefusalJudgement(Judgement):
    name = "refusal"
    unit = "launches"
    summary = (
        "the launcher refuses what breaks its contract, changing nothing, and accepts the rest"
    )

    def applies(self, run: Run) -> bool:
        return bool(run.observation.launches)

    def judge(self, run: Run) -> Judged:
        failures: list[Failure] = []
        for launch in run.observation.launches:
            if run.refused:
                failures += self._must_refuse(run, launch)
            elif launch.status is Status.REFUSED:
                failures.append(self._wrongly_refused(run, launch))
        return Judged(tuple(failures), len(run.observation.launches))

    def _wrongly_refused(self, run: Run, launch: Launch) -> Failure:
        return Failure(
            self.name,
            "refused what it must accept",
            ("refused",),
            {
                "access": f"returned REFUSED: {launch.message or 'no message'}",
                "means": f"every argument keeps the contract; the case is "
                f"{run.expectation.case_class}",
            },
        )

    def _must_refuse(self, run: Run, launch: Launch) -> list[Failure]:
        refusals = run.expectation.refusals
        means = "; ".join(refusal.sentence for refusal in refusals)
        failures = []
        if launch.status is not Status.REFUSED:
            failures.append(
                Failure(
                    self.name,
                    f"accepted what it must refuse ({refusals[0].reason})",
                    ("accepted", refusals[0].reason),
                    {"access": f"returned {launch.status.name}, expected REFUSED", "means": means},
                )
            )
        elif not launch.message:
            failures.append(
                Failure(
                    self.name,
                    "refused without a message",
                    ("no message",),
                    {"access": "returned REFUSED and an empty message", "means": means},
                )
            )
        for buffer, chunks in launch.chunks.items():
            for chunk in chunks:
                changed = np.flatnonzero(chunk.before != chunk.after)
                if changed.size:
                    at = int(changed[0])
                    failures.append(
                        Failure(
                            self.name,
                            f"changed {buffer} of a case that it must refuse",
                            ("changed", buffer),
                            {
                                "access": f"{buffer} byte {chunk.offset_bytes + at}: was "
                                f"{byte_text(int(chunk.before[at]))}, is "
                                f"{byte_text(int(chunk.after[at]))}",
                                "means": means,
                                "effect": f"{count_text(changed.size, 'byte')} changed",
                            },
                        )
                    )
                    break
        return failures
