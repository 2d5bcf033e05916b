"""Load from a process of its own: `python -m benchmarks.load drive '{"port": …}'` prints what it found as JSON.

Written so that it costs a small part of what a server does, else it would hide their differences: epoll and bare
sockets, requests made before they are timed, and of a reply nothing is read but its length and its lease tokens. Each
connection is a caller: it has one request under way, and goes round produce, lease, complete.
"""

from __future__ import annotations

import re
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import msgspec

from benchmarks.machine import busy_seconds
from benchmarks.meter import PAYLOAD_BYTES, payloads, percentile

QUEUE = "bench"
IDLE_QUEUE = "idle"
WAIT_S = 1  # of a lease, as consumers ask for; there are always items, so nobody does wait
PARK_S = 600  # of an idle poll: longer than any benchmark
WARM_SHARE = 0.15  # of the time that is measured
RECEIVE_BYTES = 1 << 16  # of a reply at a time; malloc asks the system for what is larger, at every call
REQUEST_ID_BYTES = 20

Script = Generator[bytes, bytes, None]


# ---- the requests -----------------------------------------------------------------------------------------


class Wire:
    """Requests in JSON or MessagePack. A lease token goes back as the reply had it, quotes or length byte and all."""

    def __init__(self, port: int, binary: bool, batch: int, request_ids: bool) -> None:
        self._media_type = b"application/msgpack" if binary else b"application/json"
        self._host = b"127.0.0.1:%d" % port
        self._binary = binary
        self.batch = batch
        self.lease = self._request(b"queue.lease", self._encode({"queue": QUEUE, "batch": batch, "wait": WAIT_S}))
        self.find_tokens: Callable[[bytes], list[bytes]] = re.compile(
            rb"\xa5lease(\xd9.[\w.-]+|[\xa0-\xbf][\w.-]+)" if binary else rb'"lease":("[^"]+")', re.DOTALL
        ).findall
        self._produce = self._produce_request(request_ids)
        self._id_at = self._produce.find(b"~" * REQUEST_ID_BYTES) if request_ids else 0

    def _encode(self, body: Any) -> bytes:
        return msgspec.msgpack.encode(body) if self._binary else msgspec.json.encode(body)

    def _request(self, call: bytes, body: bytes) -> bytes:
        return b"POST /v1/%b HTTP/1.1\r\nhost: %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            call,
            self._host,
            self._media_type,
            len(body),
            body,
        )

    def _produce_request(self, request_ids: bool) -> bytes:
        bodies = payloads(self.batch)
        items: list[Any] = [{"bytes": body} if self._binary else {"text": as_text(body)} for body in bodies]
        request: dict[str, Any] = {"queue": QUEUE, "items": items}
        if request_ids:
            request["request_id"] = "~" * REQUEST_ID_BYTES
        return self._request(b"queue.produce", self._encode(request))

    def produce(self, number: int) -> bytes:
        """With request ids each is another one: a repeated one produces nothing."""
        at = self._id_at
        if not at:
            return self._produce
        return b"%b%020d%b" % (self._produce[:at], number, self._produce[at + REQUEST_ID_BYTES :])

    def complete(self, tokens: list[bytes]) -> bytes:
        if self._binary:
            body = b"\x82\xa5queue\xa5bench\xa6leases\xdc%b%b" % (len(tokens).to_bytes(2), b"".join(tokens))
        else:
            body = b'{"queue":"bench","leases":[%b]}' % b",".join(tokens)
        return self._request(b"queue.complete", body)


def as_text(body: bytes) -> str:
    return body.hex()[:PAYLOAD_BYTES]


# ---- the callers ------------------------------------------------------------------------------------------


class Count:
    """What all callers have done."""

    def __init__(self) -> None:
        self.items = 0
        self.numbers = iter(range(sys.maxsize))


def cycle(wire: Wire, count: Count) -> Script:
    """Yields requests and is sent the replies to them."""
    find_tokens, numbers = wire.find_tokens, count.numbers
    while True:
        yield wire.produce(next(numbers))
        tokens = find_tokens((yield wire.lease))
        if len(tokens) != wire.batch:
            raise SystemExit(f"a lease gave {len(tokens)} items instead of {wire.batch}; the server is wrong")
        done = yield wire.complete(tokens)
        if b"error" in done:
            raise SystemExit(f"a complete was refused: {done!r:.300}")
        count.items += wire.batch


