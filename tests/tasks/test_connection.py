"""An app's connection: opened when it is needed, for plain and async code, for forks, and for the worker's own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import millpond
from millpond.errors import InvalidRequest
from millpond.tasks.pools import executors
from millpond.tasks.portal import Portal
from millpond.worker.runner import Worker
from tests.client.served import serve


def app_on(data: Path | str) -> millpond.App:
    app = millpond.App(data=data)
    app.task(name="count")(len)
    return app


def test_nothing_is_opened_before_something_is_enqueued(tmp_path: Path) -> None:
    with app_on(tmp_path / "data") as app:
        assert not (tmp_path / "data").exists()
        handle = app.tasks["count"].enqueue([1])
        assert handle.state() == "pending"
    with millpond.open(tmp_path / "data") as pond:  # closed, the directory is free
        [item] = pond.list_items("jobs").items
        assert (item.id, item.kind, item.reference) == (handle.id, "task", "count")


def test_a_closed_app_opens_again(tmp_path: Path) -> None:
    app = app_on(tmp_path)
    first = app.tasks["count"].enqueue([])
    app.close()
    assert first.state() == "pending"
    app.close()
    app.close()


def test_one_connection_serves_plain_code_and_any_event_loop(tmp_path: Path) -> None:
    async def enqueue(app: millpond.App) -> str:
        handle = await app.tasks["count"].enqueue_async([1])
        assert await handle.state() == "pending"
        return handle.id

    with app_on(tmp_path) as app:
        ids = {asyncio.run(enqueue(app)), asyncio.run(enqueue(app)), app.tasks["count"].enqueue([]).id}
    assert len(ids) == 3


def test_a_wait_for_a_result_ends_with_its_time(tmp_path: Path) -> None:
    with app_on(":memory:") as app:
        handle = app.tasks["count"].enqueue([1])
        with pytest.raises(TimeoutError, match="has not ended yet"):
            handle.result(timeout=0.01)

        async def go() -> None:
            with pytest.raises(TimeoutError):
                await handle.on_loop.result(timeout=0.01)

        asyncio.run(go())


def test_a_call_that_would_block_the_loop_that_answers_it_is_refused() -> None:
    async def go() -> None:
        async with millpond.AsyncPond(":memory:") as pond:
            app = app_on(":memory:")
            app.connection.bind(Portal(asyncio.get_running_loop(), pond))
            with pytest.raises(InvalidRequest, match="use the async call"):
                app.tasks["count"].enqueue([1])
            assert (await app.tasks["count"].enqueue_async([1])).id

    asyncio.run(go())


def test_a_forked_child_opens_a_connection_of_its_own(tmp_path: Path) -> None:
    with app_on(tmp_path) as app:
        app.tasks["count"].enqueue([])
        child = os.fork()
        if child == 0:
            try:
                app.tasks["count"].enqueue([])
                app.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(app.connection.portal.call(lambda api: api.list_items("jobs")).items) == 2


def test_the_settings_of_the_queue_are_stamped_onto_jobs(tmp_path: Path) -> None:
    with millpond.open(tmp_path) as pond, app_on(tmp_path) as app:
        pond.create_queue("jobs", max_attempts=9, backoff={"base": 4})
        handle = app.tasks["count"].enqueue([])
        pond.update_queue("jobs", max_attempts=2)
        assert handle.job().max_retries == 9


def test_an_app_on_a_server_enqueues_there_and_a_worker_runs_it_from_there() -> None:
    with serve() as server, millpond.App(server=server.url) as app:
        app.task(name="count")(len)
        handle = app.tasks["count"].enqueue([1, 2])

        async def work() -> None:
            async with millpond.AsyncClient(server.url) as client:
                await Worker(client, executors(app, client, slots=1), services=False, max_jobs=1).run(signals=False)

        asyncio.run(work())
        assert handle.result(timeout=10) == 2
