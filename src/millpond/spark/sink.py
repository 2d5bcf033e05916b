"""The writers: tasks stage rows as invisible items, the driver publishes them all at once.

Each try of a task stages chunks under names of its own; the driver publishes those of the tries that counted, in one
transaction that the server does at most once: `query id:batch id` for a stream, the option `txn` for a batch write. So
task retries, speculative twins and replayed batches change nothing. What was staged and is never published, the server
drops.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from millpond.spark.options import SinkOptions
from millpond.spark.rejects import Rejects
from millpond.spark.rows import check_columns, prepared
from millpond.spark.transport import NoAnswer, Refused, Transport

CHUNK_ROWS = 10_000  # as many as the server takes, and as Spark hands over at a time
CHUNK_BYTES = 4 << 20  # a quarter of the default bound on a request
ABORT_RETRY_S = 5.0  # the write has failed: its error should not wait for long
SAMPLES_MAX = 5  # rejected rows that a report shows
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"

log = logging.getLogger("millpond.spark")  # of the driver: on its stderr, unless the process says otherwise


class RowsRejected(ValueError):
    """Rows that no server would take, in a write that was told of no place to put them."""


class Overwriting(ValueError):
    """A queue can be added to, not replaced."""


@dataclass
class Sample:
    """One rejected row, by its place; never its payload, which may be anything."""

    task: int
    row: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"row {self.row} of task {self.task}{self.name}: {self.reason}"


@dataclass
class Staged(WriterCommitMessage):
    """What one task has staged, for the driver."""

    txn: str
    chunks: list[str] = field(default_factory=list)
    rows: int = 0
    rejected: int = 0
    samples: list[Sample] = field(default_factory=list)
    rejects: list[str] = field(default_factory=list)


class Stager:
    """One try of one task."""

    def __init__(self, options: SinkOptions, transport: Transport, txn: str, task: int) -> None:
        self._options = options
        self._transport = transport
        self._task = task
        self._name = uuid.uuid4().hex
        self._rejects = Rejects(options.rejects, txn, self._name) if options.rejects else None
        self.staged = Staged(txn)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        """A chunk is under way while the rows of the next one come in."""
        with ThreadPoolExecutor(1) as aside:
            sent: Future[None] | None = None
            for chunk in chunked(self._good(batches)):
                if sent is not None:
                    sent.result()
                sent = aside.submit(self._send, chunk)
            if sent is not None:
                sent.result()
        if self._rejects is not None:
            self.staged.rejects = self._rejects.close()
        return self.staged

    def _send(self, chunk: list[pa.RecordBatch]) -> None:
        name = f"{self._name}-{len(self.staged.chunks)}"
        named = {"queue": self._options.queue, "txn": self.staged.txn, "chunk": name}
        self._transport.send("queue.stage", ipc_stream(chunk), **named)
        self.staged.chunks.append(name)

    def _good(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            sent, reasons = prepared(batch)
            if reasons is not None:
                wrong = reasons.is_valid()
                self._reject(batch, reasons, wrong)
                sent = sent.filter(pc.invert(wrong))
            self.staged.rows += batch.num_rows
            if sent.num_rows:
                yield sent

    def _reject(self, batch: pa.RecordBatch, reasons: pa.StringArray, wrong: pa.BooleanArray) -> None:
        rows = pc.indices_nonzero(wrong)
        self.staged.rejected += len(rows)
        for row in rows.to_pylist()[: SAMPLES_MAX - len(self.staged.samples)]:
            place = self.staged.rows + row
            self.staged.samples.append(Sample(self._task, place, _name(batch, row), str(reasons[row])))
        if self._rejects is not None:
            places = pc.add(rows.cast(pa.int64()), self.staged.rows)
            self._rejects.add(batch.take(rows), reasons.take(rows), self._task, places)


def _name(batch: pa.RecordBatch, row: int) -> str:
    for name in ("id", "key"):
        if name in batch.schema.names and (value := batch.column(name)[row].as_py()) is not None:
            return f" ({name} {value!r:.80})"
    return ""


# ---- what Spark calls -----------------------------------------------------------------------------------------------


class _Writer:
    """What both kinds of writers do."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise Overwriting(
                "a queue is added to, not replaced; write with mode('append') or outputMode('append'), and clear the"
                " queue by itself if that is meant"
            )
        check_columns(schema)
        self._options = options

    def _stage(self, txn: str, batches: Iterator[pa.RecordBatch]) -> Staged:
        with self._options.server.transport() as transport:
            return Stager(self._options, transport, txn, _task_context().partitionId()).run(batches)

    def _publish(self, txn: str, staged: Sequence[Staged]) -> None:
        chunks = [chunk for one in staged for chunk in one.chunks]
        rejected = sum(one.rejected for one in staged)
        if rejected and self._options.rejects is None:
            raise RowsRejected(_told(rejected, staged))
        if self._options.rejects is not None:
            Rejects.keep(self._options.rejects, txn, [name for one in staged for name in one.rejects])
        if not chunks:
            return
        with self._options.server.transport() as transport:
            done = transport.call("stage.publish", queue=self._options.queue, txn=txn, chunks=chunks)
        duplicates = done.get("duplicates", 0)
        if duplicates:
            log.warning(
                "millpond: %s of %s rows were not added to queue %s by transaction %s: their key or id is taken",
                *(f"{duplicates:,}", f"{duplicates + done.get('items', 0):,}", self._options.queue, txn),
            )

    def _abort(self, txn: str) -> None:
        """Only tidies up, and hides no error that came before: what is left was never visible, and is dropped by the
        server in time. What was published, of which only the reply was lost, stays.
        """
        server = replace(self._options.server, retry_s=min(self._options.server.retry_s, ABORT_RETRY_S))
        try:
            with server.transport() as transport:
                transport.call("stage.abort", queue=self._options.queue, txn=txn)
        except (Refused, NoAnswer):
            pass


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Made once on the driver: a transaction that the user has not named is named here, for all tasks."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        self._txn = options.txn or uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._stage(self._txn, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._publish(self._txn, _staged(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(self._txn)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """The driver's part is made anew for each batch, and learns of the query only from what the tasks send."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = _task_context()
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        assert query, "Spark tells a streaming write its query"
        return self._stage(f"{query}:{batch}", iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        staged = _staged(messages)
        if staged:
            assert staged[0].txn.endswith(f":{batchId}"), (staged[0].txn, batchId)
            self._publish(staged[0].txn, staged)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        for txn in {one.txn for one in _staged(messages)}:
            self._abort(txn)


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    return [one for one in messages if isinstance(one, Staged)]


def _task_context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "write runs in a task"
    return context


def _told(rejected: int, staged: Sequence[Staged]) -> str:
    rows = sum(one.rows for one in staged)
    samples = [sample for one in staged for sample in one.samples][:SAMPLES_MAX]
    more = f"; and {rejected - len(samples)} more" if rejected > len(samples) else ""
    return (
        f"{rejected} of {rows} rows cannot become items, nothing was published: {'; '.join(map(str, samples))}{more}."
        " Mend or filter them, or name a directory with the option rejects to put them there and publish the rest"
    )


# ---- chunks ---------------------------------------------------------------------------------------------------------


def chunked(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Batches cut and gathered into what goes into one request."""
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        for piece in _pieces(batch):
            if gathered and (rows + piece.num_rows > CHUNK_ROWS or size + piece.nbytes > CHUNK_BYTES):
                yield gathered
                gathered, rows, size = [], 0, 0
            gathered.append(piece)
            rows += piece.num_rows
            size += piece.nbytes
    if gathered:
        yield gathered


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """No piece has more rows than a chunk, nor, unless it is one row, more bytes."""
    for start in range(0, batch.num_rows, CHUNK_ROWS):
        yield from _halved(batch.slice(start, CHUNK_ROWS))


def _halved(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows <= 1 or batch.nbytes <= CHUNK_BYTES:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _halved(batch.slice(0, middle))
    yield from _halved(batch.slice(middle))


def ipc_stream(batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return out.getvalue()
