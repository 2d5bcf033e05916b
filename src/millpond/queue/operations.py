"""Calls that go by id or over many items: get, list, cancel, clear, redrive, stats.

Each is a generator that yields what it needs next and is resumed when it is there: `(lane, act)` runs `act` in that
lane's next turn and brings back its value and the turn's reads; an int sleeps until that instant.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from heapq import heappush
from typing import Any

import msgspec

from millpond.errors import Conflict, MillpondError, NotFound, OutcomeUnknown, Unavailable
from millpond.history.format import Event, Record, decode_state, run_span, runs_of
from millpond.model import (
    ErrorInfo,
    Item,
    ItemPage,
    PartitionStats,
    QueueStats,
    RedriveFilter,
    Redriven,
    Result,
    State,
    to_datetime,
)
from millpond.queue.dedup import id_digest
from millpond.queue.lane import Lane, Part, TurnJob
from millpond.queue.leases import Lease
from millpond.queue.lifecycle import kept_until
from millpond.queue.names import has_own_id
from millpond.queue.partition import ERROR_PART, REASONS, RESULT_PART, STATE_PART, VERSION_BITS
from millpond.queue.requests import Cancel, Clear, GetItem, GetStats, ListItems, Redrive, Request
from millpond.queue.state import QueueState
from millpond.queue.tokens import read_id

SCAN_BATCH = 500  # items looked at in one turn, so that a scan does not hold up the others

_sleepers = itertools.count()  # those who wake at the same instant do so in the order in which they went to sleep

_LETTERS = (State.DEAD, State.READY, State.SCHEDULED, State.RETRYING)  # what may leave a dead queue

Act = Callable[[Lane, int], Any]
Step = tuple[Lane, Act] | int
Operation = Generator[Step, Any, Any]


class StepPart(Part):
    __slots__ = ("_act", "_drive", "_value")

    def __init__(self, drive: Drive, act: Act) -> None:
        self._drive = drive
        self._act = act
        self._value: Any = None

    def apply(self, lane: Lane, now: int) -> None:
        self._value = self._act(lane, now)

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        self._drive.be_patient_from(now)
        self._drive.resume((self._value, job))

    def fail(self, error: MillpondError) -> None:
        self._drive.stop(error)

    def deadline(self) -> int:
        return self._drive.deadline


class Drive:
    """Runs one operation, a step at a time."""

    __slots__ = ("_begun", "_operation", "_patience", "_queue", "_request", "deadline")

    def __init__(self, queue: QueueState, request: Request, operation: Operation) -> None:
        self._queue = queue
        self._request = request
        self._operation = operation
        self._begun = False  # a step of it is durable
        self._patience = request.deadline - request.at
        self.deadline = request.deadline
        self.resume(None)

    def resume(self, value: Any) -> None:
        if self._request.gone:
            return self.stop(Unavailable("the caller has gone"))
        self._begun = value is not None or self._begun
        try:
            step = self._operation.send(value)
        except StopIteration as stop:
            self._request.answer(stop.value)
        except MillpondError as error:
            self._request.fail(error)
        else:
            self._schedule(step)
        return None

    def stop(self, error: MillpondError) -> None:
        self._operation.close()
        if self._begun and isinstance(self._request, Cancel | Clear | Redrive):
            error = OutcomeUnknown(f"{error.message}; other partitions may be done already: look, then send it again")
        self._request.fail(error)

    def be_patient_from(self, now: int) -> None:
        """Each step may wait for its lane as long as a request may."""
        self.deadline = now + self._patience

    def _schedule(self, step: Step) -> None:
        if isinstance(step, int):
            self.be_patient_from(step)
            heappush(self._queue.sleepers, (step, next(_sleepers), lambda: self.resume(None)))
        else:
            lane, act = step
            lane.waiting.append(StepPart(self, act))


def start_operation(queue: QueueState, request: Request) -> None:
    if isinstance(request, GetItem):
        Drive(queue, request, _get(queue, request))
    elif isinstance(request, ListItems):
        Drive(queue, request, _list(queue, request))
    elif isinstance(request, Cancel):
        Drive(queue, request, _cancel(queue, request))
    elif isinstance(request, Clear):
        Drive(queue, request, _clear(queue, request))
    else:
        assert isinstance(request, Redrive)
        Drive(queue, request, _redrive(queue, request))


# ---- finding and showing ----------------------------------------------------------------------------------


def _locate(queue: QueueState, item_id: str) -> tuple[Lane, int] | None:
    """Where an id points; whether the item is still there the lane's turn tells."""
    name = id_digest(item_id)
    kept: tuple[Lane, int] | None = None
    for lane in queue.lanes.values():
        if lane.known and (number := lane.partition.dedup.live.get(name)) is not None:
            if number not in lane.partition.finished:
                return lane, number
            kept = lane, number  # it has ended: another item may have its id by now
    if kept is not None:
        return kept
    if (away := next((lane for lane in queue.lanes.values() if not lane.known), None)) is not None:
        raise Unavailable(f"partition {away.index} is away and may hold the item; try again later")
    place = read_id(queue.incarnation, item_id)
    if place is None or place[0] not in queue.lanes:
        return None
    lane = queue.lanes[place[0]]
    return None if has_own_id(lane, place[1]) else (lane, place[1])


