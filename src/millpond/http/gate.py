"""What the app asks of whoever guards it: who is this, and may they. `http/auth.py` has the guard of a real server."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol


class Identity(Protocol):
    @property
    def who(self) -> str:
        """As the audit log names them."""
        ...

    def sees(self, queue: str) -> bool:
        """Whether this queue is for them at all; lists leave out the others."""
        ...


class Gate(Protocol):
    """`authenticate` before the body is read, `authorize` for each queue that the request turned out to name."""

    def authenticate(self, authorization: bytes | None) -> Any:
        """An Identity. Any, because a guard authorizes only the identities that it made itself."""
        ...

    def authorize(self, identity: Any, call: str, queue: str | None, kinds: Collection[str] = ()) -> None: ...


class Anybody:
    who = "local"

    def sees(self, queue: str) -> bool:
        return True


class OpenGate:
    """For tests, and for sockets that only their owner can reach."""

    def authenticate(self, authorization: bytes | None) -> Identity:
        return Anybody()

    def authorize(self, identity: Identity, call: str, queue: str | None, kinds: Collection[str] = ()) -> None:
        return None
