"""Small calls at once go as one request, and nobody notices."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from millpond import AsyncClient, Client, NewItem
from millpond.client.gather import Gather
from millpond.client.merging import Part
from millpond.errors import KeyConflict, MillpondError, NotFound, OutcomeUnknown, Unavailable
from tests.client.scripted import Scripted, Step, refusal, reply, scripted, silent
from tests.client.served import Served

Calls = Sequence[tuple[str, tuple[Any, ...], dict[str, Any]]]
Outcome = Any  # a reply, or the error in its place


def produced(*ids: str) -> Step:
    return reply({"items": [{"id": id} for id in ids]})


def gated(gate: threading.Event, step: Step) -> Step:
    def wait(sock: Any) -> bool:
        assert gate.wait(10)
        return step(sock)

    return wait


def in_threads(url: str, calls: Calls, gathered: Callable[[int], None], **options: Any) -> list[Outcome]:
    """The first call, then the others while it is under way."""
    with Client(url, **options) as client, ThreadPoolExecutor(len(calls)) as threads:
        futures = []
        for number, (name, args, named) in enumerate(calls):
            futures.append(threads.submit(getattr(client, name), *args, **named))
            waiting = client._core.gather._waiting
            while sum(map(len, list(waiting.values()))) < number or not waiting:
                pass
        gathered(len(calls))
        return [future.exception() or future.result() for future in futures]


def in_tasks(url: str, calls: Calls, gathered: Callable[[int], None], **options: Any) -> list[Outcome]:
    async def main() -> list[Outcome]:
        async with AsyncClient(url, **options) as client:
            name, args, named = calls[0]
            tasks = [asyncio.create_task(getattr(client, name)(*args, **named))]
            for _ in range(5):  # it is on its way
                await asyncio.sleep(0)
            tasks += [asyncio.create_task(getattr(client, name)(*args, **named)) for name, args, named in calls[1:]]
            await asyncio.sleep(0)
            gathered(len(calls))
            return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(main())


@pytest.fixture(params=[in_threads, in_tasks], ids=["threads", "tasks"])
def at_once(request: pytest.FixtureRequest) -> Callable[..., list[Outcome]]:
    made: Callable[..., list[Outcome]] = request.param
    return made


def produce(payload: bytes, **named: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    return "produce", ("q", [payload]), named


def sizes(server: Scripted) -> list[int]:
    return [len(body.get("items") or body.get("leases")) for _, body in server.requests]


def test_what_gathers_behind_a_call_goes_together(at_once: Any) -> None:
    gate = threading.Event()
    with scripted(gated(gate, produced("0")), produced("1", "2", "3")) as server:
        outcomes = at_once(server.url, [produce(b"%d" % number) for number in range(4)], lambda _: gate.set())
        assert [[one.id for one in outcome] for outcome in outcomes] == [["0"], ["1"], ["2"], ["3"]]
        assert sizes(server) == [1, 3]
        assert [item["bytes"] for item in server.requests[1][1]["items"]] == [b"1", b"2", b"3"]


def test_only_what_is_alike_goes_together() -> None:
    calls = [produce(b"0"), produce(b"1", request_id="mine"), produce(b"2", on_conflict="reject")]
    gate = threading.Event()
    with scripted(*[gated(gate, produced("x"))] * 3) as server:
        in_tasks(server.url, calls, lambda _: gate.set())
        assert sizes(server) == [1, 1, 1]


def test_a_refused_company_sends_one_by_one(at_once: Any) -> None:
    gate = threading.Event()
    steps = [gated(gate, produced("0")), refusal("key_conflict", 409), refusal("key_conflict", 409), produced("2")]
    with scripted(*steps) as server:
        outcomes = at_once(server.url, [produce(b"%d" % number) for number in range(3)], lambda _: gate.set())
        assert sizes(server) == [1, 2, 1, 1]
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["KeyConflict", "list", "list"]
        assert len({body["request_id"] for _, body in server.requests}) == 4


def test_what_is_nobodys_fault_is_everybodys(at_once: Any) -> None:
    gate = threading.Event()
    with scripted(gated(gate, produced("0")), refusal("internal", 500)) as server:
        outcomes = at_once(server.url, [produce(b"%d" % number) for number in range(3)], lambda _: gate.set())
        assert [getattr(outcome, "code", "ok") for outcome in outcomes] == ["ok", "internal", "internal"]
        assert outcomes[1] is not outcomes[2]


def test_completes_and_extends_go_together_too(at_once: Any) -> None:
    for name in ("complete", "extend"):
        gate = threading.Event()
        two = reply({"results": [{"ok": True}, {"error": {"code": "lease_lost", "message": "m"}}]})
        with scripted(gated(gate, reply({"results": [{"ok": True}]})), two) as server:
            calls: Calls = [(name, ([token],), {}) for token in ("a", "b", "c")]
            outcomes = at_once(server.url, calls, lambda _, gate=gate: gate.set())
            assert sizes(server) == [1, 2]
            assert [outcome[0].ok for outcome in outcomes] == [True, True, False]


def test_each_caller_has_its_own_deadline(at_once: Any) -> None:
    with scripted(*[silent] * 10) as server:
        outcomes = at_once(server.url, [produce(b"%d" % number) for number in range(3)], lambda _: None, timeout=0.1)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
        assert isinstance(outcomes[0], OutcomeUnknown)


def test_an_interrupted_leader_hands_over_to_the_next() -> None:
    gather, gate, leads = Gather(0.0), threading.Event(), threading.Semaphore(0)
    sent: list[Any] = []

    def build(entries: list[Any]) -> Any:
        return entries

    def call(ask: Any, deadline: float) -> Any:
        leads.release()
        assert gate.wait(10)
        sent.append(ask)
        if len(sent) in (1, 2):
            raise KeyboardInterrupt
        return ask

    def submit(entry: str) -> Any:
        return gather.submit(Part("k", [entry], 0, build), time.monotonic() + 10, call)

    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(submit, "a")]
        assert leads.acquire(timeout=10)
        for count, entry in enumerate("bcd", 1):
            futures.append(threads.submit(submit, entry))
            while len(gather._waiting["k"]) < count:
                pass
        gate.set()
        errors = [future.exception() for future in futures]
    assert [type(error) for error in errors] == [KeyboardInterrupt, KeyboardInterrupt, type(None), type(None)]
    assert sent == [["a"], ["b", "c", "d"], ["b", "c", "d"]]
    assert futures[2].result() == ["c"]
    assert gather._waiting == {}


def test_large_calls_wait_for_nobody() -> None:
    gate = threading.Event()
    script = scripted(gated(gate, produced(*"x" * 101)), produced("1"))
    with script as server, Client(server.url) as client, ThreadPoolExecutor(1) as threads:
        large = threads.submit(client.produce, "q", [b"x"] * 101)
        assert server.came.acquire(timeout=10)
        assert client.produce("q", [b"y"])[0].id == "1"
        gate.set()
        assert len(large.result()) == 101


def test_many_threads_lose_and_double_nothing(server: Served, queue: str) -> None:
    def work(number: int) -> list[MillpondError]:
        errors: list[MillpondError] = []
        for turn in range(20):
            try:
                key = f"{number}-{turn}" if turn % 5 else "shared"
                client.produce(queue, [NewItem(payload=key, key=key), b"beside"], on_conflict="reject")
            except MillpondError as error:
                errors.append(error)
        return errors

    with Client(server.url) as client, ThreadPoolExecutor(8) as threads:
        errors = [error for found in threads.map(work, range(8)) for error in found]
        assert len(errors) == 8 * 4 - 1
        assert {type(error) for error in errors} == {KeyConflict}
        assert client.stats(queue).counts["ready"] == 2 * (8 * 20 - len(errors))  # all of a call, or none of it


def test_many_tasks_produce_and_complete(server: Served, queue: str) -> None:
    async def main() -> int:
        async with AsyncClient(server.url) as client:

            async def work() -> int:
                done = 0
                for _ in range(10):
                    await client.produce(queue, [b"x"])
                    for item in await client.lease(queue):
                        done += (await client.complete([item]))[0].ok
                return done

            done = sum(await asyncio.gather(*(work() for _ in range(20))))
            with pytest.raises(NotFound):
                await asyncio.gather(*(client.produce("nowhere", [b"x"]) for _ in range(3)))
            return done

    assert asyncio.run(main()) == 200
