"""Which dead items are meant, without SQL: by id, by the engine's filter, or all; and a look at them in short."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import msgspec

from millpond.errors import Conflict, NotFound
from millpond.model import ErrorInfo, Item, RedriveFilter
from millpond.triage.dead import Calls, Chosen, Dead, dead_items

SIGNATURES_MAX = 10_000  # told apart; a flood of errors without likeness is not counted one by one
SIGNATURE_CHARS = 200
OTHERS = "(others)"

_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class Alike(msgspec.Struct):
    """Dead items that are alike."""

    reason: str
    signature: str | None
    items: int


class Look(msgspec.Struct):
    """How many, of what they died, and the first of them."""

    matched: int
    alike: list[Alike]
    sample: list[Chosen]


def fits(item: Item, chosen: RedriveFilter) -> bool:
    return (
        chosen.source_queue in (None, item.source_queue)
        and chosen.dead_reason in (None, item.dead_reason)
        and chosen.kind in (None, item.kind)
        and (chosen.error_contains is None or chosen.error_contains in (item.last_error or ""))
    )


def by_filter(pond: Calls, dead: Dead, chosen: RedriveFilter) -> Iterator[Item]:
    return (item for item in dead_items(pond, dead) if fits(item, chosen))


def by_ids(pond: Calls, dead: Dead, ids: Sequence[str]) -> tuple[list[Item], dict[str, ErrorInfo]]:
    """Those that are dead, and what is wrong with the others."""
    found: list[Item] = []
    errors: dict[str, ErrorInfo] = {}
    for id in dict.fromkeys(ids):
        try:
            found.append(dead_item(pond, dead, id))
        except (NotFound, Conflict) as error:
            errors[id] = ErrorInfo(error.code, error.message)
    return found, errors


def dead_item(pond: Calls, dead: Dead, id: str) -> Item:
    item = pond.get_item(dead.queue, id)
    if not dead.has(item):
        raise Conflict(f"item {id!r} of queue {dead.queue!r} is {item.state}, not dead; see `millpond dlq list`")
    return item


def look(chosen: Iterator[Chosen], *, alike: int, sample: int) -> Look:
    """So many of the most frequent, and so many items."""
    first = list(islice(chosen, sample))
    counts: Counter[tuple[str, str | None]] = Counter()
    for one in chain(first, chosen):
        key = (one.reason, signature(one.error))
        counts[key if key in counts or len(counts) < SIGNATURES_MAX else (OTHERS, OTHERS)] += 1
    return Look(counts.total(), [Alike(*key, count) for key, count in counts.most_common(alike)], first)


def signature(error: str | None) -> str | None:
    """Errors that differ in numbers and quoted words are one."""
    if error is None:
        return None
    line = error.strip().partition("\n")[0][: 2 * SIGNATURE_CHARS]
    return _NUMBER.sub("<n>", _QUOTED.sub("<text>", line))[:SIGNATURE_CHARS]
