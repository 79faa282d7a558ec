"""The injection matrix: one wrong access at a time, and which layer of detection sees it.

A launch of a sound kernel is followed by one access that the contract forbids, made by code in the
same object (builds with the flag "inject"). For each buffer of an operation and each kind of access
the matrix says which layers see it, and whether that is what they promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from queue import Empty, SimpleQueue
from threading import Event, Lock

from pagefuzz.harness.campaign.drawing import Drawing
from pagefuzz.harness.check import Checker
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.running import Injection
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import BASE_ALIGNMENT_BYTES, Case, Placement
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import Dtype, Plan, PlannedBuffer, Role
from pagefuzz.oracles.verdict import CaseClass, Outcome, Verdict
from pagefuzz.strategies.registry import cases_for

READ, WRITE = "read", "write"

#: A wrap of 32-bit elements of 8 bytes; the guards are wider.
FAR_BYTES = 2**35

#: Of workspace behind a buffer whose middle is a hole: more than a GPU's memory of its own is for.
_HOLE_BYTES = 2**32

#: Larger cases cost more than they tell.
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Kind:
    """A kind of wrong access. where: "past", "before", "far", "inside"; "hole": in a hole of
    a large buffer."""

    access: str
    where: str

    @property
    def name(self) -> str:
        return f"{self.access} {self.where}"


HOLE = "hole"

KINDS = tuple(Kind(a, w) for a in (READ, WRITE) for w in ("past", "before", "far", "inside", HOLE))


@dataclass(frozen=True)
class Layer:
    """A layer of detection, alone.

    build       flags of the object in which no other layer can come first
    guarded     whether buffers lie against guards, or between red zones
    judgements  any of which names what the layer sees
    """

    name: str
    build: str
    guarded: bool
    judgements: frozenset[str]

    def promises(self, kind: Kind, buffer: PlannedBuffer) -> bool:
        """Whether the layer must see it; what it need not see, it must not report either."""
        if self.name == "checked":
            return True
        if self.name == "diff":  # red zones and the byte diff of whole buffers
            # Nobody may touch what is far, nor a hole: there a guard comes first.
            near = kind.where not in ("far", HOLE)
            return kind.access == WRITE and near and _is_written(buffer)
        read_only = kind.access == WRITE and not _is_written(buffer)
        return kind.where != "inside" or read_only


LAYERS = (
    Layer("guard", "inject", True, frozenset({"death"})),
    Layer("diff", "inject", False, frozenset({"untouched", "output", "counts"})),
    Layer("checked", "checked,inject", True, frozenset({"bounds"})),
)


@dataclass(frozen=True)
class Wrong:
    """A try that was not as promised.

    number  of the try in its cell, from 1
    seen    titles of what was reported; "nothing"
    """

    number: int
    case: Case
    injection: Injection
    seen: str


@dataclass
class Cell:
    """How often a layer saw a kind of access to a buffer.

    tried  the numbers of the tries
    wrong  those in which that is not what it promises
    """

    promised: bool
    seen: int = 0
    tried: set[int] = field(default_factory=set)
    wrong: list[Wrong] = field(default_factory=list)

    @property
    def tries(self) -> int:
        return len(self.tried)

    @property
    def kept(self) -> bool:
        return not self.wrong


Key = tuple[str, Kind, str]
"""(buffer, kind, name of the layer)."""

Matrix = Mapping[Key, Cell]


def _is_written(buffer: PlannedBuffer) -> bool:
    return buffer.role not in (Role.SOURCE, Role.INDEX)


def injections(
    plan: Plan, expectation: Expectation, buffer: PlannedBuffer
) -> Iterator[tuple[Kind, Injection]]:
    """One wrong access of each kind that the buffer has room for, holes aside: of one element, or
    less where what lies inside it is not as long."""
    size = _size_of(buffer)
    footprint = expectation.footprint(buffer.name)
    inside = {READ: footprint.may_read, WRITE: footprint.changeable}
    for kind in KINDS:
        if kind.where == HOLE:
            continue
        if kind.where == "inside":
            found = _forbidden(buffer, inside[kind.access], size)
            if found is None:
                continue
            offset, size_bytes = found
        else:
            if kind.where == "past" and not _is_flush(buffer):
                continue
            size_bytes = size
            offset = {"past": buffer.memory_bytes, "before": -size, "far": FAR_BYTES}[kind.where]
        yield kind, Injection(buffer.name, offset, size_bytes, kind.access)


def _size_of(buffer: PlannedBuffer) -> int:
    """Bytes of an access of one element, or less, aligned at both ends of the buffer."""
    return min(Dtype(buffer.dtype).size_bytes, buffer.required_bytes & -buffer.required_bytes)


def with_hole(case: Case, buffer: str) -> Case:
    """The case with so much workspace behind a buffer that it has a hole."""
    placement = replace(case.placements.get(buffer, Placement()), after_bytes=_HOLE_BYTES)
    return replace(case, placements={**case.placements, buffer: placement})


def in_hole(buffer: PlannedBuffer) -> Iterator[tuple[Kind, Injection]]:
    """Accesses to the middle of the workspace that `with_hole` gives."""
    size = _size_of(buffer)
    offset = (buffer.required_bytes + _HOLE_BYTES // 2) // size * size
    for access in (READ, WRITE):
        yield Kind(access, HOLE), Injection(buffer.name, offset, size, access)


def _is_flush(buffer: PlannedBuffer) -> bool:
    """Whether nothing but red zones, or the guard itself, begins where the buffer ends: alignment
    may leave a few bytes before a guard, in which only the byte diff sees a write."""
    end = buffer.base_offset_bytes + buffer.memory_bytes
    return buffer.placement.guard != "end" or end % BASE_ALIGNMENT_BYTES == 0


def _forbidden(buffer: PlannedBuffer, allowed: IntervalSet, size: int) -> tuple[int, int] | None:
    """(offset, size) of an aligned access of which no byte is allowed; None if there is none."""
    rest = IntervalSet([0], [buffer.memory_bytes]).without(allowed)
    while size:
        first = -(-rest.begin // size) * size
        fits = first + size <= rest.end
        if fits.any():
            return int(first[fits][0]), size
        size //= 2
    return None


@cache
def suitable_cases(operation: str, count: int) -> tuple[Case, ...]:
    """In-contract cases of an operation without placements, with every buffer that there can be,
    and flush at both ends, in `count` of them at least, as far as drawing gets; no two are alike,
    and they are the same ones every time."""
    one = registry.operation(operation)
    found: dict[str, Case] = {}
    lacking = {buffer.name: count for buffer in one.buffers}

    def collect(case: Case) -> None:
        if not any(lacking.values()):
            return
        case = replace(case, placements={})
        if (text := case.dumps()) in found:
            return
        plan = one.plan(case)
        sizes = [b.memory_bytes for b in plan.buffers.values()]
        expectation = one.expect(plan)
        if (
            sum(sizes) > _MOST_BYTES
            or expectation.case_class is not CaseClass.IN_CONTRACT
            or not any(runs.offsets.size for runs in expectation.expected.values())
        ):
            return
        sized = [b for b in plan.buffers.values() if b.memory_bytes and _is_flush(b)]
        useful = [b.name for b in sized if lacking[b.name]]
        if useful:
            found[text] = case
        for name in useful:
            lacking[name] -= 1

    strategy = cases_for(operation, hostile=False, refused=False)
    Drawing(1, max(200, 16 * count), None, reuse=False).run(strategy, collect)
    return tuple(found.values())


def between_red_zones(case: Case) -> Case:
    names = [buffer.name for buffer in registry.operation(case.operation).buffers]
    return replace(case, placements={name: Placement(guard="none") for name in names})


@dataclass(frozen=True)
class Trial:
    """One launch with one wrong access, which `layer` must see or must not; number: of the try in
    its cell, from 1."""

    layer: Layer
    kind: Kind
    case: Case
    injection: Injection
    promised: bool
    number: int = 1

    @property
    def key(self) -> Key:
        return self.injection.buffer, self.kind, self.layer.name


def trials(
    operation: str,
    tries: int,
    layers: Sequence[Layer] = LAYERS,
    kinds: Collection[Kind] = KINDS,
    skip: int = 0,
) -> list[Trial]:
    """What fills a matrix: `tries` launches for each cell, as far as there are cases, without the
    first `skip` of these. By layer; the first of each cell, then the second of each, and so on, so
    that one run can go on where another of as many tries was stopped.

    Raises `CannotCheckError` if there is no case for a buffer.
    """
    one = registry.operation(operation)
    cases = suitable_cases(operation, tries)
    found: list[Trial] = []
    missing = {buffer.name for buffer in one.buffers}
    for layer in layers:
        count: Counter[Key] = Counter()
        for case in cases:
            placed = case if layer.guarded else between_red_zones(case)
            plan = one.plan(placed)
            expectation = one.expect(plan)
            for buffer in plan.buffers.values():
                if not buffer.memory_bytes or buffer.placement.over is not None:
                    continue
                missing.discard(buffer.name)
                made = [(placed, *one) for one in injections(plan, expectation, buffer)]
                large = with_hole(placed, buffer.name)
                made += [(large, *one) for one in in_hole(buffer)]
                for where, kind, injection in made:
                    trial = Trial(layer, kind, where, injection, layer.promises(kind, buffer))
                    if kind in kinds and count[trial.key] < tries:
                        count[trial.key] += 1
                        if count[trial.key] > skip:
                            found.append(replace(trial, number=count[trial.key]))
    if missing:
        raise CannotCheckError(
            f"{operation}: no case was drawn in which {', '.join(sorted(missing))} has memory"
        )
    return sorted(found, key=lambda trial: (layers.index(trial.layer), trial.number))


def examine(
    operation: str,
    subject: str,
    device: str,
    *,
    tries: int = 1,
    skip: int = 0,
    layers: Sequence[Layer] = LAYERS,
    kinds: Collection[Kind] = KINDS,
    jobs: int = 1,
    gpu_memory_bytes: int | None = None,
    cells: dict[Key, Cell] | None = None,
    on_entry: Callable[[], None] = lambda: None,
) -> Matrix:
    """Fills the matrix of one subject, or those layers and kinds of it, `jobs` launches at a time.
    A layer that the subject has not on this device is left out.

    tries, skip       of `trials`
    gpu_memory_bytes  that of a `Checker`
    cells             filled as launches end, for whoever may be interrupted; tries that are in
                      there already are not made again
    on_entry          called whenever something was filled in, by one thread at a time

    Raises `CannotCheckError` if the subject cannot be built so that faults can be injected, if
    there is no case for a buffer, or if `cells` are of layers that promised something else.
    """
    cells = {} if cells is None else cells
    made = []
    for trial in trials(operation, tries, layers, kinds, skip):
        before = cells.get(trial.key)
        if before is not None and before.promised is not trial.promised:
            of = f"{trial.kind.name} {trial.injection.buffer}"
            raise CannotCheckError(
                f"{operation}: the layer {trial.layer.name} promises something else of {of} than "
                "when the report was begun"
            )
        if before is None or trial.number not in before.tried:
            made.append(trial)
    entering, ending = Lock(), Event()

    def work_off(layer: Layer, waiting: SimpleQueue[Trial]) -> None:
        checker = Checker(
            operation, subject, device, layer.build, gpu_memory_bytes=gpu_memory_bytes
        )
        with checker:
            if "checked" in layer.build and "checked" not in checker.flags:
                return  # a Triton kernel on a GPU
            while not ending.is_set():
                try:
                    trial = waiting.get_nowait()
                except Empty:
                    return
                verdict = checker.check(trial.case, injection=trial.injection)
                with entering:
                    _enter(cells.setdefault(trial.key, Cell(trial.promised)), trial, verdict)
                    on_entry()

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for layer in layers:
                waiting: SimpleQueue[Trial] = SimpleQueue()
                for trial in made:
                    if trial.layer is layer:
                        waiting.put(trial)
                lanes = min(jobs, waiting.qsize())  # each has a worker
                for lane in [pool.submit(work_off, layer, waiting) for _ in range(lanes)]:
                    lane.result()
        finally:
            ending.set()
    return cells


def _enter(cell: Cell, trial: Trial, verdict: Verdict) -> None:
    if verdict.outcome is Outcome.NOT_RUN:
        raise CannotCheckError(f"a case of the matrix was not run: {verdict.not_run}")
    cell.tried.add(trial.number)
    seen = any(failure.judgement in trial.layer.judgements for failure in verdict.failures)
    cell.seen += seen
    if seen is not cell.promised:
        said = ", ".join(failure.title for failure in verdict.failures) or "nothing"
        cell.wrong.append(Wrong(trial.number, trial.case, trial.injection, said))
