"""One call's tries: whether there is another one after a failure, and when. No I/O, no clock."""

from __future__ import annotations

from random import Random
from typing import Any, Generic, TypeVar

from millpond.client.asks import Ask
from millpond.client.faults import error_of
from millpond.client.http1 import Reply
from millpond.consuming.pauses import Pauses
from millpond.errors import Closed, DiskFull, MillpondError, OutcomeUnknown

T = TypeVar("T")


class Tries(Generic[T]):
    """All instants are of one monotonic clock, in seconds. Who is not `patient` waits for no room on a full disk."""

    def __init__(self, ask: Ask[T], now: float, deadline: float, rng: Random, *, patient: bool = True) -> None:
        self.ask = ask
        self.begun = now
        self.deadline = deadline
        self._pauses: Pauses | None = None
        self._rng = rng
        self._patient = patient
        self._in_doubt = False
        self._over = False
        self._retry_after = 0.0

    def request(self, now: float) -> Any:
        return self.ask.request_after(0.0 if self._pauses is None else now - self.begun)

    def answer(self, reply: Reply) -> T:
        if reply.status == 200:
            return self.ask.answer(reply)
        self._retry_after = reply.retry_after
        error = error_of(reply)
        if self._in_doubt and error.code == self.ask.doubt:
            self._over = True
            return self.ask.in_doubt()
        raise error

    def pause(self, error: MillpondError, now: float) -> float:
        """Seconds until the next try; the error itself where there is none."""
        doubtful = isinstance(error, OutcomeUnknown)
        self._in_doubt = self._in_doubt or doubtful
        if self._over or not error.retryable or (doubtful and self.ask.once):
            raise error
        if isinstance(error, DiskFull) and not self._patient:
            raise self._told(error)
        if self._pauses is None:
            self._pauses = Pauses(self._rng)
        pause = max(self._retry_after, self._pauses.next())
        self._retry_after = 0.0
        if now + pause >= self.deadline:
            raise self._told(error)
        return pause

    def _told(self, error: MillpondError) -> MillpondError:
        """The last failure, unless an earlier one left more in doubt."""
        if not self._in_doubt or isinstance(error, OutcomeUnknown):
            return error
        return OutcomeUnknown(f"{self.ask.name} may have been done: a reply was lost, and then: {error.message}")


class ClientClosed(Closed):
    """This client's own end: no try helps."""

    retryable = False


def closed() -> ClientClosed:
    return ClientClosed("the client is closed; make another one")
