"""What the engine's behaviour tests stand on: a pond driven by small steps, and stores that fail when told to."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from millpond.errors import NotFound
from millpond.history.format import Record, encode_state
from millpond.model import (
    Claim,
    ClaimEnded,
    Consumer,
    Item,
    ItemPage,
    LeasedItem,
    Published,
    QueueStats,
    RedriveFilter,
    Redriven,
    Result,
    Staged,
    State,
    StateWritten,
)
from millpond.queue.lane import Job
from millpond.queue.logical import LogicalQueue
from millpond.queue.partition import Partition
from millpond.queue.requests import (
    AbortStage,
    Cancel,
    ClaimItems,
    Clear,
    EndClaim,
    Extend,
    GetItem,
    GetStats,
    JudgeClaim,
    JudgeItem,
    Lease,
    ListClaims,
    ListItems,
    MakeReady,
    OpenConsumer,
    Produce,
    PublishStage,
    ReadClaim,
    Redrive,
    Request,
    RetryItem,
    RetryItems,
    StageItems,
    WriteState,
)
from millpond.store.base import JournalRow, Recovered, Store, StoreFailed, StoreFull, Stores, Turn
from tests.drive import Pond

ROUNDS_MAX = 10_000  # at one instant: a queue that wants more is spinning

# ---- a pond driven by hand --------------------------------------------------------------------------------


class SteppedPond(Pond):
    """Runs until nobody wants to run at this instant, or a step at a time."""

    def run(self) -> None:
        for _ in range(ROUNDS_MAX):
            if not self._round():
                return
        raise AssertionError("a queue wants to run for ever at one instant")

    def steps(self, *, backwards: bool = False) -> Generator[None]:
        """The same as `run`, stopping wherever a crash could cut in; the last lane's job first if so told."""
        moved = True
        while moved:
            moved = False
            for queue in list(self.queues.values()):
                wake = queue.tick(self.clock.now())
                yield
                jobs, queue.jobs = queue.jobs, []
                for job in reversed(jobs) if backwards else jobs:
                    job.run()
                    yield
                    queue.finish(job, self.clock.now())
                    yield
                moved = bool(jobs) or self._deliver(queue) or moved or self._due(wake)
                yield

    def submit(self, request: Request, queue: str = "q") -> Any:
        self.queues[queue].submit(request, self.clock.now())
        return request

    def tick(self, queue: str = "q") -> list[Job]:
        """One tick; the jobs that it leaves are the test's to `do`."""
        self.queues[queue].tick(self.clock.now())
        jobs, self.queues[queue].jobs = self.queues[queue].jobs, []
        return jobs

    def do(self, jobs: Sequence[Job], queue: str = "q") -> None:
        for job in jobs:
            job.run()
            self.queues[queue].finish(job, self.clock.now())

    def partition(self, queue: str = "q", index: int = 0) -> Partition:
        return self.queues[queue].state.lanes[index].partition

    def drop(self) -> None:
        """Let go of the stores without a word, as at the end of a test."""
        for queue in self.queues.values():
            for lane in queue.state.everyone:
                lane.store.close()

    def _round(self) -> bool:
        moved = False
        for queue in list(self.queues.values()):
            wake = queue.tick(self.clock.now())
            moved = self._run_jobs(queue) or moved
            moved = self._deliver(queue) or moved or self._due(wake)
        return moved

    def _due(self, wake: int | None) -> bool:
        return wake is not None and wake <= self.clock.now()

    def _deliver(self, queue: LogicalQueue) -> bool:
        outbox, queue.state.outbox = queue.state.outbox, []
        for request in outbox:
            request.done = queue.settle
            if request.target in self.queues:
                self.queues[request.target].submit(request, self.clock.now())
            else:
                request.fail(NotFound(f"there is no queue {request.target!r}"))
        return bool(outbox)

    # ---- the calls --------------------------------------------------------------------------------------------

    def park(self, batch: int = 1, wait: int = 60_000, queue: str = "q", **options: Any) -> Lease:
        """A lease that waits."""
        lease = Lease(batch, wait=wait, **options)
        self.submit(lease, queue)
        self.run()
        return lease

    def retry(self, item: LeasedItem, queue: str = "q", **options: Any) -> Result:
        return self.ask(RetryItems([RetryItem(item.lease, **options)]), queue)[0]  # type: ignore[no-any-return]

    def extend(self, item: LeasedItem, lease_timeout: int | None = None, queue: str = "q") -> Result:
        return self.ask(Extend([item.lease], lease_timeout), queue)[0]  # type: ignore[no-any-return]

    def write_state(self, item: LeasedItem, version: int, document: Any, queue: str = "q") -> StateWritten:
        return self.ask(WriteState(item.lease, version, encode_state(document)), queue)  # type: ignore[no-any-return]

    def watch(self, item_id: str, wait: int = 60_000, queue: str = "q") -> GetItem:
        """A look that waits for the item to end."""
        request = GetItem(item_id, wait)
        self.submit(request, queue)
        self.run()
        return request

    def get(self, item_id: str, queue: str = "q") -> Item:
        return self.ask(GetItem(item_id), queue)  # type: ignore[no-any-return]

    def exists(self, item_id: str, queue: str = "q") -> bool:
        try:
            self.get(item_id, queue)
        except NotFound:
            return False
        return True

    def list(self, state: State | None = None, queue: str = "q", limit: int = 1_000) -> list[Item]:
        page: ItemPage = self.ask(ListItems(state, None, None, (0, 0), limit), queue)
        return [*page.items]

    def cancel(self, *ids: str, queue: str = "q") -> Any:
        return self.ask(Cancel(ids), queue)

    def make_ready(self, *ids: str, queue: str = "q") -> Any:
        return self.ask(MakeReady(ids), queue)

    def clear(self, *states: State, queue: str = "q") -> dict[str, int]:
        return self.ask(Clear(states), queue)  # type: ignore[no-any-return]

    def redrive(
        self,
        ids: Sequence[str] | None = None,
        chosen: RedriveFilter | None = None,
        queue: str = "q",
        **options: Any,
    ) -> Redriven:
        return self.ask(Redrive(ids, chosen or RedriveFilter(), **options), queue)  # type: ignore[no-any-return]

    def stats(self, queue: str = "q") -> QueueStats:
        return self.ask(GetStats(), queue)  # type: ignore[no-any-return]

    # ---- claims and stages --------------------------------------------------------------------------------------

    def claim(self, claim_id: str = "c", max_items: int = 10_000, queue: str = "q", **options: Any) -> Claim:
        return self.ask(ClaimItems(claim_id, max_items, **options), queue)  # type: ignore[no-any-return]

    def read(self, claim_id: str = "c", part: int | None = None, limit: int = 1_000, **options: Any) -> Sequence[Item]:
        """All pages of a part, or of all parts one after the other."""
        claims = {claim.claim_id: claim for claim in self.claims()}
        found: Sequence[Item] = []
        parts = 1 if claim_id not in claims else len(claims[claim_id].parts)
        for one in range(parts) if part is None else [part]:
            after: str | None = "0"
            while after is not None:
                page: ItemPage = self.ask(ReadClaim(claim_id, one, int(after), limit, **options))
                found, after = [*found, *page.items], page.next
        return found

    def claims(self) -> Sequence[Claim]:
        return self.ask(ListClaims())  # type: ignore[no-any-return]

    def judge(self, *verdicts: JudgeItem, claim_id: str = "c", epoch: int | None = None) -> Sequence[Result]:
        return self.ask(JudgeClaim(claim_id, verdicts, epoch))  # type: ignore[no-any-return]

    def complete_claim(self, claim_id: str = "c", epoch: int | None = None) -> ClaimEnded:
        return self.ask(EndClaim(claim_id, True, epoch))  # type: ignore[no-any-return]

    def release_claim(self, claim_id: str = "c", epoch: int | None = None) -> ClaimEnded:
        return self.ask(EndClaim(claim_id, False, epoch))  # type: ignore[no-any-return]

    def open_consumer(self, consumer: str = "s") -> Consumer:
        return self.ask(OpenConsumer(consumer))  # type: ignore[no-any-return]

    def stage(self, chunk: str, *records: bytes | Record, txn: str = "t") -> int:
        staged: Staged = self.ask(StageItems(txn, chunk, [*records], 0))
        return staged.items

    def publish(self, *chunks: str, txn: str = "t") -> Published:
        return self.ask(PublishStage(txn, chunks))  # type: ignore[no-any-return]

    def abort(self, txn: str = "t") -> int:
        staged: Staged = self.ask(AbortStage(txn))
        return staged.items

    def counts(self, queue: str = "q") -> dict[str, int]:
        """How many there are of each state that there is."""
        return {str(state): count for state, count in self.stats(queue).counts.items() if count}

    def counts_now(self, queue: str = "q") -> dict[str, int]:
        """The same from memory, in the middle of things."""
        counts: dict[str, int] = {}
        for lane in self.queues[queue].state.lanes.values():
            for state, count in lane.partition.counts().items():
                if count:
                    counts[str(state)] = counts.get(str(state), 0) + count
        return counts

    def kill(self, item: LeasedItem, queue: str = "q", error: str | None = None) -> None:
        assert self.retry(item, queue, dead=True, error=error).ok


