"""What a commit may do to leased items: handed out from the head, ended as their holders ask, or by time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from millpond.history.format import Event, numbers_of
from tests.sim.asks import COMPLETE, EXTEND, RETRY, STATE, Ask
from tests.sim.nouns import COMPLETED, LEASED, READY, RETRYING, SCHEDULED, Grant, Item

if TYPE_CHECKING:
    from tests.sim.rules import Partition


def leased(partition: Partition, client: str, deadline: int, runs: Sequence[int]) -> None:
    holder = partition.queue.clients[client]
    if not holder.asks:
        partition.broken(f"leased to {client}, who does not wait")
    if partition.paused:
        partition.broken("leased while the queue is paused")
    if not any(deadline == partition.at + _timeout(partition, ask) for ask in holder.asks):
        partition.broken(f"a lease for {client} made at {partition.at} ends at {deadline}")
    for number in numbers_of(runs):
        item = partition.take_head(number, "leased")
        token = partition.turn + partition.fence
        if token <= item.token_floor:
            partition.broken(f"fencing token {token} of {item} is not above {item.token_floor}")
        item.token_floor = token
        item.attempts += 1
        item.deliveries += 1
        item.lease = grant = Grant(item, partition.turn, holder, deadline)
        grant.fencing_token = token
        grant.in_doubt = not partition.reported
        partition.to(item, LEASED)
        partition.alarm(deadline, item)
        holder.granted.append(grant)
    granted = sum(not (one.over or one.in_doubt) for one in holder.granted)
    if not holder.left and granted > sum(ask.wanted for ask in holder.asks):
        partition.broken(f"{client} got more than was asked for")


def completed(partition: Partition, client: str, pairs: Sequence[int], keep_until: int, with_result: int) -> None:
    kept = partition.settings.completed_retention_ms
    if keep_until != (partition.at + kept if kept else 0):
        partition.broken(f"completed at {partition.at}, kept until {keep_until}")
    for run, grant_number in zip(pairs[::2], pairs[1::2], strict=True):
        for number in numbers_of([run]):
            grant = held(partition, number)
            if grant.number != grant_number:
                partition.broken(f"{grant.item} was completed with token {grant_number}, but it is at {grant.number}")
            grant.takers = askers(partition, grant, COMPLETE)
            if not grant.takers:
                partition.broken(f"nobody asked in time to complete {grant.item}")
            grant.completed_at = partition.at
            grant.item.version, grant.item.docs = 0, [None]
            finish(partition, grant, "completed", COMPLETED, keep_until)


def retried(partition: Partition, client: str, number: int, due: int, deferred: bool, error: str | None) -> None:
    grant = held(partition, number)
    item = grant.item
    grant.takers = [
        ask
        for ask in askers(partition, grant, RETRY)
        for retry, of in zip(ask.retries, ask.grants, strict=True)
        if of is grant and (retry.deferred, retry.error, retry.dead) == (deferred, error, False)
        and partition.due_fits(due, retry.due, deferred, item.attempts)
    ]  # fmt: skip
    if not grant.takers:
        partition.broken(f"nobody asked to retry {item} at {due}; it is {partition.at}")
    if item.cancel_asked:
        partition.broken(f"{item} was retried although it is cancelled")
    if not deferred and partition.worn_out(item):
        partition.broken(f"{item} was retried after its last attempt, {item.attempts}")
    if deferred:
        item.attempts -= 1
    if error is not None:
        item.error = error
    end_lease(grant, "retried")
    item.due = due
    partition.to(item, READY if not due else SCHEDULED if deferred else RETRYING)
    if due:
        partition.alarm(due, item)


def lease_expired(partition: Partition, runs: Sequence[int]) -> None:
    for number in numbers_of(runs):
        grant = held(partition, number)
        item = grant.item
        if item.cancel_asked or partition.worn_out(item):
            partition.broken(f"{item} came back after its last lease")
        if not let_go(partition, grant):
            partition.broken(f"the lease of {item} was taken away at {partition.at}, before {grant.deadline}")
        end_lease(grant, "expired")
        partition.to(item, READY)


def released(partition: Partition, runs: Sequence[int]) -> None:
    """Back to the head, the attempt given back, because its holder never saw it."""
    front: dict[int, dict[int, Item]] = {}
    for number in numbers_of(runs):
        grant = held(partition, number)
        if not has_left(grant):
            partition.broken(f"{grant.item} was taken from {grant.client.name}, who is still there")
        grant.item.attempts -= 1
        end_lease(grant, "released")
        partition.to(grant.item, READY)
        front.setdefault(grant.item.priority, {})[number] = grant.item
    partition.to_front(front)


def extended(partition: Partition, deadline: int, runs: Sequence[int]) -> None:
    for number in numbers_of(runs):
        grant = held(partition, number)
        timeout = deadline - partition.at
        asks = [ask for ask in askers(partition, grant, EXTEND) if _timeout(partition, ask) == timeout]
        if not asks or timeout <= 0:
            partition.broken(f"nobody asked to extend the lease of {grant.item} by {timeout}")
        for ask in asks:
            ask.extended[grant] = deadline
            ask.stirred = True
        grant.deadline = deadline
        partition.alarm(deadline, grant.item)


def state_written(partition: Partition, number: int, version: int) -> None:
    grant = held(partition, number)
    item = grant.item
    asks = [ask for ask in askers(partition, grant, STATE) if ask.version == item.version]
    if not asks or version != item.version + 1:
        partition.broken(f"nobody asked to write version {version} over {item.version} of {item}")
    item.version = version
    item.docs = [ask.document for ask in asks]
    for ask in asks:
        ask.stirred = True


# ---- a lease, and who holds it ----------------------------------------------------------------------------


def held(partition: Partition, number: int) -> Grant:
    item = partition.item(number)
    if item.state != LEASED or item.lease is None:
        partition.broken(f"{item} is not leased")
    return item.lease


def askers(partition: Partition, grant: Grant, kind: str) -> list[Ask]:
    """Who asked for this with the delivery's token while its lease was alive."""
    asks = [ask for ask in grant.asks if ask.kind == kind and ask.waits_for(grant)]
    return [ask for ask in asks if partition.in_time(ask, grant.deadline)]


