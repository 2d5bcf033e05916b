"""Plain tasks in processes: ended with all that they have started, and replaced."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import uvloop

import millpond
from millpond.errors import InvalidRequest
from millpond.model import LeasedFields
from millpond.tasks import TaskCancelled, TaskFailed
from millpond.tasks.child import DEADLINE, Watcher
from millpond.tasks.child_work import Line, LineNotes
from millpond.tasks.connection import Where
from millpond.tasks.frames import READ_BYTES, Answer, Hello, Job, Logged, Unpacking, decode_from_process, packed
from millpond.tasks.pools import executors
from millpond.tasks.portal import Portal
from millpond.tasks.process import Process
from millpond.tasks.tickets import Tickets
from millpond.worker.runner import Worker
from millpond.worker.tree import processes
from tests.tasks import pool_app
from tests.tasks.working import run

pytestmark = pytest.mark.slow  # every process is a new Python
PLACE = "tests.tasks.pool_app:app"


@asynccontextmanager
async def working(
    data: Path, *, slots: int = 2, processes: int | None = None, lease_timeout: Any = None, **limits: Any
) -> AsyncIterator[Worker]:
    app, where = pool_app.app, Where(data=str(data))
    async with millpond.open_async(data) as pond:
        portal = Portal(asyncio.get_running_loop(), pond)
        app.connection.bind(portal)
        await pond.create_queue("orders", completed_retention="1d")
        pools = executors(app, pond, slots=processes or slots, pool="processes", place=PLACE, where=where, **limits)
        queues = {"jobs": 1.0, "orders": 1.0}
        worker = Worker(pond, pools, queues=queues, slots=slots, services=False, lease_timeout=lease_timeout)
        work = asyncio.create_task(worker.run(signals=False))
        try:
            yield worker
        finally:
            worker.drain()
            await work
            app.connection.unbind(portal)


async def all_gone(pids: list[int], patience: float = 3) -> None:
    """Killed they are; the system may need a moment."""
    loop = asyncio.get_running_loop()
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = loop.create_future()
        loop.add_reader(handle, ended.set_result, None)  # readable once the process has ended
        async with asyncio.timeout(patience):  # what nobody kills sleeps for longer
            await ended
        loop.remove_reader(handle)
        os.close(handle)


async def begun(path: Path) -> list[int]:
    """What the task writes into a pipe: opening that waits for it."""
    return [int(pid) for pid in (await asyncio.to_thread(path.read_text)).split()]


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not happened():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


def known(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes of pools, as they are made."""
    made: list[Process] = []

    class Known(Process):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            made.append(self)

    monkeypatch.setattr("millpond.tasks.processes.Process", Known)
    return made


def test_tasks_and_consumers_run_in_processes_with_their_context(tmp_path: Path) -> None:
    async def go() -> None:
        async with working(tmp_path):
            handle = await pool_app.whoami.enqueue_async()
            result = await handle.result()
            assert result["pid"] != os.getpid()
            assert (result["of"], result["state"], result["id"]) == (3, {"step": 2}, handle.id)
            nested = await pool_app.nested.enqueue_async(4)
            assert await nested.result() == [8, nested.correlation_id]
            many = await pool_app.double.map_async(range(100))
            assert [await one.result() for one in many] == [2 * n for n in range(100)]
            [produced] = await pool_app.app.connection.portal.api.produce("orders", ["tea"])
            assert await pool_app.app.handle(produced.id, "orders").on_loop.result() == "TEA"

    run(go)


