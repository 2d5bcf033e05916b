"""A server that does what it is told, request by request: for everything that a real one does once a year."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from millpond.wire import MSGPACK

Step = Callable[[socket.socket], bool]  # whether the connection goes on
TIMEOUT_S = 10.0


def reply(value: Any = None, status: int = 200, *headers: str) -> Step:
    return raw(head(status, len(body := MSGPACK.encode(value)), *headers) + body)


def refusal(code: str, status: int, *headers: str) -> Step:
    return reply({"error": {"code": code, "message": "no; never mind", "details": {}}}, status, *headers)


def raw(data: bytes) -> Step:
    def step(sock: socket.socket) -> bool:
        sock.sendall(data)
        return True

    return step


def cut(data: bytes = b"") -> Step:
    def step(sock: socket.socket) -> bool:
        sock.sendall(data)
        return False

    return step


def reset(sock: socket.socket) -> bool:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def silent(sock: socket.socket) -> bool:
    """Until the client gives up."""
    while sock.recv(65536):
        pass
    return False


def head(status: int, length: int, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", "Content-Type: application/msgpack", f"Content-Length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


class Scripted:
    """`requests` has what came: call and decoded body. `connections` counts them."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._steps = iter(steps)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[tuple[str, Any]] = []
        self.heads: list[bytes] = []
        self.connections = 0
        self.came = threading.Semaphore(0)
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="scripted")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.add(sock)
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while self._request(sock):
                    with self._lock:
                        step = next(self._steps, cut())
                    self.came.release()
                    if not step(sock):
                        return
            except OSError:
                pass
            finally:
                self._open.discard(sock)

    def _request(self, sock: socket.socket) -> bool:
        data = b""
        while b"\r\n\r\n" not in data:
            part = sock.recv(65536)
            if not part:
                return False
            data += part
        before, _, body = data.partition(b"\r\n\r\n")
        length = int(before.lower().partition(b"content-length:")[2].split()[0])
        while len(body) < length:
            body += sock.recv(65536)
        with self._lock:
            self.heads.append(before)
            self.requests.append((before.split()[1].decode(), MSGPACK.decode(body, Any)))
        return True

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._open):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(TIMEOUT_S)


@contextmanager
def scripted(*steps: Step) -> Iterator[Scripted]:
    server = Scripted(steps)
    try:
        yield server
    finally:
        server.close()
