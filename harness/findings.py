"""Findings: a minimised failing case with its explanation, as text and on disk.

Light on purpose: reading or printing a finding needs neither NumPy nor torch, unless the line that
describes the case has to be made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import tempfile
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.patience import LONGEST_S, SHORTEST_S, argument, is_patience
from pagefuzz.harness.sanitizers.tools import COMPUTE
from pagefuzz.oracles.case import Case, CaseError
from pagefuzz.oracles.verdict import Failure, Outcome, Severity, Verdict

FINDING_SCHEMA = 1

#: Lines of the report that a judgement may fill, in the order in which they are printed.
DETAIL_ORDER = ("access", "launch", "got", "want", "where", "means", "effect")

#: What each judgement looks with, for the line that says who saw the fault.
LAYERS = {
    "bounds": "checked build",
    "overflow": "checked index type",
    "output": "two fills against the reference",
    "untouched": "byte diff and red zones",
    "poison": "two fills",
    "repeat": "launches in a row",
    "order": "orders of threads",
    "renaming": "a related launch",
    "splitting": "a related launch",
    "widening": "a related launch",
    "workspace": "a related launch",
    "rebasing": "a related launch",
    "restriding": "a related launch",
    "counts": "counters",
    "refusal": "launch status",
    "launch": "launch status",
    "death": "worker",
    **dict.fromkeys(COMPUTE, "compute-sanitizer"),
}

#: Judgements of what accesses have done.
_OF_ACCESSES = ("death", "output", "untouched", "counts", "poison")

#: Why a finding is not minimal, unless there is another reason.
TIME_WAS_UP = "time was up"
ITS_TIME_WAS_UP = "the time for that was up"
STOPPED = "it was stopped"

_LABEL_WIDTH = 8


def cause(verdict: Verdict) -> Failure | None:
    """The failure that names the finding; None if there is none (notes are no failures)."""
    if verdict.outcome is not Outcome.FAILED:
        return None
    return next((f for f in verdict.failures if f.severity is Severity.FAILURE), None)


def built_text(backend: str, build: str, flags: Collection[str]) -> str:
    """What an object was built as: "checked build", "triton build (not checked)".

    build  what was asked for; flags  of the object, as of a `Finding`
    """
    asked = set(build.split(","))
    has = set(flags) - {backend} if flags else asked
    if has == asked:
        return f"{build} build"
    missing = sorted(asked - has - {"release"})
    return f"{','.join(sorted(has))} build" + (f" (not {','.join(missing)})" if missing else "")


def identity_of(verdict: Verdict) -> str:
    """What makes two failing cases the same finding; empty if the verdict did not fail.

    It is the de-duplication key of the failure. One that cannot name a line of source (a death, a
    wrong byte) may have different causes in and out of contract, so that the class is part of it.
    """
    failure = cause(verdict)
    if failure is None:
        return ""
    if "where" in failure.details or verdict.case_class is None:
        return failure.identity
    return f"{failure.identity}:{verdict.case_class}"


@dataclass(frozen=True)
class Finding:
    """One distinct fault of one subject.

    verdict     of the minimised case; its first failure names the finding
    device      in words ("host", "NVIDIA H200")
    minimised   False if time ran out before nothing smaller failed, or `not_minimised` says why
    repeats     how many of `runs` further runs of the case failed in the same way
    hang_after_s  after which a launch was a hang, if somebody asked for a time; else None
    repeats_hang_after_s  the same in the further runs, if they were given less; else None
    build       flags that were asked for
    flags       of the object, which may be others: no Triton kernel is checked on a GPU; () if
                they are not known
    """

    operation: str
    subject: str
    backend: str
    device: str
    build: str
    case: Case
    verdict: Verdict
    minimised: bool = False
    repeats: int = 0
    runs: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    hang_after_s: float | None = None
    repeats_hang_after_s: float | None = None
    not_minimised: str = ""
    flags: tuple[str, ...] = ()

    @property
    def failure(self) -> Failure:
        failure = cause(self.verdict)
        if failure is None:
            raise ValueError("a finding needs a verdict that failed")
        return failure

    @property
    def identity(self) -> str:
        return identity_of(self.verdict)

    @property
    def sanitizer(self) -> str:
        """The tool of compute-sanitizer that reported it; "" if a judgement did."""
        return self.failure.judgement if self.failure.judgement in COMPUTE else ""

    @property
    def digest(self) -> str:
        """Hex digits that tell this finding from every other one in a folder."""
        text = "/".join((self.operation, self.subject, self.backend, self.build, self.identity))
        return hashlib.sha256(text.encode()).hexdigest()

    def stem(self, digits: int = 4) -> str:
        """Of its file names: "bounds-block_table-1f3a"."""
        words = [self.failure.judgement]
        if what := _what(self.failure, self.operation):
            words.append(what)
        return "-".join((*(_slug(word) for word in words), self.digest[:digits]))

    # ---- as JSON ------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "pagefuzz_finding": FINDING_SCHEMA,
            "identity": self.identity,
            "title": self.failure.title,
            "operation": self.operation,
            "subject": self.subject,
            "backend": self.backend,
            "device": self.device,
            "build": self.build,
            "flags": list(self.flags),
            "case": self.case.to_json(),
            "verdict": self.verdict.to_json(),
            "minimised": self.minimised,
            "repeats": self.repeats,
            "runs": self.runs,
            "versions": dict(self.versions),
            "hang_after_s": self.hang_after_s,
            "repeats_hang_after_s": self.repeats_hang_after_s,
            "not_minimised": self.not_minimised,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Raises `CaseError` with one sentence."""
        schema = data.get("pagefuzz_finding")
        if schema != FINDING_SCHEMA:
            raise CaseError(
                f'a finding needs "pagefuzz_finding": {FINDING_SCHEMA} (the schema version), '
                f"got {schema!r}"
            )
        case = Case.from_json(data.get("case"))
        try:
            finding = cls(
                operation=str(data["operation"]),
                subject=str(data["subject"]),
                backend=str(data["backend"]),
                device=str(data["device"]),
                build=str(data["build"]),
                case=case,
                verdict=Verdict.from_json(data["verdict"]),
                minimised=bool(data["minimised"]),
                repeats=int(data["repeats"]),
                runs=int(data["runs"]),
                versions=dict(data["versions"]),
                hang_after_s=patience_of(data, "hang_after_s"),
                repeats_hang_after_s=patience_of(data, "repeats_hang_after_s"),
                not_minimised=str(data.get("not_minimised", "")),
                flags=_names_in(data, "flags"),
            )
            _ = finding.failure
        except KeyError as error:
            raise CaseError(f"the finding lacks {error}") from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CaseError(f"the finding is malformed: {error}") from None
        if finding.operation != case.operation:
            raise CaseError(
                f"the finding is of {finding.operation!r:.60}, but its case of {case.operation!r}"
            )
        return finding

    # ---- as text ------------------------------------------------------------------------------

    def text(self, width: int = 80, path: Path | None = None, *, is_replay: bool = False) -> str:
        """The report, always in one order. `path` of the JSON file is for the rerun lines.

        is_replay  of one run, which knows nothing of others and of how the case came about
        """
        failure = self.failure
        left = f"{failure.judgement.upper()}  {failure.title}"
        built = built_text(self.backend, self.build, self.flags)
        right = f"{self.operation} · {self.subject} · {self.backend} · {built}"
        case_class = str(self.verdict.case_class or "unknown")
        fields = [("case", f"{describe_case(self.case)}   class: {case_class}")]
        details = dict(failure.details)
        seen = details.pop("seen", "")
        fields += ordered(details)
        repeated = "" if is_replay else self._repeated()
        fields.append(("seen", "; ".join(filter(None, (self._seen(), seen, repeated)))))
        lines = report_lines(left, right, fields, width)
        if path is not None:
            shown = shown_path(path)
            test = shown.with_name(self._test_name(path))
            waits = "" if self.hang_after_s is None else f" {argument(self.hang_after_s)}"
            replay = f"pagefuzz replay {shlex.quote(str(shown))}{waits}"
            lines.append(f"{'again':<{_LABEL_WIDTH}}{replay}")
            lines.append(f"{'':<{_LABEL_WIDTH}}pytest {shlex.quote(str(test))}")
            if otherwise := self._names_the_line():
                lines.append(f"{'where':<{_LABEL_WIDTH}}{replay} {otherwise}")
        return "\n".join(line.rstrip() for line in lines)

    def _names_the_line(self) -> str:
        """Options of a replay that may name the line of source; "" if the failure does, or none
        would."""
        failure = self.failure
        if "where" in failure.details or failure.judgement not in _OF_ACCESSES:
            return ""
        if "checked" not in self.build:
            return "--build checked"
        # Only a GPU does not say where; Triton has no checked build there.
        return "--device host" if self.backend == "cuda" else ""

    def _seen(self) -> str:
        """Who saw the case fail, who looked and saw nothing, and who could not look."""

        checked = "checked" in (self.flags or self.build.split(","))

        def named(judgement: str) -> str:
            layer = LAYERS.get(judgement)
            if judgement == "overflow" and not checked:
                layer = "UBSan"
            return f"{judgement} ({layer})" if layer else judgement

        saw = dict.fromkeys(f.judgement for f in self.verdict.failures)
        silent = [name for name in self.verdict.checked if name not in saw]
        blind = [
            name
            for name in ("bounds", "overflow")
            if name not in saw and name not in self.verdict.checked
        ]
        parts = [", ".join(named(name) for name in saw)]
        if silent:
            parts.append(f"looked and saw nothing: {', '.join(silent)}")
        if blind:
            why = "" if checked else " without a checked build"
            parts.append(f"blind{why}: {', '.join(blind)}")
        return "; ".join(parts)

    def _repeated(self) -> str:
        if not self.sanitizer:
            return repeated_text(self)
        of = f"{self.repeats} of {self.runs} further runs, of this case alone,"
        repeated = f"{of} failed the same way" if self.runs else "not repeated"
        return "; ".join(filter(None, (repeated, self.not_minimised)))

    @staticmethod
    def _test_name(path: Path) -> str:
        return f"test_{path.stem.replace('-', '_')}.py"

    # ---- on disk ------------------------------------------------------------------------------

    def save(self, folder: Path) -> Path:
        """Writes the JSON file and its test into `folder`, each whole or not at all.

        Returns the path of the JSON file. Raises `CannotCheckError` if they cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{self.stem()}.json"
            if self._is_of_another_finding(path):
                path = folder / f"{self.stem(digits=12)}.json"
            write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")
            write_whole(path.with_name(self._test_name(path)), self._test(path))
        except OSError as error:
            raise CannotCheckError(
                f"cannot store a finding in {folder}: {error.strerror or error}; "
                "free space there or choose another folder with --report"
            ) from error
        return path

    def _is_of_another_finding(self, path: Path) -> bool:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return Finding.from_json(data).digest != self.digest
        except (OSError, ValueError, AttributeError):
            return False

    def _test(self, path: Path) -> str:
        title = f"{self.failure.judgement.upper()} {self.failure.title}"
        built = built_text(self.backend, self.build, self.flags)
        where = f"{self.operation}, {self.subject}, {self.backend}, {built}"
        doc = "\n".join(textwrap.wrap(f"{title} ({where}).".replace("\\", "/"), 96))
        return f'''"""{doc.replace('"', "'")}"""

from pathlib import Path

from pagefuzz.harness.findings import assert_fixed


def {self._test_name(path).removesuffix(".py")}() -> None:
    """Fails until the subject handles the case beside this file."""
    assert_fixed(Path(__file__).with_name("{path.name}"))
'''


def load_finding(path: Path) -> Finding:
    """Raises `CaseError` with one sentence that names the file."""
    try:
        return Finding.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CaseError(f"{path}: cannot read the finding: {error.strerror}") from None
    except CaseError as error:
        raise CaseError(f"{path}: {error}") from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise CaseError(f"{path}: not a JSON finding: {error}") from None


def assert_fixed(path: Path) -> None:
    """Runs a finding's case again, on the device and build it was found with, and waits as long.

    Raises `AssertionError` with the report while the subject fails it, and `CannotCheckError` if
    it cannot be run here, which is not a pass.
    """
    from pagefuzz.harness.check import Checker

    finding = load_finding(path)
    if finding.sanitizer:
        from pagefuzz.harness.sanitizers.opinion import again

        if now := again(finding).findings:
            raise AssertionError(f"not fixed:\n{now[0].text(path=path)}")
        return
    with Checker(
        finding.operation,
        finding.subject,
        finding.backend,
        finding.build,
        timeout_s=finding.hang_after_s,
    ) as checker:
        checker.watch_ends()
        verdict = checker.check(finding.case)
    if verdict.outcome is Outcome.NOT_RUN:
        raise CannotCheckError(f"{path}: the case was not run: {verdict.not_run}")
    if cause(verdict) is not None:
        text = Finding(**{**vars(finding), "verdict": verdict, "runs": 0}).text(path=path)
        raise AssertionError(f"not fixed:\n{text}")


class HasRepeats(Protocol):
    """A finding, as far as it says how sure it is; see `Finding`."""

    @property
    def minimised(self) -> bool: ...
    @property
    def not_minimised(self) -> str: ...
    @property
    def repeats(self) -> int: ...
    @property
    def runs(self) -> int: ...
    @property
    def repeats_hang_after_s(self) -> float | None: ...


def repeated_text(found: HasRepeats) -> str:
    """How often a finding failed again, and whether it is minimal."""
    text = "not repeated"
    if found.runs:
        text = f"{found.repeats} of {found.runs} further runs failed the same way"
        if found.repeats_hang_after_s is not None:
            text += f", each launch given {found.repeats_hang_after_s:.3g} s"
    if found.minimised:
        return text
    return ", ".join(filter(None, (f"{text}; not fully minimised", found.not_minimised)))


def describe_case(case: Case) -> str:
    """The operation's line for the case; the case as JSON if the operation cannot say."""
    from pagefuzz.oracles import registry

    try:
        operation = registry.operation(case.operation)
        return operation.describe(operation.plan(case))
    except (registry.UnknownNameError, CaseError):
        return case.dumps()


