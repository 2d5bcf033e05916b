"""Every operation, by both clients, against the real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from millpond import Client, NewItem, Retry
from millpond.errors import (
    BatchTooLarge,
    InvalidRequest,
    KeyConflict,
    LeaseLost,
    NotFound,
    QueueExists,
    QueueInUse,
    VersionConflict,
)
from millpond.model import State
from tests.client.served import Served, serve

Make = Callable[..., Any]


@pytest.fixture(params=["msgpack", "json"])
def client(make: Make, server: Served, request: pytest.FixtureRequest) -> Iterator[Any]:
    with make(server.url, encoding=request.param) as client:
        yield client


def test_a_queues_life(client: Any, queue: str) -> None:
    name = queue + "/new"
    made = client.create_queue(
        name, partitions=2, lease_timeout=timedelta(seconds=7), backoff={"cap": timedelta(hours=2)}
    )
    assert (made.lease_timeout, len(made.partitions), made.backoff["cap"]) == (7.0, 2, 7200.0)
    assert client.update_queue(name, max_attempts=9, dead_queue=queue).dead_queue == queue
    assert client.update_queue(name, dead_queue=None).dead_queue is None
    assert client.queue_info(name).max_attempts == 9
    assert [one.name for one in client.list_queues(prefix=name).queues] == [name]
    assert client.pause(name).paused
    assert not client.resume(name).paused
    assert client.stats(name).counts["ready"] == 0
    with pytest.raises(QueueExists):
        client.create_queue(name)
    client.produce(name, [b"x"])
    with pytest.raises(QueueInUse):
        client.delete_queue(name)
    assert client.delete_queue(name, force=True) is None
    with pytest.raises(NotFound):
        client.queue_info(name)


def test_an_items_life(client: Any, queue: str) -> None:
    payloads = [b"\x00\xff", "tëxt", NewItem(payload=bytearray(b"own"), id="mine", kind="k", priority=1)]
    produced = client.produce(queue, payloads)
    assert produced[2].id == "mine"
    items = client.lease(queue, batch=10, client_id="me")
    assert [item.payload for item in items] == [b"\x00\xff", "tëxt".encode(), b"own"]
    assert [item.id for item in items] == [one.id for one in produced]
    assert items[2].kind == "k"
    assert items[2].attempts == 1
    assert client.get_item(queue, "mine").client_id == "me"
    assert client.write_state(items[0], {"at": 1}, version=0).version == 1
    with pytest.raises(VersionConflict):
        client.write_state(items[0], {"at": 2}, version=0)
    [extended] = client.extend([items[0]], lease_timeout=timedelta(minutes=2))
    assert extended.lease_deadline > items[0].lease_deadline
    results = client.complete([items[0], "no.token", items[1].lease])
    assert [result.ok for result in results] == [True, False, True]
    assert client.retry([Retry(lease=items[2], error="oh", delay=timedelta(hours=1))])[0].ok
    [waiting] = client.list_items(queue, state="retrying").items
    assert (waiting.id, waiting.last_error, waiting.payload) == ("mine", "oh", b"own")
    assert client.cancel(queue, ["mine"])[0].ok


def test_dead_items_go_back(client: Any, queue: str) -> None:
    client.produce(queue, [b"a", b"b"])
    client.retry([Retry(lease=item, dead=True) for item in client.lease(queue, batch=2)])
    assert client.redrive(queue, filter={"dead_reason": "rejected"}, dry_run=True).matched == 2
    assert client.redrive(queue).moved == 2
    again = [item.id for item in client.list_items(queue).items]
    assert [result.ok for result in client.bury(queue, again, reason="rejected", error="too soon")] == [True, True]
    assert client.redrive(queue, filter={"error_contains": "soon"}).moved == 2
    assert client.clear(queue) == {"ready": 2, "scheduled": 0, "retrying": 0}


def test_a_long_poll_waits_longer_than_the_timeout(make: Make, server: Served, queue: str) -> None:
    with make(server.url, timeout=0.2) as client:
        assert list(client.lease(queue, wait="300ms")) == []


def test_a_look_waits_longer_than_the_timeout(make: Make, server: Served, queue: str) -> None:
    with make(server.url, timeout=0.2) as client:
        client.produce(queue, [NewItem(id="mine", payload=b"x")])
        item = client.get_item(queue, "mine", wait=timedelta(milliseconds=300))
        assert (item.state, item.updated_at) == ("ready", item.created_at)
        client.complete(client.lease(queue))
        with pytest.raises(NotFound):
            client.get_item(queue, "mine", wait=5)


def test_items_that_wait_for_their_time_are_made_ready(client: Any, queue: str) -> None:
    [made] = client.produce(queue, [NewItem(payload=b"x", delay="1h")])
    assert [result.ok for result in client.make_ready(queue, [made.id, "none"])] == [True, False]
    assert [item.payload for item in client.lease(queue)] == [b"x"]


def test_the_same_request_id_adds_nothing(client: Any, queue: str) -> None:
    first = client.produce(queue, [b"once"], request_id="r1")
    again = client.produce(queue, [b"once"], request_id="r1")
    assert [one.id for one in again] == [one.id for one in first]
    assert client.stats(queue).counts["ready"] == 1


def test_a_correlation_id_goes_with_the_items(make: Make, server: Served, queue: str) -> None:
    with make(server.url, correlation_id="order-17") as client:
        client.produce(queue, [b"x"])
        assert client.lease(queue)[0].correlation_id == "order-17"


def test_options_for_some_calls(server: Served, queue: str) -> None:
    with Client(server.url, token="t0p", client_id="a") as client:
        view = client.with_options(correlation_id="c", client_id="b")
        [produced] = view.produce(queue, [b"x"])
        [other] = client.produce(queue, [b"y"])
        assert produced.correlation_id == "c"
        assert other.correlation_id != "c"
        [item] = view.lease(queue)
        assert client.get_item(queue, item.id).client_id == "b"


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "produce a bare payload": (("q", b"not a list"), {}),
    "produce nothing": (("q", []), {}),
    "produce a number": (("q", [5]), {}),
    "produce an item of a number": (("q", [NewItem(payload=5)]), {}),  # type: ignore[arg-type]
    "produce no Unicode": (("q", ["\ud800"]), {}),
    "produce to no name": (("no such//name", [b"x"]), {}),
    "complete a bare token": (("token",), {}),
    "complete nothing": (([],), {}),
    "extend a number": (([7],), {}),
    "retry bytes": (([b"x"],), {}),
    "cancel a bare id": (("q", "id"), {}),
    "lease for a vague time": (("q",), {"wait": "soon"}),
    "lease for no number of seconds": (("q",), {"wait": float("nan")}),
    "produce at no instant": (("q", [NewItem(payload=b"x", enqueue_at=5)]), {}),  # type: ignore[arg-type]
    "lease a vague batch": (("q",), {"batch": "many"}),
    "create_queue with a misspelt name": (("q",), {"backoff": {"bse": 2}}),
    "write_state of no document": (("t", object()), {"version": 0}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(client: Any, case: str) -> None:
    args, options = WRONG[case]
    with pytest.raises(InvalidRequest):
        getattr(client, case.split()[0])(*args, **options)


def test_errors_keep_their_class_and_details(client: Any, queue: str) -> None:
    client.produce(queue, [NewItem(payload=b"x", key="k")])
    with pytest.raises(KeyConflict):
        client.produce(queue, [NewItem(payload=b"y", key="k")], on_conflict="reject")
    with pytest.raises(BatchTooLarge):
        client.produce(queue, [b"x"] * 1001)
    [item] = client.lease(queue)
    client.complete([item])
    with pytest.raises(LeaseLost):
        client.write_state(item, 1, version=0)


def test_over_a_unix_socket(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "pond.sock"
    with serve(unix=path) as served:
        for url in (f"unix://{path}", f"http+unix://{path}", "http+unix://" + str(path).replace("/", "%2F")):
            with make(url) as client:
                assert client.list_queues().queues == []
        assert served.port


def test_a_client_shows_no_secrets(server: Served) -> None:
    with Client(server.url, token="sesame") as client:
        assert "sesame" not in repr(client) + repr(vars(client))


def test_stats_count_by_state_as_the_engine_does(make: Make, server: Served, queue: str) -> None:
    with make(server.url) as client:
        stats = client.stats(queue)
    for counts in (stats.counts, stats.partitions[0].counts):
        assert {type(state) for state in counts} == {State}


@pytest.mark.parametrize("document", [{1, 2}, {"a": [frozenset()]}])
def test_what_the_engine_refuses_as_a_document_is_refused_in_its_words(
    make: Make, server: Served, queue: str, document: Any
) -> None:
    server.on_loop(server.pond.produce(queue, [b"x"]))
    [item] = server.on_loop(server.pond.lease(queue))
    with pytest.raises(InvalidRequest) as engines:
        server.on_loop(server.pond.write_state(item, document, version=0))
    with make(server.url) as client, pytest.raises(InvalidRequest) as clients:
        client.write_state(item.lease, document, version=0)
    assert clients.value.message == engines.value.message
