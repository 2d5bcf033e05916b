"""The table of calls: `POST /v1/<name>`, each with what it takes and what it answers with."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from millpond.model import QueueInfo, QueuePage, QueueStats, Redriven, StateWritten
from millpond.wire import replies, requests


class Call(Struct, frozen=True):
    """`built` calls are answered, the others are a promise (501). `purpose` is for the schema and its page."""

    name: str
    request: type[Struct]
    reply: type[Any]
    purpose: str
    built: bool = True


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
    Call("queue.stats", requests.OneQueue, QueueStats, "Counts by state, rates and ages."),
    Call("queue.pause", requests.OneQueue, QueueInfo, "Produce goes on, lease waits."),
    Call("queue.resume", requests.OneQueue, QueueInfo, "Lease goes on."),
    Call("queue.clear", requests.ClearQueue, replies.Cleared, "Remove the items in these states."),
    Call("queue.redrive", requests.Redrive, Redriven, "Send dead items back to where they came from."),
    Call("items.get", requests.GetItem, replies.LookItem, "An item, payload and all; nothing is leased."),
    Call("items.list", requests.ListItems, replies.LookPage, "The items of a queue; nothing is leased."),
    Call("queue.rebalance", requests.Rebalance, replies.Empty, "Change the number of partitions.", built=False),
    Call("queue.audit", requests.Audit, replies.Empty, "The steps of rebalances.", built=False),
    Call("queue.claim", requests.Claim, replies.Empty, "A named set of items for a batch reader.", built=False),
    Call("claim.read", requests.ReadClaim, replies.Empty, "Read a part of a claim.", built=False),
    Call("claim.complete", requests.OneClaim, replies.Empty, "The claim's items are done.", built=False),
    Call("claim.release", requests.OneClaim, replies.Empty, "Give the claim's items back.", built=False),
    Call("claims.list", requests.OneQueue, replies.Empty, "The claims of a queue.", built=False),
    Call("consumer.open", requests.OpenConsumer, replies.Empty, "Begin an epoch of a batch reader.", built=False),
    Call("queue.stage", requests.Stage, replies.Empty, "Put items where nobody sees them yet.", built=False),
    Call("stage.publish", requests.PublishStage, replies.Empty, "Show all staged chunks at once.", built=False),
    Call("stage.abort", requests.AbortStage, replies.Empty, "Drop what was staged.", built=False),
)

CALLS: dict[str, Call] = {call.name: call for call in _TABLE}
