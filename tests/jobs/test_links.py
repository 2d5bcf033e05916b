"""Jobs that wait for others."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from millpond import NewItem
from millpond.errors import InvalidRequest, KeyConflict, NotFound, Unavailable
from millpond.jobs import held, links
from millpond.jobs.control import cancel, find_item, find_job, release, retry_dead
from millpond.jobs.enqueue import enqueue
from millpond.jobs.explain import explain
from millpond.jobs.held import look_again, read_link
from millpond.jobs.names import LINKS_QUEUE
from millpond.jobs.parking import parks_of
from millpond.jobs.spec import IfDead
from millpond.jobs.view import JobState
from millpond.model import Item, State
from tests.jobs.conftest import Mill, Run, command
from tests.jobs.trouble import Killed, Late, Trouble


async def following(mill: Mill, api: Any = None) -> asyncio.Task[None]:
    """A worker that has leased the next link and is at it."""
    [item] = await mill.pond.lease(LINKS_QUEUE, lease_timeout=links.LINK_LEASE)
    return asyncio.create_task(links.follow(api or mill.pond, item, mill.now))


async def parked(mill: Mill) -> None:
    """Once it waits for another job."""
    while not parks_of(mill.pond)._parks:
        await mill.pond.stats("jobs")


async def state_of(mill: Mill, id: str) -> JobState:
    return (await find_job(mill.pond, id)).state


async def link_of(mill: Mill, id: str) -> Item | None:
    return await held.link_of(mill.pond, *await find_item(mill.pond, id))


async def links_left(mill: Mill) -> int:
    counts = (await mill.pond.stats(LINKS_QUEUE)).counts
    return counts["ready"] + counts["scheduled"] + counts["leased"]


def test_a_job_runs_when_those_it_waits_for_have_completed(run: Run) -> None:
    async def act(mill: Mill) -> None:
        for parent in ("a", "b"):
            await enqueue(mill.pond, "jobs", command(parent), id=parent)
        await enqueue(mill.pond, "jobs", command("child"), id="c", after=["a", "jobs/b"])
        job = await find_job(mill.pond, "c")
        assert (job.state, job.held, job.run_at, job.after) == (JobState.PENDING, True, None, ["a", "jobs/b"])
        task = await following(mill)
        assert await mill.work() == "a"
        assert await mill.work() == "b"
        await task
        assert await links_left(mill) == 0
        assert not (await find_job(mill.pond, "c")).held
        assert await mill.work() == "c"

    run(act)


def test_a_job_waits_for_none_that_have_completed_already(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        await mill.work()
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"])
        assert await mill.work() == "b"

    run(act)


def test_a_job_without_an_id_gets_one_when_it_waits(run: Run) -> None:
    async def act(mill: Mill) -> None:
        parent = await enqueue(mill.pond, "jobs", command())
        child = await enqueue(mill.pond, "other", command(), after=[f"jobs/{parent.id}"])
        task = await following(mill)
        await mill.work()
        await task
        assert await mill.work("other") == child.id

    run(act)


@pytest.mark.parametrize("end", ["dead", "cancelled", "gone"])
def test_a_job_is_cancelled_when_one_it_waits_for_will_not_complete(run: Run, end: str) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", max_retries=1)
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"])
        await enqueue(mill.pond, "jobs", command(), id="c", after=["b"])
        task = await following(mill)
        if end == "dead":
            await mill.work(error="exit code 1")
        elif end == "cancelled":
            await cancel(mill.pond, "jobs", "a")
        else:
            await mill.pond.clear("jobs", ["ready"])
        await task
        assert await state_of(mill, "b") == JobState.CANCELLED
        await (await following(mill))
        assert await state_of(mill, "c") == JobState.CANCELLED
        assert await links_left(mill) == 0

    run(act)


def test_a_job_that_waits_for_a_dead_one_is_cancelled_at_once(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", max_retries=1)
        await mill.work(error="no")
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"])
        assert await state_of(mill, "b") == JobState.CANCELLED
        await (await following(mill))
        assert await links_left(mill) == 0

    run(act)


def test_a_job_can_be_held_until_the_dead_one_was_revived(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", max_retries=1)
        await mill.work(error="no")
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"], if_dead="hold")
        await (await following(mill))
        assert (await find_job(mill.pond, "b")).held
        await retry_dead(mill.pond, "jobs", "a")
        assert await mill.work() == "a"
        mill.pass_(links.HOLD_LOOK)
        await (await following(mill))
        assert await mill.work() == "b"

    run(act)


def test_a_job_that_is_held_for_a_revived_one_need_not_wait_for_the_next_look(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await look_again(mill.pond, {("jobs", "a")})  # there never was a link
        for id in ("a", "b"):
            await enqueue(mill.pond, "jobs", command(), id=id, max_retries=1)
            await mill.work(error="no")
            await enqueue(mill.pond, "jobs", command(), id=f"for-{id}", after=[id], if_dead="hold")
            await (await following(mill))
        await retry_dead(mill.pond, "jobs", "a")
        await look_again(mill.pond, {("jobs", "a")})
        task = await following(mill)
        assert await mill.pond.lease(LINKS_QUEUE) == []
        assert await mill.work() == "a"
        await task
        assert await mill.work() == "for-a"

    run(act)


def test_one_that_stays_dead_is_looked_at_less_and_less_often(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", max_retries=1)
        await mill.work(error="no")
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"], if_dead="hold")
        waits: list[float] = []
        for _ in range(7):
            await (await following(mill))
            link = await link_of(mill, "b")
            assert link is not None
            assert link.enqueue_at is not None
            waits.append((link.enqueue_at - mill.now).total_seconds())
            mill.pass_until(link.enqueue_at)
        assert waits == [10, 20, 40, 80, 160, links.HOLD_LOOK_MAX, links.HOLD_LOOK_MAX]

    run(act)


def test_a_job_waits_for_its_time_too(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"], run_at=mill.now + timedelta(hours=30))
        await enqueue(mill.pond, "jobs", command(), id="c", after=["a"], delay="31h")
        await mill.work()
        for _ in range(2):
            await (await following(mill))
        assert await mill.pond.lease("jobs") == []
        for id in ("b", "c"):
            mill.pass_(30 * 3600 if id == "b" else 3600)  # longer than the completed job is kept
            await (await following(mill))
            assert await mill.work() == id

    run(act)


@pytest.mark.parametrize("call", ["produce", "make_ready", "complete", "get_item"])
@pytest.mark.parametrize("done", [False, True])
def test_a_worker_that_dies_anywhere_leaves_the_job_to_run_once(run: Run, call: str, done: bool) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        with pytest.raises(Killed):  # who enqueues dies between the link and the job
            await enqueue(
                Trouble(mill.pond, "produce", done=False, queue="jobs"), "jobs", command(), id="b", after=["a"]
            )
        await mill.work()
        task = await following(mill, Trouble(mill.pond, call, done=done))
        await asyncio.gather(task, return_exceptions=True)
        assert isinstance(task.exception(), Killed)
        mill.pass_(links.LINK_LEASE + 1)
        if await links_left(mill):
            await (await following(mill))
        assert await mill.work() == "b"
        assert await mill.pond.lease("jobs") == []
        assert await links_left(mill) == 0

    run(act)


def test_a_job_that_comes_while_a_worker_makes_up_for_it_still_waits(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        leased, looked = asyncio.Event(), asyncio.Event()

        async def meet() -> None:
            leased.set()
            await looked.wait()

        slow: Any = Late(mill.pond, "produce", meet, queue="jobs")
        coming = asyncio.create_task(enqueue(slow, "jobs", command(), id="b", after=["a"]))
        await leased.wait()  # the link is there, the job is not

        async def let_it_come() -> None:
            looked.set()
            assert not (await coming).duplicate

        task = await following(mill, Late(mill.pond, "produce", let_it_come, queue="jobs"))
        assert await mill.work() == "a"
        await task
        assert await mill.work() == "b"

    run(act)


def test_a_job_that_was_cancelled_long_ago_is_not_brought_back_by_its_link(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", delay="30d")
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"])
        await cancel(mill.pond, "jobs", "b")
        mill.pass_(3 * 86_400)  # no worker all the while
        await (await following(mill))
        assert await links_left(mill) == 0
        with pytest.raises(NotFound):
            await find_job(mill.pond, "b")

    run(act)


def test_a_link_has_nothing_to_do_with_a_later_job_of_the_same_id(run: Run) -> None:
    """The queue has forgotten the id of a cancelled job, but a worker follows its link still."""

    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        await enqueue(mill.pond, "jobs", command(), id="b", delay="1h")
        await mill.pond.create_queue("short", dedup_window="1s", completed_retention="1s")
        await enqueue(mill.pond, "short", command("old"), id="c", after=["jobs/a"])
        old = await following(mill)
        await parked(mill)
        await cancel(mill.pond, "short", "c")
        await mill.pass_in("short", 2)
        await enqueue(mill.pond, "short", command("new"), id="c", after=["jobs/b"], on_conflict="reject")
        assert await mill.work() == "a"
        await old
        assert (await find_job(mill.pond, "c")).held
        new = await following(mill)
        await release(mill.pond, "jobs", "b")
        assert await mill.work() == "b"
        await new
        assert await mill.work("short") == "c"

    run(act)


def test_a_link_makes_way_for_others_and_knows_what_has_completed(run: Run) -> None:
    async def act(mill: Mill) -> None:
        for parent in ("a", "b"):
            await enqueue(mill.pond, "jobs", command(), id=parent)
        for child in ("c", "d"):
            await enqueue(mill.pond, "jobs", command(), id=child, after=["a", "b"])
        await mill.work()
        task = await following(mill)
        while not task.done():
            mill.pass_(1)
            await mill.pond.stats("jobs")
        link = await link_of(mill, "c")
        assert link is not None
        assert (link.state, link.state_doc) == (State.READY, {"done": ["jobs/a"]})
        [other] = await mill.pond.lease(LINKS_QUEUE)
        behind = await link_of(mill, "d")
        assert behind is not None
        assert other.id == behind.id

    run(act)


async def until_forgotten(mill: Mill, job: str) -> None:
    """All that has completed by now."""
    await mill.pass_in("jobs", 2 * 86_400)
    await mill.pass_in(LINKS_QUEUE, 0)
    with pytest.raises(NotFound):
        await mill.pond.get_item("jobs", job)


def test_what_has_completed_is_known_when_it_is_forgotten_and_the_worker_has_died(run: Run) -> None:
    async def act(mill: Mill) -> None:
        for parent in ("a", "b"):
            await enqueue(mill.pond, "jobs", command(), id=parent)
        await enqueue(mill.pond, "jobs", command(), id="c", after=["a", "b"])
        task = await following(mill)
        await parked(mill)
        assert await mill.work() == "a"
        while (link := await link_of(mill, "c")) is None or not link.state_doc:
            await mill.pond.stats("jobs")
        task.cancel()
        await asyncio.wait([task])
        await until_forgotten(mill, "a")
        told = await explain(mill.pond, "jobs", "c", mill.now)
        assert told.sentence == "Job c is waiting for job b (pending) to complete."
        task = await following(mill)
        await parked(mill)
        assert await mill.work() == "b"
        await task
        assert await mill.work() == "c"

    run(act)


def test_what_has_completed_while_the_last_worker_ended_is_known_when_it_is_forgotten(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that drains ends with its last job, and need not hear that somebody waited for that."""

    class Deaf:
        def __init__(self) -> None:
            self.waits = asyncio.Event()

        async def ended(self, *_: object) -> bool:
            self.waits.set()
            return await asyncio.Event().wait()

    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"])
        deaf = Deaf()
        with monkeypatch.context() as patch:
            patch.setattr("millpond.jobs.links.parks_of", lambda _: deaf)
            task = await following(mill)
            await deaf.waits.wait()
            assert await mill.work() == "a"
            task.cancel()
            await asyncio.wait([task])
        await until_forgotten(mill, "a")
        await (await following(mill))
        assert await mill.work() == "b"

    run(act)


