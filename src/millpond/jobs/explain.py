"""One plain sentence: why a job is not running, or what became of it.

Looks at what the engine goes by (state, due instants, leases, the queue's pause, who is ahead) and changes nothing.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from millpond.api import Api
from millpond.errors import Forbidden, NotFound
from millpond.jobs.held import FAILED_STATES, done_in, due_of, had_completed, link_of, look, read_link
from millpond.jobs.position import Ahead, ahead_of
from millpond.jobs.spec import parent_of, try_decode
from millpond.jobs.view import JOB_STATE, is_held
from millpond.jobs.workers import WorkerInfo, list_workers
from millpond.model import Item, State

ERROR_CHARS = 200  # of an error, in a sentence
NAMED_MAX = 3  # jobs that are named, of those that one waits for


class Explanation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`reason` is for programs: it keeps its name. `until`: when that ends by itself."""

    id: str
    queue: str
    reason: str
    sentence: str
    until: datetime | None = None
    jobs: list[str] = []
    worker: str | None = None
    ahead: int | None = None


async def explain(api: Api, queue: str, id: str, now: datetime) -> Explanation:
    """NotFound if there is no such job."""
    return await explain_item(api, queue, await api.get_item(queue, id), now)


async def explain_item(api: Api, queue: str, item: Item, now: datetime) -> Explanation:
    teller = _Teller(api, queue, item, now)
    if is_held(item):
        return await teller.held()
    match item.state:
        case State.READY:
            return await teller.ready()
        case State.LEASED:
            return await teller.leased()
        case State.CLAIMED:
            return await teller.claimed()
        case State.SCHEDULED:
            return teller.scheduled()
        case State.RETRYING:
            return teller.retrying()
        case _:
            return await teller.ended()


