"""`millpond queue audit`: what was done to a queue by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millpond.cli.flags import Arguments
from millpond.cli.output import DONE, print_json, print_table
from millpond.cli.pond import open_pond
from millpond.cli.text import instant

if TYPE_CHECKING:
    from millpond.blocking import Pond
    from millpond.client import Client
    from millpond.model import AuditEntry

SHOWN = 100
A_PAGE = 1_000  # as many as there are in one


def audit(asked: Arguments) -> int:
    with open_pond(asked) as pond:
        entries = _newest(pond, asked.queue, asked.limit)
    if asked.json:
        print_json(entries)
        return DONE
    print_table(
        ["TIME (UTC)", "WHO", "ACTION", "DETAIL"],
        [[instant(one.at), one.who, one.action, _detail(one)] for one in entries],
    )
    return DONE


def _newest(pond: Pond | Client, queue: str, limit: int) -> list[AuditEntry]:
    entries: list[AuditEntry] = []
    after: str | None = None
    while len(entries) < limit:
        page = pond.audit(queue, after=after, limit=min(limit - len(entries), A_PAGE))
        entries += page.entries
        after = page.next
        if after is None:
            break
    return entries


def _detail(entry: AuditEntry) -> str:
    told = [f"{name}={_text(value)}" for name, value in entry.detail.items()]
    return " ".join([*([entry.error] if entry.error else []), *told]) or "-"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{_text(inner)}" for name, inner in value.items()) or "-"
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value)
