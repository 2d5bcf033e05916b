"""`millpond serve` as a process of its own, and what tests ask of it: over HTTP, of its log, and of the system."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.http.served import Reply

TIMEOUT_S = 20.0  # for anything that must happen: a test that hangs says where
LOOK_S = 0.005  # between looks at what nobody tells
LOOPBACK = ("--bind", "127.0.0.1:0")


def until(holds: Callable[[], Any], what: str = "it") -> Any:
    """What `holds` gives, once that is something."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while not (found := holds()):
        assert time.monotonic() < give_up_at, f"waited {TIMEOUT_S:g} s for {what}"
        time.sleep(LOOK_S)
    return found


class Process:
    """Its stderr is read as it comes: `lines` are all of it."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.pid = popen.pid
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def said(self, words: str) -> str | None:
        return next((one["message"] for one in self.log if words in one["message"]), None)

    # ---- its life -----------------------------------------------------------------------------------------

    def started(self) -> Server:
        def look() -> str | None:
            assert self.popen.poll() is None, "".join(self.lines)
            return self.said("listening on")

        told = until(look, "the server to listen")
        return Server(self, re.findall(r"(?:on|,) ([^ ,]+:[^ ,]+)", told.partition(", data in")[0]))

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def hurry(self) -> int:
        """Ended by two signals: what is leased is not waited for."""
        self.terminate()
        until(lambda: self.said("ending"), "the end to begin")
        self.terminate()
        return self.ended()

    def kill(self) -> None:
        self.popen.kill()
        self.ended()

    def ended(self) -> int:
        code = self.popen.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code

    # ---- what it holds ------------------------------------------------------------------------------------

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def memory(self) -> int:
        """Resident, in bytes."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) << 10


class Server:
    """A process that listens. The first address counts."""

    def __init__(self, process: Process, addresses: list[str]) -> None:
        self.process = process
        self.addresses = addresses
        self.address = addresses[0]
        self.tls: ssl.SSLContext | None = None
        self.token: str | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def connect(self, timeout: float = TIMEOUT_S) -> socket.socket:
        if self.address.startswith("unix:"):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(timeout)
            sock.connect(self.address.removeprefix("unix:"))
            return sock
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named.setdefault("Content-Type", "application/json")
        if self.token is not None:
            named.setdefault("Authorization", f"Bearer {self.token}")
        connection = http.client.HTTPConnection("127.0.0.1")
        sock = self.connect()
        connection.sock = sock if self.tls is None else self.tls.wrap_socket(sock, server_hostname="127.0.0.1")
        try:
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return Reply(answer.status, {n.lower(): v for n, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def call(self, name: str, /, **fields: Any) -> Reply:
        return self.ask("POST", f"/v1/{name}", msgspec.json.encode(fields))

    def must(self, name: str, /, **fields: Any) -> Any:
        reply = self.call(name, **fields)
        assert reply.status == 200, reply
        return reply.value

    def waiters(self, queue: str) -> int:
        count: int = self.must("queue.stats", queue=queue)["waiters"]
        return count

    def until_parked(self, queue: str, count: int = 1) -> None:
        until(lambda: self.waiters(queue) == count, f"{count} waiters")


@contextmanager
def command(*arguments: str, **environment: str) -> Iterator[Process]:
    """`millpond …`, which is gone afterwards."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MILLPOND_")}
    with subprocess.Popen(
        [sys.executable, "-m", "millpond.cli", *arguments],
        env=inherited | {"HOME": "/nonexistent"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as popen:
        process = Process(popen)
        try:
            yield process
        finally:
            popen.kill()
            process.ended()


@contextmanager
def serve(data: Path, *flags: str, bind: tuple[str, ...] = LOOPBACK) -> Iterator[Server]:
    with command("serve", "--data", str(data), *bind, *flags) as process:
        yield process.started()


def token(data: Path, role: str, queues: str = "*", *flags: str) -> str:
    """The secret of a new one, by the command line."""
    create = ["token", "create", "--data", str(data), "--role", role, "--queues", queues, *flags]
    made = subprocess.run(
        [sys.executable, "-m", "millpond.cli", *create],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return made.stdout.strip()
