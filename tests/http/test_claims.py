"""Claims over HTTP: made, read, judged and ended; who waits for one, and who was fenced off."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from millpond import AsyncPond
from millpond.errors import Unauthorized
from millpond.http.app import App
from millpond.http.gate import OpenGate
from millpond.model import Claim
from millpond.wire import payloads
from tests.http.served import Reply, Served, post, serve

JSON = "Content-Type: application/json"


def fill(server: Served, queue: str, count: int = 10) -> list[str]:
    items = [{"text": f"item {number}"} for number in range(count)]
    return [item["id"] for item in server.must("queue.produce", queue=queue, items=items)["items"]]


def read(server: Served, queue: str, claim_id: str, **fields: Any) -> list[dict[str, Any]]:
    """All pages of a part."""
    items: list[dict[str, Any]] = []
    page = server.must("claim.read", queue=queue, claim_id=claim_id, **fields)
    items += page["items"]
    while "next" in page:
        page = server.must("claim.read", queue=queue, claim_id=claim_id, after=page["next"], **fields)
        items += page["items"]
    return items


def counts(server: Served, queue: str) -> dict[str, int]:
    found: dict[str, int] = server.must("queue.stats", queue=queue)["counts"]
    return {state: count for state, count in found.items() if count}


# ---- a claim's life ---------------------------------------------------------------------------------------


def test_a_claim_is_read_in_pages_and_completed(server: Served, queue: str) -> None:
    ids = fill(server, queue)
    claim = server.must("queue.claim", queue=queue, claim_id="c", max_items=7, owner="me")
    assert (claim["claim_id"], claim["items"], claim["owner"]) == ("c", 7, "me")
    assert claim["parts"] == [{"part": 0, "items": 7}]
    items = read(server, queue, "c", limit=3)
    assert [item["id"] for item in items] == ids[:7]
    assert [item["text"] for item in items] == [f"item {number}" for number in range(7)]
    assert {item["state"] for item in items} == {"claimed"}
    assert counts(server, queue) == {"ready": 3, "claimed": 7}
    ended = server.must("claim.complete", queue=queue, claim_id="c")
    assert (ended["claim_id"], ended["items"]) == ("c", 7)
    assert counts(server, queue) == {"ready": 3}


def test_the_same_claim_again_is_the_same_items(server: Served, queue: str) -> None:
    fill(server, queue)
    first = server.must("queue.claim", queue=queue, claim_id="c", max_items=4)
    fill(server, queue)
    assert server.must("queue.claim", queue=queue, claim_id="c", max_items=9) == first
    assert read(server, queue, "c") == read(server, queue, "c", limit=1)


def test_parts_are_read_apart_and_together_are_the_claim(server: Served, queue: str) -> None:
    ids = fill(server, queue)
    claim = server.must("queue.claim", queue=queue, claim_id="c", parts=3)
    parts = [read(server, queue, "c", part=one["part"]) for one in claim["parts"]]
    assert [len(part) for part in parts] == [one["items"] for one in claim["parts"]]
    assert len(parts) == 3
    assert sorted(item["id"] for part in parts for item in part) == sorted(ids)


def test_an_item_with_a_verdict_is_not_completed(server: Served, queue: str) -> None:
    ids = fill(server, queue, 4)
    server.must("queue.claim", queue=queue, claim_id="c")
    verdicts = [
        {"id": ids[0], "verdict": "retry", "error": "busy", "delay": 0},
        {"id": ids[1], "verdict": "dead", "error": "broken"},
        {"id": "none", "verdict": "dead"},
    ]
    results = server.must("claim.verdict", queue=queue, claim_id="c", verdicts=verdicts)["results"]
    assert [result.get("ok", False) for result in results] == [True, True, False]
    assert results[2]["error"]["code"] == "not_found"
    assert len(read(server, queue, "c")) == 4
    ended = server.must("claim.complete", queue=queue, claim_id="c")
    assert (ended["items"], ended["retried"], ended["dead"]) == (2, 1, 1)
    [again] = server.must("queue.lease", queue=queue, wait="5s", batch=9)["items"]
    assert (again["id"], again["last_error"]) == (ids[0], "busy")
    assert server.must("items.get", queue=queue, id=ids[1])["dead_reason"] == "rejected"


def test_a_released_claim_gives_its_items_back_and_its_name(server: Served, queue: str) -> None:
    ids = fill(server, queue, 3)
    server.must("queue.claim", queue=queue, claim_id="c")
    assert server.must("claim.release", queue=queue, claim_id="c")["items"] == 3
    assert server.call("claim.read", queue=queue, claim_id="c").status == 404
    assert server.call("claim.release", queue=queue, claim_id="c").status == 404
    assert server.must("queue.claim", queue=queue, claim_id="c")["items"] == 3
    assert [item["id"] for item in read(server, queue, "c")] == ids


def test_a_completed_claim_is_over_for_ever(server: Served, queue: str) -> None:
    fill(server, queue, 3)
    server.must("queue.claim", queue=queue, claim_id="c")
    server.must("claim.complete", queue=queue, claim_id="c")
    assert server.must("claim.complete", queue=queue, claim_id="c")["items"] == 0
    for call in ("queue.claim", "claim.read"):
        refused = server.call(call, queue=queue, claim_id="c")
        assert (refused.status, refused.error["code"]) == (409, "claim_finished"), call


def test_open_claims_are_listed(server: Served, queue: str) -> None:
    fill(server, queue)
    assert server.must("claims.list", queue=queue) == {"claims": []}
    made = [server.must("queue.claim", queue=queue, claim_id=name, max_items=2) for name in ("a", "b")]
    assert server.must("claims.list", queue=queue) == {"claims": made}


def test_a_consumer_goes_on_from_its_last_claim_and_fences_off_who_had_it(server: Served, queue: str) -> None:
    fill(server, queue)
    old = server.must("consumer.open", queue=queue, consumer="nightly")
    assert (old["consumer"], old["last_completed"]) == ("nightly", 0)
    server.must("queue.claim", queue=queue, claim_id="nightly:1", epoch=old["epoch"], max_items=2)
    new = server.must("consumer.open", queue=queue, consumer="nightly")
    assert new["epoch"] > old["epoch"]
    for call in ("queue.claim", "claim.read", "claim.complete", "claim.release"):
        refused = server.call(call, queue=queue, claim_id="nightly:1", epoch=old["epoch"])
        assert (refused.status, refused.error["code"]) == (409, "fenced"), call
    assert len(read(server, queue, "nightly:1", epoch=new["epoch"])) == 2
    server.must("claim.complete", queue=queue, claim_id="nightly:1", epoch=new["epoch"])
    assert server.must("consumer.open", queue=queue, consumer="nightly")["last_completed"] == 1


def test_who_comes_with_another_past_than_the_consumers_fences_nobody_off(server: Served, queue: str) -> None:
    fill(server, queue)
    epoch = server.must("consumer.open", queue=queue, consumer="nightly", after=0)["epoch"]
    server.must("queue.claim", queue=queue, claim_id="nightly:1", epoch=epoch, max_items=2)
    assert server.must("consumer.open", queue=queue, consumer="nightly", after=1)["epoch"] == epoch + 1
    server.must("claim.complete", queue=queue, claim_id="nightly:1", epoch=epoch + 1)
    for wrong in (0, 3):
        refused = server.call("consumer.open", queue=queue, consumer="nightly", after=wrong)
        assert (refused.status, refused.error["code"]) == (409, "conflict")
        assert refused.error["details"] == {"last_completed": 1}
    server.must("queue.claim", queue=queue, claim_id="nightly:2", epoch=epoch + 1, max_items=2)


def test_a_list_of_items_can_stop_at_a_number(server: Served, queue: str) -> None:
    fill(server, queue, 3)
    [partition] = server.must("queue.stats", queue=queue)["partitions"]
    fill(server, queue, 3)
    fields = {"queue": queue, "partition": 0, "until": partition["last_number"]}
    assert len(server.must("items.list", **fields)["items"]) == 3


def test_the_journal_is_read_row_by_row(server: Served, queue: str) -> None:
    for _ in range(3):
        fill(server, queue, 1)
    page = server.must("journal.read", queue=queue, limit=2)
    assert len(page["rows"]) == 2
    assert page["partition"] == 0
    rest = server.must("journal.read", queue=queue, after=page["rows"][-1]["turn"])
    assert rest["rows"][-1]["turn"] == rest["last_turn"] > page["rows"][-1]["turn"]
    body = msgspec.msgpack.encode({"queue": queue, "limit": 1})
    reply = server.ask("POST", "/v1/journal.read", body, Content_Type="application/msgpack")
    assert isinstance(msgspec.msgpack.decode(reply.body)["rows"][0]["events"], bytes)


# ---- claims that wait -------------------------------------------------------------------------------------


def waiting(served: Served, pool: ThreadPoolExecutor, claim_id: str = "c") -> Future[Reply]:
    """Longer than any test waits: what ends it is what the test does."""
    return pool.submit(served.call, "queue.claim", {"queue": "q", "claim_id": claim_id, "wait": "10m"})


def test_a_waiting_claim_wakes_on_produce(own: Served, pool: ThreadPoolExecutor) -> None:
    claim = waiting(own, pool)
    own.until_parked()
    fill(own, "q", 3)
    assert claim.result().value["items"] == 3
    assert len(read(own, "q", "c")) == 3


def test_a_claim_of_nothing_was_not_made(own: Served) -> None:
    claim = own.must("queue.claim", queue="q", claim_id="c", wait="1ms")
    assert (claim["claim_id"], claim["items"]) == ("c", 0)
    assert own.must("claims.list", queue="q") == {"claims": []}


def test_waiting_claims_count_among_those_who_wait(own: Served, pool: ThreadPoolExecutor) -> None:
    claims = [waiting(own, pool, "a"), waiting(own, pool, "b")]
    own.until_parked(2)
    for call, more in (("queue.claim", {"claim_id": "d"}), ("queue.lease", {})):
        refused = own.call(call, queue="q", wait="1s", **more)
        assert (refused.status, refused.error["code"], "retry-after" in refused.headers) == (
            429,
            "too_many_requests",
            True,
        )
    assert own.call("queue.claim", queue="q", claim_id="d", wait=0).status == 200
    own.loop.call_soon_threadsafe(own.app.drain)
    assert [claim.result().value["items"] for claim in claims] == [0, 0]


def test_a_drain_ends_waiting_claims_and_takes_no_more(own: Served, pool: ThreadPoolExecutor) -> None:
    fill(own, "q", 2)
    own.must("queue.claim", queue="q", claim_id="made")
    claim = waiting(own, pool)
    own.until_parked()
    own.loop.call_soon_threadsafe(own.app.drain)
    assert claim.result().value["items"] == 0
    refused = own.call("queue.claim", queue="q", claim_id="c")
    assert (refused.status, refused.error["code"]) == (503, "closed")
    assert len(read(own, "q", "made")) == 2
    assert own.must("claim.complete", queue="q", claim_id="made")["items"] == 2


def test_a_client_that_leaves_takes_its_waiting_claim_with_it(own: Served) -> None:
    with own.connect() as sock:
        body = b'{"queue": "q", "claim_id": "c", "wait": "10m"}'
        sock.sendall(post("/v1/queue.claim", body, JSON))
        own.until_parked()
    own.until(lambda: not len(own.app.parked))
    fill(own, "q", 2)
    assert own.must("claims.list", queue="q") == {"claims": []}
    assert len(own.must("queue.lease", queue="q", batch=9)["items"]) == 2


def test_a_claim_that_was_made_for_a_client_that_left_is_there_to_be_asked_for() -> None:
    """The engine's answer and the news that the client has gone come in one turn of the loop."""
    sent: list[Any] = []

    async def run() -> None:
        parts = [{"type": "http.request", "body": b'{"queue":"q","claim_id":"c","wait":1}'}]
        gone = asyncio.Event()

        async def receive() -> Any:
            if parts:
                return parts.pop(0)
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(part: Any) -> None:
            sent.append(part)

        async with AsyncPond(":memory:") as pond:

            class Leaving:
                async def claim(self, *args: Any, **options: Any) -> Claim:
                    claim = await pond.claim(*args, **options)
                    gone.set()
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    return claim

            await pond.create_queue("q")
            await pond.produce("q", [b"x"])
            leaving: Any = Leaving()
            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/v1/queue.claim", "headers": headers}
            await App(leaving)(scope, receive, send)
            assert [claim.items for claim in await pond.list_claims("q")] == [1]

    asyncio.run(run())
    assert not sent


