"""The history lake: Parquet files of changes of state, named by the journal turns that they hold.

    events/date=2031-05-07/queue=mail%2Fout/<incarnation>-p00000-000000000001-000000000500.parquet
    gaps/<incarnation>-p00000-000000000501-000000000800.json
    _state/…                    the exporter's: what it knows after which turn
    _export.lock, _upkeep.lock  who writes, who compacts

A file holds all that one partition did in turns `from` to `to`, on one date (UTC). A name tells all that it promises,
so a crash repeats and cannot double. Names that begin with `.` or `_` are not of the lake's data. A file whose turns
are within those of another one, of the same incarnation, partition and date, was merged into that one and does not
count.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.errors import DirectoryInUse, InvalidRequest
from millpond.store.disk import make_directory

LAKE_VERSION = 1
ROW_GROUP_ROWS = 65_536  # read whole to find one item in it; a small part of what is written at a time
EVENTS, GAPS, STATE = "events", "gaps", "_state"
EXPORT_LOCK, UPKEEP_LOCK = "_export.lock", "_upkeep.lock"
ABOUT = b"millpond.lake"  # the key of `About` in a file's metadata

_FILE = re.compile(r"([a-z0-9]{1,32})-p([0-9]{5})-([0-9]{12,})-([0-9]{12,})\.(parquet|json)")
_DAY_MS = 86_400_000


def _field(name: str, kind: Any, *, required: bool = True) -> Any:
    return pa.field(name, kind, nullable=not required)


ITEM_EVENT_SCHEMA = pa.schema(
    [
        _field("incarnation", pa.string()),
        _field("partition", pa.int32()),
        _field("turn", pa.int64()),
        _field("seq", pa.int32()),  # place within the turn
        _field("number", pa.int64()),
        _field("item_id", pa.string()),
        _field("correlation_id", pa.string(), required=False),
        _field("at", pa.timestamp("us", tz="UTC")),
        _field("from_state", pa.string(), required=False),  # null: it is new, or that is not known
        _field("to_state", pa.string(), required=False),  # null: removed
        _field("why", pa.string()),
        _field("who", pa.string()),
        _field("attempt", pa.int32(), required=False),
        _field("kind", pa.string()),
        _field("priority", pa.int32()),
        _field("error", pa.string(), required=False),
        _field("source_queue", pa.string(), required=False),
        _field("source_id", pa.string(), required=False),
        _field("since_ms", pa.int64(), required=False),  # since the item's last change of state
        _field("age_ms", pa.int64(), required=False),  # since it was produced
    ]
)
"""What is in a file. `date` and `queue` are in its path, and readers add them."""

WORDS = [field.name for field in ITEM_EVENT_SCHEMA if field.type == pa.string()]

FLAT_SCHEMA = pa.schema(
    [
        pa.field(field.name, pa.dictionary(pa.int32(), pa.string()), nullable=field.nullable)
        if field.name in WORDS
        else field
        for field in ITEM_EVENT_SCHEMA
    ]
)
"""The same, with strings as places in a dictionary: how they are made and written, in less than half the time."""

_STEPS = ("turn", "seq", "number", "at")  # numbers that go up in small steps
_WRITING = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": [name for name in FLAT_SCHEMA.names if name not in _STEPS],
    "column_encoding": dict.fromkeys(_STEPS, "DELTA_BINARY_PACKED"),
    "dictionary_pagesize_limit": 64 << 20,  # ids are in every row group's dictionary, whatever their size
    "write_statistics": ["turn", "number", "item_id", "at"],  # what a search begins with
    "store_schema": False,  # to those who read it, a dictionary is strings
}


class About(msgspec.Struct, kw_only=True):
    """What a file says of itself, in the metadata of its footer."""

    version: int
    queue: str
    incarnation: str
    partition: int
    from_turn: int
    to_turn: int
    counts: dict[str, int]  # rows by `why`
    letters: int | None = None  # how many of those that arrived came dead; None: not counted


# ---- names --------------------------------------------------------------------------------------------------


class Span(msgspec.Struct, frozen=True, order=True):
    """Turns `from_turn` to `to_turn` of a partition."""

    incarnation: str
    partition: int
    from_turn: int
    to_turn: int

    @property
    def lane(self) -> tuple[str, int]:
        return self.incarnation, self.partition

    def name(self, ending: str) -> str:
        return f"{self.incarnation}-p{self.partition:05d}-{self.from_turn:012d}-{self.to_turn:012d}.{ending}"

    def within(self, other: Span) -> bool:
        """Whether all its turns are the other's too."""
        return self.lane == other.lane and other.from_turn <= self.from_turn and self.to_turn <= other.to_turn


def parse_span(name: str) -> Span | None:
    found = _FILE.fullmatch(name)
    return Span(found[1], int(found[2]), int(found[3]), int(found[4])) if found else None


