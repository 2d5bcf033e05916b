"""What stores that keep files need of the disk: names that last, and room held back for the day when it is full."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable: a file's own fsync does not promise that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


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
            self._path.unlink(missing_ok=True)
            return False
        return True
