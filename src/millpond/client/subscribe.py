"""The lines of `/v1/queue.subscribe`, opened again when they break: blocking."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from typing import Self

from millpond.client.base import SUBSCRIBE_SILENCE_S
from millpond.client.connection import Connection
from millpond.client.faults import error_of
from millpond.client.http1 import Lines
from millpond.client.lines import LINE_BYTES_MAX, item_of
from millpond.client.pool import Pool
from millpond.client.retrying import closed
from millpond.consuming.held import HeldItem
from millpond.consuming.keeper import log
from millpond.consuming.pauses import Pauses
from millpond.errors import MillpondError
from millpond.wire.replies import LeaseItem


class Stream:
    """A loop that leaves it, or drops it, ends the stream: what is unfinished goes back."""

    def __init__(self, items: Generator[HeldItem]) -> None:
        self._items = items

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> HeldItem:
        return next(self._items)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._items.close()


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
