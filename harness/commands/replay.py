"""`pagefuzz replay`: one case again."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
from functools import partial
from pathlib import Path

from pagefuzz.harness.check import Checker
from pagefuzz.harness.commands.each import exit_code_of_each
from pagefuzz.harness.commands.selection import selected_subjects
from pagefuzz.harness.findings import (
    Finding,
    built_text,
    cause,
    describe_case,
    labelled,
    load_finding,
)
from pagefuzz.harness.reporters.figures import screen_width
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case, CaseError, load_case
from pagefuzz.oracles.verdict import Outcome


def replay(options: argparse.Namespace) -> int:
    """Returns the exit code: 1 if the case fails on any subject, else 2 if it was not run on
    one."""
    path: Path = options.case
    case, finding = _read(path)
    if tool := options.sanitizer or (finding.sanitizer if finding else ""):
        from pagefuzz.harness.commands.second_opinion import refuse_unused, replay_with_sanitizer

        refuse_unused(tool, options)
        on = options.subject or (finding.subject if finding else None)
        built = finding.build if finding and finding.sanitizer else None
        return replay_with_sanitizer(tool, case, on, options.device, options.build or built)
    device = options.device or (finding.backend if finding else "auto")
    build = options.build or (finding.build if finding else "checked")
    subject = options.subject or (finding.subject if finding else None)
    names = None if subject is None else [subject]
    try:
        return exit_code_of_each(
            {
                f"{case.operation}/{chosen.name}": partial(
                    _replay_on, case, chosen.name, device, build, finding, options
                )
                for chosen in selected_subjects([case.operation], names)
            }
        )
    except CaseError as error:  # what the operation makes of it
        raise CaseError(f"{path}: {error}") from None


def _replay_on(
    case: Case,
    subject: str,
    device: str,
    build: str,
    finding: Finding | None,
    options: argparse.Namespace,
) -> int:
    path: Path = options.case
    width = screen_width()
    hang_after_s = options.hang_after or (finding.hang_after_s if finding else None)
    with Checker(
        case.operation,
        subject,
        device,
        build,
        timeout_s=hang_after_s,
        isolate=options.isolate,
        gpu_memory_bytes=options.gpu_memory,
    ) as checker:
        checker.watch_ends()
        verdict = checker.check(case)
        built = built_text(checker.backend, checker.build, checker.flags)
        where = f"{case.operation} · {subject} · {checker.backend} · {built}"
        if verdict.outcome is Outcome.NOT_RUN:
            print(f"pagefuzz: {where}: the case was not run: {verdict.not_run}", file=sys.stderr)
            return 2
        failure = cause(verdict)
        if failure is None:
            print(where)
            examined = f"{', '.join(verdict.checked)}; {verdict.launches} launches"
            for label, text in (
                ("case", f"{describe_case(case)}   class: {verdict.case_class}"),
                ("checked", examined),
            ):
                print("\n".join(labelled(label, text, width)))
            print(_compared(finding, "the case passed", width) if finding else "clean")
            return 0
        now = Finding(
            operation=case.operation,
            subject=subject,
            backend=checker.backend,
            device=checker.device,
            build=checker.build,
            case=case,
            verdict=verdict,
            hang_after_s=hang_after_s,
            flags=tuple(sorted(checker.flags)),
        )
        print(now.text(width, path if finding else None, is_replay=True))
        if finding is not None and now.identity != finding.identity:
            print(f"\n{_compared(finding, _named(now), width)}")
    return 1


def _compared(finding: Finding, seen: str, width: int) -> str:
    text = f"the finding does not reproduce: expected {_named(finding)}; seen instead: {seen}"
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _named(finding: Finding) -> str:
    """As in the head of its report: "HANG the launch does not end (hostile case)"."""
    failure = finding.failure
    of = f" ({finding.verdict.case_class} case)" if finding.verdict.case_class else ""
    where = f" at {where}" if (where := failure.details.get("where", "").split("  ")[0]) else ""
    return f"{failure.judgement.upper()} {failure.title}{where}{of}"


def _read(path: Path) -> tuple[Case, Finding | None]:
    """The case of a file, and the finding if it is one. Raises `CaseError` with the file's name."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return load_case(path), None  # it says what is wrong
    keys = data if isinstance(data, dict) else {}
    if any(key.startswith("pagefuzz_round_trip") for key in keys):
        raise CaseError(f"{path} is a round trip; try: pagefuzz roundtrip {shlex.quote(str(path))}")
    finding = load_finding(path) if "pagefuzz_finding" in keys else None
    case = finding.case if finding else load_case(path)
    try:
        registry.operation(case.operation)
    except registry.UnknownNameError as error:
        raise CaseError(f"{path}: {error}") from None
    return case, finding