def spread(pond: SteppedPond, count: int, start: int = 0) -> None:
    """One request an item, so that they go round the partitions."""
    for payload in numbered(count, start):
        pond.produce(payload)


def verdict_dead(item_id: str, error: str | None = None) -> JudgeItem:
    return JudgeItem(item_id, True, None, error)


def verdict_retry(item_id: str, delay: int | None = None, error: str | None = None) -> JudgeItem:
    return JudgeItem(item_id, False, delay, error)


def payloads(items: Sequence[LeasedItem | Item]) -> list[bytes]:
    return [item.payload for item in items]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def keyed(key: str, payload: bytes = b"", **fields: Any) -> Record:
    return Record(payload, key=key, **fields)


def request(*records: bytes | Record, name: bytes | None = None, **options: Any) -> Produce:
    named = any(isinstance(record, Record) and (record.id or record.key) for record in records)
    return Produce(list(records), 0, request=name, named=named, **options)


# ---- stores that fail -------------------------------------------------------------------------------------


class Faults:
    """What goes wrong in one partition's store until the test says otherwise."""

    def __init__(self) -> None:
        self.lose = 0  # so many commits fail, and are not written
        self.hide = 0  # so many commits fail, though they are written
        self.spare = 0  # of those, so many are not meant: they come before
        self.away = False  # nothing works, not even recover
        self.unreadable = False
        self.full = False  # what produces fails; all fails until the reserve is given up
        self.relieved = False
        self.commits = 0


