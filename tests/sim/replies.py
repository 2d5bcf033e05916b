"""Judges every answer by the model: what was promised to the caller must be what was made durable.

A request is in one of three ways at an end. Answered: then all that the answer says is in the model. Refused: then
nothing was changed for it. Or nobody knows (`outcome_unknown`, `closed`, an answer lost in a crash): both are fine, and
the model has seen which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from millpond.errors import (
    Closed,
    DiskFull,
    InvalidRequest,
    KeyConflict,
    LeaseLost,
    MillpondError,
    NotFound,
    OutcomeUnknown,
    Unavailable,
    VersionConflict,
)
from millpond.model import (
    ENDED,
    ItemPage,
    LeasedItem,
    Produced,
    QueueStats,
    Redriven,
    Result,
    StateWritten,
    to_datetime,
    to_ms,
)
from millpond.model import Item as Shown
from millpond.queue.requests import GetItem
from tests.sim import asks
from tests.sim.asks import Ask, Batch
from tests.sim.batch_replies import BATCH_JUDGES, judge_refusal
from tests.sim.model import Model, Queue
from tests.sim.nouns import (
    CANCELLED,
    CLAIMED,
    COMPLETED,
    DEAD,
    GONE,
    LEASED,
    READY,
    STATES,
    WAITING,
    Grant,
    Item,
    Make,
    Violation,
)


def judge(model: Model, ask: Ask) -> None:
    """To be called once, right after the answer, before anything else is committed."""
    error = ask.request.error
    if error is None:
        JUDGES[ask.kind](model, ask)
    else:
        _judge_error(model, ask, error)


def _broken(ask: Ask, what: str) -> NoReturn:
    raise Violation(f"{ask.queue}, {ask}: {what}")


# ---- refusals ---------------------------------------------------------------------------------------------


def _judge_error(model: Model, ask: Ask, error: MillpondError) -> None:
    if ask.client is not None:
        ask.client.left = True
    if isinstance(error, OutcomeUnknown | Closed) or ask.gone:
        return
    _unchanged(ask, str(error))
    if isinstance(error, Unavailable | DiskFull):
        return
    if isinstance(error, KeyConflict) and ask.batch is not None:
        _judge_conflict(model, ask)
    elif isinstance(error, VersionConflict) and ask.grants[0] is not None:
        if ask.grants[0].item.version == ask.version and not ask.shared and not ask.grants[0].over:
            _broken(ask, f"version {ask.version} is refused, and it is the version of {ask.grants[0].item}")
    elif isinstance(error, LeaseLost):
        _judge_lost(model, ask, 0)
    elif isinstance(error, NotFound) and ask.kind in (asks.GET, asks.GET_WAIT):
        if not _may_be_gone(model.queues[ask.queue], ask, ask.ids[0]):
            _broken(ask, f"{ask.ids[0]} is said not to exist")
    elif ask.kind in BATCH_JUDGES:
        judge_refusal(model, ask, error)
    elif not isinstance(error, InvalidRequest) or ask.grants != [None]:
        _broken(ask, f"an answer that nobody expects: {error!r}")


def _unchanged(ask: Ask, why: str) -> None:
    """A definite refusal: nothing may have been done for it."""
    if ask.stirred and not ask.shared:
        _broken(ask, f"refused ({why}), but it was done")
    if ask.batch is not None:
        for make in ask.batch.makes:
            if make.items:
                _not_taken(ask, make.takers, why)
    for grant in ask.grants:
        if grant is not None:
            _not_taken(ask, grant.takers, why)


def _not_taken(ask: Ask, takers: list[Ask], why: str) -> None:
    if ask in takers:
        takers.remove(ask)
        if not takers:
            _broken(ask, f"refused ({why}), but it was done")


def _judge_conflict(model: Model, ask: Ask) -> None:
    batch, queue = ask.batch, model.queues[ask.queue]
    assert batch is not None
    partition = next(iter(queue.partitions.values()))
    if not any(partition.conflicts(batch, index, ask.at) for index in range(len(batch.records))):
        _broken(ask, "refused for a conflict, but nobody has these names")


# ---- produce ----------------------------------------------------------------------------------------------


def _judge_produce(model: Model, ask: Ask) -> None:
    """The answer is that of one carrying out: of this request, or of an earlier one of its name within the window."""
    batch, queue = ask.batch, model.queues[ask.queue]
    assert batch is not None
    reply: Sequence[Produced] = ask.request.value
    possible = [(batch, make) for make in reversed(batch.makes)]
    if batch.request_id is not None:
        made = queue.requests.get(batch.request_id, [])
        possible += [(of, make) for of, make in made if make.at + queue.window > ask.at]
    if not possible and all(one.duplicate for one in reply):
        possible.append((batch, Make(ask.at, next(iter(queue.partitions.values())), [])))
    problems = [_problem(model, ask, of, make, reply) for of, make in possible]
    if all(problems):
        _broken(ask, problems[-1] if problems else "it is acknowledged, but it was not made durable")
    _, make = possible[problems.index("")]
    make.reply = [(one.id, one.correlation_id, one.duplicate) for one in reply]
    for index, item in make.items.items():
        _learn(ask, item, reply[index].correlation_id)


def _problem(model: Model, ask: Ask, batch: Batch, make: Make, reply: Sequence[Produced]) -> str:
    """Why this is not the answer to that; nothing if it is."""
    if len(reply) != len(batch.records):
        return f"{len(reply)} answers for {len(batch.records)} items"
    told = [(one.id, one.correlation_id, one.duplicate) for one in reply]
    if make.reply not in (None, told):
        return f"the answer was {make.reply} the first time, and now {told}"
    for index, one in enumerate(reply):
        item = make.items.get(index)
        if one.duplicate:
            if item is not None:
                return f"item {index} is new, and said to be a duplicate"
            if problem := _duplicate_problem(model, ask, batch, index, one):
                return problem
        elif item is None or item.id != one.id:
            return f"item {index} is acknowledged as {one.id}, but it was not made durable"
        elif item.correlation_id not in (None, one.correlation_id):
            return f"{item} has the correlation id {item.correlation_id}, not {one.correlation_id}"
    return ""


def _duplicate_problem(model: Model, ask: Ask, batch: Batch, index: int, one: Produced) -> str:
    queue = model.queues[ask.queue]
    if batch.on_conflict != "ignore":
        return f"{one.id} came back as a duplicate on {batch.on_conflict}"
    same = queue.by_id.get(one.id)
    if not same:
        return f"a duplicate of {one.id}, which never was"
    if batch is ask.batch and batch.request_id is None:
        partition = next(iter(queue.partitions.values()))
        if not partition.conflicts(batch, index, ask.at):
            return f"item {index} is said to be a duplicate of {one.id}, but its names are free"
    if not any(item.correlation_id in (None, one.correlation_id) for item in same):
        return f"{one.id} has the correlation id {same[-1].correlation_id}, not {one.correlation_id}"
    return ""


def _learn(ask: Ask, item: Item, correlation_id: str | None) -> None:
    """A generated correlation id may be anything, but it stays the same."""
    if item.correlation_id is None:
        item.correlation_id = correlation_id
    if item.correlation_id != correlation_id or not correlation_id:
        _broken(ask, f"{item} has the correlation id {item.correlation_id}, not {correlation_id}")


# ---- lease ------------------------------------------------------------------------------------------------


def _judge_lease(model: Model, ask: Ask) -> None:
    leased: Sequence[LeasedItem] = ask.request.value
    client = ask.client
    assert client is not None
    by_place = {(grant.item.id, grant.fencing_token): grant for grant in client.granted}
    for one in leased:
        grant = by_place.pop((one.id, one.fencing_token), None)
        if grant is None or grant.over == "released":
            _broken(ask, f"it was handed {one.id}, which was not leased to it")
        client.granted.remove(grant)
        ask.handed.append(grant)
        _judge_leased(ask, grant, one)
        grant.token = one.lease
    if len(ask.handed) > ask.wanted:
        _broken(ask, f"it wanted {ask.wanted} items and got {len(ask.handed)}")
    if any(not grant.over for grant in by_place.values()) and not client.asks[1:]:
        client.left = True  # a part of its deliveries was in doubt for too long


def _judge_leased(ask: Ask, grant: Grant, one: LeasedItem) -> None:
    item, record = grant.item, grant.item.record
    _learn(ask, item, one.correlation_id)
    source = record.source
    told = (
        one.payload, one.attempts, one.deliveries, one.kind, one.encoding, one.reference, one.priority, one.key,
        one.state_version, one.last_error, one.source_queue, one.source_id, one.source_attempts, one.dead_reason,
    )  # fmt: skip
    known = (
        item.payload, grant.attempts, grant.deliveries, record.kind, record.encoding, record.reference, record.priority,
        record.key, grant.version, grant.error, source and source.queue, source and source.id,
        source and source.attempts, source and source.reason,
    )  # fmt: skip
    if told != known or one.state_doc not in grant.docs:
        _broken(ask, f"{item} was handed out as {told}, {one.state_doc}, but it is {known}, {grant.docs}")
    if to_ms(one.created_at) != item.created:
        _broken(ask, f"{item} is said to be created at {one.created_at}")


# ---- tokens -----------------------------------------------------------------------------------------------


def _judge_tokens(model: Model, ask: Ask) -> None:
    results: Sequence[Result] = ask.request.value
    if len(results) != len(ask.grants):
        _broken(ask, f"{len(results)} answers for {len(ask.grants)} tokens")
    for index, (grant, result) in enumerate(zip(ask.grants, results, strict=True)):
        if grant is None:
            if result.ok or result.error is None or result.error.code not in ("invalid", LeaseLost.code):
                _broken(ask, f"a mangled token was answered with {result}")
            continue
        if result.correlation_id is not None:
            _learn(ask, grant.item, result.correlation_id)
        if result.ok:
            _TOKEN_JUDGES[ask.kind](model, ask, index, grant, result)
        elif result.error is None:
            _broken(ask, "a token without an answer")
        elif result.error.code == LeaseLost.code:
            _judge_lost(model, ask, index)
        elif result.error.code in (Unavailable.code, DiskFull.code):
            _not_taken(ask, grant.takers, result.error.code)
        elif result.error.code not in (OutcomeUnknown.code, Closed.code):
            _broken(ask, f"an answer that nobody expects: {result}")


def _judge_lost(model: Model, ask: Ask, index: int) -> None:
    grant = ask.grants[index]
    if grant is None:
        return
    settings = grant.item.partition.settings
    if not grant.over and grant.item.partition.in_time(ask, ask.deadlines[index]):
        _broken(ask, f"lease_lost, but {grant.item} is still leased with this token")
    done = grant.completed_at
    if ask.kind == asks.COMPLETE and done is not None and model.now - done < settings.completed_grace_ms:
        _broken(ask, f"lease_lost, but {grant.item} was completed with this token at {done}")
    if grant.takers == [ask] and ask.kind != asks.RETRY and not grant.given_up:  # else it ended by that
        _broken(ask, f"lease_lost, but it was done: {grant.item}")


def _judge_complete(model: Model, ask: Ask, index: int, grant: Grant, result: Result) -> None:
    if grant.completed_at is None:
        _broken(ask, f"{grant.item} is acknowledged as completed, and it is not")


def _judge_retry(model: Model, ask: Ask, index: int, grant: Grant, result: Result) -> None:
    if ask not in grant.takers or grant.over not in ("retried", "dead", "cancelled"):
        _broken(ask, f"the retry of {grant.item} is acknowledged, but it was not done ({grant.over})")


def _judge_extend(model: Model, ask: Ask, index: int, grant: Grant, result: Result) -> None:
    if ask.timeout == 0:
        if ask not in grant.takers:
            _broken(ask, f"the release of {grant.item} is acknowledged, but it was not done ({grant.over})")
    elif grant not in ask.extended or result.lease_deadline != to_datetime(ask.extended[grant]):
        _broken(ask, f"the lease of {grant.item} is said to end at {result.lease_deadline}: {ask.extended.get(grant)}")
    if result.cancelled and not grant.item.cancel_asked:
        _broken(ask, f"{grant.item} is said to be cancelled")


_TOKEN_JUDGES: dict[str, Callable[[Model, Ask, int, Grant, Result], None]] = {
    asks.COMPLETE: _judge_complete,
    asks.RETRY: _judge_retry,
    asks.EXTEND: _judge_extend,
}


def _judge_state(model: Model, ask: Ask) -> None:
    written: StateWritten = ask.request.value
    grant = ask.grants[0]
    if grant is None or written.version != ask.version + 1:
        _broken(ask, f"answered with {written}")
    item = grant.item
    if not ask.stirred:
        _broken(ask, f"version {written.version} of {item} is acknowledged, but not durable")
    _learn(ask, item, written.correlation_id)
    if item.version == written.version:
        if ask.document not in item.docs:
            _broken(ask, f"{item} has the document {item.docs}, not {ask.document}")
        item.docs = [ask.document]


# ---- by id and over all -----------------------------------------------------------------------------------


def _states(queue: Queue, ask: Ask, item_id: str) -> set[str]:
    """The states that items of this id were in since the request was sent."""
    found: set[str] = set()
    for item in queue.by_id.get(item_id, ()):
        found |= item.states_since(ask.step)
    return found or {GONE}


def _may_be_gone(queue: Queue, ask: Ask, item_id: str) -> bool:
    """An id may be used again while an earlier item is still kept: it stands for the later one, or one just coming."""
    if any(("id", item_id) in other.batch.names_all() for other in queue.flying.values() if other.batch is not None):
        return True
    if queue.is_coming(item_id):
        return True
    return all(GONE in item.states_since(ask.step) for item in queue.by_id.get(item_id, ())[-1:])


def _judge_refusal(queue: Queue, ask: Ask, item_id: str, result: Result, conflict: bool, asked_for: str) -> None:
    """`conflict`: the item was in a state in which it could not be what was asked for."""
    states = _states(queue, ask, item_id)
    if result.error is None:
        _broken(ask, "an id without an answer")
    elif result.error.code == "not_found":
        if not _may_be_gone(queue, ask, item_id):
            _broken(ask, f"{item_id} is said not to exist: {states}")
    elif result.error.code != "conflict" or not conflict:
        _broken(ask, f"{item_id} could not be {asked_for}: {result.error}, {states}")


def _judge_cancel(model: Model, ask: Ask) -> None:
    queue = model.queues[ask.queue]
    results: Sequence[Result] = ask.request.value
    for item_id, result in zip(ask.ids, results, strict=True):
        states = _states(queue, ask, item_id)
        items = queue.by_id.get(item_id, [])
        if not result.ok:
            _judge_refusal(queue, ask, item_id, result, bool(states & {DEAD, COMPLETED, CLAIMED}), "cancelled")
            continue
        if not any(CANCELLED in item.states_since(0) or item.cancel_asked or GONE in states for item in items):
            _broken(ask, f"{item_id} is said to be cancelled, and it is not: {states}")
        if not any(item.cancel_asked or states & {CANCELLED, GONE} for item in items):
            _broken(ask, f"{item_id} is said to be cancelled, and it is not: {states}")


def _judge_bury(model: Model, ask: Ask) -> None:
    _judge_change(model, ask, DEAD, lambda states: states & {LEASED, CLAIMED, COMPLETED, CANCELLED}, "buried")


def _judge_make_ready(model: Model, ask: Ask) -> None:
    _judge_change(model, ask, READY, lambda states: states - {*WAITING, GONE}, "made ready")


def _judge_change(
    model: Model, ask: Ask, wanted: str, in_the_way: Callable[[set[str]], set[str]], asked_for: str
) -> None:
    queue = model.queues[ask.queue]
    results: Sequence[Result] = ask.request.value
    for item_id, result in zip(ask.ids, results, strict=True):
        states = _states(queue, ask, item_id)
        if not result.ok:
            _judge_refusal(queue, ask, item_id, result, bool(in_the_way(states)), asked_for)
        elif not states & {wanted, GONE}:
            _broken(ask, f"{item_id} is said to be {wanted}, and it is not: {states}")


def _judge_clear(model: Model, ask: Ask) -> None:
    removed: dict[str, int] = ask.request.value
    if not ask.shared and removed != {state: ask.cleared.get(state, 0) for state in ask.states}:
        _broken(ask, f"it says that it removed {removed}, but it was {ask.cleared}")


def _judge_get(model: Model, ask: Ask) -> None:
    shown: Shown = ask.request.value
    if shown.id != ask.ids[0]:
        _broken(ask, f"{shown.id} came instead of {ask.ids[0]}")
    _judge_shown(model, ask, shown)


def _judge_shown(model: Model, ask: Ask, shown: Shown) -> None:
    """There may be several items of one id: one that lives, and others that have ended and are kept."""
    queue = model.queues[ask.queue]
    told = (
        shown.payload, shown.kind, shown.encoding, shown.reference, shown.priority, shown.key,
        shown.source_queue, shown.source_id, shown.source_attempts, to_ms(shown.created_at),
    )  # fmt: skip
    for item in sorted(queue.by_id.get(shown.id, ()), key=lambda one: one.correlation_id != shown.correlation_id):
        record, source = item.record, item.record.source
        known = (
            item.payload, record.kind, record.encoding, record.reference, record.priority,
            record.key, source and source.queue, source and source.id, source and source.attempts, item.created,
        )  # fmt: skip
        places = _places(ask, item)
        was = {state for one in queue.partitions.values() for of, state in one.leaving.values() if of is item}
        was |= {item.left[1]} if item.left[0] > ask.step else set()  # it was looked at just before that
        if told == known and shown.partition in places and str(shown.state) in _shown_states(ask, item) | was:
            _learn(ask, item, shown.correlation_id)
            if item.changes[-1][0] <= ask.step and shown.partition == item.partition.index:
                _judge_still(ask, item, shown)
            return
    _broken(ask, f"{shown.id} is shown as {shown.state}, {told}: {_states(queue, ask, shown.id)}")


def _shown_states(ask: Ask, item: Item) -> set[str]:
    """Who waits is told of the end of an item of which nothing is kept, too."""
    states = item.states_since(ask.step)
    ended = ask.kind == asks.GET_WAIT and GONE in states and item.ended_as is not None
    return states | {str(item.ended_as)} if ended else states


def _judge_get_wait(model: Model, ask: Ask) -> None:
    shown: Shown = ask.request.value
    assert isinstance(ask.request, GetItem)
    _judge_get(model, ask)
    if shown.state not in ENDED:
        if ask.request.until > model.now:
            _broken(ask, f"{shown.id} is {shown.state}, and there is time until {ask.request.until}; it is {model.now}")
        return
    item = model.queues[ask.queue].by_id[shown.id][-1]
    if item.ended_as == shown.state and item.state in (GONE, shown.state) and item.created == to_ms(shown.created_at):
        told = (shown.attempts, shown.deliveries, shown.last_error)
        if told != (item.attempts, item.deliveries, item.error):
            _broken(ask, f"{item} is shown as {told}, but it is {item.attempts, item.deliveries, item.error}")
        if shown.state == COMPLETED and (shown.state_doc, shown.state_version) != (None, 0):
            _broken(ask, f"{item} is completed, and shown with a document")


def _judge_still(ask: Ask, item: Item, shown: Shown) -> None:
    """An item that has kept its state since the request was sent is shown exactly as it is."""
    told = (shown.attempts, shown.deliveries, shown.last_error, shown.dead_reason)
    known = (item.attempts, item.deliveries, item.error, item.reason)
    if told != known or to_ms(shown.expire_deadline) != item.expire_deadline:
        _broken(ask, f"{item} is shown as {told}, but it is {known}")
    if shown.state == LEASED and (item.lease is None or shown.fencing_token != item.lease.fencing_token):
        _broken(ask, f"{item} is shown with the fencing token {shown.fencing_token}")
    if shown.state not in (READY, CLAIMED) and item.moving_to is None and to_ms(shown.updated_at) != item.changed_at:
        _broken(ask, f"{item} is said to have changed at {shown.updated_at}, not {item.changed_at}")
    if shown.state in ENDED and item.moving_to is None and shown.ended_at != shown.updated_at:
        _broken(ask, f"{item} is said to have ended at {shown.ended_at}, not {item.changed_at}")
    if shown.state_version == item.version and shown.state_doc not in item.docs:
        _broken(ask, f"{item} is shown with the document {shown.state_doc}, but it is {item.docs}")


def _places(ask: Ask, item: Item) -> set[int]:
    """Where it may be shown: for one that moves, it depends on when it was looked at."""
    leaves = any(item is one for other in item.partition.queue.partitions.values() for one, _ in other.leaving.values())
    return item.places if leaves or item.moved_step > ask.step else {item.partition.index}


def _judge_list(model: Model, ask: Ask) -> None:
    page: ItemPage = ask.request.value
    queue = model.queues[ask.queue]
    shown = set()
    for one in page.items:
        if ask.state is not None and str(one.state) != ask.state:
            _broken(ask, f"{one.id} is {one.state}, not {ask.state}")
        _judge_shown(model, ask, one)
        shown.add((one.partition, one.id, to_ms(one.created_at), one.payload))
    if len({(one.id, one.correlation_id, one.created_at) for one in page.items}) != len(page.items):
        _broken(ask, "an item is listed twice")
    if page.next is not None:
        return
    for partition in queue.partitions.values():
        for item in partition.items.values():
            if item.changes[-1][0] > ask.step:
                continue
            if any((place, item.id, item.created, item.payload) in shown for place in _places(ask, item)):
                continue
            if ask.state in (None, item.state):
                _broken(ask, f"{item} is not listed")


def _judge_stats(model: Model, ask: Ask) -> None:
    """Only partitions at rest can be compared: memory is a commit ahead of what is durable."""
    stats: QueueStats = ask.request.value
    queue = model.queues[ask.queue]
    for one in stats.partitions:
        if one.partition in ask.at_rest and one.counts:
            counts = {state: one.counts[state] for state in STATES}
            partition = queue.partitions[one.partition]
            known = partition.counts
            unsure = [state for item, state in partition.leaving.values() if item.partition.index not in ask.at_rest]
            if any(not known[state] <= counts[state] <= known[state] + unsure.count(state) for state in STATES):
                _broken(ask, f"partition {one.partition}: {counts}, {known}")


def _judge_redrive(model: Model, ask: Ask) -> None:
    done: Redriven = ask.request.value
    if ask.dry_run and done.moved:
        _broken(ask, f"a dry run moved {done.moved}")
    if not ask.shared and done.moved != ask.moved:
        _broken(ask, f"it says that it moved {done.moved}, but it was {ask.moved}")
    if done.moved > done.matched:
        _broken(ask, f"it moved {done.moved} of {done.matched}")


JUDGES: dict[str, Callable[[Model, Ask], None]] = {
    asks.PRODUCE: _judge_produce,
    asks.PRODUCE_NAMED: _judge_produce,
    asks.LEASE: _judge_lease,
    asks.LEASE_WAIT: _judge_lease,
    asks.COMPLETE: _judge_tokens,
    asks.RETRY: _judge_tokens,
    asks.EXTEND: _judge_tokens,
    asks.STATE: _judge_state,
    asks.CANCEL: _judge_cancel,
    asks.CLEAR: _judge_clear,
    asks.GET: _judge_get,
    asks.LIST: _judge_list,
    asks.STATS: _judge_stats,
    asks.REDRIVE: _judge_redrive,
    asks.BURY: _judge_bury,
    asks.GET_WAIT: _judge_get_wait,
    asks.MAKE_READY: _judge_make_ready,
    **BATCH_JUDGES,
}