@pytest.mark.parametrize("task", [pool_app.hang, pool_app.deaf])
def test_a_task_over_its_time_is_ended_with_all_that_it_has_started(
    tmp_path: Path, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.tasks.process.GRACE_S", 0.1)
    os.mkfifo(path := tmp_path / "pids")

    async def go() -> None:
        async with working(tmp_path / "data"):
            handle = await task.options(timeout=1).enqueue_async(str(path))
            pids = await begun(path)
            with pytest.raises(TaskFailed, match="timed out after 1s"):
                await handle.result()
            await all_gone(pids)
            assert await (await pool_app.double.enqueue_async(1)).result() == 2

    run(go)
    assert Path(f"{path}.finally").exists() == (task is pool_app.hang)


def test_a_cancelled_task_is_ended_and_a_crash_fails_only_its_own_job(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pids")

    async def go() -> None:
        async with working(tmp_path / "data", lease_timeout="3s"):
            handle = await pool_app.hang.enqueue_async(str(path))
            pids = await begun(path)
            await handle.cancel()
            with pytest.raises(TaskCancelled):
                await handle.result()
            await all_gone(pids)
            crashed = await pool_app.crash.enqueue_async()
            with pytest.raises(TaskFailed, match="the process of the task died: killed by SIGSEGV"):
                await crashed.result()
            assert await (await pool_app.double.enqueue_async(1)).result() == 2

    run(go)


def test_a_task_can_end_what_it_has_started_by_any_signal(tmp_path: Path) -> None:
    async def go() -> None:
        async with working(tmp_path):
            codes = await (await pool_app.end_others.enqueue_async()).result()
            assert codes == [-signal.SIGINT, -signal.SIGHUP, -signal.SIGTERM, -signal.SIGTERM]

    run(go)


def test_a_process_that_is_killed_takes_with_it_what_it_has_started_and_no_other_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.worker.restarts.PAUSE_MIN_S", 3.0)  # no other takes its place for so long
    os.mkfifo(path := tmp_path / "pids")

    async def go() -> None:
        async with working(tmp_path / "data"):
            crashed = await pool_app.crash_behind.enqueue_async(str(path))
            pids = await begun(path)
            with pytest.raises(TaskFailed, match="the process of the task died: killed by SIGKILL"):
                await crashed.result()
            await all_gone(pids)
            many = await pool_app.double.map_async(range(10))
            assert [await handle.result(timeout=20) for handle in many] == list(range(0, 20, 2))

    run(go)


def test_a_task_ends_with_its_lease_also_where_the_worker_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("process", "processes"):
        monkeypatch.setattr(f"millpond.tasks.{module}.KEEP_S", 0.01)
    monkeypatch.setattr("millpond.worker.keeping.Keeper.look", lambda *_: None)  # as if it were
    os.mkfifo(path := tmp_path / "pids")

    async def go() -> None:
        async with working(tmp_path / "data", lease_timeout="1s"):
            handle = await pool_app.hang.enqueue_async(str(path))
            await all_gone(await begun(path))
            with pytest.raises(TaskFailed):
                await handle.result()
            assert await (await pool_app.double.enqueue_async(1)).result() == 2

    run(go)


def test_crashes_among_jobs_that_are_done_do_not_make_the_pool_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered: list[int] = []

    def no_pause(crashes: Sequence[float], now: float) -> float:
        remembered.append(len(crashes))
        return 0.0

    monkeypatch.setattr("millpond.tasks.processes.pause", no_pause)

    async def go() -> None:
        async with working(tmp_path, slots=1):
            for crashes in (2, 1):
                for _ in range(crashes):
                    with pytest.raises(TaskFailed, match="killed by SIGSEGV"):
                        await (await pool_app.crash.enqueue_async()).result()
                assert await (await pool_app.double.enqueue_async(1)).result() == 2

    run(go)
    assert remembered == [1, 2, 1]


def test_what_a_process_has_told_before_it_died_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the worker writes to it before it reads: what had ended is not run again, nor is it to blame."""
    made = known(monkeypatch)
    monkeypatch.setattr("millpond.tasks.processes.SHORT_S", 60.0)
    monkeypatch.setattr("millpond.tasks.processes.MOMENT_S", 60.0)  # so jobs are sent ahead
    os.mkfifo(path := tmp_path / "runs")

    async def go() -> None:
        async with working(tmp_path / "data", slots=3, processes=1):
            await (await pool_app.double.enqueue_async(1)).result()
            [process] = made
            ended = await pool_app.mark.enqueue_async(str(path))
            crashed = await pool_app.crash.enqueue_async()
            unbegun = await pool_app.double.enqueue_async(2)
            await until(lambda: process.count == 3)
            assert process.pid is not None
            handle = os.pidfd_open(process.pid)
            path.read_text()
            select.select([handle], [], [])  # nothing is read meanwhile
            os.close(handle)
            process._send(Answer(0))  # whatever is written
            await ended.result()
            with pytest.raises(TaskFailed, match="killed by SIGSEGV"):
                await crashed.result()
            assert await unbegun.result() == 4

    run(go)


def test_an_answer_that_comes_when_the_process_has_gone_is_dropped(tmp_path: Path) -> None:
    async def go() -> None:
        process = Process(Hello(PLACE, Where(data=str(tmp_path)), []), lambda *_: None, lambda *_: None)
        await process.start()
        await process.close()
        process._send(Answer(0))

    uvloop.run(go())  # whose transports raise


@pytest.mark.parametrize("slots", [1, 2])
def test_a_process_that_takes_no_job_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """Also where the worker has nothing else to do, and takes the job back again and again."""
    monkeypatch.setattr("millpond.tasks.process.DEAF_S", 1.5)
    monkeypatch.setattr("millpond.tasks.processes.KEEP_S", 0.1)

    async def go() -> None:
        async with working(tmp_path, slots=slots, processes=1):
            pid = await (await pool_app.grow.enqueue_async(0)).result()
            os.kill(pid, signal.SIGSTOP)
            stuck = await pool_app.double.options(max_attempts=1).enqueue_async(2)
            assert await stuck.result(timeout=20) == 4
            await all_gone([pid])

    run(go)


def test_what_waits_behind_a_job_that_is_ended_is_not_begun_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = known(monkeypatch)
    monkeypatch.setattr("millpond.tasks.processes.SHORT_S", 60.0)
    monkeypatch.setattr("millpond.tasks.processes.MOMENT_S", 60.0)  # so jobs are sent ahead
    os.mkfifo(path := tmp_path / "pids")
    runs = tmp_path / "runs"

    async def go() -> None:
        async with working(tmp_path / "data", slots=3, processes=1, lease_timeout="2s"):
            await (await pool_app.double.enqueue_async(1)).result()
            ended = await pool_app.hang.enqueue_async(str(path))
            behind = await pool_app.mark_slowly.enqueue_async(str(runs))
            await begun(path)
            await until(lambda: made[0].count == 2)
            await ended.cancel()
            with pytest.raises(TaskCancelled):
                await ended.result()
            await behind.result()

    run(go)
    assert len(runs.read_text().splitlines()) == 1


def test_a_job_that_a_process_has_not_begun_is_not_what_it_died_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = known(monkeypatch)

    async def go() -> None:
        async with working(tmp_path, slots=1):
            pid = await (await pool_app.grow.enqueue_async(0)).result()
            os.kill(pid, signal.SIGSTOP)
            handle = await pool_app.double.options(max_attempts=1).enqueue_async(2)
            [process] = made
            await until(lambda: process.count == 1)
            os.kill(pid, signal.SIGKILL)
            assert await handle.result() == 4

    run(go)


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")]
)
def test_a_process_for_which_there_is_no_room_at_first_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class NoRoom(Tickets):
        def __init__(self) -> None:
            monkeypatch.undo()
            raise error

    async def go() -> None:
        async with working(tmp_path, slots=1):
            await (await pool_app.double.enqueue_async(1)).result()
            monkeypatch.setattr("millpond.tasks.process.Tickets", NoRoom)
            with pytest.raises(TaskFailed, match="killed by SIGSEGV"):
                await (await pool_app.crash.enqueue_async()).result()
            assert await (await pool_app.double.enqueue_async(2)).result(timeout=20) == 4

    run(go)


def test_the_end_of_a_process_is_told_where_there_is_no_room_for_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def go() -> None:
        os.mkfifo(tmp_path / "pids")
        async with working(tmp_path / "data", slots=1):
            handle = await pool_app.crash_behind.enqueue_async(str(tmp_path / "pids"))
            pids = await begun(tmp_path / "pids")
            monkeypatch.setattr(asyncio, "to_thread", no_room)
            with pytest.raises(TaskFailed, match="killed by SIGKILL"):
                await handle.result(timeout=20)
            monkeypatch.undo()
            await all_gone(pids)

    run(go)


class Scripted:
    """A channel on which these come, one after the other."""

    def __init__(self, *coming: bytes | Exception) -> None:
        self._coming = list(coming)

    def send(self, data: bytes) -> int:
        """To nobody."""
        return len(data)

    def recv(self, limit: int) -> bytes:
        if isinstance(data := self._coming.pop(0), Exception):
            raise data
        return data


def test_a_task_that_gives_up_waiting_for_an_answer_takes_none_from_others() -> None:
    """By an alarm of its own, say: neither the next question nor the next job may suffer."""
    at = datetime.now(UTC)
    ahead = packed(Job(7, "jobs", LeasedFields("a", "lease", b"", "c", 1, 1, 1, at, at)))
    late, own = packed(Answer(1, "late")), packed(Answer(2, 5))
    worker, tickets = socket.socketpair()
    with worker, tickets:
        channel: Any = Scripted(ahead, TimeoutError("alarm"), late, own)
        line = Line(channel, tickets)
        notes = LineNotes(line, None)
        line.begin(notes)
        with pytest.raises(TimeoutError, match="alarm"):
            notes.write({})
        assert notes.max_attempts() == 5
        worker.sendall((7).to_bytes(4, "little"))
        job = line.next_job()
        assert job is not None
        assert job.number == 7


@pytest.mark.parametrize("does", ["raises", "logs"])
def test_a_handler_of_a_signal_that_comes_while_a_frame_is_sent_leaves_it_whole(does: str) -> None:
    theirs, ours = socket.socketpair()
    line = Line(ours, ours)
    frames = [Logged("shop", 30, letter * 500_000, None) for letter in "abc"]
    came: list[Logged] = []

    def read() -> None:
        unpacking = Unpacking()
        with theirs:  # what cannot be read ends it
            while len(came) < len(frames):
                came.extend(map(decode_from_process, unpacking.feed(theirs.recv(READ_BYTES))))

    reader = threading.Thread(target=read, daemon=True)

    def ring(ident: int) -> None:
        while select.select([], [ours], [], 0)[1]:
            """Until there is no room for the rest of the frame."""
        signal.pthread_kill(ident, signal.SIGALRM)

    def handle(*_: object) -> None:
        reader.start()
        if does == "raises":
            raise KeyError(does)
        line.send(frames[1])

    before = signal.signal(signal.SIGALRM, handle)
    with theirs, ours:
        threading.Thread(target=ring, args=(threading.get_ident(),)).start()
        try:
            line.send(frames[0])
        except KeyError:
            line.send(frames[1])
        finally:
            signal.signal(signal.SIGALRM, before)
        line.send(frames[2])
        reader.join(10)
        assert came == frames


def test_a_task_has_no_children_but_its_own(tmp_path: Path) -> None:
    """Nor do those that end without a parent pile up as zombies."""

    async def go() -> None:
        async with working(tmp_path):
            assert await (await pool_app.wait_for_children.enqueue_async()).result() == 1

    run(go)


def test_a_fork_that_comes_back_from_its_task_ends_and_tells_of_no_job(tmp_path: Path) -> None:
    async def go() -> None:
        async with working(tmp_path):
            for how, code in (("return", 0), ("exit", 3), ("raise", 1)):
                forked = await pool_app.come_back.enqueue_async(how)
                doubled = await pool_app.double.map_async(range(10))
                found, told = await forked.result()
                assert (found, told) == (
                    code,
                    "this process was forked by the task; use the context where the task runs",
                )
                assert [await one.result() for one in doubled] == [2 * n for n in range(10)]
            for how, code in (("return", 0), ("raise", 1)):
                assert await (await pool_app.come_back_async.enqueue_async(how)).result() == code

    run(go)


def test_a_thread_that_outlives_its_task_does_not_speak_for_the_next_one(tmp_path: Path) -> None:
    async def go() -> None:
        async with working(tmp_path, slots=1):
            await (await pool_app.talk_on.enqueue_async()).result(timeout=10)
            results = [await (await pool_app.listen.enqueue_async()).result(timeout=10) for _ in range(20)]
            state, [told] = results[-1]
            assert state == {"by": "listen", "n": 49}
            assert told.startswith("the attempt has ended, and its context with it")

    run(go)


def test_what_tasks_have_left_running_ends_with_their_process(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pids")

    async def go() -> None:
        async with working(tmp_path / "data"):
            await pool_app.leave_behind.enqueue_async(str(path))
            pids = await begun(path)
        await all_gone(pids)

    run(go)


def test_what_cannot_be_sent_is_told_and_the_process_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = {
        "error": r"FileNotFoundError: \\udcff",
        "give up": r"\\udcff",
        "note": "noted",
        "state": "the state cannot be sent",
    }

    async def go() -> None:
        async with working(tmp_path):
            for what, error in told.items():
                handle = await pool_app.odd.enqueue_async(what)
                with pytest.raises(TaskFailed, match=error):
                    await handle.result()
                if what == "note":
                    assert (await handle.job()).progress == {"fraction": 0.5, "note": r"\udcff"}

    run(go)
    assert r"\udcff" in [record.getMessage() for record in caplog.records]
    assert "a process of the pool died" not in caplog.text


def test_what_is_logged_in_a_process_goes_through_the_log_of_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def go() -> None:
        async with working(tmp_path):
            with pytest.raises(TaskFailed, match="ValueError: woe"):
                await (await pool_app.complains.enqueue_async("woe")).result()

    run(go)
    assert ("shop", "woe of my own") in [(one.name, one.getMessage()) for one in caplog.records]
    [failed] = [one for one in caplog.records if one.name == "millpond.tasks"]
    assert "Traceback" in str(failed.stack_info)
    assert capfd.readouterr().err == ""


def test_jobs_do_not_wait_behind_one_that_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short jobs are sent ahead, also behind what turns out to be long: they are taken back."""
    monkeypatch.setattr("millpond.tasks.processes.SHORT_S", 1.0)  # whatever the machine is busy with
    monkeypatch.setattr("millpond.worker.crew.HOARD_S", 1000.0)  # the pool itself sees to it

    async def go() -> None:
        async with working(tmp_path):
            await asyncio.gather(*[one.result() for one in await pool_app.double.map_async(range(100))])
            assert await (await pool_app.fan.enqueue_async(60)).result() == sum(2 * n for n in range(60))

    run(go)


def test_a_process_is_replaced_after_so_many_jobs(tmp_path: Path) -> None:
    async def go() -> None:
        async with working(tmp_path, process_jobs_max=2):
            handles = await pool_app.whoami.enqueue_many_async([()] * 6)
            pids = {(await handle.result())["pid"] for handle in handles}
            assert len(pids) >= 3

    run(go)


def test_a_process_that_has_too_much_memory_is_replaced_by_itself(tmp_path: Path) -> None:
    async def go() -> None:
        async with working(tmp_path, process_rss_max=200 << 20) as worker:
            big = {await (await pool_app.grow.enqueue_async(250)).result() for _ in range(3)}
            assert len(big) == 3
            assert not worker.draining
            small = {await (await pool_app.grow.enqueue_async(0)).result() for _ in range(10)}
            assert len(small) <= 2

    run(go)


def test_an_app_that_cannot_be_loaded_is_told_before_any_job_is_taken(tmp_path: Path) -> None:
    async def go() -> None:
        async with millpond.open_async(tmp_path) as pond:
            for place in ("tests.tasks.pool_app:nothing", "no_such_module"):
                pools = executors(pool_app.app, pond, slots=1, pool="processes", place=place)
                with pytest.raises(InvalidRequest, match=r"the app cannot be loaded: (there is no )?module"):
                    await Worker(pond, pools, services=False).run(signals=False)

    run(go)


WORKER = """
import asyncio, sys
from pathlib import Path
from tests.tasks import pool_app
from tests.tasks.test_processes import working

async def main():
    async with working(Path(sys.argv[1]) / "data", lease_timeout="2s"):
        await (await pool_app.fork.enqueue_async()).result()
        await pool_app.hang.enqueue_async(str(Path(sys.argv[1]) / "pids"))
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_watcher_waits_where_the_system_has_no_handles_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    watched = subprocess.Popen(["sleep", "1000"])
    (life, said), (children, _) = pipes = os.pipe(), os.pipe()
    os.write(said, DEADLINE.pack(0.0))
    watcher = Watcher(watched.pid, children)
    watcher.wait(life, os.getpid())
    assert select.select([life], [], [], 0)[0] == []  # it has heard, and not just gone
    assert watcher.status is None
    watched.kill()
    watched.wait()
    for file in (*pipes[0], *pipes[1]):
        os.close(file)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_nothing_outlives_a_worker_that_is_killed_or_the_lease_of_one_that_is_stopped(
    tmp_path: Path, number: signal.Signals
) -> None:
    """However soon after the task has begun."""
    os.mkfifo(tmp_path / "pids")
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], start_new_session=True)
    try:

        async def go() -> None:
            pids = await begun(tmp_path / "pids")
            worker.send_signal(number)
            await all_gone(pids, patience=10)

        run(go)
    finally:
        os.killpg(worker.pid, signal.SIGKILL)  # what a task of it has forked, too: that is nobody's to end
        worker.wait()


def test_what_outlives_worker_and_watcher_that_are_killed_at_once_is_ended_by_the_next_worker(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pids")
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], start_new_session=True)

    async def go() -> None:
        task, away = await begun(tmp_path / "pids")
        watcher = processes()[task].parent
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (watcher, worker.pid):
                os.kill(pid, number)
        await all_gone([watcher, worker.pid, task])
        try:
            os.kill(away, 0)
            async with working(tmp_path / "next", slots=1):
                await all_gone([away])
        finally:
            with suppress(ProcessLookupError):
                os.kill(away, signal.SIGKILL)

    try:
        run(go)
    finally:
        os.killpg(worker.pid, signal.SIGKILL)  # what a task of it has forked, too
        worker.wait()
