"""The nouns of the model: items, their deliveries, produces that were carried out, transfers between queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millpond.history.format import Record
from tests.sim.asks import Ask, Client

if TYPE_CHECKING:
    from tests.sim.rules import Partition

SCHEDULED, READY, LEASED, RETRYING = "scheduled", "ready", "leased", "retrying"
CLAIMED, COMPLETED, DEAD, CANCELLED, GONE = "claimed", "completed", "dead", "cancelled", "gone"
WAITING = (SCHEDULED, READY, RETRYING)
STATES = (*WAITING, LEASED, CLAIMED, COMPLETED, DEAD, CANCELLED)


class Violation(Exception):
    """A promise was broken."""


class Item:
    """`changes` are its states so far, each with the number of the commit that brought it."""

    __slots__ = (
        "arrived", "attempts", "cancel_asked", "carried", "changed_at", "changes", "correlation_id", "created",
        "deliveries", "docs", "due", "ended_as", "ended_at", "error", "expire_deadline", "hold", "id", "kept_until",
        "lease", "left", "moved_step", "moving_to", "number", "partition", "payload", "places", "priority", "reason",
        "record", "returns", "state", "token_floor", "version",
    )  # fmt: skip

    def __init__(self, partition: Partition, number: int, record: Record, deadline: int) -> None:
        self.partition = partition
        self.number = number
        self.record = record
        self.payload = record.payload
        self.priority = record.priority
        self.id = record.id or f"{partition.queue.incarnation}-{partition.index}-{number}"
        self.correlation_id = record.correlation_id  # a generated one is learnt when it is first seen
        self.created = partition.at
        self.expire_deadline = record.expire_deadline or deadline
        self.state = ""
        self.changes: list[tuple[int, str]] = []
        self.attempts = 0
        self.deliveries = 0
        self.token_floor = 0
        self.lease: Grant | None = None
        self.hold: Hold | None = None
        self.due = 0
        self.version = 0
        self.docs: list[Any] = [None]  # the state document, or those of which it is one
        self.error: str | None = None
        self.reason: str | None = None  # why it died, or its letter's source
        self.cancel_asked = False
        self.kept_until = 0
        self.moving_to: str | None = None
        self.changed_at = self.created  # its state, the last time
        self.ended_as: str | None = None  # the state that it came to its end in, be it kept or not
        self.ended_at: int | None = None  # when it was completed, cancelled, moved on or removed
        self.returns = False  # it moves back to where it came from, not to a dead queue
        self.arrived = False  # in the queue that it moves to
        self.carried = False  # on its way to another partition
        self.left = (-1, "")  # when its last partition let go of it, and as what
        self.moved_step = -1  # the commit that brought it into its partition, if that is not its first
        self.places = {partition.index}  # all the partitions that it was in

    def states_since(self, step: int) -> set[str]:
        """All the states that it was in at commit `step` and later."""
        found = set()
        for at, state in reversed(self.changes):
            found.add(state)
            if at <= step:
                return found
        return found | {GONE}  # it did not exist yet

    def was_there(self, at: int) -> bool:
        """Whether it had not ended before that instant."""
        return self.ended_at is None or self.ended_at >= at

    def __repr__(self) -> str:
        return f"item {self.id} ({self.state})"


class Grant:
    """One delivery of one item. `over` tells how it ended, `takers` are the requests that may have ended it."""

    __slots__ = (
        "asks", "attempts", "client", "completed_at", "deadline", "deliveries", "docs", "error", "fencing_token",
        "given_up", "in_doubt", "item", "number", "over", "takers", "token", "version",
    )  # fmt: skip

    def __init__(self, item: Item, number: int, client: Client, deadline: int) -> None:
        self.item = item
        self.number = number
        self.fencing_token = number
        self.client = client
        self.in_doubt = False  # made by a commit that was said to have failed
        self.given_up = False  # its holder has gone after it was handed out
        self.deadline = deadline
        self.attempts = item.attempts
        self.deliveries = item.deliveries
        self.version = item.version
        self.docs = item.docs
        self.error = item.error
        self.token: str | None = None
        self.asks: list[Ask] = []  # in flight, with this delivery's token
        self.over = ""
        self.takers: list[Ask] = []
        self.completed_at: int | None = None


class Hold:
    """What one partition has taken for a claim, in order, and the verdicts on it: dead, delay, error."""

    __slots__ = ("claim_id", "items", "judged", "nonce", "sealed")

    def __init__(self, nonce: bytes, claim_id: str) -> None:
        self.nonce = nonce
        self.claim_id = claim_id
        self.items: dict[int, Item] = {}
        self.judged: dict[int, tuple[bool, int | None, str | None]] = {}
        self.sealed = False


class Claim:
    """A sealed claim: its items for ever, part by part, and how they looked then."""

    __slots__ = ("claim_id", "counted", "ended_step", "ending", "looks", "nonce", "parts", "step")

    def __init__(self, nonce: bytes, claim_id: str, step: int, parts: list[list[Item]]) -> None:
        self.nonce = nonce
        self.claim_id = claim_id
        self.step = step
        self.parts = parts
        self.ending = 0
        self.ended_step: int | None = None
        self.counted = [0, 0, 0]  # completed, retried, dead
        self.looks = {
            item: (item.attempts, item.deliveries, item.version, item.error, item.reason, item.expire_deadline)
            for part in parts
            for item in part
        }

    def open_since(self, step: int) -> bool:
        return self.step <= step and not self.ending

    def __repr__(self) -> str:
        return f"claim {self.claim_id} ({self.ending}, {[len(part) for part in self.parts]})"


class Chunk:
    """A staged chunk of a transaction in one partition: its records, by the number of the first of each piece."""

    __slots__ = ("at", "pieces", "step")

    def __init__(self, at: int, step: int) -> None:
        self.at = at
        self.step = step
        self.pieces: dict[int, list[bytes | Record]] = {}


class Make:
    """A produce that was carried out: its new items by their place in the request."""

    __slots__ = ("at", "elapsed", "items", "partition", "reply", "takers")

    def __init__(self, at: int, partition: Partition, takers: list[Ask]) -> None:
        self.at = at
        self.elapsed = partition.queue.model.elapsed
        self.partition = partition
        self.takers = takers
        self.items: dict[int, Item] = {}
        self.reply: list[tuple[str, str | None, bool]] | None = None  # once it was given: it stays the same


class Transfer:
    """An item on its way to another queue, by the name that the target remembers it under."""

    __slots__ = ("forgot", "item", "moved", "source")

    def __init__(self, source: Item, item: Item) -> None:
        self.source = source
        self.item = item
        self.moved = False
        self.forgot = False
