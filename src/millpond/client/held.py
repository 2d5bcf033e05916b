"""Leased items that know where they came from: they complete, retry and extend themselves.

    with item:              # retried with the error, if one is raised, or if it is left without completing
        work(item.payload)
        item.complete()

They are `LeasedItem`s in every other way. Items of `consume` complete themselves: leaving their `with` is enough.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from millpond.client.faults import made
from millpond.errors import LeaseLost
from millpond.model import Duration, Intent, LeasedItem, LeaseLike, Result, Retry, StateWritten

LEFT = "the consumer left the item without completing it"


class Held(LeasedItem, gc=True, eq=False):
    """`lost`: somebody else may have the item by now. `cancelled`: nobody wants it done any more.

    `finished` once it was completed or retried. `retry_delay` is for a `with` that is left by an error.
    """

    holder: Any = None
    queue: str | None = None
    lease_timeout: Duration | None = None
    completes_itself: bool = False
    retry_delay: Duration | None = None
    finished: bool = False
    lost: bool = False
    cancelled: bool = False
    keep: Callable[[Held], None] | None = None
    drop: Callable[[Held], None] | None = None

    def _ended(self, results: Sequence[Result]) -> None:
        self.finished = True
        if self.drop is not None:
            self.drop(self)
        self.learn(results[0])
        _check(results[0])

    def learn(self, result: Result) -> None:
        """What an answer says about the lease."""
        self.cancelled = self.cancelled or result.cancelled
        if result.error is not None and result.error.code == LeaseLost.code:
            self.lost = True

    def _wrote(self, state_doc: Any, written: StateWritten) -> StateWritten:
        self.fields.state_doc, self.fields.state_version = state_doc, written.version
        self.cancelled = self.cancelled or written.cancelled
        return written

    def _handed_back(
        self, error: str | BaseException | None, delay: Duration | None, intent: Intent, dead: bool
    ) -> list[Retry | LeaseLike]:
        text = in_words(error) if isinstance(error, BaseException) else error
        return [Retry(lease=self.lease, intent=intent, delay=delay, error=text, dead=dead)]

    def _outcome(self, error: BaseException | None) -> Retry | None:
        """What leaving `with` means: None to complete. An interrupt is not the item's fault."""
        if error is None:
            return None if self.completes_itself else Retry(lease=self.lease, delay=self.retry_delay, error=LEFT)
        if not isinstance(error, Exception):
            return Retry(lease=self.lease, intent="defer", error=in_words(error))
        return Retry(lease=self.lease, delay=self.retry_delay, error=in_words(error))


class HeldItem(Held, gc=True, eq=False):
    """Of a blocking client or engine."""

    def complete(self, result: Any = None) -> None:
        """Raises LeaseLost if the lease was over: the item may be done twice then."""
        self._ended(self.holder.complete([self.lease], queue=self.queue, result=result))

    def retry(
        self,
        error: str | BaseException | None = None,
        *,
        delay: Duration | None = None,
        intent: Intent = "failure",
        dead: bool = False,
    ) -> None:
        self._ended(self.holder.retry(self._handed_back(error, delay, intent, dead), queue=self.queue))

    def extend(self, lease_timeout: Duration | None = None) -> None:
        timeout = self.lease_timeout if lease_timeout is None else lease_timeout
        [result] = self.holder.extend([self.lease], queue=self.queue, lease_timeout=timeout)
        self.learn(result)
        _check(result)

    def write_state(self, state_doc: Any) -> StateWritten:
        """Over the version that this item was last seen with."""
        written = self.holder.write_state(self.lease, state_doc, version=self.state_version, queue=self.queue)
        return self._wrote(state_doc, written)

    def __enter__(self) -> Self:
        if self.keep is not None:
            self.keep(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finished:
            return
        outcome = self._outcome(error)
        if outcome is None:
            self.complete()
            return
        try:
            self._ended(self.holder.retry([outcome], queue=self.queue))
        except LeaseLost:  # it comes back by itself
            pass


class AsyncHeldItem(Held, gc=True, eq=False):
    """Of a client or engine on the event loop."""

    async def complete(self, result: Any = None) -> None:
        """Raises LeaseLost if the lease was over: the item may be done twice then."""
        self._ended(await self.holder.complete([self.lease], queue=self.queue, result=result))

    async def retry(
        self,
        error: str | BaseException | None = None,
        *,
        delay: Duration | None = None,
        intent: Intent = "failure",
        dead: bool = False,
    ) -> None:
        self._ended(await self.holder.retry(self._handed_back(error, delay, intent, dead), queue=self.queue))

    async def extend(self, lease_timeout: Duration | None = None) -> None:
        timeout = self.lease_timeout if lease_timeout is None else lease_timeout
        [result] = await self.holder.extend([self.lease], queue=self.queue, lease_timeout=timeout)
        self.learn(result)
        _check(result)

    async def write_state(self, state_doc: Any) -> StateWritten:
        """Over the version that this item was last seen with."""
        written = await self.holder.write_state(self.lease, state_doc, version=self.state_version, queue=self.queue)
        return self._wrote(state_doc, written)

    async def __aenter__(self) -> Self:
        if self.keep is not None:
            self.keep(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finished:
            return
        outcome = self._outcome(error)
        if outcome is None:
            await self.complete()
            return
        try:
            self._ended(await self.holder.retry([outcome], queue=self.queue))
        except LeaseLost:  # it comes back by itself
            pass


def handed_back(current: Held | None, how: Retry | None, rest: Iterable[Held]) -> list[Retry | LeaseLike]:
    """What is unfinished when a loop is left: the current item as `how` says, the rest as if never leased."""
    back: list[Retry | LeaseLike] = [Retry(lease=item.lease, intent="defer") for item in rest if not item.finished]
    if current is not None and not current.finished and how is not None:
        back.insert(0, how)
    return back


def left_by(item: Held | None, error: BaseException | None) -> Retry | None:
    """An error is the item's failure; a loop that was left without one, or by an interrupt, gives the attempt back."""
    if item is None:
        return None
    if isinstance(error, Exception):
        return Retry(lease=item.lease, delay=item.retry_delay, error=in_words(error))
    return Retry(lease=item.lease, intent="defer")


def left_without_a_word(item: Held | None) -> Retry | None:
    """By an error that nobody can see from here, or a break: a failure, lest a poisoned item goes round for ever."""
    return None if item is None else Retry(lease=item.lease, delay=item.retry_delay, error=LEFT)


def in_words(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _check(result: Result) -> None:
    if result.error is not None:
        raise made(result.error.code, result.error.message)