class FaultyStore:
    blocking = False  # the tests run its jobs themselves

    def __init__(self, inner: Store, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._failed = False

    def recover(self) -> Recovered:
        if self._faults.away:
            raise StoreFailed("the store is away")
        self._failed = False
        return self._inner.recover()

    def commit(self, turn: Turn) -> None:
        self._check()
        faults = self._faults
        faults.commits += 1
        if faults.full and (turn.chunks or not faults.relieved):
            self._failed = True
            raise StoreFull("no room")
        if faults.spare:
            faults.spare -= 1
            self._inner.commit(turn)
            return
        if faults.lose:
            faults.lose -= 1
            self._failed = True
            raise StoreFailed("the commit was lost")
        self._inner.commit(turn)
        if faults.hide:
            faults.hide -= 1
            self._failed = True
            raise StoreFailed("the commit was written, but nobody was told")

    def read(self, chunks: Sequence[int], docs: Sequence[int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        self._check()
        if self._faults.unreadable:
            self._failed = True
            raise StoreFailed("it cannot be read")
        return self._inner.read(chunks, docs)

    def journal(self, after: int, limit: int) -> list[JournalRow]:
        self._check()
        return self._inner.journal(after, limit)

    def ended(self, low: int, high: int, since: int) -> Iterator[JournalRow]:
        self._check()
        return self._inner.ended(low, high, since)

    def relieve(self, full: bool) -> bool:
        self._faults.relieved = full or self._faults.full
        return not self._faults.relieved

    def size(self) -> int:
        return self._inner.size()

    def check(self) -> list[str]:
        return self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def _check(self) -> None:
        if self._faults.away:
            self._failed = True
        if self._failed:
            raise StoreFailed("the store has failed")


class FaultyStores:
    def __init__(self, inner: Stores) -> None:
        self._inner = inner
        self._faults: dict[tuple[str, int], Faults] = {}

    def of(self, partition: int = 0, queue: str = "q") -> Faults:
        return self._faults.setdefault((f"inc{queue}", partition), Faults())

    def open(self, incarnation: str, partition: int, durability: str) -> Store:
        faults = self._faults.setdefault((incarnation, partition), Faults())
        return FaultyStore(self._inner.open(incarnation, partition, durability), faults)

    def destroy(self, incarnation: str, partitions: Sequence[int]) -> None:
        self._inner.destroy(incarnation, partitions)
