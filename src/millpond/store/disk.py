"""What stores that keep files need of the system: names that last, files that may be open, and room held back for the
day when the disk is full.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FILES_A_PARTITION = 4  # its file twice, SQLite's log and the log of turns
PRIVATE, PRIVATE_FILE = 0o700, 0o600  # modes: whoever can read the files can read every payload
NO_FILES = (errno.EMFILE, errno.ENFILE)
BUFFERS_MAX = 1024  # that the system takes at a time


def partitions_max() -> float:
    """How many may be open at a time: half of the files that this process may open are the application's."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if files == resource.RLIM_INFINITY else max(1, files // 2 // FILES_A_PARTITION)


def out_of_files() -> bool:
    """Whether a partition could not be opened just now: SQLite does not say why it cannot open a file."""
    opened: list[int] = []
    try:
        for _ in range(FILES_A_PARTITION):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in NO_FILES
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return False


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable: a file's own fsync does not promise that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """With what is missing above it, of the same mode; the umask counts."""
    if not path.is_dir():
        make_directory(path.parent, mode)
        path.mkdir(mode, exist_ok=True)
        sync_directory(path.parent)


def make_private_file(path: Path) -> None:
    """For whoever opens it next, who would let others read it. One that is there stays as it is."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))
    except FileExistsError:
        pass


def bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def write_all(descriptor: int, buffers: Sequence[bytes], place: int) -> None:
    left: list[bytes | memoryview] = list(buffers)
    while left:
        written = os.pwritev(descriptor, left[:BUFFERS_MAX], place)
        place += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = memoryview(left[0])[written:]


class Reserve:
    """Room on the disk that is held back for the day when it is full, shared by the stores of a directory."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._lock = threading.Lock()
        self._tried = False
        self.held = True  # until known better

    def take_at_first(self) -> None:
        """Once only: whether a reserve that was given up is taken back is for the engine to say."""
        if not self._tried:
            self.take()

    def take(self) -> bool:
        with self._lock:
            if not self._tried or not self.held:
                self._tried = True
                self.held = self._allocate()
            return self.held

    def give_up(self) -> None:
        with self._lock:
            self._tried = True
            self.held = False
            with suppress(OSError):  # what there is room for goes on without it
                self._path.unlink(missing_ok=True)

    def _allocate(self) -> bool:
        """Really allocated, not sparse. As much again must be free, or it would be given up again at once."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, 2 * self._size)
                os.ftruncate(descriptor, self._size)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            return False
        return True
