"""What is wrong is a 4xx that says where, or a closed connection: never a 5xx, never a hang."""

from __future__ import annotations

import logging
import socket

import msgspec
import pytest

from millpond.http.app import Limits
from millpond.model import Health
from tests.http.served import Reply, Served, post, read_reply, serve

JSON = "Content-Type: application/json"
DEEP = b"[" * 200_000 + b"]" * 200_000


def parsed(data: bytes) -> Reply:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Reply(int(first.split()[1]), headers, body)


# ---- paths, methods, media types --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "nearest"),
    [("/v1/queue.prodce", "/v1/queue.produce"), ("/v1/queues.lst", "/v1/queues.list"), ("/metric", "/metrics")],
)
def test_an_unknown_path_names_the_nearest(server: Served, path: str, nearest: str) -> None:
    reply = server.ask("POST", path, b"{}")
    assert (reply.status, reply.error["code"], reply.error["details"]["nearest"]) == (404, "not_found", nearest)


@pytest.mark.parametrize(
    "path", ["/nothing/like/it", "/v1/", "/v2/queue.produce", "//", "/%2e%2e/%00", "/" + "x" * 5000]
)
def test_other_paths_are_404(server: Served, path: str) -> None:
    assert server.ask("POST", path, b"{}").status == 404


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/queue.produce", "POST"),
        ("OPTIONS", "/v1/queue.produce", "POST"),
        ("DELETE", "/v1/queues.delete", "POST"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_405_with_allow(server: Served, method: str, path: str, allow: str) -> None:
    reply = server.ask(method, path)
    assert (reply.status, reply.headers["allow"]) == (405, allow)
    assert reply.error["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Content-Type: text/plain",),
        ("Content-Type: application/json; charset=latin-1",),
        ("Content-Type: \xff",),
        (JSON, "Content-Encoding: gzip"),
    ],
)
def test_a_wrong_media_type_is_415(server: Served, headers: tuple[str, ...]) -> None:
    reply = parsed(server.raw(post("/v1/queues.list", b"{}", *headers)))
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("header", [JSON, "Authorization: Bearer x"])
def test_a_header_that_is_there_twice_is_400(server: Served, header: str) -> None:
    assert parsed(server.raw(post("/v1/queues.list", b"{}", JSON, header, header))).status == 400


