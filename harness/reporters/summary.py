"""`summary.json`: a whole run as data, for CI and dashboards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Self, get_args, get_origin, get_type_hints

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import write_whole
from pagefuzz.harness.layers import BY_NAME
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.reporters import Reporter

if TYPE_CHECKING:
    from pagefuzz.harness.campaign.engine import Campaign

SUMMARY_SCHEMA = 1


@dataclass(frozen=True)
class LayerSummary:
    """launches that a detection layer examined, and how much of them: `unit` says what of ("bytes",
    "operations"; "launches" where there is nothing else)."""

    launches: int
    amount: int
    unit: str


@dataclass(frozen=True)
class SubjectSummary:
    """One subject of one operation. `campaign.events.Progress` says what the counts mean.

    checked  judgement -> amount it examined, in the unit that `Summary.judgement_units` gives
    layers   detection layer in force -> what it examined
    classes  case class -> cases
    not_run_reasons  why cases were not run -> how many
    """

    cases: int
    launches: int
    not_run: int
    shrinks: int
    seconds: float
    cases_a_second: float
    checked: dict[str, int]
    layers: dict[str, LayerSummary]
    classes: dict[str, int]
    not_run_reasons: dict[str, int]
    findings: int
    problems: list[str]


@dataclass(frozen=True)
class FindingSummary:
    """file is relative to the summary; null if the finding could not be stored."""

    identity: str
    title: str
    operation: str
    subject: str
    case_class: str
    file: str | None
    minimised: bool
    repeats: int
    runs: int


@dataclass(frozen=True)
class MemorySummary:
    """The most that one worker has held, in bytes.

    arena_address_bytes  address space of buffers, guards included
    arena_host_bytes     host memory behind it, and device_bytes: device memory behind it; contexts,
                         modules and local memory, which a process has of a GPU too, not counted
    resident_bytes       host memory of the whole process
    """

    arena_address_bytes: int
    arena_host_bytes: int
    device_bytes: int
    resident_bytes: int

    @classmethod
    def of(cls, held: MemoryUse, backend: str) -> Self:
        on_device = backend == "cuda"
        return cls(
            arena_address_bytes=held.address_bytes,
            arena_host_bytes=0 if on_device else held.arena_bytes,
            device_bytes=held.arena_bytes if on_device else 0,
            resident_bytes=held.resident_bytes,
        )


@dataclass(frozen=True)
class Summary:
    """subjects by "operation/subject"; `commit` is null where it is not known."""

    pagefuzz_summary: int
    command: list[str]
    profile: str
    seed: int
    backend: str
    device: str
    build: str
    versions: dict[str, str]
    commit: str | None
    seconds: float
    memory: MemorySummary
    judgement_units: dict[str, str]
    subjects: dict[str, SubjectSummary]
    findings: list[FindingSummary]
    problems: list[str]
    interrupted: bool
    exit_code: int

    @classmethod
    def from_json(cls, data: object) -> Summary:
        """Raises `ValueError` that names the first field which is missing, unknown or of another
        type."""
        summary: Summary = _typed(cls, data, "summary")
        if summary.pagefuzz_summary != SUMMARY_SCHEMA:
            raise ValueError(f"summary.pagefuzz_summary must be {SUMMARY_SCHEMA}")
        return summary


def _typed(kind: Any, data: Any, what: str) -> Any:
    """`data` as `kind`: a dataclass of this module, or a type of its fields."""
    if isinstance(kind, type) and kind.__module__ == __name__:
        if not isinstance(data, dict):
            raise ValueError(f"{what} must be an object")
        hints = get_type_hints(kind)
        names = {field.name for field in fields(kind)}
        if wrong := sorted(names ^ set(data)):
            raise ValueError(f"{what}.{wrong[0]} is missing or unknown")
        return kind(**{name: _typed(hints[name], data[name], f"{what}.{name}") for name in names})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list and isinstance(data, list):
        return [_typed(arguments[0], item, f"{what}[{i}]") for i, item in enumerate(data)]
    if origin is dict and isinstance(data, dict):
        return {key: _typed(arguments[1], value, f"{what}.{key}") for key, value in data.items()}
    if NoneType in arguments:
        return None if data is None else _typed(arguments[0], data, what)
    if origin is None and type(data) is kind:
        return data
    raise ValueError(f"{what} must be of type {kind}, got {data!r:.40}")


class SummaryReporter(Reporter):
    """Writes `summary.json` into `folder` when the run has ended."""

    def __init__(
        self,
        folder: Path,
        *,
        command: Sequence[str],
        profile: str,
        commit: str | None,
        judgement_units: Mapping[str, str],
    ) -> None:
        self._folder = folder
        self._command = list(command)
        self._profile = profile
        self._commit = commit
        self._judgement_units = dict(judgement_units)

    def end(self, campaign: Campaign) -> None:
        """Raises `CannotCheckError` if the file cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asdict(self._summary(campaign)), indent=1) + "\n"
            write_whole(self._folder / "summary.json", text)
        except OSError as error:
            raise CannotCheckError(
                f"cannot write {self._folder / 'summary.json'}: {error.strerror or error}"
            ) from error

    def _summary(self, campaign: Campaign) -> Summary:
        result = campaign.result
        return Summary(
            pagefuzz_summary=SUMMARY_SCHEMA,
            command=self._command,
            profile=self._profile,
            seed=campaign.options.seed,
            backend=campaign.options.backend,
            device=campaign.device,
            build=campaign.options.build,
            versions=campaign.versions,
            commit=self._commit,
            seconds=result.seconds,
            memory=MemorySummary.of(result.totals.memory, campaign.options.backend),
            judgement_units=self._judgement_units,
            subjects={
                name: SubjectSummary(
                    cases=unit.totals.cases,
                    launches=unit.totals.launches,
                    not_run=unit.totals.not_run,
                    shrinks=unit.totals.shrinks,
                    seconds=unit.totals.seconds,
                    cases_a_second=unit.totals.cases_a_second,
                    checked=unit.totals.checked,
                    layers={
                        layer: LayerSummary(launches, amount, BY_NAME[layer].unit or "launches")
                        for layer, (launches, amount) in unit.examined.items()
                    },
                    classes=unit.totals.classes,
                    not_run_reasons=unit.totals.reasons,
                    findings=len(unit.findings),
                    problems=list(dict.fromkeys(unit.problems)),
                )
                for name, unit in result.units.items()
            },
            findings=[
                FindingSummary(
                    identity=found.finding.identity,
                    title=found.finding.failure.title,
                    operation=found.finding.operation,
                    subject=found.finding.subject,
                    case_class=str(found.finding.verdict.case_class or "unknown"),
                    file=self._relative(found.path),
                    minimised=found.finding.minimised,
                    repeats=found.finding.repeats,
                    runs=found.finding.runs,
                )
                for unit in result.units.values()
                for found in unit.found.values()
                if found.finding is not None
            ],
            problems=result.all_problems,
            interrupted=result.interrupted,
            exit_code=result.exit_code,
        )

    def _relative(self, path: Path | None) -> str | None:
        return None if path is None else str(path.relative_to(self._folder))
