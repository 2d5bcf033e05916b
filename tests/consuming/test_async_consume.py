"""Loops over items on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millpond import AsyncPond
from millpond.consuming.held import LEFT, AsyncHeldItem
from millpond.consuming.polls import Poll
from millpond.errors import Closed
from tests.consuming.conftest import AsyncOpen, Open
from tests.service.looks import until_parked_async

Act = Callable[[AsyncPond], Awaitable[Any]]


def run(opened: AsyncOpen, act: Act) -> Any:
    async def main() -> Any:
        async with opened() as pond:
            return await act(pond)

    return asyncio.run(main())


def states(opened: Open, queue: str) -> list[tuple[bytes, str, int, str | None]]:
    with opened() as pond:
        items = pond.list_items(queue).items
    return sorted((item.payload, str(item.state), item.attempts, item.last_error) for item in items)


def test_asking_for_the_next_item_completes_the_one_before(opened: Open, opened_async: AsyncOpen, queue: str) -> None:
    async def act(pond: AsyncPond) -> list[tuple[bytes, int]]:
        await pond.produce(queue, [b"1", b"2", b"3"])
        seen = []
        async for item in pond.consume(queue, batch=2, idle_timeout=0):
            seen.append((item.payload, len((await pond.list_items(queue)).items)))
        return seen

    assert run(opened_async, act) == [(b"1", 3), (b"2", 2), (b"3", 1)]
    assert states(opened, queue) == []


async def leave_by_break(pond: AsyncPond, queue: str) -> None:
    async for _ in pond.consume(queue, batch=2):
        break


async def leave_by_error(pond: AsyncPond, queue: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT012
        async for _ in pond.consume(queue, batch=2):
            raise ValueError("seen by nobody here")


async def leave_by_cancel(pond: AsyncPond, queue: str) -> None:
    at_work = asyncio.Event()

    async def work() -> None:
        async for _ in pond.consume(queue, batch=2):
            at_work.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await at_work.wait()
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_cancel])
def test_a_plain_loop_that_is_left_hands_its_item_back_as_a_failure(
    opened: Open, opened_async: AsyncOpen, queue: str, leave: Any
) -> None:
    async def act(pond: AsyncPond) -> None:
        await pond.produce(queue, [b"in hand", b"ahead"])
        await leave(pond, queue)

    run(opened_async, act)  # closing waits for what was left
    assert states(opened, queue) == [(b"ahead", "ready", 0, None), (b"in hand", "retrying", 1, LEFT)]


def test_a_loop_in_a_with_tells_the_error_or_gives_the_attempt_back(
    opened: Open, opened_async: AsyncOpen, queue: str
) -> None:
    async def act(pond: AsyncPond) -> None:
        await pond.produce(queue, [b"1", b"2"])
        with pytest.raises(ValueError):  # noqa: PT012
            async with pond.consume(queue) as items:
                async for _ in items:
                    raise ValueError("told")
        async with pond.consume(queue) as items:
            async for _ in items:
                break

    run(opened_async, act)
    assert states(opened, queue) == [(b"1", "retrying", 1, "ValueError: told"), (b"2", "ready", 0, None)]


def test_a_handler_is_given_every_item_and_its_errors_are_the_items(
    opened: Open, opened_async: AsyncOpen, queue: str
) -> None:
    async def handle(item: AsyncHeldItem) -> None:
        if item.payload == b"2":
            raise KeyError("two")

    async def act(pond: AsyncPond) -> None:
        await pond.produce(queue, [b"1", b"2", b"3"])
        await pond.consume(queue, handle, idle_timeout=0)

    run(opened_async, act)
    assert states(opened, queue) == [(b"2", "retrying", 1, "KeyError: 'two'")]


def test_with_item_completes_by_word_and_retries_else(opened: Open, opened_async: AsyncOpen, queue: str) -> None:
    async def act(pond: AsyncPond) -> None:
        await pond.produce(queue, [b"1", b"2", b"3"])
        one, two, three = await pond.lease(queue, batch=3)
        async with one:
            await one.write_state({"a": 1})
            await one.extend()
            await one.complete()
        async with two:
            pass
        with pytest.raises(ValueError):
            async with three:
                raise ValueError("no")

    run(opened_async, act)
    assert states(opened, queue) == [(b"2", "retrying", 1, LEFT), (b"3", "retrying", 1, "ValueError: no")]


def test_stop_ends_a_waiting_loop_at_once(opened_async: AsyncOpen, queue: str) -> None:
    async def act(pond: AsyncPond) -> list[AsyncHeldItem]:
        consumer = pond.consume(queue, wait="10m")

        async def consume() -> list[AsyncHeldItem]:
            return [item async for item in consumer]

        task = asyncio.create_task(consume())
        await until_parked_async(pond, queue)
        consumer.stop()
        return await task

    assert run(opened_async, act) == []


def test_a_loop_ends_with_its_pond(opened_async: AsyncOpen, queue: str) -> None:
    async def main() -> Any:
        async with opened_async() as pond:

            async def consume() -> list[AsyncHeldItem]:
                return [item async for item in pond.consume(queue, wait="10m")]

            task = asyncio.create_task(consume())
            await until_parked_async(pond, queue)
        return (await asyncio.gather(task, return_exceptions=True))[0]

    assert isinstance(asyncio.run(main()), Closed)


def test_the_lease_is_extended_while_the_body_runs(opened_async: AsyncOpen, queue: str) -> None:
    async def act(pond: AsyncPond) -> bool:
        await pond.produce(queue, [b"x"])
        async for item in pond.consume(queue, lease_timeout="1s", idle_timeout=0):
            while ((await pond.get_item(queue, item.id)).lease_deadline or item.lease_deadline) <= item.lease_deadline:
                assert not item.lost
            return item.lost
        return True

    assert run(opened_async, act) is False


def test_what_was_leased_when_the_caller_was_cancelled_goes_back() -> None:
    back: list[Any] = []

    async def main() -> None:
        caller = asyncio.current_task()
        assert caller is not None

        async def lease() -> list[Any]:
            asyncio.get_running_loop().call_soon(caller.cancel)
            return ["item"]

        await Poll(back.extend).wait(lease)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert back == ["item"]
