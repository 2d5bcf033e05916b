"""The logs of commands: where they are, how they are read and followed, and when they go.

    <root>/<queue>@<incarnation>/<id>/<attempt>.log        a "/" in the queue's name is a "+" here

The incarnation tells the queue from others of its name, in other ponds or before it was deleted: their jobs may have
the same ids. An attempt's number may come again, after a defer or a retry by hand: then the file is <attempt>-2.log,
and so on. A command that prints nothing has no log.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from millpond.errors import InvalidRequest, NotFound
from millpond.worker.capture import FOLDER_MODE

KEEP_S: Final = 7 * 86_400.0  # a week: long enough to come back from a weekend, short enough for a disk
REMOVED_MAX: Final = 10_000  # logs at a time, so that a look ends soon
FOLLOW_PAUSE: Final = 0.1  # seconds between looks at a file that is followed, as `tail -f` does
READ_BYTES: Final = 64 << 10
_NAME: Final = re.compile(r"(\d+)(?:-(\d+))?\.log")


def shelf_of(queue: str, incarnation: str) -> str:
    """The folder of a queue's logs."""
    return f"{queue.replace('/', '+')}@{incarnation}"


def incarnation_in(lease: str) -> str:
    """Of the item's queue: leases begin with it, so that a worker need not ask."""
    return lease.partition(".")[0]


class Log(NamedTuple):
    """`modified` is in seconds since 1970."""

    attempt: int
    path: Path
    bytes: int
    modified: float


class Logs:
    """A job is named by its queue's shelf and its id."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._root = str(self.root)

    def prepare(self) -> None:
        """Raises InvalidRequest if none can be written."""
        try:
            self.root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(0, "no permission")
        except OSError as error:
            why = error.strerror
            raise InvalidRequest(f"cannot write logs to {self.root} ({why}); mend it, or choose another") from None

    def folder(self, shelf: str, item_id: str) -> Path:
        """Of one job. Ids have no "/", but may be "." or ".."."""
        return Path(self.folder_name(shelf, item_id))

    def folder_name(self, shelf: str, item_id: str) -> str:
        """The same, for who asks a thousand times a second."""
        return f"{self._root}/{shelf}/{'+' if item_id in ('.', '..') else ''}{item_id}"

    def attempts(self, shelf: str, item_id: str) -> list[Log]:
        """Oldest first: an attempt that was retried by hand comes after those before it.

        An empty one is about to be written, and not locked yet: who looked at its lock would take it for one that has
        ended, or keep its writer from it.
        """
        found = []
        try:
            entries = list(os.scandir(self.folder(shelf, item_id)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            log = None if match is None else _look(entry, int(match[1]))
            if log is not None and log.bytes:
                found.append(log)
        return sorted(found, key=lambda log: (log.modified, log.attempt))

    def latest(self, shelf: str, item_id: str, attempt: int | None = None) -> Log | None:
        """The last of them, or of those with this number."""
        logs = [log for log in self.attempts(shelf, item_id) if attempt in (None, log.attempt)]
        return logs[-1] if logs else None

    def follow(
        self,
        shelf: str,
        item_id: str,
        is_over: Callable[[], bool],
        *,
        attempt: int | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> Iterator[bytes]:
        """The latest log and all that is added to it, until the attempt is over: its writer lets go of the file.

        Before there is a log, `is_over` tells whether one will still come: whether the job runs, or will.
        """
        while True:
            over = is_over()  # asked before the look, so that nothing is missed
            if (log := self.latest(shelf, item_id, attempt)) is not None:
                yield from follow(log.path, pause)
                return
            if over:
                return
            pause(FOLLOW_PAUSE)

    def run_once(self, now: float, keep: float = KEEP_S) -> int:
        """Removes logs that nobody has written to for so long. Returns how many; those beyond a limit stay for once."""
        removed = 0
        for folder in self._folders():
            for entry in _scan(folder):
                if removed < REMOVED_MAX and _is_old(entry, now - keep):
                    removed += _remove(entry.path)
            for empty in (folder, folder.parent):
                try:
                    empty.rmdir()
                except OSError:  # not empty, or gone
                    break
            if removed >= REMOVED_MAX:
                break
        return removed

    def _folders(self) -> Iterator[Path]:
        for queue in _scan(self.root):
            if queue.is_dir(follow_symlinks=False):
                for job in _scan(Path(queue.path)):
                    if job.is_dir(follow_symlinks=False):
                        yield Path(job.path)


# ---- one log ------------------------------------------------------------------------------------------------


def read(path: Path, last_bytes: int | None = None) -> Iterator[bytes]:
    """What is there now; of a long one only the end, if that is asked for."""
    try:
        with open(path, "rb") as file:
            if last_bytes is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
            while chunk := file.read(READ_BYTES):
                yield chunk
    except FileNotFoundError:
        raise NotFound(f"the log {path} is gone; logs are kept for {KEEP_S / 86_400:g} days") from None
    except OSError as error:
        raise InvalidRequest(f"cannot read the log {path} ({error.strerror}); mend it") from None


def follow(path: Path, pause: Callable[[float], None] = time.sleep) -> Iterator[bytes]:
    """What is there, and what is added, until nobody writes to it any more."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below, with the generator
    except OSError as error:
        raise NotFound(f"cannot read the log {path} ({error.strerror}); perhaps it is gone") from None
    with file:
        while True:
            ended = not is_written(file.fileno())  # looked at before the read, so that nothing is missed
            while chunk := file.read(READ_BYTES):
                yield chunk
            if ended:
                return
            pause(FOLLOW_PAUSE)


def is_written(file: int) -> bool:
    """Whether a supervisor has it open for writing: that one holds its lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _look(entry: os.DirEntry[str], attempt: int) -> Log | None:
    try:
        status = entry.stat()
    except OSError:
        return None
    return Log(attempt, Path(entry.path), status.st_size, status.st_mtime)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _is_old(entry: os.DirEntry[str], before: float) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_mtime < before
    except OSError:
        return False


def _remove(path: str) -> int:
    """1 if it is gone now. One that is still written stays, however long its command has been silent."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        if is_written(file):
            return 0
        os.unlink(path)
        return 1
    except OSError:
        return 0
    finally:
        os.close(file)
