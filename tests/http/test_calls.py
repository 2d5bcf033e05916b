"""Every call over a real socket, in JSON and in MessagePack."""

from __future__ import annotations

import base64
from random import Random
from typing import Any

import msgspec
import pytest

from millpond.wire import JSON, MSGPACK, Codec
from tests.http.served import Served


def produce(server: Served, queue: str, *items: dict[str, Any]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = server.must("queue.produce", queue=queue, items=items or [{"text": "x"}])["items"]
    return made


def lease(server: Served, queue: str, batch: int = 10) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = server.must("queue.lease", queue=queue, batch=batch)["items"]
    return items


# ---- queues -----------------------------------------------------------------------------------------------


def test_a_queue_is_made_changed_shown_and_deleted(server: Served) -> None:
    made = server.must("queues.create", name="a/b", lease_timeout="1m30s", backoff={"base": 3, "cap": "10s"})
    assert (made["lease_timeout"], made["backoff"]) == (90.0, {"base": 3.0, "cap": 10.0, "jitter": 0.0})
    changed = server.must("queues.update", name="a/b", max_attempts=7, backoff={"jitter": 0.5})
    assert (changed["max_attempts"], changed["lease_timeout"]) == (7, 90.0)
    assert changed["backoff"] == {"base": 3.0, "cap": 10.0, "jitter": 0.5}
    assert server.must("queues.info", name="a/b")["max_attempts"] == 7
    assert server.call("queues.delete", name="a/b").body == b"{}"
    assert server.call("queues.info", name="a/b").status == 404


def test_queues_are_listed_by_prefix_and_page(server: Served) -> None:
    for name in ("list/1", "list/2", "list/3"):
        server.must("queues.create", name=name)
    page = server.must("queues.list", prefix="list/", limit=2)
    assert [one["name"] for one in page["queues"]] == ["list/1", "list/2"]
    rest = server.must("queues.list", prefix="list/", after=page["next"], limit=10**9)
    assert [one["name"] for one in rest["queues"]] == ["list/3"]
    assert "next" not in rest


def test_the_dead_queue_is_unset_by_null_and_kept_when_left_out(server: Served) -> None:
    server.must("queues.create", name="with/dead")
    server.must("queues.create", name="with", dead_queue="with/dead")
    assert server.must("queues.update", name="with", max_attempts=2)["dead_queue"] == "with/dead"
    assert server.must("queues.update", name="with", dead_queue=None)["dead_queue"] is None


def test_pause_resume_stats_and_clear(server: Served, queue: str) -> None:
    assert server.must("queue.pause", queue=queue)["paused"] is True
    produce(server, queue, {"text": "1"}, {"text": "2"})
    assert lease(server, queue) == []
    assert server.must("queue.resume", queue=queue)["paused"] is False
    assert server.must("queue.stats", queue=queue)["counts"]["ready"] == 2
    assert server.must("queue.clear", queue=queue)["cleared"]["ready"] == 2


# ---- payloads ---------------------------------------------------------------------------------------------


def test_text_bytes_and_json_come_back_as_text_where_they_are_utf8(server: Served, queue: str) -> None:
    produce(
        server,
        queue,
        {"text": "grüße\u0000"},
        {"bytes": base64.b64encode(b"plain").decode()},
        {"bytes": base64.b64encode(b"\xff\x00").decode()},
        {"json": {"a": [1, 2.5, None, "é"]}},
        {},
        {"json": None},
    )
    items = lease(server, queue)
    assert [item.get("text") for item in items] == ["grüße\u0000", "plain", None, '{"a":[1,2.5,null,"é"]}', "", "null"]
    assert base64.b64decode(items[2]["bytes"]) == b"\xff\x00"


def test_json_is_kept_compact_and_is_not_read_as_numbers(server: Served, queue: str) -> None:
    body = b'{"queue":"%s","items":[{"json": { "n" : 1e999, "big":123456789012345678901234567890 }}]}' % queue.encode()
    assert server.ask("POST", "/v1/queue.produce", body).status == 200
    assert lease(server, queue)[0]["text"] == '{"n":1e999,"big":123456789012345678901234567890}'


def test_messagepack_carries_bytes_as_they_are(server: Served, queue: str) -> None:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    kind = "application/msgpack"
    body = encode({"queue": queue, "items": [{"bytes": b"\xff\x00"}, {"text": "t"}, {"json": {"a": 1}}]})
    reply = server.ask("POST", "/v1/queue.produce", body, Content_Type=kind)
    assert (reply.status, reply.headers["content-type"]) == (200, kind)
    assert len(decode(reply.body)["items"]) == 3
    body = encode({"queue": queue, "batch": 3})
    items = decode(server.ask("POST", "/v1/queue.lease", body, Content_Type=kind).body)["items"]
    assert [item["bytes"] for item in items] == [b"\xff\x00", b"t", b'{"a":1}']
    written = {"lease": items[0]["lease"], "version": 0, "state_doc": {"raw": b"\xfe"}}
    assert decode(server.ask("POST", "/v1/queue.state", encode(written), Content_Type=kind).body)["version"] == 1


@pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=["json", "msgpack"])
def test_batches_of_any_size_are_answered_as_the_application_does(server: Served, queue: str, codec: Codec) -> None:
    """A produce with a request id and a complete may be sent twice: once as it is, once so that it goes the long way.

    The numbers of the items get more digits meanwhile, decimal and hex, and tokens come back in every disorder.
    """
    rng = Random(11)

    def both_ways(call: str, request: dict[str, Any]) -> dict[str, Any]:
        asked = {"Content_Type": codec.media_type}
        one = server.ask("POST", f"/v1/{call}", codec.encode(request), **asked)
        other = server.ask("POST", f"/v1/{call}", codec.encode(request), Expect="100-continue", **asked)
        assert (one.status, one.body) == (other.status, other.body)
        return codec.decode(one.body, dict[str, Any])

    for turn, count in enumerate([5, 9, 90, 900, 1_000, 1_000, 1_000, 90, *(rng.randint(2, 30) for _ in range(9))]):
        items = [{"text": "x" * rng.randint(0, 3)} for _ in range(count)]
        made = both_ways("queue.produce", {"queue": queue, "items": items, "request_id": f"r{turn}"})["items"]
        body = codec.encode({"queue": queue, "batch": count})
        reply = server.ask("POST", "/v1/queue.lease", body, Content_Type=codec.media_type)
        leased = codec.decode(reply.body, dict[str, Any])["items"]
        names = [(item["id"], item["correlation_id"]) for item in leased]
        assert names == [(item["id"], item["correlation_id"]) for item in made]
        leases = {item["lease"]: None for item in leased}
        for some in disordered([*leases], rng):
            results = both_ways("queue.complete", {"queue": queue, "leases": some})["results"]
            assert ["error" in result for result in results] == [token not in leases for token in some]
        assert server.must("queue.stats", queue=queue)["counts"].get("leased", 0) == 0


