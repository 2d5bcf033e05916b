"""Who gets in: the Host header, the gate before and after the body, and the pages that everybody may see."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from millpond.errors import Forbidden, Unauthorized
from millpond.model import Check, Health
from tests.http.served import Served, post, serve

JSON = "Content-Type: application/json"


class Team:
    def __init__(self, name: str) -> None:
        self.name = self.who = name

    def sees(self, queue: str) -> bool:
        return queue.startswith(f"{self.name}/")


class TeamGate:
    """`Bearer <team>` is for the queues of that team; jobs are for nobody."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, frozenset[str]]] = []

    def authenticate(self, authorization: bytes | None) -> Team:
        if authorization is None:
            raise Unauthorized("no token; send one", challenge='Bearer realm="millpond"')
        return Team(authorization.decode().removeprefix("Bearer "))

    def authorize(self, identity: Team, call: str, queue: str | None, kinds: Iterable[str] = ()) -> None:
        self.asked.append((call, queue, frozenset(kinds)))
        if (queue is not None and not identity.sees(queue)) or "job" in kinds:
            raise Forbidden("not for you; ask another")


@pytest.fixture
def gate() -> TeamGate:
    return TeamGate()


@pytest.fixture
def guarded(gate: TeamGate) -> Iterator[Served]:
    with serve(gate=gate, allowed_hosts=["localhost", "Pond.example"]) as served:
        for team in ("red", "blue"):
            served.on_loop(served.pond.create_queue(f"{team}/q"))
        yield served


def ask(served: Served, team: str, call: str, **fields: Any) -> Any:
    return served.ask("POST", f"/v1/{call}", msgspec.json.encode(fields), Authorization=f"Bearer {team}")


# ---- hosts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:7410", "pond.example.", "127.0.0.1:1", "[::1]:7410", "10.0.0.7"]
)
def test_a_host_of_ours_is_served(guarded: Served, host: str) -> None:
    assert guarded.ask("GET", "/health", Host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "a:b:c", "[x]"]
)
def test_another_host_is_403_on_every_path(guarded: Served, host: str) -> None:
    for path in ("/health", "/v1/queues.list", "/nothing"):
        reply = guarded.ask("POST", path, b"{}", Host=host)
        assert (reply.status, reply.error["code"]) == (403, "wrong_host")


def test_no_host_at_all_is_refused(guarded: Served) -> None:
    assert b" 403 " in guarded.raw(b"GET /health HTTP/1.0\r\n\r\n")


def test_no_other_site_is_told_that_it_may_ask(guarded: Served) -> None:
    reply = guarded.ask("OPTIONS", "/v1/queues.list", Origin="https://evil.example")
    assert reply.status == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]


# ---- the gate ---------------------------------------------------------------------------------------------


def test_without_a_token_it_is_401_before_the_body_is_read(guarded: Served) -> None:
    head = post("/v1/queue.produce", b"", JSON).replace(b"Content-Length: 0", b"Content-Length: 1000")
    answer = guarded.raw(head)  # and never a byte of the body
    assert b" 401 " in answer
    assert b'www-authenticate: Bearer realm="millpond"' in answer


def test_a_queue_of_another_team_is_403(guarded: Served) -> None:
    assert ask(guarded, "red", "queue.stats", queue="red/q").status == 200
    refused = ask(guarded, "red", "queue.stats", queue="blue/q")
    assert (refused.status, refused.error["code"]) == (403, "forbidden")
    assert ask(guarded, "red", "queues.update", name="red/q", dead_queue="blue/q").status == 403


def test_a_token_names_its_queue_where_the_request_does_not(guarded: Served) -> None:
    for team in ("red", "blue"):
        assert ask(guarded, team, "queue.produce", queue=f"{team}/q", items=[{"text": "x"}]).status == 200
    tokens = {
        team: ask(guarded, team, "queue.lease", queue=f"{team}/q").value["items"][0]["lease"]
        for team in ("red", "blue")
    }
    assert ask(guarded, "red", "queue.complete", leases=list(tokens.values())).status == 403
    assert ask(guarded, "red", "queue.retry", items=[{"lease": tokens["blue"]}]).status == 403
    assert ask(guarded, "red", "queue.state", lease=tokens["blue"], version=0, state_doc=1).status == 403
    assert ask(guarded, "red", "queue.complete", leases=[tokens["red"]]).status == 200


def test_the_gate_is_told_the_kinds_of_items(guarded: Served, gate: TeamGate) -> None:
    refused = ask(guarded, "red", "queue.produce", queue="red/q", items=[{"text": "x"}, {"text": "y", "kind": "job"}])
    assert refused.status == 403
    assert set(gate.asked) == {("queue.produce", "red/q", frozenset({"job"}))}


def test_lists_leave_out_the_queues_of_others(guarded: Served) -> None:
    page = ask(guarded, "red", "queues.list").value
    assert [queue["name"] for queue in page["queues"]] == ["red/q"]


def test_a_rebalance_is_guarded(guarded: Served) -> None:
    assert ask(guarded, "red", "queue.rebalance", queue="blue/q").status == 403
    assert ask(guarded, "red", "queue.rebalance", queue="red/q").status == 200


# ---- pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/openapi.json", "/docs"])
def test_pages_need_no_token_and_answer_head(guarded: Served, path: str) -> None:
    reply = guarded.ask("GET", path)
    head = guarded.ask("HEAD", path)
    assert (reply.status, head.status, head.body) == (200, 200, b"")
    assert head.headers["content-length"] == reply.headers["content-length"] == str(len(reply.body))


def test_metrics_are_guarded_and_somebody_elses(gate: TeamGate) -> None:
    with serve(gate=gate, metrics=lambda accept: (b"up 1\n", "text/plain; version=0.0.4")) as served:
        assert served.ask("GET", "/metrics").status == 401
        reply = served.ask("GET", "/metrics", Authorization="Bearer red")
    assert (reply.body, reply.headers["content-type"]) == (b"up 1\n", "text/plain; version=0.0.4")
    assert gate.asked == [("metrics", None, frozenset())]


def test_without_metrics_there_is_no_page_of_them(server: Served) -> None:
    assert server.ask("GET", "/metrics").status == 404


def test_an_engine_that_is_not_ready_says_why() -> None:
    away = Health(status="not_ready", checks={"disk": Check(status="failed", detail="the disk is away")})
    with serve(ready=lambda draining: away) as served:
        reply = served.ask("GET", "/ready")
    assert reply.status == 503
    assert reply.value["checks"]["disk"] == {"status": "failed", "detail": "the disk is away"}


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_bring_all_they_need_and_may_load_nothing(server: Served, path: str) -> None:
    reply = server.ask("GET", path)
    assert reply.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    page = reply.body.decode()
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page)


@pytest.mark.parametrize("path", ["/metrics", "/health", "/v1/queue.stats"])
def test_two_hosts_are_refused_wherever_they_knock(server: Served, path: str) -> None:
    method = "POST" if path.startswith("/v1") else "GET"
    request = f"{method} {path} HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    answer = server.raw(request.encode())
    assert b" 400 " in answer.partition(b"\r\n")[0]
    assert b"twice" in answer
