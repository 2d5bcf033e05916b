"""What is fetched rather than called: probes, metrics, the schema, its page, and a place to start from."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from millpond.errors import NotFound, Unavailable
from millpond.http import openapi
from millpond.http.reference import CONTENT_POLICY, landing_page, reference_page
from millpond.model import Health
from millpond.wire import JSON

Look = Callable[[], Health]
Metrics = Callable[[str], tuple[bytes, str]]

RETRY_AFTER = ((b"retry-after", b"1"),)
HTML = "text/html; charset=utf-8"
_PERMISSIONS = {"/metrics": "metrics"}  # the others say nothing about anybody's items


class Page(msgspec.Struct, frozen=True):
    body: bytes
    media_type: str = "application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    status: int = 200


class Pages:
    """`live` and `ready` look at the engine, `metrics` takes an Accept header."""

    def __init__(self, live: Look, ready: Look, metrics: Metrics | None) -> None:
        self._metrics_page = metrics
        self._makers: dict[str, Callable[[str], Page]] = {
            "/": lambda _: Page(landing_page(), HTML, CONTENT_POLICY),
            "/health": lambda _: _health(live()),
            "/ready": lambda _: _health(ready()),
            "/metrics": self._metrics,
            "/openapi.json": lambda _: Page(openapi.document()),
            "/docs": lambda _: Page(reference_page(), HTML, CONTENT_POLICY),
        }
        self.paths = tuple(self._makers)

    def permission(self, path: str) -> str | None:
        """The call that a token must allow; None where nobody is asked for one."""
        return _PERMISSIONS.get(path)

    def page(self, path: str, accept: str = "") -> Page:
        return self._makers[path](accept)

    def _metrics(self, accept: str) -> Page:
        if self._metrics_page is None:
            raise NotFound("this server keeps no metrics; ask the one that owns the data directory")
        body, media_type = self._metrics_page(accept)
        return Page(body, media_type)


def _health(health: Health) -> Page:
    """200 or 503: probes look at nothing else."""
    if health.reason is None:
        return Page(JSON.encode(health))
    return Page(JSON.encode(health), headers=RETRY_AFTER, status=Unavailable.status)
