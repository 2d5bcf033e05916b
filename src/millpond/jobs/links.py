"""The linker: follows links (see `held.py`), and releases or cancels the jobs that they hold.

A worker leases up to `LINKS_AT_ONCE` links of `LINKS_QUEUE` with a lease of `LINK_LEASE`, and has `follow` work on all
of them at a time. What a link says can be done twice, and a link may be handed back (retry, defer) at any time.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import datetime

from millpond.api import Api
from millpond.errors import Forbidden, LeaseLost, MillpondError, NotFound
from millpond.jobs.held import FAILED_STATES, Link, done_in, gone_in, had_completed, held_item, is_of, look, read_link
from millpond.jobs.names import KINDS, LINKS_QUEUE
from millpond.jobs.now import by_lease
from millpond.jobs.parking import parks_of
from millpond.jobs.spec import try_decode
from millpond.jobs.view import is_held
from millpond.model import Item, LeasedItem, Retry, State

LINKS_AT_ONCE = 256  # that a worker follows at a time: each has its lease extended
LINK_LEASE = 30.0  # seconds: the links of a worker that died are followed by another after so long
LINK_SLICE = 15.0  # seconds parked before the lease is extended, or the link makes way for another
HOLD_LOOK = 10.0  # seconds until the next look at a job that is dead, and may be revived; twice as long each time
HOLD_LOOK_MAX = 300.0
ERROR_PAUSE = 10.0  # seconds, after a call that failed
LAST_LOOK = 1.0  # seconds, for a worker that ends

logger = logging.getLogger(__name__)


async def follow(api: Api, item: LeasedItem, now: datetime) -> None:
    """Work on one leased link until it is done, or another has waited for its place. Ends the lease in any case."""
    now = by_lease(item, now, LINK_LEASE)
    link = _read(item)
    if link is None:
        await api.retry([Retry(lease=item, dead=True, error="not a link")], queue=LINKS_QUEUE)
        return
    try:
        await _Follower(api, item, link, now).run()
    except LeaseLost:
        pass  # another worker follows it
    except MillpondError as error:
        logger.warning("job %s of queue %s cannot be followed: %s", link.id, link.queue, error.message)
        await _hand_back(api, item, delay=ERROR_PAUSE, error=error.message)


def _read(item: LeasedItem) -> Link | None:
    """None for what is no link: its kind must be its job's, since that is what its producer was allowed."""
    link = read_link(item.payload)
    spec = None if link is None else try_decode(link.payload, link.encoding)
    return link if spec is not None and item.kind in KINDS and spec.kind == item.kind else None


