"""Compiles a kernel into a shared object, once for each content, compiler and set of flags.

Objects live in a cache that many processes may use at once. An object's name is a hash of all that
it is made of; it appears under that name only when it is whole, so a builder that is killed leaves
nothing that could be taken for an object.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pagefuzz.kernels
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.lifeline import tied
from pagefuzz.oracles.wording import unknown_text

KERNELS = Path(pagefuzz.kernels.__file__).parent

#: Flags in the order in which they are printed; "release" stands for none of them.
FLAGS = ("checked", "ubsan", "asan", "coverage", "inject")
RELEASE = "release"
TARGETS = ("host", "cuda")

_HOST_ONLY = ("ubsan", "asan", "coverage")
_OLDEST_ARCH = 80
_DEFAULT_ARCH = "90"
_TAIL_LINES = 15
_COMPILER_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class BuildSpec:
    """What to compile for ("host" or "cuda"), and which flags.

    Raises `CannotCheckError` on a flag that does not exist, or not for that target.
    """

    target: str
    flags: frozenset[str] = frozenset({"checked"})

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise CannotCheckError(
                f"unknown build target {self.target!r}; there is {', '.join(TARGETS)}"
            )
        for flag in sorted(self.flags):
            if flag not in FLAGS:
                raise CannotCheckError(unknown_text("build flag", flag, (RELEASE, *FLAGS)))
            if self.target == "cuda" and flag in _HOST_ONLY:
                raise CannotCheckError(
                    f"build flag {flag!r} exists for the host only; a cuda object may be "
                    f"{RELEASE}, checked or inject"
                )

    @classmethod
    def parse(cls, target: str, text: str) -> BuildSpec:
        """From text such as "checked,coverage" or "release"."""
        names = [name.strip() for name in text.split(",")]
        if RELEASE in names and len(names) > 1:
            raise CannotCheckError(
                f"build flags {text!r}: {RELEASE} means no flag at all, so it combines with none"
            )
        return cls(target, frozenset() if names == [RELEASE] else frozenset(names))

    @property
    def text(self) -> str:
        """The flags as `parse` takes them."""
        return ",".join(flag for flag in FLAGS if flag in self.flags) or RELEASE

    def __str__(self) -> str:
        return f"{self.target} {self.text}"


# ---- twins ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Twin:
    """A declared small change of a kernel.

    schedule  the correct form that it changes
    breaks    one sentence: what is wrong with it
    report    the public report it restates, or ""
    replacements  (find, replacement): each `find` occurs once, both have equally many lines
    """

    name: str
    operation: str
    schedule: str
    breaks: str
    report: str
    replacements: tuple[tuple[str, str], ...]

    def apply(self, source: str) -> str:
        """The faulty source. Raises `CannotCheckError` if the source no longer has the text."""
        for number, (find, replacement) in enumerate(self.replacements, 1):
            if (found := source.count(find)) != 1:
                raise CannotCheckError(
                    f"twin {self.name}: the text of replacement {number} must occur exactly once "
                    f"in the source, it occurs {found} times: {find.strip()!r:.80}"
                )
            source = source.replace(find, replacement)
        return source


def _twin_text(data: Mapping[str, Any], key: str, where: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise CannotCheckError(f"{where} needs {key!r}, a string that is not empty")
    return value


def load_twin(path: Path) -> Twin:
    """Reads a twin's TOML file. Raises `CannotCheckError` with one sentence naming the file."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotCheckError(f"cannot read the twin {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CannotCheckError(f"the twin {path} is not TOML: {error}") from None
    where = f"the twin {path}"
    keys = ("operation", "schedule", "breaks", "report", "replace")
    if unknown := sorted(set(data) - set(keys)):
        raise CannotCheckError(f"{where} has unknown key {unknown[0]!r}; it may have {keys}")
    tables = data.get("replace")
    if (
        not isinstance(tables, list)
        or not tables
        or not all(isinstance(table, dict) for table in tables)
    ):
        raise CannotCheckError(f"{where} needs one or more [[replace]] tables")
    replacements = []
    for number, table in enumerate(tables, 1):
        here = f"{where}, [[replace]] table {number},"
        if set(table) != {"find", "with"}:
            raise CannotCheckError(f"{here} must have 'find' and 'with', and nothing else")
        find, replacement = _twin_text(table, "find", here), table["with"]
        if not isinstance(replacement, str):
            raise CannotCheckError(f"{here} needs 'with', a string")
        if find.count("\n") != replacement.count("\n"):
            raise CannotCheckError(
                f"{here} must keep line numbers true: 'find' has {find.count(chr(10))} newlines, "
                f"'with' has {replacement.count(chr(10))}"
            )
        replacements.append((find, replacement))
    return Twin(
        name=path.stem,
        operation=_twin_text(data, "operation", where),
        schedule=_twin_text(data, "schedule", where),
        breaks=_twin_text(data, "breaks", where),
        report=_twin_text(data, "report", where) if "report" in data else "",
        replacements=tuple(replacements),
    )


