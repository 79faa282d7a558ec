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

    typedef unsigned long long CUmemGenericAllocationHandle;
    typedef struct { int type; int id; } CUmemLocation;
    typedef struct {
        int type;
        int requestedHandleTypes;
        CUmemLocation location;
        void *win32HandleMetaData;
        struct {
            unsigned char compressionType;
            unsigned char gpuDirectRDMACapable;
            unsigned short usage;
            unsigned char reserved[4];
        } allocFlags;
    } CUmemAllocationProp;
    typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
    int cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int option);
    int cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                            unsigned long long flags);
    int cuMemAddressFree(CUdeviceptr address, size_t size);
    int cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                    const CUmemAllocationProp *prop, unsigned long long flags);
    int cuMemRelease(CUmemGenericAllocationHandle handle);
    int cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                 CUmemGenericAllocationHandle handle, unsigned long long flags);
    int cuMemUnmap(CUdeviceptr address, size_t size);
    int cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access,
                       size_t count);

    typedef struct CUevent_st *CUevent;
    int cuEventCreate(CUevent *event, unsigned int flags);
    int cuEventDestroy_v2(CUevent event);
    int cuEventRecord(CUevent event, CUstream stream);
    int cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
    int cuGetErrorName(int error, const char **name);
    int cuGetErrorString(int error, const char **text);
    """
)

#: Physical memory is mapped in multiples of this.
GRANULE_BYTES = 2 * 2**20

_INVALID_VALUE, _OUT_OF_MEMORY = 1, 2
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED, _ON_DEVICE = 1, 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_READ, _READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_READ, _READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM

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
        self._properties = _ffi.new("CUmemAllocationProp *")  # of all physical memory; zeros else
        self._properties.type = _PINNED
        self._properties.location.type = _ON_DEVICE
        self._properties.location.id = self._device[0]

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
        """Makes the primary context current, the one that the CUDA runtime in a subject uses.

        Raises `CannotCheckError` if the device cannot map memory in granules."""
        context = _ffi.new("CUcontext *")
        self._call("cuDevicePrimaryCtxRetain", context, self._device[0])
        self._call("cuCtxSetCurrent", context[0])
        supported, granule = _ffi.new("int *"), _ffi.new("size_t *")
        self._call("cuDeviceGetAttribute", supported, _VIRTUAL_MEMORY, self._device[0])
        if not supported[0]:
            raise CannotCheckError("this GPU has no virtual memory management, no guards then")
        self._call("cuMemGetAllocationGranularity", granule, self._properties, _MINIMUM)
        if GRANULE_BYTES % granule[0]:
            raise CannotCheckError(
                f"this GPU maps memory in granules of {granule[0]:,} bytes, "
                f"not of {GRANULE_BYTES:,}"
            )

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

    def set_bytes(self, target: int, value: int, size_bytes: int) -> None:
        if size_bytes:
            self._call("cuMemsetD8Async", target, value, size_bytes, _ffi.NULL)

    def synchronise(self) -> None:
        self._call("cuCtxSynchronize")

    # Virtual memory. Addresses and sizes are multiples of `GRANULE_BYTES`.

    def reserve(self, size_bytes: int) -> int:
        """Address space in which nothing can be read or written. Raises `DoesNotFitError`."""
        address = _ffi.new("CUdeviceptr *")
        error = self._library.cuMemAddressReserve(address, size_bytes, GRANULE_BYTES, 0, 0)
        if error in (_OUT_OF_MEMORY, _INVALID_VALUE):  # the latter: beyond what there can be
            raise DoesNotFitError(f"no device address space for {size_bytes:,} bytes")
        self._check("cuMemAddressReserve", error)
        return int(address[0])

    def unreserve(self, address: int, size_bytes: int) -> None:
        """A whole reservation in which nothing is mapped any more."""
        self._call("cuMemAddressFree", address, size_bytes)

    def create(self, size_bytes: int) -> int:
        """A handle of physical memory, contents undefined. Raises `DoesNotFitError`."""
        handle = _ffi.new("CUmemGenericAllocationHandle *")
        error = self._library.cuMemCreate(handle, size_bytes, self._properties, 0)
        if error == _OUT_OF_MEMORY:
            raise DoesNotFitError(f"no {size_bytes:,} bytes of device memory are free")
        self._check("cuMemCreate", error)
        return int(handle[0])

    def release(self, handle: int) -> None:
        """The memory goes with its last mapping."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """The whole of a handle at an address that nothing is mapped to; nobody may touch it yet.

        One handle may be mapped at many addresses. Raises `DoesNotFitError`."""
        error = self._library.cuMemMap(address, size_bytes, 0, handle, 0)
        if error == _OUT_OF_MEMORY:
            raise DoesNotFitError("no device memory for page tables is free")
        self._check("cuMemMap", error)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Whole mappings that lie side by side."""
        self._call("cuMemUnmap", address, size_bytes)

    def allow(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """Opens whole mappings that lie side by side. Raises `DoesNotFitError`."""
        access = _ffi.new("CUmemAccessDesc *")
        access.location.type, access.location.id = _ON_DEVICE, self._device[0]
        access.flags = _READ_WRITE if writable else _READ
        error = self._library.cuMemSetAccess(address, size_bytes, access, 1)
        if error == _OUT_OF_MEMORY:
            raise DoesNotFitError("no device memory for page tables is free")
        self._check("cuMemSetAccess", error)

    # Times, on the default stream.

    def event(self) -> Any:
        """An event; `forget_event` ends it."""
        event = _ffi.new("CUevent *")
        self._call("cuEventCreate", event, 0)
        return event[0]

    def record(self, event: Any) -> None:
        self._call("cuEventRecord", event, _ffi.NULL)

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two events that have happened; resolution about half of one."""
        milliseconds = _ffi.new("float *")
        self._call("cuEventElapsedTime", milliseconds, start, end)
        return float(milliseconds[0]) * 1000

    def forget_event(self, event: Any) -> None:
        self._call("cuEventDestroy_v2", event)

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
