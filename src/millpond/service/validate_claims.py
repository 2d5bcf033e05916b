"""The argument checks of claims, transactions and the journal: with `validate`, the only ones there are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from millpond.errors import InvalidRequest
from millpond.model import (
    CLAIM_ITEMS_MAX,
    CLAIM_PAGE_MAX,
    CLAIM_PARTS_MAX,
    NAME_MAX,
    VERDICTS_MAX,
    Duration,
    Verdict,
)
from millpond.queue.requests import ClaimItems, JudgeItem
from millpond.service import validate

CHUNKS_MAX = 100_000  # of one transaction: a task of a large job stages some dozens
JOURNAL_ROWS_MAX = 1_000  # a page: some hundred KB
_NAME = re.compile(r"[\x21-\x7e]+")


def name(value: Any, field: str) -> str:
    checked = validate.string(value, field, NAME_MAX)
    if not _NAME.fullmatch(checked):
        raise InvalidRequest(
            f"{field} is {validate.shown(checked)}; use one or more printable ASCII characters, no spaces"
        )
    return checked


def consumer(value: Any) -> str:
    checked = name(value, "consumer")
    if len(checked) > NAME_MAX - 20:
        raise InvalidRequest(f"consumer has {len(checked)} characters; use at most {NAME_MAX - 20}")
    return checked


def epoch(value: Any) -> int | None:
    return None if value is None else validate.integer(value, "epoch", 1, 1 << 62)


def claim(
    claim_id: Any, max_items: Any, max_bytes: Any, parts: Any, wait: Duration, epoch_given: Any, owner: Any
) -> ClaimItems:
    return ClaimItems(
        name(claim_id, "claim_id"),
        validate.integer(max_items, "max_items", 1, CLAIM_ITEMS_MAX),
        None if max_bytes is None else validate.integer(max_bytes, "max_bytes", 1, 1 << 62),
        validate.integer(parts, "parts", 1, CLAIM_PARTS_MAX),
        validate.wait_ms(wait),
        epoch(epoch_given),
        validate.string(owner, "owner"),
    )


def after(value: Any) -> int:
    """How many items of a part were read: the cursor is that number."""
    if value is None:
        return 0
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,15}", value):
        raise InvalidRequest(f"after is {validate.shown(value)}, which is no cursor; use the `next` of the page before")
    return int(value)


def page_limit(value: Any) -> int:
    """More than a page can hold is asked for by those who want all they can get."""
    if isinstance(value, int) and value > CLAIM_PAGE_MAX:
        return CLAIM_PAGE_MAX
    return validate.integer(value, "limit", 1, CLAIM_PAGE_MAX)


def verdicts(value: Any) -> list[JudgeItem]:
    if isinstance(value, str | bytes | Verdict) or not isinstance(value, Sequence):
        raise InvalidRequest("verdicts is a list of verdicts; put a single one into a list")
    validate.batch(len(value), "verdicts", VERDICTS_MAX)
    return [_verdict(one, f"verdicts[{index}]") for index, one in enumerate(value)]


def _verdict(one: Any, where: str) -> JudgeItem:
    if not isinstance(one, Verdict):
        raise InvalidRequest(f"{where} is {type(one).__name__}; give a Verdict")
    chosen = validate.one_of(one.verdict, f"{where}.verdict", ("retry", "dead"))
    if chosen == "dead" and one.delay is not None:
        raise InvalidRequest(f"{where} is dead and has a delay; leave one of them out")
    return JudgeItem(
        validate.string(one.id, f"{where}.id"),
        chosen == "dead",
        None if one.delay is None else validate.duration_ms(one.delay, f"{where}.delay"),
        validate.error_text(one.error, f"{where}.error"),
    )


def chunks(value: Any) -> list[str]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequest("chunks is a list of the chunks that were staged; put a single one into a list")
    if len(value) > CHUNKS_MAX:
        raise InvalidRequest(f"chunks has {len(value)} entries; stage larger ones, the limit is {CHUNKS_MAX}")
    return list(dict.fromkeys(name(one, f"chunks[{index}]") for index, one in enumerate(value)))


def journal_limit(value: Any) -> int:
    if isinstance(value, int) and value > JOURNAL_ROWS_MAX:
        return JOURNAL_ROWS_MAX
    return validate.integer(value, "limit", 1, JOURNAL_ROWS_MAX)