# ---- compilers -----------------------------------------------------------------------------------


def _from_environment(variable: str) -> list[str] | None:
    """The compiler that a variable names, with its leading arguments."""
    words = shlex.split(os.environ.get(variable, ""))
    if not words:
        return None
    if shutil.which(words[0]) is None:
        raise CannotCheckError(
            f"{variable} names {words[0]!r}, which is not a program; name a compiler or unset it"
        )
    return words


def _packaged_nvcc() -> Path | None:
    """nvcc of the PyPI package nvidia-cuda-nvcc, if it is installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True):
            if os.access(nvcc, os.X_OK):
                return nvcc
    return None


def compiler(target: str) -> list[str]:
    """The compiler's command. Raises `CannotCheckError` if there is none."""
    if target == "cuda":
        if words := _from_environment("PAGEFUZZ_NVCC"):
            return words
        if shutil.which("nvcc"):
            return ["nvcc"]
        if nvcc := _packaged_nvcc():
            libraries = nvcc.parent.parent / "lib"
            return [str(nvcc), *([f"-L{libraries}"] if libraries.is_dir() else [])]
        raise CannotCheckError(
            "no nvcc to compile CUDA kernels with: put one on PATH, name it in PAGEFUZZ_NVCC, or "
            "install pagefuzz[cuda]"
        )
    words = _from_environment("PAGEFUZZ_CXX") or _from_environment("CXX")
    if words:
        return words
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CannotCheckError(
        "no C++ compiler to build the host emulation with: install g++ or clang++, or name one in "
        "PAGEFUZZ_CXX"
    )


