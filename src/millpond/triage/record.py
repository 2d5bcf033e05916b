"""The record of a redrive: a file of JSON lines that names every item before it is moved.

Each line is one `Line`. The first has the format's version, the queue, and why the items were chosen. A `batch` is
durable before any of its items is moved, so that after a crash the record names at least all that was moved. `done`
says what became of the batch, `ended` of all. `undone` and `undo_ended` are an undo's, which goes on where an earlier
one was stopped. A last line that is not whole was never acted on, and is cut off by whoever writes next.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from millpond.errors import Conflict, NotFound
from millpond.store.disk import make_directory, sync_directory
from millpond.triage.dead import Chosen

FOLDER = "redrives"
SUFFIX = ".jsonl"
FORMAT = 1
LOOKS = 5  # at whether a record is locked; somebody may just be looking too
LOOK_S = 0.02  # between them
ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`why`: what the items were chosen by. `queue` is where they were dead, `place` whose queue that is: a data
    directory, or a server.
    """

    redrive: str
    place: str
    queue: str
    incarnation: str
    at: datetime
    why: dict[str, Any]
    format: int = FORMAT


class Group(msgspec.Struct, frozen=True, gc=False):
    """Items of a batch that died of the same and go to the same queue: pairs of the id here and the id there."""

    to: str
    reason: str
    error: str | None
    ids: list[tuple[str, str]]


