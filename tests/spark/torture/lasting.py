"""A server that is killed and started again, on the same port and data, and what is asked of it directly meanwhile."""

from __future__ import annotations

import http.client
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.server.process import LOOPBACK, Server, serve
from tests.spark.server import Pond

PRODUCE_MAX = 1_000  # items in one request


class Down(Exception):
    """The server was killed before it answered. The request may be made again."""


class LastingServer:
    def __init__(self, data: Path) -> None:
        self._data = data
        self._stack = ExitStack()
        self.lives = 0
        self.server = self._serve(LOOPBACK)
        host, _, port = self.server.address.rpartition(":")
        self.address = (host, int(port))

    def _serve(self, bind: tuple[str, ...]) -> Server:
        self.lives += 1
        return self._stack.enter_context(serve(self._data, bind=bind))

    def kill(self) -> int:
        """From any thread; its process id."""
        self.server.process.popen.kill()
        self.server.process.popen.wait()
        return self.server.process.pid

    @property
    def has_ended(self) -> bool:
        return self.server.process.popen.poll() is not None

    def restart(self) -> None:
        self.close()
        host, port = self.address
        self.server = self._serve(("--bind", f"{host}:{port}"))

    def close(self) -> None:
        self._stack.close()

    # ---- what is asked ----------------------------------------------------------------------------------------

    def must(self, name: str, /, **fields: Any) -> Any:
        try:
            return self.server.must(name, **fields)
        except (OSError, http.client.HTTPException) as error:
            raise Down(name) from error

    def produce(self, queue: str, texts: list[str], request: str) -> list[str]:
        """Their ids. Asked again under the same name, the same ones."""
        ids: list[str] = []
        for start in range(0, len(texts), PRODUCE_MAX):
            items = [{"text": text} for text in texts[start : start + PRODUCE_MAX]]
            made = self.must("queue.produce", queue=queue, items=items, request_id=f"{request}-{start}")
            ids += [item["id"] for item in made["items"]]
        return ids

    def counts(self, queue: str) -> dict[str, int]:
        """Of the states that there are items in."""
        counts: dict[str, int] = self.must("queue.stats", queue=queue)["counts"]
        return {state: items for state, items in counts.items() if items}

    def is_done(self, queue: str) -> bool:
        """Nothing waits there, nothing is held."""
        return not self.counts(queue) and not self.must("claims.list", queue=queue)["claims"]

    def rows(self, queue: str) -> Counter[tuple[str, str]]:
        """Reference and text of all items."""
        return Counter((item["reference"], item["text"]) for item in Pond(self.server).items(queue))
