"""Judges the answers to batch readers and writers, as `replies` does those to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from millpond.errors import ClaimFinished, Conflict, Fenced, InvalidRequest, MillpondError, NotFound
from millpond.model import Claim as ShownClaim
from millpond.model import ClaimEnded, Consumer, ItemPage, Published, Result, Staged, to_ms
from millpond.model import Item as Shown
from tests.sim import asks
from tests.sim.asks import Ask
from tests.sim.decided import COMPLETED, RELEASED, Decisions, split
from tests.sim.model import Model, Queue
from tests.sim.nouns import CLAIMED, Claim, Item, Violation


def _broken(ask: Ask, what: str) -> NoReturn:
    raise Violation(f"{ask.queue}, {ask}: {what}")


def _since(decisions: Decisions, claim_id: str, step: int) -> list[Claim]:
    """The claims of that name that were there at commit `step` or later."""
    claims = decisions.history.get(claim_id, [])
    return [claim for claim in claims if claim.ended_step is None or claim.ended_step > step]


# ---- refusals ---------------------------------------------------------------------------------------------


def judge_refusal(model: Model, ask: Ask, error: MillpondError) -> None:
    """That nothing was changed is judged elsewhere."""
    if not _may_refuse(model.queues[ask.queue], ask, error):
        _broken(ask, f"an answer that nobody expects: {error!r}")


def _may_refuse(queue: Queue, ask: Ask, error: MillpondError) -> bool:
    if ask.kind in (asks.PUBLISH, asks.ABORT):
        return _refused_stage(queue, ask, error)
    decisions, claim_id = queue.decisions, getattr(ask.request, "claim_id", "")
    if isinstance(error, InvalidRequest):
        return ask.wrong or (ask.kind == asks.CLAIM_READ and not _part_is_there(decisions, ask))
    if isinstance(error, ClaimFinished):
        return decisions.may_be_finished(claim_id)
    if isinstance(error, NotFound):
        return not any(claim.open_since(ask.step) for claim in decisions.history.get(claim_id, []))
    numbered = split(claim_id)
    if numbered is None:
        return False
    now = decisions.epochs.get(numbered[0], 0), decisions.last_completed.get(numbered[0], 0)
    if isinstance(error, Fenced):
        return ask.epoch is not None and not ask.epoch == now[0] == ask.then[0]
    if isinstance(error, Conflict) and ask.kind == asks.CLAIM:
        return not numbered[1] == now[1] + 1 == ask.then[1] + 1 or bool(_since(decisions, claim_id, ask.step))
    return False


def _part_is_there(decisions: Decisions, ask: Ask) -> bool:
    claims = decisions.history.get(ask.request.claim_id, [])  # type: ignore[attr-defined]
    return all(ask.request.part < len(claim.parts) for claim in claims)  # type: ignore[attr-defined]


def _refused_stage(queue: Queue, ask: Ask, error: MillpondError) -> bool:
    txn = ask.request.txn  # type: ignore[attr-defined]
    if ask.kind == asks.ABORT:
        return isinstance(error, Conflict) and queue.decisions.is_published(txn)
    if not isinstance(error, NotFound):
        return False
    there = {
        chunk
        for partition in queue.partitions.values()
        for chunk, kept in partition.staged.get(txn, {}).items()
        if kept.step <= ask.step
    }
    return not there.issuperset(ask.request.chunks)  # type: ignore[attr-defined]


# ---- claims -----------------------------------------------------------------------------------------------


def _judge_open(model: Model, ask: Ask) -> None:
    opened: Consumer = ask.request.value
    if ask.opened.get(opened.epoch) != opened.last_completed:
        _broken(ask, f"it was told {opened}, but it was {ask.opened}")


def _judge_claim(model: Model, ask: Ask) -> None:
    decisions = model.queues[ask.queue].decisions
    told: ShownClaim = ask.request.value
    if not told.items:
        if ask.stirred and not ask.shared:
            _broken(ask, "it was told that there is nothing, and a claim was made for it")
        return
    sizes = [part.items for part in told.parts]
    if told.items != sum(sizes) or [part.part for part in told.parts] != list(range(len(sizes))):
        _broken(ask, f"parts that do not fit: {told}")
    claims = _since(decisions, told.claim_id, ask.step)
    if not any([len(part) for part in claim.parts] == sizes for claim in claims):
        _broken(ask, f"it was told {told}, but there is {claims}")
    _judge_epoch(decisions, ask)


def _judge_read(model: Model, ask: Ask) -> None:
    """The same items in the same order, whoever asks and whenever."""
    page: ItemPage = ask.request.value
    request = ask.request
    claims = _since(model.queues[ask.queue].decisions, request.claim_id, ask.step)  # type: ignore[attr-defined]
    problems = [_page_problem(claim, ask, page) for claim in claims]
    if not problems or all(problems):
        _broken(ask, problems[-1] if problems else "there is no such claim to read from")
    _judge_epoch(model.queues[ask.queue].decisions, ask)


def _judge_epoch(decisions: Decisions, ask: Ask) -> None:
    """Its epoch was the newest at some moment since it was sent; an operator comes without one."""
    numbered = split(ask.request.claim_id)  # type: ignore[attr-defined]
    if numbered is not None and ask.epoch is not None:
        newest = decisions.epochs[numbered[0]]
        if not ask.then[0] <= ask.epoch <= newest:
            _broken(ask, f"epoch {ask.epoch} was let through: it was {ask.then[0]}, and is {newest}")


def _page_problem(claim: Claim, ask: Ask, page: ItemPage) -> str:
    request = ask.request
    part, after, limit = request.part, request.after, request.limit  # type: ignore[attr-defined]
    if part >= len(claim.parts):
        return f"{claim} has no part {part}"
    items, shown = claim.parts[part][after:], list(page.items)
    end = after + len(shown)
    if len(shown) > limit or len(shown) > len(items) or (items and not shown):
        return f"{len(shown)} items from {after} on, of {len(items)}"
    if page.next != (str(end) if end < len(claim.parts[part]) else None):
        return f"it goes on at {page.next} after {end} of {len(claim.parts[part])}"
    return next((problem for pair in zip(items, shown, strict=False) if (problem := _item_problem(claim, *pair))), "")


def _item_problem(claim: Claim, item: Item, shown: Shown) -> str:
    record, source = item.record, item.record.source
    told = (
        shown.id, shown.payload, str(shown.state), shown.partition, shown.kind, shown.encoding, shown.reference,
        shown.priority, shown.key, shown.source_queue, shown.source_id, shown.source_attempts, to_ms(shown.created_at),
        (shown.attempts, shown.deliveries, shown.state_version, shown.last_error, shown.dead_reason,
         to_ms(shown.expire_deadline)),
    )  # fmt: skip
    known = (
        item.id, item.payload, CLAIMED, item.partition.index, record.kind, record.encoding, record.reference,
        record.priority, record.key, source and source.queue, source and source.id, source and source.attempts,
        item.created, claim.looks[item],
    )  # fmt: skip
    if told != known and not (claim.ending and told[:-1] == known[:-1]):  # as it is when it has a verdict
        return f"{item} is shown as {told}, but it is {known}"
    if item.hold is not None and shown.state_doc not in item.docs:
        return f"{item} is shown with the document {shown.state_doc}, but it is {item.docs}"
    if item.correlation_id is None:
        item.correlation_id = shown.correlation_id
    return "" if item.correlation_id == shown.correlation_id else f"{item} is shown as {shown.correlation_id}"


def _judge_verdict(model: Model, ask: Ask) -> None:
    queue = model.queues[ask.queue]
    results: Sequence[Result] = ask.request.value
    claims = queue.decisions.history.get(ask.request.claim_id, [])  # type: ignore[attr-defined]
    _judge_epoch(queue.decisions, ask)
    for one, result in zip(ask.request.verdicts, results, strict=True):  # type: ignore[attr-defined]
        if result.ok:
            if one.id not in ask.noted:
                _broken(ask, f"the verdict on {one.id} is acknowledged, but it was not noted")
        elif result.error is None or result.error.code != NotFound.code:
            _broken(ask, f"an answer that nobody expects: {result}")
        elif any(one.id in {item.id for part in c.parts for item in part} for c in claims if c.open_since(ask.step)):
            _broken(ask, f"{one.id} is said not to be in the claim")


def _judge_end(model: Model, ask: Ask) -> None:
    decisions = model.queues[ask.queue].decisions
    ended: ClaimEnded = ask.request.value
    wanted = COMPLETED if ask.request.completed else RELEASED  # type: ignore[attr-defined]
    claims = [claim for claim in decisions.history.get(ended.claim_id, []) if claim.ending == wanted]
    if not claims:
        _broken(ask, "it is said to be done, and there is no such claim")
    claim = claims[-1]
    _judge_epoch(decisions, ask)
    if decisions.holds(claim):
        _broken(ask, f"{claim} is said to be over, and it is not in all partitions")
    told, total = [ended.items, ended.retried, ended.dead], sum(map(len, claim.parts))
    if wanted == RELEASED and ended.items > total:
        _broken(ask, f"{claim} gave back {ended.items}")
    if wanted == COMPLETED and any(said > was for said, was in zip(told, claim.counted, strict=True)):
        _broken(ask, f"{claim} is said to have ended with {told}, but it was {claim.counted}")
    if ask.stirred and not ask.shared and wanted == COMPLETED and told != claim.counted:
        _broken(ask, f"{claim} is said to have ended with {told}, but it was {claim.counted}")


def _judge_claims(model: Model, ask: Ask) -> None:
    decisions = model.queues[ask.queue].decisions
    told: Sequence[ShownClaim] = ask.request.value
    names = {claim.claim_id for claim in told}
    for claim in told:
        known = decisions.history.get(claim.claim_id, [])
        if not any([part.items for part in claim.parts] == [len(part) for part in one.parts] for one in known):
            _broken(ask, f"{claim} is listed, and it is {known}")
    for one in decisions.claims.values():
        if one.open_since(ask.step) and one.claim_id not in names:
            _broken(ask, f"{one} is not listed")


# ---- stages -----------------------------------------------------------------------------------------------


def _judge_stage(model: Model, ask: Ask) -> None:
    queue, request = model.queues[ask.queue], ask.request
    staged: Staged = request.value
    place = (request.txn, request.chunk)  # type: ignore[attr-defined]
    if not staged.items:
        if not queue.decisions.is_published(place[0]):
            _broken(ask, "nothing was staged, and it was not published")
    elif staged.items != len(ask.records) or place not in queue.ever_staged:
        _broken(ask, f"{staged.items} of {len(ask.records)} are said to be staged: {place in queue.ever_staged}")


def _judge_publish(model: Model, ask: Ask) -> None:
    decisions = model.queues[ask.queue].decisions
    done: Published = ask.request.value
    if done.txn not in decisions.decided:
        if not done.again or not decisions.is_published(done.txn):
            _broken(ask, f"{done} is acknowledged, and it was not decided")
        return
    if decisions.unshown(done.txn):
        _broken(ask, f"{done} is acknowledged, and {decisions.unshown(done.txn)} are not shown")
    told, counted = [done.items, done.duplicates], decisions.counted[done.txn]
    if not done.again and (not ask.stirred or told != counted):
        _broken(ask, f"{done} is acknowledged, but it was {counted}")
    if done.again and any(said > was for said, was in zip(told, counted, strict=True)):
        _broken(ask, f"{done} is acknowledged, but it was {counted}")


def _judge_abort(model: Model, ask: Ask) -> None:
    """How many were dropped cannot be told: a partition that is away keeps its chunks until they are swept."""
    dropped: Staged = ask.request.value
    if dropped.items and ask.request.txn not in ask.noted:  # type: ignore[attr-defined]
        _broken(ask, f"{dropped.items} are said to be dropped, and nothing was")


BATCH_JUDGES: dict[str, Callable[[Model, Ask], None]] = {
    asks.CONSUMER: _judge_open,
    asks.CLAIM: _judge_claim,
    asks.CLAIM_READ: _judge_read,
    asks.VERDICT: _judge_verdict,
    asks.CLAIM_END: _judge_end,
    asks.CLAIMS: _judge_claims,
    asks.STAGE: _judge_stage,
    asks.PUBLISH: _judge_publish,
    asks.ABORT: _judge_abort,
}