class Load:
    """Callers against one server."""

    def __init__(self, port: int, scripts: Iterator[Script]) -> None:
        self._epoll = select.epoll()
        self._callers: dict[int, tuple[socket.socket, Script]] = {}
        self._sent_at: dict[int, float] = {}
        self._begun: dict[int, bytes] = {}  # replies of which a part is here
        self.spent: list[float] = []  # seconds, a request
        for script in scripts:
            one = connect(port)
            self._callers[one.fileno()] = one, script
            self._epoll.register(one.fileno(), select.EPOLLIN)
            self._sent_at[one.fileno()] = time.perf_counter()
            one.sendall(next(script))

    def run(self, seconds: float) -> None:
        poll, callers, sent_at, clock = self._epoll.poll, self._callers, self._sent_at, time.perf_counter
        now = clock()
        end = now + seconds
        while now < end:
            for fd, _ in poll():
                sock, script = callers[fd]
                data = sock.recv(RECEIVE_BYTES)
                if self._begun:
                    data = self._begun.pop(fd, b"") + data
                head = data.find(b"\r\n\r\n") + 4
                length = data.find(b"ength: ", 0, head) + 7  # some write Content-Length, some content-length
                if len(data) < head + int(data[length : data.find(b"\r", length)] or 0) or head < 4:
                    self._begun[fd] = self._checked(data)
                    continue
                if not data.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"a request was refused: {data!r:.500}")
                request = script.send(data)
                now = clock()
                self.spent.append(now - sent_at[fd])
                sent_at[fd] = now
                if sock.send(request) < len(request):
                    raise SystemExit("a request did not fit into the socket's buffer; make that larger")

    def _checked(self, data: bytes) -> bytes:
        if not data:
            raise SystemExit("the server closed a connection")
        return data

    def close(self) -> None:
        for sock, _ in self._callers.values():
            sock.close()
        self._epoll.close()


def connect(port: int) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, to the nanosecond: clock_getcpuclockid(3), in Linux's way to number clocks."""
    return time.clock_gettime((~pid << 3) | 2)


def clocks(server: int) -> tuple[float, float, float, float]:
    """Seconds: of the wall, of CPU in this process, in the server and in all of the machine."""
    return time.perf_counter(), time.process_time(), cpu_seconds(server), busy_seconds()


# ---- the measurements -------------------------------------------------------------------------------------


def drive(
    port: int,
    pid: int,
    connections: int,
    seconds: float,
    batch: int = 1,
    binary: bool = False,
    request_ids: bool = False,
) -> dict[str, Any]:
    """Requests and items a second, what a request cost server and load, and how long one took."""
    wire = Wire(port, binary, batch, request_ids)
    count = Count()
    load = Load(port, (cycle(wire, count) for _ in range(connections)))
    load.run(WARM_SHARE * seconds)
    load.spent, count.items = [], 0
    before = clocks(pid)
    load.run(seconds)
    wall, cpu, server_cpu, busy = (now - then for now, then in zip(clocks(pid), before, strict=True))
    load.close()
    requests = len(load.spent)
    return {
        "requests": requests / wall,
        "items": count.items / wall,
        "p50_ms": percentile(load.spent, 0.5) * 1e3,
        "p99_ms": percentile(load.spent, 0.99) * 1e3,
        "server_us": server_cpu / requests * 1e6,
        "load_us": cpu / requests * 1e6,
        "server_share": server_cpu / wall,
        "load_share": cpu / wall,
        "others_share": max(0.0, busy - cpu - server_cpu) / wall,
    }


def park(port: int, polls: int) -> None:
    """So many leases that wait on a queue with nothing in it, until our standard input ends."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    body = b'{"queue":"%b","wait":%d}' % (IDLE_QUEUE.encode(), PARK_S)
    head = b"POST /v1/queue.lease HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n" % port
    request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
    held = [connect(port) for _ in range(polls)]
    for one in held:
        one.sendall(request)
    sys.stdin.read()


def main() -> None:
    arguments = msgspec.json.decode(sys.argv[2])
    if sys.argv[1] == "park":
        park(**arguments)
    else:
        print(msgspec.json.encode(drive(**arguments)).decode())


if __name__ == "__main__":
    main()
