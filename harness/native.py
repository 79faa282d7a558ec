"""A built object behind the C ABI: loading it, marshalling arguments, launching, reading records.

Used inside a worker only; a process that has loaded a subject may die of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cffi
import numpy as np

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.objects import Store
from pagefuzz.harness.own_process import kept_intact, restore_arithmetic
from pagefuzz.harness.sources import source_path
from pagefuzz.harness.subjects import parse_abi
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import (
    AccessFault,
    CheckRecord,
    Compilation,
    IndexFault,
    Site,
    Status,
)

ABI_VERSION = 1

_FLAG_NAMES = (
    "cuda",
    "checked",
    "ubsan",
    "asan",
    "coverage",
    "inject",
)  # enum pf_build_flag, bit by bit
_ACCESS_KINDS = ("read", "write", "atomic")  # enum pf_access_kind
_INDEX_OPERATIONS = ("+", "-", "*", "<<", "neg", "/", "narrow")  # enum pf_index_operation


#: A line of a source in a launcher's sentence.
_PLACE = re.compile(r"\b([\w-]+\.cuh?|[\w-]+\.h)(:\d+)\b")

#: What a `BuiltObject` asks cffi for by name, beside the struct of its arguments.
_TYPES = (
    "pf_message *",
    "pf_permissions[]",
    "pf_interval *",
    "pf_check_record *",
    "pf_fault *",
    "void *",
)


def parse_types(source: Path, operation: str) -> None:
    """Parses ahead what loading an object of this source needs, for the processes that are forked
    from this one. Raises `CannotCheckError`."""
    ffi = parse_abi(source)
    struct = f"pf_{operation}_args"
    for name in (*_TYPES, struct, f"{struct} *"):
        try:
            ffi.typeof(name)
        except (cffi.CDefError, cffi.FFIError) as error:
            raise CannotCheckError(f"{source}: its ABI has no {name}: {error}") from None


class BuiltObject:
    """One loaded shared object and one launcher in it.

    flags  what it was built as: a subset of "cuda" and `build.FLAGS`
    """

    def __init__(self, path: Path, source: Path, operation: str, symbol: str) -> None:
        """`source` is the .cu whose ABI fragment the object was built from.

        Raises `CannotCheckError` if it cannot be loaded, is of another ABI or lacks the launcher.
        """
        self._ffi = parse_abi(source)
        self.path = path
        try:
            self._library: Any = self._ffi.dlopen(str(path), self._ffi.RTLD_NOW)
        except OSError as error:
            why = str(error).partition("  Additionally")[0]  # where else cffi has looked
            raise CannotCheckError(
                f"cannot load the built object: {why.rstrip('.')}; if it is damaged, remove it, "
                "and it is built again"
            ) from None
        restore_arithmetic()  # -ffast-math makes loading it flush subnormal numbers to zero
        if (version := self._function("pf_abi_version")()) != ABI_VERSION:
            raise CannotCheckError(f"{path} has ABI version {version}, not {ABI_VERSION}")
        bits = self._function("pf_build_flags")()
        self.flags = frozenset(name for i, name in enumerate(_FLAG_NAMES) if bits >> i & 1)
        self._launcher = self._function(symbol)
        self._struct = f"pf_{operation}_args"
        self._args = self._ffi.new(f"{self._struct} *")
        self._message = self._ffi.new("pf_message *")
        self._fields = {
            name: field.type.cname for name, field in self._ffi.typeof(self._struct).fields
        }

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, name)
        except AttributeError:
            raise CannotCheckError(f"{self.path} has no function {name}") from None

    @property
    def keeps_access_record(self) -> bool:
        return "checked" in self.flags

    @property
    def keeps_record(self) -> bool:
        return bool(self.flags & {"checked", "ubsan"})

    def marshal(self, plan: Plan, addresses: Mapping[str, int], stream: int = 0) -> None:
        """Writes the plan's arguments into the args struct, field by field, by name.

        `addresses` holds the base of every buffer; 0 for one without memory. Raises `CaseError`
        for a number that its C field cannot hold, `CannotCheckError` for a field nobody knows.
        """
        args = self._args
        for name, kind in self._fields.items():
            if name == "struct_bytes":
                args.struct_bytes = self._ffi.sizeof(self._struct)
            elif name == "stream":
                args.stream = self._ffi.cast("void *", stream)
            elif kind == "pf_array" and name in plan.buffers:
                buffer, array = plan.buffers[name], getattr(args, name)
                address = 0 if buffer.is_null else addresses[name]
                array.data = self._ffi.cast("void *", address)
                array.extent_bytes = buffer.extent_bytes
                for part in ("dtype", "rank"):
                    try:
                        setattr(array, part, getattr(buffer, part))
                    except OverflowError:
                        raise CaseError(
                            f"{name}.{part}={getattr(buffer, part)} must fit into 32 bits"
                        ) from None
            elif kind == "int64_t" and name in plan.arguments:
                setattr(args, name, plan.arguments[name])
            else:
                raise CannotCheckError(
                    f"field {name} ({kind}) of {self._struct} is no buffer or size of the operation"
                )

    def marshalled(self) -> dict[str, int | tuple[int, int, int, int]]:
        """The args struct as it would be passed: an array is (data, extent_bytes, dtype, rank)."""
        out: dict[str, int | tuple[int, int, int, int]] = {}
        for name, kind in self._fields.items():
            value = getattr(self._args, name)
            if kind == "pf_array":
                data = int(self._ffi.cast("intptr_t", value.data))
                out[name] = (data, value.extent_bytes, value.dtype, value.rank)
            else:
                out[name] = int(self._ffi.cast("intptr_t", value))
        return out

    def launch(self) -> tuple[Status, str]:
        """Calls the launcher with the marshalled arguments; what it returned, and its sentence."""
        self._message.text[0] = b"\0"
        code = self._call()
        text = self._ffi.string(self._message.text).decode("utf-8", "replace")
        # The emulation knows a source by the end of its path.
        text = _PLACE.sub(lambda found: f"{source_path(found[1])}{found[2]}", text)
        try:
            return Status(code), text
        except ValueError:
            raise CannotCheckError(
                f"the launcher returned {code}, which is no pf_status ({text or 'no message'})"
            ) from None

    def _call(self) -> int:
        if "cuda" in self.flags:  # the driver has threads of its own
            return int(self._launcher(self._args, self._message))
        with kept_intact():
            return int(self._launcher(self._args, self._message))

    def begin_check(self, plan: Plan, expectation: Expectation, store: Store) -> None:
        """Installs what the contract permits as the permissions of the next launch."""
        footprints = [expectation.footprint(name) for name in plan.buffers]
        sets = [s for f in footprints for s in (f.may_read, f.writable)]
        intervals = np.concatenate(
            [np.stack((s.begin, s.end), axis=1) for s in sets] or [np.empty((0, 2), np.int64)]
        )
        address = store(np.ascontiguousarray(intervals).ravel())
        permissions = self._ffi.new("pf_permissions[]", len(footprints))
        for index, one in enumerate(sets):
            pointer = self._ffi.cast("pf_interval *", address if len(one) else 0)
            address += 16 * len(one)
            if index % 2 == 0:
                permissions[index // 2].read, permissions[index // 2].read_count = pointer, len(one)
            else:
                permissions[index // 2].write = pointer
                permissions[index // 2].write_count = len(one)
        self._require(self._library.pf_check_begin(permissions, len(footprints)), "pf_check_begin")

    def end_check(self, plan: Plan) -> CheckRecord:
        """Waits for the launch and reads what the build recorded of it."""
        record = self._ffi.new("pf_check_record *")
        self._require(self._library.pf_check_end(record), "pf_check_end")
        names = plan.buffer_names()
        return CheckRecord(
            accesses=record.accesses,
            accessed_bytes=record.accessed_bytes,
            operations=record.operations,
            access_fault_count=record.access_fault_count,
            index_fault_count=record.index_fault_count,
            access_faults=tuple(
                self._access_fault(record.access_faults[i], names)
                for i in range(record.access_faults_kept)
            ),
            index_faults=tuple(
                self._index_fault(record.index_faults[i]) for i in range(record.index_faults_kept)
            ),
        )

    def compilations(self) -> tuple[Compilation, ...]:
        """Nothing is compiled for a launch."""
        return ()

    def set_order(self, order: int, seed: int) -> None:
        """Order of CTAs and threads for the launches that follow (`enum pf_order`); host only:
        raises `NotAcceptedError` elsewhere."""
        self._require(self._library.pf_set_order(order, seed), "pf_set_order")

    def inject(
        self, buffer: int, address: int, offset_bytes: int, size_bytes: int, kind: str
    ) -> None:
        """Makes an access the last one of every launch from now on (builds with "inject").

        buffer, address  position of the buffer among the arguments, and where it lies
        offset_bytes     of the access, from there; kind is "read" or "write"
        """
        one = self._ffi.new("pf_injection *")
        one.data = self._ffi.cast("void *", address)
        one.offset_bytes, one.size_bytes = offset_bytes, size_bytes
        one.kind, one.buffer = _ACCESS_KINDS.index(kind), buffer
        self._require(self._library.pf_inject(one), "pf_inject")

    def catch_faults(self, address: int) -> None:
        """From now on a fault of memory protection is noted at `address` as a `pf_fault`; objects
        that cannot (AddressSanitizer's, CUDA's, those of others) do without."""
        catch = getattr(self._library, "pf_catch_faults", None)
        if catch and catch(self._ffi.cast("pf_fault *", address)) == Status.LAUNCH_FAILED:
            raise CannotCheckError("no handler for SIGSEGV could be installed")

    def dump_coverage(self) -> None:
        """Writes what gcov counted so far (coverage builds)."""
        self._require(self._library.pf_coverage_dump(), "pf_coverage_dump")

    def scan(self, data: int, size_bytes: int, chunk_bytes: int, value: int, flags: int) -> None:
        """Flags each chunk of device memory that holds a byte other than `value` (CUDA builds)."""
        cast = self._ffi.cast
        self._require(
            self._library.pf_scan(
                cast("void *", data),
                size_bytes,
                chunk_bytes,
                value,
                cast("uint8_t *", flags),
                self._ffi.NULL,
            ),
            "pf_scan",
        )

    def _require(self, status: int, what: str) -> None:
        if status != Status.OK:
            raise NotAcceptedError(f"{what} of {self.path.name} returned status {status}")

    def _access_fault(self, fault: Any, names: tuple[str, ...]) -> AccessFault:
        return AccessFault(
            sequence=fault.sequence,
            buffer=names[fault.buffer],
            offset_bytes=fault.offset_bytes,
            size_bytes=fault.size_bytes,
            kind=_ACCESS_KINDS[fault.kind],
            site=self._site(fault.site),
        )

    def _index_fault(self, fault: Any) -> IndexFault:
        operands = (fault.a, fault.b, fault.result)
        operation = _INDEX_OPERATIONS[fault.operation]
        if fault.bits == 64 and not fault.is_signed and operation != "narrow":
            # Unsigned 64-bit values travel as their bit pattern.
            operands = tuple(value % 2**64 for value in operands)
        return IndexFault(
            sequence=fault.sequence,
            operation=operation,
            type_name=f"{'int' if fault.is_signed else 'uint'}{fault.bits}",
            a=operands[0],
            b=operands[1],
            result=operands[2],
            site=self._site(fault.site),
        )

    def _site(self, site: Any) -> Site:
        block, thread = tuple(site.block), tuple(site.thread)
        name = self._ffi.string(site.file).decode("utf-8", "replace")
        return Site(source_path(name), site.line, block, thread)


class NotAcceptedError(CannotCheckError):
    """The object refused a request of the harness; on CUDA a fault of the launch may be why."""
