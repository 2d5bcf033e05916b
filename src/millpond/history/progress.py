"""How far a partition was exported, and what was known of its items then.

A *bookmark* is a file in the lake's `_state`, named by its turn. It is written before the data file that ends at that
turn appears, and counts only if that file did: else a crash came in between, and the turns are exported again. Most
hold all that is known; where that is much, only what has changed since an earlier one, `previous`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from millpond.history.durable import DurableFile, Watch, remove_files, write_file
from millpond.history.known import Known
from millpond.history.lake import Lake

BOOKMARK_VERSION = 1
CHAIN_MAX = 64  # bookmarks that need each other: all are read at the start
WHOLE_ITEMS = 1_000  # so few are always saved whole: some KB

_FILE = re.compile(r"([a-z0-9]{1,32})-p([0-9]{5})-([0-9]{12,})\.known")
_ABOUT = b"millpond.bookmark"
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")

Lane = tuple[str, int]  # incarnation, partition


class Bookmark(msgspec.Struct, kw_only=True):
    """After `turn`. `row_check` is a checksum of that turn's row, by which to know the journal again."""

    version: int
    turn: int
    data_turn: int  # the last turn of the newest data file; more turns may have changed nothing
    row_check: int
    previous: int | None = None
    items: int = 0  # saved in it and in those it needs, beyond the first


def list_bookmarks(lake: Lake) -> dict[Lane, list[int]]:
    """The turns of all that are there, whether they count or not."""
    turns: dict[Lane, list[int]] = {}
    for path in lake.state.glob("*.known"):
        if found := _FILE.fullmatch(path.name):
            turns.setdefault((found[1], int(found[2])), []).append(int(found[3]))
    return turns


def remove_bookmarks(lake: Lake, lane: Lane, turns: Iterable[int]) -> None:
    remove_files([lake.state / _name(lane, turn) for turn in turns])


def _name(lane: Lane, turn: int) -> str:
    return f"{lane[0]}-p{lane[1]:05d}-{turn:012d}.known"


class Progress:
    """`turn` is the last that was exported. `known` None: what was known then is lost."""

    def __init__(self, lake: Lake, lane: Lane, newest: int) -> None:
        """`newest` is the last turn that the lake's data files have, or had."""
        self._lake = lake
        self._lane = lane
        self._chain: list[int] = []  # the newest bookmark, and those that it needs
        self._stale: list[int] = []  # not needed once the newest one counts
        self._items = 0
        self.data_turn = newest
        self.turn = newest
        self.row_check: int | None = None
        self.known: Known | None = None

    def load(self, known: Known, turns: list[int]) -> None:
        """Read the newest of these bookmarks that counts, and those that it needs; the others are removed."""
        found = max(filter(self._counts, turns), default=0)
        if found and found >= self.data_turn:
            self._load_chain(known, list(self._read_chain(found)))
        elif not self.turn:
            self.known = known
        self._stale = [turn for turn in turns if turn not in self._chain]
        self.settle()

    def _load_chain(self, known: Known, chain: list[tuple[Bookmark, Any]]) -> None:
        if not chain or chain[-1][0].previous is not None:
            return
        for _, table in reversed(chain):
            known.load(table)
        newest = chain[0][0]
        self.turn, self.row_check, self.known = newest.turn, newest.row_check, known
        self._items = newest.items
        self._chain = [bookmark.turn for bookmark, _ in chain]

    def save(self, known: Known, turn: int, data_turn: int, row_check: int, watch: Watch) -> None:
        """Durably. The bookmarks before it are needed until its data file has appeared; then `settle`."""
        whole = self._wants_whole(known)
        items = 0 if whole else self._items + known.touched
        bookmark = Bookmark(
            version=BOOKMARK_VERSION,
            turn=turn,
            data_turn=data_turn,
            row_check=row_check,
            previous=None if whole else self._chain[0],
            items=items,
        )
        file = DurableFile(self._lake.state, _name(self._lane, turn))
        try:
            _write(file.sink, known.save(whole=whole), bookmark)
            file.finish()
            watch("bookmark written")
            file.appear(_name(self._lane, turn))
        except BaseException:
            file.discard()
            raise
        if whole:
            self._stale += [earlier for earlier in self._chain if earlier != turn]
        self._chain = [turn] if whole else [turn, *self._chain]
        self._items = items
        self.turn, self.data_turn, self.row_check = turn, data_turn, row_check
        watch("bookmark named")

    def settle(self) -> None:
        """The data file is there: bookmarks that the newest one does not need can go."""
        remove_bookmarks(self._lake, self._lane, self._stale)
        self._stale = []

    def forget(self) -> None:
        """What is known is worth nothing after a gap: the next bookmark does not build on it."""
        self._stale += self._chain
        self._chain, self._items = [], 0

    def _wants_whole(self, known: Known) -> bool:
        """When all is no more than the changes since it was last whole: so a change is saved twice, not each time."""
        if not self._chain or len(self._chain) >= CHAIN_MAX:
            return True
        return len(known) <= max(WHOLE_ITEMS, self._items + known.touched)

    # ---- files ----------------------------------------------------------------------------------------------

    def _path(self, turn: int) -> Path:
        return self._lake.state / _name(self._lane, turn)

    def _counts(self, turn: int) -> bool:
        bookmark = _read_bookmark(self._path(turn))
        return bookmark is not None and bookmark.data_turn <= self.data_turn

    def _read_chain(self, turn: int | None) -> Iterator[tuple[Bookmark, Any]]:
        """As far as it can be read."""
        while turn is not None:
            read = _read(self._path(turn))
            if read is None:
                return
            yield read
            turn = read[0].previous


