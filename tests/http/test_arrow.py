"""Arrow over HTTP: pages by columns, stages by columns, and what is said without pyarrow."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from millpond.wire import arrow
from tests.http.served import Reply, Served
from tests.http.streams import ARROW, read, stream

NEXT = "x-millpond-next"


def ask(server: Served, call: str, accept: str = ARROW, **fields: Any) -> Reply:
    return server.ask("POST", f"/v1/{call}", msgspec.json.encode(fields), Accept=accept)


def stage(server: Served, query: str, body: bytes, **headers: str) -> Reply:
    return server.ask("POST", f"/v1/queue.stage?{query}", body, Content_Type=ARROW, **headers)


# ---- pages ------------------------------------------------------------------------------------------------


def test_a_claim_is_read_by_columns_with_the_cursor_in_a_header(server: Served, queue: str) -> None:
    items = [{"text": "a"}, {"text": "b", "key": "k", "kind": "x", "delay": 0}, {"bytes": "/w=="}]
    made = server.must("queue.produce", queue=queue, items=items)["items"]
    server.must("queue.claim", queue=queue, claim_id="c")
    first = ask(server, "claim.read", queue=queue, claim_id="c", limit=2)
    assert (first.status, first.headers["content-type"]) == (200, ARROW)
    rest = ask(server, "claim.read", queue=queue, claim_id="c", after=first.headers[NEXT])
    assert NEXT not in rest.headers
    table = pa.concat_tables([read(first.body), read(rest.body)])
    assert table.schema.equals(arrow.schema())
    assert table["id"].to_pylist() == [one["id"] for one in made]
    assert table["correlation_id"].to_pylist() == [one["correlation_id"] for one in made]
    assert table["payload"].to_pylist() == [b"a", b"b", b"\xff"]
    assert table["key"].to_pylist() == [None, "k", None]
    assert set(table["state"].to_pylist()) == {"claimed"}


@pytest.mark.parametrize("call", ["claim.read", "items.list"])
def test_rows_say_what_objects_say(server: Served, queue: str, call: str) -> None:
    items: list[dict[str, Any]] = [{"text": f"{number}"} for number in range(20)]
    items[3] |= {"key": "k", "priority": -1, "reference": "r", "encoding": "e", "max_attempts": 2}
    server.must("queue.produce", queue=queue, items=items)
    claim = server.must("queue.claim", queue=queue, claim_id="c")
    named = {"claim_id": claim["claim_id"]} if call == "claim.read" else {}
    shown = server.must(call, queue=queue, **named)["items"]
    rows = read(ask(server, call, queue=queue, **named).body).to_pylist()
    assert len(rows) == 20
    for row, item in zip(rows, shown, strict=True):
        assert row.pop("payload").decode() == item["text"]
        for name, value in row.items():
            told = item.get(name, type(value)() if isinstance(value, int | str) else None)
            assert value == (datetime.fromisoformat(told) if isinstance(value, datetime) else told), name


def test_a_list_by_columns_goes_on_with_its_cursor(server: Served, queue: str) -> None:
    server.must("queue.produce", queue=queue, items=[{"text": f"{number}"} for number in range(5)])
    first = ask(server, "items.list", queue=queue, limit=3)
    rest = ask(server, "items.list", queue=queue, after=first.headers[NEXT])
    assert read(first.body).num_rows + read(rest.body).num_rows == 5
    assert NEXT not in rest.headers


def test_a_page_of_nothing_is_a_stream_of_no_rows(server: Served, queue: str) -> None:
    reply = ask(server, "items.list", queue=queue)
    assert (reply.status, read(reply.body).num_rows) == (200, 0)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (f"{ARROW}, application/json;q=0.5", ARROW),
        (f"application/json;q=0.5, {ARROW};q=0.9", ARROW),
        (f"{ARROW};q=0.5, application/msgpack", "application/msgpack"),
        (f"application/json, {ARROW}", "application/json"),
        (f"{ARROW};q=0", "application/json"),
        ("*/*", "application/json"),
    ],
)
def test_arrow_is_for_who_likes_it_best(server: Served, queue: str, accept: str, wanted: str) -> None:
    assert ask(server, "items.list", accept, queue=queue).headers["content-type"] == wanted


def test_errors_and_other_calls_are_never_arrow(server: Served, queue: str) -> None:
    refused = ask(server, "claim.read", queue=queue, claim_id="none")
    assert (refused.status, refused.headers["content-type"]) == (404, "application/json")
    assert refused.error["code"] == "not_found"
    assert ask(server, "queue.stats", queue=queue).headers["content-type"] == "application/json"


# ---- stages -----------------------------------------------------------------------------------------------


def test_items_are_staged_by_columns(server: Served, queue: str) -> None:
    at = datetime(2020, 1, 1, tzinfo=UTC)
    body = stream(payload=["1", "2", "3"], key=[None, "k", None], priority=[None, 7, None], enqueue_at=[None, None, at])
    reply = stage(server, f"queue={queue}&txn=import%3A1&chunk=a", body)
    assert (reply.status, reply.value) == (200, {"items": 3})
    assert server.must("stage.publish", queue=queue, txn="import:1", chunks=["a"])["items"] == 3
    items = server.must("items.list", queue=queue)["items"]
    assert [item["text"] for item in items] == ["1", "2", "3"]
    assert (items[1]["key"], items[1]["priority"]) == ("k", 7)


def test_a_stage_by_columns_answers_as_accept_says(server: Served, queue: str) -> None:
    reply = stage(server, f"queue={queue}&txn=t:1&chunk=a", stream(payload=[b"x"]), Accept="application/msgpack")
    assert msgspec.msgpack.decode(reply.body) == {"items": 1}


def test_the_header_names_rows_that_have_no_correlation_id(server: Served, queue: str) -> None:
    body = stream(payload=[b"1", b"2"], correlation_id=[None, "own"])
    stage(server, f"queue={queue}&txn=t:1&chunk=a", body, X_Correlation_Id="from header")
    server.must("stage.publish", queue=queue, txn="t:1", chunks=["a"])
    items = server.must("items.list", queue=queue)["items"]
    assert [item["correlation_id"] for item in items] == ["from header", "own"]


@pytest.mark.parametrize(
    ("query", "body", "words"),
    [
        ("queue={}&txn=t", stream(payload=[b"x"]), "no chunk in the query string"),
        ("queue={}&txn=t&chunk=c", b"", "no whole Arrow IPC stream"),
        ("queue={}&txn=t&chunk=c", b'{"items": []}', "no whole Arrow IPC stream"),
        ("queue={}&txn=t&chunk=c", stream(payload=[b"x"], prioritee=[1]), "did you mean 'priority'?"),
        ("queue={}&txn=t&chunk=c", stream(payload=[b"x", None]), "column 'payload', row 1"),
        ("queue={}&txn=t&chunk=c", stream(payload=[b"x", b"y"], delay=[None, "soon"]), "items[1].delay"),
        ("queue={}&txn=t&chunk=c", stream(payload=[b"x"], priority=[1 << 40]), "items[0].priority"),
        ("queue={}&txn=t&chunk=c", stream(payload=pa.array([], pa.binary())), "items is empty"),
    ],
)
def test_a_wrong_stage_is_400_and_says_where(server: Served, queue: str, query: str, body: bytes, words: str) -> None:
    reply = stage(server, query.format(queue), body)
    assert (reply.status, reply.error["code"]) == (400, "invalid"), reply
    assert words in reply.error["message"]


def test_too_many_rows_are_413(server: Served, queue: str) -> None:
    reply = stage(server, f"queue={queue}&txn=t&chunk=c", stream(payload=[b""] * 10_001))
    assert (reply.status, reply.error["code"]) == (413, "too_large")


def test_arrow_is_415_where_it_is_not_taken(server: Served, queue: str) -> None:
    reply = server.ask("POST", f"/v1/queue.produce?queue={queue}", stream(payload=[b"x"]), Content_Type=ARROW)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    reply = server.ask("POST", f"/v1/queue.stage?queue={queue}", b"{}", Content_Type="text/plain")
    assert reply.status == 415
    assert ARROW in reply.error["message"]


def test_without_pyarrow_the_server_says_what_to_install(
    server: Served, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = stream(payload=[b"x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for reply in (
        stage(server, f"queue={queue}&txn=t&chunk=c", body),
        ask(server, "items.list", queue=queue),
    ):
        assert (reply.status, reply.error["code"]) == (501, "not_built")
        assert "install millpond[lake]" in reply.error["message"]
    assert server.must("items.list", queue=queue) == {"items": []}
