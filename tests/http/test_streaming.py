"""Subscribe: items as lines, at most `prefetch` unfinished, kept alive, given back when the client goes."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from millpond.http.app import Limits
from millpond.http.streaming import WRITE_BYTES
from tests.http.served import TIMEOUT_S, Served, post, serve

JSON = "Content-Type: application/json"


class Lines:
    """A client's end of a stream."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def line(self) -> Any:
        """None at a clean end."""
        line = self._response.readline()
        return msgspec.json.decode(line) if line else None

    def items(self, count: int) -> list[dict[str, Any]]:
        """The next ones, keep-alives aside."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            line = self.line()
            assert line is not None, "the stream has ended"
            if line:
                found.append(line)
        return found


@contextmanager
def subscribe(served: Served, **fields: Any) -> Iterator[Lines]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=TIMEOUT_S)
    try:
        body = msgspec.json.encode({"queue": "q"} | fields)
        connection.request("POST", "/v1/queue.subscribe", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert (response.status, response.getheader("content-type")) == (200, "application/x-ndjson")
        with response:
            yield Lines(response)
    finally:
        connection.close()


@pytest.fixture
def own() -> Iterator[Served]:
    with serve(limits=Limits(keep_alive_s=0.05, streams_max=2)) as served:
        served.must("queues.create", name="q")
        yield served


def produce(served: Served, *texts: str) -> None:
    served.must("queue.produce", queue="q", items=[{"text": text} for text in texts])


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["text"] for item in items]


def test_items_arrive_as_lines_in_order(own: Served) -> None:
    produce(own, "1", "2")
    with subscribe(own) as lines:
        first = lines.items(2)
        produce(own, "3")
        assert texts(first + lines.items(1)) == ["1", "2", "3"]
    assert set(first[0]) >= {"id", "lease", "lease_deadline", "attempts", "fencing_token", "correlation_id"}


def test_no_more_than_prefetch_is_out_until_items_are_finished(own: Served) -> None:
    produce(own, *"123456")
    with subscribe(own, prefetch=2) as lines:
        one, two = lines.items(2)
        assert lines.line() == {}, "nothing but a sign of life"
        own.must("queue.complete", leases=[one["lease"]])
        [three] = lines.items(1)
        own.must("queue.retry", items=[{"lease": two["lease"], "intent": "defer", "delay": "1h"}])
        [four] = lines.items(1)
        own.must("queue.extend", leases=[three["lease"], four["lease"]], lease_timeout="0s")
        assert texts(lines.items(2)) == ["5", "6"]


def test_a_subscribe_takes_what_a_lease_takes(own: Served) -> None:
    produce(own, "1", "2", "3")
    with subscribe(own, prefetch=3, batch=1, wait="1s", client_id="me") as lines:
        assert texts(lines.items(3)) == ["1", "2", "3"]
        assert own.must("items.list", queue="q")["items"][0]["client_id"] == "me"
    assert own.call("queue.subscribe", queue="q", batch=0).status == 400


def test_an_item_that_ended_elsewhere_makes_room_when_its_lease_is_not_extended(own: Served) -> None:
    produce(own, "1", "2")
    with subscribe(own, prefetch=1, lease_timeout="200ms") as lines:
        [one] = lines.items(1)
        own.on_loop(own.pond.complete([one["lease"]]))  # not through the app
        assert texts(lines.items(1)) == ["2"]


@pytest.mark.slow
def test_leases_are_kept_alive_while_the_stream_lives(own: Served) -> None:
    produce(own, "x")
    with subscribe(own, lease_timeout="200ms") as lines:
        [item] = lines.items(1)
        for _ in range(12):  # keep-alives at 50 ms: three times the lease
            assert lines.line() == {}
        [result] = own.must("queue.complete", leases=[item["lease"]])["results"]
    assert result["ok"] is True


def test_unfinished_items_go_back_at_once_when_the_client_leaves(own: Served) -> None:
    produce(own, "1", "2", "3")
    with subscribe(own, lease_timeout="1h") as lines:
        done, *_ = lines.items(3)
        own.must("queue.complete", leases=[done["lease"]])
    own.until(lambda: not len(own.app.streams))
    items = own.must("queue.lease", queue="q", batch=3)["items"]
    assert [(item["text"], item["attempts"], item["deliveries"]) for item in items] == [("2", 1, 2), ("3", 1, 2)]


def test_a_client_that_leaves_an_idle_stream_frees_its_place(own: Served) -> None:
    with subscribe(own) as lines:
        assert lines.line() == {}
    own.until(lambda: not len(own.app.streams) and not len(own.app.parked))
    produce(own, "x")
    assert len(own.must("queue.lease", queue="q")["items"]) == 1


def test_a_drain_ends_the_stream_cleanly_and_leaves_the_items_to_the_client(own: Served) -> None:
    produce(own, "x")
    with subscribe(own) as lines:
        [item] = lines.items(1)
        own.loop.call_soon_threadsafe(own.app.drain)
        while (line := lines.line()) is not None:
            assert line == {}
        assert own.must("queue.complete", leases=[item["lease"]])["results"][0]["ok"] is True


def test_an_unknown_queue_is_404_before_the_stream_begins(own: Served) -> None:
    assert own.call("queue.subscribe", queue="nobody").status == 404


def test_a_queue_that_is_deleted_ends_the_stream_with_the_reason(own: Served) -> None:
    with subscribe(own) as lines:
        assert lines.line() == {}
        own.must("queues.delete", name="q", force=True)
        while "error" not in (line := lines.line()):
            assert line == {}
        assert line["error"]["code"] == "not_found"
        assert lines.line() is None


def test_streams_beyond_the_limit_are_429(own: Served) -> None:
    with subscribe(own), subscribe(own):
        refused = own.call("queue.subscribe", queue="q")
        assert (refused.status, "retry-after" in refused.headers) == (429, True)


def test_a_client_that_does_not_read_is_not_written_to_without_end() -> None:
    """What it leaves unread for `stall_s` goes back; until then no more than the prefetch is in memory."""
    with serve(limits=Limits(stall_s=0.2)) as own:
        own.must("queues.create", name="q")
        for _ in range(3):
            own.must("queue.produce", queue="q", items=[{"text": "x" * WRITE_BYTES}] * 16)
        with own.connect() as sock:
            sock.sendall(post("/v1/queue.subscribe", b'{"queue": "q", "prefetch": 40, "lease_timeout": "1h"}', JSON))
            own.until(lambda: _leased(own, 40))
            own.until(lambda: not len(own.app.streams))
            own.until(lambda: _leased(own, 0))


async def _leased(own: Served, count: int) -> bool:
    return (await own.pond.stats("q")).counts.get("leased", 0) == count
