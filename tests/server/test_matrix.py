"""Who may make which call on which queue by which method: the whole table, through a real server with real tokens.

Everything runs at log level debug, and the log is searched for secrets and payloads at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpond.access.roles import ROLES
from millpond.access.tokens_file import TokensFile
from millpond.clock import Clock
from millpond.wire import CALLS
from tests.auth.test_guard import ALLOWED
from tests.server.process import Server, serve

METHODS = ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")
PAGES = ("/", "/docs", "/health", "/ready", "/openapi.json", "/metrics")
OURS, THEIRS = "team-a/q", "team-b/q"
PAYLOAD = "payload-that-nobody-may-see"

# What each call needs besides the queue; the others need nothing.
MORE: dict[str, dict[str, Any]] = {
    "queue.produce": {"items": [{"text": PAYLOAD}]},
    "queue.complete": {"leases": ["none"]},
    "queue.retry": {"items": [{"lease": "none"}]},
    "queue.extend": {"leases": ["none"]},
    "queue.state": {"lease": "none", "version": 0, "state_doc": {"text": PAYLOAD}},
    "queue.cancel": {"ids": ["none"]},
    "queue.bury": {"ids": ["none"]},
    "queue.ready": {"ids": ["none"]},
    "items.get": {"id": "none"},
    "queue.claim": {"claim_id": "c"},
    "claim.read": {"claim_id": "c"},
    "claim.verdict": {"claim_id": "c", "verdicts": [{"id": "none", "verdict": "dead"}]},
    "claim.complete": {"claim_id": "c"},
    "claim.release": {"claim_id": "c"},
    "consumer.open": {"consumer": "c"},
    "queue.stage": {"txn": "t", "chunk": "c", "items": [{"text": PAYLOAD}]},
    "stage.publish": {"txn": "t", "chunks": ["c"]},
    "stage.abort": {"txn": "t"},
}
WITHOUT_QUEUE = ("queues.list",)


def body_of(call: str, queue: str) -> bytes:
    named = {} if call in WITHOUT_QUEUE else {"name" if call.startswith("queues.") else "queue": queue}
    return msgspec.json.encode(named | MORE.get(call, {}))


class Door:
    """One kept-alive connection after another, with an Origin as a page of another site would send it."""

    def __init__(self, server: Server, secrets: dict[str, str]) -> None:
        self.server = server
        self.secrets = secrets

    def status(self, method: str, path: str, body: bytes | None, who: str | None) -> int:
        headers = {"Origin": "https://evil.example", "Content-Type": "application/json"}
        if who is not None:
            headers["Authorization"] = f"Bearer {self.secrets[who]}"
        connection = HTTPConnection("127.0.0.1")
        connection.sock = self.server.connect()
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            named = {name.lower() for name, _ in answer.getheaders()}
            assert not [name for name in named if name.startswith("access-control")], "CORS"
            assert answer.status != 405 or "allow" in named
            assert answer.status != 401 or "www-authenticate" in named
            return answer.status
        finally:
            connection.close()

    def call(self, call: str, queue: str, who: str | None) -> int:
        return self.status("POST", f"/v1/{call}", body_of(call, queue), who)


@pytest.fixture(scope="module")
def door(data: Path) -> Iterator[Door]:
    """A token of each role for all queues, one for the queues of team A, and one that has expired."""
    file, now = TokensFile(data), Clock().now()
    secrets = {}
    for role in ROLES:
        _, secrets[f"{role} *"] = file.create(now, role=role, queues=["*"])
        _, secrets[f"{role} a"] = file.create(now, role=role, queues=["team-a/*"])
    _, secrets["expired"] = file.create(now - 2000, role="admin", queues=["*"], expire_timeout_ms=1000)
    secrets["forged"] = secrets["admin *"][:-1] + ("a" if secrets["admin *"][-1] != "a" else "b")
    with serve(data, "--log-level", "debug") as server:
        yield Door(server, secrets)
        assert server.process.hurry() == 0
        told = "".join(server.process.lines)
    assert PAYLOAD not in told
    assert not [who for who, secret in secrets.items() if secret[12:] in told]
    assert [one for one in server.process.log if one["level"] in ("warning", "error")] == []


@pytest.fixture(autouse=True)
def queues(door: Door) -> None:
    """There, and awake, whatever the test before did to them: the lean path is for those."""
    for queue in (OURS, THEIRS):
        assert door.call("queues.create", queue, "admin *") in (200, 409)
        assert door.call("queue.produce", queue, "admin *") == 200


@pytest.mark.parametrize("role", ROLES)
def test_every_role_may_make_its_calls_on_its_queues_and_no_others(door: Door, role: str) -> None:
    for call in CALLS:
        may = role in ALLOWED[call].split()
        for who, queue, good in [
            (f"{role} *", OURS, may),
            (f"{role} *", THEIRS, may),
            (f"{role} a", OURS, may),
            (f"{role} a", THEIRS, may and call in WITHOUT_QUEUE),
        ]:
            status = door.call(call, queue, who)
            assert (status not in (401, 403)) is good, (call, who, queue, status)
            assert status == 403 or good, (call, who, queue, status)
            assert status < 500 or (status == 501 and not CALLS[call].built), (call, status)


@pytest.mark.parametrize("who", [None, "expired", "forged"])
def test_without_a_token_that_counts_every_call_is_401(door: Door, who: str | None) -> None:
    for call in CALLS:
        assert door.call(call, OURS, who) == 401, call
    assert door.status("GET", "/metrics", None, who) == 401


def test_every_other_method_is_405_for_everybody(door: Door) -> None:
    for method in METHODS:
        for who in (None, "producer a", "admin *"):
            for call in CALLS:
                assert door.status(method, f"/v1/{call}", None, who) == 405, (method, call)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        for page in PAGES:
            assert door.status(method, page, b"{}", "admin *") == 405, (method, page)


@pytest.mark.parametrize("role", ROLES)
def test_pages_are_for_all_and_metrics_for_those_who_may_see_all_queues(door: Door, role: str) -> None:
    for page in PAGES[:-1]:
        assert door.status("GET", page, None, None) == 200
    may = role in ALLOWED["metrics"].split()
    assert door.status("GET", "/metrics", None, f"{role} *") == (200 if may else 403)
    assert door.status("GET", "/metrics", None, f"{role} a") == 403


@pytest.mark.parametrize("call", ["queues.create", "queues.update"])
def test_a_dead_queue_is_a_queue_that_must_be_allowed_too(door: Door, call: str) -> None:
    for dead_queue, status in [(THEIRS, 403), (OURS, 409)]:
        body = msgspec.json.encode({"name": OURS, "dead_queue": dead_queue})
        found = door.status("POST", f"/v1/{call}", body, "admin a")
        assert found == status or (status == 409 and found == 400), found  # allowed; but no queue is its own


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing", "/v1/../health"])
def test_what_is_not_there_is_404_for_everybody(door: Door, path: str) -> None:
    for who in (None, "admin *"):
        assert door.status("POST", path, b"{}", who) == 404
