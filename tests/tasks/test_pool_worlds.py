"""Worlds in which all that can go wrong with processes does; and what they have found, each as a short way to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from millpond.tasks import processes
from millpond.tasks.process import DEAF_S
from tests.tasks.pool_world import World

Act = Callable[[World], Awaitable[None]]


def played(act: Act, processes: int = 1, troubles: tuple[str, ...] = (), jobs_max: int | None = None) -> World:
    world = World(processes=processes, troubles=troubles, process_jobs_max=jobs_max)
    world.pool._average = 0.0  # jobs are short, as far as is known: some are sent ahead
    world.run(lambda: act(world))
    return world


@pytest.fixture
def left_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent ahead is not taken back because it waits for long."""
    monkeypatch.setattr(processes, "MOMENT_S", 1_000.0)


@pytest.mark.parametrize("first", range(1, 201, 50))
def test_worlds_keep_all_promises(first: int) -> None:
    for seed in range(first, first + 50):
        try:
            World(seed).run()
        except AssertionError as error:
            pytest.fail(f"{error}; replay: python -m tests.tasks.pool_world {seed} 1")


def test_a_seed_always_leads_to_the_same() -> None:
    found = set()
    for _ in range(2):
        world = World(7)
        world.run()
        found.add((world.now, world.rng.random(), len(world.children)))
    assert len(found) == 1


def test_what_a_dead_process_has_left_goes_to_one_that_is_free() -> None:
    """Not only when another has taken its place: after a crash that takes some time."""

    async def act(world: World) -> None:
        world.children[0].stop()
        plan = world.add()
        world.children[0].kill()
        await world.until(lambda: plan.job.outcome, seconds=0.1)

    played(act, processes=2)


def test_a_process_that_has_served_its_jobs_and_does_not_end_is_replaced() -> None:
    async def act(world: World) -> None:
        plans = [world.add(), world.add()]
        await world.until(lambda: plans[1].job.outcome)

    assert len(played(act, troubles=("lingers",), jobs_max=1).children) >= 2


def test_a_job_does_not_time_out_before_it_has_begun() -> None:
    async def act(world: World) -> None:
        world.children[0].stop()
        plan = world.add("hasty")
        await asyncio.sleep(2)
        world.children[0].resume()
        await world.until(lambda: plan.job.outcome)
        assert plan.job.outcome is not None
        assert plan.job.outcome.ok

    played(act)


def test_a_job_that_waits_behind_another_and_is_not_wanted_ends_at_once(left_ahead: None) -> None:
    async def act(world: World) -> None:
        long, unwanted, last = [world.add(seconds=3) for _ in range(3)]
        await world.until(lambda: long.runs)
        world.end(unwanted)
        await world.until(lambda: unwanted.job.outcome, seconds=0.1)
        await world.until(lambda: last.job.outcome)
        assert [len(plan.runs) for plan in (long, unwanted, last)] == [1, 0, 1]

    played(act)


def test_what_a_process_begins_when_it_is_killed_for_beginning_nothing_is_not_to_blame() -> None:
    async def act(world: World) -> None:
        world.children[0].stop()
        plan = world.add("patient", seconds=6)
        await world.until(lambda: plan.job.outcome, seconds=20)
        assert plan.job.outcome is not None
        assert plan.job.outcome.ok
        assert len(plan.runs) == 2

    played(act, troubles=("wakes up", "hurries"))


def test_a_process_that_takes_no_jobs_is_not_sent_them_again_and_again() -> None:
    async def act(world: World) -> None:
        world.children[0].stop()
        plans = [world.add() for _ in range(10)]
        numbers = world.pool._processes[0]._tickets
        await asyncio.sleep(DEAF_S - 0.5)
        assert numbers._last <= len(plans) + 1
        await world.until(lambda: all(plan.job.outcome for plan in plans))

    played(act)


def test_a_pool_that_is_stopped_ends_a_successor_that_could_not_load_the_app_too() -> None:
    async def act(world: World) -> None:
        world.troubles |= {"does not load", "lingers"}
        world.children[0].kill()
        await world.until(lambda: len(world.children) == 2)
        await asyncio.sleep(1)  # nobody waits for it any more but for its end
        await world.stop(force=False)

    played(act)


def test_a_pool_that_is_stopped_by_force_begins_no_more_jobs(left_ahead: None) -> None:
    async def act(world: World) -> None:
        long, short, behind = world.add(seconds=9), world.add(), world.add()
        await world.until(lambda: short.job.outcome and long.runs, seconds=1)
        free = world.pool._processes[1]
        given = free._tickets._last
        await world.stop(force=True)
        assert not behind.runs
        assert free._tickets._last == given

    played(act, processes=2)


def test_a_channel_that_somebody_holds_is_closed_with_its_process() -> None:
    async def act(world: World) -> None:
        world.children[0].kill()
        await world.until(lambda: len(world.children) == 2 and world.all_ready())

    played(act, troubles=("leaves something behind", "is not found"))
