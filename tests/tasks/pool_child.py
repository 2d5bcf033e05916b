"""A simulated process of a pool: what `millpond.tasks.child` does, step by step, on the other ends of real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.tasks import frames
from millpond.tasks.calling import INTERRUPTED
from millpond.tasks.tickets import TICKET_BYTES
from millpond.worker.executors import Outcome, Running

if TYPE_CHECKING:
    from tests.tasks.pool_world import World

FIRST_PID = 1 << 30  # no process has such a number


class Died(Exception):
    """Of itself."""


class Run(msgspec.Struct, eq=False):
    """Of a job, in a process, from its ticket on."""

    child: Child
    said: Outcome | None = None
    told: bool = False  # to the last byte
    hit: bool = False  # by an interruption


class Plan(msgspec.Struct, eq=False):
    """What a job does where it runs, and what became of it."""

    job: Running
    seconds: float = 0.0
    fate: str = "ok"  # or "fail", "crash"
    stubborn: bool = False  # when it is interrupted
    asks: bool = False  # the worker, meanwhile
    runs: list[Run] = []
    unwanted: bool = False  # its end was asked for before it had begun

    def broken(self) -> str | None:
        """Which promise."""
        outcome, error = self.job.outcome, (self.job.outcome and self.job.outcome.error) or ""
        if outcome is None:
            return "has no outcome"
        for run in self.runs[:-1]:
            if not run.hit and (run.told or not run.child.killed):
                return "had ended, and ran again" if run.told else "crashed, and ran again"
        if not self.runs:
            return f"had not begun, but: {outcome}" if outcome.ok or "died" in error or "timed" in error else None
        if self.unwanted:
            return "began when nobody wanted it any more"
        last = self.runs[-1]
        if last.told and last.said and (last.said.ok or not last.hit) and last.said != outcome:
            may_differ = not last.said.ok and ("timed" in error or self.job.ending == "stopping")
            return None if may_differ else f"said {last.said}, but {outcome} is told"
        if "died" in error and last.child.killed and self.job.ending is None:
            return "is to blame for the end of a process that was not ended for it"
        return None


class Child:
    """Stands in for an `asyncio.subprocess.Process` too."""

    def __init__(self, world: World, fds: Iterable[int]) -> None:
        self.world = world
        self.pid = FIRST_PID + len(world.children)
        self.returncode: int | None = None
        self.killed = False  # by the pool
        self.leftover: socket.socket | None = None  # what it has started has its channel too
        channel, self._life, tickets = map(os.dup, fds)
        self._channel, self._tickets = socket.socket(fileno=channel), socket.socket(fileno=tickets)
        self._unpacking = frames.Unpacking()
        self._heard: list[Any] = []
        self._awake, self._interrupted = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._signalled = self._in_task = False
        self._run: Run | None = None
        self._next: tuple[Plan, Run] | None = None
        self._code = 0
        self._exited: asyncio.Future[int] = world.loop.create_future()
        self._task = world.loop.create_task(self._live())

    # ---- what is done to it -----------------------------------------------------------------------------------

    @property
    def lives(self) -> bool:
        return not self._task.done()

    async def wait(self) -> int:
        self.returncode = await self._exited
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        self._hurry()
        self._signalled = True
        if self._awake.is_set():
            self._interrupt()

    def end_tree(self) -> None:
        self._hurry()
        self.killed = self.killed or self.lives
        self.kill()

    def kill(self) -> None:
        if self.lives:
            self._code = -signal.SIGKILL
            self._task.cancel()

    def stop(self) -> None:
        self._awake.clear()

    def resume(self) -> None:
        self._awake.set()
        self._interrupt()

    def _interrupt(self) -> None:
        if self._signalled and self._in_task and self._run is not None:
            self._in_task, self._run.hit = False, True
            self._interrupted.set()
        self._signalled = False

    def _hurry(self) -> None:
        """It may well begin another job just before it is ended."""
        if self.world.has_trouble("wakes up"):
            self.resume()
        if self.lives and self._awake.is_set() and self.world.has_trouble("hurries", times=5):
            self._take_ticket()

    # ---- what it does -----------------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            await self._hear(frames.Hello)
            await self._pause()
            if self.world.has_trouble("does not load"):
                await self._say(frames.Broken("woe"))
                await self._linger()
                raise Died
            if self.world.has_trouble("takes long to load"):
                await asyncio.sleep(90)
            await self._say(frames.Ready(self.pid))
            if self.world.has_trouble("dies at once"):
                raise Died
            while (found := await self._next_job()) is not None:
                await self._perform(*found)
            await self._linger()
        except asyncio.CancelledError:
            pass
        except (Died, OSError):
            self._code = 1
        finally:
            self._close()

    async def _linger(self) -> None:
        """For a thread that is left, say."""
        if self.world.has_trouble("lingers"):
            await asyncio.Event().wait()

    def _close(self) -> None:
        if self.world.has_trouble("leaves something behind"):
            self.leftover = self._channel.dup()
        self._channel.close()
        self._tickets.close()
        os.close(self._life)
        self.world.loop.call_later(self.world.rng.random() * 0.01, self._exited.set_result, self._code)

    async def _pause(self) -> None:
        await self.world.moment()
        await self._awake.wait()

    async def _readable(self, one: socket.socket) -> None:
        ready = asyncio.Event()
        self.world.childrens.add(one.fileno())
        self.world.loop.add_reader(one, ready.set)
        try:
            await ready.wait()
        finally:
            self.world.loop.remove_reader(one)
            self.world.childrens.remove(one.fileno())
        await self._awake.wait()

    async def _hear(self, kind: type) -> None:
        while not (found := [frame for frame in self._heard if isinstance(frame, kind)]):
            await self._readable(self._channel)
            if not self._read():
                raise Died
        self._heard.remove(found[0])

    def _read(self) -> bool:
        """Whether there may be more to come."""
        try:
            while data := self._channel.recv(frames.READ_BYTES, socket.MSG_DONTWAIT):
                self._heard += [frames.decode_to_process(body) for body in self._unpacking.feed(data)]
        except BlockingIOError:
            return True
        return False

    async def _next_job(self) -> tuple[Plan, Run] | None:
        more = True
        while self._next is None and more:
            await self._readable(self._tickets)
            more = self._take_ticket()
        found, self._next = self._next, None
        return found

    def _take_ticket(self) -> bool:
        """Whether there may be more to come. With its ticket a job has begun."""
        if self._run is not None or self._next is not None:
            return True
        try:
            data = self._tickets.recv(TICKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        self._read()
        number = int.from_bytes(data, "little")
        for job in [frame for frame in self._heard if isinstance(frame, frames.Job) and frame.number <= number]:
            self._heard.remove(job)
            if job.number == number:
                self._next = self.world.begin(job.fields.id, self)
        self.world.expect(not data or self._next, "a process was sent more than its socket holds")
        return bool(data)

    async def _perform(self, plan: Plan, run: Run) -> None:
        self._run = run
        self._interrupted.clear()
        self._in_task = True
        if plan.asks:
            await self._say(frames.Progress({"fraction": 0.5}))
            await self._say(frames.Write(1, {}))
            await self._hear(frames.Answer)
        try:
            async with asyncio.timeout(plan.seconds):
                await self._interrupted.wait()
                if plan.stubborn:
                    await asyncio.Event().wait()
        except TimeoutError:
            pass
        await self._awake.wait()
        self._in_task = False
        if run.hit and not plan.stubborn:
            run.said = INTERRUPTED
        elif plan.fate == "crash":
            raise Died
        else:
            ok = plan.fate == "ok"
            run.said = Outcome(ok=ok, result=plan.job.item.id if ok else None, error=None if ok else "woe")
        await self._say(frames.Ended(run.said), run)

    async def _say(self, frame: frames.FromProcess, run: Run | None = None) -> None:
        """In pieces, perhaps."""
        data = frames.packed(frame)
        while data:
            cut = self.world.rng.choice((len(data), self.world.rng.randint(1, len(data))))
            self._channel.send(data[:cut])
            data = data[cut:]
            if run is not None and not data:
                run.told, self._run = True, None
            await self._pause()
