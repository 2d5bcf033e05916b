"""The lines of `/v1/queue.subscribe`, opened again when they break: blocking."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from millpond.client.base import SUBSCRIBE_SILENCE_S
from millpond.client.connection import Connection
from millpond.client.faults import error_of
from millpond.client.http1 import Lines
from millpond.client.keeper import log
from millpond.client.lines import LINE_BYTES_MAX, item_of
from millpond.client.pool import Pool
from millpond.client.retrying import Pauses, closed
from millpond.errors import MillpondError
from millpond.wire.replies import LeaseItem


def subscription(
    pool: Pool, request: bytes, timeout: float, closing: threading.Event, pauses: Pauses
) -> Iterator[LeaseItem]:
    worked = False
    deadline = time.monotonic() + timeout
    while True:
        try:
            for item in _stream(pool, request, time.monotonic() + timeout):
                worked = True
                if item is not None:
                    pauses.reset()
                    yield item
        except MillpondError as error:
            if closing.is_set():
                raise closed() from error
            if not error.retryable or (not worked and time.monotonic() > deadline):
                raise
            log.warning("the stream broke, and is opened again: %s", error)
        if closing.wait(pauses.next()):
            raise closed()


def _stream(pool: Pool, request: bytes, deadline: float) -> Iterator[LeaseItem | None]:
    """None where the stream only shows that it lives."""
    connection = pool.take(deadline)
    try:
        whole = connection.start(request, deadline)
        if whole is not None and whole.status != 200:
            raise error_of(whole)
        yield None
        if whole is None:
            yield from _items(connection)
        else:
            yield from map(item_of, Lines(LINE_BYTES_MAX).feed(whole.body))
    finally:
        pool.put(connection, reusable=False)


def _items(connection: Connection) -> Iterator[LeaseItem | None]:
    lines = Lines(LINE_BYTES_MAX)
    ended = False
    while not ended:
        data, ended = connection.more(SUBSCRIBE_SILENCE_S)
        for line in lines.feed(data):
            yield item_of(line)
