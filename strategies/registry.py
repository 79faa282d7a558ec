"""Finds the strategies of an operation: one module each, named like it, in `operations/`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles import registry as oracles
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.registry import UnknownNameError
from pagefuzz.oracles.relation import relations_of
from pagefuzz.strategies import operations as operations_package
from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.corners import Corners
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.refusals import lies_by_reason


@cache
def operations() -> tuple[str, ...]:
    """Names of the operations that cases can be drawn for."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(operations_package.__path__)))


def _module(operation: str) -> ModuleType:
    if operation not in operations():
        raise UnknownNameError(
            f"no strategies for operation {operation!r}; there are some for "
            f"{', '.join(operations())}"
        )
    return importlib.import_module(f"{operations_package.__name__}.{operation}")


def cases_for(
    operation: str,
    *,
    hostile: bool,
    refused: bool,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> SearchStrategy[Case]:
    """Cases of an operation, half of them with one of the relations that it has.

    hostile, refused  whether cases of that class may be drawn; without both, all are in contract
    limit_bytes       bound on the memory of all buffers of a case together

    Shrinks as the operation's `cases` says, and to no relation. Raises `UnknownNameError` for an
    operation without strategies, `InvalidArgument` for a limit below 64 MiB.
    """
    strategy: SearchStrategy[Case] = _module(operation).cases(
        hostile=hostile, refused=refused, limit_bytes=limit_bytes
    )
    return _with_relation(strategy, _relations(operation))


@cache
def _relations(operation: str) -> SearchStrategy[tuple[str, ...]]:
    """No relation, or one."""
    names = sorted(relations_of(oracles.operation(operation)))
    weights: dict[tuple[str, ...], int] = {(): max(len(names), 1)}
    return weighted(weights | {(name,): 1 for name in names})


@st.composite
def _with_relation(
    draw: st.DrawFn, cases: SearchStrategy[Case], relations: SearchStrategy[tuple[str, ...]]
) -> Case:
    case, drawn = draw(cases), draw(relations)
    for name in drawn:
        event(f"relation: {name}")
    return replace(case, relations=drawn) if drawn else case


def lies_about(case: Case) -> list[Case]:
    """Every lie that can be told about a sound case, each a refused case of its own."""
    surface = _module(case.operation).surface(case)
    return [lie.told(case) for lies in lies_by_reason(surface).values() for lie in lies]


def corners_for(operation: str) -> Corners:
    """Named corners that the operation's strategies must reach. Raises `UnknownNameError`."""
    corners: Corners = _module(operation).CORNERS
    return corners


def shapes_for(operation: str) -> Sequence[Case]:
    """Legal cases of an operation that differ in nothing but what follows the batch; empty for one
    whose kernels are compiled ahead of all launches."""
    if operation not in operations():
        return ()
    found: Sequence[Case] = getattr(_module(operation), "SHAPES", ())
    return found


def reported_for(operation: str) -> Mapping[str, Callable[[], Case]]:
    """Cases of public reports that the operation's own module holds, by name; empty without any."""
    return _held(operation, "REPORTED")


def gpu_cases_for(operation: str) -> Mapping[str, Callable[[], Case]]:
    """Fixed cases of an operation, by name, that take too long on the host; empty without any."""
    return _held(operation, "ON_GPU")


def _held(operation: str, name: str) -> Mapping[str, Callable[[], Case]]:
    if operation not in operations():
        return {}
    found: Mapping[str, Callable[[], Case]] = getattr(_module(operation), name, {})
    return found
