"""Calls from other threads on the event loop, with and without an event descriptor."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from millpond.doorbell import Doorbell

TIMEOUT_S = 10
THREADS, RINGS = 4, 200


@pytest.fixture(params=["event descriptor", "no descriptor left"], autouse=True)
def descriptors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def none_left(*arguments: Any) -> int:
        raise OSError("too many open files")

    if request.param == "no descriptor left":
        monkeypatch.setattr(os, "eventfd", none_left, raising=False)
    return str(request.param)


@asynccontextmanager
async def doorbell() -> AsyncIterator[Doorbell]:
    bell = Doorbell(asyncio.get_running_loop())
    try:
        yield bell
    finally:
        bell.close()


def in_thread(work: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def test_every_ring_is_answered_on_the_loop_in_the_order_of_its_thread() -> None:
    async def scenario() -> None:
        answered: list[tuple[int, int, threading.Thread]] = []
        over = asyncio.Event()

        def answer(thread: int, ring: int) -> None:
            answered.append((thread, ring, threading.current_thread()))
            if len(answered) == THREADS * RINGS:
                over.set()

        def ring_often(bell: Doorbell, thread: int) -> None:
            for ring in range(RINGS):
                bell.ring(answer, thread, ring)

        async with doorbell() as bell:
            for thread in range(THREADS):
                in_thread(ring_often, bell, thread)
            await asyncio.wait_for(over.wait(), TIMEOUT_S)
        assert {where for _, _, where in answered} == {threading.current_thread()}
        for thread in range(THREADS):
            assert [ring for one, ring, _ in answered if one == thread] == list(range(RINGS))

    asyncio.run(scenario())


def test_an_answer_that_fails_is_reported_and_keeps_no_other_from_being_given() -> None:
    async def scenario() -> None:
        told: list[dict[str, Any]] = []
        over = asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

        def fail() -> None:
            raise ValueError("of a test")

        async with doorbell() as bell:
            for call in (fail, over.set):  # both before the loop looks
                bell.ring(call)
            await asyncio.wait_for(over.wait(), TIMEOUT_S)
        assert [str(context["exception"]) for context in told] == ["of a test"]

    asyncio.run(scenario())


def test_a_ring_after_the_close_does_not_write_to_a_descriptor_that_is_another_s_by_now() -> None:
    async def scenario() -> None:
        over = asyncio.Event()
        async with doorbell() as bell:
            number = bell._descriptor
        reader, writer = os.pipe()
        try:
            if number is not None and number not in (reader, writer):
                os.dup2(writer, number)
            in_thread(bell.ring, over.set)
            await asyncio.wait_for(over.wait(), TIMEOUT_S)
            os.set_blocking(reader, False)
            with pytest.raises(BlockingIOError):  # nothing has come
                os.read(reader, 8)
        finally:
            for descriptor in {reader, writer} | ({number} if number is not None else set()):
                os.close(descriptor)

    asyncio.run(scenario())