def _settled(queue: QueueState, ids: Iterable[str]) -> Generator[Step, Any, None]:
    """Wait for turns under way that gave up one of these ids: if they fail, the item is back."""
    names = [id_digest(item_id) for item_id in ids]

    def unsettled(lane: Lane) -> bool:
        return lane.known and not lane.free and not lane.partition.dedup.uncommitted.isdisjoint(names)

    while (lane := next(filter(unsettled, queue.lanes.values()), None)) is not None:
        yield lane, lambda lane, now: None


def _no_item(item_id: str) -> NotFound:
    return NotFound(f"there is no item {item_id!r}; it may have been completed or removed", id=item_id)


class Seen(msgspec.Struct):
    """An item as it was when it was looked at: by the time its record is read, this very turn may have ended it."""

    number: int
    state: State
    chunk: int
    created: int
    expire_deadline: int
    attempts: int
    deliveries: int
    max_attempts: int | None
    version: int
    lease: Lease | None
    due: int | None
    died: int | None
    kept: int | None
    cancel_asked: bool

    def record(self, job: TurnJob) -> Record:
        record = job.records[self.chunk][self.number - self.chunk]
        assert record is not None, "a live item has a record"
        return record if isinstance(record, Record) else Record(record)


def _look(lane: Lane, numbers: Iterable[int]) -> dict[int, Seen]:
    seen: dict[int, Seen] = {}
    partition = lane.partition
    for number, state in partition.states(numbers).items():
        lane.want(number, 1)
        lane.want_documents(number)
        lease = partition.leased.get(number)
        attempts, deliveries = partition.tried(number)
        seen[number] = Seen(
            number=number,
            state=state,
            chunk=partition.chunks.first_of(number),
            created=partition.chunks.created_of(number),
            expire_deadline=partition.expire_deadline(number),
            attempts=attempts + (lease is not None),
            deliveries=deliveries + (lease is not None),
            max_attempts=partition.limits.get(number),
            version=partition.documents.get(number, 0) >> VERSION_BITS,
            lease=lease,
            due=partition.waiting.get(number),
            died=partition.dead.get(number),
            kept=partition.finished.get(number),
            cancel_asked=number in partition.cancel_asked,
        )
    return seen


