"""A partition's place in its logical queue: its state, its store, the turn in the making, the job under way.

While a job is under way the lane is busy and its partition is not touched: memory is then the last commit plus
that job's turn. If the job fails, memory is worthless; the partition is loaded again from its store, which
tells whether the turn is in it.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from millpond.errors import MillpondError
from millpond.history.format import (
    RUN_BITS,
    RUN_MAX,
    Event,
    Payloads,
    Record,
    decode_entry,
    decode_records,
    encode_entry,
    encode_meta,
    encode_plain,
    encode_records,
    run_span,
)
from millpond.model import REQUEST_TIMEOUT_MS, PartitionDefinition, PlainItems, QueueSettings
from millpond.queue.bodies import Bodies, Budget, Records, weigh
from millpond.queue.leases import Lease
from millpond.queue.named import Named
from millpond.queue.partition import Partition, document_keys
from millpond.queue.snapshot import recover_partition, take_snapshot
from millpond.store.base import (
    META_PARTITION,
    Chunk,
    JournalRow,
    Store,
    StoreFailed,
    StoreFull,
    StoreRefused,
    Trim,
    Turn,
)

CHUNK_ITEMS_MAX = 1_000  # reading one item means reading its chunk
CHUNK_BYTES_MAX = 1 << 20  # likewise, for large payloads
SNAPSHOT_BYTES = 4 << 20  # journal to replay before a snapshot pays; more once the state itself is larger
SNAPSHOT_ROWS = 20_000  # a fifth of a second of replay
TRIM_INTERVAL_MS = 60_000  # how often old journal rows are looked for,
TRIM_INTERVAL_TURNS = 500  # or after so many turns: a store drops more rows than that at a time, so it keeps up
PROBE_MS, PROBE_MS_MAX = 100, 30_000  # second and longest wait before a failed store is tried again
NEVER = 1 << 62  # the deadline of a part that nobody waits for
NAMED_MAX = 1 << 20  # staged items up to which names stay at hand until they are published: 60 MB; more are read again
STALL_MS = REQUEST_TIMEOUT_MS  # a job that takes longer has kept requests waiting until they gave up
FORGIVE_TURNS = 1_000  # good turns after which earlier failures no longer count against a partition


class Status(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    FAILED = "failed"


# A member of an enum takes longer to look up than most of what a turn does with it.
_OPEN = Status.OPEN
_PRODUCED, _COMPLETED = Event.PRODUCED, Event.COMPLETED


class Part:
    """A request's share of one lane's turn. `late`: it comes after the turn's leases."""

    __slots__ = ()
    late = False

    def apply(self, lane: Lane, now: int) -> None:
        """Make the changes; nothing is said to the caller yet."""

    def finish(self, lane: Lane, job: TurnJob, now: int) -> None:
        """The changes are durable: say so."""

    def again(self, lane: Lane) -> None:
        """The changes were not written: back to where it came from."""
        lane.waiting.append(self)

    def fail(self, error: MillpondError) -> None:
        """Give up: the lane is away and the time is over."""

    def leaves(self) -> bool:
        """The lane has failed: whether the caller goes on without it. If so, `finish_late` follows if need be."""
        return False

    def finish_late(self, lane: Lane) -> None:
        """The changes turned out to be durable after the caller had been told to give up."""

    def deadline(self) -> int:
        """Until when it may wait for the lane."""
        return 0


class Lookup(msgspec.Struct):
    """Was this delivery completed at or after `since`? The journal knows."""

    number: int
    grant: int
    since: int
    found: bool = False


