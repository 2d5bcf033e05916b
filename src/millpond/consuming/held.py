"""Leased items that know where they came from: they complete, retry and extend themselves.

    with item:              # retried with the error, if one is raised, or if it is left without completing
        work(item.payload)
        item.complete()

They are `LeasedItem`s in every other way. Items of `consume` complete themselves: leaving their `with` is enough.
The engine makes items by the thousand: what those of one lease share is in their grant, and what happens to one of
them has a place of its own when it does.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from msgspec import Struct

from millpond.errors import LeaseLost, made
from millpond.model import (
    ERROR_CHARS_MAX,
    Duration,
    Intent,
    LeasedItem,
    LeasedItems,
    LeaseLike,
    Result,
    Retry,
    StateWritten,
)

LEFT = "the consumer left the item without completing it"


class Keeps(Protocol):
    """Who keeps leases alive, from any thread."""

    def keep(self, item: Held, every: float | None = None) -> None:
        """Extends it every so many seconds; None: as its lease has it."""
        ...

    def drop(self, item: Held) -> None: ...

    def give_back(self, queue: str, items: list[Retry | LeaseLike]) -> None:
        """In the background, as far as that can be done."""
        ...


class Holding(Struct, frozen=True, gc=False):
    """What the items of one lease share. `holder` is the client or pond that their calls go through.

    `kept`: their leases are kept already, a `with` need not. `completing`: a `with` that is left without an error
    completes them.
    """

    holder: Any
    queue: str
    lease_timeout: Duration | None
    keeper: Keeps
    kept: bool = False
    completing: bool = False


class Hand(Struct, gc=False):
    """What became of one item."""

    holding: Holding
    retry_delay: Duration | None = None
    finished: bool = False
    lost: bool = False
    cancelled: bool = False


class Held(LeasedItem, gc=False, eq=False):
    """An item without a grant, a client's, is made with its `own` hand."""

    own: Hand | None = None

    @property
    def hand(self) -> Hand:
        if self.own is None:
            assert self.grant is not None, "an item has a grant or a hand"
            self.own = Hand(self.grant.holding)
        return self.own

    @property
    def holding(self) -> Holding:
        return self.hand.holding

    @property
    def queue(self) -> str:
        return self.hand.holding.queue

    @property
    def lease_timeout(self) -> Duration | None:
        return self.hand.holding.lease_timeout

    @property
    def finished(self) -> bool:
        """It was completed or retried."""
        return self.hand.finished

    @property
    def lost(self) -> bool:
        """Somebody else may have the item by now."""
        return self.hand.lost

    @property
    def cancelled(self) -> bool:
        """Nobody wants it done any more."""
        return self.hand.cancelled

    @property
    def retry_delay(self) -> Duration | None:
        """For a `with` that is left by an error."""
        return self.hand.retry_delay

    @retry_delay.setter
    def retry_delay(self, delay: Duration | None) -> None:
        self.hand.retry_delay = delay

    def learn(self, result: Result) -> None:
        """What an answer says about the lease."""
        hand = self.hand
        hand.cancelled = hand.cancelled or result.cancelled
        hand.lost = hand.lost or (result.error is not None and result.error.code == LeaseLost.code)

    def lose(self) -> None:
        """Its queue is gone, and the lease with it."""
        self.hand.lost = True

    def _keep(self) -> None:
        if not self.holding.kept:
            self.holding.keeper.keep(self)

    def _ended(self, results: Sequence[Result]) -> None:
        self.hand.finished = True
        self.holding.keeper.drop(self)
        self.learn(results[0])
        _check(results[0])

    def _left(self, outcome: Retry | None) -> None:
        """Its end could not be told: nobody keeps the lease from here on, and the keeper tries to hand it back."""
        self.hand.finished = True
        keeper = self.holding.keeper
        keeper.drop(self)
        keeper.give_back(self.queue, [Retry(lease=self, intent="defer") if outcome is None else outcome])

    def _extended(self, results: Sequence[Result]) -> None:
        self.learn(results[0])
        _check(results[0])

    def _wrote(self, state_doc: Any, written: StateWritten) -> StateWritten:
        self.fields.state_doc, self.fields.state_version = state_doc, written.version
        self.hand.cancelled = self.hand.cancelled or written.cancelled
        return written

    def _handed_back(
        self, error: str | BaseException | None, delay: Duration | None, intent: Intent, dead: bool
    ) -> list[Retry | LeaseLike]:
        text = in_words(error) if isinstance(error, BaseException) else error
        return [Retry(lease=self, intent=intent, delay=delay, error=text, dead=dead)]

    def _outcome(self, error: BaseException | None) -> Retry | None:
        """What leaving `with` means: None to complete. An interrupt is not the item's fault."""
        if error is None:
            return None if self.holding.completing else Retry(lease=self, delay=self.retry_delay, error=LEFT)
        if not isinstance(error, Exception):
            return Retry(lease=self, intent="defer", error=in_words(error))
        return Retry(lease=self, delay=self.retry_delay, error=in_words(error))


