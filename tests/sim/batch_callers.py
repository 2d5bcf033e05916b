"""Random requests of batch readers and writers: claims, verdicts, transactions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from millpond.history.format import Record
from millpond.model import DeadReason
from millpond.queue.requests import (
    AbortStage,
    Bury,
    ClaimItems,
    EndClaim,
    JudgeClaim,
    JudgeItem,
    ListClaims,
    OpenConsumer,
    PublishStage,
    ReadClaim,
    Request,
    StageItems,
)
from tests.drive import plain_items
from tests.sim import asks
from tests.sim.asks import Ask
from tests.sim.decided import Decisions, split

if TYPE_CHECKING:
    from tests.sim.consumers import Consumers

READERS = ("s", "u")  # consumers
CHUNKS = ("w", "x", "y", "z")
NAMES = 6  # that were used before and are used again

WEIGHTS = {
    asks.CONSUMER: 1.2, asks.CLAIM: 6, asks.CLAIM_READ: 4, asks.VERDICT: 4, asks.CLAIM_END: 5, asks.CLAIMS: 1,
    asks.STAGE: 7, asks.PUBLISH: 5, asks.ABORT: 0.8, asks.BURY: 1.5,
}  # fmt: skip


class BatchCallers:
    """All of one queue. Who reads what the model knows is a reader that remembers what it was told."""

    def __init__(self, consumers: Consumers) -> None:
        self.consumers = consumers
        self.rng = consumers.rng
        self.makers: dict[str, Callable[[], Ask]] = {
            asks.CONSUMER: self._open,
            asks.CLAIM: self._claim,
            asks.CLAIM_READ: self._read,
            asks.VERDICT: self._verdict,
            asks.CLAIM_END: self._end,
            asks.CLAIMS: self.listing,
            asks.STAGE: self._stage,
            asks.PUBLISH: self._publish,
            asks.ABORT: self._abort,
            asks.BURY: self._bury,
        }
        self._names = 0
        self._claims = [""]  # plain ones, the last ones used
        self._txns: list[str] = []
        self._jobs = 0
        self.contents: dict[tuple[str, str], list[bytes | Record]] = {}

    @property
    def _decisions(self) -> Decisions:
        return self.consumers.model.queues[self.consumers.queue].decisions

    def _ask(self, kind: str, request: Request, claim_id: str = "", epoch: int | None = None) -> Ask:
        ask = self.consumers.ask(kind, request)
        numbered = split(claim_id)
        ask.epoch = epoch
        if numbered is not None:
            decisions = self._decisions
            ask.then = decisions.epochs.get(numbered[0], 0), decisions.last_completed.get(numbered[0], 0)
            ask.wrong = epoch is not None and not ask.then[0]
        else:
            ask.wrong = epoch is not None
        return ask

    # ---- claims ---------------------------------------------------------------------------------------------

    def _open(self) -> Ask:
        return self._ask(asks.CONSUMER, OpenConsumer(self.rng.choice(READERS)))

    def _epoch(self, claim_id: str, *, needed: bool) -> int | None:
        """Mostly the right one, sometimes that of a reader that was fenced off, or none."""
        numbered, dice = split(claim_id), self.rng.random()
        if numbered is None:
            return 1 if dice < 0.03 else None
        epoch = self._decisions.epochs.get(numbered[0], 0)
        if dice < 0.1 and epoch > 1:
            return epoch - 1
        return None if dice < (0.13 if needed else 0.3) else epoch or 1

    def _claim(self) -> Ask:
        rng = self.rng
        if rng.random() < 0.5:
            consumer = rng.choice(READERS)
            number = self._decisions.last_completed.get(consumer, 0) + 1
            if rng.random() < 0.1:
                number = max(1, number + rng.choice((-2, -1, 1)))
            claim_id = f"{consumer}:{number}"
        elif rng.random() < 0.3:
            claim_id = rng.choice(self._claims) or "c0"
        else:
            self._names += 1
            claim_id = f"c{self._names}"
            self._claims = [*self._claims, claim_id][-NAMES:]
        epoch = self._epoch(claim_id, needed=True)
        request = ClaimItems(
            claim_id,
            rng.choice((1, 3, 10, 1_000, 1_000)),
            rng.choice((None, None, None, 1, 12, 40)),
            rng.choice((1, 1, 2, 5)),
            rng.choice((0, 0, 0, 200, 3_000, 20_000)),
            epoch,
            rng.choice(("", "me", "you")),
        )
        ask = self._ask(asks.CLAIM, request, claim_id, epoch)
        ask.wrong = ask.wrong or (split(claim_id) is not None and (epoch is None or not ask.then[0]))
        return ask

    def listing(self) -> Ask:
        return self._ask(asks.CLAIMS, ListClaims())

    def _a_claim(self) -> str:
        """Mostly one that is there."""
        claims = self._decisions.open_claims()
        if claims and self.rng.random() < 0.85:
            return self.rng.choice(claims).claim_id
        used = list(self._decisions.history)[-NAMES:]
        return self.rng.choice([*used, "nothing", "s:1"])

    def _none_there(self) -> bool:
        return not self._decisions.open_claims() and self.rng.random() < 0.7

    def _read(self) -> Ask:
        if self._none_there():
            return self._claim()
        rng, claim_id = self.rng, self._a_claim()
        claim = self._decisions.claims.get(claim_id)
        parts = len(claim.parts) if claim is not None else 1
        part = rng.randrange(parts) if rng.random() < 0.97 else parts
        items = len(claim.parts[part]) if claim is not None and part < parts else 1
        after = 0 if rng.random() < 0.7 else rng.randrange(items + 1)
        epoch = self._epoch(claim_id, needed=False)
        request = ReadClaim(claim_id, part, after, rng.choice((1, 3, 1_000, 1_000)), epoch)
        return self._ask(asks.CLAIM_READ, request, claim_id, epoch)

    def _verdict(self) -> Ask:
        if self._none_there():
            return self._claim()
        rng, claim_id = self.rng, self._a_claim()
        claim = self._decisions.claims.get(claim_id)
        items = [item.id for part in claim.parts for item in part] if claim is not None else []
        verdicts = []
        for _ in range(self.consumers.few(4)):
            item_id = rng.choice(items) if items and rng.random() < 0.9 else self.consumers.an_id()
            dead = rng.random() < 0.4
            delay = None if dead or rng.random() < 0.4 else rng.choice((0, 1, 700, 5_000))
            error = self.consumers.error() if rng.random() < 0.6 else None
            verdicts.append(JudgeItem(item_id, dead, delay, error))
        epoch = self._epoch(claim_id, needed=False)
        return self._ask(asks.VERDICT, JudgeClaim(claim_id, verdicts, epoch), claim_id, epoch)

    def _end(self) -> Ask:
        if self._none_there():
            return self._claim()
        claim_id = self._a_claim()
        epoch = self._epoch(claim_id, needed=False)
        return self._ask(asks.CLAIM_END, EndClaim(claim_id, self.rng.random() < 0.65, epoch), claim_id, epoch)

    # ---- stages ---------------------------------------------------------------------------------------------

    def _txn(self) -> str:
        rng = self.rng
        if not self._txns or rng.random() < 0.1:
            self._names += 1
            self._jobs += rng.random() < 0.5
            self._txns = [*self._txns, rng.choice((f"t{self._names}", f"job:{max(1, self._jobs)}"))][-NAMES:]
        return rng.choice(self._txns[-2:]) if rng.random() < 0.85 else rng.choice(self._txns)

    def _stage(self) -> Ask:
        rng, txn = self.rng, self._txn()
        staged = [chunk for one, chunk in self.contents if one == txn]
        chunk = rng.choice(staged) if staged and rng.random() < 0.25 else rng.choice(CHUNKS)
        if (txn, chunk) not in self.contents:
            self.contents[txn, chunk] = [self._record() for _ in range(self.consumers.few(5))]
        records = self.contents[txn, chunk]
        plain = [record for record in records if isinstance(record, bytes)]
        given = plain_items(plain) if len(plain) == len(records) else [copy(record) for record in records]
        ask = self._ask(asks.STAGE, StageItems(txn, chunk, given, 30 * len(records)))
        ask.records = records
        return ask

    def _record(self) -> bytes | Record:
        return self.consumers.payload() if self.rng.random() < 0.5 else self.consumers.named_record(0.5, 0.2)

    def _publish(self) -> Ask:
        rng, txn = self.rng, self._txn()
        chunks = [chunk for one, chunk in self.contents if one == txn and (one, chunk) in self._staged()]
        if len(chunks) < 2 and rng.random() < 0.9:
            return self._stage()
        if chunks and rng.random() < 0.2:
            chunks.remove(rng.choice(chunks))
        if rng.random() < 0.1:
            chunks.append(rng.choice(("missing", *CHUNKS)))
        return self._ask(asks.PUBLISH, PublishStage(txn, list(dict.fromkeys(chunks))))

    def _staged(self) -> set[tuple[str, str]]:
        return self.consumers.model.queues[self.consumers.queue].ever_staged

    def _abort(self) -> Ask:
        return self._ask(asks.ABORT, AbortStage(self._txn()))

    # ---- bury -----------------------------------------------------------------------------------------------

    def _bury(self) -> Ask:
        ids = list({self.consumers.an_id(): None for _ in range(self.consumers.few(4))})
        error = self.consumers.error() if self.rng.random() < 0.6 else None
        ask = self._ask(asks.BURY, Bury(ids, self.rng.choice(list(DeadReason)), error))
        ask.ids = ids
        return ask

    # ---- the end --------------------------------------------------------------------------------------------

    def finishing(self) -> list[Ask]:
        """Requests that bring to an end what nobody else would."""
        queue = self.consumers.model.queues[self.consumers.queue]
        found = []
        for claim in self._decisions.open_claims():
            found.append(self._ask(asks.CLAIM_END, EndClaim(claim.claim_id, self.rng.random() < 0.7), claim.claim_id))
        staged = {txn: None for partition in queue.partitions.values() for txn in partition.staged}
        return found + [self._ask(asks.ABORT, AbortStage(txn)) for txn in staged]


def copy(record: bytes | Record) -> bytes | Record:
    """The engine gets its own, so that a change in it would be seen."""
    if isinstance(record, bytes):
        return record
    return Record(*(getattr(record, field) for field in Record.__struct_fields__))