class Draft(msgspec.Struct, eq=False):
    """What the turn in the making reads and writes besides the partition's events."""

    parts: list[Part] = []
    chunks: list[Chunk] = []
    documents: dict[int, bytes] = {}
    chunk_wants: set[int] = set()
    document_wants: list[int] = []
    lookups: list[Lookup] = []
    journal_wants: set[tuple[int, int]] = set()  # pages of the journal: after which turn, how many rows
    pinned: dict[int, Records] = {}
    # Produced in this turn and not yet sealed into chunks:
    first: int = 0
    records: list[bytes | Record] = []
    plain: bool = True  # they are nothing but payloads
    size: int = 0
    requests: list[tuple[bytes, int, int, bytes | None]] = []
    arrivals: list[tuple[bytes, int, int, int]] = []
    names: set[bytes] = set()  # keys, ids, requests and transfers that this turn brings in
    completed: list[tuple[Lease, list[int]]] = []  # runs, gathered to be one event
    staged_size: int = 0
    endings: dict[int, Any] = {}  # items that end in this turn and that somebody waits for
    results: dict[int, bytes] = {}  # of completed items of which nothing is kept

    @property
    def untouched(self) -> bool:
        return not (self.parts or self.chunks or self.documents or self.names or self.pinned or self.reads)

    @property
    def reads(self) -> bool:
        return bool(self.chunk_wants or self.document_wants or self.lookups or self.journal_wants)


class Job(msgspec.Struct, kw_only=True, eq=False):
    """Work for a lane's commit thread. `run` touches the store and the job, never the lane."""

    lane: Lane
    error: Exception | None = None
    began_at: int | None = None

    def run(self) -> None:
        try:
            self.work()
        except Exception as error:  # whatever a store raises, the lane survives it
            self.error = error

    def work(self) -> None:
        raise NotImplementedError


class Outcome(enum.Enum):
    """Of a turn in doubt. Another process may have had the partition meanwhile, and have written turns of its own."""

    ABSENT = enum.auto()
    WRITTEN = enum.auto()  # and it is the last
    OVERTAKEN = enum.auto()  # others have gone on from it: what it did may be undone


class LoadJob(Job, kw_only=True, eq=False):
    """Read the partition back from its store, after an open or a failure."""

    incarnation: str
    window: int
    full: bool
    doubt: Turn | None
    partition: Partition | None = None
    replayed: tuple[int, int] = (0, 0)
    outcome: Outcome = Outcome.ABSENT

    def work(self) -> None:
        store = self.lane.store
        if self.full:
            store.relieve(True)
        recovered = store.recover()
        self.partition = recover_partition(self.incarnation, self.lane.index, self.window, recovered)
        self.replayed = len(recovered.rows), sum(len(row.events) for row in recovered.rows)
        if self.doubt is not None and self.partition.turn >= self.doubt.number:
            self.outcome = _outcome(store, self.doubt, self.partition.turn)


def _outcome(store: Store, doubt: Turn, last: int) -> Outcome:
    """Of a turn whose number there is: a row that says something else is another's. A row may be trimmed already."""
    for row in store.journal(doubt.number - 1, 1):
        if row.turn == doubt.number and (row.at, row.events) != (doubt.at, doubt.events):
            return Outcome.ABSENT
    return Outcome.WRITTEN if last == doubt.number else Outcome.OVERTAKEN


class RelieveJob(Job, kw_only=True, eq=False):
    """See whether a full disk has room again."""

    relieved: bool = False

    def work(self) -> None:
        self.relieved = self.lane.store.relieve(False)


class TurnJob(Job, kw_only=True, eq=False):
    """A turn: its reads, then its one commit. `issued` says whether something of it may have been written."""

    draft: Draft
    turn: Turn | None
    records: dict[int, Records]  # by the first number of their chunk
    issued: bool = False
    sizes: dict[int, int] = {}
    documents: dict[int, bytes] = {}
    grants: dict[tuple[int, int], Any] = {}  # those of its leases, by the items' creation and the deadline
    journal: dict[tuple[int, int], list[JournalRow]] = {}

    def work(self) -> None:
        draft, store = self.draft, self.lane.store
        if draft.chunk_wants or draft.document_wants:
            self._read(store, draft)
        self.documents.update(draft.documents)  # written by this very turn
        if draft.lookups:
            _find_completed(store, draft.lookups)
        for after, limit in draft.journal_wants:
            self.journal[after, limit] = store.journal(after, limit)
        if self.turn is not None:
            self.issued = True
            try:
                store.commit(self.turn)
            except StoreRefused:
                self.issued = False
                raise

    def _read(self, store: Store, draft: Draft) -> None:
        bodies, self.documents = store.read(sorted(draft.chunk_wants), draft.document_wants)
        if lost := draft.chunk_wants.difference(bodies):
            raise StoreFailed(f"chunk {min(lost)} of partition {self.lane.index} is missing; restore a backup")
        for first, body in bodies.items():
            self.records[first] = records = decode_records(body)
            self.sizes[first] = weigh(records, len(body))


