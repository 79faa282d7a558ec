"""`--sanitizer` of `pagefuzz fuzz` and `pagefuzz replay`: cases under the sanitizers of others."""

from __future__ import annotations

import argparse
import secrets
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pagefuzz.harness.build import RELEASE, BuildSpec
from pagefuzz.harness.campaign.drawing import leave_the_folder_alone
from pagefuzz.harness.campaign.journal import Journal, entry_of
from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.commands.fuzz import make_folder, write_json
from pagefuzz.harness.commands.selection import selected_subjects
from pagefuzz.harness.devices import resolve_device
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import Finding, identity_of
from pagefuzz.harness.layers import BY_NAME
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.profiles import PROFILES
from pagefuzz.harness.reporters.ending import layer_table, memory_lines
from pagefuzz.harness.reporters.figures import duration, plural, screen_width
from pagefuzz.harness.reporters.summary import MemorySummary
from pagefuzz.harness.sanitizers.cases import cases_of
from pagefuzz.harness.sanitizers.opinion import Opinion, opinion
from pagefuzz.harness.sanitizers.tools import COMPUTE, HOST, find_compute_sanitizer, layer_of
from pagefuzz.harness.sanitizers.watching import prove
from pagefuzz.harness.subjects import Subject
from pagefuzz.harness.versions import commit, versions
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import Verdict

#: Cases to draw for each unit, unless --cases says otherwise.
CASES = 100


