"""What the simulator has asked, as the model sees it: who asked for what, when, and how it was answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from millpond.history.format import Record
from millpond.model import OnConflict, RedriveFilter
from millpond.queue.requests import Request, RetryItem, Tokens

if TYPE_CHECKING:
    from tests.sim.nouns import Grant, Make

# Kinds of requests, the rows of the pair table.
PRODUCE, PRODUCE_NAMED, LEASE, LEASE_WAIT = "produce", "produce named", "lease", "lease wait"
COMPLETE, RETRY, EXTEND, STATE = "complete", "retry", "extend", "state"
CANCEL, CLEAR, GET, LIST, STATS, REDRIVE, CONFIGURE = "cancel", "clear", "get", "list", "stats", "redrive", "configure"
BURY, CONSUMER, CLAIM, CLAIM_READ, VERDICT, CLAIM_END = (
    "bury",
    "open consumer",
    "claim",
    "claim read",
    "verdict",
    "claim end",
)
CLAIMS, STAGE, PUBLISH, ABORT = "list claims", "stage", "publish", "abort"
GET_WAIT, MAKE_READY = "get wait", "make ready"
KINDS = (
    PRODUCE, PRODUCE_NAMED, LEASE, LEASE_WAIT, COMPLETE, RETRY, EXTEND, STATE, CANCEL, CLEAR, GET, LIST, STATS,
    REDRIVE, CONFIGURE, BURY, CONSUMER, CLAIM, CLAIM_READ, VERDICT, CLAIM_END, CLAIMS, STAGE, PUBLISH, ABORT,
    GET_WAIT, MAKE_READY,
)  # fmt: skip


class Batch:
    """The content of a produce, which may be sent several times under one request id. Payloads are never used twice."""

    __slots__ = ("asks", "makes", "on_conflict", "records", "request_id")

    def __init__(self, records: list[bytes | Record], on_conflict: OnConflict, request_id: str | None) -> None:
        self.records = records
        self.on_conflict = on_conflict
        self.request_id = request_id
        self.asks: list[Ask] = []  # in flight
        self.makes: list[Make] = []

    def names(self, index: int) -> list[tuple[str, str]]:
        record = self.records[index]
        return names_of(record) if isinstance(record, Record) else []

    def names_all(self) -> set[tuple[str, str]]:
        return {name for index in range(len(self.records)) for name in self.names(index)}


def names_of(record: Record) -> list[tuple[str, str]]:
    """What must be unique in a queue: own ids and keys."""
    names = []
    if record.id is not None:
        names.append(("id", record.id))
    if record.key is not None:
        names.append(("key", record.key))
    return names


class Client:
    """Those who lease under one name. Deliveries go to a name; whose they are is seen in the answers."""

    __slots__ = ("asks", "granted", "left", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.asks: list[Ask] = []  # in flight
        self.granted: list[Grant] = []  # and not handed to anybody yet
        self.left = False  # one of them has gone, or was told to give up


class Ask:
    """One request. `at` is its arrival on the queue's clock, `step` how many commits there had been by then."""

    __slots__ = (
        "answered", "at", "at_rest", "batch", "chosen", "cleared", "client", "deadlines", "document", "dry_run",
        "epoch", "extended", "gone", "grants", "handed", "ids", "kind", "letters", "moved", "noted", "number", "opened",
        "queue", "records", "request", "retries", "shared", "state", "states", "step", "stirred", "then", "timeout",
        "version", "wanted", "wrong",
    )  # fmt: skip

    def __init__(self, number: int, kind: str, queue: str, request: Request) -> None:
        self.number = number
        self.kind = kind
        self.queue = queue
        self.request = request
        self.at = 0
        self.step = 0
        self.answered = False
        self.gone = False
        self.stirred = False  # something was changed on its behalf
        self.shared = False  # another request of its kind was in flight with it: counts cannot be told apart
        self.batch: Batch | None = None
        # Of a lease: who, how many at most, for how long, and the deliveries that were handed out.
        self.client: Client | None = None
        self.wanted = 0
        self.timeout: int | None = None
        self.handed: list[Grant] = []
        # Of requests with tokens: the delivery that each token stands for (None: mangled), and its deadline then.
        self.grants: list[Grant | None] = []
        self.deadlines: list[int] = []
        self.retries: Sequence[RetryItem] = ()
        self.extended: dict[Grant, int] = {}
        self.version = 0
        self.document: Any = None
        # Of requests by id or over all items.
        self.ids: Sequence[str] = ()
        self.state: str | None = None
        self.states: Sequence[str] = ()
        self.at_rest: frozenset[int] = frozenset()  # partitions that were when the answer was made
        self.cleared: dict[str, int] = {}
        self.chosen: RedriveFilter | None = None
        self.letters = False
        self.dry_run = False
        self.moved = 0
        # Of claims and stages: the epoch sent, what its consumer was at then, whether it must be refused, …
        self.epoch: int | None = None
        self.then: tuple[int, int] = (0, 0)
        self.wrong = False
        self.opened: dict[int, int] = {}  # epochs that were begun for it -> the last completed then
        self.noted: set[str] = set()  # items on which a verdict was noted for it, or the transaction it has dropped
        self.records: list[bytes | Record] = []

    def waits_for(self, grant: Grant) -> bool:
        """Whether the token of this delivery has no answer yet; those of a request may come one by one."""
        assert isinstance(self.request, Tokens)
        answered = self.request.gathered
        return not self.request.results and any(i not in answered for i, of in enumerate(self.grants) if of is grant)

    def __repr__(self) -> str:
        return f"{self.kind} {self.number}"
