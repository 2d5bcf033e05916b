"""One process of a pool, as the worker sees it: what it has in hand, and how it is ended."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

from msgspec.structs import replace

from millpond.errors import InvalidRequest, MillpondError
from millpond.tasks.calling import log
from millpond.tasks.child import DEADLINE
from millpond.tasks.ending import end_tree
from millpond.tasks.entries import Entry
from millpond.tasks.frames import (
    READ_BYTES,
    Answer,
    Broken,
    Ended,
    Hello,
    Job,
    Limit,
    Logged,
    Progress,
    Ready,
    Unpacking,
    Write,
    decode_from_process,
    packed,
)
from millpond.tasks.notes import ItemNotes
from millpond.tasks.tickets import Tickets
from millpond.worker.aside import aside
from millpond.worker.executors import Outcome
from millpond.worker.supervision import LEFTOVER_PATIENCE
from millpond.worker.tree import RUN, Environment, end_leftovers, signal_group, supervisor_name

GRACE_S: Final = 5.0  # for a task to end once it was interrupted; then it is killed
LOAD_S: Final = 60.0  # to import the app: it may be large
CLOSE_S: Final = 5.0  # for a process that has nothing to do to end
KEEP_S: Final = 1.0  # between two looks at how long jobs may run; among short ones only what takes so long is watched
DEAF_S: Final = 5.0  # a process that has nothing to do and takes no job for so long is stopped, or stuck

OnEnded = Callable[["Process", Entry, Outcome, float], None]
OnGone = Callable[["Process", str, Sequence[Entry], Sequence[Entry]], None]


class Process(asyncio.Protocol):
    """`ended` is called with each job; `gone` once when the process has ended, with what it died of, if it was one of
    its jobs, and with those that are to begin anew.
    """

    def __init__(self, hello: Hello, ended: OnEnded, gone: OnGone) -> None:
        self._hello = hello
        self._on_ended = ended
        self._on_gone = gone
        self._entries: deque[Entry] = deque()
        self._tickets = Tickets()
        self._unpacking = Unpacking()
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._channel = -1  # for what is left to be read once the transport has ended
        self._process: asyncio.subprocess.Process | None = None  # its watcher
        self._watch: asyncio.Task[None] | None = None
        self._life = -1
        self._kept = False  # the watcher was told how long the job in hand may run
        self._name = f"{supervisor_name()}-{secrets.randbits(64)}"  # in the environment of all that it starts
        self._kill: asyncio.TimerHandle | None = None
        self._began_at = 0.0
        self._unheard_since: float | None = None  # while it has jobs
        self._deaf = False  # and killed for it: what it begins just then is not to blame
        self._closing = False
        self._answers: set[asyncio.Task[None]] = set()
        self._again: list[Entry] = []
        self.ended: Entry | None = None  # the job that it was ended for
        self.pid: int | None = None  # once it has loaded the app
        self.served = 0
        self.looked_at = 0.0  # at its memory
        self.spent = False  # it has used all that it may
        self.silent = False  # it has begun none of its jobs, which were taken back, and was not heard since
        self.wanted_to_end = False
        self.gone: str | None = None  # how, once it has

    @property
    def ready(self) -> bool:
        if self.gone is not None or self._lost.done():  # what it has started may hold the other end of its channel
            return False
        return self._loaded.done() and not self.wanted_to_end and not self._closing

    @property
    def count(self) -> int:
        """Jobs in hand."""
        return len(self._entries)

    @property
    def seconds(self) -> float:
        """For how long it has been at the one in hand."""
        return self._loop.time() - self._began_at if self._entries else 0.0

    # ---- life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when it has loaded the app; InvalidRequest if it cannot. `close` it in either case."""
        channel = await self._spawn()
        await self._loop.create_connection(lambda: self, sock=channel)
        self._send(replace(self._hello, path=sys.path, level=logging.getLogger().getEffectiveLevel()))
        try:
            async with asyncio.timeout(LOAD_S):
                await asyncio.shield(self._loaded)
        except TimeoutError:
            raise InvalidRequest(f"{self._hello.place} was not loaded within {LOAD_S:g} s; mend it") from None

    async def _spawn(self) -> socket.socket:
        """Our end of the channel. The pipe of its life has its other end here: it ends with this process."""
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()
        os.set_blocking(self._life, False)
        passed = (theirs.fileno(), life, self._tickets.theirs)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "millpond.tasks.child", *map(str, passed), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, RUN.decode(): self._name},
                pass_fds=passed,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(self._life)
            raise
        finally:
            theirs.close()
            os.close(life)
        self._watch = self._loop.create_task(self._wait(self._process))
        return ours

    async def close(self) -> None:
        """One that has nothing to do ends by itself; what does not is killed."""
        self._closing = self.wanted_to_end = True
        if self._transport is not None and not self._entries and self._loaded.done():
            self._transport.close()
        else:
            self._end_now()
        self._tickets.close()
        if self._watch is not None and self.gone is None:
            self._end_within(CLOSE_S)
            await asyncio.shield(self._watch)  # who waits may be cancelled; its end is still seen to

    def retire(self) -> None:
        """After its last job: another is to take its place."""
        self.wanted_to_end = True
        self._tickets.close()
        if self._transport is not None:
            self._transport.close()

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        signal_group(process.pid, signal.SIGKILL)
        await aside(end_leftovers, self._has_started, LEFTOVER_PATIENCE)  # what has left its group
        if self._transport is not None:
            await asyncio.wait([self._lost], timeout=CLOSE_S)  # what it said last
            self._transport.abort()  # somebody may hold the other end
            await self._lost
        unbegun = self.take_back()
        os.close(self._life)
        self._tickets.close()
        if self._kill is not None:
            self._kill.cancel()
        self.gone = how = _in_words(code)
        if not self._loaded.done():
            self._cannot_load(f"the process ended before it had loaded the app: {how}")
        begun, self._entries = [*self._entries], deque()
        for entry in begun:
            _let_go(entry)
        of = begun[:1] if self.ended in (None, *begun[:1]) and not self._deaf else []
        self._on_gone(self, how, of, [*self._again, *begun[len(of) :], *unbegun])

    def _cannot_load(self, why: str) -> None:
        self._loaded.set_exception(InvalidRequest(why))
        self._loaded.exception()  # who started it may have given up

    def keep(self, after: float = KEEP_S) -> None:
        """Tells the watcher how long the job in hand may run: until its lease is over, if nobody extends it. Not in its
        first seconds, so many as `after`, if it was not told before.

        A process that begins none of its jobs is of no use: another is to have them.
        """
        if self._is_deaf():
            log.warning("a process of the pool takes no jobs, and is killed: %s", self.pid)
            self._deaf = True
            self._end_now()
        elif self._entries and self.gone is None and (self._kept or self.seconds >= after):
            self._kept = True
            _say(self._life, self._entries[0].job.deadline)

    def _keep_no_more(self) -> None:
        """What the watcher was told of is not in hand any more."""
        if self._kept:
            self._kept = False
            _say(self._life, math.inf)

    def _is_deaf(self) -> bool:
        since = self._unheard_since
        if since is None or self.wanted_to_end or not self._entries or self._loop.time() - since < DEAF_S:
            return False
        return self._has_begun_none()

    def _has_begun_none(self) -> bool:
        return self._tickets.unused() >= len(self._entries)

    def _has_started(self, pid: int, environment: Environment) -> bool:
        return environment[RUN] == self._name.encode()

    # ---- jobs -------------------------------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        entry.running = self
        entry.begun = True
        self._entries.append(entry)
        if self._unheard_since is None:
            self._unheard_since = self._loop.time()
        self._send(Job(self._tickets.give(), entry.job.queue, entry.job.item.fields))
        if len(self._entries) == 1:
            self._begin(entry)

    def take_back(self) -> list[Entry]:
        """What it was sent and has not begun: it never will."""
        taken = [self._entries.pop() for _ in range(self._tickets.take_back())]
        for entry in taken:
            _let_go(entry)
        if taken and not self._entries:
            self.silent = True
            self._keep_no_more()
        return taken[::-1]

    def _begin(self, entry: Entry) -> None:
        """It is the one in hand now."""
        self._began_at = entry.job.started_at = self._loop.time()
        if entry.timeout is not None:
            entry.timer = self._loop.call_later(entry.timeout, self._time_out, entry)
        if entry.job.ending is not None:
            self.end(entry, at_once=entry.job.ending == "lease_lost")

    def _time_out(self, entry: Entry) -> None:
        """Its time is still to come if it has not begun."""
        if self._has_begun_none():
            entry.timer = self._loop.call_later(entry.timeout or 0, self._time_out, entry)
        else:
            entry.timed_out = True
            self.end(entry, at_once=False)

    def end(self, entry: Entry, *, at_once: bool) -> None:
        """The job in hand, and with it the process. One that has begun behind it is ended when that is heard."""
        if not self._entries or self._entries[0] is not entry or self._process is None:
            return
        self.wanted_to_end = True
        self.ended = entry
        self._again += self.take_back()  # it would begin them, and be ended in their midst
        if at_once:
            self._end_now()
        elif self._kill is None:
            _interrupt(self._process)
            self._end_within(GRACE_S)

    def _end_within(self, seconds: float) -> None:
        if self._kill is None:
            self._kill = self._loop.call_later(seconds, self._end_now)

    def _end_now(self) -> None:
        self.wanted_to_end = True
        if self._process is not None and self._process.returncode is None:
            end_tree(self._process.pid)

    # ---- what it says -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._channel = os.dup(transport.get_extra_info("socket").fileno())

    def connection_lost(self, error: Exception | None) -> None:
        """To write to a process that has gone ends the transport, with all that was not read yet.

        A process without it is of no use, and a thread that a task has left may keep it for ever.
        """
        self._lost.set_result(None)
        with socket.socket(fileno=self._channel) as channel:
            for data in _unread(channel):
                self.data_received(data)
        self._end_within(CLOSE_S)

    def data_received(self, data: bytes) -> None:
        self.silent = False
        for body in self._unpacking.feed(data):
            self._said(decode_from_process(body))
        self._unheard_since = self._loop.time() if self._entries else None

    def _said(self, frame: Any) -> None:
        if isinstance(frame, Ended):
            self._job_ended(frame.outcome)
        elif isinstance(frame, Logged):
            _log(frame)
        elif isinstance(frame, Ready):
            self.pid = frame.pid
            self._loaded.set_result(None)
        elif isinstance(frame, Broken):
            self._cannot_load(f"the app cannot be loaded: {frame.error}")
        elif self._entries and isinstance(frame, Progress):
            self._entries[0].notes.progress(frame.progress)
        elif self._entries:
            task = self._loop.create_task(self._answer(self._entries[0].notes, frame))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    def _job_ended(self, outcome: Outcome) -> None:
        entry = self._entries.popleft()
        self.served += 1
        self._keep_no_more()
        if self.ended not in (None, entry) and not outcome.ok:  # the end of the one before has hit this one
            self._again.append(entry)
            return
        now = self._loop.time()
        seconds, self._began_at = now - self._began_at, now
        if self.wanted_to_end and self._kill is not None:
            self._end_now()  # with what the task has started
        if self._entries and not self.wanted_to_end:
            self._begin(self._entries[0])
        self._on_ended(self, entry, outcome, seconds)

    async def _answer(self, notes: ItemNotes, frame: Write | Limit) -> None:
        try:
            if isinstance(frame, Write):
                await notes.write_async(frame.state)
                answer = Answer(frame.number, cancelled=notes.cancelled)
            else:
                answer = Answer(frame.number, await notes.max_attempts_async())
        except MillpondError as error:
            answer = Answer(frame.number, code=error.code, error=error.message)
        self._send(answer)

    def _send(self, frame: Hello | Job | Answer) -> None:
        """An answer may come when it has gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed(frame))


def _let_go(entry: Entry) -> None:
    """It is not one of a process any more."""
    entry.running, entry.begun = None, False
    if entry.timer is not None:
        entry.timer.cancel()
        entry.timer = None


def _unread(channel: socket.socket) -> Iterator[bytes]:
    try:
        while data := channel.recv(READ_BYTES, socket.MSG_DONTWAIT):
            yield data
    except OSError:  # no more, or it died before it had read all that it was sent
        pass


def _say(life: int, deadline: float) -> None:
    try:
        os.write(life, DEADLINE.pack(deadline))
    except OSError:  # it has gone, or is stuck
        pass


def _log(said: Logged) -> None:
    """As if it had been said here."""
    logger = logging.getLogger(said.name)
    if logger.isEnabledFor(said.level):
        logger.handle(logger.makeRecord(said.name, said.level, "", 0, said.text, (), None, sinfo=said.trace))


def _interrupt(process: asyncio.subprocess.Process) -> None:
    try:
        process.send_signal(signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has gone, and that is told


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
