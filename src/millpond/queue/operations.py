"""Calls that go by id or over many items: list, cancel, bury, make ready, clear, redrive, stats, run by a `Drive`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from millpond.errors import Conflict, MillpondError, NotFound
from millpond.history.format import Event, run_span, runs_of
from millpond.model import (
    CLAIM_PAGE_BYTES,
    LIST_LIMIT_MAX,
    ClaimRows,
    ClaimRun,
    ErrorInfo,
    Item,
    ItemPage,
    JournalPage,
    JournalTurn,
    PartitionStats,
    QueueStats,
    RedriveFilter,
    Redriven,
    Result,
    State,
)
from millpond.queue.claims import CLAIM_OPERATIONS, Marks, Piece, run_of_piece, want_runs
from millpond.queue.dedup import id_digest
from millpond.queue.drive import Drive, Operation
from millpond.queue.lane import Lane, Status, TurnJob
from millpond.queue.lifecycle import bury, kept_until
from millpond.queue.looking import Seen, is_unsettled, landed, locate, look, no_item, refusal, settled, show
from millpond.queue.partition import ERROR_PART
from millpond.queue.requests import (
    Bury,
    Cancel,
    Clear,
    GetItem,
    GetStats,
    ListItems,
    MakeReady,
    ReadJournal,
    Redrive,
    Request,
)
from millpond.queue.stages import STAGE_OPERATIONS
from millpond.queue.state import QueueState
from millpond.queue.transfer import counts_of
from millpond.queue.watching import get

SCAN_BATCH = 500  # items looked at in one turn, so that a scan does not hold up the others
READY_SCAN_BATCH = 5_000  # the same time, by runs
READY_SCAN_CHUNKS = 80  # read for it: one of each 100 items, as small producers make them

ActIn = Callable[[list[int], Lane, int], dict[int, Seen]]
Told = Callable[[Lane, TurnJob, str, Seen | None], Result]

_LETTERS = (State.DEAD, State.READY, State.SCHEDULED, State.RETRYING)  # what may leave a dead queue


def start_operation(queue: QueueState, request: Request) -> None:
    Drive(queue, request, _OPERATIONS[type(request)](queue, request))


# ---- looking -----------------------------------------------------------------------------------------------


def _list(queue: QueueState, request: ListItems) -> Operation:
    """By partition and number, so that a cursor stays good while items come and go.

    Once a rebalance begins, items go to partitions that may have been listed: then the list begins anew.
    """
    while True:
        order = queue.order
        is_plain = request.state == State.READY and request.kind is None and not queue.draining
        list_all = _list_ready if is_plain else _list_any
        page = yield from list_all(queue, request)
        if queue.order == order or request.partition is not None:
            return page


def _start(queue: QueueState, request: ListItems) -> tuple[int, int]:
    """After which item of which partition; -1 is before all."""
    is_good = request.order == queue.order or request.partition is not None
    return request.after if request.after[1] and is_good else (-1, 0)


def _cursor(queue: QueueState, lane: Lane, after: int) -> str:
    return f"{lane.index}:{after}:{queue.order}" if queue.order else f"{lane.index}:{after}"


def _list_any(queue: QueueState, request: ListItems) -> Operation:
    items: list[Item] = []
    leaving: set[tuple[str, str]] = set()  # those that may be in another partition by the time that it is looked at
    limit = min(request.limit, LIST_LIMIT_MAX)
    partition, after = _start(queue, request)
    for lane in _lanes_from(queue, partition, request.partition):
        if lane.index != partition:
            after = 0
        while True:
            (page, seen, carried), job = yield lane, partial(_page, request, after)
            for number in page:
                after = number
                if number not in seen:
                    continue
                item = show(queue, lane, job, seen[number])
                name = item.id, item.correlation_id
                if name in leaving or (number in carried and _has_landed(queue, item.id, lane)):
                    continue
                if lane.index in queue.draining:
                    leaving.add(name)
                if request.kind is None or item.kind == request.kind:
                    items.append(item)
                if len(items) >= limit:
                    return ItemPage(items, _cursor(queue, lane, after))
            if len(page) < SCAN_BATCH:
                break
    return ItemPage(items)


def _has_landed(queue: QueueState, item_id: str, lane: Lane) -> bool:
    """Whether another partition has it, durably."""
    place = locate(queue, item_id)
    return place is not None and place[0] is not lane and not is_unsettled(place[0], [id_digest(item_id)])


def _list_ready(queue: QueueState, request: ListItems) -> Operation:
    """Most of those that wait are plain, and many: they are shown by runs of neighbours."""
    runs: list[ClaimRun] = []
    count = size = 0
    partition, after = _start(queue, request)
    for lane in _lanes_from(queue, partition, request.partition):
        if lane.index != partition:
            after = 0
        while True:
            (pieces, marks), job = yield lane, partial(_ready_page, request, after, request.limit - count)
            if not pieces:
                break
            read = [run_of_piece(queue, lane, job, piece, marks, State.READY) for piece in pieces]
            runs += read
            after = pieces[-1].numbers[-1]
            count += sum([len(run.payloads) for run in read])
            size += sum([sum(map(len, run.payloads)) for run in read])
            if count >= request.limit or (count >= LIST_LIMIT_MAX and size >= CLAIM_PAGE_BYTES):
                return ItemPage(ClaimRows(runs), _cursor(queue, lane, after))
    return ItemPage(ClaimRows(runs))


def _ready_page(request: ListItems, after: int, limit: int, lane: Lane, now: int) -> tuple[list[Piece], Marks]:
    numbers = lane.partition.numbers_in(State.READY, after, min(limit, READY_SCAN_BATCH))
    if request.until is not None and numbers and numbers[-1] > request.until:
        numbers = [number for number in numbers if number <= request.until]
    return want_runs(runs_of(numbers), READY_SCAN_CHUNKS, lane)


def _page(request: ListItems, after: int, lane: Lane, now: int) -> tuple[list[int], dict[int, Seen], set[int]]:
    states = list(State) if request.state is None else [request.state]
    numbers = sorted(n for one in states for n in lane.partition.numbers_in(one, after, SCAN_BATCH))[:SCAN_BATCH]
    if request.until is not None and numbers and numbers[-1] > request.until:
        numbers = [number for number in numbers if number <= request.until]
    return numbers, look(lane, numbers), lane.partition.carried.keys() & numbers


def _lanes_from(queue: QueueState, partition: int, only: int | None) -> Iterator[Lane]:
    if only is not None and only not in queue.lanes:
        raise NotFound(f"queue {queue.definition.name!r} has no partition {only}; see its info for those it has")
    begun = next((queue.place_of(lane) for lane in queue.lanes.values() if lane.index == partition), (False, partition))
    for lane in queue.walk():
        if (queue.place_of(lane) >= begun or partition < 0) and only in (None, lane.index):
            yield lane


# ---- cancel, bury, make ready and clear --------------------------------------------------------------------

_MORTAL = (State.READY, State.SCHEDULED, State.RETRYING)  # what waits can be ended from outside


def _cancel(queue: QueueState, request: Cancel) -> Operation:
    return _by_id(queue, request.ids, partial(_cancel_in, queue), _cancelled)


def _bury(queue: QueueState, request: Bury) -> Operation:
    return _by_id(queue, request.ids, partial(_bury_in, queue, request), _buried)


def _make_ready(queue: QueueState, request: MakeReady) -> Operation:
    return _by_id(queue, request.ids, _ready_in, _made_ready)


def _by_id(queue: QueueState, ids_given: Sequence[str], act: ActIn, told: Told) -> Operation:
    results: dict[str, Result] = {}
    ids_left = list(dict.fromkeys(ids_given))
    while ids_left:
        yield from settled(queue, ids_left)
        by_lane, missing = _places(queue, ids_left)
        results |= {item_id: refusal(no_item(item_id)) for item_id in missing}
        ids_left = []
        for lane, ids in by_lane:
            (seen, carried), job = yield lane, partial(_act_in, act, list(ids))
            for number, item_id in ids.items():
                is_missing = number not in seen
                if number in carried or (is_missing and _may_be_elsewhere(queue, item_id, lane, number)):
                    ids_left.append(item_id)
                else:
                    results[item_id] = told(lane, job, item_id, seen.get(number))
            yield from landed(queue, lane, carried)
    return [results[item_id] for item_id in ids_given]


def _may_be_elsewhere(queue: QueueState, item_id: str, lane: Lane, number: int) -> bool:
    """Whether an item that is not here has gone to another partition meanwhile; or a turn under way has to tell."""
    names = [id_digest(item_id)]
    is_open = any(is_unsettled(other, names) for other in queue.lanes.values())
    return is_open or locate(queue, item_id) not in (None, (lane, number))


def _act_in(act: ActIn, numbers: list[int], lane: Lane, now: int) -> tuple[dict[int, Seen], set[int]]:
    """On those that are not about to leave for another partition; and which are."""
    carried = lane.partition.carried.keys() & numbers
    return act([number for number in numbers if number not in carried], lane, now), carried


def _places(queue: QueueState, ids: Iterable[str]) -> tuple[list[tuple[Lane, dict[int, str]]], list[str]]:
    """Where each of these is, by lane; and those that are nowhere."""
    by_lane: dict[int, tuple[Lane, dict[int, str]]] = {}
    missing: list[str] = []
    for item_id in ids:
        place = locate(queue, item_id)
        if place is None:
            missing.append(item_id)
        else:
            by_lane.setdefault(place[0].index, (place[0], {}))[1][place[1]] = item_id
    return list(by_lane.values()), missing


def _cancel_in(queue: QueueState, numbers: list[int], lane: Lane, now: int) -> dict[int, Seen]:
    """Cancel what can be, and return what each was."""
    seen = look(lane, numbers)
    for state in _MORTAL:
        chosen = sorted(number for number in seen if seen[number].state == state)
        if chosen:
            lane.partition.change(Event.CANCELLED, str(state), runs_of(chosen), kept_until(queue, now))
    asked = [n for n in seen if seen[n].state == State.LEASED and n not in lane.partition.cancel_asked]
    if asked:
        lane.partition.change(Event.CANCEL_ASKED, asked)
    return seen


def _bury_in(queue: QueueState, request: Bury, numbers: list[int], lane: Lane, now: int) -> dict[int, Seen]:
    """Bury what waits, and return what each was."""
    seen = look(lane, numbers)
    for state in _MORTAL:
        chosen = sorted(number for number in seen if seen[number].state == state)
        if chosen and request.text is not None:
            lane.draft.documents |= {number << 2 | ERROR_PART: request.text.encode() for number in chosen}
        if chosen:
            bury(queue, lane, request.reason, state, runs_of(chosen), now, request.text)
    return seen


def _buried(lane: Lane, job: TurnJob, item_id: str, seen: Seen | None) -> Result:
    if seen is None:
        return refusal(no_item(item_id))
    correlation_id = _correlation_of(lane, job, seen)
    if seen.state not in (*_MORTAL, State.DEAD):
        return refusal(Conflict(f"item {item_id!r} is {seen.state}; only one that waits can be buried"), correlation_id)
    return Result(True, correlation_id)


def _ready_in(numbers: list[int], lane: Lane, now: int) -> dict[int, Seen]:
    """What waits for its time falls due now, in the order given; returns what each was."""
    seen = look(lane, numbers)
    early = [number for number in numbers if number in seen and seen[number].state in (State.SCHEDULED, State.RETRYING)]
    if early:
        lane.partition.change(Event.DUE, early)
    return seen


def _made_ready(lane: Lane, job: TurnJob, item_id: str, seen: Seen | None) -> Result:
    if seen is None:
        return refusal(no_item(item_id))
    correlation_id = _correlation_of(lane, job, seen)
    if seen.state not in _MORTAL:
        text = f"item {item_id!r} is {seen.state}; only one that waits for its time can be made ready"
        return refusal(Conflict(text), correlation_id)
    return Result(True, correlation_id)


def _correlation_of(lane: Lane, job: TurnJob, seen: Seen) -> str:
    return seen.record(job).correlation_id or lane.partition.mint.correlation_id(seen.number, seen.created)


def _cancelled(lane: Lane, job: TurnJob, item_id: str, seen: Seen | None) -> Result:
    if seen is None:
        return refusal(no_item(item_id))
    correlation_id = _correlation_of(lane, job, seen)
    if seen.state in (State.DEAD, State.COMPLETED, State.CLAIMED):
        return refusal(
            Conflict(f"item {item_id!r} is {seen.state}; only a waiting or leased one can be cancelled"), correlation_id
        )
    return Result(True, correlation_id, cancelled=True)


def _clear(queue: QueueState, request: Clear) -> Operation:
    removed: dict[str, int] = {str(state): 0 for state in request.states}
    order = None
    while order != queue.order:  # a rebalance that has just begun may have carried items to where it was already
        order = queue.order
        for lane in queue.walk():
            (counts, carried), _ = yield lane, lambda lane, now: _clear_in(lane, request.states)
            for state, count in counts.items():
                removed[state] += count
            yield from landed(queue, lane, carried)  # in a partition that is yet to come, or empty already
    return removed


def _clear_in(lane: Lane, states: Iterable[State]) -> tuple[dict[str, int], list[int]]:
    """How many were removed; and what is on its way to another partition and so was not."""
    counts: dict[str, int] = {}
    partition = lane.partition
    for state in states:
        if state == State.READY:
            runs = [run for queue in partition.ready.runs().values() for run in queue]
        else:
            numbers = partition.numbers_in(state, 0, sys.maxsize)
            staying = (n for n in numbers if n not in partition.moving and n not in partition.carried)
            runs = runs_of(staying)
        if runs:
            partition.change(Event.CLEARED, str(state), runs)
        counts[str(state)] = sum(len(run_span(run)) for run in runs)
    return counts, list(partition.carried)


# ---- redrive ----------------------------------------------------------------------------------------------


def _redrive(queue: QueueState, request: Redrive) -> Operation:
    done = Redriven(0, 0, {})
    start = request.at
    ids = request.ids
    while ids is None or ids:
        yield from settled(queue, ids or ())
        elsewhere: list[str] = []  # gone to another partition meanwhile
        for lane, numbers in _redrive_candidates(queue, ids, done):
            after = 0
            carried: set[int] = set()
            while not lane.gone:
                (page, seen), job = yield lane, partial(_redrive_page, request, numbers, after)
                carried |= lane.partition.carried.keys() & page
                elsewhere += _not_seen(queue, lane, numbers, seen, done)
                chosen = _matching(queue, lane, job, seen, request, done)
                done.matched += sum(len(group) for group in chosen.values())
                if chosen and not request.dry_run:
                    (moved, left), _ = yield lane, partial(_revive, queue, chosen)
                    done.moved += moved
                    done.matched -= len(left)
                    carried |= left
                    elsewhere += [numbers[number] for number in left if number in numbers]
                    if request.rate:
                        yield start + round(1000 * done.moved / request.rate)
                if numbers or len(page) < _redrive_batch(request):
                    break
                after = page[-1]
            yield from landed(queue, lane, carried)  # in a partition whose turn is yet to come
        if ids is None:
            break
        ids = elsewhere
    return done


def _not_seen(
    queue: QueueState, lane: Lane, numbers: dict[int, str], seen: dict[int, Seen], done: Redriven
) -> list[str]:
    """Those that are in another partition by now, or about to be; of the others there is none."""
    gone = {item_id: number for number, item_id in numbers.items() if number not in seen}
    elsewhere = [
        item_id
        for item_id, number in gone.items()
        if number in lane.partition.carried or _may_be_elsewhere(queue, item_id, lane, number)
    ]
    done.errors |= {item_id: _info(no_item(item_id)) for item_id in gone if item_id not in elsewhere}
    return elsewhere


def _redrive_batch(request: Redrive) -> int:
    """A paced redrive goes in steps of about a second."""
    return SCAN_BATCH if not request.rate else max(1, min(SCAN_BATCH, round(request.rate)))


def _redrive_candidates(
    queue: QueueState, ids: Sequence[str] | None, done: Redriven
) -> Iterator[tuple[Lane, dict[int, str]]]:
    """Lanes, each with the numbers to look at and the ids that they were given by; none given is all."""
    if ids is None:
        for lane in queue.walk():
            yield lane, {}
        return
    by_lane, missing = _places(queue, ids)
    done.errors |= {item_id: _info(no_item(item_id)) for item_id in missing}
    yield from by_lane


def _redrive_page(
    request: Redrive, given: Iterable[int], after: int, lane: Lane, now: int
) -> tuple[list[int], dict[int, Seen]]:
    if given:
        return list(given), look(lane, [number for number in given if number not in lane.partition.carried])
    states = _LETTERS if lane.partition.totals.get("letters") else (State.DEAD,)
    limit = _redrive_batch(request)
    numbers = sorted(n for state in states for n in lane.partition.numbers_in(state, after, limit))[:limit]
    partition = lane.partition
    return numbers, look(lane, [n for n in numbers if n not in partition.moving and n not in partition.carried])


def _matching(
    queue: QueueState, lane: Lane, job: TurnJob, seen: dict[int, Seen], request: Redrive, done: Redriven
) -> dict[str | None, list[int]]:
    """The items to bring back, by the queue they go to; None is this one, in place."""
    chosen: dict[str | None, list[int]] = defaultdict(list)
    for number, one in seen.items():
        item, state = show(queue, lane, job, one), one.state
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


def _revive(queue: QueueState, chosen: dict[str | None, list[int]], lane: Lane, now: int) -> tuple[int, set[int]]:
    """Bring back those that are still as they were when they were chosen: how many; and those about to leave."""
    partition = lane.partition
    moved = 0
    left = partition.carried.keys() & {number for numbers in chosen.values() for number in numbers}
    for target, numbers in chosen.items():
        states = partition.states(numbers)
        by_state: dict[State, list[int]] = defaultdict(list)
        for number, state in states.items():
            if number in partition.moving or number in partition.carried:
                continue
            if state in (_LETTERS if target else (State.DEAD,)):
                by_state[state].append(number)
        for state, group in by_state.items():
            moved += len(group)
            if target is None:
                partition.change(Event.REDRIVEN, sorted(group), now + queue.settings.expire_timeout_ms)
            else:
                partition.change(Event.MOVING, str(state), runs_of(sorted(group)), target)
    return moved, left


def _info(error: MillpondError) -> ErrorInfo:
    return ErrorInfo(error.code, error.message)


# ---- stats ------------------------------------------------------------------------------------------------


def answer_stats(queue: QueueState, request: GetStats, now: int) -> None:
    partitions = [partition_stats(queue, queue.lanes[index], now) for index in sorted(queue.lanes)]
    totals: dict[str, int] = defaultdict(int, queue.definition.past_totals)
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
            totals=dict(totals),  # those of partitions that are gone included
            partitions=partitions,
            paused=queue.definition.paused,
        )
    )


def partition_stats(queue: QueueState, lane: Lane, now: int) -> PartitionStats:
    stalled = lane.stalled(now)
    drains = lane.index in queue.draining and lane.status is Status.OPEN
    return PartitionStats(
        partition=lane.index,
        store=lane.definition.store,
        status="stalled" if stalled else "full" if lane.full else "draining" if drains else str(lane.status),
        counts=counts_of(queue, lane) if lane.known else {},
        failures=lane.failures,
        error=lane.error or ("its store does not answer" if stalled else None),
        last_number=lane.partition.next_number - 1 if lane.known else 0,
    )


# ---- the journal ------------------------------------------------------------------------------------------


def _read_journal(queue: QueueState, request: ReadJournal) -> Operation:
    [lane] = _lanes_from(queue, request.partition, request.partition)
    last_turn, job = yield lane, partial(_want_journal, request)
    rows = [JournalTurn(row.turn, row.at, row.events) for row in job.journal[request.after, request.limit]]
    return JournalPage(incarnation=queue.incarnation, partition=lane.index, rows=rows, last_turn=last_turn)


def _want_journal(request: ReadJournal, lane: Lane, now: int) -> int:
    """The turn in the making is not read: it is not there yet."""
    lane.draft.journal_wants.add((request.after, request.limit))
    return lane.partition.turn - 1


_OPERATIONS: dict[type[Request], Callable[[QueueState, Any], Operation]] = {
    GetItem: get,
    ListItems: _list,
    Cancel: _cancel,
    Bury: _bury,
    MakeReady: _make_ready,
    Clear: _clear,
    Redrive: _redrive,
    ReadJournal: _read_journal,
    **CLAIM_OPERATIONS,
    **STAGE_OPERATIONS,
}
