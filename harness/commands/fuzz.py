"""`pagefuzz fuzz`: runs a campaign and reports it."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagefuzz.harness import layers
from pagefuzz.harness.build import cache_folder
from pagefuzz.harness.campaign.engine import Campaign
from pagefuzz.harness.campaign.plan import Options, Unit
from pagefuzz.harness.commands.selection import selected_subjects
from pagefuzz.harness.devices import machine, resolve_device
from pagefuzz.harness.errors import CannotCheckError, MissingPackageError
from pagefuzz.harness.profiles import PROFILES, Profile
from pagefuzz.harness.reporters import Reporter
from pagefuzz.harness.reporters.figures import duration, plural, screen_width
from pagefuzz.harness.reporters.live import LiveReporter
from pagefuzz.harness.reporters.plain import PlainReporter
from pagefuzz.harness.reporters.summary import SummaryReporter
from pagefuzz.harness.versions import commit, versions
from pagefuzz.oracles import registry

#: At most this part of a run that is bound by time goes to minimising one finding, if it is to go
#: on after that.
SHRINK_SHARE = 1 / 6

#: Runners that share one GPU unless --jobs says otherwise: they share its memory, and a case that
#: does not fit is not run.
MOST_CUDA_JOBS = 4


def fuzz(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Returns the exit code. Raises `CannotCheckError` before anything has run."""
    profile = PROFILES[options.profile]
    chosen = selected_subjects(options.op, options.subject)
    backend = resolve_device(options.device)
    gpu = machine().gpu
    device = gpu.name if backend == "cuda" and gpu is not None else "host"
    units = [
        Unit(
            subject.operation,
            subject.name,
            subject.promises_containment if options.hostile is None else options.hostile,
        )
        for subject in chosen
    ]
    if options.report is not None:
        make_folder(options.report)
    build, flags = _build_all(units, backend, options.build or "checked", isolate=options.isolate)

    time_s, cases = options.time, options.cases
    if time_s is None and cases is None:
        time_s, cases = profile.time_s, profile.cases
    seed = options.seed
    if seed is None:
        seed = secrets.randbits(32) if profile.fixed_seed is None else profile.fixed_seed
    jobs = options.jobs or _jobs_for(backend)
    folder = options.report or Path()
    report = folder / "findings"
    cache = cache_folder().parent
    settings = Options(
        backend=backend,
        build=build,
        seed=seed,
        keep_going=options.keep_going,
        shrink_s=profile.shrink_s
        if time_s is None or not options.keep_going
        else min(profile.shrink_s, time_s * SHRINK_SHARE),
        verbose=profile.verbose,
        statistics=profile.verbose or bool(os.environ.get("PAGEFUZZ_STATISTICS")),
        cache=str(cache),
        database=str(cache / "examples") if profile.example_database else None,
        journal=str(report / "journal.jsonl"),
        isolate=options.isolate,
        gpu_memory_bytes=options.gpu_memory,
        hang_after_s=options.hang_after,
    )
    judgements = registry.judgements()
    judgement_units = {name: judgement.unit for name, judgement in judgements.items()}
    found_versions, found_commit = versions(), commit()
    bound = f"{duration(time_s)} in all" if time_s is not None else _a_unit(cases)
    header = _header(
        units,
        backend,
        f"{backend}, {build} build"
        + (f", {device}" if device != backend else "")
        + ("" if options.isolate else ", not isolated"),
        f"{profile.name}: {bound}, seed {seed}, --jobs {jobs}",
        found_versions,
        found_commit,
    )
    reporters = [_terminal_reporter(header, judgement_units, profile)]
    if options.report is not None:
        reporters.append(
            SummaryReporter(
                options.report,
                command=["pagefuzz", *command],
                profile=profile.name,
                commit=found_commit,
                judgement_units=judgement_units,
            )
        )
    campaign = Campaign(
        units,
        settings,
        cases=cases,
        time_s=time_s,
        jobs=jobs,
        findings=report,
        reporters=reporters,
        device=device,
        judgements={
            unit.name: registry.concerned(registry.operation(unit.operation), flags[unit.name])
            for unit in units
            if unit.name in flags
        },
        layers={
            unit.name: layers.in_force(registry.operation(unit.operation), flags[unit.name])
            for unit in units
            if unit.name in flags
        },
        flags=flags,
        versions=found_versions,
    )
    try:
        return campaign.run().exit_code
    except CannotCheckError as error:  # the summary cannot be written
        if not campaign.result.findings:
            raise
        print(f"pagefuzz: {error}", file=sys.stderr)
        return campaign.result.exit_code


def _a_unit(cases: int | None) -> str:
    return f"{plural(cases or 0, 'cases')} a unit"


def _jobs_for(backend: str) -> int:
    cores = len(os.sched_getaffinity(0))
    return cores if backend == "host" else min(cores, MOST_CUDA_JOBS)


def make_folder(report: Path) -> None:
    """Raises `CannotCheckError` if nothing can be written there, hours before it would matter."""
    try:
        report.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=report):
            pass
    except OSError as error:
        raise CannotCheckError(
            f"cannot write reports into {report}: {error.strerror or error}; choose another folder "
            "with --report"
        ) from None


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Raises `CannotCheckError` with the reason."""
    try:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CannotCheckError(f"cannot write {path}: {error.strerror or error}") from None


def _build_all(
    units: Sequence[Unit], backend: str, build: str, *, isolate: bool
) -> tuple[str, dict[str, frozenset[str]]]:
    """Compiles every subject that is not in the build cache.

    Returns the build's full name, and unit -> the flags of its object. A unit for which an optional
    package is missing is left out of these: its runner says so, and the others run. Raises
    `CannotCheckError` if that is so of every unit, or for any other reason.
    """
    from pagefuzz.harness.check import Checker

    full_name, flags = build, {}
    missing: MissingPackageError | None = None
    for unit in units:
        try:
            with Checker(unit.operation, unit.subject, backend, build, isolate=isolate) as checker:
                full_name, flags[unit.name] = checker.build, checker.flags
        except MissingPackageError as error:
            missing = error
    if missing is not None and not flags:
        raise missing
    return full_name, flags


def _header(
    units: Sequence[Unit],
    backend: str,
    device: str,
    run: str,
    found: Mapping[str, str],
    found_commit: str | None,
) -> list[str]:
    names = ", ".join(f"{u.name}{'' if u.hostile else ' (no hostile cases)'}" for u in units)
    of = f" ({found_commit[:12]})" if found_commit else ""
    compiler = found["host compiler" if backend == "host" else "nvcc"]
    packages = (
        f"pagefuzz {found['pagefuzz']}{of}, Python {found['python']}, "
        f"Hypothesis {found['hypothesis']}, torch {found['torch']}"
    )
    lines = []
    width = screen_width()
    for label, text in (
        ("", packages),
        ("device   ", f"{device}; {compiler}"),
        ("units    ", names),
        ("profile  ", run),
    ):
        lines += textwrap.wrap(
            f"{label}{text}",
            width,
            subsequent_indent=" " * 9,
            break_on_hyphens=False,
            break_long_words=False,
        )
    return lines


def _terminal_reporter(
    header: Sequence[str], judgement_units: Mapping[str, str], profile: Profile
) -> Reporter:
    """Live on a terminal, else lines; CI's pseudo-terminals get lines too."""
    if sys.stdout.isatty() and not os.environ.get("CI") and not profile.verbose:
        from rich.console import Console

        return LiveReporter(header, judgement_units, Console(highlight=False))
    return PlainReporter(header, judgement_units, screen_width())