@cache
def _version_text(words: tuple[str, ...]) -> str:
    """What `compiler --version` prints: an identity that does not depend on paths."""
    command = [*words, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotCheckError(f"{shlex.join(command)} does not run: {error}") from None
    return done.stdout


def _identity(target: str) -> str:
    identity = _version_text(tuple(compiler(target)))
    if target == "cuda" and shutil.which("g++"):
        identity += _version_text(("g++",))  # nvcc hands the host half to it
    return identity


def compiler_version(target: str) -> str:
    """One line for summaries: "g++ (Debian 12.2.0-14) 12.2.0", "nvcc release 13.0, V13.0.88"."""
    text = _version_text(tuple(compiler(target)))
    if found := re.search(r"release \S+ V[\d.]+", text):
        return f"nvcc {found[0]}"
    return text.partition("\n")[0]


def asan_runtime() -> Path:
    """The library that a process must have in LD_PRELOAD to load an asan object."""
    words = compiler("host")
    clang = "clang" in _version_text(tuple(words))
    name = f"libclang_rt.asan-{platform.machine()}.so" if clang else "libasan.so"
    command = [*words, f"-print-file-name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = Path(done.stdout.strip())
    if not found.is_absolute() or not found.exists():
        raise CannotCheckError(
            f"{words[0]} has no {name}, which asan objects need: install its AddressSanitizer or "
            "build without the asan flag"
        )
    return found.resolve()


@cache
def _gpu_architectures() -> tuple[str, ...]:
    """Compute capabilities of this machine's GPUs ("90"), none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ()
    found = {line.strip().replace(".", "") for line in done.stdout.splitlines()}
    return tuple(sorted(arch for arch in found if arch.isdecimal()))


def cuda_architectures() -> tuple[str, ...]:
    """What CUDA objects are compiled for: PAGEFUZZ_CUDA_ARCH, else the GPUs here, else sm_90."""
    asked = os.environ.get("PAGEFUZZ_CUDA_ARCH", "")
    if asked:
        match = re.fullmatch(r"(?:sm_)?(\d+)([af]?)", asked)
        if not match:
            raise CannotCheckError(
                f"PAGEFUZZ_CUDA_ARCH is {asked!r}; it must name an architecture, such as sm_90"
            )
        architectures: tuple[str, ...] = (match[1] + match[2],)
    else:
        architectures = _gpu_architectures() or (_DEFAULT_ARCH,)
    for architecture in architectures:
        if int(architecture.rstrip("af")) < _OLDEST_ARCH:
            raise CannotCheckError(
                f"the kernels need compute capability {_OLDEST_ARCH / 10} or later, not "
                f"sm_{architecture}"
            )
    return architectures


# ---- commands ------------------------------------------------------------------------------------


def _defines(spec: BuildSpec) -> list[str]:
    return [f"-DPF_{flag.upper()}" for flag in FLAGS if flag in spec.flags]


def _host_commands(source: Path, spec: BuildSpec, target: Path) -> list[list[str]]:
    """Compile, then link: linked in one go, UBSan would drag its runtime library in."""
    words = compiler("host")
    object_file = target.with_name(f"{source.stem}.o")  # names gcov's files, too
    compile_flags = [
        *("-x", "c++", "-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden"),
        *("-Wall", "-Wextra", "-fno-strict-aliasing", f"-I{KERNELS}"),
    ]
    link_flags = ["-shared"]
    if "ubsan" in spec.flags:
        compile_flags += ["-fsanitize=signed-integer-overflow"]
    else:
        # Index types of 32 bits wrap on a GPU. Without this, g++ may widen a product instead.
        compile_flags += ["-fwrapv"]
    if "asan" in spec.flags:
        compile_flags += ["-fsanitize=address", "-fno-omit-frame-pointer"]
        link_flags += ["-fsanitize=address"]
        if "clang" in _version_text(tuple(words)):
            link_flags += ["-shared-libasan"]
    if "coverage" in spec.flags:
        compile_flags += ["--coverage"]
        link_flags += ["--coverage"]
    return [
        [*words, *compile_flags, *_defines(spec), "-c", str(source), "-o", str(object_file)],
        [*words, *link_flags, str(object_file), "-o", str(target)],
    ]


def _cuda_commands(source: Path, spec: BuildSpec, target: Path) -> list[list[str]]:
    architectures = [
        f"-gencode=arch=compute_{name},code=sm_{name}" for name in cuda_architectures()
    ]
    flags = [
        *("-std=c++20", "-O3", "-lineinfo", "-shared", f"-I{KERNELS}"),
        *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"),
    ]
    return [
        [*compiler("cuda"), *flags, *architectures, *_defines(spec), str(source), "-o", str(target)]
    ]


def commands(source: Path, spec: BuildSpec, target: Path) -> list[list[str]]:
    """The compiler's command lines that make `target` of `source`, to be run in this order."""
    make = _cuda_commands if spec.target == "cuda" else _host_commands
    return make(source, spec, target)


def _run(command: Sequence[str], source: Path) -> None:
    """Runs a compiler; the last word of its command line is the file that it makes."""
    made = Path(command[-1])
    made.unlink(missing_ok=True)  # what a build that was interrupted left behind
    try:
        with tied(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            printed, _ = process.communicate(timeout=_COMPILER_TIMEOUT_S)
    except OSError as error:
        raise CannotCheckError(f"{command[0]} does not run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise CannotCheckError(
            f"{Path(command[0]).name} did not come to an end of {source.name} within "
            f"{_COMPILER_TIMEOUT_S:g} s"
        ) from None
    code = process.returncode
    if code == 0 and made.exists():
        return
    how = f"exit status {code}" if code >= 0 else f"ended by signal {-code}"
    if code == 0:
        how += f", but there is no {made.name}"
    lines = printed.decode(errors="replace").strip().splitlines()
    tail = "\n".join(lines[-_TAIL_LINES:])
    said = f"the end of its output:\n{tail}" if tail else "it printed nothing"
    raise CannotCheckError(f"{Path(command[0]).name} failed on {source.name} ({how}); {said}")


# ---- the cache -----------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where objects live: $PAGEFUZZ_CACHE/objects, else pagefuzz/objects in the user's cache."""
    if chosen := os.environ.get("PAGEFUZZ_CACHE"):
        return Path(chosen).absolute() / "objects"
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(users).absolute() / "pagefuzz" / "objects"


def _headers() -> Iterator[Path]:
    for folder in ("abi", "common", "host"):
        yield from sorted((KERNELS / folder).glob("*.h"))


def _key(source: str, name: str, spec: BuildSpec) -> str:
    digest = hashlib.sha256()

    def add(part: str | bytes) -> None:
        part = part.encode() if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    for header in _headers():
        add(f"{header.parent.name}/{header.name}")
        add(header.read_bytes())
    add(name)
    add(source)
    add(_identity(spec.target))
    # The command line with fixed names in place of paths.
    for command in commands(Path(name), spec, Path("object.so")):
        for word in command[len(compiler(spec.target)) :]:
            add(word.replace(str(KERNELS), "kernels"))
    return digest.hexdigest()[:32]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel frees the lock of a process that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(source: Path, spec: BuildSpec, *, twin: Path | None = None) -> Path:
    """The shared object of `source` (a .cu), changed as `twin` says.

    Raises `CannotCheckError` if there is no compiler, if it fails, or if the twin does not apply.
    """
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise CannotCheckError(
            f"cannot read the kernel source {source}: {error.strerror}"
        ) from None
    original = text
    if twin is not None:
        text = load_twin(twin).apply(text)
    folder = cache_folder() / _key(text, source.name, spec)
    whole = folder / f"{source.stem}.so"
    if whole.exists():
        return whole
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            if not whole.exists():
                if text != original:
                    source = folder / source.name
                    source.write_text(text, encoding="utf-8")
                unfinished = folder / "unfinished.so"
                for command in commands(source.absolute(), spec, unfinished):
                    _run(command, source)
                unfinished.replace(whole)
                whole.with_suffix(".o").unlink(missing_ok=True)
    except OSError as error:
        raise CannotCheckError(
            f"cannot keep objects in {folder}: {error.strerror}; PAGEFUZZ_CACHE may name another "
            "folder"
        ) from None
    return whole