class Turning(OpenGate):
    revoked = False

    def authenticate(self, authorization: bytes | None) -> Any:
        if self.revoked:
            raise Unauthorized("the token was revoked; ask for a new one")
        return super().authenticate(authorization)


def test_who_may_not_any_more_is_not_told_what_its_claim_waited_for(pool: ThreadPoolExecutor) -> None:
    gate = Turning()
    with serve(gate=gate) as served:
        served.must("queues.create", name="q")
        claim = waiting(served, pool)
        served.until_parked()
        gate.revoked = True
        served.on_loop(served.pond.produce("q", [b"x"]))
        assert (claim.result().status, claim.result().error["code"]) == (401, "unauthorized")
        assert len(served.on_loop(served.pond.list_claims("q"))) == 1


# ---- large pages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "beside"), [(10, False), (2_000, True)])
@pytest.mark.parametrize("call", ["claim.read", "items.list"])
def test_large_pages_are_encoded_beside_the_event_loop(
    server: Served, queue: str, monkeypatch: pytest.MonkeyPatch, call: str, limit: int, beside: bool
) -> None:
    for _ in range(2):
        fill(server, queue, 1_000)
    server.must("queue.claim", queue=queue, claim_id="c")
    threads: list[str] = []
    plainly = payloads.look_page

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return plainly(*args)

    monkeypatch.setattr(payloads, "look_page", watched)
    named = {"claim_id": "c"} if call == "claim.read" else {}
    page = server.must(call, queue=queue, limit=limit, **named)
    assert len(page["items"]) == min(limit, 1_000 if call == "items.list" else limit)
    assert [name != "served" for name in threads] == [beside]
