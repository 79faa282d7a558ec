"""Times launches of checked builds against launches of release builds, on the host or on a GPU.

Of each unit (an operation and a subject of it) two cases are drawn: the median and the largest of
many, by the bytes that a launch must write. Each is placed between guard pages and launched there
by turns, built for release and built with the permission map and the checked index type. Both must
leave the same bytes. That is done in several rounds over all units, so that neither a machine that
is busy for some seconds nor memory that lies badly once decides what is said of a unit.

A launch is timed by itself, and with what belongs to it: for a checked build that is uploading the
map in front of it and reading the record behind it. All times include what it takes to call an
object from Python, some microseconds.

Exit status: 0 measured, 2 could not measure.
"""

from __future__ import annotations

import argparse
import mmap
import platform
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from pagefuzz.harness import devices
from pagefuzz.harness.build import BuildSpec, build, compiler_version
from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.commands.selection import selected_subjects
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.arena import Arena, DoesNotFitError
from pagefuzz.harness.memory.cuda import CudaArena
from pagefuzz.harness.memory.driver import Driver
from pagefuzz.harness.memory.host import HostArena
from pagefuzz.harness.native import BuiltObject, NotAcceptedError
from pagefuzz.harness.running import FixedBytes, fixed_bytes
from pagefuzz.harness.sanitizers.cases import cases_of
from pagefuzz.harness.subjects import Subject, check_registry
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.contents import FILLS
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import CheckRecord, Launch

sys.path.append(str(Path(__file__).parents[1]))  # last: folders of ours are named like packages

from ci.reports import exit_code, require_report, write_report
from ci.timing import (
    Clock,
    DeviceClock,
    HostClock,
    Times,
    head,
    in_turn,
    require_ok,
    timed,
)

SCHEMA = 1
WARM_UP = 5

MOST_SHIFT_PAGES = 2**14

RELEASE, CHECKED = "release", "checked"
BUILDS = (RELEASE, CHECKED)
TYPICAL, LARGE = "typical", "large"

#: Figures of a report, in microseconds, and which of `Times` they are: the launch, and the launch
#: with its map and record.
FIGURES = {"launch_us": "device_us", "with_record_us": "host_us"}

NO_OBJECTS = "Triton compiles it as it is launched: there are no two objects to compare"


# ---- cases ---------------------------------------------------------------------------------------


def written_bytes(case: Case) -> int:
    """What a launch of the case must write."""
    operation = registry.operation(case.operation)
    expected = operation.expect(operation.plan(case)).expected
    return sum(part.values.size for part in expected.values())


