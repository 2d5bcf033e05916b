"""The audit log over HTTP: who did it, whoever asks, and pages of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import millpond
from millpond.access.tokens_file import TokensFile
from millpond.client import Client
from millpond.clock import Clock
from millpond.http.auth import Guard
from tests.http.served import Served, serve


class Doors:
    """A server with tokens: one with a name, one without."""

    def __init__(self, served: Served, secrets: dict[str, str]) -> None:
        self.served = served
        self.secrets = secrets

    def ask(self, who: str, call: str, **fields: Any) -> Any:
        body = msgspec.json.encode(fields)
        return self.served.ask("POST", f"/v1/{call}", body, Authorization=f"Bearer {self.secrets[who]}")


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[Doors]:
    file, now = TokensFile(tmp_path), Clock().now
    secrets = {}
    _, secrets["ann"] = file.create(now(), role="admin", queues=["*"], name="ann")
    nameless, secrets["nameless"] = file.create(now(), role="operator", queues=["*"])
    _, secrets[nameless.id] = file.create(now(), role="viewer", queues=["a*"])
    secrets["viewer"] = secrets.pop(nameless.id)
    with serve(gate=Guard(tmp_path, now, open_to_local=False)) as served:
        found = Doors(served, secrets)
        found.secrets["id of nameless"] = nameless.id
        yield found


def test_entries_name_the_token_that_did_it(doors: Doors) -> None:
    assert doors.ask("ann", "queues.create", name="a/q").status == 200
    assert doors.ask("nameless", "queue.pause", queue="a/q").status == 200
    assert doors.ask("nameless", "queue.clear", queue="a/q").status == 200
    assert doors.ask("viewer", "queue.resume", queue="a/q").status == 403
    reply = doors.ask("viewer", "queue.audit", queue="a/q").value
    nameless = doors.secrets["id of nameless"]
    assert [(one["action"], one["who"]) for one in reply["entries"]] == [
        ("clear done", nameless),
        ("clear", nameless),
        ("pause", nameless),
        ("create", "ann"),
    ]
    assert "next" not in reply
    assert all(secret not in str(reply) for who, secret in doors.secrets.items() if who != "id of nameless")
    assert doors.ask("viewer", "queue.audit", queue="b/q").status == 403
    assert doors.ask("ann", "queue.audit", queue="b/q").status == 404


def test_pages_lead_to_the_oldest(doors: Doors) -> None:
    doors.ask("ann", "queues.create", name="q")
    for _ in range(3):
        doors.ask("ann", "queue.pause", queue="q")
        doors.ask("ann", "queue.resume", queue="q")
    doors.ask("ann", "queues.delete", name="q")
    seen: list[str] = []
    after = None
    while True:
        page = doors.ask("ann", "queue.audit", queue="q", after=after, limit=3).value
        seen += [one["action"] for one in page["entries"]]
        after = page.get("next")
        if after is None:
            break
    assert seen == ["delete", *["resume", "pause"] * 3, "create"]


@pytest.mark.parametrize("wrong", [{"after": "x"}, {"after": "-1"}, {"after": 3}, {"limit": 0}, {"limit": "9"}])
def test_what_is_no_page_is_refused(doors: Doors, wrong: dict[str, Any]) -> None:
    doors.ask("ann", "queues.create", name="q")
    assert doors.ask("ann", "queue.audit", queue="q", **wrong).status == 400


def test_without_tokens_and_through_the_directory_it_is_local(tmp_path: Path) -> None:
    async def scenario() -> list[tuple[str, str]]:
        async with millpond.open_async(tmp_path) as owner, millpond.open_async(tmp_path) as guest:
            await owner.create_queue("q")
            await guest.pause("q")
            return [(one.action, one.who) for one in (await guest.audit("q")).entries]

    assert asyncio.run(scenario()) == [("pause", "local"), ("create", "embedded")]


def test_the_client_has_it_too() -> None:
    with serve() as served, Client(served.url) as client:
        client.create_queue("q")
        page = client.audit("q", limit=1)
        [entry] = page.entries
        assert (entry.action, entry.who, entry.queue, entry.detail["partitions"]) == (
            "create",
            "local",
            "q",
            {"default": 1},
        )
        assert entry.at.tzinfo is not None
        assert page.next is None
