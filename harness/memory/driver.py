"""The few functions of the CUDA driver that the harness needs, through cffi: no toolkit, no torch.

Loaded in workers and probes only; the process that runs Hypothesis never touches CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cffi

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.arena import DeviceFaultError, DoesNotFitError

_ffi = cffi.FFI()
_ffi.cdef(
    """
    typedef int CUdevice;
    typedef struct CUctx_st *CUcontext;
    typedef struct CUstream_st *CUstream;
    typedef unsigned long long CUdeviceptr;
    int cuInit(unsigned int flags);
    int cuDriverGetVersion(int *version);
    int cuDeviceGetCount(int *count);
    int cuDeviceGet(CUdevice *device, int ordinal);
    int cuDeviceGetName(char *name, int size, CUdevice device);
    int cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
    int cuDeviceTotalMem_v2(size_t *bytes, CUdevice device);
    int cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
    int cuCtxSetCurrent(CUcontext context);
    int cuCtxSynchronize(void);
    int cuMemAlloc_v2(CUdeviceptr *pointer, size_t size);
    int cuMemFree_v2(CUdeviceptr pointer);
    int cuMemGetInfo_v2(size_t *free, size_t *total);
    int cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t size, CUstream stream);
    int cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t size, CUstream stream);
    int cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count, CUstream stream);
    int cuGetErrorName(int error, const char **name);
    int cuGetErrorString(int error, const char **text);
    """
)

_OUT_OF_MEMORY = 2
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR

#: Errors that a launch leaves behind: they stick to the context, and only its end clears them.
_FAULTS = {
    700: "illegal memory access",
    702: "launch timeout",
    710: "device assertion",
    714: "hardware stack error",
    715: "illegal instruction",
    716: "misaligned address",
    717: "invalid address space",
    718: "invalid program counter",
    719: "launch failure",
}


@dataclass(frozen=True)
class DeviceProperties:
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    driver_cuda_version: str


class Driver:
    """The driver library; after `use_device` also one device's primary context."""

    def __init__(self) -> None:
        """Raises `CannotCheckError`: no driver library, or no device."""
        try:
            self._library: Any = _ffi.dlopen("libcuda.so.1")
        except OSError:
            raise CannotCheckError(
                "there is no GPU to check on: the NVIDIA driver library libcuda.so.1 is missing"
            ) from None
        if error := self._library.cuInit(0):
            raise CannotCheckError(
                f"there is no GPU to check on: cuInit says {self._error_text(error)}"
            )
        count = _ffi.new("int *")
        self._call("cuDeviceGetCount", count)
        if not count[0]:
            raise CannotCheckError("there is no GPU to check on: the driver lists no device")
        self._device = _ffi.new("CUdevice *")
        self._call("cuDeviceGet", self._device, 0)

    def properties(self) -> DeviceProperties:
        device = self._device[0]
        name, value = _ffi.new("char[]", 256), _ffi.new("int *")
        memory_bytes = _ffi.new("size_t *")
        self._call("cuDeviceGetName", name, 256, device)
        self._call("cuDeviceTotalMem_v2", memory_bytes, device)
        numbers = []
        for attribute in (_MAJOR, _MINOR):
            self._call("cuDeviceGetAttribute", value, attribute, device)
            numbers.append(value[0])
        self._call("cuDriverGetVersion", value)
        return DeviceProperties(
            name=_ffi.string(name).decode(),
            compute_capability=(numbers[0], numbers[1]),
            memory_bytes=int(memory_bytes[0]),
            driver_cuda_version=f"{value[0] // 1000}.{value[0] % 1000 // 10}",
        )

    def use_device(self) -> None:
        """Makes the primary context current, the one that the CUDA runtime in a subject uses."""
        context = _ffi.new("CUcontext *")
        self._call("cuDevicePrimaryCtxRetain", context, self._device[0])
        self._call("cuCtxSetCurrent", context[0])

    def allocate(self, size_bytes: int) -> int:
        """Raises `DoesNotFitError`."""
        pointer = _ffi.new("CUdeviceptr *")
        error = self._library.cuMemAlloc_v2(pointer, size_bytes)
        if error == _OUT_OF_MEMORY:
            raise DoesNotFitError(f"no {size_bytes:,} bytes of device memory are free")
        self._check("cuMemAlloc", error)
        return int(pointer[0])

    def free(self, pointer: int) -> None:
        self._call("cuMemFree_v2", pointer)

    def free_bytes(self) -> int:
        free, total = _ffi.new("size_t *"), _ffi.new("size_t *")
        self._call("cuMemGetInfo_v2", free, total)
        return int(free[0])

    def copy_in(self, target: int, source: Any) -> None:
        """Host array -> device. `source` is contiguous."""
        if source.nbytes:
            self._call("cuMemcpyHtoDAsync_v2", target, _address(source), source.nbytes, _ffi.NULL)

    def copy_out(self, target: Any, source: int) -> None:
        """Device -> host array. `target` is contiguous; complete after `synchronise`."""
        if target.nbytes:
            self._call("cuMemcpyDtoHAsync_v2", _address(target), source, target.nbytes, _ffi.NULL)

    def zero(self, target: int, size_bytes: int) -> None:
        if size_bytes:
            self._call("cuMemsetD8Async", target, 0, size_bytes, _ffi.NULL)

    def synchronise(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(function, getattr(self._library, function)(*arguments))

    def _check(self, function: str, error: int) -> None:
        """Raises `DeviceFaultError` for a fault of an earlier launch, `CannotCheckError` for
        anything else."""
        if not error:
            return
        said = f"{function.removesuffix('_v2')} says {self._error_text(error)}"
        if error in _FAULTS:
            raise DeviceFaultError(_FAULTS[error], said)
        raise CannotCheckError(said)

    def _error_text(self, error: int) -> str:
        name, text = _ffi.new("char **"), _ffi.new("char **")
        if self._library.cuGetErrorName(error, name):
            return f"error {error}"
        self._library.cuGetErrorString(error, text)
        return f"{_ffi.string(name[0]).decode()} ({_ffi.string(text[0]).decode()})"


def _address(array: Any) -> Any:
    return _ffi.cast("void *", array.ctypes.data)