def _write(sink: Any, table: Any, bookmark: Bookmark) -> None:
    about = {**table.schema.metadata, _ABOUT: msgspec.msgpack.encode(bookmark)}
    table = table.replace_schema_metadata(about)
    with pa.ipc.new_stream(sink, table.schema, options=_OPTIONS) as writer:
        writer.write_table(table)


def _read(path: Path) -> tuple[Bookmark, Any] | None:
    """None for what is not there or cannot be read."""
    try:
        with pa.ipc.open_stream(path.read_bytes()) as reader:
            table = reader.read_all()
        return _bookmark_of(table.schema), table
    except (OSError, pa.ArrowInvalid, KeyError, msgspec.DecodeError):
        return None


def _read_bookmark(path: Path) -> Bookmark | None:
    try:
        with path.open("rb") as file, pa.ipc.open_stream(file) as reader:
            return _bookmark_of(reader.schema)
    except (OSError, pa.ArrowInvalid, KeyError, msgspec.DecodeError):
        return None


def _bookmark_of(schema: Any) -> Bookmark:
    bookmark = msgspec.msgpack.decode(schema.metadata[_ABOUT], type=Bookmark)
    if bookmark.version != BOOKMARK_VERSION:
        raise ValueError(f"a bookmark of version {bookmark.version}; this millpond reads up to {BOOKMARK_VERSION}")
    return bookmark


# ---- what retention took ------------------------------------------------------------------------------------


class _Floor(msgspec.Struct):
    turn: int


def floor_of(lake: Lake, lane: Lane) -> int:
    """The last turn whose data file was dropped by retention; 0: none was."""
    try:
        return msgspec.json.decode(_floor_path(lake, lane).read_bytes(), type=_Floor).turn
    except FileNotFoundError:
        return 0


def raise_floor(lake: Lake, lane: Lane, turn: int) -> None:
    """Durably, before the data file goes: else the exporter would not know how far it had come."""
    if turn > floor_of(lake, lane):
        path = _floor_path(lake, lane)
        write_file(path.parent, path.name, msgspec.json.encode(_Floor(turn)))


def _floor_path(lake: Lake, lane: Lane) -> Path:
    return lake.state / f"{lane[0]}-p{lane[1]:05d}.floor"


def note_deleted(lake: Lake, incarnation: str) -> bool:
    """That a queue is gone, for the next sync; False: it was noted before."""
    name = f"{incarnation}.deleted"
    if (lake.state / name).exists():
        return False
    write_file(lake.state, name, b"")
    return True
