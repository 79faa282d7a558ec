"""The declarations of the CUDA driver, against the header of the toolkit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pagefuzz.harness.build import BuildSpec, build, compiler
from pagefuzz.harness.memory import driver

TOUCH = Path(__file__).parents[1] / "cuda" / "touch.cu"

_STRUCTS = {
    "CUmemAllocationProp": (
        *("type", "requestedHandleTypes", "location", "location.id", "win32HandleMetaData"),
        *("allocFlags", "allocFlags.usage", "allocFlags.reserved"),
    ),
    "CUmemAccessDesc": ("location", "location.type", "location.id", "flags"),
}
_CONSTANTS = {
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": driver._VIRTUAL_MEMORY,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": driver._MAJOR,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": driver._MINOR,
    "CU_MEM_ALLOCATION_TYPE_PINNED": driver._PINNED,
    "CU_MEM_LOCATION_TYPE_DEVICE": driver._ON_DEVICE,
    "CU_MEM_ACCESS_FLAGS_PROT_READ": driver._READ,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": driver._READ_WRITE,
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM": driver._MINIMUM,
    "CUDA_ERROR_OUT_OF_MEMORY": driver._OUT_OF_MEMORY,
    "CUDA_ERROR_INVALID_VALUE": driver._INVALID_VALUE,
    "CUDA_ERROR_ILLEGAL_ADDRESS": next(
        code for code, name in driver._FAULTS.items() if name == "illegal memory access"
    ),
}


def test_structs_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    """Sizes, offsets and values, as static assertions that nvcc compiles."""
    ffi = driver._ffi
    checks = [f"static_assert({name} == {value});" for name, value in _CONSTANTS.items()]
    for struct, fields in _STRUCTS.items():
        checks.append(f"static_assert(sizeof({struct}) == {ffi.sizeof(struct)});")
        for name in fields:
            offset = ffi.offsetof(struct, *name.split("."))
            checks.append(f"static_assert(offsetof({struct}, {name}) == {offset});")
    source = tmp_path / "checks.cpp"
    source.write_text("#include <cstddef>\n#include <cuda.h>\n" + "\n".join(checks) + "\n")
    words = [*compiler("cuda"), "-std=c++20", "-c", str(source), "-o", os.devnull]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_touching_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only runs on a GPU is at least built without one."""
    monkeypatch.setenv("PAGEFUZZ_CUDA_ARCH", "90")
    assert build(TOUCH, BuildSpec("cuda", frozenset())).exists()
