"""What was seen of a case's launches: pure data that the judgements read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Bytes, Plan


class Status(IntEnum):
    """`enum pf_status` of the C ABI."""

    OK = 0
    REFUSED = 1
    LAUNCH_FAILED = 2
    BARRIER_FAULT = 3


class OrderKind(IntEnum):
    """`enum pf_order` of the C ABI: in which order CTAs, and the threads of each, take turns."""

    FORWARD = 0
    REVERSE = 1
    SHUFFLED = 2
    WARP_INTERLEAVED = 3


@dataclass(frozen=True)
class LaunchOrder:
    """An order of CTAs and threads; only the host has one to choose. seed: of a shuffled one."""

    kind: OrderKind = OrderKind.FORWARD
    seed: int = 0


@dataclass(frozen=True)
class Site:
    """Where in the source, and in which thread."""

    file: str
    line: int
    block: tuple[int, int, int]
    thread: tuple[int, int, int]

    def __str__(self) -> str:
        block = ",".join(map(str, self.block))
        thread = ",".join(map(str, self.thread))
        return f"{self.file}:{self.line}  block ({block}) thread ({thread})"


@dataclass(frozen=True)
class AccessFault:
    """A forbidden access that the checked build recorded and suppressed.

    kind is "read", "write" or "atomic"; offset_bytes is from the buffer's base and may be negative.
    """

    sequence: int
    buffer: str
    offset_bytes: int
    size_bytes: int
    kind: str
    site: Site


@dataclass(frozen=True)
class IndexFault:
    """A wrap or lossy narrowing that the checked index type (or UBSan) recorded.

    operation is "+", "-", "*", "<<", "neg", "/" or "narrow"; `type_name` is e.g. "int32".
    """

    sequence: int
    operation: str
    type_name: str
    a: int
    b: int
    result: int
    site: Site


@dataclass(frozen=True)
class CheckRecord:
    """What a checked build recorded of one launch. The first fault of each distinct site."""

    accesses: int
    accessed_bytes: int
    operations: int
    access_fault_count: int
    index_fault_count: int
    access_faults: tuple[AccessFault, ...] = ()
    index_faults: tuple[IndexFault, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A run of bytes of one buffer before and after a launch.

    offset_bytes is from the buffer's base, negative in the workspace and red zone in front of it.
    """

    offset_bytes: int
    before: Bytes
    after: Bytes


@dataclass(frozen=True)
class Around:
    """What lay around the buffers of a launch, all of them together.

    guarded_bytes    of buffers and workspaces that end or begin at memory which nobody may touch
    red_zone_bytes   of red zones, which are compared
    read_only_bytes  of buffers that were mapped read-only
    poisoned_bytes   that AddressSanitizer was told nobody may touch
    """

    guarded_bytes: int = 0
    red_zone_bytes: int = 0
    read_only_bytes: int = 0
    poisoned_bytes: int = 0

    def __add__(self, other: Around) -> Around:
        return Around(
            self.guarded_bytes + other.guarded_bytes,
            self.red_zone_bytes + other.red_zone_bytes,
            self.read_only_bytes + other.read_only_bytes,
            self.poisoned_bytes + other.poisoned_bytes,
        )


@dataclass(frozen=True)
class Launch:
    """One launch.

    fill       which of the two fills the memory held
    status     what the launcher returned, `message` its sentence
    chunks     for each buffer every run that the launch may have changed, red zones included, and
               of one that is written in place every run that it may read or write; by offset, none
               overlap; bytes outside all chunks are known to be unchanged. Of several launches in
               a row into the same memory they tell what all of them changed so far.
    examined_bytes  memory known to be unchanged or in chunks, all buffers and red zones together
    record     of a checked build; None from any other
    around     its buffers, what memory there was
    """

    fill: int
    status: Status
    message: str
    chunks: Mapping[str, tuple[Chunk, ...]]
    examined_bytes: int
    record: CheckRecord | None = None
    around: Around = Around()


