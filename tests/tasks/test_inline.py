"""Tasks in `app.testing()`: on a pond in memory, in this thread, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import msgspec
import pytest

import millpond
from millpond.errors import InvalidRequest, KeyConflict
from millpond.jobs import schedules
from millpond.jobs.spec import JobSpec
from millpond.model import LeasedItem
from millpond.tasks import Context, GiveUp, ResultGone, RetryLater, TaskCancelled, TaskFailed, current
from millpond.tasks.declared import declare
from millpond.tasks.testing import Testing

app = millpond.App(data=":memory:")
seen: list[Any] = []


class Place(msgspec.Struct):
    name: str
    counts: dict[int, int]


@app.task
def add(a: int, b: int = 1) -> int:
    seen.append((a, b, threading.current_thread()))
    return a + b


@app.task(max_attempts=3, backoff={"base": 10, "cap": "1m"})
def fail(error: str = "boom") -> None:
    seen.append(current().attempt)
    if error == "later":
        raise RetryLater("not yet", delay=5)
    if error == "never":
        raise GiveUp("hopeless")
    raise ValueError(error)


@app.task(max_attempts=1)
async def fail_together() -> None:
    async def alone(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        group.create_task(alone(ValueError("one")))
        group.create_task(alone(ExceptionGroup("inner", [KeyError("two"), OSError("three")])))


@app.task(queue="other", encoding="msgpack")
async def parent(n: int) -> bytes:
    await add.enqueue_async(n)
    add.enqueue(n)
    return b"\xff" * n


@app.task
def noted(context: Context) -> dict[str, Any]:
    if context.attempt == 1:
        context.write_state({"step": 1})
        context.progress(1, 4, "a quarter")
        raise RetryLater(delay=1)
    return {"state": context.state, "of": context.max_attempts, "same": context.id == current().id}


@app.task
def counts_on(context: Context) -> dict[str, Any]:
    """Writes less than it has changed."""
    if context.attempt == 1:
        state = {"rows": [1], "inner": {"n": [1]}}
        context.write_state(state)
        state["rows"].append(2)  # type: ignore[attr-defined]
        context.state["inner"]["n"].append(2)
        context.progress(0.5)
        seen.append(context.state)
        raise RetryLater(delay=1)
    return context.state  # type: ignore[no-any-return]


@app.consumer("orders")
def order(item: LeasedItem) -> str:
    return item.text.upper()


@pytest.fixture
def testing() -> Any:
    seen.clear()
    with app.testing() as testing:
        yield testing


def test_a_result_is_waited_for_by_running_what_is_due_in_this_thread(testing: Testing) -> None:
    handle = add.enqueue(1, b=2)
    assert handle.state() == "pending"
    assert handle.result() == 3
    assert handle.state() == "completed"
    assert seen == [(1, 2, threading.current_thread())]
    assert app.handle(handle.id).result() == 3


def test_a_failure_is_tried_again_after_its_backoff_until_the_job_is_dead(testing: Testing) -> None:
    handle = fail.enqueue()
    testing.run()
    assert (seen, handle.state()) == ([1], "failed")
    testing.advance("9s")
    assert seen == [1]
    testing.advance("1s")
    assert seen == [1, 2]
    testing.advance("1m")
    assert seen == [1, 2, 3]
    with pytest.raises(TaskFailed, match="ValueError: boom") as caught:
        handle.result()
    assert (caught.value.reason, caught.value.id) == ("max_attempts", handle.id)
    assert "test_inline.py" in str(caught.value.error)


def test_a_group_of_errors_tells_of_each(testing: Testing) -> None:
    with pytest.raises(TaskFailed) as caught:
        fail_together.enqueue().result()
    first, *each = str(caught.value.error).splitlines()
    assert first == "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)"
    assert [line.partition(", at ")[0] for line in each] == [
        "  ValueError: one",
        "  KeyError: 'two'",
        "  OSError: three",
    ]
    assert each[0].endswith(" in alone")


def test_a_task_says_when_it_is_tried_again_or_that_it_is_not(testing: Testing) -> None:
    later, never = fail.enqueue("later"), fail.enqueue("never")
    testing.advance("4s")
    assert seen == [1, 1]
    testing.advance("1s")
    assert seen == [1, 1, 2]
    with pytest.raises(TaskFailed, match="hopeless") as caught:
        never.result()
    assert caught.value.reason == "rejected"
    assert later.job().last_error == "not yet"


def test_a_job_that_has_not_ended_is_not_waited_for(testing: Testing) -> None:
    handle = add.options(delay="1h").enqueue(1)
    with pytest.raises(TimeoutError, match="it is pending"):
        handle.result()
    testing.advance("1h")
    assert handle.result() == 2


def test_a_wrong_timeout_is_told_before_anything_runs(testing: Testing) -> None:
    handle = add.enqueue(1)
    complaint = "timeout is 'abc'; give a duration"
    with pytest.raises(InvalidRequest, match=complaint):
        handle.result(timeout="abc")

    async def go() -> None:
        with pytest.raises(InvalidRequest, match=complaint):
            await handle.on_loop.result(timeout="abc")

    asyncio.run(go())
    assert handle.state() == "pending"
    assert handle.result(timeout="10s") == 2


@pytest.mark.parametrize("duration", [-1, "soon", 10**12])
def test_time_passes_forwards_and_not_for_ever(testing: Testing, duration: Any) -> None:
    now = testing.now
    with pytest.raises(InvalidRequest, match="duration is"):
        testing.advance(duration)
    with pytest.raises(InvalidRequest, match="duration is"):
        asyncio.run(testing.advance_async(duration))
    assert testing.now == now


def test_a_cancelled_job_has_no_result_and_one_that_is_gone_is_told(testing: Testing) -> None:
    cancelled, done = add.options(delay=1).enqueue(1), add.enqueue(2)
    cancelled.cancel()
    with pytest.raises(TaskCancelled):
        cancelled.result()
    testing.advance("2d")
    with pytest.raises(ResultGone, match="completed_retention"):
        done.result()


def test_options_are_for_one_call(testing: Testing) -> None:
    first = add.options(id="mine", priority=5, correlation_id="c", max_attempts=7, timeout="9s").enqueue(1)
    job = first.job()
    assert (job.id, job.priority, job.correlation_id, job.max_retries, job.timeout) == ("mine", 5, "c", 7, 9.0)
    assert add.options(id="mine").enqueue(2).duplicate
    assert not add.options(key="k").enqueue(1).duplicate
    assert add.options(key="k").enqueue(1).duplicate
    assert add.options(run_at=testing.now + timedelta(hours=1)).delay(1).job().run_at is not None
    assert add.options(queue="elsewhere").enqueue(5).result() == 6
    with pytest.raises(InvalidRequest, match="one by one"):
        add.options(key="k").map([1, 2])


def test_many_are_enqueued_in_one_request(testing: Testing) -> None:
    assert [handle.result() for handle in add.map(range(3))] == [1, 2, 3]
    assert [handle.result() for handle in add.enqueue_many([(1, 1), {"a": 2, "b": 2}])] == [2, 4]
    with pytest.raises(TypeError):
        add.map([1, "2"])
    assert len(testing.jobs()) == 5


def test_a_job_runs_after_those_that_it_waits_for(testing: Testing) -> None:
    first = fail.enqueue()
    held = add.options(after=[first], if_dead="hold").enqueue(1)
    gone = add.options(after=[first.id]).enqueue(2)
    after_gone = add.options(after=[gone]).enqueue(3)
    ok = add.options(after=[add.enqueue(5)]).enqueue(6)
    assert ok.result() == 7
    assert held.state() == "pending"
    testing.advance("2m")
    for handle in (gone, after_gone):
        with pytest.raises(TaskCancelled):
            handle.result()
    assert held.state() == "pending"


def test_a_job_is_not_overlooked_behind_many_that_wait(testing: Testing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.tasks.testing_work.LIST_LIMIT_MAX", 2)
    later = add.options(delay="1h").enqueue(1)
    waiting = [add.options(after=[later]).enqueue(n) for n in range(5)]
    ready = add.options(after=[add.enqueue(5)]).enqueue(6)
    assert ready.result() == 7
    testing.advance("1h")
    assert [handle.result() for handle in waiting] == [1, 2, 3, 4, 5]


def test_what_is_no_job_is_not_waited_for(testing: Testing) -> None:
    wrong: Any = [5]
    with pytest.raises(InvalidRequest, match="`after` has a int; give handles or ids of jobs"):
        add.options(after=wrong)
    alone: Any = add.enqueue(1)
    assert add.options(after=alone).enqueue(2).result() == 3


def test_a_delay_that_no_queue_takes_is_the_error_of_the_task(testing: Testing) -> None:
    with pytest.raises(InvalidRequest, match="delay is '4000d'; use up to 3650 days"):
        RetryLater(delay="4000d")


def test_what_a_task_enqueues_has_its_correlation_id(testing: Testing) -> None:
    handle = parent.options(correlation_id="trace").enqueue(3)
    assert handle.result() == b"\xff" * 3
    testing.run()
    assert [job.correlation_id for job in testing.jobs()] == ["trace", "trace"]
    assert [one[:2] for one in seen] == [(3, 1), (3, 1)]


def test_a_task_may_wait_for_what_it_enqueues(testing: Testing) -> None:
    own = millpond.App(data=":memory:")

    @own.task
    def leaf() -> str:
        return current().id

    @own.task
    def plain() -> list[str]:
        return [leaf.enqueue().result(), current().id]

    @own.task
    async def root() -> list[str]:
        return [*await (await plain.enqueue_async()).result(), current().id]

    with own.testing() as inner:
        ids = root.enqueue().result()
        assert len(set(ids)) == 3
        assert len(inner.jobs()) == 3


def test_the_state_document_and_the_progress_are_there_for_the_next_attempt(testing: Testing) -> None:
    handle = noted.enqueue()
    testing.run()
    document = testing.portal.call(lambda api: api.get_item("jobs", handle.id)).state_doc
    assert document == {"step": 1, "progress": {"fraction": 0.25, "done": 1, "total": 4, "note": "a quarter"}}
    testing.advance(1)
    assert handle.result() == {"state": {"step": 1}, "of": 3, "same": True}


def test_what_a_task_changes_of_its_state_is_not_written_until_it_says_so(testing: Testing) -> None:
    handle = counts_on.enqueue()
    testing.advance("1s")
    assert handle.result() == {"rows": [1], "inner": {"n": [1]}} == seen.pop()


def test_a_schedule_fires_at_each_of_its_instants(testing: Testing) -> None:
    spec = JobSpec(task=add.name, args=[1])
    testing.portal.call(lambda api: schedules.add(api, "tick", spec, testing.now, every="1m"))
    testing.advance("5m")
    assert len(seen) == 5


def test_a_schedule_that_the_app_declares_fires_and_is_replaced_only_if_it_has_changed() -> None:
    shop = millpond.App(data=":memory:")
    ticks: list[int] = []

    @shop.task
    def tick(n: int) -> None:
        ticks.append(n)

    shop.schedule("tick", tick, (1,), every="1m")
    with shop.testing() as testing:
        testing.advance("150s")
        assert ticks == [1, 1]
        testing.portal.call(lambda api: declare(api, shop.schedules.values(), testing.now))  # as a worker that starts
        testing.advance("30s")
        assert ticks == [1, 1, 1]
        shop.schedule("tick", tick, kwargs={"n": 2}, cron="0 * * * *", timezone="Europe/Berlin")
        testing.portal.call(lambda api: declare(api, shop.schedules.values(), testing.now))
        testing.advance("1h")
        assert ticks == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "a cron line or an interval"),
        ({"cron": "* * *"}, "five are needed"),
        ({"every": "1m", "missed": "some"}, "missed is 'some'"),
        ({"every": "1m", "args": ("x",)}, "argument 'a'"),
        ({"cron": "0 * * * *", "timezone": "Mars"}, "no time zone 'Mars'"),
        ({"cron": "0 * * * *", "timezone": timedelta(0)}, "timezone of a schedule is a timedelta"),
        ({"cron": 5}, "cron of a schedule is a int"),
        ({"every": "1m", "task": print}, "schedule 'wrong' is to enqueue a builtin_function_or_method; register it"),
    ],
)
def test_a_wrong_schedule_is_told_where_it_is_declared(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        app.schedule("wrong", **{"task": add, "args": (1,), **options})
    assert "wrong" not in app.schedules


def test_what_becomes_of_a_job_whose_id_is_taken_can_be_chosen(testing: Testing) -> None:
    first = add.options(id="one", delay="1h").enqueue(1)
    again = add.options(id="one").enqueue(2)
    assert (first.duplicate, again.duplicate, again.id) == (False, True, "one")
    with pytest.raises(KeyConflict):
        add.options(id="one", on_conflict="reject").enqueue(2)
    assert add.options(id="one", on_conflict="replace").enqueue(5).result() == 6


def test_a_consumer_gets_the_plain_items_of_its_queue(testing: Testing) -> None:
    async def produce(api: Any) -> str:
        await api.create_queue("orders", completed_retention="1d")
        [produced] = await api.produce("orders", ["tea"])
        return str(produced.id)

    item_id = testing.portal.call(produce)
    testing.run()
    assert app.handle(item_id, "orders").result() == "TEA"


def test_eager_runs_what_is_enqueued_at_once() -> None:
    seen.clear()
    with app.testing(eager=True):
        handle = add.enqueue(1)
        assert (len(seen), handle.state()) == (1, "completed")


def test_a_task_that_enqueues_itself_for_ever_is_told(testing: Testing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.tasks.testing.RUNS_MAX", 20)
    again = millpond.App(data=":memory:")

    @again.task
    def loop() -> None:
        loop.enqueue()

    with again.testing() as other, pytest.raises(InvalidRequest, match="more than 20 jobs"):  # noqa: PT012
        loop.enqueue()
        other.run()


def test_tests_on_an_event_loop_await_the_results(testing: Testing) -> None:
    async def go() -> None:
        handle = await parent.enqueue_async(2)
        assert await handle.result() == b"\xff\xff"
        assert await handle.state() == "completed"
        assert await add.enqueue(3).on_loop.result() == 4
        assert await add.enqueue(4) == 5
        failing = await fail.enqueue_async()
        await testing.advance_async("2m")
        with pytest.raises(TaskFailed):
            await failing
        with pytest.raises(InvalidRequest, match="event loop"):
            testing.run()

    asyncio.run(go())


def test_a_result_comes_as_it_was_annotated(testing: Testing) -> None:
    own = millpond.App(data=":memory:")

    @own.task
    def place() -> Place:
        return Place("here", {1: 2})

    with own.testing():
        assert place.enqueue().result() == Place("here", {1: 2})


def test_results_that_cannot_be_kept_are_the_end_of_the_job(testing: Testing) -> None:
    own = millpond.App(data=":memory:")

    @own.task
    def gives(what: str) -> Any:
        return {"object": object(), "large": "x" * 100_000, "nan": float("nan"), "set": {1}}[what]

    with own.testing():
        with pytest.raises(TaskFailed, match="its result cannot be kept"):
            gives.enqueue("object").result()
        with pytest.raises(TaskFailed, match="its result has 1"):
            gives.enqueue("large").result()
        with pytest.raises(TaskFailed, match="it has NaN, which is no JSON number"):
            gives.enqueue("nan").result()
        assert gives.enqueue("set").result() == [1]


def test_arguments_that_do_not_fit_any_more_kill_the_job_at_once(testing: Testing) -> None:
    own = millpond.App(data=":memory:")

    def define(kind: Any) -> Any:
        @own.task(name="changed")
        def changed(value: kind) -> None: ...

        changed.arguments._hints = {"value": kind}
        return changed

    with own.testing():
        handle = define(int).enqueue(1)
        define(str)
        with pytest.raises(TaskFailed, match="Expected `str`, got `int`") as caught:
            handle.result()
        assert caught.value.reason == "rejected"


def test_a_conflict_comes_to_who_enqueues(testing: Testing) -> None:
    """Testing is no copy of the queue's logic: it is the queue's."""

    async def produce(api: Any) -> None:
        await api.produce("jobs", [millpond.NewItem(id="taken")], on_conflict="reject")

    add.options(id="taken").enqueue(1)
    with pytest.raises(KeyConflict):
        testing.portal.call(produce)