def _show(queue: QueueState, lane: Lane, job: TurnJob, seen: Seen) -> Item:
    mint, record, number = lane.partition.mint, seen.record(job), seen.number
    lease, due, died, kept = seen.lease, seen.due, seen.died, seen.kept
    error = job.documents.get(number << 2 | ERROR_PART)
    source = record.source
    ended_at = died >> 8 if died is not None else None
    reason = REASONS[died & 0xFF] if died is not None else source.reason if source else None
    return Item(
        id=record.id or mint.id(number),
        state=seen.state,
        partition=lane.index,
        payload=record.payload,
        correlation_id=record.correlation_id or mint.correlation_id(number, seen.created),
        created_at=to_datetime(seen.created),
        expire_deadline=to_datetime(seen.expire_deadline),
        attempts=seen.attempts,
        deliveries=seen.deliveries,
        fencing_token=lease.fencing_token if lease else 0,
        max_attempts=queue.settings.max_attempts if seen.max_attempts is None else seen.max_attempts,
        key=record.key,
        kind=record.kind,
        encoding=record.encoding,
        reference=record.reference,
        priority=record.priority,
        enqueue_at=to_datetime(due >> 1) if due is not None else None,
        lease_deadline=to_datetime(lease.deadline) if lease else None,
        client_id=lease.client or None if lease else None,
        cancel_asked=seen.cancel_asked,
        ended_at=None if ended_at is None else to_datetime(ended_at),
        keep_until=None if kept is None else to_datetime(kept >> 1),
        state_doc=decode_state(job.documents.get(number << 2 | STATE_PART)),
        state_version=seen.version,
        result=decode_state(job.documents.get(number << 2 | RESULT_PART)),
        last_error=None if error is None else error.decode(),
        dead_reason=reason,
        source_queue=source.queue if source else None,
        source_id=source.id if source else None,
        source_attempts=source.attempts if source else None,
    )


def _get(queue: QueueState, request: GetItem) -> Operation:
    yield from _settled(queue, [request.id])
    place = _locate(queue, request.id)
    if place is None:
        raise _no_item(request.id)
    lane, number = place
    seen, job = yield lane, lambda lane, now: _look(lane, [number])
    if number not in seen:
        raise _no_item(request.id)
    return _show(queue, lane, job, seen[number])


def _list(queue: QueueState, request: ListItems) -> Operation:
    """By partition and number, so that a cursor stays good while items come and go."""
    items: list[Item] = []
    partition, after = request.after
    for lane in _lanes_from(queue, partition, request.partition):
        if lane.index != partition:
            after = 0
        while True:
            (page, seen), job = yield lane, partial(_page, request.state, after)
            for number in page:
                after = number
                if number not in seen:
                    continue
                item = _show(queue, lane, job, seen[number])
                if request.kind is None or item.kind == request.kind:
                    items.append(item)
                if len(items) >= request.limit:
                    return ItemPage(items, f"{lane.index}:{after}")
            if len(page) < SCAN_BATCH:
                break
    return ItemPage(items)


def _page(state: State | None, after: int, lane: Lane, now: int) -> tuple[list[int], dict[int, Seen]]:
    states = list(State) if state is None else [state]
    numbers = sorted(n for one in states for n in lane.partition.numbers_in(one, after, SCAN_BATCH))[:SCAN_BATCH]
    return numbers, _look(lane, numbers)


def _lanes_from(queue: QueueState, partition: int, only: int | None) -> Iterator[Lane]:
    if only is not None and only not in queue.lanes:
        raise NotFound(f"queue {queue.definition.name!r} has no partition {only}; see its info for those it has")
    for index in sorted(queue.lanes):
        if index >= partition and only in (None, index):
            yield queue.lanes[index]


# ---- cancel and clear -------------------------------------------------------------------------------------


def _cancel(queue: QueueState, request: Cancel) -> Operation:
    results: dict[str, Result] = {}
    by_lane: dict[int, dict[int, str]] = defaultdict(dict)
    yield from _settled(queue, request.ids)
    for item_id in request.ids:
        place = _locate(queue, item_id)
        if place is None:
            results[item_id] = _refusal(_no_item(item_id))
        else:
            by_lane[place[0].index][place[1]] = item_id
    for index, ids in by_lane.items():
        lane = queue.lanes[index]
        seen, job = yield lane, partial(_cancel_in, queue, list(ids))
        for number, item_id in ids.items():
            results[item_id] = _cancelled(lane, job, item_id, seen.get(number))
    return [results[item_id] for item_id in request.ids]