def _find_completed(store: Store, lookups: list[Lookup]) -> None:
    """Read the journal back until all are found, each row once."""
    wanted: dict[tuple[int, int], list[Lookup]] = {}
    for lookup in lookups:
        wanted.setdefault((lookup.number, lookup.grant), []).append(lookup)
    numbers = {lookup.number for lookup in lookups}
    for row in store.ended(min(numbers), max(numbers), min(lookup.since for lookup in lookups)):
        for delivery in _completed(decode_entry(row.events).events, numbers):
            for lookup in wanted.pop(delivery, ()):
                lookup.found = True
        if not wanted:
            return


def _completed(events: Iterable[Sequence[Any]], numbers: Collection[int]) -> Iterator[tuple[int, int]]:
    """Those of these items that the events completed, with their grants."""
    for event in events:
        if event[0] == _COMPLETED:
            for run, grant in zip(event[2][::2], event[2][1::2], strict=True):
                span = run_span(run)
                smaller, larger = (span, numbers) if len(span) < len(numbers) else (numbers, span)
                yield from ((number, grant) for number in smaller if number in larger)


def completes(events: Iterable[Sequence[Any]], number: int, grant: int) -> bool:
    """Whether one of these events completed that delivery."""
    return (number, grant) in _completed(events, {number})


class CloseJob(Job, kw_only=True, eq=False):
    """Leave a snapshot, so that the next open is quick, and let go of the store."""

    turn: Turn | None = None

    def work(self) -> None:
        if self.turn is not None:
            self.lane.store.commit(self.turn)
        self.lane.store.close()


