"""Subjects: implementations under test, and what each of them promises.

Nothing is listed by hand. A bundled subject is a launcher in the ABI fragment of a
`kernels/operations/<operation>.cu`, described by the comment in front of it, or one in a
`kernels/triton/<operation>.py`, described by its docstring; a twin is a small TOML file that
changes one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import cffi

from pagefuzz import kernels
from pagefuzz.harness.build import load_twin
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.triton import declared
from pagefuzz.oracles import registry
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.wording import unknown_text

KERNELS = Path(kernels.__file__).parent
BUNDLED = "bundled"
TWIN = "twin"

_BEGIN, _END = "// pagefuzz-abi: begin", "// pagefuzz-abi: end"
_LAUNCHER = re.compile(r"/\*(?P<comment>(?:(?!\*/).)*)\*/\s*int\s+(?P<symbol>pf_\w+)\s*\(", re.S)
_FIELD = re.compile(r"^[\s*]*(?P<label>[a-z]+):\s*(?P<text>.*)$")


@dataclass(frozen=True)
class Subject:
    """An implementation under test.

    name                  "bundled:page", "twin:stray-store"
    operation             of contracts.md
    schedule              how it cuts its work: "page", "token", ...
    source                the .cu, or the .py of a Triton kernel
    twin                  the TOML that changes it, or None
    symbol                of the launcher in the built object or module
    promises_containment  whether it promises to contain hostile values
    faults                what is known to be wrong with it; empty if nothing is
    summary               one line for `pagefuzz list`
    """

    name: str
    operation: str
    schedule: str
    source: Path
    twin: Path | None
    symbol: str
    promises_containment: bool
    faults: str
    summary: str


def common_abi() -> str:
    """The declarations that every operation shares, as cffi parses them."""
    return (KERNELS / "abi" / "common.h").read_text(encoding="utf-8")


def abi_fragment(source: Path) -> str:
    """The C declarations between the `pagefuzz-abi` markers of a .cu.

    Raises `CannotCheckError` if the file cannot be read or has no such part.
    """
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise CannotCheckError(f"{source}: cannot read the kernel: {error.strerror}") from None
    if text.count(_BEGIN) != 1 or text.count(_END) != 1 or text.index(_BEGIN) > text.index(_END):
        raise CannotCheckError(
            f"{source}: its ABI fragment must stand between one line '{_BEGIN}' and one '{_END}'"
        )
    return text.split(_BEGIN)[1].split(_END)[0]


@cache
def parse_abi(source: Path) -> cffi.FFI:
    """The common ABI and the fragment of one operation, parsed.

    Raises `CannotCheckError` with the parser's complaint.
    """
    ffi = cffi.FFI()
    try:
        ffi.cdef(common_abi() + abi_fragment(source))
    except (cffi.CDefError, cffi.FFIError) as error:
        complaint = " ".join(str(error).split())
        raise CannotCheckError(
            f"{source}: the ABI fragment is not C that cffi can parse: {complaint}"
        ) from None
    return ffi


def _described(comment: str) -> dict[str, str]:
    """`label: text` lines of a comment; a line without a label continues the one before."""
    fields: dict[str, str] = {}
    label = ""
    for line in comment.splitlines():
        if match := _FIELD.match(line):
            label = match["label"]
            fields[label] = match["text"].strip()
        elif label and (more := line.strip(" *\t")):
            fields[label] += " " + more
    return fields


def _launchers(source: Path) -> list[tuple[str, str]]:
    """Every launcher of a kernel's source and what is said of it."""
    if source.suffix == ".py":
        return [(one.symbol, one.comment) for one in declared.launchers(source)]
    return [(m["symbol"], m["comment"]) for m in _LAUNCHER.finditer(abi_fragment(source))]


def _bundled(source: Path) -> dict[str, Subject]:
    operation = source.stem
    found: dict[str, Subject] = {}
    for symbol, comment in _launchers(source):
        fields = _described(comment)
        if missing := [
            label for label in ("schedule", "contains", "summary") if label not in fields
        ]:
            raise CannotCheckError(
                f"{source}: the comment before {symbol} lacks a line '{missing[0]}: ...'"
            )
        if fields["contains"] not in ("yes", "no"):
            raise CannotCheckError(
                f"{source}: 'contains: {fields['contains']}' before {symbol} must be yes or no"
            )
        schedule = fields["schedule"]
        if symbol != f"pf_{operation}_{schedule.replace('-', '_')}":
            raise CannotCheckError(
                f"{source}: schedule {schedule!r} of {operation} must be launched by "
                f"pf_{operation}_{schedule.replace('-', '_')}, not by {symbol}"
            )
        found[schedule] = Subject(
            name=f"{BUNDLED}:{schedule}",
            operation=operation,
            schedule=schedule,
            source=source,
            twin=None,
            symbol=symbol,
            promises_containment=fields["contains"] == "yes",
            faults=fields.get("faults", ""),
            summary=fields["summary"],
        )
    if not found:
        raise CannotCheckError(f"{source}: its ABI fragment declares no launcher")
    return found


def _twin(path: Path, name: str) -> Subject:
    twin = load_twin(path)
    correct = bundled().get((twin.operation, twin.schedule))
    if correct is None:
        known = ", ".join(f"{operation} {schedule}" for operation, schedule in bundled())
        raise CannotCheckError(
            f"{path}: a twin changes a bundled schedule ({known}), "
            f"not {twin.operation} {twin.schedule}"
        )
    return replace(correct, name=name, twin=path, faults=twin.breaks, summary=twin.breaks)