class _Teller:
    def __init__(self, api: Api, queue: str, item: Item, now: datetime) -> None:
        self._api = api
        self._queue = queue
        self._item = item
        self._now = now

    def _say(self, reason: str, sentence: str, **more: Any) -> Explanation:
        text = f"Job {self._item.id} {sentence}."
        return Explanation(id=self._item.id, queue=self._queue, reason=reason, sentence=text, **more)

    # ---- what waits for a time ----------------------------------------------------------------------------

    def scheduled(self) -> Explanation:
        due = self._item.enqueue_at
        assert due is not None, "what is scheduled has its time"
        how = "was put off by its worker and is" if self._item.deliveries else "is"
        why = _because(self._item.last_error) if self._item.deliveries else ""
        return self._say("not_due", f"{how} not due until {when(due, self._now)}{why}", until=due)

    def retrying(self) -> Explanation:
        due = self._item.enqueue_at
        assert due is not None, "what is retrying has its time"
        tries = f"attempt {self._tries()} failed{_because(self._item.last_error)}"
        return self._say("backing_off", f"is backing off until {when(due, self._now)}: {tries}", until=due)

    def _tries(self) -> str:
        limit = self._item.max_attempts
        return f"{self._item.attempts} of {limit}" if limit else f"{self._item.attempts}"

    # ---- what has ended -----------------------------------------------------------------------------------

    async def ended(self) -> Explanation:
        item = self._item
        at = when(item.ended_at or item.updated_at, self._now)
        if item.state == State.COMPLETED:
            return self._say("completed", f"completed {at}, at attempt {self._tries()}")
        if item.state == State.CANCELLED:
            return self._say("cancelled", f"was cancelled {at}{await self._cancelled_why()}")
        why = {
            "max_attempts": f"died {at} after {_many(item.attempts, 'attempt')}{_because(item.last_error)}",
            "expired": f"expired {at}: nobody ran it in time",
            "rejected": f"was given up {at}{_because(item.last_error)}",
        }[item.dead_reason or "rejected"]
        return self._say("dead", f"{why}; `millpond dlq retry {item.id}` runs it again")

    async def _cancelled_why(self) -> str:
        """Told only of a job that is dead or cancelled itself, was so before, and that this one waited for."""
        spec, ended = try_decode(self._item.payload, self._item.encoding), self._item.ended_at
        if spec is None or self._item.deliveries or spec.if_dead != "cancel":
            return ""
        failed: list[str] = []
        for name in dict.fromkeys(spec.after):
            parent = await look(self._api, *parent_of(name, self._queue))
            if parent is not None and parent.state in FAILED_STATES and _is_before(parent.ended_at, ended):
                failed.append(f"{name} ({parent.state}{_because(parent.last_error)})")
        return f" since it waited for {_jobs(failed)}" if failed else ""

    # ---- what somebody has --------------------------------------------------------------------------------

    async def leased(self) -> Explanation:
        item = self._item
        until, who = item.lease_deadline, item.client_id
        assert until is not None, "a lease has its deadline"
        holder = await self._holder(who)
        name = _named(holder) if holder is not None else who or "a client without a name"
        held = f"its lease is held by {name} until {when(until, self._now)}"
        if item.cancel_asked:
            return self._say("cancelling", f"is being cancelled: {held} at the latest", until=until, worker=who)
        if holder is not None and not holder.active:
            ends = f"waits for its lease to end {when(until, self._now)}"
            return self._say("worker_lost", f"{ends}: {name}, which had it, has died", until=until, worker=who)
        return self._say("running", f"is running, attempt {self._tries()}: {held}", until=until, worker=who)

    async def _holder(self, client: str | None) -> WorkerInfo | None:
        """None: it is no worker, or none that may be looked at."""
        workers = await self._workers() if client else None
        return next((one for one in workers or [] if client in (one.incarnation, one.name)), None)

    async def claimed(self) -> Explanation:
        try:
            claims = [claim for claim in await self._api.list_claims(self._queue) if claim.items]
        except Forbidden:
            claims = []
        who = "a batch reader"
        if len(claims) == 1:
            who = f"claim {claims[0].claim_id}" + (f" of {claims[0].owner}" if claims[0].owner else "")
        return self._say("claimed", f"is claimed by {who}, and waits for that claim to be completed or released")

    # ---- what waits for others ----------------------------------------------------------------------------

    async def held(self) -> Explanation:
        spec = try_decode(self._item.payload, self._item.encoding)
        waiting: list[str] = []
        failed: list[str] = []
        found = await link_of(self._api, self._queue, self._item)
        done = done_in(None if found is None else found.state_doc)
        link = None if found is None else read_link(found.payload)
        for name in dict.fromkeys(spec.after if spec is not None else []):
            queue, item_id = parent_of(name, self._queue)
            if f"{queue}/{item_id}" in done:
                continue
            parent = await look(self._api, queue, item_id)
            if parent is None:
                if link is None or not await had_completed(self._api, link, queue, item_id):
                    failed.append(f"{name} (gone)")
            elif parent.state in FAILED_STATES:
                failed.append(f"{name} ({parent.state}{_because(parent.last_error)})")
            elif parent.state != State.COMPLETED:
                waiting.append(f"{name} ({JOB_STATE[parent.state]})")
        if failed:
            does = "is held" if spec is not None and spec.if_dead == "hold" else "is to be cancelled"
            sentence = f"{does} because it waits for {_jobs(failed)}, which will not complete by itself"
            return self._say("blocked", sentence, jobs=_bare(failed))
        if waiting:
            return self._say("waiting_for_jobs", f"is waiting for {_jobs(waiting)} to complete", jobs=_bare(waiting))
        return await self._released()

    async def _released(self) -> Explanation:
        due = await due_of(self._api, self._queue, self._item)
        if due is not None and due > self._now:
            return self._say("not_due", f"is not due until {when(due, self._now)}", until=due)
        if await self._workers() == []:
            return self._say("no_worker", "waits for no other job any more, but no worker is running to release it")
        link = await link_of(self._api, self._queue, self._item)
        if link is not None and link.enqueue_at is not None and link.enqueue_at > self._now:
            at = when(link.enqueue_at, self._now)
            sentence = f"waits for no other job any more, and is released {at}, or by `millpond job release`"
            return self._say("releasing", sentence, until=link.enqueue_at)
        return self._say("releasing", "waits for no other job any more, and is released in a moment")

    # ---- what could run -----------------------------------------------------------------------------------

    async def ready(self) -> Explanation:
        if await self._paused():
            sentence = f"waits because queue {self._queue} is paused; `millpond queue resume {self._queue}` goes on"
            return self._say("paused", sentence)
        ahead = await ahead_of(self._api, self._queue, self._item)
        line = f"{_count(ahead)} ahead of it" if ahead.count else "it is the next"
        workers = await self._workers()
        if workers is None:
            return self._say("ready", f"waits for a free worker: {line}", ahead=ahead.count)
        serving = [worker for worker in workers if worker.serves(self._queue)]
        if not serving:
            sentence = f"waits because no worker runs on queue {self._queue} ({line}); {self._start()}"
            return self._say("no_worker", sentence, ahead=ahead.count)
        busy, slots = sum(worker.running_count for worker in serving), sum(worker.slots for worker in serving)
        told = f"{_many(len(serving), 'worker')} on queue {self._queue} with {busy} of {slots} slots busy"
        return self._say("queued", f"waits for a free worker: {line}, and there {_is(len(serving))} {told}",
                         ahead=ahead.count)  # fmt: skip

    def _start(self) -> str:
        return f"`millpond worker start --queue {self._queue}` starts one"

    async def _paused(self) -> bool:
        try:
            return (await self._api.queue_info(self._queue)).paused
        except Forbidden:
            return False

    async def _workers(self) -> list[WorkerInfo] | None:
        """None: they may not be looked at."""
        try:
            return await list_workers(self._api)
        except Forbidden:
            return None
        except NotFound:
            return []


# ---- words ------------------------------------------------------------------------------------------------


def when(instant: datetime, now: datetime) -> str:
    """To the second, and how far away that is."""
    seconds = round((instant - now).total_seconds())
    text = f"{instant:%Y-%m-%d %H:%M:%S} UTC"
    return f"{text} (in {span(seconds)})" if seconds > 0 else f"{text} ({span(-seconds)} ago)"


def span(seconds: int) -> str:
    """The two largest units."""
    parts: list[str] = []
    for name, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        if seconds >= size or (name == "s" and not parts):
            parts.append(f"{seconds // size}{name}")
            seconds %= size
    return "".join(parts[:2])


def _named(worker: WorkerInfo) -> str:
    return f"worker {worker.name} (process {worker.pid} on {worker.host})"


def _is_before(one: datetime | None, other: datetime | None) -> bool:
    return one is not None and other is not None and one <= other


def _because(error: str | None) -> str:
    if not error:
        return ""
    first = error.strip().splitlines()[0] if error.strip() else ""
    cut = first if len(first) <= ERROR_CHARS else first[: ERROR_CHARS - 1] + "…"
    return f" because of: {cut}" if cut else ""


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _count(ahead: Ahead) -> str:
    how = "" if ahead.how == "exactly" else f"{ahead.how} "
    return f"{how}{_many(ahead.count, 'job')} {_is(ahead.count)}"


def _names(names: list[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {_many(more, 'other')}" if more > 0 else "")


def _jobs(names: list[str]) -> str:
    return f"job{'' if len(names) == 1 else 's'} {_names(names)}"


def _bare(names: list[str]) -> list[str]:
    return [name.partition(" (")[0] for name in names]
