"""What stands between Spark and the server. It sees every call, before the server does it and before the caller learns
of it, hears what the driver's classes tell, and lets go on what the watcher lets go on.
"""

from __future__ import annotations

import http.client
import json
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qs, urlsplit

from tests.spark.torture.points import LOOK, Side
from tests.spark.torture.victims import caller

LOOPBACK = "127.0.0.1"
FORWARD_TIMEOUT_S = 120.0  # more than a long poll, on a machine that is busy
NOT_PASSED_ON = {"connection", "content-length", "date", "server", "transfer-encoding"}


class Event(NamedTuple):
    at: str
    side: Side
    queue: str
    made: bool | None  # whether there is a claim now, where that is known
    process: int | None  # who tells; else the one that calls from the first port to the second
    ports: tuple[int, int]

    def of(self, session: int) -> int | None:
        return self.process if self.process is not None else caller(self.ports, session)


class Watcher(Protocol):
    def happened(self, event: Event) -> bool:
        """Whether the call goes on. One that is told of goes on, if there is still somebody to do so."""

    def order(self, query: str, seen: int, error: str) -> dict[str, Any]:
        """What a query is to do next, once there is more than it had seen."""

    def broke(self, trace: str) -> None:
        """A mistake of the gate's own, or of the watcher's."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    watcher: Watcher
    address: tuple[str, int]

    def setup(self) -> None:
        super().setup()
        self._ahead = http.client.HTTPConnection(*self.address, timeout=FORWARD_TIMEOUT_S)

    def finish(self) -> None:
        self._ahead.close()
        try:
            super().finish()
        except OSError:  # who asked is dead
            pass

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        try:
            if len(body) < size:  # the caller is dead
                self.close_connection = True
            elif self.path.startswith("/torture/"):
                self._told(self.path.rpartition("/")[2], json.loads(body))
            else:
                self._called(body)
        except (OSError, http.client.HTTPException):  # the caller or the server is dead
            self.close_connection = True
        except Exception:
            self.close_connection = True
            self.watcher.broke(traceback.format_exc())

    def _told(self, what: str, fields: dict[str, Any]) -> None:
        if what == "order":
            reply = self.watcher.order(fields["query"], fields["seen"], fields["error"])
        else:
            side, made = Side(fields["side"]), fields.get("made")
            self.watcher.happened(Event(fields["at"], side, fields["queue"], made, fields["pid"], (0, 0)))
            reply = {}
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(reply).encode())

    def _called(self, body: bytes) -> None:
        at, queue = _call(self.path, body)
        event = Event(at, Side.BEFORE, queue, None, None, (self.client_address[1], self.connection.getsockname()[1]))
        if not self.watcher.happened(event):
            self.close_connection = True
            return
        self._ahead.request("POST", self.path, body, dict(self.headers.items()))
        response = self._ahead.getresponse()
        reply = response.read()
        done = response.status == 200
        if done and not self.watcher.happened(event._replace(side=Side.AFTER, made=_made(at, reply))):
            self.close_connection = True
            return
        headers = {name: value for name, value in response.headers.items() if name.lower() not in NOT_PASSED_ON}
        self._answer(response.status, headers, reply)

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _call(path: str, body: bytes) -> tuple[str, str]:
    """What is called, and of which queue."""
    parts = urlsplit(path)
    name = parts.path.removeprefix("/v1/")
    if parts.query:
        return name, parse_qs(parts.query)["queue"][0]
    fields = json.loads(body)
    if name == "claim.read" and fields["limit"] == 1:
        name = LOOK
    return name, fields.get("queue") or fields.get("name") or ""


def _made(at: str, reply: bytes) -> bool | None:
    return bool(json.loads(reply)["items"]) if at == "queue.claim" else None


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Callers are killed, in the middle of what they say too."""


@contextmanager
def gate(watcher: Watcher, address: tuple[str, int]) -> Iterator[str]:
    """Its URL, for a server at `address` that may come and go."""
    handler = type("Handler", (_Handler,), {"watcher": watcher, "address": address})
    with _Listener((LOOPBACK, 0), handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{listener.server_address[1]}"
        finally:
            listener.shutdown()
            thread.join()
