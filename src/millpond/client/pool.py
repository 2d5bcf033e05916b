"""The connections of a blocking client: few, kept, and each in one thread's hands at a time."""

from __future__ import annotations

import threading
import time

from millpond.client.base import Settings
from millpond.client.connection import Connection
from millpond.client.http1 import Reply
from millpond.client.retrying import closed
from millpond.errors import Unavailable


class Abort:
    """Lets another thread end a call that waits for its reply."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.aborted = False

    def begin(self, connection: Connection) -> None:
        with self._lock:
            self._connection = connection
            if self.aborted:
                connection.abort()

    def end(self) -> None:
        with self._lock:
            self._connection = None

    def abort(self) -> None:
        with self._lock:
            self.aborted = True
            if self._connection is not None:
                self._connection.abort()


class Pool:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._free = threading.Condition(threading.Lock())
        self._idle: list[Connection] = []  # the last used is the next: the others grow old and are dropped
        self._busy: set[Connection] = set()
        self._opening = 0
        self._closed = False

    def exchange(self, request: bytes, deadline: float, abort: Abort | None = None) -> Reply:
        connection = self.take(deadline)
        reusable = False
        try:
            if abort is not None:
                abort.begin(connection)
            reply = connection.exchange(request, deadline)
            reusable = reply.reusable
        finally:
            if abort is not None:
                abort.end()
            self.put(connection, reusable)
        return reply

    def take(self, deadline: float) -> Connection:
        while True:
            connection = self._idle_or_turn(deadline)
            if connection is None:
                return self._opened(deadline)
            if not connection.is_stale:
                return connection
            self.put(connection, reusable=False)

    def _idle_or_turn(self, deadline: float) -> Connection | None:
        """An idle connection, or the turn to open one."""
        with self._free:
            while not self._closed:
                if self._idle:
                    connection = self._idle.pop()
                    self._busy.add(connection)
                    return connection
                if len(self._busy) + self._opening < self._settings.connections:
                    self._opening += 1
                    return None
                if not self._free.wait(deadline - time.monotonic()):
                    count = self._settings.connections
                    raise Unavailable(f"all {count} connections of this client are in use; raise connections=")
        raise closed()

    def _opened(self, deadline: float) -> Connection:
        connection = None
        try:
            connection = Connection(self._settings, deadline)
        finally:
            with self._free:
                self._opening -= 1
                if connection is not None and not self._closed:
                    self._busy.add(connection)
                else:
                    self._free.notify()
        if connection not in self._busy:
            connection.close()
            raise closed()
        return connection

    def put(self, connection: Connection, reusable: bool) -> None:
        connection.idle_since = time.monotonic()
        with self._free:
            self._busy.discard(connection)
            if reusable and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()
            self._free.notify()

    def close(self) -> None:
        """Calls under way end with an error."""
        with self._free:
            self._closed = True
            for connection in self._busy:
                connection.abort()
            while self._idle:
                self._idle.pop().close()
            self._free.notify_all()

    def forget(self) -> None:
        """In a forked child: closes its copies, the parent's stay open. No lock: its holder may not exist here."""
        for connection in [*self._idle, *self._busy]:
            connection.close()