@pytest.mark.parametrize("own_id", ["a", None])
def test_what_has_completed_when_no_worker_saw_it_is_known_from_the_journal(run: Run, own_id: str | None) -> None:
    """The last worker was killed, and the next one comes when the job is forgotten."""

    async def act(mill: Mill) -> None:
        parent = await enqueue(mill.pond, "jobs", command(), id=own_id)
        await enqueue(mill.pond, "jobs", command(), id="other")
        await enqueue(mill.pond, "jobs", command(), id="b", after=[parent.id])
        await mill.work()
        await mill.pass_in("jobs", 2 * 86_400)
        with pytest.raises(NotFound):
            await mill.pond.get_item("jobs", parent.id)
        told = await explain(mill.pond, "jobs", "b", mill.now)
        assert "no worker is running to release it" in told.sentence
        await (await following(mill))
        assert await mill.work() == "other"
        assert await mill.work() == "b"

    run(act)


def test_the_journal_is_asked_once_for_a_job_that_is_gone(run: Run) -> None:
    """It may be long, and a job that is held is looked at for ever."""

    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"], if_dead="hold")
        await mill.pond.clear("jobs", ["ready"])
        await (await following(mill))
        link = await link_of(mill, "b")
        assert link is not None
        assert link.state_doc == {"done": [], "gone": ["jobs/a"]}
        await mill.pass_in(LINKS_QUEUE, links.HOLD_LOOK)
        await (await following(mill, Trouble(mill.pond, "read_journal", done=False)))
        assert (await find_job(mill.pond, "b")).held

    run(act)