def disordered(tokens: list[str], rng: Random) -> list[list[str]]:
    """Some, then with a wrong one among them, shuffled, twice in one request; at last all of them, in their order."""
    place = rng.randrange(1, len(tokens))
    some, rest = tokens[:place], tokens[place:]
    wrong = rng.choice(["", "x", tokens[0][:-1], tokens[-1] + "0", tokens[0][::-1], f"{tokens[0]}\n{tokens[-1]}"])
    return [some, [*some, wrong, *rest[:1]], rng.sample(tokens, place), rest[:9] * 2, tokens]


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("application/msgpack", "application/msgpack"),
        ("application/json;q=0.2, application/x-msgpack;q=0.9", "application/msgpack"),
        ("application/json, application/msgpack", "application/json"),
        ("*/*", "application/json"),
        ("text/html", "application/json"),
        ("application/msgpack;q=nonsense", "application/json"),
    ],
)
def test_the_reply_follows_accept_else_the_request(server: Served, queue: str, accept: str, wanted: str) -> None:
    body = msgspec.json.encode({"queue": queue})
    assert server.ask("POST", "/v1/queue.lease", body, Accept=accept).headers["content-type"] == wanted
    refused = server.ask("POST", "/v1/queue.lease", b"{}", Accept=accept)
    assert (refused.status, refused.headers["content-type"]) == (400, wanted)


# ---- items ------------------------------------------------------------------------------------------------


def test_a_produced_item_is_leased_with_its_fields(server: Served, queue: str) -> None:
    [made] = produce(server, queue, {"text": "x", "kind": "k", "priority": -3, "reference": "r", "key": "key"})
    [item] = lease(server, queue)
    assert item["id"] == made["id"]
    assert item["correlation_id"] == made["correlation_id"]
    assert (item["kind"], item["priority"], item["reference"], item["key"]) == ("k", -3, "r", "key")
    assert (item["attempts"], item["deliveries"], item["text"]) == (1, 1, "x")
    assert item["lease_deadline"].endswith("Z")
    assert "last_error" not in item


