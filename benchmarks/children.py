"""Servers as children of a benchmark: they say their port on a line of standard output, and end with standard input.

So none outlives the benchmark, however that ends.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parent.parent
END_TIMEOUT_S = 10


async def until_told(port: int) -> None:
    """The child's side."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), told.set)
    print(port, flush=True)
    await told.wait()


class Child(msgspec.Struct):
    """A server that listens on loopback."""

    pid: int
    port: int

    def call(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=END_TIMEOUT_S)
        try:
            connection.request(
                "POST", f"/v1/{name}", msgspec.json.encode(request), {"content-type": "application/json"}
            )
            reply = connection.getresponse()
            body = reply.read()
            assert reply.status == 200, body
            return msgspec.json.decode(body, type=dict[str, Any])
        finally:
            connection.close()

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(*command: str, environment: Mapping[str, str] | None = None) -> Iterator[Child]:
    with process(*command, environment=environment) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line.strip().isdigit():
            raise SystemExit(f"{' '.join(command)} did not start; see its output above")
        yield Child(child.pid, int(line))


@contextmanager
def process(*command: str, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """One that ends when its standard input does; if it does not, it is killed."""
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child
    finally:
        child.stdin.close()
        try:
            child.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


def python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"benchmarks.{module}", *arguments)
