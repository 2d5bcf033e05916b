"""What a worker and the processes of its pool say to each other, over a socket: MessagePack, each with its length.

worker                                process
Hello: which app, and where      ->
                                 <-   Ready, or Broken
Job, and its ticket              ->   which it reads before it begins the job (`tickets.py`)
                                 <-   Logged, at any time · Progress · Write (then Answer ->) · Limit (then Answer ->)
                                 <-   Ended
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from millpond.model import LeasedFields
from millpond.tasks.connection import Where
from millpond.worker.executors import Outcome

LENGTH: Final = 4  # bytes before each
READ_BYTES: Final = 256 << 10


class Hello(msgspec.Struct, tag="hello"):
    place: str
    where: Where
    path: list[str]  # where Python looks for modules
    level: int = 0  # of the worker's log


class Job(msgspec.Struct, tag="job"):
    """`number` is its ticket's: one whose ticket was taken back is not begun."""

    number: int
    queue: str
    fields: LeasedFields


class Answer(msgspec.Struct, tag="answer"):
    """To the Write or Limit of that number."""

    number: int
    value: Any = None
    code: str | None = None
    error: str = ""
    cancelled: bool = False


class Logged(msgspec.Struct, tag="logged"):
    """For the worker's own log. `trace` is text already."""

    name: str
    level: int
    text: str
    trace: str | None = None


class Ready(msgspec.Struct, tag="ready"):
    """`pid` is that of the process itself: what the worker has started is its watcher."""

    pid: int


class Broken(msgspec.Struct, tag="broken"):
    error: str


class Progress(msgspec.Struct, tag="progress"):
    progress: dict[str, Any]


class Write(msgspec.Struct, tag="write"):
    number: int
    state: dict[str, Any]


class Limit(msgspec.Struct, tag="limit"):
    """How many attempts may it have?"""

    number: int


class Ended(msgspec.Struct, tag="ended"):
    outcome: Outcome


ToProcess = Hello | Job | Answer
FromProcess = Ready | Broken | Logged | Progress | Write | Limit | Ended

_encode = msgspec.msgpack.Encoder().encode
decode_to_process = msgspec.msgpack.Decoder(ToProcess).decode
decode_from_process = msgspec.msgpack.Decoder(FromProcess).decode


def packed(frame: ToProcess | FromProcess) -> bytes:
    body = _encode(frame)
    return len(body).to_bytes(LENGTH, "little") + body


class Unpacking:
    """Bytes in, whole bodies out."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._rest += data
        while len(self._rest) >= LENGTH:
            end = LENGTH + int.from_bytes(self._rest[:LENGTH], "little")
            if len(self._rest) < end:
                return
            body = bytes(self._rest[LENGTH:end])
            del self._rest[:end]
            yield body
