"""Loads objects of the kernels tree with cffi and launches them on plain NumPy buffers."""

from __future__ import annotations

import itertools
import mmap
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cffi
import numpy as np
import numpy.typing as npt
import pytest

from pagefuzz.harness.build import KERNELS, BuildSpec, build

CP_GATHER_CACHE = KERNELS / "operations" / "cp_gather_cache.cu"
ABI = (KERNELS / "abi" / "common.h").read_text()

#: Buffer ids of cp_gather_cache.
SRC, DST, BLOCK_TABLE, STARTS, SEQ_STARTS, COUNTS = range(6)

OK, REFUSED, LAUNCH_FAILED, BARRIER_FAULT = range(4)
U8, U16, U32, U64, I32, I64, F16, BF16, F32, E4M3, E5M2 = range(1, 12)

Intervals = Sequence[tuple[int, int]]


def fragment(source: str) -> str:
    """The ABI fragment of an operation's source."""
    found = re.search(r"// pagefuzz-abi: begin\n(.*?)// pagefuzz-abi: end", source, re.DOTALL)
    return found[1] if found else ""


@dataclass(frozen=True)
class Record:
    """pf_check_record in Python."""

    accesses: int
    accessed_bytes: int
    operations: int
    access_fault_count: int
    index_fault_count: int
    access_faults: tuple[Any, ...]
    index_faults: tuple[Any, ...]


@dataclass
class Object:
    """A loaded object: `ffi` knows the common ABI and the source's fragment."""

    ffi: cffi.FFI
    lib: Any

    def begin(self, permissions: dict[int, tuple[Intervals, Intervals]], count: int = 6) -> None:
        """Installs (readable, writable) byte intervals by buffer id."""
        array = self.ffi.new("pf_permissions[]", count)
        keep = []
        for buffer, sets in permissions.items():
            for name, intervals in zip(("read", "write"), sets, strict=True):
                cells = self.ffi.new("pf_interval[]", [tuple(pair) for pair in intervals])
                keep.append(cells)
                setattr(array[buffer], name, cells)
                setattr(array[buffer], f"{name}_count", len(intervals))
        assert self.lib.pf_check_begin(array, count) == OK
        self._permissions = (array, keep)

    def end(self) -> Record:
        record = self.ffi.new("pf_check_record *")
        assert self.lib.pf_check_end(record) == OK
        return Record(
            record.accesses,
            record.accessed_bytes,
            record.operations,
            record.access_fault_count,
            record.index_fault_count,
            tuple(self._fault(f) for f in record.access_faults[0 : record.access_faults_kept]),
            tuple(self._fault(f) for f in record.index_faults[0 : record.index_faults_kept]),
        )

    def _fault(self, fault: Any) -> Any:
        names = [
            name for name, _ in self.ffi.typeof(fault).fields if name not in ("reserved", "site")
        ]
        values = {name: getattr(fault, name) for name in names}
        values["file"] = self.ffi.string(fault.site.file).decode()
        values["line"] = fault.site.line
        values["block"] = tuple(fault.site.block)
        values["thread"] = tuple(fault.site.thread)
        return type("Fault", (), {**values, "__repr__": lambda _: repr(values)})()


@cache
def load(source: Path, flags: str = "checked", twin: Path | None = None) -> Object:
    """Builds and loads a source, or a twin of it, for the host."""
    path = build(source, BuildSpec.parse("host", flags), twin=twin)
    ffi = cffi.FFI()
    ffi.cdef(ABI)
    ffi.cdef(fragment(source.read_text()))
    return Object(ffi, ffi.dlopen(str(path)))


@dataclass
class Case:
    """Arguments of one cp_gather_cache launch; strides that are None are dense.

    `src`, `dst`: uint8 backing memory, made on demand; `offsets`: bytes of a base past a multiple
    of 64.
    """

    starts: Sequence[int]
    table: Sequence[Sequence[int]]
    num_tokens: int
    page_size_tokens: int
    num_pages: int
    entry_bytes: int
    element_bytes: int = 1
    seq_starts: Sequence[int] | None = None
    has_terminal: int = 1
    counts: bool = True
    dst_rows: int | None = None
    table_row_stride: int | None = None
    page_stride_bytes: int | None = None
    slot_stride_bytes: int | None = None
    dst_row_stride_bytes: int | None = None
    src_offset: int = 0
    dst_offset: int = 0


def _aligned(size: int, offset: int, fill: npt.NDArray[np.uint8] | None = None) -> Any:
    """uint8 [size] whose address is `offset` past a multiple of 64."""
    raw = np.zeros(size + 128, np.uint8)
    begin = -raw.ctypes.data % 64 + offset
    out = raw[begin : begin + size]
    if fill is not None:
        out[:] = fill
    return out


def sparse(size: int) -> npt.NDArray[np.uint8]:
    """uint8 [size] of address space: memory is taken for the pages that are touched."""
    no_reserve = 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


