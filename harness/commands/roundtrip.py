"""`pagefuzz roundtrip`: do a writer and a reader still agree?"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pagefuzz.harness import subjects
from pagefuzz.harness.campaign.drawing import leave_the_folder_alone
from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.campaign.result import UnitResult
from pagefuzz.harness.commands.each import exit_code_of_each
from pagefuzz.harness.commands.fuzz import make_folder
from pagefuzz.harness.devices import resolve_device
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import cause
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.reporters.ending import layer_table, memory_lines
from pagefuzz.harness.reporters.figures import screen_width, shown_subjects
from pagefuzz.harness.round_trip_search import Known, RoundTripFinding, Search, known_of
from pagefuzz.harness.round_trips import MOVER, RoundTripChecker, movers_of
from pagefuzz.oracles.round_trip import RoundTrip, load_round_trip
from pagefuzz.oracles.verdict import Outcome
from pagefuzz.oracles.wording import count_text, unknown_text
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.round_trips import pairs

#: Round trips of each unit, if neither a time nor a number is asked for.
CASES = 100


@dataclass(frozen=True)
class _Unit:
    """One writer, one mover and one reader, by subject."""

    pair: str
    writer: str
    mover: str
    reader: str

    @property
    def subjects(self) -> str:
        return f"{self.writer} -> {self.reader}"

    def __str__(self) -> str:
        return f"{self.pair} ({self.subjects})"


def roundtrip(options: argparse.Namespace) -> int:
    """Returns the exit code: 1 with findings, else 2 if some unit compared nothing, or a layer of
    detection examined nothing. Raises `CannotCheckError` for an unknown name."""
    if options.trip is not None:
        return _again(options)
    units = _units(options.pair, options.writer, options.mover, options.reader)
    of = list(dict.fromkeys(unit.pair for unit in units))
    if options.report is not None:
        make_folder(options.report)
    print(f"{count_text(len(units), 'unit')} of {count_text(len(of), 'pair')}")
    leave_the_folder_alone()
    codes: list[int] = []
    results: list[UnitResult] = []
    try:
        for pair in of:
            print(pair, flush=True)
            for unit in units:
                if unit.pair == pair:
                    _search(unit, options, len(units), results, codes)
    except KeyboardInterrupt:
        if not results:
            raise
        print("pagefuzz: interrupted before every unit was checked", file=sys.stderr)
        codes.append(2)
    except CannotCheckError as error:  # what the units before it showed is kept
        if not results:
            raise
        print(f"pagefuzz: {error}", file=sys.stderr)
        codes.append(2)
    _end(results, resolve_device(options.device or "auto"))
    return 1 if 1 in codes else max(codes)


def _end(results: Sequence[UnitResult], backend: str) -> None:
    """What layers examined, and the memory that it took."""
    table = layer_table(result.examined for result in results)
    memory = memory_lines(MemoryUse.most_of(one.totals.memory for one in results), backend)
    for block in (table, memory):
        if block:
            print("", *block, sep="\n")


def _checker(
    unit: _Unit,
    device: str,
    build: str,
    options: argparse.Namespace,
    hang_after_s: float | None,
) -> RoundTripChecker:
    return RoundTripChecker(
        unit.pair,
        unit.writer,
        unit.reader,
        device,
        build,
        isolate=options.isolate,
        gpu_memory_bytes=options.gpu_memory,
        mover=unit.mover,
        timeout_s=hang_after_s,
    )


def _search(
    unit: _Unit,
    options: argparse.Namespace,
    count: int,
    results: list[UnitResult],
    codes: list[int],
) -> None:
    """Adds what the layers examined to `results`, and the exit code to `codes`. Raises
    `KeyboardInterrupt` after that, if it was interrupted."""
    cases, time_s = options.cases, options.time
    if cases is None and time_s is None:
        cases = CASES
    device, build = options.device or "auto", options.build or "checked"
    folder = (options.report or Path()) / "findings"

    def keep(first: RoundTripFinding) -> None:
        """What is found is on disk before anything else is done with it."""
        with contextlib.suppress(CannotCheckError):  # said once it is stored as it is in the end
            replace(first, hang_after_s=options.hang_after).save(folder)

    with _checker(unit, device, build, options, options.hang_after) as checker:
        search = Search(
            checker, seed=options.seed or 0, limit_bytes=DEFAULT_LIMIT_BYTES, on_first=keep
        )
        seen = search.run(cases=cases, time_s=None if time_s is None else time_s / count)
        layers = checker.layers
        seen.totals.memory = checker.memory
    looked = UnitResult(Unit(unit.pair, unit.subjects, True), cases, seen.totals, layers=layers)
    results.append(looked)
    trips = count_text(seen.trips, "round trip")
    what = f"{trips}, {seen.checked:,} bytes compared"
    for reason, times in seen.not_run.items():
        print(f"{unit}: {times:,} not run: {reason}", file=sys.stderr)
    if seen.finding is not None:
        _say(unit, f"{what}, do not agree")
        if seen.problem:
            print(f"pagefuzz: {unit}: {seen.problem}", file=sys.stderr)
        finding = replace(seen.finding, hang_after_s=options.hang_after)
        _show(finding, folder)
        codes.append(1)
    elif seen.was_interrupted:
        _say(unit, f"{what}, agree so far")
    elif not seen.checked:
        print(f"pagefuzz: {unit}: no row was compared, which is no pass", file=sys.stderr)
        codes.append(2)
    else:
        _say(unit, f"{what}, agree")
        idle = looked.vacuous(())
        for sentence in idle:
            print(f"pagefuzz: {sentence}", file=sys.stderr)
        codes.append(2 if idle else 0)
    if seen.was_interrupted:
        raise KeyboardInterrupt


def _show(finding: RoundTripFinding, folder: Path) -> None:
    """Stores and prints it; one that cannot be stored is printed all the same."""
    path = None
    try:
        path = finding.save(folder)
    except CannotCheckError as error:
        print(f"pagefuzz: {error}", file=sys.stderr)
    print(f"\n{finding.text(screen_width(), path)}\n", flush=True)


def _say(unit: _Unit, figures: str) -> None:
    """One line, with paths in short if it is too wide, or two."""
    width = screen_width()
    writer, reader = shown_subjects([unit.writer, unit.reader])
    for subjects_text in (unit.subjects, f"{writer} -> {reader}"):
        if len(line := f"  {subjects_text}: {figures}") <= width:
            break
    else:
        line = f"  {writer} -> {reader}:\n    {figures}"
    print(line, flush=True)


def _again(options: argparse.Namespace) -> int:
    path: Path = options.trip
    given = ("pair", "time", "cases", "seed", "report")
    if unused := [name for name in given if getattr(options, name) is not None]:
        raise CannotCheckError(f"{path} is one round trip: leave --{unused[0]} out")
    trip = load_round_trip(path)
    known = known_of(path)
    units = _units(
        [trip.pair],
        options.writer or ([known.writer] if known else None),
        options.mover or (known.mover if known else None),
        options.reader or ([known.reader] if known else None),
    )
    return exit_code_of_each(
        {str(unit): partial(_again_on, unit, trip, known, options) for unit in units}
    )


def _again_on(
    unit: _Unit, trip: RoundTrip, known: Known | None, options: argparse.Namespace
) -> int:
    hang_after_s = options.hang_after or (known.hang_after_s if known else None)
    device = options.device or (known.backend if known else "auto")
    build = options.build or (known.build if known else "checked")
    with _checker(unit, device, build, options, hang_after_s) as checker:
        checker.watch_ends()
        verdict = checker.check(trip)
        where = f"{unit} · {checker.backend} · {checker.build} build"
        if verdict.outcome is Outcome.NOT_RUN:
            print(f"pagefuzz: {where}: not run: {verdict.not_run}", file=sys.stderr)
            return 2
        if cause(verdict) is None:
            print(f"{where}: agree")
            return 0
        now = RoundTripFinding.of(checker, trip, verdict)
        now = replace(now, hang_after_s=hang_after_s)
        print(now.text(screen_width(), options.trip, is_replay=True))
    return 1


def _units(
    wanted: Sequence[str] | None,
    writers: Sequence[str] | None,
    mover: str | None,
    readers: Sequence[str] | None,
) -> list[_Unit]:
    """Every pair by every subject of it: those named, else the bundled ones without known faults;
    all of them with one mover.

    Of all pairs those that have the subjects; of pairs that are named each must have them.
    """
    for pair in wanted or ():
        if pair not in pairs():
            raise CannotCheckError(unknown_text("pair", pair, pairs()))
    mover = mover or MOVER
    movers_of(mover)  # else no unit could be checked
    units = []
    for pair in wanted or pairs():
        try:
            writes, reads = (
                _subjects(operation, names)
                for operation, names in zip(pair.split("/"), (writers, readers), strict=True)
            )
        except CannotCheckError:
            if wanted is not None:
                raise
            continue
        units += [_Unit(pair, writer, mover, reader) for writer in writes for reader in reads]
    if not units:
        named = " and ".join(name for names in (writers, readers) for name in names or ())
        raise CannotCheckError(f"no pair has the subjects {named}")
    return units


def _subjects(operation: str, names: Sequence[str] | None) -> list[str]:
    if names is not None:
        return [subjects.subject(name, operation).name for name in names]
    return [
        subject.name
        for subject in subjects.bundled().values()
        if subject.operation == operation and not subject.faults
    ]