def let_go(partition: Partition, grant: Grant) -> bool:
    """Whether the lease is over: by time, unless its holder spoke in time, or because its holder said so."""
    grant.takers = leavers(partition, grant)
    if grant.deadline <= partition.at:
        late = [ask for ask in grant.asks if partition.in_time(ask, grant.deadline) and ask.waits_for(grant)]
        late = [ask for ask in late if ask.kind != STATE]
        if late and not any(ask.kind in (EXTEND, RETRY) for ask in late):
            partition.broken(f"the lease of {grant.item} was taken away although {late} came in time")
        return True
    return bool(grant.takers)


def leavers(partition: Partition, grant: Grant) -> list[Ask]:
    """Who gave it back by an extend of 0."""
    return [ask for ask in askers(partition, grant, EXTEND) if _timeout(partition, ask) == 0]


def has_left(grant: Grant) -> bool:
    """Whether the caller for whom this delivery was made never saw it."""
    return grant.given_up or (grant.token is None and (grant.client.left or grant.in_doubt))


def end_lease(grant: Grant, how: str) -> None:
    grant.over = how
    grant.item.lease = None


def finish(partition: Partition, grant: Grant, how: str, state: str, keep_until: int) -> None:
    end_lease(grant, how)
    partition.keep(grant.item, state, keep_until)


def _timeout(partition: Partition, ask: Ask) -> int:
    return partition.settings.lease_timeout_ms if ask.timeout is None else ask.timeout


LEASE_JUDGES: dict[int, Callable[..., None]] = {
    Event.LEASED: leased,
    Event.COMPLETED: completed,
    Event.RETRIED: retried,
    Event.LEASE_EXPIRED: lease_expired,
    Event.RELEASED: released,
    Event.EXTENDED: extended,
    Event.STATE_WRITTEN: state_written,
}
