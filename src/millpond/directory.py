"""A data directory and its one owner: two would write over each other."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from weakref import WeakSet

from millpond.errors import DirectoryInUse, InvalidRequest

LOCK = "lock"
DIRECTORY_MODE = 0o700  # whoever can read it can read every payload
SOCKET = "socket"  # where the owner answers the other processes of this directory

_HELD: WeakSet[DirectoryLock] = WeakSet()


class DirectoryLock:
    """Held as long as its process lives, whatever becomes of it otherwise: the system lets go of it, nobody else can.

    `epoch` grows with every owner, and stands in the file with the owner's process id, for people and logs.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        try:
            directory.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise InvalidRequest(f"cannot use {directory} as data directory ({error}); choose another") from error
        self._held = False
        try:
            self.epoch = self._take(directory)
        except BaseException:
            os.close(self._file)
            self._file = -1
            raise

    def _take(self, directory: Path) -> int:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner, _ = self._read()
            raise DirectoryInUse(
                f"data directory {directory} is in use by process {owner or 'unknown'}, which does not answer;"
                " close it there first",
                silent=True,
            ) from None
        _check_writable(directory)
        self._held = True
        _HELD.add(self)
        _, epoch = self._read()
        try:
            os.truncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()} {epoch + 1}\n".encode(), 0)
        except OSError:  # a full disk: the lock counts, what is written in it is for people
            pass
        return epoch + 1

    def _read(self) -> tuple[int, int]:
        """Process id and epoch of the last owner."""
        numbers = os.pread(self._file, 60, 0).split()
        owner, epoch, *_ = [int(number) if number.isdigit() else 0 for number in (*numbers, b"0", b"0")]
        return owner, epoch

    def is_in_place(self) -> bool:
        """Whether the next to come would find this lock: else the directory was removed, and may be another's now."""
        try:
            return self._held and os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        if self._held:
            self._held = False
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)

    def forget(self) -> None:
        if self._held:
            self._held = False
            os.close(self._file)


def _check_writable(directory: Path) -> None:
    """What another user has left there: SQLite would speak of the disk."""
    for path in (directory, *directory.glob("*.db"), *directory.glob("queues")):
        if not os.access(path, os.W_OK):
            raise InvalidRequest(
                f"cannot use {directory} as data directory (this user may not write to {path}); see to its"
                " permissions, or choose another"
            )


def _forget_all() -> None:
    for lock in list(_HELD):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)  # a child must not hold on to what its parent owns