def test_a_link_stays_with_its_worker_however_long_the_journals_are(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(mill: Mill) -> None:
        async def slow(*_: object) -> bool:
            mill.pass_(links.LINK_LEASE * 0.9)
            return True

        for parent in ("a", "b", "c"):
            await enqueue(mill.pond, "jobs", command(), id=parent)
        await enqueue(mill.pond, "jobs", command(), id="d", after=["a", "b", "c"])
        await mill.pond.clear("jobs", ["ready"])
        monkeypatch.setattr("millpond.jobs.held.has_completed", slow)
        await (await following(mill))
        assert await links_left(mill) == 0
        assert await mill.work() == "d"

    run(act)


def test_a_job_is_not_cancelled_because_the_journal_does_not_answer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_answer(*_: object) -> bool:
        raise Unavailable("the store does not answer")

    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"])
        await mill.work()
        await mill.pass_in("jobs", 2 * 86_400)
        with monkeypatch.context() as patch:
            patch.setattr("millpond.jobs.held.has_completed", no_answer)
            await (await following(mill))
        assert (await find_job(mill.pond, "b")).held
        await mill.pass_in(LINKS_QUEUE, links.ERROR_PAUSE)
        await (await following(mill))
        assert await mill.work() == "b"

    run(act)


def test_a_link_with_nobody_behind_it_stays_with_its_worker(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"])
        task = await following(mill)
        began = mill.now
        while mill.now < began + timedelta(seconds=5 * links.LINK_LEASE):
            mill.pass_(1)
            await mill.pond.stats("jobs")
            await mill.pond.stats(LINKS_QUEUE)
            for _ in range(50):
                await asyncio.sleep(0)
        link = await link_of(mill, "b")
        assert link is not None
        assert (link.state, link.deliveries) == (State.LEASED, 1)
        await mill.work()
        await task
        assert await mill.work() == "b"

    run(act)


def test_a_held_job_can_be_released_by_hand(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", delay="1h")
        await enqueue(mill.pond, "jobs", command(), id="b", after=["a"])
        await release(mill.pond, "jobs", "b")
        assert await mill.work() == "b"
        await (await following(mill))
        assert await links_left(mill) == 0

    run(act)


@pytest.mark.parametrize("error", [None, "no"])
def test_a_job_that_was_released_by_hand_is_left_alone_by_its_link(run: Run, error: str | None) -> None:
    """Neither cancelled with the job that it waited for, nor spared its own backoff."""

    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", max_retries=1)
        await enqueue(mill.pond, "other", command(), id="b", after=["jobs/a"])
        task = await following(mill)
        await parked(mill)
        await release(mill.pond, "other", "b")
        assert await mill.work("other", error="not yet") == "b"
        assert await mill.work(error=error) == "a"
        await task
        assert await links_left(mill) == 0
        assert await state_of(mill, "b") == JobState.FAILED

    run(act)


def test_an_id_or_key_that_is_taken_leaves_no_link(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", key="k")
        await enqueue(mill.pond, "jobs", command(), id="p", delay="1h")
        assert (await enqueue(mill.pond, "jobs", command(), id="a", after=["p"])).duplicate
        assert (await enqueue(mill.pond, "jobs", command(), key="k", after=["p"])).id == "a"
        for id, key in (("a", None), (None, "k")):
            with pytest.raises(KeyConflict):
                await enqueue(mill.pond, "jobs", command(), id=id, key=key, after=["p"], on_conflict="reject")
        assert await links_left(mill) == 0

    run(act)


@pytest.mark.parametrize("if_dead", ["hold", "cancel"])
def test_a_job_that_a_worker_made_of_its_link_was_enqueued_all_the_same(run: Run, if_dead: IfDead) -> None:
    """The worker that finds the link may be faster than who enqueues."""

    class Beaten(Trouble):
        def __getattr__(self, name: str) -> Any:
            real = getattr(self._pond, name)

            async def late(queue: str, *given: Any, **more: Any) -> Any:
                if queue == "jobs":
                    await (await following(mills[0]))
                return await real(queue, *given, **more)

            return late if name == "produce" else real

    mills: list[Mill] = []

    async def act(mill: Mill) -> None:
        mills.append(mill)
        await enqueue(mill.pond, "jobs", command(), id="a", max_retries=1)
        await mill.work(error="no")
        beaten = Beaten(mill.pond, "produce", done=True)
        made = await enqueue(beaten, "jobs", command(), id="b", after=["a"], if_dead=if_dead, on_conflict="reject")
        assert (made.id, made.duplicate) == ("b", False)
        assert await state_of(mill, "b") == (JobState.PENDING if if_dead == "hold" else JobState.CANCELLED)
        with pytest.raises(KeyConflict):
            await enqueue(mill.pond, "jobs", command(), id="b", after=["a"], on_conflict="reject")

    run(act)


def test_a_job_that_has_run_and_was_forgotten_before_who_enqueued_it_came_to_it_was_enqueued(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await mill.pond.create_queue("short", completed_retention=0)
        await enqueue(mill.pond, "jobs", command(), id="a")

        async def be_faster() -> None:
            task = await following(mill)
            await mill.work()
            await task
            assert await mill.work("short") == "b"

        late: Any = Late(mill.pond, "produce", be_faster, queue="short")
        made = await enqueue(late, "short", command(), id="b", after=["jobs/a"], on_conflict="reject")
        assert (made.id, made.duplicate) == ("b", False)
        with pytest.raises(KeyConflict):
            await enqueue(mill.pond, "short", command(), id="b", after=["jobs/a"], on_conflict="reject")

    run(act)


@pytest.mark.parametrize("queue", [LINKS_QUEUE, "jobs"])
def test_of_two_jobs_with_one_id_the_first_waits_for_what_it_said(run: Run, queue: str) -> None:
    async def act(mill: Mill) -> None:
        for parent in ("a", "b"):
            await enqueue(mill.pond, "jobs", command(), id=parent)

        async def first() -> None:
            if not made:
                made.append(None)
                made[0] = await enqueue(mill.pond, "jobs", command("first"), id="c", after=["b"])

        made: list[Any] = []
        late: Any = Late(mill.pond, "produce", first, queue=queue)
        second = await enqueue(late, "jobs", command("second"), id="c", after=["a"])
        assert (made[0].duplicate, second.duplicate) == (False, True)
        link = await link_of(mill, "c")
        assert link is not None
        assert (link.state, await links_left(mill)) == (State.READY, 1)
        told = read_link(link.payload)
        assert told is not None
        assert told.after == ["b"]

    run(act)


def test_what_cannot_be_waited_for_is_refused(run: Run) -> None:
    async def act(mill: Mill) -> None:
        pond = mill.pond
        await pond.create_queue("plain")
        await pond.produce("plain", [NewItem(id="a")])
        await enqueue(pond, "jobs", command(), id="x")
        for after, error, says in (
            ("nobody", NotFound, "no job 'nobody' in queue 'jobs'"),
            ("nowhere/x", NotFound, "nowhere"),
            ("plain/a", InvalidRequest, "completed_retention"),
            ("self", InvalidRequest, "wait for itself"),
        ):
            with pytest.raises(error, match=says):
                await enqueue(pond, "jobs", command(), id="self", after=[after])
        with pytest.raises(InvalidRequest, match="replace does not go"):
            await enqueue(pond, "jobs", command(), after=["x"], on_conflict="replace")
        with pytest.raises(InvalidRequest, match="exclude each other"):
            await enqueue(pond, "jobs", command(), after=["x"], delay=5, run_at=mill.now)

    run(act)


def test_a_link_of_a_kind_other_than_its_jobs_is_dropped(run: Run) -> None:
    """Who may not enqueue commands cannot have a worker do it."""

    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        await enqueue(mill.pond, "jobs", command("rm"), id="b", after=["a"])
        link = await link_of(mill, "b")
        assert link is not None
        stolen = link.payload.replace(b"b", b"z")
        await mill.pond.clear(LINKS_QUEUE)
        for payload, kind in ((stolen, ""), (stolen, "task"), (b"rubbish", "command")):
            await mill.pond.produce(LINKS_QUEUE, [NewItem(payload=payload, kind=kind, encoding="msgpack")])
            await (await following(mill))
        assert await links_left(mill) == 0
        assert len(await mill.commands()) == 2

    run(act)


def test_links_that_wait_for_the_same_job_share_one_parked_call(run: Run) -> None:
    class Counting(Trouble):
        parked = 0

        def __getattr__(self, name: str) -> Any:
            real = getattr(self._pond, name)

            async def counted(*given: Any, **more: Any) -> Any:
                self.parked += bool(more.get("wait"))
                return await real(*given, **more)

            return counted if name == "get_item" else real

    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        children = [f"c{n}" for n in range(50)]
        for child in children:
            await enqueue(mill.pond, "jobs", command(), id=child, after=["a"])
        counting = Counting(mill.pond, "", done=False)
        tasks = [await following(mill, counting) for _ in children]
        stopped = tasks.pop()
        while not counting.parked:  # noqa: ASYNC110 - a call sets no event
            await asyncio.sleep(0)
        stopped.cancel()
        await mill.work()
        await asyncio.gather(*tasks)
        assert counting.parked == 1
        assert [await mill.work() for _ in tasks] == children[:-1]

    run(act)
