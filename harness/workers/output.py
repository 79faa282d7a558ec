"""What a process prints, in memory of a bounded size: its last words, and what a sanitizer said."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Self

from pagefuzz.harness.errors import CannotCheckError

#: The last so many bytes are always there.
KEPT_BYTES = 2**16

#: What lies before them is let go once it is so much: memory is taken for this, for the last bytes,
#: and for what is printed between two calls of `bound`.
LIMIT_BYTES = 4 * 2**20

#: How much of what is let go at once is searched for a report, up to its end: a search that took
#: longer would fall behind the printing, a gigabyte a second like it.
_SEARCHED_BYTES = 128 * 2**20

#: How a sanitizer's report begins, and how much of it is kept.
REPORT = "ERROR: AddressSanitizer"
_REPORT_BYTES = 2**13

_CHUNK_BYTES = 2**20

# FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_PUNCH_HOLE = 1 | 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class OutputFile:
    """Anonymous memory that catches what a process prints, and whatever it has started.

    The file only grows, so that nothing is lost between reading and cutting; what is let go is a
    hole in it. Whoever waits for the process calls `bound` every few milliseconds.
    """

    def __init__(self) -> None:
        import fcntl

        self.descriptor = os.memfd_create("pagefuzz-output", os.MFD_CLOEXEC)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND)
        self._hole_bytes = 0  # from the beginning of the file
        self._report = b""

    @property
    def held_bytes(self) -> int:
        """Memory that it takes now."""
        return os.fstat(self.descriptor).st_blocks * 512

    def bound(self) -> None:
        """Lets go of what lies far before the end, if that is much. Raises `CannotCheckError`."""
        end = self._size_bytes - KEPT_BYTES
        end -= end % mmap.PAGESIZE
        if end - self._hole_bytes < LIMIT_BYTES:
            return
        self._remember(max(self._hole_bytes, end - _SEARCHED_BYTES), end)
        if _libc.fallocate(self.descriptor, _PUNCH_HOLE, self._hole_bytes, end - self._hole_bytes):
            said = os.strerror(ctypes.get_errno())
            raise CannotCheckError(
                f"a subject prints without end, and none of it can be let go: fallocate says {said}"
            )
        self._hole_bytes = end

    def text(self) -> str:
        """The last 64 KiB; before them the beginning of a sanitizer's report that lies further
        back."""
        size_bytes = self._size_bytes
        begin = max(0, size_bytes - KEPT_BYTES)
        self._remember(self._hole_bytes, begin)
        data = os.pread(self.descriptor, KEPT_BYTES, begin)
        if self._report:
            data = self._report + b"\n[...]\n" + data
        return data.decode("utf-8", "replace")

    def clear(self) -> None:
        os.ftruncate(self.descriptor, 0)
        self._hole_bytes, self._report = 0, b""

    @property
    def _size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def _remember(self, begin: int, end: int) -> None:
        """Keeps the first report that begins between two bytes of the file."""
        report = REPORT.encode()
        while begin < end and not self._report:
            # A report may begin in one chunk and go on in the next.
            chunk = os.pread(self.descriptor, _CHUNK_BYTES + len(report), begin)
            at = chunk.find(report)
            if at >= 0 and begin + at < end:
                line = chunk.rfind(b"\n", 0, at) + 1
                self._report = os.pread(self.descriptor, _REPORT_BYTES, begin + line)
            begin += _CHUNK_BYTES

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