class HeldItem(Held, gc=False, eq=False):
    """Of a blocking client or pond."""

    def complete(self, result: Any = None) -> None:
        """Raises LeaseLost if the lease was over: the item may be done twice then."""
        self._ended(self.holding.holder.complete([self], queue=self.queue, result=result))

    def retry(
        self,
        error: str | BaseException | None = None,
        *,
        delay: Duration | None = None,
        intent: Intent = "failure",
        dead: bool = False,
    ) -> None:
        back = self._handed_back(error, delay, intent, dead)
        self._ended(self.holding.holder.retry(back, queue=self.queue))

    def extend(self, lease_timeout: Duration | None = None) -> None:
        timeout = self.lease_timeout if lease_timeout is None else lease_timeout
        self._extended(self.holding.holder.extend([self], queue=self.queue, lease_timeout=timeout))

    def write_state(self, state_doc: Any) -> StateWritten:
        """Over the version that this item was last seen with."""
        holder, version = self.holding.holder, self.state_version
        return self._wrote(state_doc, holder.write_state(self, state_doc, version=version, queue=self.queue))

    def __enter__(self) -> Self:
        self._keep()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finished:
            return
        outcome = self._outcome(error)
        try:
            if outcome is None:
                self.complete()
            else:
                self._ended(self.holding.holder.retry([outcome], queue=self.queue))
        except LeaseLost:  # it comes back by itself
            if outcome is None:
                raise
        except BaseException:  # a cancelled call and an interrupt too
            self._left(outcome)
            raise


class AsyncHeldItem(Held, gc=False, eq=False):
    """Of a client or pond on the event loop."""

    async def complete(self, result: Any = None) -> None:
        """Raises LeaseLost if the lease was over: the item may be done twice then."""
        self._ended(await self.holding.holder.complete([self], queue=self.queue, result=result))

    async def retry(
        self,
        error: str | BaseException | None = None,
        *,
        delay: Duration | None = None,
        intent: Intent = "failure",
        dead: bool = False,
    ) -> None:
        back = self._handed_back(error, delay, intent, dead)
        self._ended(await self.holding.holder.retry(back, queue=self.queue))

    async def extend(self, lease_timeout: Duration | None = None) -> None:
        timeout = self.lease_timeout if lease_timeout is None else lease_timeout
        self._extended(await self.holding.holder.extend([self], queue=self.queue, lease_timeout=timeout))

    async def write_state(self, state_doc: Any) -> StateWritten:
        """Over the version that this item was last seen with."""
        holder, version = self.holding.holder, self.state_version
        return self._wrote(state_doc, await holder.write_state(self, state_doc, version=version, queue=self.queue))

    async def __aenter__(self) -> Self:
        self._keep()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finished:
            return
        outcome = self._outcome(error)
        try:
            if outcome is None:
                await self.complete()
            else:
                self._ended(await self.holding.holder.retry([outcome], queue=self.queue))
        except LeaseLost:  # it comes back by itself
            if outcome is None:
                raise
        except BaseException:  # a cancelled call and an interrupt too
            self._left(outcome)
            raise


H = TypeVar("H", bound=Held)


def held(items: Sequence[LeasedItem], kind: type[H], holding: Holding) -> Sequence[H]:
    """The same items in other hands. What the engine leased together stays together, and is not made yet."""
    if isinstance(items, LeasedItems):
        items.held(kind, holding)
        return items  # type: ignore[return-value]  # they are of that kind now
    return [kind(item.payload, item.number, item.grant, item.known, Hand(holding)) for item in items]


def handed_back(current: Held | None, how: Retry | None, rest: Iterable[Held]) -> list[Retry | LeaseLike]:
    """What is unfinished when a loop is left: the current item as `how` says, the rest as if never leased."""
    back: list[Retry | LeaseLike] = [Retry(lease=item, intent="defer") for item in rest if not item.finished]
    if current is not None and not current.finished and how is not None:
        back.insert(0, how)
    return back


def left_by(item: Held | None, error: BaseException | None) -> Retry | None:
    """An error is the item's failure; a loop that was left without one, or by an interrupt, gives the attempt back."""
    if item is None:
        return None
    if isinstance(error, Exception):
        return Retry(lease=item, delay=item.retry_delay, error=in_words(error))
    return Retry(lease=item, intent="defer")


def left_without_a_word(item: Held | None) -> Retry | None:
    """By an error that nobody can see from here, or a break: a failure, lest a poisoned item goes round for ever."""
    return None if item is None else Retry(lease=item, delay=item.retry_delay, error=LEFT)


def in_words(error: BaseException) -> str:
    """As it can be stored, whatever was raised: a failure to say why would end the loop. File names hold surrogates."""
    words = "".join(traceback.format_exception_only(error)).strip()[:ERROR_CHARS_MAX]
    return words.encode(errors="backslashreplace").decode()


def _check(result: Result) -> None:
    if result.error is not None:
        raise made(result.error.code, result.error.message)