class Launch:
    """A case laid out in memory, ready to be launched and looked at."""

    def __init__(self, loaded: Object, case: Case, seed: int = 0) -> None:
        self.object, self.case = loaded, case
        ffi = loaded.ffi
        rng = np.random.default_rng(seed)
        c = case
        requests = len(c.starts) - c.has_terminal
        width = len(c.table[0]) if c.table else 0
        self.width = width
        self.bt = width if c.table_row_stride is None else c.table_row_stride
        self.ce = c.entry_bytes if c.slot_stride_bytes is None else c.slot_stride_bytes
        self.cb = (
            c.page_size_tokens * self.ce if c.page_stride_bytes is None else c.page_stride_bytes
        )
        self.d0 = c.entry_bytes if c.dst_row_stride_bytes is None else c.dst_row_stride_bytes
        rows = c.num_tokens if c.dst_rows is None else c.dst_rows
        src_bytes = (
            (c.num_pages - 1) * self.cb + (c.page_size_tokens - 1) * self.ce + c.entry_bytes
            if c.num_pages
            else 0
        )
        dst_bytes = (rows - 1) * self.d0 + c.entry_bytes if rows else 0
        self.src = _aligned(src_bytes, c.src_offset, rng.integers(0, 256, src_bytes, np.uint8))
        self.dst = _aligned(dst_bytes, c.dst_offset, rng.integers(0, 256, dst_bytes, np.uint8))
        cells = max((requests - 1) * self.bt + width, 0) if requests and width else 0
        self.table = np.full(cells, 0x7FFFFFFF, np.int32)
        for request, row in enumerate(c.table):
            if cells:
                self.table[request * self.bt : request * self.bt + width] = row
        self.starts = np.array(c.starts, np.int32)
        self.seq_starts = None if c.seq_starts is None else np.array(c.seq_starts, np.int32)
        self.counts = np.zeros(2, np.int64) if c.counts else None
        dtype = {1: U8, 2: U16, 4: U32, 8: U64}[c.element_bytes]
        args = ffi.new("pf_cp_gather_cache_args *")
        args.struct_bytes = ffi.sizeof("pf_cp_gather_cache_args")
        for name, array, code, rank in (
            ("src", self.src, dtype, 3),
            ("dst", self.dst, dtype, 2),
            ("block_table", self.table, I32, 2),
            ("starts", self.starts, I32, 1),
            ("seq_starts", self.seq_starts, I32, 1),
            ("counts", self.counts, I64, 1),
        ):
            field = getattr(args, name)
            if array is not None:
                field.data = ffi.cast("void *", array.ctypes.data)
                field.extent_bytes = array.nbytes
                field.dtype, field.rank = code, rank
        args.num_requests, args.num_tokens = requests, c.num_tokens
        args.page_size_tokens, args.num_pages = c.page_size_tokens, c.num_pages
        args.table_width, args.table_row_stride = width, self.bt
        args.page_stride_bytes, args.slot_stride_bytes = self.cb, self.ce
        args.dst_rows, args.dst_row_stride_bytes = rows, self.d0
        args.entry_bytes, args.element_bytes = c.entry_bytes, c.element_bytes
        args.has_terminal = c.has_terminal
        self.args = args
        self.message = ffi.new("pf_message *")

    def replace(self, name: str, array: npt.NDArray[Any]) -> None:
        """Puts another array in place of a buffer."""
        setattr(self, name, array)
        field = getattr(self.args, name)
        field.data = self.object.ffi.cast("void *", array.ctypes.data)
        field.extent_bytes = array.nbytes

    def run(self, schedule: str) -> int:
        name = f"pf_cp_gather_cache_{schedule.replace('-', '_')}"
        status: int = getattr(self.object.lib, name)(self.args, self.message)
        return status

    @property
    def text(self) -> str:
        return bytes(self.object.ffi.string(self.message.text)).decode()


@dataclass
class Wanted:
    """What the contract says of a launch, by the loop of contracts.md."""

    dst: npt.NDArray[np.uint8]
    counts: tuple[int, int]
    permissions: dict[int, tuple[Intervals, Intervals]]


def merged(intervals: set[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def wanted(launch: Launch) -> Wanted:
    """Row by row. Starts must not decrease."""
    c = launch.case
    dst = launch.dst.copy()
    padding, skipped = set(), set()
    src_read, dst_write, table_read = set(), set(), set()
    requests = len(c.starts) - c.has_terminal
    bounds = [min(max(start, 0), c.num_tokens) for start in c.starts]
    if not c.has_terminal:
        bounds.append(c.num_tokens)
    for r in range(requests):
        seq_start = c.seq_starts[r] if c.seq_starts is not None else 0
        for row in range(bounds[r], bounds[r + 1]):
            if seq_start < 0:
                skipped.add((r, -1))
                continue
            page, slot = divmod(seq_start + row - c.starts[r], c.page_size_tokens)
            if page >= launch.width:
                skipped.add((r, page))
                continue
            cell = r * launch.bt + page
            table_read.add((cell * 4, cell * 4 + 4))
            physical = int(launch.table[cell])
            if physical == -1:
                padding.add((r, page))
            elif not 0 <= physical < c.num_pages:
                skipped.add((r, page))
            else:
                source = physical * launch.cb + slot * launch.ce
                target = row * launch.d0
                src_read.add((source, source + c.entry_bytes))
                dst_write.add((target, target + c.entry_bytes))
                dst[target : target + c.entry_bytes] = launch.src[source : source + c.entry_bytes]
    has_work = requests > 0 and c.num_tokens > 0
    pair = [(0, 16)] if c.counts else []
    return Wanted(
        dst,
        (len(padding), len(skipped)),
        {
            SRC: (merged(src_read), []),
            DST: ([], merged(dst_write)),
            BLOCK_TABLE: (merged(table_read), []),
            STARTS: ([(0, 4 * len(c.starts))] if has_work else [], []),
            SEQ_STARTS: (
                [(0, 4 * requests)] if c.seq_starts is not None and has_work else [],
                [],
            ),
            COUNTS: (pair, pair),
        },
    )


@pytest.fixture(scope="session")
def small_source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Writes a .cu with the given name and text, after the includes every kernel has."""
    numbers = itertools.count()

    def write(name: str, text: str) -> Path:
        folder = tmp_path_factory.mktemp(f"source{next(numbers)}")
        path = folder / name
        path.write_text(text)
        return path

    return write
