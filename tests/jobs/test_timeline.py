"""Every attempt at a job, from the journal."""

from __future__ import annotations

from typing import Any

import pytest

from millpond import NewItem, Retry
from millpond.jobs.enqueue import enqueue
from millpond.jobs.journal import find_start
from millpond.jobs.timeline import Timeline, timeline
from millpond.model import to_ms
from tests.jobs.conftest import Mill, Run, command


async def told(mill: Mill, id: str, queue: str = "jobs", api: Any = None) -> Timeline:
    return await timeline(api or mill.pond, queue, await mill.pond.get_item(queue, id))


def test_each_attempt_says_who_had_it_how_it_ended_and_how_long_it_took(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", max_retries=5)
        assert (await told(mill, "a")).attempts == []
        for how in ("fail", "defer", "expire", "cancel_not", "end"):
            [item] = await mill.pond.lease("jobs", client_id=f"w-{how}")
            mill.pass_(3)
            if how == "fail":
                await mill.pond.retry([Retry(lease=item.lease, error="exit code 1", delay=1)])
            elif how == "defer":
                await mill.pond.retry([Retry(lease=item.lease, intent="defer", delay=1)])
            elif how == "expire":
                mill.pass_(20)
            elif how == "cancel_not":
                await mill.pond.extend([item], lease_timeout=0)
            else:
                running = (await told(mill, "a")).attempts[-1]
                assert (running.number, running.by, running.how, running.seconds) == (4, "w-end", None, None)
                await mill.pond.complete([item], queue="jobs", result=1)
            mill.pass_(2)
        attempts = (await told(mill, "a")).attempts
        assert [(one.number, one.by, one.how) for one in attempts] == [
            (1, "w-fail", "failed"),
            (2, "w-defer", "deferred"),
            (2, "w-expire", "lease_expired"),
            (3, "w-cancel_not", "lease_expired"),
            (4, "w-end", "completed"),
        ]
        assert (attempts[0].error, attempts[0].seconds, attempts[4].seconds) == ("exit code 1", 3, 3)

    run(act)


def test_a_job_that_died_and_was_revived_begins_to_count_anew(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a", max_retries=1)
        await mill.work(error="no")
        await mill.pond.redrive("jobs", ids=["a"])
        assert (await told(mill, "a")).redriven_at == mill.now
        [_] = await mill.pond.lease("jobs", client_id="w2")
        await mill.pass_in("jobs", 21)
        attempts = (await told(mill, "a")).attempts
        assert [(one.number, one.how, one.dead, one.error) for one in attempts] == [
            (1, "failed", True, "no"),
            (1, "lease_expired", True, None),
        ]
        assert [one.redriven_at is not None for one in attempts] == [False, True]

    run(act)


def test_a_cancelled_attempt_is_told_as_such(run: Run) -> None:
    async def act(mill: Mill) -> None:
        await enqueue(mill.pond, "jobs", command(), id="a")
        [item] = await mill.pond.lease("jobs")
        await mill.pond.cancel("jobs", ["a"])
        await mill.pond.retry([Retry(lease=item.lease, error="killed")])
        assert [one.how for one in (await told(mill, "a")).attempts] == ["cancelled"]

    run(act)


class Counting:
    def __init__(self, pond: Any) -> None:
        self._pond = pond
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pond, name)

    async def read_journal(self, queue: str, **more: Any) -> Any:
        page = await self._pond.read_journal(queue, **more)
        self.rows += len(page.rows)
        return page


def test_only_the_journal_since_the_job_is_read(run: Run) -> None:
    async def act(mill: Mill) -> None:
        pond = mill.pond
        await pond.create_queue("jobs", completed_retention="1d")
        for n in range(300):
            await pond.produce("jobs", [NewItem(id=f"old{n}", priority=9)])
            mill.pass_(0.001 * (n % 3))  # some turns share their instant
        produced = await enqueue(pond, "jobs", command())
        await mill.work()
        item = await pond.get_item("jobs", produced.id)
        counting = Counting(pond)
        start = await find_start(counting, "jobs", 0, to_ms(item.created_at))
        assert counting.rows < 20
        page = await pond.read_journal("jobs", after=start.after, limit=1)
        assert page.rows[0].at == to_ms(item.created_at)
        assert [one.how for one in (await told(mill, produced.id, api=counting)).attempts] == ["completed"]
        assert counting.rows < 60

    run(act)


@pytest.mark.parametrize("own", [None, "mine"])
def test_a_journal_that_was_trimmed_says_since_when_it_knows(run: Run, own: str | None) -> None:
    class Trimmed(Counting):
        after = 0

        async def read_journal(self, queue: str, **more: Any) -> Any:
            more["after"] = max(more.get("after", 0), self.after)
            return await self._pond.read_journal(queue, **more)

    async def act(mill: Mill) -> None:
        produced = await enqueue(mill.pond, "jobs", command(), id=own)
        await mill.work(error="one")
        trimmed = Trimmed(mill.pond)
        trimmed.after = (await mill.pond.read_journal("jobs")).last_turn
        mill.pass_(10)
        await mill.work(error="two")
        seen = await told(mill, produced.id, api=trimmed)
        assert seen.since == mill.now
        assert [one.error for one in seen.attempts] == ([] if own else ["two"])

    run(act)


def test_a_job_that_came_back_from_a_dead_queue_is_told_since_then(run: Run) -> None:
    async def act(mill: Mill) -> None:
        pond = mill.pond
        await pond.create_queue("letters")
        await pond.create_queue("q", max_attempts=1, dead_queue="letters", completed_retention="1d")
        [produced] = await pond.produce("q", [NewItem(payload=b"x")])
        await mill.work("q", error="no")
        letters: list[Any] = []
        while not letters:
            letters = list((await pond.list_items("letters")).items)
        mill.pass_(5)
        await pond.redrive("letters")
        while not (await pond.stats("q")).counts["ready"]:
            await pond.stats("letters")
        await mill.work("q", by="w2")
        seen = await told(mill, produced.id, "q")
        assert [(one.by, one.how) for one in seen.attempts] == [("w2", "completed")]

    run(act)
