"""Loops over items: what completes them, what hands them back, and who keeps their leases meanwhile."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from millpond import Client, Item
from millpond.client.held import LEFT, HeldItem
from millpond.errors import LeaseLost, NotFound
from tests.client.scripted import Step, reply, reset, scripted
from tests.client.served import Served


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def all_of(client: Client, queue: str) -> list[Item]:
    return client.list_items(queue).items


def only(client: Client, queue: str) -> Item:
    [item] = all_of(client, queue)
    return item


# ---- completing -------------------------------------------------------------------------------------------


def test_asking_for_the_next_item_completes_the_one_before(client: Client, queue: str) -> None:
    client.produce(queue, [b"1", b"2", b"3"])
    seen = []
    for item in client.consume(queue, batch=2, idle_timeout=0):
        seen.append((item.payload, len(all_of(client, queue))))
    assert seen == [(b"1", 3), (b"2", 2), (b"3", 1)]
    assert all_of(client, queue) == []


def test_what_the_body_finished_is_left_alone(client: Client, queue: str) -> None:
    client.produce(queue, [b"1", b"2"])
    for item in client.consume(queue, idle_timeout=0):
        if item.payload == b"1":
            item.complete()
        else:
            item.retry("not now", delay="1h")
    assert only(client, queue).last_error == "not now"


def test_a_with_in_the_loop_completes_and_fails_by_itself(client: Client, queue: str) -> None:
    client.produce(queue, [b"good", b"bad"])
    with pytest.raises(ValueError, match="bad luck"):  # noqa: PT012
        for item in client.consume(queue, idle_timeout=0):
            with item:
                if item.payload == b"bad":
                    raise ValueError("bad luck")
    left = only(client, queue)
    assert (left.payload, left.state, left.last_error) == (b"bad", "retrying", "ValueError: bad luck")


def test_a_handler_is_given_every_item_and_its_errors_are_the_items(client: Client, queue: str) -> None:
    client.produce(queue, [b"1", b"2", b"3"])
    seen = []

    def handle(item: HeldItem) -> None:
        seen.append(item.payload)
        if item.payload == b"2":
            raise KeyError("two")

    client.consume(queue, handle, idle_timeout=0)
    assert seen == [b"1", b"2", b"3"]
    assert only(client, queue).last_error == "KeyError: 'two'"


# ---- leaving ----------------------------------------------------------------------------------------------


def leave_by_break(client: Client, queue: str) -> None:
    for _ in client.consume(queue, batch=2):
        break


def leave_by_return(client: Client, queue: str) -> HeldItem:
    for item in client.consume(queue, batch=2):
        return item
    raise AssertionError


def leave_by_error(client: Client, queue: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT012
        for _ in client.consume(queue, batch=2):
            raise ValueError("seen by nobody here")


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_return, leave_by_error])
def test_a_plain_loop_that_is_left_hands_its_item_back_as_a_failure(
    server: Served, client: Client, queue: str, leave: Any
) -> None:
    client.produce(queue, [b"in hand", b"leased ahead"])
    leave(client, queue)
    server.until_count(queue, "leased", 0)
    in_hand, ahead = sorted(all_of(client, queue), key=lambda item: item.payload)
    assert (in_hand.state, in_hand.attempts, in_hand.last_error) == ("retrying", 1, LEFT)
    assert (ahead.state, ahead.attempts, ahead.last_error) == ("ready", 0, None)


def test_a_loop_in_a_with_that_is_broken_gives_the_attempt_back(server: Served, client: Client, queue: str) -> None:
    client.produce(queue, [b"x"])
    with client.consume(queue) as items:
        for _ in items:
            break
    server.until_count(queue, "ready", 1)
    assert only(client, queue).attempts == 0


def test_a_loop_in_a_with_that_fails_tells_the_error(server: Served, client: Client, queue: str) -> None:
    client.produce(queue, [b"x"])
    with pytest.raises(ValueError), client.consume(queue) as items:  # noqa: PT012
        for _ in items:
            raise ValueError("told")
    server.until_count(queue, "retrying", 1)
    assert only(client, queue).last_error == "ValueError: told"


def test_an_interrupt_is_not_the_items_fault(server: Served, client: Client, queue: str) -> None:
    client.produce(queue, [b"x"])
    with pytest.raises(KeyboardInterrupt), client.consume(queue) as items:  # noqa: PT012
        for _ in items:
            raise KeyboardInterrupt
    server.until_count(queue, "ready", 1)
    assert only(client, queue).attempts == 0


def test_an_iterator_that_is_kept_by_its_traceback_is_left_when_it_is_dropped(
    server: Served, client: Client, queue: str
) -> None:
    client.produce(queue, [b"x"])
    items = client.consume(queue)
    try:
        for _ in items:
            raise ValueError
    except ValueError as error:
        assert server.count(queue, "leased") == 1
        traceback.clear_frames(error.__traceback__)
    del items
    server.until_count(queue, "retrying", 1)


def test_close_hands_back_before_it_returns(server: Served, queue: str) -> None:
    with Client(server.url) as client:
        client.produce(queue, [b"x"])
        next(client.consume(queue))
    assert server.count(queue, "retrying") == 1


def test_stop_ends_a_waiting_loop_at_once(server: Served, client: Client, queue: str) -> None:
    consumer = client.consume(queue, wait="10m")
    seen: list[HeldItem] = []
    thread = threading.Thread(target=lambda: seen.extend(consumer))
    thread.start()
    server.until(lambda: len(server.app.parked) == 1 or server.listener.connections > 1)
    consumer.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert seen == []


def test_a_loop_on_no_queue_fails_at_once(client: Client) -> None:
    with pytest.raises(NotFound):
        next(client.consume("nowhere"))


# ---- with item --------------------------------------------------------------------------------------------


def test_with_item_completes_only_by_word(client: Client, queue: str) -> None:
    client.produce(queue, [b"1", b"2"])
    one, two = client.lease(queue, batch=2)
    with one:
        one.complete()
    with two:
        pass
    left = only(client, queue)
    assert (left.payload, left.state, left.last_error) == (b"2", "retrying", LEFT)


def test_with_item_retries_with_the_error_and_a_delay(client: Client, queue: str) -> None:
    client.produce(queue, [b"x"])
    [item] = client.lease(queue)
    item.retry_delay = "1h"
    with pytest.raises(ValueError), item:
        raise ValueError("no")
    left = only(client, queue)
    assert left.last_error == "ValueError: no"
    assert left.enqueue_at is not None
    assert (left.enqueue_at - left.created_at).total_seconds() > 3_000


def test_an_item_whose_lease_is_over_says_so(client: Client, queue: str) -> None:
    client.produce(queue, [b"x"])
    [item] = client.lease(queue)
    client.complete([item])
    client.clear(queue, ["ready"])
    with pytest.raises(LeaseLost):
        item.retry()
    assert item.lost


def test_a_held_item_writes_its_state_again_and_again(client: Client, queue: str) -> None:
    client.produce(queue, [b"x"])
    [item] = client.lease(queue)
    item.write_state({"step": 1})
    item.write_state({"step": 2})
    assert (item.state_doc, item.state_version) == ({"step": 2}, 2)
    client.cancel(queue, [item.id])
    item.extend("5m")
    assert item.cancelled


# ---- leases in the background -----------------------------------------------------------------------------


def leased(number: int = 1) -> Step:
    item = {
        "id": f"i{number}",
        "lease": f"t{number}",
        "correlation_id": "c",
        "attempts": 1,
        "deliveries": 1,
        "fencing_token": 1,
        "lease_deadline": "2026-01-01T00:00:00Z",
        "created_at": "2026-01-01T00:00:00Z",
        "bytes": b"x",
    }
    return reply({"items": [item]})


def results(**result: Any) -> Step:
    return reply({"results": [result]})


def test_the_lease_is_extended_while_the_body_runs() -> None:
    extended = results(ok=True, cancelled=True)
    with scripted(leased(), extended, extended, results(ok=True), reply({"items": []})) as server:
        with Client(server.url) as client:
            for item in client.consume("q", lease_timeout="100ms", idle_timeout=0):
                for _ in range(3):  # the lease, and two extensions
                    assert server.came.acquire(timeout=10)
                assert not item.lost
        calls = [call for call, _ in server.requests]
        assert calls == ["/v1/queue.lease", *["/v1/queue.extend"] * 2, "/v1/queue.complete", "/v1/queue.lease"]
        assert server.requests[1][1] == {"leases": ["t1"], "queue": "q", "lease_timeout": "100ms"}
        assert item.cancelled


def test_a_lost_lease_is_told_and_not_extended_again() -> None:
    lost = results(error={"code": "lease_lost", "message": "over"})
    with scripted(leased(), lost, lost, reply({"items": []})) as server, Client(server.url) as client:
        seen = []
        for item in client.consume("q", lease_timeout="100ms", idle_timeout=0):
            seen.append(item)
            assert server.came.acquire(timeout=10)
            assert server.came.acquire(timeout=10)
        assert seen[0].lost
        assert [call for call, _ in server.requests].count("/v1/queue.extend") == 1


def test_a_loop_that_has_worked_outlives_an_outage() -> None:
    steps: list[Step] = [leased(), results(ok=True), *[reset] * 20, leased(2), results(ok=True)]
    with scripted(*steps) as server, Client(server.url, timeout=0.01) as client:
        consumer = client.consume("q", lease_timeout="1m", wait=0)
        assert [next(consumer).id, next(consumer).id] == ["i1", "i2"]
        consumer.close()
