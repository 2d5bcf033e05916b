"""The table of calls: `POST /v1/<name>`, each with what it takes and what it answers with."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from millpond.model import (
    AuditPage,
    Claim,
    ClaimEnded,
    Consumer,
    JournalPage,
    Published,
    QueueInfo,
    QueuePage,
    QueueStats,
    Rebalance,
    Redriven,
    Staged,
    StateWritten,
)
from millpond.wire import replies, requests


class Call(Struct, frozen=True):
    """`built` calls are answered, the others are a promise (501). `purpose` is for the schema and its page.

    `arrow` says what may be an Arrow stream too, of items: the body that is sent, or the one that is answered.
    """

    name: str
    request: type[Struct]
    reply: type[Any]
    purpose: str
    built: bool = True
    arrow: Literal["", "request", "reply"] = ""


_TABLE = (
    Call("queues.create", requests.CreateQueue, QueueInfo, "Make a queue."),
    Call("queues.update", requests.UpdateQueue, QueueInfo, "Change a queue's policy; what is left out stays."),
    Call("queues.info", requests.NamedQueue, QueueInfo, "A queue's policy and its partitions."),
    Call("queues.delete", requests.DeleteQueue, replies.Empty, "Delete a queue; with `force` one that has items."),
    Call("queues.list", requests.ListQueues, QueuePage, "The queues, in order of name, a page at a time."),
    Call("queue.produce", requests.Produce, replies.ProduceReply, "Add items: all of them or none, durably."),
    Call("queue.lease", requests.Lease, replies.LeaseReply, "Take items to work on; `wait` for the first one."),
    Call("queue.subscribe", requests.Subscribe, replies.LeaseItem, "A stream of items, a line of JSON each."),
    Call("queue.complete", requests.Complete, replies.Results, "The work on these items is done."),
    Call("queue.retry", requests.Retry, replies.Results, "Hand items back: to try again later, or dead."),
    Call("queue.extend", requests.Extend, replies.Results, "Keep leases alive; a `lease_timeout` of 0 ends them."),
    Call("queue.state", requests.WriteState, StateWritten, "Write the state document of a leased item."),
    Call("queue.cancel", requests.Cancel, replies.Results, "End items by id; a leased one ends with its lease."),
    Call("queue.bury", requests.Bury, replies.Results, "Items that wait die, by id: what undoes a redrive."),
    Call("queue.ready", requests.MakeReady, replies.Results, "Items that wait for their time are leasable now, by id."),
    Call("queue.stats", requests.OneQueue, QueueStats, "Counts by state, rates and ages."),
    Call("queue.audit", requests.Audit, AuditPage, "What was done to a queue by hand, the newest first."),
    Call("queue.rebalance", requests.RebalanceQueue, Rebalance, "Change how many partitions a queue has, and where."),
    Call("queue.pause", requests.OneQueue, QueueInfo, "Produce goes on, lease waits."),
    Call("queue.resume", requests.OneQueue, QueueInfo, "Lease goes on."),
    Call("queue.clear", requests.ClearQueue, replies.Cleared, "Remove the items in these states."),
    Call("queue.redrive", requests.Redrive, Redriven, "Send dead items back to where they came from."),
    Call("items.get", requests.GetItem, replies.LookItem, "An item, payload and all; `wait` for it to end."),
    Call("items.list", requests.ListItems, replies.LookPage, "The items of a queue; nothing is leased.", arrow="reply"),
    Call("consumer.open", requests.OpenConsumer, Consumer, "Begin a batch reader's epoch; who had it is fenced off."),
    Call("queue.claim", requests.MakeClaim, Claim, "A named set of items for a batch reader; `wait` for the first."),
    Call("claim.read", requests.ReadClaim, replies.LookPage, "A part of a claim, a page at a time.", arrow="reply"),
    Call("claim.verdict", requests.GiveVerdicts, replies.Results, "Items that completing the claim does not complete."),
    Call("claim.complete", requests.OneClaim, ClaimEnded, "The claim's items are done, but for those with a verdict."),
    Call("claim.release", requests.OneClaim, ClaimEnded, "Give the claim's items back, as if never claimed."),
    Call("claims.list", requests.OneQueue, replies.ClaimList, "The open claims of a queue."),
    Call("queue.stage", requests.Stage, Staged, "Put items where nobody sees them yet.", arrow="request"),
    Call("stage.publish", requests.PublishStage, Published, "Show these staged chunks all at once; twice is once."),
    Call("stage.abort", requests.AbortStage, Staged, "Drop what was staged."),
    Call("journal.read", requests.ReadJournal, JournalPage, "Rows of a partition's journal: all changes of its items."),
)

CALLS: dict[str, Call] = {call.name: call for call in _TABLE}
