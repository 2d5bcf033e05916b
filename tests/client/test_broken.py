"""Servers and lines that fail: what is tried again, what is not, and what the caller is told."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from millpond.errors import (
    BadReply,
    DiskFull,
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    QueueExists,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from tests.client.scripted import Step, cut, head, raw, refusal, reply, reset, scripted, silent

Make = Callable[..., Any]
PRODUCED = reply({"items": [{"id": "1"}]})
LEASED_NOTHING = reply({"items": []})
RESULTS = reply({"results": [{"ok": True}]})


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(reset, id="a reset"),
        pytest.param(cut(), id="closed without a reply"),
        pytest.param(cut(head(200, 100) + b"half"), id="half a reply"),
        pytest.param(cut(b"HTTP/1.1 20"), id="half a head"),
        pytest.param(refusal("unavailable", 503), id="503"),
        pytest.param(refusal("outcome_unknown", 503), id="an unknown outcome"),
        pytest.param(refusal("closed", 503, "Connection: close"), id="shutting down"),
        pytest.param(refusal("disk_full", 507), id="a full disk"),
        pytest.param(refusal("too_many_requests", 429, "Retry-After: 0"), id="429"),
        pytest.param(raw(b"HTTP/1.1 502 X\r\nContent-Length: 3\r\n\r\nno!"), id="a proxy's 502"),
    ],
)
def test_a_produce_is_sent_again_under_the_same_request_id(make: Make, fault: Step) -> None:
    with scripted(fault, fault, PRODUCED) as server, make(server.url) as client:
        assert client.produce("q", [b"x"])[0].id == "1"
        ids = {body["request_id"] for _, body in server.requests}
        assert len(server.requests) == 3
        assert len(ids) == 1
        assert ids != {None}


@pytest.mark.parametrize(
    ("call", "args", "answer"),
    [
        ("complete", (["t"],), RESULTS),
        ("extend", (["t"],), RESULTS),
        ("retry", (["t"],), RESULTS),
        ("cancel", ("q", ["i"]), RESULTS),
        ("list_queues", (), reply({"queues": []})),
        ("clear", ("q",), reply({"cleared": {}})),
    ],
)
def test_what_may_be_done_twice_is_sent_again(make: Make, call: str, args: tuple[Any, ...], answer: Step) -> None:
    with scripted(reset, answer) as server, make(server.url) as client:
        getattr(client, call)(*args)
        assert len(server.requests) == 2


def test_a_lease_that_may_have_been_granted_is_not_asked_for_again(make: Make) -> None:
    with scripted(reset, LEASED_NOTHING) as server, make(server.url) as client:
        with pytest.raises(OutcomeUnknown):
            client.lease("q")
        assert len(server.requests) == 1


def test_a_lease_that_was_refused_is_asked_for_again(make: Make) -> None:
    with scripted(refusal("unavailable", 503), LEASED_NOTHING) as server, make(server.url) as client:
        assert list(client.lease("q")) == []


def test_a_broken_long_poll_goes_on_for_the_rest_of_its_wait(make: Make) -> None:
    with scripted(reset, LEASED_NOTHING) as server, make(server.url) as client:
        assert list(client.lease("q", wait="1m")) == []
        [(_, first), (_, second)] = server.requests
        assert first["wait"] == "1m"
        assert 59 < second["wait"] < 60


@pytest.mark.parametrize("fault", [reset, refusal("closed", 503)])
def test_a_broken_wait_for_an_item_goes_on_for_the_rest_of_it(make: Make, fault: Step) -> None:
    instant = "2026-11-16T00:00:00Z"
    fields = {"id": "i", "state": "dead", "partition": 0, "correlation_id": "c", "created_at": instant}
    with scripted(fault, reply(fields | {"expire_deadline": instant})) as server, make(server.url) as client:
        item = client.get_item("q", "i", wait="1m")
        assert (item.state, item.updated_at) == ("dead", item.created_at)
        [(_, first), (_, second)] = server.requests
        assert first["wait"] == "1m"
        assert 55 < second["wait"] < 60


def test_a_refused_repeat_of_a_lost_create_is_in_doubt(make: Make) -> None:
    lost = scripted(reset, refusal("queue_exists", 409))
    with lost as server, make(server.url) as client, pytest.raises(OutcomeUnknown, match="queue_exists"):
        client.create_queue("q")
    with scripted(refusal("queue_exists", 409)) as server, make(server.url) as client, pytest.raises(QueueExists):
        client.create_queue("q")


def test_a_queue_that_a_lost_delete_deleted_is_deleted(make: Make) -> None:
    with scripted(reset, refusal("not_found", 404)) as server, make(server.url) as client:
        assert client.delete_queue("q") is None
    with scripted(refusal("not_found", 404)) as server, make(server.url) as client, pytest.raises(NotFound):
        client.delete_queue("q")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("unauthorized", 401, Unauthorized),
        ("forbidden", 403, Forbidden),
        ("internal", 500, InternalError),
        ("of_tomorrow", 418, InvalidRequest),
        ("wrong_host", 403, Forbidden),
    ],
)
def test_what_no_try_mends_is_raised_at_once(make: Make, code: str, status: int, kind: type[Exception]) -> None:
    with scripted(refusal(code, status), PRODUCED) as server, make(server.url) as client:
        with pytest.raises(kind):
            client.produce("q", [b"x"])
        assert len(server.requests) == 1


def test_the_last_refusal_is_told_when_time_is_up(make: Make) -> None:
    steps = [refusal("unavailable", 503), refusal("disk_full", 507, "Retry-After: 600")]
    with scripted(*steps) as server, make(server.url) as client:
        with pytest.raises(DiskFull):
            client.produce("q", [b"x"])
        assert len(server.requests) == 2


def test_doubt_is_not_forgotten_for_a_later_failure(make: Make) -> None:
    later = [refusal("unavailable", 503)] * 10_000
    with scripted(reset, *later) as server, make(server.url, timeout=0.05) as client, pytest.raises(OutcomeUnknown):
        client.produce("q", [b"x"])


def test_a_retry_after_beyond_the_deadline_is_not_waited_for(make: Make) -> None:
    with scripted(refusal("too_many_requests", 429, "Retry-After: 60")) as server, make(server.url) as client:
        with pytest.raises(TooManyRequests) as caught:
            client.stats("q")
        assert caught.value.retry_after == 60
        assert len(server.requests) == 1


def test_a_silent_server_is_waited_for_until_the_deadline(make: Make) -> None:
    with scripted(silent) as server, make(server.url, timeout=0.05) as client, pytest.raises(OutcomeUnknown):
        client.produce("q", [b"x"])


def test_nobody_listens(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with make(f"http://127.0.0.1:{port}", timeout=0.05) as client, pytest.raises(Unavailable, match="is the server up"):
        client.lease("q")


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 X\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 X\r\nContent-Type: application/msgpack\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 302 X\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 X\r\nX: " + b"x" * (1 << 20),
        b"HTTP/1.1 404 X\r\nContent-Type: text/html\r\nContent-Length: 5\r\n\r\n<html",
        b'HTTP/1.1 404 X\r\nContent-Type: application/json\r\nContent-Length: 18\r\n\r\n{"error":"nobody"}',
        b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=["no HTTP", "no type", "no MessagePack", "a redirect", "an endless header", "a 404", "JSON", "a 500"],
)
def test_garbage_is_not_tried_again(make: Make, data: bytes) -> None:
    with scripted(cut(data)) as server, make(server.url) as client:
        with pytest.raises(BadReply):
            client.stats("q")
        assert len(server.requests) == 1


def test_a_reply_over_the_limit_is_refused(make: Make) -> None:
    large = scripted(reply("x" * 2_000))
    with large as server, make(server.url, reply_bytes_max=1_000) as client, pytest.raises(BadReply, match="bytes_max"):
        client.stats("q")


def test_connections_are_used_again(make: Make) -> None:
    with scripted(*[LEASED_NOTHING] * 5) as server, make(server.url) as client:
        for _ in range(5):
            client.lease("q")
        assert server.connections == 1


def test_a_connection_that_the_server_ends_is_not_used_again(make: Make) -> None:
    ends = reply({"items": []}, 200, "Connection: close")
    with scripted(ends, ends, ends) as server, make(server.url) as client:
        for _ in range(3):
            client.lease("q")
        assert server.connections == 3


def test_an_interim_reply_is_passed_over(make: Make) -> None:
    body = b"\x81\xa5items\x90"
    interim = raw(b"HTTP/1.1 100 Continue\r\n\r\n" + head(200, len(body)) + body)
    with scripted(interim) as server, make(server.url) as client:
        assert list(client.lease("q")) == []


def test_headers_carry_token_and_correlation_id(make: Make) -> None:
    with scripted(LEASED_NOTHING) as server, make(server.url, token="s3same", correlation_id="c-1") as client:
        client.lease("q")
        [sent] = server.heads
        assert b"\r\nAuthorization: Bearer s3same\r\n" in sent
        assert b"\r\nX-Correlation-Id: c-1\r\n" in sent


@pytest.mark.parametrize("options", [{"token": "a\r\nb"}, {"token": ""}, {"correlation_id": "a\nb"}, {"timeout": 0}])
def test_wrong_options_are_refused(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make("http://h", **options)
    assert "a\r\nb" not in str(caught.value)
