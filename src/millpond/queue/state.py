"""What the parts of a logical queue share: its policy, its lanes, and who waits for what."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from millpond.errors import MillpondError, OutcomeUnknown, Unavailable
from millpond.model import QueueDefinition, QueueSettings
from millpond.queue.lane import Lane
from millpond.queue.rates import RateMeter
from millpond.queue.requests import Arrive, Forget, Produce
from millpond.queue.tokens import TokenReader
from millpond.queue.waiters import Waiters


class QueueState:
    def __init__(
        self, definition: QueueDefinition, lanes: list[Lane], rng: Random, queue_exists: Callable[[str], bool], now: int
    ) -> None:
        self.definition = definition
        self.lanes = {lane.index: lane for lane in lanes}
        self.free: list[Lane] = []  # those that take part in this turn
        self.rng = rng
        self.queue_exists = queue_exists
        self.reader = TokenReader(definition.incarnation)
        self.opened_at = now
        self.rates = RateMeter()
        self.waiters = Waiters()
        self.produces: list[Produce] = []
        self.arrives: list[Arrive] = []
        self.outbox: list[Arrive | Forget] = []  # for other queues
        self.sleepers: list[tuple[int, int, Callable[[], None]]] = []  # operations that pace themselves: a heap

    @property
    def settings(self) -> QueueSettings:
        return self.definition.settings

    @property
    def incarnation(self) -> str:
        return self.definition.incarnation

    @property
    def journal_bytes(self) -> int:
        """A partition's share of what the queue may keep of its journal."""
        return self.settings.journal_bytes_max // len(self.lanes)

    def find_free(self) -> None:
        """Once a turn: a lane does not become busy until the turn is applied."""
        self.free = [lane for lane in self.lanes.values() if lane.free]


def away(lane: Lane, *, issued: bool) -> MillpondError:
    """The error for a request whose lane did not come back in time."""
    why = lane.error or ("its store does not answer" if lane.known else "it has not been opened yet")
    if issued:
        return OutcomeUnknown(
            f"partition {lane.index} failed during the commit ({why}) and has not come back to tell whether it was"
            " written; send the request again with the same request_id, or look for the items first"
        )
    return Unavailable(f"partition {lane.index} is away ({why}); nothing was changed, try again later")
