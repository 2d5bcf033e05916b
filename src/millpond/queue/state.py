"""What the parts of a logical queue share: its policy, its lanes, and who waits for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Protocol

from millpond.errors import MillpondError, OutcomeUnknown, Unavailable
from millpond.model import QueueDefinition
from millpond.queue.lane import NEVER, Lane
from millpond.queue.pace import Pace
from millpond.queue.rates import RateMeter
from millpond.queue.requests import Arrive, Forget, Lease, Produce, Request
from millpond.queue.tokens import TokenReader
from millpond.queue.waiters import Waiters


class Reader(Protocol):
    """An operation that waits for an item to be ready, `until` that instant."""

    request: Request
    until: int

    def resume(self, value: None) -> None: ...

    def stop(self, error: MillpondError) -> None: ...


class Watcher(Protocol):
    """An operation that waits for an item to end."""

    @property
    def until(self) -> int: ...

    order: int

    def resume(self, item: None) -> None: ...

    def stop(self, error: MillpondError) -> None: ...


class Landing(Protocol):
    """An operation that waits for items on their way to another partition."""

    def wake(self) -> None: ...

    def stop(self, error: MillpondError) -> None: ...


class QueueState:
    def __init__(
        self,
        definition: QueueDefinition,
        lanes: list[Lane],
        meta: Lane,
        rng: Random,
        queue_exists: Callable[[str], bool],
        now: int,
        pace: Pace,
    ) -> None:
        self.configure(definition)
        self.lanes = {lane.index: lane for lane in lanes}
        self.meta = meta  # the lane of the queue's decisions: not opened until somebody needs it
        self.everyone = lanes.copy()  # all the lanes that are in use: with that one, once it is, and those that are new
        self.pace = pace
        self.carry_at = NEVER  # when more of their items may be carried, if that waits
        self.free: list[Lane] = []  # those with items that take part in this turn
        self.turning: list[Lane] = []  # all that do
        self.now = now
        self.rng = rng
        self.queue_exists = queue_exists
        self.reader = TokenReader(definition.incarnation)
        self.opened_at = now
        self.rates = RateMeter()
        self.waiters: Waiters[Lease] = Waiters()
        self.watches: Waiters[Watcher] = Waiters()  # who waits for an item to end
        self.produces: list[Produce] = []
        self.arrives: list[Arrive] = []
        self.outbox: list[Arrive | Forget] = []  # for other queues
        self.sleepers: list[tuple[int, int, Callable[[], None]]] = []  # operations that pace themselves: a heap
        self.landings: dict[Landing, None] = {}
        self.readers: list[Reader] = []  # operations that wait for an item to be ready, and until when
        self.making: set[str] = set()  # claims and transactions that a request has in hand: not to be tidied up
        self.taking: set[bytes] = set()  # the nonces of claims in the making
        self.unsettled = False  # some partition may have to follow a decision
        self.sweep_at = NEVER  # when something that was staged has lain long enough
        self.confirmed: dict[
            str, set[int]
        ] = {}  # decisions that only have to be settled -> lanes seen to have followed

    def configure(self, definition: QueueDefinition) -> None:
        self.definition = definition
        self.settings = definition.settings  # at hand, for it is asked for several times a turn
        running = definition.rebalance is not None and not definition.rebalance.finished_at
        read_only = {one.partition for one in definition.partitions if one.read_only}
        self.draining: set[int] = read_only if running else set()  # partitions that a rebalance removes

    @property
    def incarnation(self) -> str:
        return self.definition.incarnation

    @property
    def order(self) -> int:
        """Tells the orders apart in which `walk` goes: each rebalance has its own."""
        return 0 if self.definition.rebalance is None else self.definition.rebalance.started_at

    def walk(self) -> Iterator[Lane]:
        """All with items, those first whose items may go to the others: who takes one after the other misses none.

        Lanes that come or go meanwhile are taken or left out.
        """
        taken: set[int] = set()
        while left := [lane for lane in self.lanes.values() if lane.index not in taken]:
            lane = min(left, key=self.place_of)
            taken.add(lane.index)
            yield lane

    def place_of(self, lane: Lane) -> tuple[bool, int]:
        return lane.index not in self.draining, lane.index

    @property
    def journal_bytes(self) -> int:
        """A partition's share of what the queue may keep of its journal."""
        return self.settings.journal_bytes_max // len(self.lanes)

    def find_free(self) -> None:
        """Once a turn: a lane does not become busy until the turn is applied."""
        self.free = self.turning = [lane for lane in self.lanes.values() if lane.free]
        if self.meta in self.everyone:
            self.turning = [lane for lane in self.everyone if lane.free]

    def want_meta(self) -> Lane:
        """Somebody needs the queue's decisions: from here on its lane is looked after like the others."""
        if self.meta not in self.everyone:
            self.everyone.append(self.meta)
        return self.meta


def overtaken(lane: Lane) -> MillpondError:
    """The error for a request whose turn may have been written, and after it the turns of another process."""
    return OutcomeUnknown(
        f"another process has had partition {lane.index} meanwhile, so what became of the request is not known; send it"
        " again with the same request_id, or look for the items first, and run one millpond with these queues"
    )


def away(lane: Lane, *, issued: bool) -> MillpondError:
    """The error for a request whose lane did not come back in time."""
    why = lane.error or ("its store does not answer" if lane.known else "it has not been opened yet")
    if issued:
        return OutcomeUnknown(
            f"partition {lane.index} failed during the commit ({why}) and has not come back to tell whether it was"
            " written; send the request again with the same request_id, or look for the items first"
        )
    return Unavailable(f"partition {lane.index} is away ({why}); nothing was changed, try again later")
