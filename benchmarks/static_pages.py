"""The ceiling of Spark's source and sink: a server with its replies ready. `python -m benchmarks.static_pages FILE`.

The replies are a server's own, written down beforehand: same bytes, same pages, same parts. Every claim has the items
of the one that was written down. What a sink sends is read and dropped. A thread a connection: nearly all that they do
is to wait for the kernel, which takes and gives pages as they are.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from benchmarks.children import Child
from millpond.spark.source import PAGE_ITEMS
from millpond.spark.transport import ARROW_TYPE, JSON_TYPE, NEXT_HEADER, Transport

PAGED = {"claim.read": "part", "items.list": "partition"}  # what tells one sequence of pages from another
TIMEOUT_S = 60.0
DROPPED = b'{"items":0}'  # of a stage or a publish, the sink wants to know no more than that it was done
DROP_BYTES = 1 << 20  # of a body at a time

Key = tuple[str, int, str]  # call, part or partition, where the page begins


class Recording(msgspec.Struct):
    replies: dict[str, bytes] = {}
    pages: dict[Key, tuple[bytes, str | None]] = {}


# ---- writing down -----------------------------------------------------------------------------------------


class _Listener(Transport):
    """Keeps what a server answers, by the call."""

    def __init__(self, child: Child) -> None:
        super().__init__(f"http://127.0.0.1:{child.port}", timeout_s=TIMEOUT_S, retry_s=TIMEOUT_S)
        self.recording = Recording()

    def keep(self, name: str, /, **fields: Any) -> dict[str, Any]:
        headers = {"Content-Type": JSON_TYPE, "Accept": JSON_TYPE}
        _, reply = self._ask(name, msgspec.json.encode(fields), headers)
        self.recording.replies[name] = reply
        return msgspec.json.decode(reply, type=dict[str, Any])

    def keep_pages(self, name: str, /, **fields: Any) -> None:
        headers = {"Content-Type": JSON_TYPE, "Accept": ARROW_TYPE}
        after: str | None = ""
        while after is not None:
            asked = fields | {"limit": PAGE_ITEMS} | ({"after": after} if after else {})
            found, reply = self._ask(name, msgspec.json.encode(asked), headers)
            place = name, fields[PAGED[name]], after
            after = found.get(NEXT_HEADER)
            self.recording.pages[place] = reply, after


def record_claims(child: Child, queue: str, items: int, parts: int) -> Recording:
    """What a stream asks for, while it consumes: a claim of so many items, which are gone then."""
    with _Listener(child) as listener:
        listener.keep("queues.info", name=queue)
        listener.keep("claims.list", queue=queue)
        epoch = listener.keep("consumer.open", queue=queue, consumer="recorder")["epoch"]
        named = {"queue": queue, "claim_id": "recorder:1", "epoch": epoch}
        claim = listener.keep("queue.claim", **named, max_items=items, parts=parts)
        assert claim["items"] == items, claim
        for part in range(len(claim["parts"])):
            listener.keep_pages("claim.read", **named, part=part)
        listener.keep("claim.complete", **named)
        return listener.recording


def record_look(child: Child, queue: str) -> Recording:
    """What a batch read asks for."""
    with _Listener(child) as listener:
        for one in listener.keep("queue.stats", queue=queue)["partitions"]:
            place = {"partition": one["partition"], "until": one["last_number"]}
            listener.keep_pages("items.list", queue=queue, state="ready", **place)
        return listener.recording


# ---- answering --------------------------------------------------------------------------------------------


class Static:
    def __init__(self, recording: Recording) -> None:
        self._replies = {name: response(reply) for name, reply in recording.replies.items()}
        self._pages = {key: response(*page) for key, page in recording.pages.items()}

    def answer(self, connection: socket.socket) -> None:
        """All that comes on it, until the client goes."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        dropped = memoryview(bytearray(DROP_BYTES))
        with connection, connection.makefile("rb") as stream:
            while (asked := read_head(stream)) is not None:
                name, length = asked
                if name in PAGED:
                    reply = self._pages[key_of(name, stream.read(length))]
                else:
                    reply = self._replies.get(name, DONE)
                    drop(stream, length, dropped)
                connection.sendall(reply)


def response(body: bytes, after: str | None = None) -> bytes:
    following = b"" if after is None else b"%b: %b\r\n" % (NEXT_HEADER.encode(), after.encode())
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (following, len(body), body)


DONE = response(DROPPED)


def read_head(stream: BinaryIO) -> tuple[str, int] | None:
    """The call, and the length of its body."""
    line = stream.readline()
    if not line:
        return None
    name = line.split()[1].removeprefix(b"/v1/").partition(b"?")[0].decode()
    length = 0
    while (header := stream.readline()).strip():
        if header[:15].lower() == b"content-length:":
            length = int(header[15:])
    return name, length


def key_of(name: str, body: bytes) -> Key:
    asked = msgspec.json.decode(body, type=dict[str, Any])
    return name, asked[PAGED[name]], asked.get("after", "")


def drop(stream: BinaryIO, length: int, into: memoryview) -> None:
    while length:
        read: int = stream.readinto(into[:length])  # type: ignore[attr-defined]
        if not read:
            raise EOFError("the client left in the middle of a request")
        length -= read


def main() -> None:
    static = Static(msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=Recording))
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=static.answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(listening.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
