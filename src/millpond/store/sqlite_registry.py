"""The registry in SQLite: which queues there are, and what was done to them by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import msgspec

from millpond.model import AuditEntry, QueueDefinition
from millpond.store.base import StoreFailed, StoreFull
from millpond.store.sqlite_connections import SQL, close_quietly, connect, describe, is_full, json_array, pack

REGISTRY_UPGRADES = ("registry_1", "registry_2", "registry_3")  # see connect


class SqliteRegistry:
    """`<directory>/meta.db`. While it is open no other process can open it, and so none can use the directory.

    It opens itself, also after an error: a row is written whole, so a `put` that failed can be sent again.
    """

    def __init__(self, directory: Path, vfs: str | None = None) -> None:
        self._path = directory.absolute() / "meta.db"
        self._vfs = vfs
        self._connection: apsw.Connection | None = None

    def load(self) -> list[QueueDefinition]:
        decode = msgspec.msgpack.Decoder(QueueDefinition).decode
        with self._connected() as connection:
            rows: Iterable[Any] = connection.execute(SQL["registry_load"]).fetchall()
        try:
            return [decode(definition) for (definition,) in rows]
        except msgspec.MsgspecError as problem:
            raise StoreFailed(
                f"{self._path} holds a queue that cannot be read ({problem}); upgrade millpond"
            ) from problem

    def put(self, definitions: Sequence[QueueDefinition], entries: Sequence[AuditEntry] = ()) -> None:
        encode = msgspec.msgpack.Encoder().encode
        rows = pack([(one.name,) for one in definitions], [encode(one) for one in definitions])
        if definitions or entries:
            self._write([("registry_put", rows)] if definitions else [], entries)

    def remove(self, name: str, incarnation: str = "", entries: Sequence[AuditEntry] = ()) -> None:
        gone: list[tuple[str, tuple[Any, ...]]] = [("registry_gone_add", (incarnation,))] if incarnation else []
        self._write([("registry_remove", (name,)), *gone], entries)

    def gone(self, incarnations: Sequence[str]) -> list[str]:
        with self._connected() as connection:
            return [one for (one,) in connection.execute(SQL["registry_gone"], (json_array(incarnations),))]

    def audit(self, queue: str, before: int | None, limit: int) -> list[tuple[int, AuditEntry]]:
        decode = msgspec.msgpack.Decoder(AuditEntry).decode
        with self._connected() as connection:
            rows: Iterable[Any] = connection.execute(SQL["audit_page"], (queue, before, limit)).fetchall()
        try:
            return [(number, decode(entry)) for number, entry in rows]
        except msgspec.MsgspecError as problem:
            raise StoreFailed(
                f"{self._path} holds an audit entry that cannot be read ({problem}); upgrade millpond"
            ) from problem

    def _write(self, statements: list[tuple[str, tuple[Any, ...]]], entries: Sequence[AuditEntry]) -> None:
        """All in one commit. One that fails is rolled back as its connection is closed."""
        encode = msgspec.msgpack.Encoder().encode
        if entries:
            rows = pack([(one.queue,) for one in entries], [encode(one) for one in entries])
            statements = [*statements, ("audit_add", rows)]
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement, bindings in statements:
                connection.execute(SQL[statement], bindings)
            connection.execute("COMMIT")

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close_quietly(connection)

    @contextmanager
    def _connected(self) -> Iterator[apsw.Connection]:
        try:
            if self._connection is None:
                self._connection = connect(self._path, REGISTRY_UPGRADES, "full", self._vfs)
            yield self._connection
        except (apsw.Error, OSError) as problem:
            full = is_full(problem, self._connection)
            self.close()
            raise (StoreFull if full else StoreFailed)(describe(self._path, problem)) from problem
        except BaseException:
            self.close()
            raise