def test_a_key_that_is_taken_is_a_duplicate_or_a_conflict(server: Served, queue: str) -> None:
    [first] = produce(server, queue, {"text": "x", "key": "k"})
    [again] = produce(server, queue, {"text": "y", "key": "k"})
    assert again == {"id": first["id"], "correlation_id": first["correlation_id"], "duplicate": True}
    refused = server.call("queue.produce", queue=queue, items=[{"text": "y", "key": "k"}], on_conflict="reject")
    assert (refused.status, refused.error["code"]) == (409, "key_conflict")


def test_complete_answers_a_token_each(server: Served, queue: str) -> None:
    produce(server, queue, {"text": "1"}, {"text": "2"})
    tokens = [item["lease"] for item in lease(server, queue)]
    results = server.must("queue.complete", leases=[tokens[0], "nonsense", tokens[1]])["results"]
    assert [result.get("ok", False) for result in results] == [True, False, True]
    assert results[1]["error"]["code"] == "invalid"
    assert server.must("queue.complete", queue=queue, leases=tokens)["results"][0]["ok"] is True


def test_a_retry_counts_and_carries_its_error(server: Served, queue: str) -> None:
    produce(server, queue)
    [item] = lease(server, queue)
    [result] = server.must("queue.retry", items=[{"lease": item["lease"], "delay": 0, "error": "boom"}])["results"]
    assert result["ok"] is True
    [again] = lease(server, queue)
    assert (again["attempts"], again["last_error"]) == (2, "boom")
    server.must("queue.retry", items=[{"lease": again["lease"], "intent": "defer"}])
    assert lease(server, queue)[0]["attempts"] == 2


def test_extend_moves_the_deadline_and_zero_releases(server: Served, queue: str) -> None:
    produce(server, queue)
    [item] = lease(server, queue)
    [result] = server.must("queue.extend", leases=[item["lease"]], lease_timeout="1h")["results"]
    assert result["lease_deadline"] > item["lease_deadline"]
    server.must("queue.extend", leases=[item["lease"]], lease_timeout=0)
    assert len(lease(server, queue)) == 1


def test_a_state_document_is_written_with_its_version(server: Served, queue: str) -> None:
    produce(server, queue)
    [item] = lease(server, queue)
    written = server.must("queue.state", lease=item["lease"], version=0, state_doc={"step": [1, None]})
    assert written["version"] == 1
    stale = server.call("queue.state", lease=item["lease"], version=0, state_doc=None)
    assert (stale.status, stale.error["code"], stale.error["details"]["version"]) == (409, "version_conflict", 1)
    assert stale.headers["x-correlation-id"] == item["correlation_id"]
    server.must("queue.retry", items=[{"lease": item["lease"], "delay": 0}])
    [again] = lease(server, queue)
    assert (again["state_doc"], again["state_version"]) == ({"step": [1, None]}, 1)


def test_items_are_looked_at_cancelled_and_redriven(server: Served, queue: str) -> None:
    made = produce(server, queue, {"text": "1"}, {"text": "2", "kind": "k"})
    page = server.must("items.list", queue=queue, kind="k")
    assert [item["id"] for item in page["items"]] == [made[1]["id"]]
    assert server.must("items.get", queue=queue, id=made[0]["id"])["text"] == "1"
    assert server.must("queue.cancel", queue=queue, ids=[made[0]["id"]])["results"][0]["ok"] is True
    [item] = lease(server, queue)
    server.must("queue.retry", items=[{"lease": item["lease"], "dead": True}])
    redriven = server.must("queue.redrive", queue=queue, filter={"kind": "k", "dead_reason": "rejected"}, dry_run=True)
    assert redriven["matched"] == 1


def test_items_that_wait_are_buried_by_id(server: Served, queue: str) -> None:
    [made] = produce(server, queue)
    results = server.must("queue.bury", queue=queue, ids=[made["id"], "none"], error="not wanted")["results"]
    assert [result.get("ok", False) for result in results] == [True, False]
    item = server.must("items.get", queue=queue, id=made["id"])
    assert (item["state"], item["dead_reason"], item["last_error"]) == ("dead", "rejected", "not wanted")