def _cancel_in(queue: QueueState, numbers: list[int], lane: Lane, now: int) -> dict[int, Seen]:
    """Cancel what can be, and return what each was."""
    seen = _look(lane, numbers)
    for state in (State.READY, State.SCHEDULED, State.RETRYING):
        chosen = sorted(number for number in seen if seen[number].state == state)
        if chosen:
            lane.partition.change(Event.CANCELLED, str(state), runs_of(chosen), kept_until(queue, now))
    asked = [n for n in seen if seen[n].state == State.LEASED and n not in lane.partition.cancel_asked]
    if asked:
        lane.partition.change(Event.CANCEL_ASKED, asked)
    return seen


def _cancelled(lane: Lane, job: TurnJob, item_id: str, seen: Seen | None) -> Result:
    if seen is None:
        return _refusal(_no_item(item_id))
    own = seen.record(job).correlation_id
    correlation_id = own or lane.partition.mint.correlation_id(seen.number, seen.created)
    if seen.state in (State.DEAD, State.COMPLETED, State.CLAIMED):
        return _refusal(
            Conflict(f"item {item_id!r} is {seen.state}; only a waiting or leased one can be cancelled"), correlation_id
        )
    return Result(True, correlation_id, cancelled=True)


def _refusal(error: MillpondError, correlation_id: str | None = None) -> Result:
    return Result(False, correlation_id, ErrorInfo(error.code, error.message))


def _clear(queue: QueueState, request: Clear) -> Operation:
    removed: dict[str, int] = {str(state): 0 for state in request.states}
    for lane in list(queue.lanes.values()):
        counts, _ = yield lane, lambda lane, now: _clear_in(lane, request.states)
        for state, count in counts.items():
            removed[state] += count
    return removed


def _clear_in(lane: Lane, states: Iterable[State]) -> dict[str, int]:
    counts: dict[str, int] = {}
    partition = lane.partition
    for state in states:
        if state == State.READY:
            runs = [run for queue in partition.ready.runs().values() for run in queue]
        else:
            numbers = partition.numbers_in(state, 0, sys.maxsize)
            runs = runs_of(number for number in numbers if number not in partition.moving)
        if runs:
            partition.change(Event.CLEARED, str(state), runs)
        counts[str(state)] = sum(len(run_span(run)) for run in runs)
    return counts


# ---- redrive ----------------------------------------------------------------------------------------------


def _redrive(queue: QueueState, request: Redrive) -> Operation:
    done = Redriven(0, 0, {})
    start = request.at
    yield from _settled(queue, request.ids or ())
    for lane, numbers in _redrive_candidates(queue, request, done):
        after = 0
        while True:
            (page, seen), job = yield lane, partial(_redrive_page, request, numbers, after)
            chosen = _matching(queue, lane, job, seen, request, done)
            done.matched += sum(len(group) for group in chosen.values())
            if chosen and not request.dry_run:
                moved, _ = yield lane, partial(_revive, queue, chosen)
                done.moved += moved
                if request.rate:
                    yield start + round(1000 * done.moved / request.rate)
            if numbers is not None or len(page) < _redrive_batch(request):
                break
            after = page[-1]
    return done


def _redrive_batch(request: Redrive) -> int:
    """A paced redrive goes in steps of about a second."""
    return SCAN_BATCH if not request.rate else max(1, min(SCAN_BATCH, round(request.rate)))


def _redrive_candidates(queue: QueueState, request: Redrive, done: Redriven) -> Iterator[tuple[Lane, list[int] | None]]:
    """Lanes, each with the numbers to look at; None is all."""
    if request.ids is None:
        for lane in list(queue.lanes.values()):
            yield lane, None
        return
    by_lane: dict[int, list[int]] = defaultdict(list)
    for item_id in request.ids:
        place = _locate(queue, item_id)
        if place is None:
            done.errors[item_id] = _info(_no_item(item_id))
        else:
            by_lane[place[0].index].append(place[1])
    for index, numbers in by_lane.items():
        yield queue.lanes[index], numbers


