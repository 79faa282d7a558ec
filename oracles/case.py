"""A case: one determined input of one operation, as pure data.

A case holds numbers only. Everything large (table contents, payload bytes) is a recipe that is
expanded by vectorised NumPy, so that a case of gigabytes is still ten lines of JSON, and two
processes that hold the same case hold the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

CASE_SCHEMA = 1

#: Bases are placed modulo this.
BASE_ALIGNMENT_BYTES = 256

#: The end of a buffer, workspace included, that lies against memory which nobody may touch.
GUARDS = ("end", "start", "none")

#: Recipe name -> names of its parameters; a name ending in `[]` is a list of integers.
RECIPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # vectors and tables
        "literal": ("values[]",),
        # vectors
        "constant": ("value",),
        "ramp": ("first", "step"),
        "cumulative": ("first", "steps[]"),
        # tables of page ids, [rows, width] over num_pages pages
        "identity": (),
        "reversed": (),
        "permuted": ("seed",),
        "shared": (),
        # hints: of each row that a request covers, that request
        "owners": (),
    }
)

_I64 = range(-(2**63), 2**63)
_INDEX = re.compile("0|[1-9][0-9]{0,18}")


class CaseError(ValueError):
    """A case that is malformed. The message is one sentence that says what would be right."""


def _integer(value: object, what: str, legal: range = _I64) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CaseError(f"{what} must be an integer, got {value!r:.60}")
    if value not in legal:
        raise CaseError(f"{what}={value} must lie in {legal.start}..{legal.stop - 1}")
    return value


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CaseError(f"{what} must be an object with string keys, got {value!r:.60}")
    return value


def _no_more_keys(value: Mapping[str, Any], allowed: tuple[str, ...], what: str) -> None:
    if extra := sorted(set(value) - set(allowed)):
        raise CaseError(
            f"{what} has unknown key {extra[0]!r}; it may have {', '.join(sorted(allowed))}"
        )


@dataclass(frozen=True)
class Values:
    """The contents of an index buffer: a recipe, then single values written over it.

    `edits` maps element indices (for a table: `row * width + column`) to values; it is how hostile
    values enter a case.
    """

    recipe: str
    parameters: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    edits: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def literal(cls, *values: int) -> Values:
        return cls("literal", {"values": tuple(values)})

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"recipe": self.recipe}
        for name, value in self.parameters.items():
            out[name] = list(value) if isinstance(value, tuple) else value
        if self.edits:
            out["edits"] = {str(index): value for index, value in sorted(self.edits.items())}
        return out

    @classmethod
    def from_json(cls, data: object, what: str) -> Values:
        data = _mapping(data, what)
        recipe = data.get("recipe")
        if not isinstance(recipe, str) or recipe not in RECIPES:
            raise CaseError(f"{what}.recipe={recipe!r:.60} must be one of {', '.join(RECIPES)}")
        names = RECIPES[recipe]
        _no_more_keys(data, ("recipe", "edits", *(n.removesuffix("[]") for n in names)), what)
        parameters: dict[str, int | tuple[int, ...]] = {}
        for name in names:
            key = name.removesuffix("[]")
            if key not in data:
                raise CaseError(f"{what} with recipe {recipe!r} needs {key!r}")
            if name.endswith("[]"):
                if not isinstance(data[key], list):
                    raise CaseError(
                        f"{what}.{key} must be a list of integers, got {data[key]!r:.60}"
                    )
                parameters[key] = tuple(
                    _integer(v, f"{what}.{key}[{i}]") for i, v in enumerate(data[key])
                )
            else:
                parameters[key] = _integer(data[key], f"{what}.{key}")
        edits: dict[int, int] = {}
        for index, value in _mapping(data.get("edits", {}), f"{what}.edits").items():
            if not _INDEX.fullmatch(index):
                raise CaseError(
                    f"{what}.edits has key {index!r:.40}; keys are element indices >= 0"
                )
            edits[int(index)] = _integer(value, f"{what}.edits[{index}]")
        return cls(recipe, parameters, edits)


@dataclass(frozen=True)
class Placement:
    """Where one buffer lies in memory. All in bytes.

    guard         which end of the buffer (of the workspace that it is a slice of) lies against
                  memory that nobody may touch: "end", "start", or "none": between red zones
    offset_bytes  of the base, past a multiple of 16, or of `BASE_ALIGNMENT_BYTES` without a guard;
                  0 beside a guard: as near to it as elements that are aligned can lie, or as what
                  the operation wants the base to be a multiple of
    before_bytes  of workspace that the buffer is a slice of, in front of it (never to be written)
    slack_bytes   by which the extent passed to the launcher exceeds what the layout needs
    after_bytes   of workspace behind that extent (never to be written)
    over          (buffer, offset_bytes): no memory of its own, the base lies in that buffer's; only
                  a refused case has such a buffer
    """

    offset_bytes: int = 0
    before_bytes: int = 0
    slack_bytes: int = 0
    after_bytes: int = 0
    over: tuple[str, int] | None = None
    guard: str = GUARDS[0]

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            name: value
            for name in _PLACEMENT_NUMBERS
            if (value := getattr(self, name))  # zero is the default, and left out
        }
        if self.over is not None:
            out["over"] = list(self.over)
        if self.guard != GUARDS[0]:
            out["guard"] = self.guard
        return out

    @classmethod
    def from_json(cls, data: object, what: str) -> Placement:
        data = _mapping(data, what)
        _no_more_keys(data, (*_PLACEMENT_NUMBERS, "over", "guard"), what)
        guard = data.get("guard", GUARDS[0])
        if guard not in GUARDS:
            raise CaseError(f"{what}.guard={guard!r:.60} must be one of {', '.join(GUARDS)}")
        over = data.get("over")
        if over is not None:
            if not (isinstance(over, list) and len(over) == 2 and isinstance(over[0], str)):
                raise CaseError(
                    f"{what}.over must be [buffer name, offset_bytes], got {over!r:.60}"
                )
            over = (over[0], _integer(over[1], f"{what}.over[1]"))
        return cls(
            over=over,
            guard=guard,
            **{
                name: _integer(data.get(name, 0), f"{what}.{name}", legal)
                for name, legal in _PLACEMENT_NUMBERS.items()
            },
        )


_WORKSPACE = range(2**40 + 1)  # large ones are sparse memory

_PLACEMENT_NUMBERS = {
    "offset_bytes": range(BASE_ALIGNMENT_BYTES),
    "before_bytes": _WORKSPACE,
    "slack_bytes": _WORKSPACE,
    "after_bytes": _WORKSPACE,
}


@dataclass(frozen=True)
class Case:
    """One determined input.

    operation   its name, as in contracts.md
    sizes       every scalar argument of the launcher, by its ABI name
    values      contents of index buffers by buffer name; an optional buffer that is missing here is
                absent (null) in the launch
    placements  where buffers lie, by name; a missing one has the default
    overrides   arguments changed after everything was laid out: a scalar by its name, or
                `<buffer>.dtype`, `.rank`, `.extent_bytes`, `.data` (0: a null pointer). This is how
                a refused case lies about a sound layout.
    seed        of the payload bytes
    relations   names of the relation judgements (`oracles/relation.py`) for which the case is also
                launched in a form related to this one; whoever runs it knows which there are
    """

    operation: str
    sizes: Mapping[str, int]
    values: Mapping[str, Values] = field(default_factory=dict)
    placements: Mapping[str, Placement] = field(default_factory=dict)
    overrides: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    relations: tuple[str, ...] = ()

    def placement(self, buffer: str) -> Placement:
        return self.placements.get(buffer, _DEFAULT_PLACEMENT)

    def with_sizes(self, **sizes: int) -> Case:
        return replace(self, sizes={**self.sizes, **sizes})

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "pagefuzz_case": CASE_SCHEMA,
            "operation": self.operation,
            "sizes": dict(self.sizes),
            "values": {name: values.to_json() for name, values in self.values.items()},
            "seed": self.seed,
        }
        placements = {name: p.to_json() for name, p in self.placements.items()}
        if placements := {name: data for name, data in placements.items() if data}:
            out["placements"] = placements
        if self.overrides:
            out["overrides"] = dict(self.overrides)
        if self.relations:
            out["relations"] = list(self.relations)
        return out

    @classmethod
    def from_json(cls, data: object) -> Case:
        """Raises `CaseError`. Whether the sizes suit the operation is for the operation to say."""
        data = _mapping(data, "a case")
        schema = data.get("pagefuzz_case")
        if schema != CASE_SCHEMA:
            raise CaseError(
                f'a case needs "pagefuzz_case": {CASE_SCHEMA} (its schema), got {schema!r:.60}'
            )
        _no_more_keys(
            data,
            (
                "pagefuzz_case",
                "operation",
                "sizes",
                "values",
                "placements",
                "overrides",
                "seed",
                "relations",
            ),
            "the case",
        )
        operation = data.get("operation")
        if not isinstance(operation, str):
            raise CaseError(f"operation must be the name of an operation, got {operation!r:.60}")
        relations = data.get("relations", [])
        if not isinstance(relations, list) or not all(isinstance(n, str) for n in relations):
            raise CaseError(f"relations must be a list of names, got {relations!r:.60}")
        return cls(
            operation=operation,
            sizes={k: _integer(v, k) for k, v in _mapping(data.get("sizes"), "sizes").items()},
            values={
                k: Values.from_json(v, f"values.{k}")
                for k, v in _mapping(data.get("values", {}), "values").items()
            },
            placements={
                k: Placement.from_json(v, f"placements.{k}")
                for k, v in _mapping(data.get("placements", {}), "placements").items()
            },
            overrides={
                k: _integer(v, f"overrides.{k}")
                for k, v in _mapping(data.get("overrides", {}), "overrides").items()
            },
            seed=_integer(data.get("seed", 0), "seed", range(2**64)),
            relations=tuple(relations),
        )

    def dumps(self) -> str:
        """Canonical text: equal cases have equal text."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))


_DEFAULT_PLACEMENT = Placement()


def load_case(path: str | Path) -> Case:
    """Reads a case file, or the case inside a finding file.

    Raises `CaseError` with one sentence that names the file.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CaseError(f"{path}: cannot read the case file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        raise CaseError(f"{path}: not a JSON case file: {error}") from None
    if isinstance(data, dict) and "pagefuzz_finding" in data:
        data = data.get("case")
    try:
        return Case.from_json(data)
    except CaseError as error:
        raise CaseError(f"{path}: {error}") from None