# ---- bodies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "body", "words"),
    [
        ("queues.list", b"", "empty"),
        ("queues.list", b"{", "truncated"),
        ("queues.list", b'{"limit": 1', "truncated"),
        ("queues.list", b"{} {}", "trailing"),
        ("queues.list", b"\xef\xbb\xbf{}", "not JSON"),
        ("queues.list", b"null", "expected `object`, got `null`"),
        ("queues.list", b"[]", "expected `object`, got `array`"),
        ("queues.list", DEEP, "expected `object`"),
        ("queues.list", b'{"limit": NaN}', "not JSON"),
        ("queues.list", b'{"limit": 1e400}', "limit: number out of range"),
        ("queues.list", b'{"limit": "5"}', "limit: expected `int`, got `str`"),
        ("queues.list", b'{"limit": 0}', "limit is 0"),
        ("queues.list", b'{"limit": -99999999999999999999999999}', "limit is below"),
        ("queues.list", b'{"prefix": "\xff"}', "not UTF-8"),
        ("queues.list", b'{"prefix": "\\ud800"}', "not JSON"),
        ("queues.list", b'{"prefx": ""}', "unknown field 'prefx'; did you mean 'prefix'?"),
        ("queues.list", b'{"zzzzzzzz": ""}', "unknown field 'zzzzzzzz'; use prefix, after, limit"),
        ("queues.create", b"{}", "missing required field `name`"),
        ("queues.create", b'{"name": "x y"}', "not a queue name"),
        ("queues.create", b'{"name": "x", "dead": "bury"}', "dead: invalid enum value 'bury'; use one of delete, keep"),
        ("queues.create", b'{"name": "x", "backoff": {"bse": 1}}', "'bse' in backoff; did you mean 'base'?"),
        ("queues.create", b'{"name": "x", "lease_timeout": true}', "lease_timeout: expected"),
        ("queues.create", b'{"name": "x", "lease_timeout": "soon"}', "no duration"),
        ("queue.lease", b'{"queue": "x", "wait": "16m"}', "wait is 960 s"),
        ("queue.produce", b'{"queue": "x", "items": []}', "items is empty"),
        ("queue.produce", b'{"queue": "x", "items": [{}, {"prioriti": 1}]}', "in items[1]; did you mean 'priority'?"),
        ("queue.produce", b'{"queue": "x", "items": [{"priority": "1"}]}', "items[0].priority: expected `int`"),
        ("queue.produce", b'{"queue": "x", "items": [{"priority": 1' + b"0" * 5000 + b"}]}", "out of range"),
        ("queue.produce", b'{"queue": "x", "items": [{"text": "a", "json": 1}]}', "items[0] has more than one"),
        ("queue.produce", b'{"queue": "x", "items": [{"text": "a", "bytes": "YQ=="}]}', "items[0] has more than one"),
        ("queue.produce", b'{"queue": "x", "items": [{"bytes": "?"}]}', "items[0].bytes: invalid base64"),
        ("queue.produce", b'{"queue": "x", "items": [{"json": "\xff"}]}', "items[0].json cannot be kept"),
        ("queue.produce", b'{"queue": "x", "items": [{"json": ' + DEEP + b"}]}", "nested too deeply"),
        ("queue.produce", b'{"queue": "x", "items": [{"enqueue_at": "tomorrow"}]}', "items[0].enqueue_at: "),
        ("queue.state", b'{"lease": "x", "version": 0, "state_doc": ' + DEEP + b"}", "nested too deeply"),
        ("queue.state", b'{"lease": "x", "version": 0}', "missing required field `state_doc`"),
        ("queue.state", b'{"lease": "x", "version": 0, "state_doc": 1}', "not a lease token"),
        ("queue.retry", b'{"items": [{"lease": "x", "intent": "giveup"}]}', "use one of defer, failure"),
        ("queue.redrive", b'{"queue": "x", "filter": {"knd": "x"}}', "'knd' in filter; did you mean 'kind'?"),
        ("queue.subscribe", b'{"queue": "x", "prefetch": 0}', "prefetch is 0"),
        ("queue.claim", b'{"queue": "x"}', "missing required field `claim_id`"),
    ],
)
def test_a_wrong_body_is_400_and_says_where(server: Served, call: str, body: bytes, words: str) -> None:
    reply = server.ask("POST", f"/v1/{call}", body)
    assert (reply.status, reply.error["code"]) == (400, "invalid"), reply
    assert words in reply.error["message"]
    assert "; " in reply.error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x80\x80",
        b"\x81\x01\x02",
        b"\x81\xa5limit\xa1x",
        b"\x81\xa6prefix\xa1\xff",
        b"\x81\xa6prefix\xdb\x7f\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa5limit\xcb\x7f\xf8\0\0\0\0\0\0",
    ],
)
def test_wrong_messagepack_is_400(server: Served, body: bytes) -> None:
    reply = server.ask("POST", "/v1/queues.list", body, Content_Type="application/msgpack")
    assert reply.status == 400
    assert msgspec.msgpack.decode(reply.body)["error"]["code"] == "invalid"


@pytest.mark.parametrize(
    "document", [{1: 2}, {(): 1}, msgspec.msgpack.Ext(5, b"x"), float("nan"), 1 << 63, [[[b"\xff"]], {"k": {2: 3}}]]
)
def test_a_state_document_that_json_cannot_hold_is_400(server: Served, queue: str, document: object) -> None:
    server.must("queue.produce", queue=queue, items=[{"text": "x"}])
    [item] = server.must("queue.lease", queue=queue)["items"]
    body = msgspec.msgpack.encode({"lease": item["lease"], "version": 0, "state_doc": document})
    reply = server.ask("POST", "/v1/queue.state", body, Content_Type="application/msgpack", Accept="application/json")
    assert reply.status == (200 if document == 1 << 63 else 400)


def test_the_last_of_two_fields_of_one_name_counts_and_nothing_breaks(server: Served) -> None:
    assert server.ask("POST", "/v1/queues.list", b'{"limit": 1, "limit": 2}').status == 200