def sized_cases(subject: Subject, count: int, seed: int) -> dict[str, Case]:
    """The median and the largest in-contract case of `count` drawn ones and those that were
    reported, by the bytes that they must write; those that write nothing are left out."""
    cases = cases_of(Unit(subject.operation, subject.name, hostile=False), count, seed)
    by_size = sorted((size, case.dumps(), case) for case in cases if (size := written_bytes(case)))
    if not by_size:
        raise CannotCheckError(
            f"none of {len(cases)} cases writes anything; draw more with --cases"
        )
    return {TYPICAL: by_size[len(by_size) // 2][2], LARGE: by_size[-1][2]}


# ---- launches ------------------------------------------------------------------------------------


class Recorded:
    """Around a launch: permissions before, the record after, where the object keeps one.

    record  of the last launch; None of a release build
    """

    def __init__(
        self, native: BuiltObject, arena: Arena, plan: Plan, expectation: Expectation
    ) -> None:
        self._native, self._arena = native, arena
        self._plan, self._expectation = plan, expectation
        self.record: CheckRecord | None = None

    def __enter__(self) -> None:
        if self._native.keeps_record:
            self._native.begin_check(self._plan, self._expectation, self._arena.store)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if kind is not None or not self._native.keeps_record:
            return
        try:
            self.record = self._native.end_check(self._plan)
        except NotAcceptedError:
            self._arena.synchronise()  # names the fault, if the launch is why
            raise


@dataclass(frozen=True)
class Measured:
    """One case, placed once.

    about  what was launched and compared
    times  of the launches, by build
    """

    about: dict[str, Any]
    times: Mapping[str, Times]


def measure(
    arena: Arena, clock: Clock, natives: Mapping[str, BuiltObject], case: Case, launches: int
) -> Measured:
    """Times so many launches of each build. `natives`: one a build.

    Raises `CannotCheckError` if a launch fails or the builds leave different bytes.
    """
    operation = registry.operation(case.operation)
    plan = operation.plan(case)
    expectation = operation.expect(plan)
    addresses = arena.place(plan, expectation)
    recorded = {}
    for kind in BUILDS:
        natives[kind].marshal(plan, addresses)
        recorded[kind] = Recorded(natives[kind], arena, plan, expectation)
    fixed = _require_equal(arena, natives, recorded, plan, expectation)
    times = {kind: Times() for kind in BUILDS}
    for number in range(-WARM_UP, launches):
        for kind in in_turn(BUILDS, number):
            device_us, host_us = timed(clock, natives[kind].launch, recorded[kind])
            if number >= 0:
                times[kind].add(device_us, host_us)
    about = {
        "case": operation.describe(plan),
        "written_bytes": written_bytes(case),
        "compared_bytes": fixed.byte_count,
        "recorded": _required_record(recorded[CHECKED]),
    }
    return Measured(about, times)


def figures_of(rounds: Sequence[Measured]) -> dict[str, Any]:
    """Medians over all launches of a case, and each round's ratio."""
    whole = {kind: Times() for kind in BUILDS}
    for one in rounds:
        for kind in BUILDS:
            whole[kind].extend(one.times[kind])
    medians = {kind: _medians(whole[kind]) for kind in BUILDS}
    return rounds[0].about | {
        "medians": medians,
        "ratio": _ratio(medians),
        "ratio_of_each_round": [
            _ratio({kind: _medians(one.times[kind]) for kind in BUILDS}) for one in rounds
        ],
    }


def _ratio(medians: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Checked over release."""
    return {
        figure: round(medians[CHECKED][figure] / medians[RELEASE][figure], 3) for figure in FIGURES
    }


def _medians(times: Times) -> dict[str, float]:
    found = times.medians()
    return {figure: found[which] for figure, which in FIGURES.items()}


def _require_equal(
    arena: Arena,
    natives: Mapping[str, BuiltObject],
    recorded: Mapping[str, Recorded],
    plan: Plan,
    expectation: Expectation,
) -> FixedBytes:
    """Launches each build once, into memory that is filled anew, and compares what they leave."""
    left = {}
    for kind in BUILDS:
        arena.fill(FILLS[0])
        with recorded[kind]:
            status, message = natives[kind].launch()
            require_ok(status, message)
        arena.synchronise()
        found = arena.collect()
        launch = Launch(FILLS[0], status, message, found.chunks, found.examined_bytes)
        left[kind] = fixed_bytes(plan, expectation, (launch,))
    _required_record(recorded[CHECKED])
    if left[RELEASE] != left[CHECKED]:
        raise CannotCheckError("launches of the release and of the checked build left other bytes")
    return left[CHECKED]


def _required_record(recorded: Recorded) -> dict[str, int]:
    """How much the checked build examined in a launch. What it records as a fault it does not do,
    and what it does not record it has not checked: times of neither say anything."""
    record = recorded.record
    if record is None or not record.accesses:
        raise CannotCheckError("the checked build recorded no access")
    if faults := record.access_fault_count + record.index_fault_count:
        raise CannotCheckError(
            f"the checked build recorded {faults} faults of a case in contract; pagefuzz fuzz "
            "says which"
        )
    return {
        "accesses": record.accesses,
        "accessed_bytes": record.accessed_bytes,
        "operations": record.operations,
    }


@contextmanager
def shifted() -> Iterator[None]:
    """What is mapped in between lies elsewhere than the last time. The emulation's speed is steady
    while code, stacks and buffers stay where they are, and differs between processes: that of a
    checked build up to twofold."""
    pages = random.randrange(1, MOST_SHIFT_PAGES)
    with mmap.mmap(-1, pages * mmap.PAGESIZE):
        yield


class Timing:
    """A unit: its objects, its cases, and what was measured of each so far."""

    def __init__(self, subject: Subject, backend: str, count: int, seed: int) -> None:
        """Compiles what is not in the build cache. Raises `CannotCheckError`."""
        self._subject = subject
        self.name = f"{subject.operation}/{subject.name}"
        self._rounds: dict[str, list[Measured]] = {TYPICAL: [], LARGE: []}
        with self._named():
            self._paths = {
                kind: build(subject.source, BuildSpec.parse(backend, kind), twin=subject.twin)
                for kind in BUILDS
            }
            self._cases = sized_cases(subject, count, seed)

    def round(self, driver: Driver | None, launches: int) -> None:
        """Places each case anew, on the host code and emulated stacks too. Raises
        `CannotCheckError`."""
        with self._named(), TemporaryDirectory() as folder:
            if driver is None:
                with shifted():
                    natives = {kind: self._copied(kind, Path(folder)) for kind in BUILDS}
                    self._measure(HostArena(), HostClock(), natives, launches)
            else:
                natives = {kind: self._object(path) for kind, path in self._paths.items()}
                arena = CudaArena(driver, natives[RELEASE].scan)
                self._measure(arena, DeviceClock(driver), natives, launches)

    def _measure(
        self, arena: Arena, clock: Clock, natives: Mapping[str, BuiltObject], launches: int
    ) -> None:
        try:
            for size, case in self._cases.items():
                self._rounds[size].append(measure(arena, clock, natives, case, launches))
        finally:
            clock.close()
            arena.close()

    def _copied(self, kind: str, folder: Path) -> BuiltObject:
        """One that is loaded already would stay where it is; a copy is another one."""
        return self._object(Path(shutil.copy(self._paths[kind], folder / f"{kind}.so")))

    def _object(self, path: Path) -> BuiltObject:
        one = self._subject
        return BuiltObject(path, one.source, one.operation, one.symbol)

    def to_json(self) -> dict[str, Any]:
        return {
            "operation": self._subject.operation,
            "subject": self._subject.name,
            "cases": {size: figures_of(rounds) for size, rounds in self._rounds.items()},
        }

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What cannot be measured in between is said with the unit's name."""
        try:
            yield
        except (CannotCheckError, DoesNotFitError) as error:
            raise CannotCheckError(f"{self.name}: {error}") from None


# ---- what is said --------------------------------------------------------------------------------


def table(units: Sequence[Mapping[str, Any]], backend: str, launches: int) -> str:
    lines = [_table_head(backend, launches)]
    for unit in units:
        lines.append(f"{unit['operation']}/{unit['subject']}")
        lines += [_table_row(size, figures) for size, figures in unit["cases"].items()]
    for size, by_figure in spread(units).items():
        lines.append(f"checked over release, {size} cases: {_spread_text(by_figure)}")
    return "\n".join(lines)


def _table_head(backend: str, launches: int) -> str:
    where = "between the driver's events" if backend == "cuda" else "what the call takes"
    both = f"{'release':>9}{'checked':>10}{'ratio':>6}"
    return "\n".join(
        [
            f"median us of {launches:,} launches of each build; launch: {where};",
            "with map and record: from the map's upload until the record is read,",
            "for release until the launch has ended",
            "the range is that of the rounds: where memory lies counts",
            "",
            f"{'':17}{'launch':>37}{'with map and record':>25}",
            f"{'case':<9}{'bytes':>8}{both}{'range':>12}{both}",
        ]
    )


def _table_row(size: str, figures: Mapping[str, Any]) -> str:
    medians, ratio = figures["medians"], figures["ratio"]
    launch, whole = FIGURES
    rounds = [one[launch] for one in figures["ratio_of_each_round"]]
    return (
        f"  {size:<7}{figures['written_bytes']:>8,}"
        f"{_us(medians[RELEASE][launch]):>9}{_us(medians[CHECKED][launch]):>10}"
        f"{ratio[launch]:>6.2f}{f'{min(rounds):.2f}-{max(rounds):.2f}':>12}"
        f"{_us(medians[RELEASE][whole]):>9}{_us(medians[CHECKED][whole]):>10}{ratio[whole]:>6.2f}"
    )


def _us(microseconds: float) -> str:
    return f"{microseconds:,.{0 if microseconds >= 10_000 else 1}f}"


def spread(units: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Least, median and greatest ratio of all units, by size and figure."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for size in (TYPICAL, LARGE):
        found[size] = {}
        for figure in FIGURES:
            ratios = [unit["cases"][size]["ratio"][figure] for unit in units]
            found[size][figure] = {
                "least": min(ratios),
                "median": round(median(ratios), 3),
                "most": max(ratios),
            }
    return found


def _spread_text(by_figure: Mapping[str, Mapping[str, float]]) -> str:
    texts = [
        "{median:.2f} ({least:.2f} to {most:.2f})".format(**by_figure[figure]) for figure in FIGURES
    ]
    return f"{texts[0]},\n  with map and record {texts[1]}"


def cpu() -> str:
    """As the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/bench_checked",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Exit status: 0 measured, 2 could not measure.",
    )
    parser.add_argument("--op", action="append", metavar="OP", help="operation; default: all")
    parser.add_argument(
        "--subject", action="append", metavar="S", help="default: every sound bundled one"
    )
    parser.add_argument(
        "--device",
        choices=devices.DEVICES,
        default="auto",
        help="auto: cuda where there is a GPU; default: auto",
    )
    parser.add_argument(
        "--launches", type=int, default=200, metavar="N", help="of each build and case (200)"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="with memory of their own (20)"
    )
    parser.add_argument(
        "--cases", type=int, default=200, metavar="N", help="drawn, of which two are timed (200)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the cases (1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the figures as JSON")
    arguments = parser.parse_args()
    for name in ("launches", "cases"):
        if (count := getattr(arguments, name)) < 1:
            parser.error(f"--{name} {count} must be at least 1")
    if not 1 <= arguments.rounds <= arguments.launches:
        parser.error(f"--rounds {arguments.rounds} must be at least 1 and at most --launches")
    return arguments


def timeable(subjects: tuple[Subject, ...]) -> tuple[list[Subject], list[str]]:
    """Those that have objects of both builds, and the names of the others. Raises
    `CannotCheckError` if none has."""
    chosen = [one for one in subjects if one.source.suffix != ".py"]
    others = [f"{one.operation}/{one.name}" for one in subjects if one not in chosen]
    if not chosen:
        raise CannotCheckError(f"{', '.join(others)}: {NO_OBJECTS}")
    return chosen, others


def run(arguments: argparse.Namespace) -> int:
    check_registry()
    chosen, others = timeable(selected_subjects(arguments.op, arguments.subject))
    backend = devices.resolve_device(arguments.device)
    gpu = devices.machine().gpu if backend == "cuda" else None
    compiler = compiler_version(backend)
    require_report(arguments.report)
    driver = None
    if backend == "cuda":
        driver = Driver()
        driver.use_device()
    print(f"{gpu.name if gpu else 'host'} · {cpu()} · {compiler}", flush=True)
    for name in others:
        print(f"not timed: {name},\n  {NO_OBJECTS}")
    timings = [Timing(one, backend, arguments.cases, arguments.seed) for one in chosen]
    each = -(-arguments.launches // arguments.rounds)
    print(f"{arguments.rounds} rounds of {len(timings)} units", flush=True)
    for _ in range(arguments.rounds):
        for timing in timings:
            timing.round(driver, each)
    units = [timing.to_json() for timing in timings]
    print(table(units, backend, each * arguments.rounds))
    if arguments.report:
        about = head("pagefuzz_bench_checked", SCHEMA, "ci/bench_checked", gpu) | {
            "backend": backend,
            "cpu": cpu(),
            "compiler": compiler,
            "seed": arguments.seed,
            "cases_drawn": arguments.cases,
            "launches_of_each": each * arguments.rounds,
            "rounds": arguments.rounds,
        }
        report = about | {"ratios": spread(units), "units": units, "not_timed": others}
        write_report(arguments.report, report)
    return 0


def main() -> int:
    return exit_code(partial(run, parse_arguments()), "could not measure")


if __name__ == "__main__":
    sys.exit(main())
