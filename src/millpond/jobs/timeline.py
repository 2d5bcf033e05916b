"""Every attempt at a job, from the journal: when it began, who had it, how it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from millpond.api import Api
from millpond.history.format import RUN_BITS, RUN_MAX, Event
from millpond.jobs.journal import Origin, Start, Turn, derived_number, find_start, number_in, turns
from millpond.model import DeadReason, Item, State, to_datetime, to_ms

_REASONS = list(DeadReason)
_COUNT_MASK = RUN_MAX - 1


class Attempt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One delivery. `number` is the attempt it was; one that was deferred or released did not count.

    `redriven_at`: the job was dead before it, and was brought back then; its attempts count from 1 again.
    `how`: completed, failed, deferred, lease_expired, released, cancelled; None: it is under way.
    """

    number: int
    by: str
    leased_at: datetime
    ended_at: datetime | None = None
    how: str | None = None
    error: str | None = None
    dead: bool = False  # the job died of it
    seconds: float | None = None
    redriven_at: datetime | None = None

    @property
    def counted(self) -> bool:
        return self.how not in ("deferred", "released")


class Timeline(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`since`: the journal does not reach back farther than this. `partial`: it was too long to be read whole.

    `redriven_at`: it was brought back then, and has not run since.
    """

    attempts: list[Attempt] = []
    redriven_at: datetime | None = None
    since: datetime | None = None
    partial: bool = False


async def timeline(api: Api, queue: str, item: Item) -> Timeline:
    """What the journal knows of an item that is still there."""
    if not item.deliveries and item.state != State.CLAIMED:
        return Timeline()
    info = await api.queue_info(queue)
    start = await find_start(api, queue, item.partition, to_ms(item.created_at))
    story = Story(item, info.incarnation, start)
    async for turn in turns(api, queue, item.partition, start.after):
        story.read(turn)
        if story.is_whole:
            break
    return story.told(partial=not story.is_whole and start.oldest is None)


async def has_completed(api: Api, queue: str, origin: Origin) -> bool:
    """Whether an item that is gone had completed. False too if the journal does not know: trimmed, or too long."""
    incarnation = (await api.queue_info(queue)).incarnation
    start = await find_start(api, queue, origin.partition, to_ms(origin.created_at))
    number = derived_number(origin, incarnation) if start.oldest is not None else None
    async for turn in turns(api, queue, origin.partition, start.after):
        if number is None:
            number = number_in(turn, origin, incarnation)
        if number is not None and any(in_runs(number, _completed_by(event)) for event in turn.events):
            return True
    return False


def _completed_by(event: Sequence[Any]) -> Sequence[int]:
    """Runs of items."""
    if event[0] == Event.COMPLETED:
        pairs: Sequence[int] = event[2]
        return pairs[::2]
    if event[0] == Event.CLAIM_COMPLETED:
        runs: Sequence[int] = event[3]
        return runs
    return ()


class Story:
    """Gathers one item's attempts from turns, in order."""

    def __init__(self, item: Item, incarnation: str, start: Start) -> None:
        self._item = item
        self._incarnation = incarnation
        self._start = start
        self._number = derived_number(item, incarnation) if start.oldest is not None else None
        self._attempts: list[Attempt] = []
        self._counted = 0
        self._redriven_at: datetime | None = None  # since the last attempt
        self._readers: dict[int, Callable[..., None]] = {
            Event.LEASED: self._leased,
            Event.COMPLETED: self._completed,
            Event.RETRIED: self._retried,
            Event.LEASE_EXPIRED: self._lease_expired,
            Event.RELEASED: self._released,
            Event.DIED: self._died,
            Event.CANCELLED: self._cancelled,
            Event.REDRIVEN: self._redriven,
            Event.CLAIMED: self._claimed,
            Event.UNCLAIMED: self._unclaimed,
            Event.CLAIM_COMPLETED: self._claim_completed,
            Event.CLAIM_RETRIED: self._claim_retried,
        }

    @property
    def is_whole(self) -> bool:
        """There is no more to come: the item was delivered as often, and its last one ended or not, as was told."""
        last = self._attempts[-1] if self._attempts else None
        under_way = last is not None and last.how is None
        held = self._item.state in (State.LEASED, State.CLAIMED)
        comes_back = last is not None and last.dead and self._item.state != State.DEAD and self._redriven_at is None
        return len(self._attempts) >= self._item.deliveries and under_way == held and not comes_back

    def told(self, *, partial: bool) -> Timeline:
        oldest = self._start.oldest
        since = None if oldest is None else to_datetime(oldest)
        return Timeline(attempts=self._attempts, redriven_at=self._redriven_at, since=since, partial=partial)

    def read(self, turn: Turn) -> None:
        if self._number is None:
            self._number = number_in(turn, self._item, self._incarnation)
        if self._number is None:
            return
        for event in turn.events:
            reader = self._readers.get(event[0])
            if reader is not None:
                reader(turn.at, *event[1:])

    # ---- the events of attempts ---------------------------------------------------------------------------

    def _leased(self, at: int, client: str, deadline: int, runs: Sequence[int]) -> None:
        self._begin(at, client, runs)

    def _completed(self, at: int, client: str, pairs: Sequence[int], keep_until: int, result: int) -> None:
        if self._is_in(pairs[::2]):
            self._end(at, "completed", counts=True)

    def _retried(self, at: int, client: str, number: int, due: int, deferred: bool, error: str | None) -> None:
        if number == self._number:
            self._end(at, "deferred" if deferred else "failed", counts=not deferred, error=error)

    def _lease_expired(self, at: int, runs: Sequence[int]) -> None:
        if self._is_in(runs):
            self._end(at, "lease_expired", counts=True)

    def _released(self, at: int, runs: Sequence[int]) -> None:
        if self._is_in(runs):
            self._end(at, "released", counts=False)

    def _died(
        self, at: int, reason: int, state: str, runs: Sequence[int], fate: int, target: str | None, error: str | None
    ) -> None:
        if state not in (State.LEASED, State.CLAIMED) or not self._is_in(runs):
            return
        expired = error is None and _REASONS[reason] != DeadReason.REJECTED
        self._end(at, "lease_expired" if expired else "failed", counts=True, error=error)
        self._attempts[-1].dead = True

    def _cancelled(self, at: int, state: str, runs: Sequence[int], keep_until: int) -> None:
        if state in (State.LEASED, State.CLAIMED) and self._is_in(runs):
            self._end(at, "cancelled", counts=True)

    def _redriven(self, at: int, numbers: Sequence[int], deadline: int) -> None:
        if self._number in numbers:
            self._counted = 0
            self._redriven_at = to_datetime(at)

    def _claimed(self, at: int, claim: bytes, claim_id: str, owner: str, runs: Sequence[int]) -> None:
        self._begin(at, owner or claim_id, runs)

    def _unclaimed(self, at: int, claim: bytes, runs: Sequence[int]) -> None:
        self._released(at, runs)

    def _claim_completed(self, at: int, claim: bytes, owner: str, runs: Sequence[int], keep_until: int) -> None:
        if self._is_in(runs):
            self._end(at, "completed", counts=True)

    def _claim_retried(self, at: int, claim: bytes, owner: str, number: int, due: int, error: str | None) -> None:
        self._retried(at, owner, number, due, False, error)

    # ---- what they share ----------------------------------------------------------------------------------

    def _is_in(self, runs: Iterable[int]) -> bool:
        assert self._number is not None, "the item is known"
        return in_runs(self._number, runs)

    def _begin(self, at: int, by: str, runs: Sequence[int]) -> None:
        if self._is_in(runs):
            attempt = Attempt(number=self._counted + 1, by=by, leased_at=to_datetime(at), redriven_at=self._redriven_at)
            self._attempts.append(attempt)
            self._redriven_at = None

    def _end(self, at: int, how: str, *, counts: bool, error: str | None = None) -> None:
        self._counted += counts
        if not self._attempts or self._attempts[-1].how is not None:
            return  # it began before the journal does
        attempt = self._attempts[-1]
        attempt.how, attempt.error, attempt.ended_at = how, error, to_datetime(at)
        attempt.seconds = (attempt.ended_at - attempt.leased_at).total_seconds()


def in_runs(number: int, runs: Iterable[Any]) -> bool:
    return any(0 <= number - (run >> RUN_BITS) <= run & _COUNT_MASK for run in runs)
