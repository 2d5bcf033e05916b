"""The promises of a queue as a small machine that judges what a queue makes durable.

The model knows what was asked (`asks`), and sees each commit that happened, be it reported or not, in the journal's
public format, as history does. It keeps its own idea of every item, and each event of a commit must be allowed
by it: time may take a lease only when it is over, an item leaves the line only from its head, nothing ends unless
somebody asked for it or its time has come, and nothing comes back. It shares no code with the queue but the format.
`replies` then judges every answer by the state that is built here.

    scheduled, retrying --due--> ready --leased--> leased --> completed | cancelled | dead | ready | retrying
                                 ready --claimed--> claimed --> completed | dead | ready | retrying

An item that is `gone` is kept here, so that it is known when it should not come back.
"""

from __future__ import annotations

from collections.abc import Iterable

from millpond.history.format import Record
from millpond.model import QueueDefinition
from millpond.queue.requests import AbortStage, ClaimItems
from tests.sim.asks import Ask, Batch, Client
from tests.sim.decided import Decisions
from tests.sim.nouns import Item, Make, Transfer
from tests.sim.rules import Partition


class Queue:
    def __init__(self, model: Model, definition: QueueDefinition) -> None:
        self.model = model
        self.name = definition.name
        self.incarnation = definition.incarnation
        self.window = definition.settings.dedup_window_ms
        self.partitions = {one.partition: Partition(self, one.partition) for one in definition.partitions}
        self.holders: dict[tuple[str, str], list[Item]] = {}  # of keys and ids, the last one last
        self.by_id: dict[str, list[Item]] = {}
        self.origins: dict[bytes, tuple[Batch, int]] = {}
        self.requests: dict[str, list[tuple[Batch, Make]]] = {}
        self.clients: dict[str, Client] = {}
        self.flying: dict[int, Ask] = {}  # asked and not answered
        self.transfers: dict[bytes, Transfer] = {}  # that arrived here
        self.decisions = Decisions(self)
        self.given_up: dict[tuple[str, str], int] = {}  # claims that failed half-way -> items wanted
        self.half_aborted: set[str] = set()  # transactions, likewise
        self.ever_staged: set[tuple[str, str]] = set()  # transaction, chunk
        self.stage_timeout = 0

    def taken(self, name: tuple[str, str], since: int, until: int) -> Item | None:
        """Who had this name, or had it within the window, at some instant of that time."""
        for item in reversed(self.holders.get(name, ())):
            if item.created <= until:
                freed = item.ended_at
                if freed is None or freed >= since or freed + self.window > since:
                    return item
        return None

    def is_coming(self, item_id: str) -> bool:
        """Whether an item of that id is staged, and so may be published at any moment."""
        return any(
            isinstance(record, Record) and record.id == item_id
            for partition in self.partitions.values()
            for chunks in partition.staged.values()
            for chunk in chunks.values()
            for piece in chunk.pieces.values()
            for record in piece
        )

    def of_kind(self, kind: str) -> list[Ask]:
        return [ask for ask in self.flying.values() if ask.kind == kind]


class Model:
    """All queues, and the number of commits so far."""

    def __init__(self, definitions: Iterable[QueueDefinition]) -> None:
        self.step = 0
        self.now = 0
        self.elapsed = 0  # time that has passed, which a restart with a clock that is behind does not take back
        self.on_their_way: dict[bytes, list[Item]] = {}
        self.queues = {one.name: Queue(self, one) for one in definitions}

    def asked(self, ask: Ask) -> None:
        """A request has been submitted."""
        queue = self.queues[ask.queue]
        ask.step = self.step
        for other in queue.flying.values():
            if other.kind == ask.kind:
                ask.shared = other.shared = True
        queue.flying[ask.number] = ask
        if ask.client is not None:
            ask.client.asks.append(ask)
        if ask.batch is not None:
            ask.batch.asks.append(ask)
        for grant in ask.grants:
            if grant is not None and ask not in grant.asks:
                grant.asks.append(ask)
            ask.deadlines.append(0 if grant is None else grant.deadline)

    def settle(self, client: Client) -> None:
        """Once nobody waits under this name, what was leased to it and handed to nobody must be taken back."""
        if not client.asks:
            for grant in client.granted:
                if not grant.over:
                    grant.item.partition.orphans[grant] = None
            client.granted.clear()

    def lost(self, queue: str) -> None:
        """The queue was closed or crashed: nobody waits any more, and what was leased to them runs out by itself."""
        for ask in list(self.queues[queue].flying.values()):
            self.over(ask)
        for client in self.queues[queue].clients.values():
            client.granted.clear()
        for partition in self.queues[queue].partitions.values():
            partition.orphans.clear()

    def over(self, ask: Ask) -> None:
        """It has been answered, or its answer was lost in a crash: it can have no further effect.

        But of what failed in one partition, the commit of another may be under way.
        """
        self.queues[ask.queue].flying.pop(ask.number, None)
        if isinstance(ask.request, ClaimItems) and ask.request.error is not None:
            given_up, name = self.queues[ask.queue].given_up, (ask.request.claim_id, ask.request.owner)
            given_up[name] = max(ask.request.max_items, given_up.get(name, 0))
        if isinstance(ask.request, AbortStage) and ask.request.error is not None:
            self.queues[ask.queue].half_aborted.add(ask.request.txn)
        ask.answered = True
        if ask.client is not None and ask in ask.client.asks:
            ask.client.asks.remove(ask)
        if ask.batch is not None and ask in ask.batch.asks:
            ask.batch.asks.remove(ask)
        for grant in ask.grants:
            if grant is not None and ask in grant.asks:
                grant.asks.remove(ask)
