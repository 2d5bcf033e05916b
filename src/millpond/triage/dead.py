"""What is dead in a queue: items kept in place, and the letters in a dead queue, which look like items that wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from millpond.model import (
    LIST_LIMIT_MAX,
    Item,
    ItemPage,
    QueueInfo,
    QueueStats,
    RedriveFilter,
    Redriven,
    Result,
    State,
)

WAITING = (State.READY, State.SCHEDULED, State.RETRYING)
PAGE_BYTES = 64 << 20  # a page of large payloads is cut shorter: it is in memory several times over
PAGE_ITEMS_MIN = 8  # of the largest payloads, so many fit


class Calls(Protocol):
    """The operations that triage needs: a pond's or a client's, blocking."""

    def queue_info(self, name: str) -> QueueInfo: ...

    def stats(self, queue: str) -> QueueStats: ...

    def get_item(self, queue: str, id: str) -> Item: ...

    def list_items(
        self, queue: str, *, state: str | None = None, after: str | None = None, limit: int = 100
    ) -> ItemPage: ...

    def redrive(
        self,
        queue: str,
        *,
        ids: Sequence[str] | None = None,
        filter: RedriveFilter | Mapping[str, str] | None = None,
        rate: float | None = None,
        dry_run: bool = False,
    ) -> Redriven: ...

    def bury(
        self, queue: str, ids: Sequence[str], *, reason: str = "rejected", error: str | None = None
    ) -> Sequence[Result]: ...

    def cancel(self, queue: str, ids: Sequence[str]) -> Sequence[Result]: ...

    def clear(self, queue: str, states: Sequence[str] = ...) -> dict[str, int]: ...


class Chosen(msgspec.Struct, frozen=True, gc=False):
    """A dead item to bring back: `id` is its own where it lies, `to` and `to_id` are where and as what it will be."""

    id: str
    to: str
    to_id: str
    reason: str
    error: str | None = None


class Dead(msgspec.Struct, frozen=True):
    """How the dead of a queue are told from the rest. `count` is how many there may be."""

    queue: str
    letters: bool
    count: int

    @property
    def state(self) -> str | None:
        """What to list them by; None: a letter may be in any state that waits."""
        return None if self.letters else str(State.DEAD)

    def has(self, item: Item) -> bool:
        return item.state == State.DEAD or (self.letters and item.state in WAITING and is_letter(item))

    def chosen(self, item: Item) -> Chosen:
        reason = str(item.dead_reason)
        if self.letters and is_letter(item):
            return Chosen(item.id, str(item.source_queue), str(item.source_id), reason, item.last_error)
        return Chosen(item.id, self.queue, item.id, reason, item.last_error)


def is_letter(item: Item) -> bool:
    """In a queue that letters have come to."""
    return item.source_queue is not None and item.dead_reason is not None


def dead_in(pond: Calls, queue: str) -> Dead:
    stats = pond.stats(queue)
    letters = stats.totals.get("letters", 0) > 0
    states = (State.DEAD, *WAITING) if letters else (State.DEAD,)
    return Dead(queue, letters, sum(stats.counts.get(state, 0) for state in states))


def dead_items(pond: Calls, dead: Dead) -> Iterator[Item]:
    return (item for item in items_in(pond, dead.queue, dead.state) if dead.has(item))


def items_in(pond: Calls, queue: str, state: str | None) -> Iterator[Item]:
    """All of them, a page at a time, in the order of the queue."""
    limit, after = LIST_LIMIT_MAX, None
    while True:
        page = pond.list_items(queue, state=state, after=after, limit=limit)
        yield from page.items
        after = page.next
        if after is None:
            return
        limit = _next_limit(page.items)


def _next_limit(items: Sequence[Item]) -> int:
    """As many as stay below PAGE_BYTES if they are like those of this page."""
    size = sum(len(item.payload) for item in items)
    fitting = LIST_LIMIT_MAX if not size else PAGE_BYTES * len(items) // size
    return max(PAGE_ITEMS_MIN, min(LIST_LIMIT_MAX, fitting))