def test_a_field_name_that_is_not_utf8_is_refused(server: Served) -> None:
    assert server.ask("POST", "/v1/queues.list", b'{"\xff": 1}').status == 400


# ---- sizes ------------------------------------------------------------------------------------------------


def test_a_body_over_the_limit_is_413_before_it_is_read(server: Served) -> None:
    head = post("/v1/queue.produce", b"", JSON).replace(b"Content-Length: 0", b"Content-Length: 104857600")
    reply = parsed(server.raw(head))
    assert (reply.status, reply.error["code"]) == (413, "too_large")


def test_a_body_of_100_mb_is_refused_while_it_is_sent(server: Served) -> None:
    """Chunked, so that no length gives it away. The server lets the rest pass by and keeps nothing of it."""
    with server.connect() as sock:
        sock.sendall(post("/v1/queue.produce", b"", JSON).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
        part = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        for _ in range(100):
            sock.sendall(part)
        sock.sendall(b"0\r\n\r\n")
        assert parsed(read_reply(sock)).status == 413
        sock.sendall(post("/v1/queues.list", b"{}", JSON))
        assert parsed(read_reply(sock)).status == 200


def test_more_body_than_content_length_is_another_request(server: Served) -> None:
    """And no good one: what the connection says first depends on who is faster, but it ends."""
    data = server.raw(post("/v1/queues.list", b"{}", JSON) + b"surplus\r\n\r\n")
    assert data.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "99999999999999999999999999"])
def test_a_content_length_that_is_none_is_refused(server: Served, length: str) -> None:
    data = server.raw(
        f"POST /v1/queues.list HTTP/1.1\r\nHost: x\r\n{JSON}\r\nContent-Length: {length}\r\n\r\n{{}}".encode()
    )
    assert not data or data.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413"))


def test_a_body_that_does_not_arrive_in_time_is_408() -> None:
    with serve(limits=Limits(body_timeout_s=0.05)) as served, served.connect() as sock:
        sock.sendall(post("/v1/queues.list", b"{}", JSON)[:-1])
        reply = parsed(read_reply(sock))
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (408, "too_slow", "close")
        assert sock.recv(1) == b""


# ---- connections ------------------------------------------------------------------------------------------


def test_a_half_closed_socket_gets_its_answer_or_a_close(server: Served) -> None:
    with server.connect() as sock:
        sock.sendall(post("/v1/queues.list", b"{}", JSON))
        sock.shutdown(socket.SHUT_WR)
        data = read_reply(sock)
    assert not data or data.startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), server.connect() as sock:
        sock.sendall(post("/v1/queues.list", b"{}" + b" " * 100, JSON)[:-50])
    assert server.call("queues.list").status == 200
    assert not caplog.records


@pytest.mark.parametrize(
    "data", [b"\r\n\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 64]
)
def test_what_is_not_http_is_refused_or_cut_off(server: Served, data: bytes) -> None:
    with server.connect() as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    assert not answer or answer.startswith(b"HTTP/1.1 4")


def test_pipelined_requests_are_answered_in_order(server: Served, queue: str) -> None:
    with server.connect() as sock:
        produce = msgspec.json.encode({"queue": queue, "items": [{"text": "x"}]})
        lease = msgspec.json.encode({"queue": queue, "wait": "5s"})
        sock.sendall(
            post("/v1/queue.produce", produce, JSON) + post("/v1/queue.lease", lease, JSON, "Connection: close")
        )
        data = b""
        while part := sock.recv(65536):
            data += part
    first, second = data.split(b"HTTP/1.1 200 OK")[1:]
    assert b'"items":[{"id":' in first
    assert b'"text":"x"' in second


# ---- bugs -------------------------------------------------------------------------------------------------


def test_a_bug_is_500_with_a_name_and_no_insides(caplog: pytest.LogCaptureFixture) -> None:
    def broken(draining: bool) -> Health:
        raise RuntimeError("secret insides")

    with serve(ready=broken) as served:
        reply = served.ask("GET", "/ready", X_Correlation_Id="find-me")
    assert (reply.status, reply.error["code"]) == (500, "internal")
    assert reply.headers["x-correlation-id"] == reply.error["details"]["correlation_id"] == "find-me"
    assert b"secret" not in reply.body
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "find-me" in record.getMessage()