def write_whole(path: Path, text: str) -> None:
    """Puts a file in place in one step: readers see the old one or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def patience_of(data: Mapping[str, Any], name: str = "hang_after_s") -> float | None:
    """One of a finding's file, in seconds; a file from before there was such a field has none.

    Raises `ValueError`."""
    value: object = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_patience(value):
        raise ValueError(
            f"{name} must be seconds from {SHORTEST_S:g} to {LONGEST_S:g}, or null, "
            f"got {value!r:.60}"
        )
    return float(value)


def _names_in(data: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of a finding's file; a file from before there was such a field has none."""
    value = data.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name} must be a list of names, got {value!r:.60}")
    return tuple(value)


def _what(failure: Failure, operation: str) -> str:
    """What a failure is about, for a file name: the buffer in its key, else its title."""
    from pagefuzz.oracles import registry

    known = registry.operations().get(operation)
    buffers = {buffer.name for buffer in known.buffers} if known else set()
    return next((part for part in failure.key if part in buffers), failure.title)


def _slug(word: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", word.lower()).strip("-")[:40]


def shown_path(path: Path) -> Path:
    """Relative to where the command runs, if it lies below."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path


def ordered(details: Mapping[str, str]) -> list[tuple[str, str]]:
    """The details of a failure in the order in which they are printed."""
    known = [(label, details[label]) for label in DETAIL_ORDER if label in details]
    return known + [item for item in details.items() if item[0] not in DETAIL_ORDER]


def report_lines(left: str, right: str, fields: Sequence[tuple[str, str]], width: int) -> list[str]:
    """The title, what it is of on the same line or the next, and the fields by label."""
    if len(left) + 3 + len(right) <= width:
        lines = [left + " " * (width - len(left) - len(right)) + right]
    else:
        indent = " " * _LABEL_WIDTH
        lines = [*textwrap.wrap(left, width, subsequent_indent=indent)]
        lines += labelled("", right, width)
    for label, text in fields:
        for part in text.splitlines():
            lines += labelled(label, part, width)
            label = ""
    return lines


def labelled(label: str, text: str, width: int) -> list[str]:
    """A field of a report as lines of at most `width` columns; a longer word, such as a path, stays
    whole."""
    indent = " " * _LABEL_WIDTH
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"{label:<{_LABEL_WIDTH}}",
        subsequent_indent=indent,
        replace_whitespace=False,
        break_on_hyphens=False,
        break_long_words=False,
    ) or [label]