class Lane:
    # Of an object with more than 30 attributes of its own, CPython 3.11 finds methods only slowly: not with slots.
    __slots__ = (
        "_bytes", "_good_turns", "_rows", "_snapshot_size", "_trim_at", "_trim_turn", "bodies", "carrying",
        "changed_at", "compacting", "confirming", "definition", "doubt", "draft", "error", "failures", "full",
        "given_up", "gone", "index", "job", "legacy", "mark", "partition", "probe_at", "probe_wait", "resend_at",
        "sent", "status", "store", "waiting", "watched",
    )  # fmt: skip

    def __init__(self, definition: PartitionDefinition, store: Store, bodies: Bodies) -> None:
        self.definition = definition
        self.index = definition.partition
        self.store = store
        self.bodies = bodies
        self.status = Status.CLOSED
        self.partition: Partition = None  # type: ignore[assignment]  # until it is loaded; see `known`
        self.mark = 0  # the instant it was first loaded at: no request to it is earlier, whatever the clock said
        self.job: Job | None = None
        self.doubt: TurnJob | None = None  # the failed turn whose outcome the next load tells
        self.given_up: list[Part] = []  # of that turn
        self.draft = Draft()
        self.waiting: list[Part] = []
        self.watched: dict[int, dict[Any, None]] = {}  # items that somebody waits for, to end; and who
        # Moves and confirmations that are on their way to other queues, and when to try those again that failed:
        self.sent: set[int] = set()
        self.carrying: set[int] = set()  # the same to another partition
        self.confirming: set[bytes] = set()
        self.resend_at = 0
        self.compacting = False  # a sparse chunk is being rewritten
        self.full = False
        self.failures = 0
        self.error: str | None = None
        self.probe_at = 0
        self.probe_wait = 0  # before the next try: at once the first time
        self._good_turns = 0
        self._rows, self._bytes = 0, 0  # in the journal since the last snapshot
        self._snapshot_size = 0
        self._trim_at, self._trim_turn = 0, 0
        # Of a lane that a rebalance drains: when something last changed in it, who takes over its names, and whether it
        # is gone.
        self.changed_at = 0
        self.legacy: Any = None
        self.gone = False

    @property
    def known(self) -> bool:
        """Whether it was ever loaded. After a failure its last state still tells which names it may hold."""
        return self.partition is not None

    @property
    def free(self) -> bool:
        return self.job is None and self.status is _OPEN

    def job_age(self, now: int) -> int:
        return 0 if self.job is None or self.job.began_at is None else now - self.job.began_at

    def stalled(self, now: int) -> bool:
        """Its store does not answer."""
        return self.job_age(now) > STALL_MS

    @property
    def writable(self) -> bool:
        return not self.definition.read_only and not self.full

    # ---- the turn in the making ---------------------------------------------------------------------------

    def add(self, records: Sequence[bytes | Record], size: int) -> int:
        """Take records into this turn; returns the number of the first."""
        draft = self.draft
        if not draft.records:
            draft.first = self.partition.next_number
        first = draft.first + len(draft.records)
        draft.records += records
        draft.plain = draft.plain and type(records) is Payloads
        draft.size += size
        return first

    def seal(self, settings: QueueSettings) -> None:
        """Make chunks of the records taken, so that they can be leased in the same turn."""
        draft, partition = self.draft, self.partition
        if draft.requests and not draft.records:
            partition.change(Event.REMEMBERED, draft.requests)
            draft.requests = []
        if not draft.records:
            return
        deadline = partition.at + settings.expire_timeout_ms
        pieces = _pieces(draft.records, draft.size)
        first = draft.first
        for piece in pieces:
            last = piece is pieces[-1]
            requests, arrivals = (draft.requests, draft.arrivals) if last else ([], [])
            records: Records = Payloads(piece) if draft.plain else list(piece)
            meta = None if draft.plain else encode_meta(piece)
            partition.change(_PRODUCED, first, len(piece), deadline, meta, requests, arrivals)
            body = encode_records(records)
            draft.chunks.append(Chunk(first, len(piece), body))
            draft.pinned[first] = records
            self.bodies.offer(first, records, weigh(records, len(body), plain=meta is None))
            first += len(piece)
        draft.records, draft.plain, draft.size, draft.requests, draft.arrivals = [], True, 0, [], []

    def stage(self, txn: str, chunk: str, records: list[bytes | Record] | PlainItems, size: int) -> None:
        """Store records under numbers of their own, without an item for anybody to see."""
        assert not self.draft.records, "what is produced in a turn comes after"
        self.draft.staged_size += size
        if isinstance(records, PlainItems):
            for low, high in _spans(records):
                self._stage_chunk(txn, chunk, high - low, None, encode_plain(records, low, high))
            return
        for piece in _pieces(records, size):
            first, meta = self.partition.next_number, encode_meta(piece)
            self._stage_chunk(txn, chunk, len(piece), meta, encode_records(list(piece)))
            if meta is not None and self.partition.staged_count <= NAMED_MAX:
                self.partition.at_hand[first] = Named(meta, piece)

    def _stage_chunk(self, txn: str, chunk: str, count: int, meta: bytes | None, body: bytes) -> None:
        first = self.partition.next_number
        self.partition.change(Event.STAGED, txn, chunk, first, count, meta)
        self.draft.chunks.append(Chunk(first, count, body))

    def adopt(self, records: list[bytes | Record], items: list[tuple[Any, ...]], created: int, deadline: int) -> int:
        """Take in items of another partition; returns the number of the first. The turn has produced nothing yet."""
        assert not self.draft.records, "what is produced in a turn comes after"
        start = first = self.partition.next_number
        for piece in _pieces(records, sum(_lengths(records))):
            meta, some = encode_meta(piece), items[first - start : first - start + len(piece)]
            assert meta is not None, "all of them have an id"
            self.partition.at_hand[first] = named = Named(meta, piece)
            self.draft.names.update(named.names)
            self.partition.change(Event.ADOPTED, first, len(piece), created, deadline, meta, some)
            whole: Records = list(piece)
            body = encode_records(whole)
            self.draft.chunks.append(Chunk(first, len(piece), body))
            self.draft.pinned[first] = whole
            self.bodies.offer(first, whole, weigh(whole, len(body)))
            first += len(piece)
        return start

    def want(self, first: int, count: int) -> None:
        """The records of these items will be needed when the turn is done."""
        chunks = self.partition.chunks
        for chunk in [chunks.first_of(first)] if count == 1 else [piece[0] for piece in chunks.pieces(first, count)]:
            if chunk not in self.draft.pinned:
                records = self.bodies.get(chunk)
                if records is None:
                    self.draft.chunk_wants.add(chunk)
                else:
                    self.draft.pinned[chunk] = records

    def want_all(self, runs: Sequence[int]) -> None:
        """The same for several runs of items."""
        if len(runs) == 1:
            self.want(runs[0] >> RUN_BITS, (runs[0] & (RUN_MAX - 1)) + 1)
            return
        for chunk in {piece[0] for piece in self.partition.chunks.pieces_of(runs)}:
            self.want(chunk, 1)

    def want_documents(self, number: int) -> None:
        self.draft.document_wants += document_keys(number, self.partition.documents.get(number, 0))

    def record(self, job: TurnJob, number: int) -> Record:
        """An item's record, read or pinned by the job."""
        first = self.partition.chunks.first_of(number)
        record = job.records[first][number - first]
        assert record is not None, "a live item has a record"
        return record if isinstance(record, Record) else Record(record)

    def seal_turn(self, now: int, settings: QueueSettings, journal_bytes: int) -> TurnJob | None:
        """The job for all that was gathered; None if there is nothing to do."""
        draft, partition = self.draft, self.partition
        if not partition.events and draft.untouched:
            partition.turn -= 1
            return None
        self.draft = Draft()
        turn = None
        if partition.events or draft.documents or draft.chunks:
            turn = self._turn(draft, now, settings, journal_bytes)
        else:
            partition.turn -= 1
            if not draft.reads and not draft.parts:
                return None
        return TurnJob(lane=self, draft=draft, turn=turn, records=draft.pinned)

    def seal_close(self, now: int) -> CloseJob:
        turn = None
        if self.free and self._rows:
            self.partition.begin(now)
            events = encode_entry(self.partition.next_number, [])
            turn = Turn(number=self.partition.turn, at=self.partition.at, events=events)
            turn.snapshot = take_snapshot(self.partition)
        return CloseJob(lane=self, turn=turn)

    def load_job(self, incarnation: str, window: int) -> LoadJob:
        doubt = self.doubt.turn if self.doubt is not None else None
        return LoadJob(lane=self, incarnation=incarnation, window=window, full=self.full, doubt=doubt)

    def _turn(self, draft: Draft, now: int, settings: QueueSettings, journal_bytes: int) -> Turn:
        partition = self.partition
        events = encode_entry(partition.next_number, partition.events)
        turn = Turn(
            number=partition.turn,
            at=partition.at,
            events=events,
            ended=_ended_span(partition.events),
            chunks=draft.chunks,
            chunk_drops=partition.chunk_drops,
            docs=draft.documents,
            doc_drops=partition.document_drops,
        )
        for first in turn.chunk_drops:
            self.bodies.drop(first)
        self.changed_at = partition.at
        partition.events, partition.chunk_drops, partition.document_drops = [], [], []
        self._rows += 1
        self._bytes += len(events)
        if self._rows >= SNAPSHOT_ROWS or self._bytes >= max(SNAPSHOT_BYTES, 2 * self._snapshot_size):
            turn.snapshot = take_snapshot(partition)
            self._snapshot_size = len(turn.snapshot)
            self._rows, self._bytes = 0, 0
        if now >= self._trim_at or partition.turn >= self._trim_turn:
            self._trim_at, self._trim_turn = now + TRIM_INTERVAL_MS, partition.turn + TRIM_INTERVAL_TURNS
            turn.trim = Trim(now - settings.journal_retention_ms, journal_bytes, partition.turn - self._rows)
        return turn

    # ---- jobs that have ended -----------------------------------------------------------------------------

    def keep_read(self, job: TurnJob) -> None:
        """Keep chunks that were read and still have items to lease: their neighbours come next."""
        for first, size in job.sizes.items():
            if self.partition.chunks.holds(first):
                self.bodies.insist(first, job.records[first], size)

    def succeeded(self) -> None:
        self.error = None
        self.probe_wait = 0
        if self.failures:
            self._good_turns += 1
            if self._good_turns >= FORGIVE_TURNS:
                self.failures = 0

    def failed(self, error: Exception, now: int) -> None:
        """Set aside: nothing is believed of it until it has been loaded again."""
        self.status = Status.FAILED
        self.error = str(error) or type(error).__name__
        self.failures += 1
        self._good_turns = 0
        self.full = self.full or isinstance(error, StoreFull)
        self.bodies.clear()
        self.draft = Draft()
        self.probe_at = now + self.probe_wait
        self.probe_wait = min(2 * self.probe_wait or PROBE_MS, PROBE_MS_MAX)

    def again(self, parts: Sequence[Part]) -> None:
        """Parts of a turn that was not written: back to where they came from, before those that came after them."""
        newer, self.waiting = self.waiting, []
        for part in parts:
            part.again(self)
        self.waiting += newer

    def loaded(self, job: LoadJob) -> None:
        assert job.partition is not None
        if not self.known:
            self.mark = job.partition.at
        self.partition = job.partition
        self._rows, self._bytes = job.replayed
        self.status, self.error = Status.OPEN, None
        self.sent.clear()
        self.carrying.clear()
        self.confirming.clear()
        self.compacting = False
        self.changed_at, self.legacy = self.partition.at, None


