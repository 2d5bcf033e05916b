"""What a commit may do to staged chunks: kept for whoever sent them, shown once they are decided on, or dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from millpond.history.format import Event, Record
from millpond.queue.requests import StageItems
from tests.sim.asks import ABORT, STAGE, names_of
from tests.sim.nouns import Chunk, Item

if TYPE_CHECKING:
    from tests.sim.rules import Partition


def staged(partition: Partition, txn: str, chunk: str, first: int, count: int, meta: bytes | None) -> None:
    if first != partition.next_number:
        partition.broken(f"item {first} follows item {partition.next_number - 1}")
    partition.next_number = first + count
    records = partition.body(first, count)
    if partition.read_only:
        partition.broken(f"{txn} was staged in a read-only partition")
    kept = partition.staged.setdefault(txn, {}).setdefault(chunk, Chunk(partition.at, partition.queue.model.step))
    if kept.step != partition.queue.model.step:
        partition.broken(f"chunk {chunk} of {txn} was staged again beside itself")
    kept.pieces[first] = records
    partition.fresh_chunks[txn, chunk] = kept
    partition.queue.ever_staged.add((txn, chunk))


def judge_staged(partition: Partition, txn: str, chunk: str, kept: Chunk) -> None:
    """The whole chunk, at the end of the commit, unless that has dropped it again."""
    records = [record for piece in kept.pieces.values() for record in piece]
    asks = [ask for ask in partition.queue.of_kind(STAGE) if isinstance(ask.request, StageItems)]
    asks = [ask for ask in asks if (ask.request.txn, ask.request.chunk) == (txn, chunk) and ask.records == records]  # type: ignore[attr-defined]
    if not asks and kept.pieces:
        partition.broken(f"nobody asks to stage {records} as {chunk} of {txn}")
    for ask in asks:
        ask.stirred = True


def published(
    partition: Partition, txn: str, chunk: str, first: int, count: int, deadline: int, meta: bytes | None,
    dropped: Sequence[int],
) -> None:  # fmt: skip
    decisions = partition.queue.decisions
    kept = partition.staged.get(txn, {}).get(chunk)
    if kept is None or len(kept.pieces.get(first, ())) != count:
        partition.broken(f"chunk {chunk} of {txn} was shown, and it is not here")
    if decisions.decided.get(txn, {}).get(chunk) != partition.index:
        partition.broken(f"chunk {chunk} of {txn} was shown, and it does not count")
    shown = decisions.shown.setdefault((txn, chunk), (partition.index, partition.turn))
    if shown != (partition.index, partition.turn):
        partition.broken(f"chunk {chunk} of {txn} was shown twice, first in {shown}")
    if deadline != partition.at + partition.settings.expire_timeout_ms:
        partition.broken(f"expire deadline {deadline} at {partition.at}")
    gone = set(dropped)
    for number, stored in enumerate(kept.pieces.pop(first), first):
        assert stored is not None
        record = stored if isinstance(stored, Record) else Record(stored)
        holders = [partition.queue.taken(name, partition.at, partition.at) for name in names_of(record)]
        if number in gone:
            if not any(holders):
                partition.broken(f"{record} of {txn} was dropped, and its names are free")
            continue
        free = [partition.queue.taken(name, partition.at + 1, partition.at) for name in names_of(record)]
        if any(free):
            partition.broken(f"{record} of {txn} was shown, and {free} have its names")
        item = Item(partition, number, record, deadline)
        if record.expire_deadline:
            item.expire_deadline += partition.at - kept.at
        partition.enter(item)
    decisions.counted[txn][0] += count - len(gone)
    decisions.counted[txn][1] += len(gone)
    _forget(partition, txn, chunk, kept)


def unstaged(partition: Partition, txn: str, chunk: str, first: int) -> None:
    decisions = partition.queue.decisions
    chunks = partition.staged.get(txn, {})
    kept = chunks.get(chunk)
    asks = [ask for ask in partition.queue.of_kind(ABORT) if ask.request.txn == txn]  # type: ignore[attr-defined]
    if kept is None or first not in kept.pieces:
        partition.broken(f"chunk {chunk} of {txn} was dropped, and it is not here")
    if txn in decisions.decided and decisions.decided[txn].get(chunk) == partition.index:
        shown = decisions.shown.get((txn, chunk))
        if shown is None or shown == (partition.index, partition.turn):
            partition.broken(f"chunk {chunk} of {txn} was dropped, and it counts")
    elif not decisions.is_published(txn):
        newest = max(one.at for one in chunks.values())
        if newest + partition.queue.stage_timeout > partition.at:
            if not asks and txn not in partition.queue.half_aborted:
                partition.broken(f"chunk {chunk} of {txn} was dropped, and nobody asked for it")
            for ask in asks:
                ask.stirred = True
    for ask in asks:
        ask.noted.add(txn)
    del kept.pieces[first]
    _forget(partition, txn, chunk, kept)


def _forget(partition: Partition, txn: str, chunk: str, kept: Chunk) -> None:
    if not kept.pieces:
        chunks = partition.staged[txn]
        if chunks.get(chunk) is kept:
            del chunks[chunk]
        if not chunks:
            del partition.staged[txn]


STAGE_JUDGES: dict[int, Callable[..., None]] = {
    Event.STAGED: staged,
    Event.PUBLISHED: published,
    Event.UNSTAGED: unstaged,
}
