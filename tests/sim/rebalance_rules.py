"""What a rebalance may do: carry items to another partition as they are, once, and let go of what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from millpond.history.format import Event, Record, numbers_of
from tests.sim.asks import names_of
from tests.sim.nouns import CANCELLED, COMPLETED, DEAD, READY, RETRYING, SCHEDULED, Item, Transfer

if TYPE_CHECKING:
    from tests.sim.rules import Partition

CARRIED = (SCHEDULED, RETRYING, DEAD, COMPLETED, CANCELLED)
SLACK_MS = 60_000  # an expired item, or one that was kept, goes within a minute
TRIES_BITS = 32


def fences_of(events: Iterable[Sequence[Any]]) -> list[int]:
    return [item[6] for event in events if event[0] == Event.ADOPTED for item in event[6]]


def _carrying(partition: Partition, state: str, runs: Sequence[int]) -> None:
    if not partition.draining:
        partition.broken("items leave a partition that is not to be removed")
    for number in numbers_of(runs):
        item = partition.item(number)
        letter = partition.has_letters and state == READY  # where they are, nobody consumes the others either
        if item.state != state or item.moving_to is not None or item.carried or not (state in CARRIED or letter):
            partition.broken(f"{item} is carried to another partition as {state}")
        item.carried = True
        if state == READY:
            line = partition.ready[item.priority]
            del line[number]
            if not line:
                del partition.ready[item.priority]


def _adopted(
    partition: Partition,
    first: int,
    count: int,
    created: int,
    deadline: int,
    meta: bytes,
    items: Sequence[Sequence[Any]],
) -> None:
    if first != partition.next_number:
        partition.broken(f"item {first} follows item {partition.next_number - 1}")
    if partition.read_only:
        partition.broken(f"items from {first} on were carried to a read-only partition")
    partition.next_number = first + count
    records = [one if isinstance(one, Record) else Record(one) for one in partition.body(first, count)]
    for number, (record, (name, *told)) in enumerate(zip(records, items, strict=True), first):
        if name in partition.queue.transfers:
            partition.broken(f"{partition.queue.transfers[name].item} was carried twice")
        found = [one for one in partition.queue.by_id.get(str(record.id), ()) if one.carried]
        found = [one for one in found if one.payload == record.payload]
        if not found:
            partition.broken(f"{record.id} is carried here from nowhere, or for the second time")
        item = next((one for one in found if one.created == created), found[-1])  # of several that are kept, that one
        _judge_same(partition, item, record, created, deadline, told)
        _settle(partition, item, number, record)
        partition.queue.transfers[name] = Transfer(item, item)


def _judge_same(
    partition: Partition, item: Item, record: Record, created: int, deadline: int, told: Sequence[Any]
) -> None:
    state, value, tries, _, documents, _ = told
    item.correlation_id = item.correlation_id or record.correlation_id
    values = {
        SCHEDULED: item.due << 1, RETRYING: item.due << 1 | 1, COMPLETED: item.kept_until << 1,
        CANCELLED: item.kept_until << 1 | 1,
    }  # fmt: skip
    known = (item.state, item.attempts, item.deliveries, item.version, item.created, item.expire_deadline)
    shown = (
        state, tries >> TRIES_BITS, tries & ((1 << TRIES_BITS) - 1), documents >> 3, created,
        record.expire_deadline or deadline,
    )  # fmt: skip
    if known != shown or value != values.get(state, value):
        partition.broken(f"{item} was {known}, {values.get(state)} and is carried as {shown}, {value}")
    same = replace(
        record, id=item.record.id, correlation_id=item.record.correlation_id,
        expire_deadline=item.record.expire_deadline,
    )  # fmt: skip
    if same != item.record or record.correlation_id != item.correlation_id:
        partition.broken(f"{item} was {item.record} and is carried as {record}")


def _settle(partition: Partition, item: Item, number: int, record: Record) -> None:
    """From one partition to the other."""
    old = item.partition
    del old.items[item.number]
    old.counts[item.state] -= 1
    old.leaving[item.number] = (item, item.state)
    partition.has_letters |= record.source is not None and record.source.letter
    item.partition, item.number, item.carried = partition, number, False
    item.places.add(partition.index)
    item.moved_step = partition.queue.model.step
    partition.items[number] = item
    partition.counts[item.state] += 1
    if item.state == READY:
        partition.ready.setdefault(item.priority, {})[number] = item
    for at in (item.due, item.kept_until + SLACK_MS):
        partition.alarm(at, item)
    partition.alarm_expiry(item)
    assert not set(names_of(item.record)) - set(names_of(record)), "it has its names still"


def _left(partition: Partition, numbers: Sequence[int], names: Sequence[bytes]) -> None:
    for number, name in zip(numbers, names, strict=True):
        leaving = partition.leaving.pop(number, None)
        if leaving is None or name not in partition.queue.transfers:
            partition.broken(f"item {number} was let go before another partition had it")
        partition.queue.transfers[name].moved = True
        leaving[0].moved_step = partition.queue.model.step
        leaving[0].left = (partition.queue.model.step, leaving[1])


def _entrusted(partition: Partition, index: int, ended: Any, requests: Any, arrivals: Any) -> None:
    """Whether it was all of it is seen when somebody uses a name again."""
    old, definition = partition.queue.partitions[index], partition.definition
    assert definition is not None
    running = definition.rebalance is not None and not definition.rebalance.finished_at
    is_draining = any(one.partition == index and one.read_only and running for one in definition.partitions)
    if not is_draining or old.items or old.leaving:
        partition.broken(f"partition {index} gives its names away, and it has {list(old.items.values())[:3]}")


REBALANCE_JUDGES: dict[int, Callable[..., None]] = {
    Event.CARRYING: _carrying,
    Event.ADOPTED: _adopted,
    Event.LEFT: _left,
    Event.ENTRUSTED: _entrusted,
}
