"""A partition's state as one value, and back: what recovery starts from.

The shape has a version; a change of it adds one here, with the step that brings an older snapshot up to it.
"""

from __future__ import annotations

import msgspec

from millpond.history.format import RUN_BITS, numbers_of, run_of, run_span, runs_of
from millpond.queue.chunks import Chunks
from millpond.queue.dedup import Ended, Request, split
from millpond.queue.leases import Lease
from millpond.queue.partition import Move, Partition
from millpond.queue.ready import Ready
from millpond.store.base import Recovered

SNAPSHOT_VERSION = 1


class Snapshot(msgspec.Struct, array_like=True):
    version: int
    at: int
    next_number: int
    fence: int
    chunks: tuple[bytes, ...]
    ready: dict[int, list[int]]
    leased: list[tuple[str, int, int, int, list[int]]]
    waiting: dict[int, int]
    tries: dict[int, int]
    priorities: dict[int, int]
    limits: dict[int, int]
    expiries: dict[int, int]
    documents: dict[int, int]
    dead: dict[int, int]
    finished: dict[int, int]
    cancel_asked: list[int]
    moving: list[tuple[str, bool, int, list[int]]]
    confirming: dict[bytes, str]
    live: dict[bytes, int]
    digests: dict[int, bytes]
    names: dict[int, str]
    ended: dict[bytes, Ended]
    requests: dict[bytes, Request]
    arrivals: dict[bytes, int]
    totals: dict[str, int]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Snapshot).decode


def take_snapshot(partition: Partition) -> bytes:
    leases: dict[int, tuple[Lease, list[int]]] = {}
    for first, count, lease in partition.leased.spans():
        leases.setdefault(id(lease), (lease, []))[1].extend(range(first, first + count))
    moves: dict[int, list[int]] = {}
    for number, move in partition.moving.items():
        moves.setdefault(id(move), []).append(number)
    moving = [(partition.moving[numbers[0]], numbers) for numbers in moves.values()]
    dedup = partition.dedup
    return _encode(
        Snapshot(
            version=SNAPSHOT_VERSION,
            at=partition.at,
            next_number=partition.next_number,
            fence=partition.fence,
            chunks=partition.chunks.dump(),
            ready=partition.ready.runs(),
            leased=[
                (one.client, one.grant, one.deadline, one.fence, runs_of(numbers)) for one, numbers in leases.values()
            ],
            waiting={number: entry >> 64 << 1 | entry & 1 for number, entry in partition.waiting.items()},
            tries=partition.tries,
            priorities=partition.priorities,
            limits=partition.limits,
            expiries=partition.expiries,
            documents=partition.documents,
            dead=partition.dead,
            finished=partition.finished,
            cancel_asked=list(partition.cancel_asked),
            moving=[(one.target, one.redrive, one.turn, runs_of(numbers)) for one, numbers in moving],
            confirming=partition.confirming,
            live=dedup.live,
            digests=dedup.digests,
            names=dedup.names,
            ended=dedup.ended.dump(partition.at, partition.dedup_window),
            requests=dedup.requests.dump(partition.at, partition.dedup_window),
            arrivals=dedup.arrivals,
            totals=partition.totals,
        )
    )


def _restore(partition: Partition, snapshot: Snapshot) -> None:
    if snapshot.version != SNAPSHOT_VERSION:
        raise ValueError(f"snapshot of version {snapshot.version}; this millpond reads up to {SNAPSHOT_VERSION}")
    partition.at = snapshot.at
    partition.next_number = snapshot.next_number
    partition.fence = snapshot.fence
    partition.chunks = Chunks.load(snapshot.chunks)
    partition.ready = Ready.from_runs(snapshot.ready)
    for client, grant, deadline, fence, runs in snapshot.leased:
        lease = Lease(client, grant, deadline, fence)
        for run in runs:
            partition.leased.add(run >> RUN_BITS, len(run_span(run)), lease)
            partition.lease_timers.push(deadline, run)
    for target, redrive, turn, runs in snapshot.moving:
        partition.moving.update(dict.fromkeys(numbers_of(runs), Move(target, redrive, turn)))
    same: dict[
        int, int
    ] = {}  # a number or a value that several entries have is one object, as it is in a live partition
    for column in ("tries", "priorities", "limits", "expiries", "documents", "dead", "finished"):
        entries = getattr(snapshot, column)
        getattr(partition, column).update((same.setdefault(n, n), same.setdefault(v, v)) for n, v in entries.items())
        entries.clear()
    partition.cancel_asked.update(snapshot.cancel_asked)
    partition.confirming = snapshot.confirming
    for number, due in snapshot.waiting.items():
        partition.waiting[same.get(number, number)] = due >> 1 << 64 | number << RUN_BITS | due & 1
    partition.due_timers.rebuild_from(partition.waiting.values())
    partition.expiry_timers.rebuild((at, run_of(number, 1)) for number, at in partition.expiries.items())
    partition.finish_timers.rebuild((kept >> 1, run_of(number, 1)) for number, kept in partition.finished.items())
    partition.dedup.live = _live(snapshot)
    partition.dedup.digests, partition.dedup.names = snapshot.digests, snapshot.names
    partition.dedup.ended.load(snapshot.ended, snapshot.at)
    partition.dedup.requests.load(snapshot.requests, snapshot.at)
    partition.dedup.arrivals = snapshot.arrivals
    partition.totals = snapshot.totals


def _live(snapshot: Snapshot) -> dict[bytes, int]:
    """The names in use, as the same objects that `digests` holds: half the memory."""
    live = snapshot.live
    pairs = ((name, number) for number, joined in snapshot.digests.items() for name in split(joined))
    return {name: number for name, number in pairs if live.get(name) == number}


def recover_partition(incarnation: str, index: int, dedup_window: int, recovered: Recovered) -> Partition:
    """The snapshot, and what the journal has since."""
    partition = Partition(incarnation, index, dedup_window)
    if recovered.snapshot is not None:
        _restore(partition, _decode(recovered.snapshot))
        partition.turn = recovered.snapshot_turn
    for row in recovered.rows:
        partition.replay(row)
    return partition
