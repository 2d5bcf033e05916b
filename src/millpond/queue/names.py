"""Names that may be taken, in any partition of the queue: keys, ids, and requests that were carried out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from millpond.errors import InvalidRequest, KeyConflict
from millpond.history.format import Record
from millpond.model import Produced, ProducedItems, State
from millpond.queue.dedup import Ended, digests_of, id_digest, key_digest, split
from millpond.queue.lane import Lane
from millpond.queue.requests import Produce
from millpond.queue.state import QueueState
from millpond.queue.tokens import Mint, read_id

_decode_reply = msgspec.msgpack.Decoder(list[tuple[str, str | None, bool]]).decode


class Held(Exception):
    """Whether a name is taken cannot be told yet: its partition is in the middle of a commit, or away.

    `carried`: or the item that has it is on its way to another.
    """

    def __init__(self, lane: Lane, *, carried: bool = False) -> None:
        self.lane = lane
        self.carried = carried


def known_request(queue: QueueState, name: bytes, now: int) -> Sequence[Produced] | None:
    """The reply to a request that was carried out within the window."""
    window = queue.settings.dedup_window_ms
    for lane in queue.lanes.values():
        if not lane.known:
            if now - queue.opened_at < window:
                raise Held(lane)
            continue
        entry = lane.partition.dedup.requests.get(name, now, window)
        if name in lane.draft.names or (entry is not None and not lane.free):
            raise Held(lane)
        if entry is None:
            continue
        if entry.reply is not None:
            return [Produced(*reply) for reply in _decode_reply(entry.reply)]
        return plain_replies(_mint(lane, entry.partition), entry.at, entry.first, entry.count)
    return None


def names_of(record: Record) -> list[bytes]:
    return split(digests_of(record.id, record.key))


def conflicts(
    queue: QueueState, request: Produce, now: int
) -> tuple[dict[int, Produced | int], list[tuple[Lane, int]]]:
    """Which items of the request exist already, and which existing ones it replaces."""
    duplicates: dict[int, Produced | int] = {}
    replaced: dict[tuple[int, int], tuple[Lane, int]] = {}
    mine: dict[bytes, int] = {}
    for index, record in enumerate(request.records):
        if type(record) is bytes:
            continue
        assert isinstance(record, Record)
        names = names_of(record)
        repeated = next((mine[name] for name in names if name in mine), None)
        if repeated is not None:
            if request.on_conflict != "ignore":
                raise KeyConflict(f"items {repeated} and {index} of the request have the same key; send it once")
            duplicates[index] = repeated
            continue
        mine.update(dict.fromkeys(names, index))
        if request.on_conflict == "replace":
            for lane, number in _to_replace(queue, record, names, now):
                replaced[lane.index, number] = (lane, number)
            continue
        found = _find(queue, record, names, now)
        if found is None:
            continue
        lane, number, ended = found
        if request.on_conflict == "reject":
            name = f"key {record.key!r}" if record.key is not None else f"id {record.id!r}"
            raise KeyConflict(f"{name} is taken by item {_id_of(lane, number, ended)}; use another", index=index)
        duplicates[index] = _duplicate(lane, number, ended)
    if len({lane.index for lane, _ in replaced.values()}) > 1:
        raise KeyConflict("the items to replace lie in different partitions; send one request for each item")
    return duplicates, list(replaced.values())


def _to_replace(queue: QueueState, record: Record, names: list[bytes], now: int) -> Iterator[tuple[Lane, int]]:
    """The live items that have any of these names: id and key may be those of two."""
    for name in names:
        found = _find(queue, record, [name], now)
        if found is None or found[2] is not None:
            continue
        lane, number, _ = found
        state = lane.partition.states([number]).get(number)
        if state not in (State.READY, State.SCHEDULED, State.RETRYING):
            raise KeyConflict(f"item {_id_of(lane, number, None)} is {state} and cannot be replaced; try again later")
        yield lane, number


def _find(queue: QueueState, record: Record, names: list[bytes], now: int) -> tuple[Lane, int, Ended | None] | None:
    """The live or else lately ended item that has one of these names. Held if that cannot be told now."""
    window = queue.settings.dedup_window_ms
    lately: tuple[Lane, int, Ended] | None = None
    for lane in queue.lanes.values():
        if not lane.known:
            raise Held(lane)
        dedup, finished = lane.partition.dedup, lane.partition.finished
        for name in names:
            number = dedup.live.get(name)
            if number is not None and number in finished:
                number = None
            ended = dedup.ended.get(name, now, window) if number is None else None
            if name in lane.draft.names or name in dedup.uncommitted or (not lane.free and (number or ended)):
                raise Held(lane)
            if number is not None:
                if number in lane.partition.carried:
                    raise Held(lane, carried=True)
                return lane, number, None
            if ended is not None:
                lately = lane, ended.number, ended
    return lately or _find_assigned(queue, record)


def _find_assigned(queue: QueueState, record: Record) -> tuple[Lane, int, None] | None:
    """Whether a producer's own id is one that this queue gave to another item."""
    place = read_id(queue.incarnation, record.id) if record.id is not None else None
    if place is None:
        return None
    lane = queue.lanes.get(place[0])
    if lane is not None and not lane.free:
        raise Held(lane)
    if _has_gone(queue, place[0]):
        return None  # like the item, or it would have been found by its name
    if lane is None or place[1] >= lane.partition.next_number:
        raise InvalidRequest(f"id {record.id!r} has the form of the ids that this queue assigns; choose another")
    if place[1] in lane.partition.carried:
        raise Held(lane, carried=True)
    if place[1] in lane.partition.states([place[1]]) and not has_own_id(lane, place[1]):
        return lane, place[1], None
    return None