@dataclass(frozen=True)
class Moved:
    """Runs of a destination that a related plan writes elsewhere.

    begins, new_begins  int64 [n], byte offsets from the destination's base in both plans
    size_bytes          of a run
    """

    begins: npt.NDArray[np.int64]
    new_begins: npt.NDArray[np.int64]
    size_bytes: int


@dataclass(frozen=True)
class RelatedPlan:
    """The same payload, seen by a launch in another way that must not change its output.

    expectation  of the plan; only its footprint is used: to place it and to check accesses
    change       what is different, in a few words: "pages renamed 3->0"
    moved        by destination, what is written elsewhere, and is then all that is compared of it;
                 any other destination is the same at every offset
    order        of CTAs and threads; one that is not forward is for host objects of CUDA source
    in_a_row     which launch it is since memory was filled; from the second on it finds what the
                 related launch before it, one of the same plan, has left
    """

    plan: Plan
    expectation: Expectation
    change: str
    moved: Mapping[str, tuple[Moved, ...]] = field(default_factory=dict)
    order: LaunchOrder = LaunchOrder()
    in_a_row: int = 1


@dataclass(frozen=True)
class Related:
    """A launch of a related plan, with fill 0. relation: the name of its judgement."""

    relation: str
    derived: RelatedPlan
    launch: Launch


@dataclass(frozen=True)
class Compilation:
    """What is compiled for one launch, by its compilation key. One of a group of launches between
    which nothing may be compiled anew.

    varies  argument in which the launches of the group differ; "shape" if in all that follow the
            batch
    value   of it in this launch, in words
    key     parameter of the kernel -> what of it is in the key: "i64", "the value 1"
    """

    varies: str
    value: str
    key: Mapping[str, str]


@dataclass(frozen=True)
class DeathAccess:
    """The access that a worker died of.

    buffer        the one beside it; "" if there is none
    offset_bytes  from its base, or from 0; None if the address is not known
    memory_bytes  of it, workspace behind it included
    is_write      None if that is not known
    where         "kernels/operations/x.cu:88", "" if that is not known
    hole          (begin, end) of the stretch of that buffer, from its base, in which no byte is
                  legal and which nobody may touch; None if it was in none
    mapped        (begin, end) of that buffer's region, from its base: red zones and workspaces
                  included; outside of it nobody may touch anything. None: only the buffer is known
    """

    buffer: str
    offset_bytes: int | None
    memory_bytes: int
    is_write: bool | None
    where: str
    hole: tuple[int, int] | None = None
    mapped: tuple[int, int] | None = None


@dataclass(frozen=True)
class Death:
    """How a worker ended instead of answering.

    how is the short fixed name ("SIGSEGV", "illegal memory access", "exit status 3"), detail the
    rest of what is known; later: not before its launches had come back, and were judged; launch:
    in which it was, "" in the first, or later; is_own: whether that is of the case's own plan.
    """

    how: str
    detail: str = ""
    access: DeathAccess | None = None
    later: bool = False
    launch: str = ""
    is_own: bool = True


@dataclass(frozen=True)
class Observation:
    """backend is "host" or "cuda"; build the flags of the object: "checked", "release", ...;
    related the launches that the relations of the case ask for, where they apply;
    compilations what is compiled just in time, for which launches, where anything is."""

    backend: str
    build: str
    launches: tuple[Launch, ...] = ()
    death: Death | None = None
    layers: Mapping[str, str] = field(default_factory=dict)
    related: tuple[Related, ...] = ()
    compilations: tuple[Compilation, ...] = ()

    @property
    def build_flags(self) -> frozenset[str]:
        """As judgements are asked about them: see `flags_of`."""
        return flags_of(self.backend, self.build)


def flags_of(backend: str, build: str) -> frozenset[str]:
    """Flags of an object: those of its build, and "cuda" for one that runs there."""
    return frozenset(build.split(",")) | ({backend} & {"cuda"})
