"""Connections to one PostgreSQL database.

The partitions of a store share a few of them; each call takes one for as long as it lasts. A connection is made in the
thread that needs it, so whoever waits for one learns why there is none.
"""

from __future__ import annotations

import importlib.resources
import select
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from millpond.store.base import StoreFailed, StoreRefused
from millpond.store.postgres_errors import STATEMENT_TIMEOUT_S, code_of, describe, kind_of, name_of, parse_url
from millpond.store.postgres_values import Bodies, BodiesDumper, Numbers, NumbersDumper
from millpond.store.sqlite_connections import load_statements

CONNECTIONS_MAX = 16  # a commit holds one for a millisecond or so: enough for hundreds of busy partitions
ANSWER_TIMEOUT_S = 35  # by then the server should have given up by itself: it hangs, or the network is gone
LOCK_TIMEOUT_S = 5  # a takeover waits for a commit, or a commit for a takeover: milliseconds
WAKE_S = 0.5  # how often a call that waits for an answer looks at the time
IDLE_S = 60.0  # unused for so long, a connection is closed
VERSION_MIN = 130000  # the oldest server that the SQL is written for
READ_ONLY = "25006"
UPGRADES = ("schema_1",)  # step n brings a schema of version n to n + 1; a new one is of version 0

SQL = load_statements(importlib.resources.files("millpond.store").joinpath("postgres.sql").read_text("utf-8"))


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """Gives up when the server does not answer. `warned`: what it says of its own accord about a commit."""

    warned: str | None = None
    idle_since = 0.0

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        return super().wait(limited(gen, time.monotonic() + ANSWER_TIMEOUT_S), WAKE_S)

    def note(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == "WARNING":
            self.warned = diagnostic.message_primary

    @property
    def quiet(self) -> bool:
        """Nothing has come in since it was last used; when the server ends a connection, something does."""
        poll = select.poll()
        poll.register(self.pgconn.socket, select.POLLIN)
        return not poll.poll(0)


def limited(answers: Generator[Any, Any, Any], deadline: float) -> Generator[Any, Any, Any]:
    """`answers` is told that nothing is ready whenever it has waited for a while; at the deadline that is the end."""
    try:
        wanted = next(answers)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > deadline:
                raise psycopg.OperationalError(f"no answer within {ANSWER_TIMEOUT_S} s")
            wanted = answers.send(ready)
    except StopIteration as done:
        return done.value


class Connections:
    def __init__(self, url: str, connections_max: int = CONNECTIONS_MAX) -> None:
        self._arguments, self._schema = parse_url(url)
        self.name = name_of(self._arguments)
        self._connections_max = connections_max
        self._slots = threading.BoundedSemaphore(connections_max)
        self._idle: deque[Connection] = deque()  # the one used last at the right
        self._lock = threading.Lock()
        self._upgraded = False
        self._upgrading = threading.Lock()

    @contextmanager
    def take(self, make: bool = False) -> Iterator[Connection]:
        """A connection for the `with` block. All of psycopg's errors in there become StoreFailed, or a kind of it.

        `make`: with a schema that is made if there is none.
        """
        if not self._slots.acquire(timeout=ANSWER_TIMEOUT_S):
            raise StoreRefused(f"{self.name}: all {self._connections_max} connections are in use; try again later")
        connection = None
        try:
            connection = self._idle_one() or self._connect(make)
            yield connection
        except psycopg.Error as problem:
            if connection is not None and code_of(problem) == READ_ONLY:
                connection.close()  # the next one may lead to the server that writes by now
            kind = StoreRefused if connection is None else kind_of(problem)
            raise kind(describe(self.name, self._arguments, self._schema, problem)) from problem
        finally:
            if connection is not None:
                self._give_back(connection)
            self._slots.release()

    def close(self) -> None:
        """Closes those that nobody uses. Others are made if need be."""
        while (connection := self._pop()) is not None:
            connection.close()

    # ---- inside ----

    def _idle_one(self) -> Connection | None:
        while (connection := self._pop()) is not None:
            if connection.quiet:
                return connection
            connection.close()
        return None

    def _pop(self) -> Connection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: Connection) -> None:
        """One that is in the middle of something is of no use any more."""
        if connection.closed or connection.pgconn.transaction_status != TransactionStatus.IDLE:
            connection.close()
            return
        connection.idle_since = now = time.monotonic()
        with self._lock:
            self._idle.append(connection)
            unused = self._idle.popleft() if now - self._idle[0].idle_since > IDLE_S else None
        if unused is not None:
            unused.close()

    def _connect(self, make: bool) -> Connection:
        connection = Connection.connect(**self._arguments, autocommit=True)
        try:
            if connection.info.server_version < VERSION_MIN:
                raise StoreFailed(f"{self.name} is too old; use PostgreSQL {VERSION_MIN // 10_000} or later")
            connection.add_notice_handler(connection.note)
            connection.adapters.register_dumper(Numbers, NumbersDumper)
            connection.adapters.register_dumper(Bodies, BodiesDumper)
            connection.prepare_threshold = 0  # all are few, and used again
            path = sql.Identifier(self._schema).as_string(connection)
            connection.execute(SQL["session"], (path, f"{STATEMENT_TIMEOUT_S}s", f"{LOCK_TIMEOUT_S}s"))
            with self._upgrading:
                if not self._upgraded:
                    self._upgrade(connection, make)
                    self._upgraded = True
        except BaseException:
            connection.close()
            raise
        return connection

    def _upgrade(self, connection: Connection, make: bool) -> None:
        """Brings the schema up to date, or makes it. Once only: a schema that disappears is an error."""
        version = self._version(connection)
        if version == len(UPGRADES):
            return
        if not version and not make:
            raise StoreFailed(
                f"{self.name} has no schema {self._schema} of ours, so it is not this store; is the url right?"
            )
        with connection.transaction():
            connection.execute(SQL["schema_lock"])
            version = self._version(connection)
            if version is None:
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._schema)))
            for step in range(version or 0, len(UPGRADES)):
                connection.execute(SQL[UPGRADES[step]], prepare=False)  # several statements
            connection.execute(SQL["set_version"], (len(UPGRADES),))

    def _version(self, connection: Connection) -> int | None:
        """None if there is no schema, 0 if there is nothing of ours in it."""
        exists, ours = one(connection.execute(SQL["schema_there"], {"schema": self._schema}))
        if not ours:
            return 0 if exists else None
        version: int = one(connection.execute(SQL["version"]))[0]
        if version > len(UPGRADES):
            raise StoreFailed(
                f"{self.name}: the schema {self._schema} is of version {version}, and this millpond knows "
                f"{len(UPGRADES)} at most; upgrade millpond"
            )
        return version


def one(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The only row of a statement that always has one."""
    row = cursor.fetchone()
    assert row is not None
    return row
