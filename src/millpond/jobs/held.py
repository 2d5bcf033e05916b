"""Jobs that wait for others (`after`), as they are enqueued; `links.py` is what releases them.

Such a job is *held*: produced with an `enqueue_at` that never comes (`names.HELD`). Before it a *link* is produced,
which names it and the jobs that it waits for, and has all that is needed to produce it: the link is what counts, and
who finds one without its job produces the job.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

import msgspec

from millpond.api import Api
from millpond.durations import checked_seconds
from millpond.errors import Forbidden, InvalidRequest, KeyConflict, MillpondError, NotFound
from millpond.jobs.journal import Origin
from millpond.jobs.names import HELD, LINKS_QUEUE
from millpond.jobs.queues import ensure_queue
from millpond.jobs.spec import MSGPACK, IfDead, JobSpec, parent_of
from millpond.jobs.timeline import has_completed
from millpond.model import LIST_LIMIT_MAX, TOKEN_BATCH_MAX, Item, NewItem, OnConflict, Produced, State

FAILED_STATES = (State.DEAD, State.CANCELLED)


class Link(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The payload of a link, in MessagePack: a job that waits, what for, and the job itself. Times in seconds.

    The job is not due before `run_at`, or before `delay` after the link was made. `origins` are those of the parents,
    in their order: who finds one gone can ask the journal whether it had completed.
    """

    queue: str
    id: str
    after: list[str]
    if_dead: IfDead = "cancel"
    run_at: datetime | None = None
    delay: float | None = None
    payload: bytes
    encoding: str = ""
    reference: str = ""
    key: str | None = None
    priority: int = 0
    max_attempts: int | None = None
    expire_timeout: float | None = None
    correlation_id: str | None = None
    origins: list[Origin] = []

    @property
    def parents(self) -> list[tuple[str, str]]:
        """Queue and id of the jobs that it waits for."""
        return [parent_of(name, self.queue) for name in dict.fromkeys(self.after)]

    def due(self, made_at: datetime) -> datetime | None:
        """The job waits for that too, if it waits for a time at all. `made_at` is the link's."""
        return self.run_at if self.delay is None else made_at + timedelta(seconds=self.delay)


def link_id(queue: str, job: Item | Link) -> str:
    """Follows from the job, so that who has it finds its link; that of another job with the same id is another."""
    digest = hashlib.sha256(f"{queue}/{job.id} {job.correlation_id}\n".encode() + job.payload)
    return "link-" + digest.hexdigest()[:40]


def is_of(link: Link, job: Item) -> bool:
    """Whether it was this enqueuing that the job came from: its id may have been another's, before or at that time."""
    return (job.correlation_id, job.payload) == (link.correlation_id, link.payload)


async def hold(api: Api, queue: str, item: NewItem, spec: JobSpec, on_conflict: OnConflict = "ignore") -> Produced:
    """Enqueue a job that waits for others. They must exist; if all have completed, it waits for none."""
    if on_conflict == "replace":
        raise InvalidRequest("replace does not go with `after`; cancel the other job first, or leave `after` out")
    link = _link_of(queue, item.id or uuid.uuid4().hex, item, spec)
    if (queue, link.id) in link.parents:
        raise InvalidRequest(f"job {link.id!r} would wait for itself; take it out of `after`")
    await _check_retention(api, {there for there, _ in link.parents})
    parents = await asyncio.gather(*(look(api, *parent) for parent in link.parents))
    for (there, item_id), parent in zip(link.parents, parents, strict=True):
        if parent is None:
            raise NotFound(f"there is no job {item_id!r} in queue {there!r}; `after` names jobs that exist")
        link.origins.append(Origin(parent.id, parent.partition, parent.created_at))
    states = [parent.state for parent in parents if parent is not None]
    if all(state == State.COMPLETED for state in states):
        [produced] = await api.produce(queue, [item], on_conflict=on_conflict)
        return produced
    produced = await _produce(api, link, item, on_conflict)
    if link.if_dead == "cancel" and not produced.duplicate and any(state in FAILED_STATES for state in states):
        await _cancel(api, queue, produced.id)
    return produced


async def look(api: Api, queue: str, item_id: str) -> Item | None:
    """None: it is not there, or its queue is not."""
    try:
        return await api.get_item(queue, item_id)
    except NotFound:
        return None


async def had_completed(api: Api, link: Link, queue: str, item_id: str) -> bool:
    """Whether a job that the link waits for, and that is gone, had completed; as far as the journal knows."""
    origin = dict(zip(link.parents, link.origins, strict=False)).get((queue, item_id))
    if origin is None:  # the link was made before there were any
        return False
    try:
        return await has_completed(api, queue, origin)
    except (Forbidden, NotFound):
        return False  # not by this token; or the queue is gone, or its partition


async def due_of(api: Api, queue: str, item: Item) -> datetime | None:
    """When a held job is due once it waits for no other; None: at once, or the link may not be looked at."""
    found = await link_of(api, queue, item)
    link = None if found is None else read_link(found.payload)
    return None if found is None or link is None else link.due(found.created_at)


async def link_of(api: Api, queue: str, item: Item) -> Item | None:
    """What keeps a held job; None: nothing does, or it may not be looked at."""
    try:
        return await look(api, LINKS_QUEUE, link_id(queue, item))
    except Forbidden:
        return None


