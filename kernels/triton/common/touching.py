"""One access more at the end of a launch, to show which layer of detection sees what; what
`kernels/common/injection.h` is to the other kernels."""

# Annotations are part of Triton's language: they must not become strings.

import triton
import triton.language as tl

from pagefuzz.kernels.triton.common.launching import Array, Pointer, Result, launch

_WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


def _read(memory, word: tl.int64):
    tl.load(memory + word, volatile=True)  # the value is thrown away, the load is made


def _write(memory, word: tl.int64):
    tl.store(memory + word, 0x5A)


_KERNELS = {
    name: triton.jit(function, do_not_specialize=["memory", "word"])
    for name, function in (("read", _read), ("write", _write))
}


def touch(address: int, offset_bytes: int, size_bytes: int, kind: str) -> Result:
    """Reads or writes ("read", "write") 1, 2, 4 or 8 bytes, so many as the address is aligned to,
    at an offset that is a multiple of them."""
    memory = Pointer(Array(address, size_bytes, 0, 1), _WORDS[size_bytes])
    return launch(_KERNELS[kind], 1, 0, (memory, offset_bytes // size_bytes))
