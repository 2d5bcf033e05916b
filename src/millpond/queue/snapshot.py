"""A partition's state as one value, and back: what recovery starts from.

The shape has a version; a change of it adds one here, with the step that brings an older snapshot up to it. What there
may be a million of is packed as arrays, as it lies in memory: a snapshot is taken while all wait.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from millpond.history.format import numbers_of, run_span, runs_of
from millpond.queue.chunks import Chunks
from millpond.queue.columns import Dump
from millpond.queue.dedup import Ended, Request
from millpond.queue.leases import Lease
from millpond.queue.partition import Hold, Move, Partition, Piece
from millpond.queue.ready import Ready
from millpond.store.base import Recovered

SNAPSHOT_VERSION = 1


class Snapshot(msgspec.Struct, array_like=True):
    version: int
    at: int
    next_number: int
    fence: int
    chunks: bytes
    ready: dict[int, bytes]
    leased: tuple[list[str], bytes, bytes]
    waiting: Dump
    tries: Dump
    priorities: Dump
    limits: Dump
    expiries: Dump
    documents: Dump
    dead: Dump
    finished: Dump
    cancel_asked: list[int]
    moving: list[tuple[str, bool, int, list[int]]]
    confirming: dict[bytes, str]
    names: tuple[bytes, bytes, bytes, list[str]]
    ended: dict[bytes, Ended]
    requests: dict[bytes, Request]
    arrivals: dict[bytes, int]
    totals: dict[str, int]
    claims: list[Hold] = []
    staged: dict[str, dict[str, list[Piece]]] = {}
    decisions: bytes | None = None
    changed: Dump = (b"", b"", b"", b"")  # this and the next came later: without them it is not known when
    granted: bytes = b""  # the instant of each of the leases, in their order
    carried: list[tuple[int, list[int]]] = []  # turn and runs


COLUMNS = ("waiting", "tries", "priorities", "limits", "expiries", "documents", "dead", "finished", "changed")
_LEASE_INTS = 4  # in `leased`, of each lease: client's place, grant, deadline, fence
_SPAN_INTS = 3  # and of each span: first, count, lease's place

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Snapshot).decode


def take_snapshot(partition: Partition) -> bytes:
    moves: dict[int, list[int]] = {}
    for number, move in partition.moving.items():
        moves.setdefault(id(move), []).append(number)
    moving = [(partition.moving[numbers[0]], numbers) for numbers in moves.values()]
    leased, granted = _pack_leases(partition)
    dedup = partition.dedup
    return _encode(
        Snapshot(
            version=SNAPSHOT_VERSION,
            at=partition.at,
            next_number=partition.next_number,
            fence=partition.fence,
            chunks=partition.chunks.dump(),
            ready={priority: array("Q", runs).tobytes() for priority, runs in partition.ready.runs().items()},
            leased=leased,
            **{column: getattr(partition, column).dump() for column in COLUMNS},
            cancel_asked=list(partition.cancel_asked),
            moving=[(one.target, one.redrive, one.turn, runs_of(numbers)) for one, numbers in moving],
            confirming=partition.confirming,
            names=dedup.dump(),
            ended=dedup.ended.dump(partition.at, partition.dedup_window),
            requests=dedup.requests.dump(partition.at, partition.dedup_window),
            arrivals=dedup.arrivals,
            totals=partition.totals,
            claims=list(partition.claims.values()),
            staged=partition.staged,
            decisions=partition.decisions.dump() if partition.decisions else None,
            granted=granted,
            carried=[(turn, runs_of(numbers)) for turn, numbers in _by_turn(partition.carried).items()],
        )
    )


def _by_turn(carried: dict[int, int]) -> dict[int, list[int]]:
    turns: dict[int, list[int]] = {}
    for number, turn in carried.items():
        turns.setdefault(turn, []).append(number)
    return turns


def _restore(partition: Partition, snapshot: Snapshot) -> None:
    if snapshot.version != SNAPSHOT_VERSION:
        raise ValueError(f"snapshot of version {snapshot.version}; this millpond reads up to {SNAPSHOT_VERSION}")
    partition.at = snapshot.at
    partition.next_number = snapshot.next_number
    partition.fence = snapshot.fence
    partition.chunks = Chunks.load(snapshot.chunks)
    partition.ready = Ready.from_runs({priority: list(array("Q", runs)) for priority, runs in snapshot.ready.items()})
    _unpack_leases(partition, snapshot.leased, array("q", snapshot.granted))
    for target, redrive, turn, runs in snapshot.moving:
        partition.moving.update(dict.fromkeys(numbers_of(runs), Move(target, redrive, turn)))
    for turn, runs in snapshot.carried:
        partition.carried.update(dict.fromkeys(numbers_of(runs), turn))
    same: dict[int, int] = {}
    for column in COLUMNS:
        getattr(partition, column).load(getattr(snapshot, column), same)
    partition.cancel_asked.update(snapshot.cancel_asked)
    partition.confirming = snapshot.confirming
    partition.set_timers()
    partition.dedup.load(snapshot.names)
    partition.dedup.ended.load(snapshot.ended, snapshot.at)
    partition.dedup.requests.load(snapshot.requests, snapshot.at)
    partition.dedup.arrivals = snapshot.arrivals
    partition.totals = snapshot.totals
    for hold in snapshot.claims:
        partition.claims[hold.nonce] = hold
        for run in hold.runs:
            span = run_span(run)
            partition.claimed.add(span.start, len(span), hold)
    partition.staged = snapshot.staged
    for pieces in (pieces for chunks in snapshot.staged.values() for pieces in chunks.values()):
        for piece in pieces:
            partition.chunks.reserve(piece.first)
            partition.staged_count += piece.count
    if snapshot.decisions is not None:
        partition.decisions.load(snapshot.decisions)


def _pack_leases(partition: Partition) -> tuple[tuple[list[str], bytes, bytes], bytes]:
    """The clients, the leases and the spans, each naming the one before by its place; and when each lease was."""
    clients: dict[str, int] = {}
    places: dict[int, int] = {}
    leases, spans, granted = array("q"), array("q"), array("q")
    for first, count, lease in partition.leased.spans():
        place = places.setdefault(id(lease), len(places))
        if place * _LEASE_INTS == len(leases):
            client = clients.setdefault(lease.client, len(clients))
            leases.extend((client, lease.grant, lease.deadline, lease.fence))
            granted.append(lease.at)
        spans.extend((first, count, place))
    return (list(clients), leases.tobytes(), spans.tobytes()), granted.tobytes()


def _unpack_leases(partition: Partition, packed: tuple[list[str], bytes, bytes], granted: Sequence[int]) -> None:
    clients, ints, spans = packed[0], array("q", packed[1]), array("q", packed[2])
    columns = (ints[column::_LEASE_INTS] for column in range(_LEASE_INTS))
    fields = zip_longest(*columns, granted, fillvalue=0)
    leases = [Lease(clients[client], *rest) for client, *rest in fields]
    for first, count, place in zip(*(spans[column::_SPAN_INTS] for column in range(_SPAN_INTS)), strict=True):
        partition.leased.add(first, count, leases[place])


def recover_partition(incarnation: str, index: int, dedup_window: int, recovered: Recovered) -> Partition:
    """The snapshot, and what the journal has since."""
    partition = Partition(incarnation, index, dedup_window)
    if recovered.snapshot is not None:
        _restore(partition, _decode(recovered.snapshot))
        partition.turn = recovered.snapshot_turn
    for row in recovered.rows:
        partition.replay(row)
    return partition
