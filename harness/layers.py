"""The detection layers of this version, and how much of a run each of them examined.

One table for `pagefuzz doctor`, for the end of a run and for its summary. What a layer examined is
taken from facts: the judgements' own counts, what the memory around the buffers was, and what the
object recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pagefuzz.oracles import registry
from pagefuzz.oracles.judgement import Run
from pagefuzz.oracles.observation import Launch, Status
from pagefuzz.oracles.operation import Operation

HOST, CUDA = "host", "cuda"

#: Of 120 drawn cases in contract one at most had no buffer beside a guard, five no bytes that were
#: only read: ten in a row without either are no chance.
FEW_CASES = 10

#: Judgements that launch a case in another form, beside repeats and orders.
_FORMS = ("renaming", "splitting", "widening", "workspace", "rebasing", "restriding")


def _all(run: Run) -> Iterable[Launch]:
    return (*run.observation.launches, *(one.launch for one in run.observation.related))


def _given(run: Run) -> Iterable[Launch]:
    return run.observation.launches


def _finished(run: Run) -> Iterable[Launch]:
    return run.finished


def _accessed(run: Run) -> Iterable[Launch]:
    records = [(one, one.record) for one in run.observation.launches]
    return [one for one, record in records if record is not None and record.accessed_bytes]


def _computed(run: Run) -> Iterable[Launch]:
    records = [(one, one.record) for one in run.observation.launches]
    return [one for one, record in records if record is not None and record.operations]


def _related(*names: str) -> Callable[[Run], Iterable[Launch]]:
    def launches(run: Run) -> Iterable[Launch]:
        related = run.observation.related
        return [one.launch for one in related if one.relation in names]

    return launches


@dataclass(frozen=True)
class Layer:
    """A detection layer.

    sees        what of, in a few words
    backends    where it exists
    needs       the build flag that it takes; "": any build has it
    without     build flags of which it is not there
    judgements  whose counts are its own, together; it is in force where one of them is concerned
    hears       in place of judgements: those that report what it sees, and count other work
    launches    those of a case that the judgements look at
    amount      in place of judgements: how much of a launch that ran it examined
    unit        of what it examines; "": launches, and nothing else. A layer whose work is counted
                elsewhere (a sanitizer's own summary) has neither judgements nor an amount
    enough      cases in contract among which it has surely had one to examine, where so few will do
    """

    name: str
    sees: str
    backends: Sequence[str]
    needs: str = ""
    without: frozenset[str] = frozenset()
    judgements: tuple[str, ...] = ()
    hears: tuple[str, ...] = ()
    launches: Callable[[Run], Iterable[Launch]] = _all
    amount: Callable[[Launch], int] | None = None
    unit: str = "bytes"
    enough: int | None = None

    @property
    def text(self) -> str:
        """Its name, with its judgements: "checked build (bounds)"."""
        of = f" ({', '.join(self.judgements)})" if self.judgements else ""
        return self.name + of

    def in_force(self, operation: Operation, flags: frozenset[str]) -> bool:
        """Whether a campaign of an operation asks for it, with an object of these flags: one in
        which it then examined nothing is no pass."""
        backend = CUDA if CUDA in flags else HOST
        if backend not in self.backends or (self.needs and self.needs not in flags):
            return False
        if self.without & flags:
            return False
        if self.amount is not None:
            return True
        known = registry.judgements()
        return any(known[name].concerns(operation, flags) for name in self.judgements)

    def examined(self, run: Run, checked: Mapping[str, int]) -> tuple[int, int]:
        """(launches, amount) of one case. checked: what each judgement examined of it."""
        if self.amount is not None:
            amounts = [self.amount(one) for one in self.launches(run) if ran(one.status)]
            return sum(amount > 0 for amount in amounts), sum(amounts)
        amount = sum(checked.get(name, 0) for name in self.judgements)
        return (len(list(self.launches(run))) if amount else 0), amount


def ran(status: Status) -> bool:
    """Whether the kernel ran: one that was refused touched nothing for a layer to see."""
    return status in (Status.OK, Status.BARRIER_FAULT)


_BOTH = (HOST, CUDA)
_ASAN = frozenset({"asan"})

#: What this version has. A layer is listed once it exists, not before.
LAYERS: tuple[Layer, ...] = (
    Layer(
        "reference, bit-exact", "wrong values", _BOTH, judgements=("output",), launches=_finished
    ),
    Layer(
        "whole-buffer byte diff",
        "writes to any forbidden byte",
        _BOTH,
        judgements=("untouched",),
        launches=_given,
        enough=1,
    ),
    Layer(
        "red zones",
        "writes just outside a buffer",
        _BOTH,
        amount=lambda launch: launch.around.red_zone_bytes,
        enough=1,
    ),
    Layer(
        "two fills",
        "forbidden reads that reach output",
        _BOTH,
        judgements=("poison",),
        launches=_finished,
    ),
    Layer(
        "repeats",
        "races, stale shared memory",
        _BOTH,
        judgements=("repeat",),
        launches=_related("repeat"),
    ),
    Layer(
        "orders of threads",
        "missing barriers, races",
        (HOST,),
        judgements=("order",),
        launches=_related("order"),
    ),
    Layer(
        "related launches",
        "output that follows page ids",
        _BOTH,
        judgements=_FORMS,
        launches=_related(*_FORMS),
    ),
    Layer(
        "counters",
        "lost or wrongly counted pages",
        _BOTH,
        judgements=("counts",),
        launches=_finished,
        unit="counters",
    ),
    Layer("launch limits", "launches that CUDA refuses", _BOTH, judgements=("launch",), unit=""),
    Layer(
        "guard pages",
        "reads off a buffer, at full speed",
        _BOTH,
        # AddressSanitizer sees more of what lies between red zones than a guard would.
        without=_ASAN,
        amount=lambda launch: launch.around.guarded_bytes,
        enough=FEW_CASES,
    ),
    Layer(
        "read-only sources",
        "writes to what is only read",
        _BOTH,
        amount=lambda launch: launch.around.read_only_bytes,
        enough=FEW_CASES,
    ),
    Layer(
        "worker deaths",
        "crashes, hangs, lost contexts",
        _BOTH,
        judgements=("death",),
        launches=_given,
        unit="",
    ),
    Layer(
        "checked build",
        "every forbidden access, its line",
        _BOTH,
        needs="checked",
        judgements=("bounds",),
        launches=_accessed,
    ),
    Layer(
        "checked index type",
        "wrap, lossy narrowing, the line",
        _BOTH,
        needs="checked",
        judgements=("overflow",),
        launches=_computed,
        unit="operations",
    ),
    Layer(
        "compilation keys",
        "what a new batch has compiled anew",
        _BOTH,
        needs="triton",
        judgements=("recompile",),
        launches=_finished,
        unit="keys",
    ),
    Layer(
        "UBSan",
        "signed overflow, a second opinion",
        (HOST,),
        needs="ubsan",
        # It tells faults, not how many operations it looked at.
        hears=("overflow",),
        amount=lambda launch: int(launch.record is not None),
        unit="",
    ),
    Layer(
        "AddressSanitizer",
        "a second opinion on accesses",
        (HOST,),
        needs="asan",
        # It watches all that is no buffer's; these are the bytes of it beside buffers.
        amount=lambda launch: launch.around.poisoned_bytes,
    ),
    Layer("compute-sanitizer", "a second opinion, races, barriers", (CUDA,), needs="release"),
)

#: By name.
BY_NAME: Mapping[str, Layer] = MappingProxyType({layer.name: layer for layer in LAYERS})


def in_force(operation: Operation, flags: frozenset[str]) -> tuple[str, ...]:
    """Names of the layers that must examine something in a campaign of an operation, with an object
    of these build flags."""
    return tuple(layer.name for layer in LAYERS if layer.in_force(operation, flags))


def examined(run: Run, checked: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Layer -> (launches, amount) that it examined of one case, of those in force."""
    flags = run.observation.build_flags
    return {
        layer.name: layer.examined(run, checked)
        for layer in LAYERS
        if layer.in_force(run.operation, flags)
    }
