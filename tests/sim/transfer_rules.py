"""What a commit may do to items between two queues, and to the dead that are redriven: none twice, none lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from millpond.history.format import Event, Source, numbers_of
from tests.sim.asks import REDRIVE, Ask
from tests.sim.nouns import DEAD, GONE, READY, WAITING, Item, Transfer

if TYPE_CHECKING:
    from tests.sim.rules import Partition


def redriven(partition: Partition, numbers: Sequence[int], deadline: int) -> None:
    asks = _redrivers(partition)
    for number in numbers:
        item = partition.item(number)
        if item.state != DEAD or item.moving_to is not None:
            partition.broken(f"{item} was redriven")
        _redrive(partition, item, asks)
        item.attempts = 0
        item.expire_deadline = deadline
        item.reason = item.record.source.reason if item.record.source else None
        partition.to(item, READY)
        partition.alarm_expiry(item)


def moving(partition: Partition, state: str, runs: Sequence[int], target: str) -> None:
    asks = [ask for ask in _redrivers(partition) if ask.letters]
    for number in numbers_of(runs):
        item = partition.item(number)
        source = item.record.source
        if item.state != state or item.state not in (*WAITING, DEAD):
            partition.broken(f"{item} was redriven as {state}")
        if item.moving_to is not None or source is None or source.queue != target:
            partition.broken(f"{item} was sent to {target} as {state}")
        _redrive(partition, item, asks)
        item.reason = source.reason
        item.returns = True
        partition.to(item, DEAD)
        send(partition, item, target)


def moved(partition: Partition, numbers: Sequence[int], names: Sequence[bytes], target: str) -> None:
    for number, name in zip(numbers, names, strict=True):
        item = partition.item(number)
        transfer = partition.queue.model.queues[target].transfers.get(name)
        if transfer is None or transfer.source is not item:
            partition.broken(f"{item} was let go before {target} had it")
        transfer.moved = True
        partition.queue.model.on_their_way[item.payload].remove(item)
        partition.to(item, GONE)


def kept(partition: Partition, numbers: Sequence[int], reason: int) -> None:
    partition.broken("a move was given up although its target exists")


def forgotten(partition: Partition, names: Sequence[bytes]) -> None:
    """The sender's last word; a target that forgot, or never knew, is as good."""


def forgot(partition: Partition, names: Sequence[bytes]) -> None:
    for name in names:
        transfer = partition.queue.transfers[name]
        if not transfer.moved:
            partition.broken(f"{transfer.item} may come again: its transfer was forgotten too early")
        transfer.forgot = True


# ---- redrives and arrivals --------------------------------------------------------------------------------


def _redrivers(partition: Partition) -> list[Ask]:
    return [ask for ask in partition.queue.of_kind(REDRIVE) if not ask.dry_run]


def _redrive(partition: Partition, item: Item, asks: list[Ask]) -> None:
    asks = [ask for ask in asks if _fits(item, ask)]
    if not asks:
        partition.broken(f"nobody asked to redrive {item}")
    for ask in asks:
        ask.moved += 1
        ask.stirred = True


def _fits(item: Item, ask: Ask) -> bool:
    """Whether a redrive means this item. A letter may have died a second time since it was chosen."""
    if ask.ids and item.id not in ask.ids:
        return False
    chosen = ask.chosen
    source = item.record.source
    return chosen is None or (
        (chosen.source_queue is None or (source is not None and source.queue == chosen.source_queue))
        and (chosen.dead_reason is None or chosen.dead_reason in (item.reason, source and source.reason))
        and (chosen.kind is None or item.record.kind == chosen.kind)
        and (chosen.error_contains is None or chosen.error_contains in (item.error or ""))
    )


def send(partition: Partition, item: Item, target: str) -> None:
    item.moving_to = target
    partition.queue.model.on_their_way.setdefault(item.payload, []).append(item)


def arrive(partition: Partition, item: Item, name: bytes) -> None:
    """An item from another queue: all that it was, its id where that is free, and never twice."""
    queue = partition.queue
    if name in queue.transfers:
        partition.broken(f"{item} arrived twice, first as {queue.transfers[name].item}")
    on_their_way = queue.model.on_their_way.get(item.payload, ())
    expected = [one for one in on_their_way if one.moving_to == queue.name and not one.arrived]
    source = next((one for one in expected if _is_from(item, one)), None)
    if source is None:
        partition.broken(f"{item} arrived from nowhere, or for the second time")
    source.arrived = True
    queue.transfers[name] = Transfer(source, item)
    source.correlation_id = source.correlation_id or item.record.correlation_id
    _judge_arrival(partition, item, source)
    item.version, item.docs, item.error = source.version, source.docs, source.error
    item.token_floor = source.token_floor
    item.reason = item.record.source.reason if item.record.source else None
    partition.has_letters |= item.record.source is not None and item.record.source.letter


def _is_from(item: Item, source: Item) -> bool:
    """Whether an arrived item is that one: a letter names it, and what comes back has its first id or tells of it."""
    letter, home = item.record.source, source.record.source
    if source.correlation_id not in (None, item.record.correlation_id):
        return False
    if source.returns:
        assert home is not None
        return home.id in (item.record.id, letter and letter.id)
    return letter is not None and letter.id == source.id


def _judge_arrival(partition: Partition, item: Item, source: Item) -> None:
    old, new = source.record, item.record
    same = ("payload", "kind", "encoding", "reference", "priority")
    if any(getattr(old, field) != getattr(new, field) for field in same):
        partition.broken(f"{item} is not what {source} was")
    if new.correlation_id != source.correlation_id:
        partition.broken(f"{item} has the correlation id {new.correlation_id}, {source} had {source.correlation_id}")
    home = old.source if source.returns else None
    if home is None:
        wanted = Source(source.partition.queue.name, source.id, source.attempts, source.reason, old.key, letter=True)
        wanted.max_attempts = old.max_attempts
        if new.source != wanted or new.id is not None or new.key is not None:
            partition.broken(f"{item} came with {new.source}, not {wanted}")
        return
    _judge_return(partition, item, home)


def _judge_return(partition: Partition, item: Item, home: Source) -> None:
    record = item.record
    if record.id == home.id:
        if any(one.ended_at is None and not one.arrived for one in partition.queue.by_id.get(home.id, ())):
            partition.broken(f"{item} came back under an id that is taken")
    else:
        if not _taken(partition, partition.queue.by_id.get(home.id, ())):
            partition.broken(f"{item} came back under another id although {home.id} is free")
        if record.id is not None or record.source is None or record.source.id != home.id:
            partition.broken(f"{item} does not tell that it was {home.id}")
    if home.key is None:
        return
    holders = partition.queue.holders.get(("key", home.key), ())
    if record.key is not None and (record.key != home.key or any(one.ended_at is None for one in holders)):
        partition.broken(f"{item} came back with the key {record.key!r}")
    if record.key is None and not _taken(partition, holders):
        partition.broken(f"{item} came back without its key {home.key!r}")


def _taken(partition: Partition, holders: Sequence[Item]) -> bool:
    """Or by itself, as long as the queue it left has not let go of it. What has moved on guards no names."""
    window = partition.queue.window
    return any(
        one.was_there(partition.at)
        or (not one.arrived and one.ended_at is not None and one.ended_at + window > partition.at)
        for one in holders
    )


TRANSFER_JUDGES: dict[int, Callable[..., None]] = {
    Event.REDRIVEN: redriven,
    Event.MOVING: moving,
    Event.MOVED: moved,
    Event.FORGOTTEN: forgotten,
    Event.FORGOT: forgot,
    Event.KEPT: kept,
}