def _sources() -> list[Path]:
    """Every kernel source, by the operation that it is named like."""
    found = [*(KERNELS / "operations").glob("*.cu"), *(KERNELS / "triton").glob("*.py")]
    return sorted((path for path in found if path.stem != "__init__"), key=lambda path: path.stem)


@cache
def bundled() -> Mapping[tuple[str, str], Subject]:
    """Every launcher of `kernels/operations` and `kernels/triton`, by (operation, schedule).

    Raises `CannotCheckError` for a kernel that does not say what it is.
    """
    return MappingProxyType(
        {
            (subject.operation, schedule): subject
            for source in _sources()
            for schedule, subject in _bundled(source).items()
        }
    )


@cache
def subjects() -> tuple[Subject, ...]:
    """Every bundled subject and twin, operation by operation."""
    twins = sorted((KERNELS / "twins").glob("*.toml"))
    return (*bundled().values(), *(_twin(path, f"{TWIN}:{path.stem}") for path in twins))


def subject(name: str, operation: str | None = None) -> Subject:
    """The subject called `name`, of `operation` where several operations have one of that name.

    `twin:<path>` with a path that ends in `.toml` is read from there; its name has the whole path.
    Raises `CannotCheckError` with the names there are.
    """
    kind, _, rest = name.partition(":")
    if kind == TWIN and rest.endswith(".toml"):
        path = Path(rest).absolute()  # in its name too: a finding is replayed from other folders
        found = [_twin(path, f"{TWIN}:{path}")]
    else:
        found = [s for s in subjects() if s.name == name]
    fitting = [s for s in found if operation in (None, s.operation)]
    if len(fitting) == 1:
        return fitting[0]
    of = f" of {operation}" if operation else ""
    if fitting:
        several = ", ".join(s.operation for s in fitting)
        raise CannotCheckError(
            f"subject {name!r} is one of several operations; name one: {several}"
        )
    if found:
        several = ", ".join(s.operation for s in found)
        raise CannotCheckError(f"subject {name!r} is one of {several}, not{of}")
    names = [s.name for s in subjects() if operation in (None, s.operation)]
    also = f"{of}, and {TWIN}:<path of a .toml file>"
    raise CannotCheckError(unknown_text("subject", name, names, also))


def scanning_subject() -> Subject:
    """One whose CUDA objects have `pf_scan`, for kernels that are in none."""
    return next(one for one in bundled().values() if one.source.suffix == ".cu")


def check_binding(operation: Operation, source: Path) -> None:
    """Compares an operation's declared arguments with the args struct of its .cu, or with the
    parameters of the launchers in its .py.

    An operation that cannot be bound must fail the run: raises `CannotCheckError` that names the
    first mismatch.
    """
    buffers, sizes = (buffer.name for buffer in operation.buffers), operation.sizes
    if source.suffix == ".py":
        want = [
            *((name, "Array") for name in buffers),
            *((name, "int") for name in (*sizes, "stream")),
        ]
        for one in declared.launchers(source):
            _compare(operation, source, f"parameter {{}} of {one.symbol}", one.parameters, want)
        return
    ffi = parse_abi(source)
    struct = f"pf_{operation.name}_args"
    try:
        fields = ffi.typeof(struct).fields
    except (ffi.error, cffi.CDefError):
        raise CannotCheckError(f"{source}: the ABI fragment declares no struct {struct}") from None
    got = [(name, field.type.cname) for name, field in fields or ()]
    want = [
        ("struct_bytes", "int64_t"),
        *((name, "pf_array") for name in buffers),
        *((size, "int64_t") for size in sizes),
        ("stream", "void *"),
    ]
    _compare(operation, source, f"field {{}} of {struct}", got, want)


def _compare(
    operation: Operation,
    source: Path,
    where: str,
    got: Sequence[tuple[str, str]],
    want: Sequence[tuple[str, str]],
) -> None:
    """Names and types of arguments; `where` has room for an index."""
    for index in range(max(len(got), len(want))):
        if tuple(got[index : index + 1]) != tuple(want[index : index + 1]):
            in_kernel = " of type ".join(got[index]) if index < len(got) else "nothing"
            in_oracle = " of type ".join(want[index]) if index < len(want) else "nothing"
            raise CannotCheckError(
                f"{operation.name} cannot be bound: {where.format(index)} in {source.name} is "
                f"{in_kernel}, its operation in oracles/ has {in_oracle} there"
            )


def check_registry() -> None:
    """Every operation has exactly one kernel source, and both agree on every argument.

    Raises `CannotCheckError` that names the first mismatch: what cannot be bound cannot be checked.
    """
    operations = registry.operations()
    sources: dict[str, Path] = {}
    for source in _sources():
        if source.stem in sources:
            raise CannotCheckError(
                f"{source.stem} has two kernel sources, {sources[source.stem]} and {source}; a "
                "form with another contract is an operation of its own"
            )
        sources[source.stem] = source
    if not operations:
        raise CannotCheckError("no operation is registered in oracles/operations")
    for name in sorted(set(operations) ^ set(sources)):
        has, lacks = (
            ("oracles/operations", f"kernels/operations/{name}.cu or kernels/triton/{name}.py")
            if name in operations
            else (str(sources[name]), "operation of that name in oracles/operations")
        )
        raise CannotCheckError(f"{name} is in {has}, but there is no {lacks}")
    for name, operation in operations.items():
        check_binding(operation, sources[name])
    subjects()  # every kernel and twin says what it is