class Line(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One of its parts is there; `at` says when it was written."""

    at: datetime | None = None
    start: Header | None = None
    batch: list[Group] | None = None
    targets: dict[str, str] = {}  # queues that a batch goes to for the first time, by incarnation; "": there is none
    done: int | None = None  # how many of the batch before it were moved
    errors: dict[str, str] = {}  # why the others were not, by id
    ended: dict[str, int] | None = None
    undone: dict[str, int] | None = None  # of the next batch: how many were dead again, leased, …
    missing: list[Group] = []  # those of that batch that may be there under another id
    undo_ended: dict[str, int] | None = None


class Story(msgspec.Struct, kw_only=True):
    """A record in short."""

    header: Header
    items: int = 0
    batches: int = 0
    moved: int = 0
    failed: int = 0
    ended: bool = False
    targets: dict[str, str] = msgspec.field(default_factory=dict)
    undone_batches: int = 0
    undone: Counter[str] = msgspec.field(default_factory=Counter)
    undo_ended_at: datetime | None = None
    running: bool = False

    @property
    def status(self) -> str:
        if self.running:
            return "running"
        if self.undo_ended_at is not None:
            return "undone"
        if self.undone_batches:
            return "partly undone"
        return "done" if self.ended else "stopped"


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode


def groups_of(chosen: Sequence[Chosen]) -> list[Group]:
    found: dict[tuple[str, str, str | None], list[tuple[str, str]]] = {}
    for one in chosen:
        found.setdefault((one.to, one.reason, one.error), []).append((one.id, one.to_id))
    return [Group(*key, ids) for key, ids in found.items()]


def members(groups: Sequence[Group]) -> list[Chosen]:
    return [Chosen(id, group.to, to_id, group.reason, group.error) for group in groups for id, to_id in group.ids]


# ---- all the records of a folder ------------------------------------------------------------------------------


class Records:
    """Those of one data directory. A record is nobody's but its owner's: errors may quote what is secret."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory / FOLDER

    def begin(self, place: str, queue: str, incarnation: str, at: datetime, why: Mapping[str, Any]) -> Record:
        make_directory(self.folder)
        self.folder.chmod(0o700)
        while True:
            name = f"{at:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
            with suppress(FileExistsError):
                descriptor = os.open(self._path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                break
        record = Record(self._path(name), os.fdopen(descriptor, "r+b"))
        header = Header(redrive=name, place=place, queue=queue, incarnation=incarnation, at=at, why=dict(why))
        record.append(Line(at=at, start=header))
        sync_directory(self.folder)
        return record

    def open(self, redrive: str) -> Record:
        """To go on with it: nobody else does meanwhile."""
        path = self._found(redrive)
        return Record(path, path.open("r+b"))

    def read(self, redrive: str) -> Story:
        return story(self._found(redrive))

    def all(self) -> list[Story]:
        """Newest first. A record of which not even the first line is whole was never acted on."""
        if not self.folder.is_dir():
            return []
        paths = sorted((path for path in self.folder.iterdir() if _id_of(path)), reverse=True)
        stories = []
        for path in paths:
            with suppress(NotFound):
                stories.append(story(path))
        return stories

    def _found(self, redrive: str) -> Path:
        path = self._path(redrive)
        if not ID.fullmatch(redrive) or not path.is_file():
            raise NotFound(f"there is no redrive {redrive!r:.60} in {self.folder}; see `millpond dlq redrives`")
        return path

    def _path(self, redrive: str) -> Path:
        return self.folder / f"{redrive}{SUFFIX}"


def _id_of(path: Path) -> str | None:
    return path.stem if path.suffix == SUFFIX and ID.fullmatch(path.stem) else None


# ---- one of them ------------------------------------------------------------------------------------------------


class Record:
    """A record that is being written. The lock tells a redrive that goes on from one that was stopped."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.redrive = path.stem
        self._file = file
        if not _locked(file):
            file.close()
            raise Conflict(f"redrive {self.redrive} is still going on, or being undone; wait for it, or stop it")
        self._cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def append(self, line: Line, *, durable: bool = True) -> None:
        """Without `durable` it lasts from the next line on that is."""
        self._file.write(_encode(line) + b"\n")
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def _cut(self) -> None:
        """A last line that is not whole goes; then all that is written comes at the end."""
        size = self._file.seek(0, os.SEEK_END)
        step = 1 << 16
        keep = 0
        at = size
        while at:
            begin = max(0, at - step)
            self._file.seek(begin)
            newline = self._file.read(at - begin).rfind(b"\n")
            if newline >= 0:
                keep = begin + newline + 1
                break
            at = begin
        self._file.truncate(keep)
        self._file.seek(keep)


def lines(path: Path) -> Iterator[Line]:
    """The whole ones, in order."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                line = _decode(text)
            except msgspec.MsgspecError as error:
                raise Conflict(f"{path}:{number} is damaged ({error}); restore the file, or mend the line") from None
            if line.start is not None and line.start.format != FORMAT:
                raise Conflict(f"{path} has format {line.start.format}, this millpond reads {FORMAT}; use a newer one")
            yield line


def batches(path: Path) -> Iterator[list[Group]]:
    return (line.batch for line in lines(path) if line.batch is not None)


def missing(path: Path) -> Iterator[list[Group]]:
    return (line.missing for line in lines(path) if line.missing)


def story(path: Path) -> Story:
    found: Story | None = None
    for line in lines(path):
        if line.start is not None:
            found = Story(header=line.start)
        assert found is not None, "the first line is the start"
        if line.batch is not None:
            found.batches += 1
            found.items += sum(len(group.ids) for group in line.batch)
            found.targets |= line.targets
        if line.done is not None:
            found.moved += line.done
            found.failed += len(line.errors)
        found.ended = found.ended or line.ended is not None
        if line.undone is not None:
            found.undone_batches += 1
            found.undone.update(line.undone)
        if line.undo_ended is not None:
            found.undone.update(line.undo_ended)
            found.undo_ended_at = line.at
    if found is None:
        raise NotFound(f"{path} holds nothing yet; the redrive was stopped before it began")
    found.running = _is_locked(path)
    return found


def _locked(file: BinaryIO) -> bool:
    """Whether it is ours now. Who only looks holds it for a moment, which does not count."""
    for left in reversed(range(LOOKS)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if left:
                time.sleep(LOOK_S)
    return False


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
