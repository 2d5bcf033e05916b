"""The operations of batch readers and writers as requests, as in asks.py. No I/O.

All of them may be repeated after a lost reply: claims, chunks and transactions have names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.client.asks import Ask, items_page, itself, many, on_wire, produce_items, results, type_of, waits_for
from millpond.errors import InvalidRequest, NotFound
from millpond.model import (
    Claim,
    ClaimEnded,
    Consumer,
    Duration,
    ItemPage,
    Items,
    JournalPage,
    Published,
    Result,
    Staged,
    Verdict,
)
from millpond.wire import replies, requests

# ---- claims -----------------------------------------------------------------------------------------------


def open_consumer(queue: str, consumer: str, after: int | None) -> Ask[Consumer]:
    """A repeat begins one more epoch: it is the newest that counts."""
    return Ask("consumer.open", requests.OpenConsumer(queue, consumer, after), Consumer, itself)


def claim(
    queue: str,
    claim_id: str,
    max_items: int,
    max_bytes: int | None,
    parts: int,
    wait: Duration,
    epoch: int | None,
    owner: str,
) -> Ask[Claim]:
    request = requests.MakeClaim(queue, claim_id, max_items, max_bytes, parts, on_wire(wait), epoch, owner)
    return Ask("queue.claim", request, Claim, itself, waits_for(wait))


def read_claim(queue: str, claim_id: str, part: int, after: str | None, limit: int, epoch: int | None) -> Ask[ItemPage]:
    request = requests.ReadClaim(queue, claim_id, part, after, limit, epoch)
    return Ask("claim.read", request, replies.LookPage, items_page)


def give_verdicts(queue: str, claim_id: str, verdicts: Sequence[Verdict], epoch: int | None) -> Ask[Sequence[Result]]:
    given = [_verdict(verdict, place) for place, verdict in enumerate(many(verdicts, "verdicts"))]
    return Ask("claim.verdict", requests.GiveVerdicts(queue, claim_id, given, epoch), replies.Results, results)


def _verdict(given: Any, place: int) -> requests.VerdictItem:
    if not isinstance(given, Verdict):
        raise InvalidRequest(f"verdicts[{place}] is {type_of(given)}; give a Verdict")
    return requests.VerdictItem(given.id, given.verdict, given.error, on_wire(given.delay))


def complete_claim(queue: str, claim_id: str, epoch: int | None) -> Ask[ClaimEnded]:
    """Completing twice is success twice; the counts are those of the last try."""
    return Ask("claim.complete", requests.OneClaim(queue, claim_id, epoch), ClaimEnded, itself)


def release_claim(queue: str, claim_id: str, epoch: int | None) -> Ask[ClaimEnded]:
    """Gone is gone, whichever of two tries did it."""
    request = requests.OneClaim(queue, claim_id, epoch)
    gone = ClaimEnded(claim_id, 0)
    return Ask("claim.release", request, ClaimEnded, itself, doubt=NotFound.code, settle=lambda: gone)


def list_claims(queue: str) -> Ask[Sequence[Claim]]:
    return Ask("claims.list", requests.OneQueue(queue), replies.ClaimList, lambda reply: reply.claims)


# ---- stages -----------------------------------------------------------------------------------------------


def stage(queue: str, txn: str, chunk: str, items: Items) -> Ask[Staged]:
    return Ask("queue.stage", requests.Stage(queue, txn, chunk, produce_items(items)), Staged, itself)


def publish_stage(queue: str, txn: str, chunks: Sequence[str]) -> Ask[Published]:
    """A repeat says `again`. With no chunks the transaction is over all the same."""
    request = requests.PublishStage(queue, txn, many(chunks, "chunks", at_least=0))
    return Ask("stage.publish", request, Published, itself)


def abort_stage(queue: str, txn: str) -> Ask[Staged]:
    return Ask("stage.abort", requests.AbortStage(queue, txn), Staged, itself)


# ---- history ----------------------------------------------------------------------------------------------


def read_journal(queue: str, partition: int, after: int, limit: int) -> Ask[JournalPage]:
    return Ask("journal.read", requests.ReadJournal(queue, partition, after, limit), JournalPage, itself)
