"""A finding to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagefuzz.harness import findings
from pagefuzz.harness.findings import Finding
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import CaseClass, Failure, Outcome, Verdict

DESCRIPTION = "R=1  BS=1  W=1  starts=[0, 1]  seq_starts=[1]  entry 1 B, dense, seed 0"


@pytest.fixture
def over_read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finding]:
    """The over-read of the table in design.md, with fields changed."""
    monkeypatch.setattr(findings, "describe_case", lambda case: DESCRIPTION)

    def make(**changes: Any) -> Finding:
        failure = Failure(
            judgement="bounds",
            title="read past block_table",
            key=("read", "block_table", "cp_gather_cache.cu:88"),
            details={
                "effect": "no byte changed",
                "access": "reads 4 bytes at block_table[1] (bytes 4..7 of 4); the row ends at "
                "column 0",
                "where": "kernels/operations/cp_gather_cache.cu:88  block (0,0,0) thread (0,0,0)",
                "means": "request 0, row 0 -> token 1 -> logical page 1 of 1",
            },
            sequence=1,
        )
        consequence = Failure("output", "row 0 differs", ("dst",))
        verdict = Verdict(
            Outcome.FAILED,
            CaseClass.HOSTILE,
            failures=(failure, consequence),
            checked={"bounds": 12, "overflow": 7, "output": 1, "untouched": 4096},
            launches=2,
        )
        fields: dict[str, Any] = {
            "operation": "cp_gather_cache",
            "subject": "bundled:page-as-merged",
            "backend": "host",
            "device": "host",
            "build": "checked",
            "case": Case("cp_gather_cache", {"num_requests": 1}),
            "verdict": verdict,
            "minimised": True,
            "repeats": 10,
            "runs": 10,
            "versions": {"pagefuzz": "0.1.0"},
        }
        return Finding(**{**fields, **changes})

    return make
