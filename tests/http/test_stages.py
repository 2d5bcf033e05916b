"""Items that appear all at once: staged in chunks, published together, or dropped."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.http.served import Served


def stage(server: Served, queue: str, chunk: str, *items: dict[str, Any], txn: str = "import:1") -> Any:
    return server.must("queue.stage", queue=queue, txn=txn, chunk=chunk, items=items)


def leased(server: Served, queue: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = server.must("queue.lease", queue=queue, batch=1_000)["items"]
    return items


def test_chunks_are_seen_when_they_are_published_and_all_at_once(server: Served, queue: str) -> None:
    assert stage(server, queue, "a", {"text": "1"}, {"text": "2"}) == {"items": 2}
    assert stage(server, queue, "b", {"text": "3", "kind": "k", "priority": 5}) == {"items": 1}
    assert leased(server, queue) == []
    published = server.must("stage.publish", queue=queue, txn="import:1", chunks=["a", "b"])
    assert (published["txn"], published["items"], published.get("again")) == ("import:1", 3, None)
    items = leased(server, queue)
    assert [item["text"] for item in items] == ["1", "2", "3"]
    assert (items[2]["kind"], items[2]["priority"]) == ("k", 5)


def test_publishing_twice_is_once(server: Served, queue: str) -> None:
    stage(server, queue, "a", {"text": "1"})
    server.must("stage.publish", queue=queue, txn="import:1", chunks=["a"])
    again = server.must("stage.publish", queue=queue, txn="import:1", chunks=["a"])
    assert (again["items"], again["again"]) == (0, True)
    assert len(leased(server, queue)) == 1


def test_chunks_that_are_not_named_are_dropped(server: Served, queue: str) -> None:
    stage(server, queue, "a", {"text": "kept"})
    stage(server, queue, "of-a-task-that-failed", {"text": "dropped"})
    assert server.must("stage.publish", queue=queue, txn="import:1", chunks=["a"])["items"] == 1
    assert [item["text"] for item in leased(server, queue)] == ["kept"]


def test_what_is_aborted_never_was(server: Served, queue: str) -> None:
    stage(server, queue, "a", {"text": "1"}, {"text": "2"})
    assert server.must("stage.abort", queue=queue, txn="import:1") == {"items": 2}
    refused = server.call("stage.publish", queue=queue, txn="import:1", chunks=["a"])
    assert (refused.status, refused.error["code"]) == (404, "not_found")
    assert leased(server, queue) == []


def test_a_key_that_is_taken_is_a_duplicate_when_published(server: Served, queue: str) -> None:
    server.must("queue.produce", queue=queue, items=[{"text": "first", "key": "k"}])
    stage(server, queue, "a", {"text": "second", "key": "k"}, {"text": "other"})
    published = server.must("stage.publish", queue=queue, txn="import:1", chunks=["a"])
    assert (published["items"], published["duplicates"]) == (1, 1)


def test_the_header_names_staged_items_that_have_no_correlation_id(server: Served, queue: str) -> None:
    items = [{"text": "1"}, {"text": "2", "correlation_id": "own"}]
    body = msgspec.json.encode({"queue": queue, "txn": "t:1", "chunk": "a", "items": items})
    server.ask("POST", "/v1/queue.stage", body, X_Correlation_Id="from header")
    server.must("stage.publish", queue=queue, txn="t:1", chunks=["a"])
    assert [item["correlation_id"] for item in leased(server, queue)] == ["from header", "own"]


def test_a_large_chunk_is_taken_whole(server: Served, queue: str) -> None:
    body = msgspec.msgpack.encode(
        {"queue": queue, "txn": "t:1", "chunk": "a", "items": [{"bytes": b"x" * 200}] * 10_000}
    )
    assert server.ask("POST", "/v1/queue.stage", body, Content_Type="application/msgpack").status == 200
    assert server.must("stage.publish", queue=queue, txn="t:1", chunks=["a"])["items"] == 10_000
    more = msgspec.json.encode({"queue": queue, "txn": "t:2", "chunk": "a", "items": [{"text": ""}] * 10_001})
    refused = server.ask("POST", "/v1/queue.stage", more)
    assert (refused.status, refused.error["code"]) == (413, "too_large")
