"""A served pond for Spark to read and write, and what tests ask of it directly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tests.server.process import LOOPBACK, Server, serve

PRODUCE_MAX = 1_000  # items in one request
_numbers = count(1)


class Pond:
    """One server for a file of tests, which keep apart by their queues."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url

    def queue(self, **settings: Any) -> str:
        name = f"spark/q{next(_numbers)}"
        self.server.must("queues.create", name=name, **settings)
        return name

    def produce(self, queue: str, items: Sequence[dict[str, Any]]) -> list[str]:
        """Their ids, in order."""
        ids: list[str] = []
        for start in range(0, len(items), PRODUCE_MAX):
            made = self.server.must("queue.produce", queue=queue, items=items[start : start + PRODUCE_MAX])
            ids += [one["id"] for one in made["items"]]
        return ids

    def fill(self, queue: str, items: int, prefix: str = "n") -> list[str]:
        """Plain items with the payloads n0, n1, …"""
        return self.produce(queue, [{"text": f"{prefix}{number}"} for number in range(items)])

    def counts(self, queue: str) -> dict[str, int]:
        """Of the states that there are items in."""
        counts: dict[str, int] = self.server.must("queue.stats", queue=queue)["counts"]
        return {state: items for state, items in counts.items() if items}

    def claims(self, queue: str) -> list[str]:
        return [claim["claim_id"] for claim in self.server.must("claims.list", queue=queue)["claims"]]

    def items(self, queue: str, state: str | None = None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after: str | None = None
        while True:
            asked = {"state": state, "after": after}
            given = {name: value for name, value in asked.items() if value is not None}
            page = self.server.must("items.list", queue=queue, limit=PRODUCE_MAX, **given)
            found += page["items"]
            after = page.get("next")
            if after is None:
                return found

    def texts(self, queue: str, state: str | None = None) -> list[str]:
        return [item["text"] for item in self.items(queue, state)]

    def options(self, queue: str, **more: str) -> dict[str, str]:
        return {"url": self.url, "queue": queue, "retryFor": "5s", **more}


@contextmanager
def pond_in(data: Path, *flags: str, bind: tuple[str, ...] = LOOPBACK) -> Iterator[Pond]:
    with serve(data, *flags, bind=bind) as server:
        yield Pond(server)
