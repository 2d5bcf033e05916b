"""Files of the lake that are there whole, and for good, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from millpond.errors import DiskFull
from millpond.store.disk import make_directory, sync_directory

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BUFFER_BYTES = 1 << 20  # a row group is some hundred small writes

Watch = Callable[[str], None]
"""Is told each step by name, before the next one: where a test cuts in."""


def unwatched(step: str) -> None:
    pass


class DurableFile:
    """A file in the making, under a name that nobody reads, until it is whole and gets its own."""

    def __init__(self, folder: Path, name: str) -> None:
        make_directory(folder)
        self.path = folder / f".{name}"
        self.sink: BinaryIO = self.path.open("wb", buffering=_BUFFER_BYTES)

    def finish(self) -> int:
        """All of it is on disk; returns its size."""
        self.sink.flush()
        os.fsync(self.sink.fileno())
        self.sink.close()
        return self.path.stat().st_size

    def appear(self, name: str) -> Path:
        """Under its own name, for good."""
        path = self.path.with_name(name)
        os.rename(self.path, path)
        sync_directory(path.parent)
        return path

    def discard(self) -> None:
        try:
            self.sink.close()
        except OSError:  # what could not be written need not be
            pass
        self.path.unlink(missing_ok=True)


def write_file(folder: Path, name: str, content: bytes) -> Path:
    file = DurableFile(folder, name)
    try:
        file.sink.write(content)
        file.finish()
        return file.appear(name)
    except BaseException:
        file.discard()
        raise


def remove_files(paths: list[Path]) -> None:
    """That they are gone need not last: who comes after a crash removes them again."""
    for path in paths:
        path.unlink(missing_ok=True)


@contextmanager
def room_in(lake: Path) -> Iterator[None]:
    """A full disk is told as such."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFull(
            f"no room left for the history lake {lake} ({error.strerror}); make room there, or keep fewer days,"
            " then go on: nothing that was exported is lost, nothing will be exported twice"
        ) from error
