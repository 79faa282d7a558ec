"""The binding of a built object: every argument arrives in its field, every complaint is clear."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.native import BuiltObject
from pagefuzz.oracles.case import Case, CaseError, Placement
from pagefuzz.oracles.layout import Image, Plan, PlannedBuffer, Role
from pagefuzz.oracles.observation import Status

OPERATION = "cp_gather_cache"
BUFFERS = ("src", "dst", "block_table", "starts", "seq_starts", "counts")
SIZES = (
    "num_requests",
    "num_tokens",
    "page_size_tokens",
    "num_pages",
    "table_width",
    "table_row_stride",
    "page_stride_bytes",
    "slot_stride_bytes",
    "dst_rows",
    "dst_row_stride_bytes",
    "entry_bytes",
    "element_bytes",
    "has_terminal",
)


def numbered_plan() -> Plan:
    """Every field of every argument has a value that occurs nowhere else."""
    buffers = {
        name: PlannedBuffer(
            name, Role.SOURCE, 0, 2**40 + i, 100 + i, 200 + i, Placement(), False, Image.empty()
        )
        for i, name in enumerate(BUFFERS)
    }
    arguments = {name: (-1) ** i * (2**50 + i) for i, name in enumerate(SIZES)}
    return Plan(Case(OPERATION, arguments), arguments, buffers)


ADDRESSES = {name: 4096 * (1 + i) for i, name in enumerate(BUFFERS)}


@pytest.fixture
def echo(misbehaving: Path, source: Path) -> BuiltObject:
    return BuiltObject(misbehaving, source, OPERATION, f"pf_{OPERATION}_token")


@pytest.fixture
def source() -> Path:
    from pagefuzz.harness.subjects import KERNELS

    return KERNELS / "operations" / f"{OPERATION}.cu"


def test_every_field_arrives(echo: BuiltObject) -> None:
    """The C side of the launcher finds each buffer part, size and the stream where it belongs."""
    plan = numbered_plan()
    echo.marshal(plan, ADDRESSES, stream=77)
    status, said = echo.launch()
    arrays = [
        f"{ADDRESSES[b.name]},{b.extent_bytes},{b.dtype},{b.rank}" for b in plan.buffers.values()
    ]
    assert status is Status.LAUNCH_FAILED
    assert said.split() == ["1", *arrays, *map(str, plan.arguments.values()), "77"]


def test_a_null_buffer_passes_a_null_pointer(echo: BuiltObject) -> None:
    """A buffer marked null has no address in the launch even where it has memory."""
    plan = numbered_plan()
    buffers = {**plan.buffers, "dst": replace(plan.buffers["dst"], is_null=True)}
    echo.marshal(replace(plan, buffers=buffers), ADDRESSES)
    assert echo.launch()[1].split()[2].startswith("0,")


def test_a_number_too_wide_for_its_field_is_refused(echo: BuiltObject) -> None:
    """A dtype that does not fit into 32 bits is an error of the case, not a truncated value."""
    plan = numbered_plan()
    buffers = {**plan.buffers, "src": replace(plan.buffers["src"], dtype=2**31)}
    with pytest.raises(CaseError, match=r"src\.dtype=2147483648 must fit into 32 bits"):
        echo.marshal(replace(plan, buffers=buffers), ADDRESSES)


def test_a_field_that_nobody_knows_cannot_be_bound(echo: BuiltObject) -> None:
    """A size that the plan lacks is reported by name."""
    plan = numbered_plan()
    fewer = {k: v for k, v in plan.arguments.items() if k != "dst_rows"}
    with pytest.raises(CannotCheckError, match=r"field dst_rows \(int64_t\)"):
        echo.marshal(replace(plan, arguments=fewer), ADDRESSES)


def test_a_status_that_does_not_exist_cannot_be_judged(misbehaving: Path, source: Path) -> None:
    """A launcher that returns 77 breaks the ABI."""
    subject = BuiltObject(misbehaving, source, OPERATION, f"pf_{OPERATION}_page")
    plan = numbered_plan()
    subject.marshal(replace(plan, arguments={**plan.arguments, "num_pages": 108}), ADDRESSES)
    with pytest.raises(CannotCheckError, match="returned 77, which is no pf_status"):
        subject.launch()


def test_an_object_of_another_abi_is_not_loaded(compile_misbehaving, source: Path) -> None:
    """The ABI version is compared before anything else is called."""
    with pytest.raises(CannotCheckError, match="has ABI version 99, not 1"):
        BuiltObject(compile_misbehaving("-DWRONG_ABI"), source, OPERATION, "pf_x")


def test_an_object_without_the_launcher_is_not_loaded(misbehaving: Path, source: Path) -> None:
    """A missing symbol and a missing file are one clear sentence each."""
    with pytest.raises(CannotCheckError, match="has no function pf_cp_gather_cache_page_as_merged"):
        BuiltObject(misbehaving, source, OPERATION, f"pf_{OPERATION}_page_as_merged")
    with pytest.raises(CannotCheckError, match="cannot load the built object"):
        BuiltObject(Path("nowhere.so"), source, OPERATION, "pf_x")


def test_a_release_object_keeps_no_record(echo: BuiltObject) -> None:
    """An object that refuses permissions says so; its flags tell beforehand."""
    from pagefuzz.oracles.expectation import Expectation
    from pagefuzz.oracles.verdict import CaseClass

    assert not echo.keeps_record
    with pytest.raises(CannotCheckError, match=r"pf_check_begin of misbehaving\.so"):
        echo.begin_check(
            numbered_plan(), Expectation(CaseClass.REFUSED), lambda v: int(np.asarray(v).size)
        )


def test_a_scan_flags_chunks_that_hold_another_value(echo: BuiltObject) -> None:
    """Data, size, chunk size, value and flags arrive where they belong; a refusal is an error."""
    data, flags = np.full(100, 7, np.uint8), np.zeros(7, np.uint8)
    data[[33, 99]] = 0
    echo.scan(data.ctypes.data, data.size, 16, 7, flags.ctypes.data)
    assert flags.tolist() == [0, 0, 1, 0, 0, 0, 1]
    with pytest.raises(CannotCheckError, match=r"pf_scan .* returned status 1"):
        echo.scan(data.ctypes.data, data.size, 16, 256, flags.ctypes.data)
