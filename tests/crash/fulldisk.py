"""A disk that fills up, by taking the place of the system calls with which SQLite and its store write.

So the errors come the way they really do, through SQLite's own reading of errno.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import apsw

SYSTEM_CALL = "pwrite64"
WRITE = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
)

libc = ctypes.CDLL(None, use_errno=True)
real_write = WRITE(("pwrite64", libc))
names = itertools.count()  # VFS names are global to the process


@dataclass
class FullDisk:
    """The files under `root` may not grow beyond `quota` bytes in all; the reserve counts, as a file among them.

    `quota` may be changed, as others use and free the disk. After `writes_before_lie` more writes, `lies` writes are
    taken and yet answered with the error: what a caller must be prepared for.
    """

    root: Path
    quota: int
    error: int = errno.ENOSPC
    writes_before_lie: int = 0
    lies: int = 0

    def free(self) -> int:
        return self.quota - sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def write(self, descriptor: int, data: int, count: int, offset: int) -> int:
        """In the place of pwrite."""
        grows = offset + count - os.fstat(descriptor).st_size
        if grows > 0 and grows > self.free():
            return self._refuse()
        written: int = real_write(descriptor, data, count, offset)
        if self.lies:
            self.writes_before_lie -= 1
            if self.writes_before_lie < 0:
                self.lies -= 1
                return self._refuse()
        return written

    def allocate(self, descriptor: int, offset: int, count: int) -> None:
        """In the place of os.posix_fallocate."""
        size = os.fstat(descriptor).st_size
        if offset + count - size > self.free():
            raise OSError(self.error, os.strerror(self.error))
        os.ftruncate(descriptor, max(offset + count, size))

    def write_buffers(self, descriptor: int, buffers: Sequence[bytes], offset: int) -> int:
        """In the place of os.pwritev. What still fits is written, as a disk does it."""
        data = b"".join(buffers)
        grows = offset + len(data) - os.fstat(descriptor).st_size
        fits = data[: len(data) - max(0, grows - max(0, self.free()))]
        if not fits:
            raise OSError(self.error, os.strerror(self.error))
        return os.pwrite(descriptor, fits, offset)

    def _refuse(self) -> int:
        ctypes.set_errno(self.error)
        return -1


@contextmanager
def full_disk(disk: FullDisk) -> Iterator[None]:
    """Stores write to that disk. One at a time: the system call is the process's."""
    vfs = apsw.VFS(f"full-disk-{next(names)}", "")
    replaced = vfs.xGetSystemCall(SYSTEM_CALL)
    assert replaced is not None
    in_its_place = WRITE(disk.write)  # must live as long as SQLite may call it
    vfs.xSetSystemCall(SYSTEM_CALL, ctypes.cast(in_its_place, ctypes.c_void_p).value or 0)
    try:
        with mock.patch.object(os, "pwritev", disk.write_buffers):
            yield
    finally:
        vfs.xSetSystemCall(SYSTEM_CALL, replaced)
        vfs.unregister()
