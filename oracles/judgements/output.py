"""output: every byte that must be written holds what the contract says, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.expectation import Contested, Expected
from pagefuzz.oracles.judgement import Judged, Judgement, Run
from pagefuzz.oracles.observation import Launch
from pagefuzz.oracles.origin import OriginKind
from pagefuzz.oracles.runs import before_and_after
from pagefuzz.oracles.verdict import Failure
from pagefuzz.oracles.wording import byte_text, count_text, share_text

_NATURES = {
    OriginKind.ENTRY: "other entry",
    OriginKind.FORBIDDEN: "forbidden bytes",
}
_TITLES = {
    "not written": "a row of {} is not written",
    "other entry": "a row of {} holds another entry",
    "forbidden bytes": "a row of {} holds bytes that must not be read",
    "wrong bytes": "a row of {} holds wrong bytes",
    "torn contested": "a contested row of {} holds an element of no claimant",
}


class OutputJudgement(Judgement):
    name = "output"
    unit = "bytes"
    summary = "every byte that must be written is exact; contested elements are one claimant's"

    def applies(self, run: Run) -> bool:
        return not run.refused and bool(run.finished)

    def judge(self, run: Run) -> Judged:
        failures: list[Failure] = []
        checked = 0
        for launch in run.finished:
            for part, expected in run.expectation.expected.items():
                name = expected.buffer or part
                checked += expected.values.size
                failures += self._exact(run, launch, name, expected)
                if expected.contested is not None and expected.contested.offsets.size:
                    contested_bytes, found = self._contested(run, launch, name, expected.contested)
                    checked += contested_bytes
                    failures += found
        return Judged(tuple(failures), checked)

    def _exact(self, run: Run, launch: Launch, name: str, expected: Expected) -> list[Failure]:
        size_bytes = expected.values.shape[1]
        root, begin = run.plan.base(name)
        before, after = before_and_after(
            launch, run.plan.case.seed, root, expected.offsets + begin, size_bytes
        )
        if np.array_equal(after, expected.values):
            return []
        wrong = after != expected.values
        free = expected.free_nans
        if free is not None:
            wrong &= ~free.pass_bytes(after)
            if not wrong.any():
                return []
        row, byte = map(int, np.argwhere(wrong)[0])
        offset_bytes = int(expected.offsets[row]) + byte
        origin = run.operation.origin(run.plan, name, offset_bytes, after[row, byte:])
        if np.array_equal(after[row][wrong[row]], before[row][wrong[row]]):
            nature, holds = "not written", "what was there before"
        else:
            nature = _NATURES.get(origin.kind, "wrong bytes") if origin else "wrong bytes"
            holds = origin.text if origin else ""
        return [
            self._failure(
                run,
                name,
                nature,
                offset_bytes,
                got=int(after[row, byte]),
                expected=f"expected {byte_text(int(expected.values[row, byte]))}"
                if free is None or not free.covers(row, byte)
                else f"expected any NaN of {free.dtype.name}",
                holds=holds,
                effect=_effect(wrong),
            )
        ]

    def _contested(
        self, run: Run, launch: Launch, name: str, contested: Contested
    ) -> tuple[int, list[Failure]]:
        """Each element must be that of one of the claimants, or old where that is allowed."""
        offsets, claimant = np.unique(contested.offsets, return_inverse=True)
        size_bytes = contested.values.shape[1]
        root, begin = run.plan.base(name)
        before, after = before_and_after(
            launch, run.plan.case.seed, root, offsets + begin, size_bytes
        )
        elements = (-1, size_bytes // contested.element_bytes, contested.element_bytes)
        fits = (before.reshape(elements) == after.reshape(elements)).all(axis=2)
        fits &= contested.old_allowed
        claims = contested.values.reshape(elements) == after[claimant].reshape(elements)
        claims = claims.all(axis=2)
        if contested.free_nans is not None:
            claims |= contested.free_nans.passes(after[claimant])
        np.logical_or.at(fits, claimant, claims)
        if fits.all():
            return after.size, []
        row, element = map(int, np.argwhere(~fits)[0])
        byte = element * contested.element_bytes
        offset_bytes = int(offsets[row]) + byte
        found = after[row, byte : byte + contested.element_bytes]
        claimants = contested.values[claimant == row][:, byte : byte + contested.element_bytes]
        wanted = [bytes(value).hex() for value in claimants[:3]]
        if contested.old_allowed:
            wanted.insert(0, bytes(before[row, byte : byte + contested.element_bytes]).hex())
        failure = self._failure(
            run,
            name,
            "torn contested",
            offset_bytes,
            got=int(found[0]),
            expected=f"the element is {bytes(found).hex()}, expected "
            f"{' or '.join(dict.fromkeys(wanted))} "
            f"({'old, or ' if contested.old_allowed else ''}a claimant's)",
            holds="",
            effect=f"{share_text(int((~fits).sum()), fits.size, 'contested element')} wrong",
        )
        return after.size, [failure]

    def _failure(
        self,
        run: Run,
        name: str,
        nature: str,
        offset_bytes: int,
        *,
        got: int,
        expected: str,
        holds: str,
        effect: str,
    ) -> Failure:
        place = run.operation.locate(run.plan, name, offset_bytes)
        mapping = run.operation.mapping(run.plan, name, offset_bytes)
        details = {
            "access": f"{name} {place} (offset {offset_bytes}): got {byte_text(got)}, {expected}",
            "means": "; ".join(
                part for part in (mapping, f"it holds {holds}" if holds else "") if part
            ),
            "effect": effect,
        }
        return Failure(self.name, _TITLES[nature].format(name), (name, nature), details)


def _effect(wrong: npt.NDArray[np.bool_]) -> str:
    rows = int(wrong.any(axis=1).sum())
    return (
        f"{rows} of {count_text(wrong.shape[0], 'row')} wrong, "
        f"{share_text(int(wrong.sum()), wrong.size, 'byte')}"
    )