def test_items_that_wait_for_their_time_are_made_ready_by_id(server: Served, queue: str) -> None:
    [made] = produce(server, queue, {"text": "1", "delay": "1h"})
    assert lease(server, queue) == []
    results = server.must("queue.ready", queue=queue, ids=[made["id"], "none"])["results"]
    assert [result.get("ok", False) for result in results] == [True, False]
    assert [item["id"] for item in lease(server, queue)] == [made["id"]]


def test_ready_items_are_listed_as_such(server: Served, queue: str) -> None:
    made = produce(server, queue, {"text": "1"}, {"text": "2", "kind": "k"})
    listed = server.must("items.list", queue=queue, state="ready")["items"]
    assert [(item["id"], item["state"]) for item in listed] == [(one["id"], "ready") for one in made]
    assert all(item["updated_at"] == item["created_at"] for item in listed)


def test_a_queue_is_rebalanced_and_says_how_far_it_is(server: Served, queue: str) -> None:
    planned = server.must("queue.rebalance", queue=queue, partitions=3, dry_run=True)
    assert (planned["status"], planned["added"], planned["stores"]) == ("planned", [1, 2], {"default": 3})
    assert server.must("queue.rebalance", queue=queue, partitions=3)["status"] == "done"
    assert server.must("queues.info", name=queue)["rebalance"]["status"] == "done"
    for _ in range(3):
        produce(server, queue)
    running = server.must("queue.rebalance", queue=queue, partitions=1)
    assert (running["status"], running["removing"], running["items"]) == ("running", [1, 2], {"ready": 2})
    refused = server.call("queue.rebalance", queue=queue, partitions=2)
    assert (refused.status, refused.error["details"]["rebalance"]["removing"]) == (409, [1, 2])


@pytest.mark.parametrize("partitions", [0, 1_000_000, "2", 1.5, [1]])
def test_a_wrong_number_of_partitions_is_400(server: Served, queue: str, partitions: Any) -> None:
    reply = server.call("queue.rebalance", queue=queue, partitions=partitions)
    assert (reply.status, reply.error["code"]) == (400, "invalid")


# ---- correlation ids --------------------------------------------------------------------------------------


def test_the_header_names_items_that_have_no_correlation_id(server: Served, queue: str) -> None:
    body = msgspec.json.encode({"queue": queue, "items": [{"text": "1"}, {"text": "2", "correlation_id": "own"}]})
    reply = server.ask("POST", "/v1/queue.produce", body, X_Correlation_Id="from header")
    assert [item["correlation_id"] for item in reply.value["items"]] == ["from header", "own"]


def test_single_item_calls_mirror_the_items_correlation_id(server: Served, queue: str) -> None:
    made = server.call("queue.produce", queue=queue, items=[{"text": "x"}], request_id=f"{queue}-1")
    [item] = made.value["items"]
    again = [server.call("queue.produce", queue=queue, items=[{"text": "x"}], request_id=f"{queue}-1") for _ in "ab"]
    assert [one.headers["x-correlation-id"] for one in (made, *again)] == [item["correlation_id"]] * 3
    leased = server.call("queue.lease", queue=queue)
    assert leased.headers["x-correlation-id"] == item["correlation_id"]
    got = server.call("items.get", queue=queue, id=item["id"])
    assert got.headers["x-correlation-id"] == item["correlation_id"]
    done = server.call("queue.complete", leases=[leased.value["items"][0]["lease"]])
    assert done.headers["x-correlation-id"] == item["correlation_id"]


def test_what_is_no_lease_token_mirrors_the_requests_correlation_id(server: Served, queue: str) -> None:
    body = msgspec.json.encode({"queue": queue, "leases": ["nonsense"]})
    for _ in range(2):  # its head is known the second time
        reply = server.ask("POST", "/v1/queue.complete", body, X_Correlation_Id="mine")
        assert (reply.status, reply.headers["x-correlation-id"]) == (200, "mine")


def test_a_correlation_id_that_is_not_printable_is_not_mirrored(server: Served, queue: str) -> None:
    body = msgspec.json.encode({"queue": queue})
    assert "x-correlation-id" not in server.ask("POST", "/v1/queue.lease", body, X_Correlation_Id="é").headers
    assert "x-correlation-id" not in server.ask("POST", "/v1/queue.lease", body, X_Correlation_Id="x" * 129).headers
