"""The readers: a stream of claims, and a look at a queue.

A stream's offset is the number of a claim, `consumer:seq`, which the server keeps until it is completed: a micro-batch
that is read again has the same rows. `latestOffset(start)` makes claim `start + 1`, or finds it made, and completes
claim `start`: being asked to go on from it proves that Spark has committed its batch. `commit` alone would never
complete the last one.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from millpond.spark.options import ITEMS_PER_BATCH_MAX, PeekOptions, StreamOptions
from millpond.spark.schema import arranged, arrow_schema
from millpond.spark.transport import Refused, Transport

IDLE_WAIT = "1s"  # a long poll: without it Spark asks an empty queue a hundred times a second
PAGE_ITEMS = 10_000  # as many as the server gives at a time
TASK_ITEMS_MIN = 5_000  # a task costs more than to read so few: smaller parts go together
OFFSET_FORMAT = 1  # of the offsets in checkpoints


class Misplaced(RuntimeError):
    """The checkpoint and the server do not tell the same story. Nothing was changed on either."""


# ---- the stream ---------------------------------------------------------------------------------------------------


class ClaimReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Made in several processes: the one of the query, which opens the consumer when it first needs to, and those that
    only plan or read.
    """

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options = options
        self._target = arrow_schema(schema)
        self._consumer = _Consumer(options)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.items_max)

    def prepareForTriggerAvailableNow(self) -> None:
        self._consumer.stop_at_what_is_ready()

    def initialOffset(self) -> dict[str, Any]:
        return self._consumer.begin()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        return self._consumer.after(start, _rows(limit, self._options.items_max))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if start == end:
            return []
        claim_id, epoch = self._consumer.claim_of(end)
        return [InputPartition((claim_id, epoch, parts)) for parts in tasks(end["parts"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        claim_id, epoch, parts = partition.value
        with self._options.server.transport() as transport:
            try:
                for part in parts:
                    fields = {"queue": self._options.queue, "claim_id": claim_id, "part": part, "epoch": epoch}
                    for page in pages(transport, "claim.read", PAGE_ITEMS, fields):
                        yield arranged(page, self._target)
            except Refused as error:
                raise _explained(error, self._options, claim_id) from None

    def commit(self, end: dict[str, Any]) -> None:
        self._consumer.complete(end)


class RefusingReader(DataSourceStreamReader):
    """Says what is wrong with the options when it is first asked something: a reader that cannot be made at all is
    reported by Spark as a mistake of its own.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def getDefaultReadLimit(self) -> ReadLimit:
        raise self._error

    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error


class _Consumer:
    """This run's hold on the consumer: its epoch, and how far it is. Whoever opens it later fences this one off, so it
    is not opened before all that can be known to be wrong was looked at.
    """

    def __init__(self, options: StreamOptions) -> None:
        self._options = options
        self._transport = options.server.transport()
        self._epoch: int | None = None  # not open yet
        self._completed = 0
        self._incarnation = ""
        self._made = 0  # the claim that this run has made or found
        self._ready_left: int | None = None  # with availableNow: how many more items are to be claimed
        self._claimed_before: set[str] = set()  # with availableNow: not among those

    # ---- what Spark asks --------------------------------------------------------------------------------------

    def stop_at_what_is_ready(self) -> None:
        """As many items as are ready now. A claim that an earlier run has made comes on top."""
        self._claimed_before = {claim["claim_id"] for claim in self._call("claims.list")["claims"]}
        info = self._look()
        self._ready_left = sum(one["counts"].get("ready", 0) for one in info["partitions"])

    def begin(self) -> dict[str, Any]:
        self._open(0)
        if self._completed:
            raise Misplaced(
                f"{self._named} has completed claim {self._completed}, but this query's checkpoint is new; start it"
                " with the checkpoint that it had, or, if that is gone, with a consumer of a new name (and release the"
                " old one's open claim, if it has one: claims.list shows it)"
            )
        return self._offset(0, [])

    def after(self, start: dict[str, Any], limit: int) -> dict[str, Any]:
        self._check(start, start["seq"])
        if start["seq"] < self._completed:
            raise Misplaced(
                f"the checkpoint has come to claim {start['seq']}, but {self._named} has completed claim"
                f" {self._completed}: {_OLDER}"
            )
        self.complete(start)
        seq = start["seq"] + 1
        if not self._wanted(seq):
            return start
        claim = self._claim(seq, limit)
        if not claim["items"]:
            self._ready_left = None if self._ready_left is None else 0
            return start
        if self._ready_left is not None and self._claim_id(seq) not in self._claimed_before:
            self._ready_left -= claim["items"]
        self._made = seq
        return self._offset(seq, [part["items"] for part in sorted(claim["parts"], key=lambda one: int(one["part"]))])

    def claim_of(self, end: dict[str, Any]) -> tuple[str, int | None]:
        """For a batch that an earlier run had planned, after a look at whether its claim is still there."""
        self._check(end, end["seq"] - 1)
        seq, claim_id = end["seq"], self._claim_id(end["seq"])
        if seq <= self._completed:
            raise Misplaced(
                f"{self._named} has completed claim {seq}, which this checkpoint has yet to commit: {_OLDER}"
            )
        if seq != self._made:
            self._call("claim.read", claim_id=claim_id, part=0, limit=1, epoch=self._epoch)
            self._made = seq
        return claim_id, self._epoch

    def complete(self, end: dict[str, Any]) -> None:
        self._check(end, end["seq"])
        seq = end["seq"]
        if seq == self._completed + 1:
            self._call("claim.complete", claim_id=self._claim_id(seq), epoch=self._epoch)
            self._completed = seq

    # ---- how it is done ---------------------------------------------------------------------------------------

    def _open(self, after: int) -> None:
        """As the one that has come to claim `after`: where the consumer has not, it stays with whoever has it."""
        if self._epoch is not None:
            return
        if not self._incarnation:
            self._look()
        fields = {"queue": self._options.queue, "consumer": self._options.consumer, "after": after}
        try:
            opened = self._transport.call("consumer.open", **fields)
        except Refused as error:
            if "last_completed" not in error.details:
                raise _explained(error, self._options, "") from None
            self._completed = error.details["last_completed"]  # whoever asked finds that it cannot be
        else:
            self._epoch, self._completed = opened["epoch"], opened["last_completed"]

    def _look(self) -> dict[str, Any]:
        info = self._call("queues.info", name=self._options.queue)
        self._incarnation = info["incarnation"]
        return info

    @property
    def _named(self) -> str:
        return f"consumer {self._options.consumer!r} of queue {self._options.queue!r}"

    def _claim_id(self, seq: int) -> str:
        return f"{self._options.consumer}:{seq}"

    def _wanted(self, seq: int) -> bool:
        """No more, with availableNow, once as many were claimed as were ready when it began."""
        return self._ready_left is None or self._ready_left > 0 or self._claim_id(seq) in self._claimed_before

    def _claim(self, seq: int, limit: int) -> dict[str, Any]:
        left = self._ready_left
        return self._call(
            "queue.claim",
            claim_id=self._claim_id(seq),
            max_items=limit if left is None else max(1, min(limit, left)),
            max_bytes=self._options.bytes_max,
            parts=self._options.parts,
            wait=IDLE_WAIT if left is None else None,
            epoch=self._epoch,
            owner=f"spark on {socket.gethostname()}",
        )

    def _offset(self, seq: int, parts: list[int]) -> dict[str, Any]:
        return {
            "format": OFFSET_FORMAT,
            "queue": self._options.queue,
            "incarnation": self._incarnation,
            "consumer": self._options.consumer,
            "seq": seq,
            "parts": parts,
        }

    def _check(self, offset: dict[str, Any], done: int) -> None:
        """That the offset is this consumer's, which is then open, if it has come to claim `done`."""
        if offset.get("format") != OFFSET_FORMAT:
            raise Misplaced(
                f"the checkpoint holds offsets of format {offset.get('format')!r}, this connector writes"
                f" {OFFSET_FORMAT}; go on with the millpond that wrote it, or start with a new checkpoint and consumer"
            )
        mine = (self._options.queue, self._options.consumer)
        theirs = (offset["queue"], offset["consumer"])
        if mine != theirs:
            raise Misplaced(
                f"the checkpoint is of consumer {theirs[1]!r} of queue {theirs[0]!r}, not of {self._named}; give this"
                " query a checkpointLocation of its own"
            )
        if not self._incarnation:
            self._look()
        if offset["incarnation"] != self._incarnation:
            raise Misplaced(
                f"the checkpoint is of an earlier queue {mine[0]!r}, which was deleted and made again, or is on another"
                " server; start with a new checkpointLocation"
            )
        self._open(done)
        if offset["seq"] > self._completed + 1:
            raise Misplaced(
                f"the checkpoint has come to claim {offset['seq']}, but {self._named} only to {self._completed}: the"
                " server's data are older than the checkpoint (were they restored from a copy?); start with a new"
                " checkpointLocation and a consumer of a new name"
            )

    def _call(self, name: str, /, **fields: Any) -> dict[str, Any]:
        if name != "queues.info":
            fields["queue"] = self._options.queue
        try:
            return self._transport.call(name, **fields)
        except Refused as error:
            raise _explained(error, self._options, fields.get("claim_id", "")) from None


_OLDER = (
    "another query has gone on with this consumer, or the checkpoint is an old copy; use the newest checkpoint, or a"
    " new checkpointLocation together with a consumer of a new name"
)


def _rows(limit: ReadLimit, items_max: int) -> int:
    if isinstance(limit, ReadMaxRows):
        return min(limit.max_rows, ITEMS_PER_BATCH_MAX)
    return ITEMS_PER_BATCH_MAX if isinstance(limit, ReadAllAvailable) else items_max


def tasks(parts: Sequence[int]) -> list[list[int]]:
    """The numbers of the parts that each task reads: in order, small neighbours together."""
    groups: list[list[int]] = []
    room = 0
    for part, items in enumerate(parts):
        if not items:
            continue
        if groups and items <= room:
            groups[-1].append(part)
        else:
            groups.append([part])
            room = TASK_ITEMS_MIN
        room -= items
    return groups


def _explained(error: Refused, options: StreamOptions, claim_id: str) -> Exception:
    """What the server's word means to who runs a query."""
    named = f"consumer {options.consumer!r} of queue {options.queue!r}"
    if error.code == "fenced":
        return Misplaced(
            f"another query has opened {named} since this one began, and has taken over from it; run one query a"
            " consumer: give the other one a consumer and a checkpointLocation of its own, or let this one end"
        )
    if error.code == "not_found" and claim_id and claim_id in error.text:
        return Misplaced(
            f"claim {claim_id!r} of queue {options.queue!r} was released under this query: its items are back in the"
            " queue, and will be read again; start with a new checkpointLocation and a consumer of a new name"
        )
    if error.code == "claim_finished":
        return Misplaced(
            f"claim {claim_id!r} of queue {options.queue!r} was completed under this query: its items are done, and"
            " those that were not read will not be; start with a new checkpointLocation and a consumer of a new name"
            " (to give items back, release a claim)"
        )
    return error


# ---- a look ---------------------------------------------------------------------------------------------------------


class PeekReader(DataSourceReader):
    """What is in a queue, without touching it. Which items, by their numbers, is settled when the read is planned; one
    that has changed its state by the time it is read is left out.
    """

    def __init__(self, options: PeekOptions, schema: StructType) -> None:
        self._options = options
        self._target = arrow_schema(schema)

    def partitions(self) -> list[InputPartition]:
        with self._options.server.transport() as transport:
            stats = transport.call("queue.stats", queue=self._options.queue)
        return [InputPartition((one["partition"], one.get("last_number", 0))) for one in stats["partitions"]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # of a queue without partitions
            return
        number, until = partition.value
        options = self._options
        fields = {
            "queue": options.queue,
            "partition": number,
            "until": until,
            "state": options.state,
            "kind": options.kind,
        }
        with options.server.transport() as transport:
            for page in pages(transport, "items.list", PAGE_ITEMS, fields):
                yield arranged(page, self._target)


# ---- pages ----------------------------------------------------------------------------------------------------------


def pages(transport: Transport, name: str, limit: int, fields: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    """All of them. The next one is under way while Spark takes this one."""

    def get(after: str | None) -> tuple[list[pa.RecordBatch], str | None]:
        return transport.page(name, after=after, limit=limit, **fields)

    with ThreadPoolExecutor(1) as ahead:
        coming: Future[tuple[list[pa.RecordBatch], str | None]] | None = ahead.submit(get, None)
        while coming is not None:
            batches, after = coming.result()
            coming = None if after is None else ahead.submit(get, after)
            for batch in batches:
                if batch.num_rows:
                    yield batch
