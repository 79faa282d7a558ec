"""Planted faults: what the tests know of each twin, beside the twin.

A planted fault is a twin, bundled or in `ci/tests/twins/`, and a file NAME.json in the latter:

    case      shows the fault
    checked   the judgement that must name it first in a checked build
    release   the same in a release build
    cuda      optional: the same in both on a GPU, whose order of threads is its own
    also      optional: others that must see it in a release build
    fuzz      optional: what a campaign from nothing comes to
                judgement   instead of the one of the checked build; a list if it depends on what
                            is drawn first
                most        of requests, tokens or pairs in the minimised case; 2 if it is not given
                            (most_requests, most_tokens: the same)
                why         it is not what it is by default
                fast        true: in the fast tier too
    reported  optional: names of reported cases on which it fails
    unshown   optional: names of reported cases on which it does not
    timeout_s optional: after which a launch counts as a hang
    slow      optional, true: its two builds are compiled in the slow tier only; so are those of
              faults that are named like another one in both builds
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pagefuzz.harness.check import TIMEOUT_S, Checker
from pagefuzz.harness.subjects import KERNELS
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import Verdict

TWINS = Path(__file__).parent / "twins"
NAMES = sorted(path.stem for path in TWINS.glob("*.json"))

#: The size that counts what a launch works off, by what an operation has; the first that it has.
WORK_SIZES = ("num_requests", "num_pairs", "num_tokens")


def planted(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((TWINS / f"{name}.json").read_text())
    return loaded


def case_of(name: str) -> Case:
    return Case.from_json(planted(name)["case"])


def twin(name: str) -> str:
    """As a subject."""
    path = TWINS / f"{name}.toml"
    return f"twin:{path if path.exists() else KERNELS / 'twins' / path.name}"


def judgements_of(name: str) -> list[str]:
    """Those of which one must name what a campaign finds."""
    wanted = planted(name).get("fuzz", {}).get("judgement", planted(name)["checked"])
    return [wanted] if isinstance(wanted, str) else list(wanted)


@cache
def fast_names() -> frozenset[str]:
    """One fault for each pair of judgements that name it in the two builds: compiling takes
    seconds."""
    first: dict[tuple[str, str], str] = {}
    for name in NAMES:
        one = planted(name)
        if not one.get("slow"):
            first.setdefault((one["checked"], one["release"]), name)
    return frozenset(first.values())


def is_slow(name: str) -> bool:
    return name not in fast_names()


def checked_on_its_case(name: str, device: str, build: str) -> Verdict:
    """The verdict on the case that shows it."""
    timeout_s = planted(name).get("timeout_s", TIMEOUT_S)
    with Checker(None, twin(name), device, build, timeout_s=timeout_s) as checker:
        return checker.check(case_of(name))


def most_work(name: str) -> int:
    """The most requests, tokens or pairs that its minimised case may have."""
    fuzz = planted(name).get("fuzz", {})
    found = [fuzz[key] for key in ("most", "most_requests", "most_tokens") if key in fuzz]
    return int(found[0]) if found else 2


def work_of(case: Case) -> int:
    """Requests of a gather, pairs of pages, or tokens of a writer."""
    (first, *_) = (case.sizes[size] for size in WORK_SIZES if size in case.sizes)
    return first
