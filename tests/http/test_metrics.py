"""What Prometheus is shown of a real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millpond.clock import ManualClock
from millpond.embedded import AsyncPond
from millpond.http.metrics import HttpMeter
from millpond.meters import TRANSITIONS
from millpond.model import NewItem, Retry
from millpond.service.readings import EngineReader
from tests.http.scrape import OPEN_METRICS, Scrape, put_to_sleep, run
from tests.service.looks import loaded, until_parked_async


@pytest.fixture(scope="module", autouse=True)
def way() -> str:
    """Once is enough: nothing here depends on which way a call goes."""
    return "lean"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# ---- queues -----------------------------------------------------------------------------------------------


async def mix(pond: AsyncPond) -> None:
    """Of nine items one is left in each state that a queue without retention keeps, four ready."""
    await pond.create_queue("q")
    produced = await pond.produce("q", [*(b"%d" % number for number in range(8)), NewItem(delay="1h")])
    done, failed, dead, _ = await pond.lease("q", batch=4)
    await pond.complete([done])
    await pond.retry([failed])
    await pond.retry([Retry(lease=dead, dead=True)])
    await pond.cancel("q", [produced[7].id])


@pytest.mark.parametrize("partitions", [1, 3])
def test_depth_and_transitions_are_those_of_stats(partitions: int) -> None:
    async def scenario(pond: AsyncPond) -> None:
        await mix(pond)
        await pond.create_queue("spread", partitions=partitions)
        for number in range(5):
            await pond.produce("spread", [b"x"] * (number + 1))
        for queue in ("q", "spread"):
            stats, scrape = await pond.stats(queue), Scrape(pond)
            assert scrape.items(queue) == {state: count for state, count in stats.counts.items() if count}
            assert scrape.transitions(queue) == dict.fromkeys(TRANSITIONS, 0) | stats.totals
        assert Scrape(pond).items("q") == {"ready": 3, "scheduled": 1, "retrying": 1, "leased": 1, "dead": 1}

    run(scenario)


def test_both_formats_say_the_same() -> None:
    async def scenario(pond: AsyncPond) -> None:
        await mix(pond)
        text, open_metrics = Scrape(pond, HttpMeter([])), Scrape(pond, HttpMeter([]), OPEN_METRICS)
        assert text.media_type.startswith("text/plain; version=0.0.4")
        assert open_metrics.media_type.startswith("application/openmetrics-text; version=1.0.0")
        ours = [{key for key in one.samples if key[0].startswith("millpond_")} for one in (text, open_metrics)]
        assert ours[0] == ours[1]
        assert text.transitions("q") == open_metrics.transitions("q")

    run(scenario)


def test_the_oldest_ready_item_has_its_age(clock: ManualClock) -> None:
    async def scenario(pond: AsyncPond) -> None:
        await pond.create_queue("q")
        await pond.stats("q")
        assert Scrape(pond)("queue_oldest_ready_age_seconds", queue="q") == 0
        await pond.produce("q", [NewItem(priority=9)])
        clock.advance(2_500)
        await pond.produce("q", [NewItem(priority=-9)])
        assert Scrape(pond)("queue_oldest_ready_age_seconds", queue="q") == 2.5
        await pond.lease("q", batch=2)
        assert Scrape(pond)("queue_oldest_ready_age_seconds", queue="q") == 0

    run(scenario, clock=clock)


def test_parked_leases_and_pauses_are_shown() -> None:
    async def scenario(pond: AsyncPond) -> None:
        await pond.create_queue("q")
        parked = [asyncio.ensure_future(pond.lease("q", wait="10m")) for _ in range(3)]
        await until_parked_async(pond, "q", 3)
        assert Scrape(pond)("queue_waiters", queue="q") == 3
        assert Scrape(pond)("queue_paused", queue="q") == 0
        await pond.pause("q")
        assert Scrape(pond)("queue_paused", queue="q") == 1
        for lease in parked:
            lease.cancel()

    run(scenario)


def test_dead_letters_are_counted_where_they_arrive() -> None:
    async def scenario(pond: AsyncPond) -> None:
        await pond.create_queue("letters")
        await pond.create_queue("q", dead_queue="letters")
        await pond.produce("q", [b"x"])
        await pond.retry([Retry(lease=(await pond.lease("q"))[0], dead=True)])
        await pond.lease("letters", wait="10s")
        scrape = Scrape(pond)
        assert scrape("queue_transitions_total", queue="q", transition="dead") == 1
        assert scrape("queue_transitions_total", queue="letters", transition="letters") == 1
        assert scrape.items("letters") == {"leased": 1}

    run(scenario)


def test_a_scrape_wakes_no_queue(tmp_path: Path, clock: ManualClock) -> None:
    async def scenario(pond: AsyncPond) -> None:
        await pond.create_queue("q")
        await pond.create_queue("r")
        await pond.produce("q", [b"x"])
        before = Scrape(pond)
        assert (before("queues", status="awake"), before("queues", status="asleep")) == (1, 1)
        await put_to_sleep(pond, clock)
        asleep = Scrape(pond)
        assert asleep.queues() == set()
        assert (asleep("queues", status="awake"), asleep("queues", status="asleep")) == (0, 2)
        assert await loaded(pond) == set()
        await pond.produce("q", [b"y"])
        assert Scrape(pond).transitions("q") == before.transitions("q") | {"produced": 2}
        assert Scrape(pond)("queue_loads_total") == 2

    run(scenario, tmp_path, clock)


def test_what_clients_write_is_in_no_label() -> None:
    async def scenario(pond: AsyncPond) -> None:
        await pond.create_queue("q", reference="free-text")
        await pond.produce("q", [NewItem(kind="free-text", key="free-text", group=None, encoding="free-text")])
        await pond.lease("q", client_id="free-text")
        meter = HttpMeter(["queue.lease"])
        meter.count("/v1/free-text", 404, 0.001)
        scrape = Scrape(pond, meter)
        assert "free-text" not in scrape.text
        assert scrape("http_requests_total", call="(other)", status="4xx") == 1

    run(scenario)


# ---- more queues than are named ---------------------------------------------------------------------------


def test_queues_beyond_the_limit_are_summed_and_their_counters_never_go_down(
    tmp_path: Path, clock: ManualClock
) -> None:
    async def scenario(pond: AsyncPond) -> None:
        manager = pond._manager
        manager._reader = EngineReader(manager._runners, manager._meter, named_max=2)
        for number in range(5):
            await pond.create_queue(f"q{number}")
            await pond.produce(f"q{number}", [b"x"] * 10)
        first = Scrape(pond)
        assert first.queues() == {"q0", "q1", "(other)"}
        assert first.items("(other)") == {"ready": 30}
        assert first.transitions("(other)")["produced"] == 30
        await pond.produce("q4", [b"x"])
        await pond.produce("q0", [b"x"])
        second = Scrape(pond)
        assert second.transitions("(other)")["produced"] == 31
        assert second.transitions("q0")["produced"] == 11
        await pond.produce("q3", [b"x"])
        await put_to_sleep(pond, clock)
        asleep = Scrape(pond)
        assert asleep.queues() == {"(other)"}
        assert asleep.items("(other)") == {}
        assert asleep.transitions("(other)")["produced"] == 32
        await pond.produce("q4", [b"x"])
        named = Scrape(pond)
        assert named.queues() == {"q4", "(other)"}
        assert named.transitions("q4")["produced"] == 12
        assert named.transitions("(other)")["produced"] == 32

    run(scenario, tmp_path, clock)


def test_a_queue_that_gets_a_place_leaves_what_it_did_to_the_rest() -> None:
    async def scenario(pond: AsyncPond) -> None:
        manager = pond._manager
        manager._reader = EngineReader(manager._runners, manager._meter, named_max=1)
        for name in ("first", "second"):
            await pond.create_queue(name)
            await pond.produce(name, [b"x"])
        assert Scrape(pond).queues() == {"first", "(other)"}
        await pond.produce("second", [b"x"] * 5)
        await pond.delete_queue("first", force=True)
        scrape = Scrape(pond)
        assert scrape.queues() == {"second", "(other)"}
        assert scrape.transitions("(other)")["produced"] == scrape.transitions("second")["produced"] == 6

    run(scenario)


# ---- commits and the server ----------------------------------------------------------------------------------


def test_commits_are_measured() -> None:
    async def scenario(pond: AsyncPond) -> None:
        await pond.create_queue("q")
        await pond.stats("q")
        await asyncio.gather(*(pond.produce("q", [b"x"] * 100) for _ in range(4)))
        scrape = Scrape(pond)
        for name, total in (("commit_requests", 4), ("commit_items", 400)):
            assert scrape(f"{name}_count", store="default") == 1
            assert scrape(f"{name}_sum", store="default") == total
        assert scrape("commit_requests_bucket", store="default", le="2.0") == 0
        assert scrape("commit_requests_bucket", store="default", le="5.0") == 1
        assert scrape("commit_seconds_count", store="default") == 1
        assert scrape("commit_seconds_sum", store="default") > 0

    run(scenario)


def test_requests_are_counted_by_call_and_class_of_status() -> None:
    async def scenario(pond: AsyncPond) -> None:
        meter = HttpMeter(["queue.produce", "queue.lease"])
        meter.count("queue.produce", 200, 0.001)
        meter.count("queue.produce", 204, 0.5)
        meter.count("queue.produce", 503, 0.5)
        meter.count("queue.lease", 0, 60.0)
        meter.in_flight, meter.connections, meter.streams = 3, 7, 2
        meter.bytes_received += 100
        scrape = Scrape(pond, meter)
        assert scrape("http_requests_total", call="queue.produce", status="2xx") == 2
        assert scrape("http_requests_total", call="queue.produce", status="5xx") == 1
        assert scrape("http_requests_total", call="queue.lease", status="gone") == 1
        assert scrape("http_request_seconds_bucket", call="queue.produce", le="0.001") == 1
        assert scrape("http_request_seconds_count", call="queue.produce") == 3
        assert scrape("http_request_seconds_sum", call="queue.lease") == 60
        assert [scrape(f"http_{name}") for name in ("in_flight", "connections", "streams")] == [3, 7, 2]
        assert scrape("http_received_bytes_total") == 100

    run(scenario)


def test_build_and_process_are_told() -> None:
    async def scenario(pond: AsyncPond) -> None:
        scrape = Scrape(pond)
        assert any(name == "millpond_build_info" and ("version", "1.2.3") in labels for name, labels in scrape.samples)
        assert scrape.samples["process_open_fds", frozenset()] > 0

    run(scenario)