class LakeFile(msgspec.Struct, frozen=True, order=True):
    date: str
    queue: str
    span: Span
    path: Path
    size: int

    @property
    def lane(self) -> tuple[str, int]:
        return self.span.lane


def date_of(at: int) -> str:
    """Of an instant in ms, in UTC."""
    return datetime.fromtimestamp(at // _DAY_MS * 86_400, UTC).date().isoformat()


def whole(spans: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Those with turns that no other has all of, and the rest; each is a span, or has one."""
    kept: list[Any] = []
    covered: list[Any] = []
    for one in sorted(spans, key=_by_reach):
        last = kept[-1] if kept else None
        (covered if last is not None and _span(one).within(_span(last)) else kept).append(one)
    return kept, covered


def _span(one: Any) -> Span:
    return one if isinstance(one, Span) else one.span


def _by_reach(one: Any) -> tuple[str, int, int, int]:
    span = _span(one)
    return span.incarnation, span.partition, span.from_turn, -span.to_turn


# ---- the lake -----------------------------------------------------------------------------------------------


class Gap(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Turns whose journal rows were gone before they could be exported."""

    queue: str
    incarnation: str
    partition: int
    from_turn: int
    to_turn: int
    found_at: datetime

    @property
    def span(self) -> Span:
        return Span(self.incarnation, self.partition, self.from_turn, self.to_turn)


class Lake:
    """A directory of history. Making one touches nothing; it appears when something is written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @property
    def state(self) -> Path:
        return self.path / STATE

    def folder(self, date: str, queue: str) -> Path:
        return self.events / f"date={date}" / f"queue={quote(queue, safe='')}"

    def dates(self) -> list[str]:
        return sorted(name.removeprefix("date=") for name in _names(self.events) if name.startswith("date="))

    def queues(self, date: str) -> list[str]:
        names = _names(self.events / f"date={date}")
        return sorted(unquote(name.removeprefix("queue=")) for name in names if name.startswith("queue="))

    def files(
        self,
        *,
        queues: Sequence[str] | None = None,
        since: str | None = None,
        until: str | None = None,
        lane: tuple[str, int] | None = None,
    ) -> list[LakeFile]:
        """Those that count, by date, queue and turn; `since` and `until` are dates, both included."""
        return [file for kept, _ in self.folders(queues=queues, since=since, until=until, lane=lane) for file in kept]

    def folders(
        self,
        *,
        queues: Sequence[str] | None = None,
        since: str | None = None,
        until: str | None = None,
        lane: tuple[str, int] | None = None,
    ) -> Iterator[tuple[list[LakeFile], list[LakeFile]]]:
        """Of each date and queue the files that count, and those that were merged into them."""
        for date in self.dates():
            if (since is not None and date < since) or (until is not None and date > until):
                continue
            for queue in self.queues(date):
                if queues is None or queue in queues:
                    yield whole(self._list(date, queue, lane))

    def _list(self, date: str, queue: str, lane: tuple[str, int] | None) -> Iterator[LakeFile]:
        try:
            with os.scandir(self.folder(date, queue)) as entries:
                for entry in entries:
                    span = parse_span(entry.name)
                    if span is not None and (lane is None or span.lane == lane):
                        yield LakeFile(date, queue, span, Path(entry.path), entry.stat().st_size)
        except FileNotFoundError:  # retention took it away while we looked
            return

    def gaps(self) -> list[Gap]:
        """Turns that are missing, each once."""
        found = [
            msgspec.json.decode((self.path / GAPS / name).read_bytes(), type=Gap)
            for name in _names(self.path / GAPS)
            if parse_span(name)
        ]
        return whole(found)[0]

    @contextmanager
    def locked(self, name: str, what: str) -> Iterator[None]:
        """One process at a time; the system lets go of a lock whose holder has died."""
        try:
            make_directory(self.path)
            descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InvalidRequest(f"cannot use {self.path} as history lake ({error}); choose another") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owner = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
                raise DirectoryInUse(
                    f"process {owner} {what} the history lake {self.path} already; let it, or stop it first"
                ) from None
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


# ---- files --------------------------------------------------------------------------------------------------


def open_writer(sink: Any) -> Any:
    """A Parquet writer for tables of `FLAT_SCHEMA`: each becomes a row group."""
    return pq.ParquetWriter(sink, FLAT_SCHEMA, **_WRITING)


def write_about(writer: Any, about: About) -> None:
    writer.add_key_value_metadata({ABOUT: msgspec.json.encode(about)})


def read_about(metadata: Any) -> About:
    """Of a file's footer."""
    found = (metadata.metadata or {}).get(ABOUT)
    if found is None:
        raise ValueError("this Parquet file is not of a history lake")
    about = msgspec.json.decode(found, type=About)
    if about.version > LAKE_VERSION:
        raise ValueError(f"a history file of version {about.version}; this millpond reads up to {LAKE_VERSION}")
    return about
