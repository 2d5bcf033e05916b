"""The gate of the torture: callers may be killed at any moment, in the middle of what they say too."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.spark.torture.gate import Event, gate


class Listening:
    """A watcher that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.traces: list[str] = []

    def happened(self, event: Event) -> bool:
        self.heard.append(event)
        return True

    def order(self, query: str, seen: int, error: str) -> dict[str, Any]:
        raise AssertionError("nobody asked")

    def broke(self, trace: str) -> None:
        self.traces.append(trace)


@pytest.mark.parametrize("path", ["/torture/told", "/v1/queue.claim"])
@pytest.mark.parametrize("said", [b"", b'{"at": '])
def test_a_caller_that_dies_in_the_middle_is_not_listened_to(path: str, said: bytes) -> None:
    watcher = Listening()
    with gate(watcher, ("127.0.0.1", 9)) as url:
        port = urlsplit(url).port
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(b"POST %s HTTP/1.1\r\nHost: gate\r\nContent-Length: 90\r\n\r\n" % path.encode() + said)
            caller.shutdown(socket.SHUT_WR)
            assert caller.recv(1) == b""
    assert (watcher.heard, watcher.traces) == ([], [])
