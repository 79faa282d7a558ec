"""Finds every operation and judgement: one module each, in the folder of its kind."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType, ModuleType
from typing import TypeVar

from pagefuzz.oracles import judgements as judgements_package
from pagefuzz.oracles import operations as operations_package
from pagefuzz.oracles.judgement import Judgement
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.wording import unknown_text

_Kind = TypeVar("_Kind", Operation, Judgement)


def _instances(package: ModuleType, kind: type[_Kind]) -> Mapping[str, _Kind]:
    found: dict[str, _Kind] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for item in vars(module).values():
            if (
                isinstance(item, type)
                and issubclass(item, kind)
                and item.__module__ == module.__name__
                and not getattr(item, "__abstractmethods__", None)
            ):
                if item.name in found:
                    raise RuntimeError(f"two classes are registered as {item.name!r}")
                found[item.name] = item()
    return MappingProxyType(found)


@cache
def operations() -> Mapping[str, Operation]:
    """Every operation by name."""
    return _instances(operations_package, Operation)  # type: ignore[type-abstract]


@cache
def judgements() -> Mapping[str, Judgement]:
    """Every judgement by name."""
    return _instances(judgements_package, Judgement)  # type: ignore[type-abstract]


def concerned(operation: Operation, flags: frozenset[str]) -> tuple[str, ...]:
    """Names of the judgements that must examine something in a campaign of an operation, with an
    object of these build flags."""
    return tuple(n for n, one in judgements().items() if one.concerns(operation, flags))


class UnknownNameError(LookupError):
    """A name that is not registered. The message lists those that are."""


def operation(name: str) -> Operation:
    try:
        return operations()[name]
    except KeyError:
        raise UnknownNameError(unknown_text("operation", name, operations())) from None