class _Follower:
    """One link in a worker's hands. `done` are the jobs that have completed: they may be gone before the others. `gone`
    are those that had not: the journal, which may be long, is asked once.
    """

    def __init__(self, api: Api, item: LeasedItem, link: Link, now: datetime) -> None:
        self._api = api
        self._item = item
        self._link = link
        self._now = now
        self._done = done_in(item.state_doc)
        self._gone = gone_in(item.state_doc)
        self._noted = len(self._done) + len(self._gone)
        self._version = item.state_version

    async def run(self) -> None:
        try:
            await self._follow()
        except asyncio.CancelledError:
            await self._look_last()
            raise

    async def _look_last(self) -> None:
        """The worker ends, and there may be no other for days: what has completed just now is forgotten by then."""
        with suppress(MillpondError, TimeoutError):
            async with asyncio.timeout(LAST_LOOK):
                await self._look_at_parents()
                await self._note()

    async def _follow(self) -> None:
        if not await self._is_held():
            await self._complete()
            return
        while True:
            failed, waiting = await self._look_at_parents()
            if failed or not waiting:
                await self._end(failed)
                return
            await self._note()
            ended = await parks_of(self._api).ended(self._api, *waiting[0], LINK_SLICE)
            cancelled = await self._extend()
            if cancelled or (not ended and await self._others_wait()):
                await _hand_back(self._api, self._item)
                return

    async def _end(self, failed: list[str]) -> None:
        """Somebody may have released, cancelled or replaced the job meanwhile: what it does then is not ours."""
        child = await look(self._api, self._link.queue, self._link.id)
        if child is None or not self._holds(child):
            await self._complete()
        elif failed:
            await self._fail()
        else:
            await self._release()

    async def _is_held(self) -> bool:
        """Produces the job if it is missing and cannot have ended: who enqueued it died between link and job."""
        link = self._link
        if (child := await look(self._api, link.queue, link.id)) is not None:
            return self._holds(child)
        age = (self._now - self._item.created_at).total_seconds()
        if age > await self._window() / 2:
            return False  # whoever sees its id free now would see it free after it has ended, too
        [produced] = await self._api.produce(link.queue, [held_item(link, self._item.kind)])
        if not produced.duplicate:
            return True
        child = await look(self._api, link.queue, link.id)  # who enqueued it may have come in between
        return child is not None and self._holds(child)

    def _holds(self, child: Item) -> bool:
        return is_held(child) and is_of(self._link, child)

    async def _window(self) -> float:
        try:
            return (await self._api.queue_info(self._link.queue)).dedup_window
        except (Forbidden, NotFound):
            return 0.0

    async def _look_at_parents(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Those that will not complete, and those that may."""
        failed: list[str] = []
        waiting: list[tuple[str, str]] = []
        for queue, item_id in self._link.parents:
            name = f"{queue}/{item_id}"
            if name in self._done:
                continue
            parent = await look(self._api, queue, item_id)
            if parent is None:
                completed = await self._had_completed(queue, item_id)
            else:
                completed = parent.state == State.COMPLETED
            if completed:
                self._done.add(name)
            elif parent is None or parent.state in FAILED_STATES:
                failed.append(name)
            else:
                waiting.append((queue, item_id))
        return failed, waiting

    async def _had_completed(self, queue: str, item_id: str) -> bool:
        """One that is gone: there may have been no worker to see it for longer than its queue keeps what completed."""
        name = f"{queue}/{item_id}"
        if name in self._gone:
            return False
        completed = await had_completed(self._api, self._link, queue, item_id)
        await self._extend()  # it may have taken seconds, and there may be a hundred like it
        if not completed:
            self._gone.add(name)
        return completed

    async def _extend(self) -> bool:
        """Whether the link was cancelled."""
        [extended] = await self._api.extend([self._item], queue=LINKS_QUEUE, lease_timeout=LINK_LEASE)
        if extended.error is not None:
            raise LeaseLost(extended.error.message)
        return extended.cancelled

    async def _others_wait(self) -> bool:
        return (await self._api.stats(LINKS_QUEUE)).counts.get(State.READY, 0) > 0

    async def _release(self) -> None:
        link, due = self._link, self._link.due(self._item.created_at)
        if due is not None and due > self._now:
            await self._note()
            await _hand_back(self._api, self._item, retry_at=due)
            return
        await self._api.make_ready(link.queue, [link.id])  # an error: it was cancelled or released in between
        await self._complete()

    async def _fail(self) -> None:
        """A job that is held may go on once the dead one was revived and has completed."""
        if self._link.if_dead == "hold":
            await self._note()
            delay = min(HOLD_LOOK_MAX, HOLD_LOOK * 2.0 ** min(self._item.deliveries - 1, 10))
            await _hand_back(self._api, self._item, delay=delay)
            return
        await self._api.cancel(self._link.queue, [self._link.id])
        await self._complete()

    async def _complete(self) -> None:
        await self._api.complete([self._item], queue=LINKS_QUEUE)

    async def _note(self) -> None:
        """Remember what has completed: by the next look it may be gone, and so may this worker."""
        known = len(self._done) + len(self._gone)
        if known > self._noted:
            document = {"done": sorted(self._done)} | ({"gone": sorted(self._gone)} if self._gone else {})
            written = await self._api.write_state(self._item, document, version=self._version, queue=LINKS_QUEUE)
            self._version, self._noted = written.version, known


async def _hand_back(
    api: Api,
    item: LeasedItem,
    *,
    delay: float | None = None,
    retry_at: datetime | None = None,
    error: str | None = None,
) -> None:
    back = Retry(lease=item, intent="defer", delay=delay, retry_at=retry_at, error=error)
    await api.retry([back], queue=LINKS_QUEUE)