async def look_again(api: Api, parents: Collection[tuple[str, str]]) -> None:
    """At once, by the links that were put off because one of these jobs was dead. Else they do in some minutes."""
    try:
        names = await _put_off(api, parents)
        for start in range(0, len(names), TOKEN_BATCH_MAX):
            await api.make_ready(LINKS_QUEUE, names[start : start + TOKEN_BATCH_MAX])
    except MillpondError:
        pass  # not by this token; or there never was a link


async def _put_off(api: Api, parents: Collection[tuple[str, str]]) -> list[str]:
    names: list[str] = []
    after: str | None = None
    while True:
        page = await api.list_items(LINKS_QUEUE, state=State.SCHEDULED, after=after, limit=LIST_LIMIT_MAX)
        for item in page.items:
            link = read_link(item.payload)
            if link is not None and not set(parents).isdisjoint(link.parents):
                names.append(item.id)
        after = page.next
        if after is None:
            return names


def done_in(state_doc: Any) -> set[str]:
    """Of a link: the jobs that have completed, as QUEUE/ID. They may be forgotten by now."""
    return _noted(state_doc, "done")


def gone_in(state_doc: Any) -> set[str]:
    """Of a link: the jobs that were gone, and of which the journal did not say that they had completed."""
    return _noted(state_doc, "gone")


def _noted(state_doc: Any, what: str) -> set[str]:
    noted: dict[str, Any] = state_doc if isinstance(state_doc, dict) else {}
    return set(noted.get(what, []))


def read_link(payload: bytes) -> Link | None:
    """None for what is no link."""
    try:
        return msgspec.msgpack.decode(payload, type=Link)
    except msgspec.DecodeError:
        return None


def held_item(link: Link, kind: str) -> NewItem:
    """The job of a link, to be produced as often as it takes: its id tells that it is there already."""
    return NewItem(
        payload=link.payload,
        id=link.id,
        key=link.key,
        kind=kind,
        encoding=link.encoding,
        reference=link.reference,
        priority=link.priority,
        enqueue_at=HELD,
        max_attempts=link.max_attempts,
        expire_timeout=link.expire_timeout,
        correlation_id=link.correlation_id,
    )


def _link_of(queue: str, own: str, item: NewItem, spec: JobSpec) -> Link:
    assert isinstance(item.payload, bytes), "a job's payload is encoded"
    if item.delay is not None and item.enqueue_at is not None:
        raise InvalidRequest("delay and run_at exclude each other; give one")
    expire = item.expire_timeout
    return Link(
        queue=queue,
        id=own,
        after=spec.after,
        if_dead=spec.if_dead,
        run_at=item.enqueue_at,
        delay=None if item.delay is None else checked_seconds(item.delay, "delay"),
        payload=item.payload,
        encoding=item.encoding,
        reference=item.reference,
        key=item.key,
        priority=item.priority,
        max_attempts=item.max_attempts,
        expire_timeout=None if expire is None else checked_seconds(expire, "expire_timeout"),
        correlation_id=item.correlation_id or uuid.uuid4().hex,  # tells whose link its job was made from
    )


async def _check_retention(api: Api, queues: set[str]) -> None:
    for name in queues:
        try:
            info = await api.queue_info(name)
        except Forbidden:
            continue  # the look at the jobs themselves decides
        if not info.completed_retention:
            raise InvalidRequest(
                f"queue {name!r} forgets its jobs as they complete (completed_retention is 0), so none can wait for"
                " them; give it a completed_retention"
            )


async def _produce(api: Api, link: Link, item: NewItem, on_conflict: OnConflict) -> Produced:
    """The link, then the job."""
    if item.id is not None and (found := await look(api, link.queue, item.id)) is not None:
        if on_conflict == "reject":
            raise _taken(f"id {item.id!r}", found.id)
        return Produced(found.id, found.correlation_id, True)
    await ensure_queue(api, LINKS_QUEUE)
    name = link_id(link.queue, link)
    made = NewItem(payload=msgspec.msgpack.encode(link), id=name, kind=item.kind, encoding=MSGPACK, reference=link.id)
    try:
        await api.produce(LINKS_QUEUE, [made], on_conflict="replace")
    except KeyConflict:
        pass  # this very job was enqueued before, and a worker follows its link already
    [produced] = await api.produce(link.queue, [held_item(link, item.kind)])
    if not produced.duplicate:
        return produced
    if await _came_before(api, link, item, produced):
        return Produced(link.id, produced.correlation_id, False)
    await _cancel(api, LINKS_QUEUE, name)  # key or id are those of another job, or of one that has ended
    if on_conflict == "reject":
        raise _taken("the id or key", produced.id)
    return produced


async def _came_before(api: Api, link: Link, item: NewItem, produced: Produced) -> bool:
    """Whether a worker found our link before we came to the job, made it, and perhaps ran it already."""
    if produced.id != link.id:
        return False
    if (found := await look(api, link.queue, link.id)) is not None:
        return is_of(link, found)
    return item.correlation_id is None and produced.correlation_id == link.correlation_id  # made up, so nobody else's


def _taken(what: str, item_id: str) -> KeyConflict:
    return KeyConflict(f"{what} is taken by item {item_id}; use another")


async def _cancel(api: Api, queue: str, item_id: str) -> None:
    try:
        await api.cancel(queue, [item_id])
    except Forbidden:
        pass  # a worker that comes to the link sees the same, and does it
