"""A disk whose power is cut, as a SQLite VFS.

`PowerCutDisk` keeps, beside the real files, what a disk would hold for certain: the bytes that were synced, under the
names that were synced. `cut` writes a directory as it may look after the power is back: all of that, and of what was
not yet synced any part, sector by sector. SQLite makes, writes and removes its files through the VFS; what the store
does by itself, to directories, to room that is allocated and to files of bulk, is seen where Python calls the system.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest import mock

import apsw

SECTOR_BYTES = 512  # what a disk writes whole or not at all
SHARES = [0.0, 0.1, 0.5, 0.9, 1.0]
NEW_LOG = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL

names = itertools.count()  # VFS names are global to the process
really_truncate = os.ftruncate


def path_of(name: str | apsw.URIFilename | None) -> str:
    assert name is not None, "temporary files are in memory"
    return name if isinstance(name, str) else name.filename()


class Quiet:
    """Errors that SQLite does not pass on, such as those of a checkpoint, have nobody to go to."""

    def excepthook(self, etype: object, evalue: object, etraceback: object) -> bool:
        return True


# ---- the power cut ----------------------------------------------------------------------------------------


@dataclass
class Write:
    offset: int
    data: bytes

    def apply(self, image: bytearray, survives: Callable[[], bool]) -> None:
        end = self.offset + len(self.data)
        if len(image) < end:
            if not survives():  # the growth of the file is a write of its own
                return
            image.extend(bytes(end - len(image)))
        start = self.offset
        while start < end:
            stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
            if survives():
                image[start:stop] = self.data[start - self.offset : stop - self.offset]
            start = stop


@dataclass
class Truncate:
    size: int

    def apply(self, image: bytearray, survives: Callable[[], bool]) -> None:
        if survives():
            del image[self.size :]
            image.extend(bytes(self.size - len(image)))


@dataclass
class Contents:
    """A file apart from its name: what was synced, and what was done since."""

    synced: bytearray = field(default_factory=bytearray)
    pending: list[Write | Truncate] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.pending:
            change.apply(self.synced, lambda: True)
        self.pending.clear()

    def after_cut(self, survives: Callable[[], bool]) -> bytes:
        image = bytearray(self.synced)
        for change in self.pending:
            change.apply(image, survives)
        return bytes(image)


class PowerCutDisk:
    """Model of the files under `root`. `operations_left` counts down to the power cut; None is no cut."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations_left: int | None = None
        self.fail_syncs = 0  # so many syncs fail
        self.failed_syncs_drop = True  # what they should have synced; else it may still reach the disk
        files = [path for path in root.rglob("*") if path.is_file()]
        self.live = {str(path): Contents(bytearray(path.read_bytes())) for path in files}
        self.durable = dict(self.live)

    @property
    def dead(self) -> bool:
        return self.operations_left is not None and self.operations_left <= 0

    def operate(self) -> None:
        """Every operation that changes something begins with this; the last one before the cut fails."""
        if self.operations_left is not None:
            self.operations_left -= 1
            if self.dead:
                raise apsw.IOError("the power was cut")

    def create(self, path: str) -> Contents:
        return self.live.setdefault(path, Contents())

    def delete(self, path: str) -> None:
        self.operate()
        self.live.pop(path, None)

    def change(self, contents: Contents, change: Write | Truncate) -> None:
        if not self.dead:
            contents.pending.append(change)  # also if the power goes now: a part of it may be written
        self.operate()

    def sync(self, contents: Contents) -> None:
        self.operate()
        if self.fail_syncs:
            self.fail_syncs -= 1
            if self.failed_syncs_drop:
                contents.pending.clear()  # as Linux does: the pages are taken for clean, and the next sync succeeds
            raise apsw.IOError("the sync failed")
        contents.sync()

    def sync_descriptor(self, descriptor: int) -> None:
        """In the place of os.fsync."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.tell_python(lambda: self.sync_directory(path) if path.is_dir() else self.sync(self.create(str(path))))

    def allocate(self, descriptor: int, offset: int, count: int) -> None:
        """In the place of os.posix_fallocate."""
        path, size = os.readlink(f"/proc/self/fd/{descriptor}"), max(offset + count, os.fstat(descriptor).st_size)
        self.tell_python(lambda: self.change(self.create(path), Truncate(size)))
        really_truncate(descriptor, size)

    def truncate_descriptor(self, descriptor: int, size: int) -> None:
        """In the place of os.ftruncate."""
        contents = self.create(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.tell_python(lambda: self.change(contents, Truncate(size)))
        really_truncate(descriptor, size)

    def write_buffers(self, descriptor: int, buffers: Sequence[bytes], offset: int) -> int:
        """In the place of os.pwritev, which may write less than it was given."""
        data = b"".join(buffers)
        some = data[: max(1, len(data) * 2 // 3)]
        contents = self.create(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.tell_python(lambda: self.change(contents, Write(offset, some)))
        return os.pwrite(descriptor, some, offset)

    def unlink(self, path: str | Path) -> None:
        """In the place of os.unlink."""
        self.tell_python(lambda: self.delete(str(path)))
        os.remove(path)

    def truncate(self, path: str | Path, size: int) -> None:
        """In the place of os.truncate."""
        self.tell_python(lambda: self.change(self.create(str(path)), Truncate(size)))
        with open(path, "r+b") as file:
            file.truncate(size)

    def tell_python(self, operation: Callable[[], None]) -> None:
        try:
            operation()
        except apsw.IOError as problem:
            raise OSError(errno.EIO, str(problem)) from problem

    def sync_directory(self, path: Path) -> None:
        self.operate()
        for name in {*self.live, *self.durable}:
            if Path(name).parent == path:
                if name in self.live:
                    self.durable[name] = self.live[name]
                else:
                    del self.durable[name]

    def kill(self, close: Callable[[], None]) -> None:
        """The process dies and its files are let go of; what it has written is all there, as long as the power is."""
        left, self.operations_left = self.operations_left, 0
        close()
        self.operations_left = left

    def cut(self, target: Path, random: Random, share: float | None = None) -> None:
        """`target` becomes what is found after the cut, with about that share (if None: any) of the unsynced."""

        def survival() -> Callable[[], bool]:
            chance = random.choice(SHARES) if share is None else share
            return lambda: random.random() < chance

        name_survives = survival()
        for name in sorted({*self.live, *self.durable}):
            contents = (self.live if name_survives() else self.durable).get(name)
            if contents is not None:
                path = target / Path(name).relative_to(self.root)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(contents.after_cut(survival()))


class PowerCutFile(Quiet, apsw.VFSFile):
    def __init__(self, disk: PowerCutDisk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self.disk = disk
        self.path = path_of(name)
        self.contents = disk.create(self.path)
        # SQLite syncs the directory of a log with the log's first sync.
        self.syncs_directory = bool(flags[0] & apsw.SQLITE_OPEN_CREATE and flags[0] & NEW_LOG)

    def xWrite(self, data: bytes, offset: int) -> None:
        self.disk.change(self.contents, Write(offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:
        self.disk.change(self.contents, Truncate(newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        self.disk.sync(self.contents)
        if self.syncs_directory:
            self.disk.sync_directory(Path(self.path).parent)
            self.syncs_directory = False


class PowerCutVFS(Quiet, apsw.VFS):
    def __init__(self, name: str, disk: PowerCutDisk) -> None:
        super().__init__(name, "")
        self.disk = disk

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> PowerCutFile:
        return PowerCutFile(self.disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.disk.delete(filename)
        super().xDelete(filename, False)
        if syncdir:
            self.disk.sync_directory(Path(filename).parent)


@contextmanager
def power_cut_vfs(disk: PowerCutDisk) -> Iterator[str]:
    """The name of a VFS on that disk; while it lasts, Python's own syncs go there too."""
    name = f"power-cut-{next(names)}"
    vfs = PowerCutVFS(name, disk)
    try:
        with (
            mock.patch.object(os, "fsync", disk.sync_descriptor),
            mock.patch.object(os, "fdatasync", disk.sync_descriptor),
            mock.patch.object(os, "posix_fallocate", disk.allocate),
            mock.patch.object(os, "pwritev", disk.write_buffers),
            mock.patch.object(os, "unlink", disk.unlink),
            mock.patch.object(os, "truncate", disk.truncate),
            mock.patch.object(os, "ftruncate", disk.truncate_descriptor),
        ):
            yield name
    finally:
        vfs.unregister()
