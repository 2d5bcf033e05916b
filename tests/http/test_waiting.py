"""Leases and looks that wait: clients that leave, the limit on them, and the drain before a shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from millpond import AsyncPond, LeasedItem
from millpond.http.app import App
from tests.http.served import Reply, Served, post, read_reply

JSON = "Content-Type: application/json"


def poll(served: Served, pool: ThreadPoolExecutor, queue: str = "q") -> Future[Reply]:
    """Longer than any test waits: what ends it is what the test does."""
    return pool.submit(served.call, "queue.lease", {"queue": queue, "wait": "10m"})


def test_a_waiting_lease_wakes_on_produce(server: Served, queue: str, pool: ThreadPoolExecutor) -> None:
    waiting = poll(server, pool, queue)
    server.until_parked()
    server.must("queue.produce", queue=queue, items=[{"text": "x"}])
    assert waiting.result().value["items"][0]["text"] == "x"


def test_an_empty_long_poll_is_200_with_no_items(server: Served, queue: str) -> None:
    assert server.must("queue.lease", queue=queue, wait="1ms") == {"items": []}


def test_no_item_goes_to_a_client_that_left(own: Served) -> None:
    with own.connect() as sock:
        sock.sendall(post("/v1/queue.lease", b'{"queue": "q", "wait": "10m"}', JSON))
        own.until_parked()
    own.until(lambda: not len(own.app.parked))
    own.must("queue.produce", queue="q", items=[{"text": "x"}])
    [item] = own.must("queue.lease", queue="q")["items"]
    assert (item["attempts"], item["deliveries"]) == (1, 1)


def test_leases_beyond_the_limit_are_429_with_retry_after(own: Served, pool: ThreadPoolExecutor) -> None:
    waiting = [poll(own, pool), poll(own, pool)]
    own.until_parked(2)
    refused = own.call("queue.lease", queue="q", wait="1s")
    assert (refused.status, refused.error["code"]) == (429, "too_many_requests")
    assert int(refused.headers["retry-after"]) >= 1
    assert own.call("queue.lease", queue="q", wait="0ms").status == 200
    own.must("queue.produce", queue="q", items=[{"text": "1"}, {"text": "2"}])
    assert [len(one.result().value["items"]) for one in waiting] == [1, 1]


def test_a_drain_ends_waiting_leases_and_still_takes_completes(own: Served, pool: ThreadPoolExecutor) -> None:
    own.must("queue.produce", queue="q", items=[{"text": "x"}])
    [item] = own.must("queue.lease", queue="q")["items"]
    waiting = poll(own, pool)
    own.until_parked()
    assert own.ask("GET", "/ready").status == 200
    own.loop.call_soon_threadsafe(own.app.drain)
    assert waiting.result().value == {"items": []}
    refused = own.call("queue.lease", queue="q", wait="10m")  # an empty reply would have every consumer ask again
    assert (refused.status, refused.error["code"], "retry-after" in refused.headers) == (503, "closed", True)
    not_ready = own.ask("GET", "/ready")
    assert (not_ready.status, not_ready.value["status"]) == (503, "not_ready")
    assert "retry-after" in not_ready.headers
    assert own.ask("GET", "/health").status == 200
    assert own.must("queue.complete", leases=[item["lease"]])["results"][0]["ok"] is True


# ---- for an item to end -----------------------------------------------------------------------------------


def watch(served: Served, pool: ThreadPoolExecutor, item_id: str, queue: str = "q") -> Future[Reply]:
    return pool.submit(served.call, "items.get", {"queue": queue, "id": item_id, "wait": "10m"})


def test_a_look_waits_for_its_item_to_end(server: Served, queue: str, pool: ThreadPoolExecutor) -> None:
    [made] = server.must("queue.produce", queue=queue, items=[{"text": "x"}])["items"]
    waiting = watch(server, pool, made["id"], queue)
    server.until_parked()
    [item] = server.must("queue.lease", queue=queue)["items"]
    server.must("queue.complete", leases=[item["lease"]], result={"answer": 42})
    reply = waiting.result()
    told = reply.value
    assert (told["state"], told["text"], told["result"]) == ("completed", "x", {"answer": 42})
    assert told["ended_at"] == told["updated_at"]
    assert reply.headers["x-correlation-id"] == made["correlation_id"]
    late = server.call("items.get", queue=queue, id=made["id"], wait="10m")
    assert (late.status, late.error["code"]) == (404, "not_found")


def test_a_look_whose_wait_is_over_shows_the_item_as_it_is(server: Served, queue: str) -> None:
    [made] = server.must("queue.produce", queue=queue, items=[{"text": "x"}])["items"]
    told = server.must("items.get", queue=queue, id=made["id"], wait="1ms")
    assert (told["state"], told["updated_at"]) == ("ready", told["created_at"])


def test_a_look_of_a_client_that_left_waits_no_more(own: Served) -> None:
    [made] = own.must("queue.produce", queue="q", items=[{"text": "x"}])["items"]
    body = msgspec.json.encode({"queue": "q", "id": made["id"], "wait": "10m"})
    with own.connect() as sock:
        sock.sendall(post("/v1/items.get", body, JSON))
        own.until_parked()
    own.until(lambda: not len(own.app.parked))
    runner = own.pond._manager.awake("q")
    assert runner is not None
    own.until(lambda: runner.queue.idle)


def test_looks_that_wait_count_to_the_limit_and_end_with_a_drain(own: Served, pool: ThreadPoolExecutor) -> None:
    [made] = own.must("queue.produce", queue="q", items=[{"text": "x"}])["items"]
    waiting = [watch(own, pool, made["id"]), watch(own, pool, made["id"])]
    own.until_parked(2)
    refused = own.call("items.get", queue="q", id=made["id"], wait="1s")
    assert (refused.status, refused.error["code"]) == (429, "too_many_requests")
    assert own.call("items.get", queue="q", id=made["id"]).status == 200
    own.loop.call_soon_threadsafe(own.app.drain)
    for reply in (*(one.result() for one in waiting), own.call("items.get", queue="q", id=made["id"], wait="1s")):
        assert (reply.status, reply.error["code"], "retry-after" in reply.headers) == (503, "closed", True)
    assert own.call("items.get", queue="q", id=made["id"]).status == 200


def test_a_look_at_a_queue_that_is_deleted_finds_nothing(own: Served, pool: ThreadPoolExecutor) -> None:
    [made] = own.must("queue.produce", queue="q", items=[{"text": "x"}])["items"]
    waiting = watch(own, pool, made["id"])
    own.until_parked()
    own.must("queues.delete", name="q", force=True)
    assert (waiting.result().status, waiting.result().error["code"]) == (404, "not_found")


# ---- what never comes to light ----------------------------------------------------------------------------


def test_items_leased_for_a_client_that_left_meanwhile_are_given_back() -> None:
    """The engine's answer and the news that the client has gone come in one turn of the loop."""
    given_back: list[str] = []
    sent: list[Any] = []

    class Eager:
        items: list[LeasedItem]

        async def lease(self, queue: str, **_: Any) -> list[LeasedItem]:
            return self.items

    async def give_back(queue: str, leases: Sequence[str]) -> None:
        given_back.extend(leases)

    async def run() -> list[str]:
        parts = [{"type": "http.request", "body": b'{"queue":"q"}'}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return parts.pop(0)

        async def send(part: Any) -> None:
            sent.append(part)

        async with AsyncPond(":memory:") as pond:
            await pond.create_queue("q")
            await pond.produce("q", [b"x"])
            eager: Any = Eager()
            eager.items = list(await pond.lease("q"))
            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/v1/queue.lease", "headers": headers}
            await App(eager, give_back=give_back)(scope, receive, send)
            return [item.lease for item in eager.items]

    leased = asyncio.run(run())
    assert given_back == leased
    assert not sent


def test_nobody_watches_a_client_that_was_answered() -> None:
    """Also on a server that does not tell of the end of a reply."""

    async def run() -> None:
        parts = [{"type": "http.request", "body": b'{"queue":"q"}'}]

        async def receive() -> Any:
            return parts.pop() if parts else await asyncio.get_running_loop().create_future()

        async def send(part: Any) -> None:
            pass

        async with AsyncPond(":memory:") as pond:
            await pond.create_queue("q")
            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/v1/queue.lease", "headers": headers}
            await App(pond)(scope, receive, send)
            await asyncio.sleep(0)
            assert not [task for task in asyncio.all_tasks() if "Exchange" in repr(task)]

    asyncio.run(run())


def test_a_waiting_lease_does_not_hold_up_its_neighbours(own: Served, pool: ThreadPoolExecutor) -> None:
    waiting = poll(own, pool)
    own.until_parked()
    with own.connect() as sock:
        for _ in range(20):
            sock.sendall(post("/v1/queue.stats", msgspec.json.encode({"queue": "q"}), JSON))
            assert read_reply(sock).startswith(b"HTTP/1.1 200")
    own.must("queue.produce", queue="q", items=[{"text": "x"}])
    assert waiting.result().status == 200
