"""How a worker and its supervisors talk: values, packed one after the other on a socket.

Both ends are the same Python on the same machine, one the child of the other, so `marshal` will do: it needs no
import, which keeps supervisors small. `recv` and `send` of a socket that has gone are told as an end, not as an error.
"""

from __future__ import annotations

import marshal
import socket
from typing import Any, Final

READ_BYTES: Final = 32 << 10  # a whole order in one read, as a rule; a larger buffer is mapped and unmapped each time
_LENGTH: Final = 4


def packed(value: Any) -> bytes:
    body = marshal.dumps(value)
    return len(body).to_bytes(_LENGTH, "little") + body


class Frames:
    """Bytes in, whole values out."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Any]:
        data = self._rest + data
        values, at = [], 0
        while len(data) - at >= _LENGTH:
            end = at + _LENGTH + int.from_bytes(data[at : at + _LENGTH], "little")
            if end > len(data):
                break
            values.append(marshal.loads(data[at + _LENGTH : end]))
            at = end
        self._rest = data[at:]
        return values


def receive(channel: socket.socket) -> bytes | None:
    """What is there. Nothing is b""; None is the end: the other one has gone."""
    try:
        return channel.recv(READ_BYTES, socket.MSG_DONTWAIT) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None