def _redrive_page(
    request: Redrive, numbers: list[int] | None, after: int, lane: Lane, now: int
) -> tuple[list[int], dict[int, Seen]]:
    if numbers is not None:
        return numbers, _look(lane, numbers)
    states = _LETTERS if lane.partition.totals.get("letters") else (State.DEAD,)
    limit = _redrive_batch(request)
    numbers = sorted(n for state in states for n in lane.partition.numbers_in(state, after, limit))[:limit]
    return numbers, _look(lane, [n for n in numbers if n not in lane.partition.moving])


def _matching(
    queue: QueueState, lane: Lane, job: TurnJob, seen: dict[int, Seen], request: Redrive, done: Redriven
) -> dict[str | None, list[int]]:
    """The items to bring back, by the queue they go to; None is this one, in place."""
    chosen: dict[str | None, list[int]] = defaultdict(list)
    for number, one in seen.items():
        item, state = _show(queue, lane, job, one), one.state
        source = one.record(job).source
        letter = source is not None and source.letter
        if number in lane.partition.moving or state not in (_LETTERS if letter else (State.DEAD,)):
            if request.ids is not None:
                done.errors[item.id] = _info(Conflict(f"item {item.id!r} is {state}; only a dead one can be redriven"))
            continue
        if not _fits(item, request.filter):
            continue
        target = item.source_queue if letter else None
        if target is not None and not queue.queue_exists(target):
            done.matched += 1
            done.errors[item.id] = _info(NotFound(f"queue {target!r} is gone; create it to take the item back"))
            continue
        chosen[target].append(number)
    return chosen


def _fits(item: Item, chosen: RedriveFilter) -> bool:
    return (
        (chosen.source_queue is None or item.source_queue == chosen.source_queue)
        and (chosen.dead_reason is None or item.dead_reason == chosen.dead_reason)
        and (chosen.kind is None or item.kind == chosen.kind)
        and (chosen.error_contains is None or chosen.error_contains in (item.last_error or ""))
    )


def _revive(queue: QueueState, chosen: dict[str | None, list[int]], lane: Lane, now: int) -> int:
    """Bring back those that are still as they were when they were chosen."""
    partition = lane.partition
    moved = 0
    for target, numbers in chosen.items():
        states = partition.states(numbers)
        by_state: dict[State, list[int]] = defaultdict(list)
        for number, state in states.items():
            if number not in partition.moving and state in (_LETTERS if target else (State.DEAD,)):
                by_state[state].append(number)
        for state, group in by_state.items():
            moved += len(group)
            if target is None:
                partition.change(Event.REDRIVEN, sorted(group), now + queue.settings.expire_timeout_ms)
            else:
                partition.change(Event.MOVING, str(state), runs_of(sorted(group)), target)
    return moved


def _info(error: MillpondError) -> ErrorInfo:
    return ErrorInfo(error.code, error.message)


# ---- stats ------------------------------------------------------------------------------------------------


def answer_stats(queue: QueueState, request: GetStats, now: int) -> None:
    partitions = [partition_stats(lane) for lane in queue.lanes.values()]
    totals: dict[str, int] = defaultdict(int)
    oldest: int | None = None
    for lane in queue.lanes.values():
        if not lane.known:
            continue
        for name, count in lane.partition.totals.items():
            totals[name] += count
        for head in lane.partition.ready.heads():
            created = lane.partition.chunks.created_of(head)
            oldest = created if oldest is None else min(oldest, created)
    request.answer(
        QueueStats(
            queue=queue.definition.name,
            counts={state: sum(p.counts.get(state, 0) for p in partitions) for state in State},
            waiters=len(queue.waiters),
            oldest_ready_age=None if oldest is None else max(0, now - oldest) / 1000,
            rates=queue.rates.rates(now),
            totals=dict(totals),
            partitions=partitions,
            paused=queue.definition.paused,
        )
    )


def partition_stats(lane: Lane) -> PartitionStats:
    return PartitionStats(
        partition=lane.index,
        store=lane.definition.store,
        status="full" if lane.full else str(lane.status),
        counts=lane.partition.counts() if lane.known else {},
        failures=lane.failures,
        error=lane.error,
    )