def meta_lane(store: Store, budget: Budget) -> Lane:
    """The place of the queue's decisions: nothing is ever produced there. It is in the default store."""
    place = PartitionDefinition(partition=META_PARTITION, read_only=True)
    return Lane(place, store, Bodies(budget))


def _pieces(records: list[bytes | Record], size: int) -> list[list[bytes | Record]]:
    if len(records) <= CHUNK_ITEMS_MAX and size <= CHUNK_BYTES_MAX:
        return [records]
    slices = [records[start : start + CHUNK_ITEMS_MAX] for start in range(0, len(records), CHUNK_ITEMS_MAX)]
    return [piece for some in slices for piece in _cut(some)]


def _spans(items: PlainItems) -> Iterator[tuple[int, int]]:
    """The same of payloads alone: from where to where."""
    low, offsets = 0, items.offsets
    while low < len(items):
        high = min(low + CHUNK_ITEMS_MAX, len(items))
        if offsets[high] - offsets[low] > CHUNK_BYTES_MAX:
            high = max(low + 1, bisect_right(offsets, offsets[low] + CHUNK_BYTES_MAX, low, high) - 1)
        yield low, high
        low = high


def _cut(records: list[bytes | Record]) -> list[list[bytes | Record]]:
    lengths = _lengths(records)
    if sum(lengths) <= CHUNK_BYTES_MAX:
        return [records]
    pieces: list[list[bytes | Record]] = [[]]
    room = CHUNK_BYTES_MAX
    for record, length in zip(records, lengths, strict=True):
        if pieces[-1] and length > room:
            pieces.append([])
            room = CHUNK_BYTES_MAX
        pieces[-1].append(record)
        room -= length
    return pieces


def _lengths(records: list[bytes | Record]) -> list[int]:
    try:
        return list(map(len, records))  # type: ignore[arg-type]
    except TypeError:  # not all are bare payloads
        return [len(record.payload if isinstance(record, Record) else record) for record in records]


def _ended_span(events: list[tuple[int, ...]]) -> tuple[int, int] | None:
    low, high = -1, -1
    for event in events:
        if event[0] == _COMPLETED:
            for run in event[2][::2]:  # type: ignore[index]
                first = run >> RUN_BITS
                last = first + (run & (RUN_MAX - 1))
                low = first if low < 0 or first < low else low
                high = last if last > high else high
    return None if low < 0 else (low, high)