def _has_gone(queue: QueueState, partition: int) -> bool:
    """Or will in a moment, after a crash that came when only its store was gone: then it is as new, and stays so."""
    lane = queue.lanes.get(partition)
    if lane is None:
        return partition < queue.definition.next_partition
    return partition in queue.draining and lane.partition.next_number == 1


def has_own_id(lane: Lane, number: int) -> bool:
    return not lane.partition.dedup.names.get(number, "\n").startswith("\n")


def id_taken(queue: QueueState, item_id: str, now: int) -> bool:
    """For items that come back under their old id."""
    try:
        return _is_taken(_find(queue, Record(id=item_id), [id_digest(item_id)], now))
    except InvalidRequest:
        return True


def key_taken(queue: QueueState, key: str, now: int) -> bool:
    return _is_taken(_find(queue, Record(key=key), [key_digest(key)], now))


def are_unheard(queue: QueueState, names: Collection[bytes]) -> bool:
    """Whether nobody has, or had lately, or is about to have any of these. Held as with one."""
    for lane in queue.lanes.values():
        if not lane.known:
            raise Held(lane)
        if lane.partition.dedup.has_any(names) or (lane.draft.names and not lane.draft.names.isdisjoint(names)):
            return False
    return True


def name_taken(queue: QueueState, record: Record, names: list[bytes], now: int) -> bool:
    """For items that were staged: as for a producer's, whose request waits where this raises Held."""
    return _find(queue, record, names, now) is not None


def _is_taken(found: tuple[Lane, int, Ended | None] | None) -> bool:
    """What an item that left for its dead queue has left behind is its own to come back to."""
    return found is not None and not (found[2] is not None and found[2].moved)


def _duplicate(lane: Lane, number: int, ended: Ended | None) -> Produced:
    created = ended.created if ended is not None else lane.partition.chunks.created_of(number)
    name = ended.name if ended is not None else lane.partition.dedup.names.get(number)
    own_id, _, own_correlation = (name or "\n").partition("\n")
    mint = lane.partition.mint if ended is None else _mint(lane, ended.partition)
    return Produced(own_id or mint.id(number), own_correlation or mint.correlation_id(number, created), True)


def _mint(lane: Lane, partition: int) -> Mint:
    """Of what was entrusted to the lane by a partition that is gone, that one's."""
    return lane.partition.mint if partition < 0 else Mint(lane.partition.incarnation, partition)


def _id_of(lane: Lane, number: int, ended: Ended | None) -> str:
    return _duplicate(lane, number, ended).id


def plain_replies(mint: Mint, created: int, first: int, count: int) -> ProducedItems:
    return ProducedItems(mint.id_prefix, mint.correlation_prefix(created), range(first, first + count))
