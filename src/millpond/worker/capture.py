"""What a command prints, into its log: the head of it, then a line that tells what was dropped, then the end of it.

The file is made with the first output: most commands say nothing, and need none. While it is written its lock is held,
so that others can tell whether more will come. A log that cannot be written never stops a command: the reason is
kept, and told with the command's end.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from typing import Final

HEAD_BYTES: Final = 10 << 20  # of a log, unless told otherwise: what a person may look through
TAIL_BYTES: Final = 64 << 10  # the end is where the error is
LAST_BYTES: Final = 2 << 10  # goes into the result, so into the queue
FOLDER_MODE: Final = 0o700  # output is as private as payloads are
FILE_MODE: Final = 0o600
FOLDER_TRIES: Final = 3  # who removes old logs may remove the folder again before the file is in it
_NEW: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Capture:
    """`path` is None while there is no file; `problem` says why not all of the output is in it."""

    __slots__ = ("_attempt", "_dropped", "_file", "_folder", "_room", "_tail", "_tail_bytes", "last", "path", "problem")

    def __init__(self, folder: str, attempt: int, head_bytes: int = HEAD_BYTES) -> None:
        self._folder = folder
        self._attempt = attempt
        self._room = head_bytes
        self._file = -1
        self._tail: deque[bytes] = deque()  # what came after the head
        self._tail_bytes = 0
        self._dropped = 0
        self.last = b""
        self.path: str | None = None
        self.problem: str | None = None

    def take(self, chunk: bytes) -> None:
        self.last = chunk[-LAST_BYTES:] if len(chunk) >= LAST_BYTES else (self.last + chunk)[-LAST_BYTES:]
        if self._room > 0:
            chunk = self._write_head(chunk)
        if chunk:
            self._tail.append(chunk)
            self._tail_bytes += len(chunk)
            while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
                first = len(self._tail.popleft())
                self._tail_bytes -= first
                self._dropped += first

    def close(self) -> None:
        """Writes what was kept of the end."""
        if self._file < 0:
            return
        if self._tail:
            tail = b"".join(self._tail)
            self._dropped += max(0, len(tail) - TAIL_BYTES)
            self._write(self._note() + tail[-TAIL_BYTES:])
        os.close(self._file)
        self._file = -1

    # ---- the parts ----------------------------------------------------------------------------------------

    def _write_head(self, chunk: bytes) -> bytes:
        """Returns what is not of the head."""
        if self._file < 0 and not self._open():
            self._room = 0
            return chunk
        written = self._write(chunk[: self._room])
        self._room = self._room - written if self.problem is None else 0
        return chunk[written:]

    def _note(self) -> bytes:
        if self.problem is not None:  # there may be room again by now
            return f"\n[millpond: {self.problem}; {self._dropped} bytes were dropped here]\n".encode()
        return f"\n[millpond: {self._dropped} bytes were dropped here]\n".encode() if self._dropped else b""

    def _write(self, data: bytes) -> int:
        at = 0
        try:
            while at < len(data):
                at += os.write(self._file, data[at:] if at else data)
        except OSError as error:
            self.problem = self.problem or f"the log {self.path} could not be written ({error.strerror})"
        return at

    def _open(self) -> bool:
        try:
            self._create()
        except OSError as error:
            self.problem = f"there is no log: {error.filename or self._folder} could not be made ({error.strerror})"
        return self._file >= 0

    def _create(self) -> None:
        """A file of its own: an attempt's number comes again after a defer, or once the job was retried by hand."""
        again, folders = 1, 0
        while self._file < 0:
            name = f"{self._attempt}.log" if again == 1 else f"{self._attempt}-{again}.log"
            path = f"{self._folder}/{name}"
            try:
                self._file = os.open(path, _NEW, FILE_MODE)
                self.path = path
            except FileExistsError:
                again += 1
            except FileNotFoundError:
                if (folders := folders + 1) > FOLDER_TRIES:
                    raise
                for folder in (os.path.dirname(self._folder), self._folder):  # its mode is for the last one alone
                    os.makedirs(folder, FOLDER_MODE, exist_ok=True)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without locks: who follows it asks the queue
            pass
