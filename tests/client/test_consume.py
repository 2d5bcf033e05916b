"""Loops of clients: who keeps their leases, and what they outlive. All else of loops is in tests/consuming."""

from __future__ import annotations

from typing import Any

import pytest

from millpond import Client
from millpond.errors import InternalError, NotFound
from tests.client.scripted import Step, refusal, reply, reset, scripted


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


# ---- calls that fail when the holder leaves ---------------------------------------------------------------


def test_nobody_keeps_an_item_whose_with_could_not_hand_it_back() -> None:
    with scripted(leased(), refusal("internal", 500), results(ok=True)) as server, Client(server.url) as client:
        [item] = client.lease("q")
        with pytest.raises(InternalError), item:
            raise ValueError("no")
        for _ in range(3):  # the lease, and two tries to hand it back
            assert server.came.acquire(timeout=10)
        assert len(client._keeper_of_leases()._watch) == 0
        assert server.requests[2] == server.requests[1]


def test_nobody_keeps_an_item_that_a_loop_could_not_complete() -> None:
    with scripted(leased(), refusal("not_found", 404)) as server, Client(server.url) as client:
        items = client.consume("q", lease_timeout="1m")
        next(items)
        with pytest.raises(NotFound):
            next(items)
        assert len(client._keeper_of_leases()._watch) == 0


def test_what_failed_and_could_not_be_handed_back_is_not_completed() -> None:
    away = refusal("unavailable", 503, "Retry-After: 600")

    def fail(_: Any) -> None:
        raise ValueError("no")

    with scripted(leased(), away, reply({"items": []})) as server, Client(server.url) as client:
        client.consume("q", fail, lease_timeout="1m", idle_timeout=0)
        assert [call for call, _ in server.requests] == ["/v1/queue.lease", "/v1/queue.retry", "/v1/queue.lease"]