def fuzz_with_sanitizer(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Shows drawn cases of every unit to a sanitizer; the exit code. Raises `CannotCheckError`
    before anything has run."""
    tool = options.sanitizer
    if options.time is not None:
        raise CannotCheckError(f"{tool} is shown a number of cases: give --cases, not --time")
    if options.jobs is not None:
        raise CannotCheckError(f"{tool} watches one process at a time: leave --jobs out")
    refuse_unused(tool, options)
    backend, build = backend_and_build(tool, options.device, options.build)
    chosen = _applicable(
        tool,
        selected_subjects(options.op, options.subject),
        is_asked_for=bool(options.op or options.subject),
    )
    if options.report is not None:
        make_folder(options.report)
    profile = PROFILES[options.profile]
    seed = options.seed
    if seed is None:
        seed = secrets.randbits(32) if profile.fixed_seed is None else profile.fixed_seed
    count = options.cases or CASES
    units = [
        Unit(
            subject.operation,
            subject.name,
            subject.promises_containment if options.hostile is None else options.hostile,
        )
        for subject in chosen
    ]
    run = _Run(tool, backend, build, options.report or Path(), keep_going=options.keep_going)
    print(
        f"{tool}  {backend}, {build} build; {plural(count, 'cases')} a unit, seed {seed}",
        flush=True,
    )
    run.prove()
    leave_the_folder_alone()
    try:
        for unit in units:
            run.watch(unit, partial(cases_of, unit, count, seed))
    except KeyboardInterrupt:
        run.interrupt()
    if options.report is not None:
        run.report(options.report / "sanitizer.json", command, seed)
    return run.end()


def replay_with_sanitizer(
    tool: str, case: Case, subject: str | None, device: str | None, build: str | None
) -> int:
    """Shows one case to a sanitizer, on every subject that is asked for; the exit code."""
    backend, build = backend_and_build(tool, device, build)
    names = None if subject is None else [subject]
    chosen = _applicable(
        tool, selected_subjects([case.operation], names), is_asked_for=subject is not None
    )
    run = _Run(tool, backend, build, None, keep_going=True)
    run.prove()
    try:
        for one in chosen:
            run.watch(Unit(one.operation, one.name, hostile=True), lambda: [case])
    except KeyboardInterrupt:
        run.interrupt()
    return run.end()


def refuse_unused(tool: str, options: argparse.Namespace) -> None:
    """Raises `CannotCheckError` for an option that a sanitizer would not heed."""
    given = {
        "--hang-after": options.hang_after is not None,
        "--no-isolate": not options.isolate,
        "--gpu-memory": options.gpu_memory is not None,
    }
    if unused := [name for name, is_given in given.items() if is_given]:
        raise CannotCheckError(f"{tool} has a process of its own: leave {unused[0]} out")


def backend_and_build(tool: str, device: str | None, build: str | None) -> tuple[str, str]:
    """What a sanitizer watches. Raises `CannotCheckError` for what it cannot."""
    wanted = "cuda" if tool in COMPUTE else "host"
    if device not in (None, "auto", wanted):
        others = ", ".join(HOST if tool in COMPUTE else COMPUTE)
        raise CannotCheckError(f"{tool} watches kernels on {wanted} only; on {device} do {others}")
    flags = set((build or RELEASE).split(",")) - {RELEASE}
    if "checked" in flags:
        raise CannotCheckError(
            f"a checked build suppresses each access that {tool} would report: give another "
            "--build, or none"
        )
    if tool in HOST:
        flags.add(tool)
    return resolve_device(wanted), ",".join(sorted(flags)) or RELEASE


def _applicable(tool: str, chosen: Sequence[Subject], *, is_asked_for: bool) -> Sequence[Subject]:
    """Without Triton kernels, where Triton interprets them: nothing is compiled there that a
    sanitizer could be compiled into. Raises `CannotCheckError` if one was asked for, or no other
    is left."""
    without = [one for one in chosen if tool in COMPUTE or one.source.suffix != ".py"]
    for one in chosen:
        if one in without:
            continue
        said = f"{one.operation}/{one.name} is a Triton kernel, which {tool} cannot watch"
        if is_asked_for or not without:
            raise CannotCheckError(said)
        print(f"left out: {said}")
    return without


class _Run:
    """Unit after unit; tells of each on the terminal.

    folder  for findings; None: they are neither minimised nor stored
    """

    def __init__(
        self, tool: str, backend: str, build: str, folder: Path | None, *, keep_going: bool
    ) -> None:
        self.tool, self.backend, self.build = tool, backend, build
        self._folder, self._keep_going = folder, keep_going
        self._opinions: list[Opinion] = []
        self._problems: list[tuple[str, str]] = []  # of what, and what
        self._journal = Journal(None if folder is None else folder / "findings" / "journal.jsonl")
        self._journaled: list[dict[str, Any]] = []
        self._versions = versions()
        self._width = screen_width()

    def prove(self) -> None:
        """A tool that does not see its canary is not asked for an opinion."""
        if self.tool in COMPUTE:
            count = prove(self.tool)
            print(f"{self.tool} reports its own deliberate fault ({plural(count, 'reports')}): "
                  f"it watches; {find_compute_sanitizer()}", flush=True)  # fmt: skip

    def watch(self, unit: Unit, cases: Callable[[], Sequence[Case]]) -> None:
        """`cases` is called for them."""
        try:
            found = opinion(
                self.tool,
                unit,
                cases(),
                backend=self.backend,
                build=self.build,
                keep_going=self._keep_going,
                minimise=self._folder is not None,
                versions=self._versions,
                on_failing=partial(self._keep, unit),
            )
        except CannotCheckError as error:
            self._problem(unit.name, str(error))
            return
        self._opinions.append(found)
        said = f"{unit.name}: {_said(found, self.tool)}"
        print(textwrap.fill(said, self._width, subsequent_indent="  ", break_on_hyphens=False))
        sys.stdout.flush()
        for reason, times in found.not_run.items():
            print(f"  not run, {plural(times, 'cases')}: {reason}")
        for title, times in Counter(note.title for note in found.notes).items():
            print(f"  hardening note, {plural(times, 'cases')}: {title}")
        for finding in found.findings:
            self._keep(unit, finding.case, finding.verdict)
            path = self._saved(unit, finding)
            print(f"\n{finding.text(self._width, path)}\n", flush=True)
        for problem in found.problems:
            self._problem(unit.name, problem)
        if found.was_interrupted:
            raise KeyboardInterrupt

    def interrupt(self) -> None:
        """What was found stays found; what was not looked at is no pass."""
        said = "interrupted before every unit was watched"
        self._problem("the run", "interrupted before it was finished", said)

    def report(self, path: Path, command: Sequence[str], seed: int) -> None:
        """Writes it; that it could not be written does not undo a finding."""
        try:
            write_json(path, self.to_json(command, seed))
        except CannotCheckError as error:
            self._problem("the report", str(error), str(error))

    def _problem(self, of: str, problem: str, said: str = "") -> None:
        """Prints it, once. `said` in place of both."""
        if (of, problem) not in self._problems:
            self._problems.append((of, problem))
            print(f"pagefuzz: {said or f'{of}: {problem}'}", file=sys.stderr, flush=True)

    def _keep(self, unit: Unit, case: Case, verdict: Verdict) -> None:
        """In the journal, unless it is there; a note is not. That it cannot be written keeps
        nothing from being found."""
        build = BuildSpec.parse(self.backend, self.build).text
        entry = entry_of(unit, self.backend, build, identity_of(verdict), case)
        if not entry["identity"] or entry in self._journaled:
            return
        try:
            self._journal.append(entry)
        except CannotCheckError as error:
            self._problem(unit.name, str(error))
        else:
            self._journaled.append(entry)

    def _saved(self, unit: Unit, finding: Finding) -> Path | None:
        """Path of its file; None if it is not to be stored, or cannot be."""
        if self._folder is None:
            return None
        try:
            return finding.save(self._folder / "findings")
        except CannotCheckError as error:
            self._problem(unit.name, str(error))
            return None

    def end(self) -> int:
        """Says how it ended; the exit code."""
        self._journal.close()
        findings = sum(len(one.findings) for one in self._opinions)
        launches = sum(one.launches for one in self._opinions)
        seconds = duration(sum(one.seconds for one in self._opinions))
        watched = f"{plural(launches, 'launches')} watched by {self.tool} in {seconds}"
        print()
        for line in layer_table(
            [{layer_of(self.tool): (0, 0)}, *(o.layers for o in self._opinions)]
        ):
            print(line)
        print()
        for line in memory_lines(self._held(), self.backend):
            print(line)
        if findings:
            print(f"{plural(findings, 'findings')} in {watched}")
            return 1
        if self._problems or not launches:
            print(
                f"not checked: {plural(len(self._problems), 'problems')}, listed above; {watched}"
            )
            return 2
        print(f"clean: nothing was reported of {watched}")
        return 0

    def _held(self) -> MemoryUse:
        return MemoryUse.most_of(one.memory for one in self._opinions)

    def to_json(self, command: Sequence[str], seed: int) -> dict[str, Any]:
        return {
            "command": ["pagefuzz", *command],
            "sanitizer": self.tool,
            "backend": self.backend,
            "build": self.build,
            "seed": seed,
            "commit": commit(),
            "versions": self._versions,
            "memory": asdict(MemorySummary.of(self._held(), self.backend)),
            "units": {
                one.unit.name: {
                    "cases": one.cases,
                    "launches": one.launches,
                    "layers": {
                        name: {
                            "launches": launches,
                            "amount": amount,
                            "unit": BY_NAME[name].unit or "launches",
                        }
                        for name, (launches, amount) in one.layers.items()
                    },
                    "not_run": one.not_run,
                    "turned_down": one.turned_down,
                    "findings": [finding.identity for finding in one.findings],
                    "others": one.others,
                    "slowdown": one.slowdown,
                    "seconds": round(one.seconds, 3),
                }
                for one in self._opinions
            },
            "problems": {
                of: "; ".join(text for other, text in self._problems if other == of)
                for of, _ in self._problems
            },
        }


def _said(found: Opinion, tool: str) -> str:
    parts = [f"{plural(found.cases, 'cases')}, {plural(found.launches, 'launches')} watched"]
    if found.turned_down:
        parts.append(f"{found.turned_down:,} turned down by the launcher")
    if found.slowdown is not None:
        parts.append(f"{found.slowdown:.1f} times slower than without")
    parts.append(plural(len(found.findings), "findings") if found.findings else "nothing reported")
    if found.others:
        parts.append(f"{plural(found.others, 'other faults')} too, which --keep-going lists")
    return f"{', '.join(parts)}, {duration(found.seconds)}"
