"""The end of a run as text: a table a unit, what each judgement and each layer examined, and one
last line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from pagefuzz.harness.campaign.events import Progress
from pagefuzz.harness.campaign.result import Result
from pagefuzz.harness.layers import BY_NAME
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.reporters.figures import (
    amount,
    beside,
    duration,
    plural,
    shown_subjects,
    table,
)


def ending(result: Result, judgement_units: Mapping[str, str], width: int = 80) -> str:
    """`judgement_units`: what each judgement counts, by its name ("bytes")."""
    blocks = [_unit_table(result, width), _checked_table(result, judgement_units, width)]
    blocks.append(layer_table([unit.examined for unit in result.units.values()]))
    memory = memory_lines(result.totals.memory, result.backend)
    figures = [_throughput(result), *memory, last_line(result)]
    blocks += [_not_run(result, width), _findings(result, width), figures]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def last_line(result: Result) -> str:
    """What the exit code says, in words."""
    if result.findings:
        found = f"{plural(len(result.findings), 'findings')} in {duration(result.seconds)}"
        return found + ("; interrupted before the run was finished" if result.interrupted else "")
    if result.interrupted:
        return "interrupted before the run was finished: not a pass, though nothing was found"
    if result.all_problems:
        return f"not checked: {plural(len(result.all_problems), 'problems')}, listed above"
    return f"clean: nothing was found in {duration(result.seconds)}"


_COLUMNS = ("cases", "launches", "cases/s/core", "not run", "findings")


def _unit_table(result: Result, width: int) -> list[str]:
    """A line a unit; where that is too wide, its operation on a line of its own before it, then
    paths in short, then the subject on a line of its own too. A figure is never cut."""
    figures = [
        (
            f"{unit.totals.cases:,}",
            f"{unit.totals.launches:,}",
            f"{unit.totals.cases_a_second:.0f}",
            f"{unit.totals.not_run:,}",
            f"{len(unit.findings)}",
        )
        for unit in result.units.values()
    ]
    rows = [(name, *of_unit) for name, of_unit in zip(result.units, figures, strict=True)]
    lines = table(("operation/subject", *_COLUMNS), rows)
    if _fits(lines, width):
        return lines
    names = [unit.unit.subject for unit in result.units.values()]
    for shown in (names, shown_subjects(names)):
        rows = [(f"  {name}", *of_unit) for name, of_unit in zip(shown, figures, strict=True)]
        head, *lines = table(("operation, subject", *_COLUMNS), rows)
        if _fits(lines, width):
            return [head, *_by_operation(result, [[line] for line in lines])]
    head, *lines = table(("operation, subject", *_COLUMNS), [("", *of_unit) for of_unit in figures])
    blocks = [[f"  {name}", line] for name, line in zip(shown, lines, strict=True)]
    return [head, *_by_operation(result, blocks)]


def _fits(lines: Sequence[str], width: int) -> bool:
    return max(map(len, lines)) <= width


def _by_operation(result: Result, blocks: Sequence[Sequence[str]]) -> list[str]:
    """The lines of each unit, after the name of its operation where that is another one."""
    grouped: list[str] = []
    operation = None
    for unit, lines in zip(result.units.values(), blocks, strict=True):
        if unit.unit.operation != operation:
            operation = unit.unit.operation
            grouped.append(operation)
        grouped += lines
    return grouped


def _checked_table(result: Result, judgement_units: Mapping[str, str], width: int) -> list[str]:
    """A column a unit if they fit, with paths in short if need be, else one for all together."""
    columns = {unit.unit.subject: unit.totals.checked for unit in result.units.values()}
    if len(columns) < len(result.units):
        columns = {name: unit.totals.checked for name, unit in result.units.items()}
    short = dict(zip(shown_subjects(list(columns)), columns.values(), strict=True))
    everything = {"all subjects": result.totals.checked}
    layers = [layer for layer in BY_NAME.values() if layer.name in result.totals.layers]
    heard = {name: f"by {layer.name}" for layer in layers for name in layer.hears}

    def told(judgement: str, checked: Mapping[str, int]) -> str:
        """How much it examined; where it reports what a layer sees, that layer counts."""
        if not checked.get(judgement) and judgement in heard:
            return heard[judgement]
        if judgement not in checked:
            return "nothing"
        return amount(checked[judgement], judgement_units.get(judgement, "cases"))

    for choice in (columns, short, everything):
        names = [
            *(name for name in judgement_units if name in result.totals.checked),
            *(name for name in result.totals.checked if name not in judgement_units),
        ]
        lines = table(
            ("checked", *choice),
            [(name, *(told(name, checked) for checked in choice.values())) for name in names],
        )
        if _fits(lines, width):
            break
    return lines if names else []


def layer_table(units: Iterable[Mapping[str, tuple[int, int]]]) -> list[str]:
    """What each detection layer in force examined, of all units together; narrower than 80.

    units  of each: layer -> (launches, amount); (0, 0) of one that did nothing
    """
    totals = Progress()
    for unit in units:
        totals.add_layers(unit)
    rows = []
    for name, layer in BY_NAME.items():
        if name in totals.layers:
            launches, examined = totals.layers[name]
            of = amount(examined, layer.unit) if layer.unit and examined else ""
            rows.append((name, f"{launches:,}" if launches else "nothing", of))
    return table(("layer", "launches", "examined"), rows) if rows else []


def _not_run(result: Result, width: int) -> list[str]:
    """Why cases were not run, the most frequent reasons of each unit."""
    lines = []
    for name, unit in result.units.items():
        reasons = sorted(unit.totals.reasons.items(), key=lambda item: -item[1])
        for why, count in reasons[:3]:
            line = f"not run, {name}: {plural(count, 'cases')}: {why}"
            lines += textwrap.wrap(
                line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
    return lines


def _findings(result: Result, width: int) -> list[str]:
    lines = []
    for unit in result.units.values():
        for found in unit.found.values():
            if (finding := found.finding) is not None:
                failure = finding.failure
                stored = f"  {found.path}" if found.path else "  (not stored)"
                title = f"{failure.judgement.upper()}  {failure.title}"
                lines += [*beside(title, f"({unit.unit.name})", width), stored]
        others = sum(found.finding is None for found in unit.found.values())
        if others:
            lines.append(
                f"{unit.unit.name} failed in {plural(others, 'other ways')} too; "
                "--keep-going lists them"
            )
    return lines


def memory_lines(held: MemoryUse, backend: str) -> list[str]:
    """The most that one worker held; nothing where none was asked. Narrower than 80."""
    if not held.resident_bytes:
        return []
    sizes = (held.arena_bytes, held.address_bytes, held.resident_bytes)
    arena, space, process = (amount(size, "bytes") for size in sizes)
    if backend != "cuda":
        return [f"memory at most: buffers {arena} in {space} of addresses, worker {process}"]
    return [
        f"memory at most: buffers {arena} of the GPU in {space} of addresses,",
        f"  worker {process} of the host; contexts and modules on the GPU are not counted",
    ]


def _throughput(result: Result) -> str:
    totals = result.totals
    per_case = totals.launches / max(1, totals.cases + totals.shrinks)
    return (
        f"{plural(totals.cases, 'cases')}, {plural(totals.launches, 'launches')} "
        f"({per_case:.1f} a case): {totals.cases_a_second:.0f} cases a second a core"
    )
