"""What a process of a pool does: jobs in, outcomes out."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

import msgspec

from millpond.errors import InvalidRequest, LeaseLost, MillpondError, made
from millpond.model import LeasedItem
from millpond.tasks.app import App
from millpond.tasks.calling import INTERRUPTED, log, perform, spec_of, told
from millpond.tasks.context import Context
from millpond.tasks.errors import Interrupted
from millpond.tasks.frames import (
    READ_BYTES,
    Answer,
    Broken,
    Ended,
    FromProcess,
    Hello,
    Job,
    Limit,
    Logged,
    Progress,
    Ready,
    Unpacking,
    Write,
    decode_to_process,
    packed,
)
from millpond.tasks.loading import load_app
from millpond.tasks.text import sendable
from millpond.tasks.tickets import read_ticket
from millpond.worker.executors import Outcome
from millpond.worker.signals import DEFAULTS, let_go_in_forks

TEXT_CHARS_MAX: Final = 8_192  # of a line in the log: more is cut there anyway
TRACE_CHARS_MAX: Final = 65_536  # its end is where the error is


class Line:
    """The sockets to the worker. What a task asks is answered before the next job is looked at."""

    def __init__(self, channel: socket.socket, tickets: socket.socket) -> None:
        self._channel = channel
        self._tickets = tickets
        self._unpacking = Unpacking()
        self._answers: deque[Answer] = deque()
        self._others: deque[Hello | Job] = deque()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()  # frames, and how many bytes of each were sent at a time
        self._sending = False
        self._asked = 0
        self._speaker: LineNotes | None = None  # of the job in hand
        self._one = threading.RLock()  # a task may have threads of its own; and what is collected meanwhile may log

    def send(self, frame: FromProcess) -> None:
        with self._one:
            self._put(frame)

    def _put(self, frame: FromProcess) -> None:
        """A task's own handler of a signal may raise here, or log: the rest of a frame goes before the next one. No
        handler runs between a send and the note of how much it sent, since there is no Python between the two.
        """
        self._unsent.append((packed(frame), []))
        if self._sending:  # by who was interrupted, and goes on
            return
        try:
            self._sending = True
            while self._unsent:
                data, sent = self._unsent[0]
                if (done := sum(sent)) < len(data):
                    sent.extend(map(self._channel.send, (memoryview(data)[done:],)))
                else:
                    self._unsent.popleft()
        finally:
            self._sending = False

    def begin(self, notes: LineNotes) -> None:
        self._speaker = notes

    def end(self, outcome: Outcome) -> None:
        """From here on nobody speaks for the job: a thread that it has left would speak for the next one."""
        with self._one:
            self._speaker = None
            self._put(Ended(outcome))

    def tell(self, notes: LineNotes, frame: FromProcess) -> None:
        """For the job in hand. What comes when it has ended is of no interest any more."""
        with self._one:
            if self._speaker is notes:
                self._put(frame)

    def hello(self) -> Hello | None:
        """None: the worker has closed it."""
        while not self._others:
            if not self._receive():
                return None
        first = self._others.popleft()
        return first if isinstance(first, Hello) else None

    def next_job(self) -> Job | None:
        """Those before it were taken back. None: there will be no more."""
        number = read_ticket(self._tickets)
        while number is not None:
            while self._others:
                job = self._others.popleft()
                if isinstance(job, Job) and job.number == number:
                    return job
            if not self._receive():
                return None
        return None

    def ask(self, notes: LineNotes, frame: Write | Limit) -> Answer:
        """For the job in hand. Whatever a task's own handler of a signal raises here, the next one hears its answer."""
        with self._one:
            if self._speaker is not notes:
                raise LeaseLost("the attempt has ended, and its context with it; wait for threads before you return")
            self._asked += 1
            frame.number = self._asked
            self._put(frame)
            found = self._answer_to(frame.number)
        if found.code is not None:
            raise made(found.code, found.error)
        return found

    def _answer_to(self, number: int) -> Answer:
        while True:
            while self._answers:
                answer = self._answers.popleft()
                if answer.number == number:  # else to one that has stopped waiting
                    return answer
            if not self._receive():
                raise Interrupted

    def _receive(self) -> bool:
        """False: the worker has closed it."""
        data = self._channel.recv(READ_BYTES)
        for body in self._unpacking.feed(data):
            frame = decode_to_process(body)
            if isinstance(frame, Answer):
                self._answers.append(frame)
            else:
                self._others.append(frame)
        return bool(data)


class Forwards(logging.Handler):
    """What is logged in this process is logged by the worker, in the form that it has: stderr is shared by all."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._pid:  # a process that a task has forked: the line is not its own
            return
        try:
            trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else record.stack_info
            kept = None if trace is None else sendable(trace)[-TRACE_CHARS_MAX:]
            text = sendable(record.getMessage())[:TEXT_CHARS_MAX]
            self._line.send(Logged(record.name, record.levelno, text, kept))
        except Exception:  # nobody hears it, or its arguments do not fit: no reason to stop the task
            pass


class LineNotes:
    """The state document, by way of the worker."""

    def __init__(self, line: Line, doc: Any) -> None:
        self.doc = doc
        self.cancelled = False
        self._line = line

    def progress(self, progress: dict[str, Any]) -> None:
        self._line.tell(self, Progress(progress))

    def write(self, state: Mapping[str, Any]) -> None:
        answer = self._line.ask(self, Write(0, _sendable(state)))
        self.doc = dict(state)
        self.cancelled = self.cancelled or answer.cancelled

    async def write_async(self, state: Mapping[str, Any]) -> None:
        self.write(state)

    def max_attempts(self) -> int | None:
        found: int | None = self._line.ask(self, Limit(0)).value
        return found


class Work:
    """SIGTERM interrupts a task, and nothing else: between tasks there is nobody to interrupt.

    SIGINT and SIGHUP are a terminal's, where the worker decides. They are taken, not ignored, and left alone in forks:
    what a task starts has signals as any other program.
    """

    def __init__(self, channel: socket.socket, tickets: socket.socket) -> None:
        self._line = Line(channel, tickets)
        self._in_task = False
        self._handlers = {signal.SIGTERM: self._terminated, signal.SIGINT: self._heard, signal.SIGHUP: self._heard}
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        let_go_in_forks(self._handlers, self._let_go)

    def run(self) -> None:
        hello = self._line.hello()
        if hello is None:
            return
        logging.basicConfig(handlers=[Forwards(self._line)], level=hello.level)
        try:
            app = _load(hello)
        except MillpondError as error:
            self._line.send(Broken(error.message))
            return
        except BaseException as error:
            log.error("the app cannot be loaded", exc_info=error)
            self._line.send(Broken(told(error)))
            return
        self._line.send(Ready(os.getpid()))
        while (job := self._line.next_job()) is not None:
            self._line.end(self._perform(app, job))
        app.close()

    def _perform(self, app: App, job: Job) -> Outcome:
        """An interruption that comes when the task has just ended finds our own code, and changes nothing."""
        outcome: Outcome | None = None
        try:
            fields = job.fields
            item = LeasedItem(fields.payload, 0, None, fields)
            spec = spec_of(item)
            notes = LineNotes(self._line, fields.state_doc)
            context = Context(item, job.queue, None if spec is None else spec.task, notes)
            self._line.begin(notes)
            self._in_task = True
            outcome = perform(app, context, spec)
            self._in_task = False
        except Interrupted:
            self._in_task = False
        return outcome or INTERRUPTED

    def _let_go(self) -> None:
        """In a fork: of those that the task has not taken itself."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, DEFAULTS.get(number, signal.SIG_DFL))

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """And nothing is done."""

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if self._in_task:
            self._in_task = False  # once
            raise Interrupted


def _sendable(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is no JSON is the task's mistake: the worker must be able to read what it is sent."""
    sent = dict(state)
    try:
        msgspec.json.encode(sent)
        msgspec.msgpack.encode(sent)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the state cannot be sent ({error}); use JSON values or bytes") from None
    return sent


def _load(hello: Hello) -> App:
    sys.path.extend(entry for entry in hello.path if entry not in sys.path)
    app = load_app(hello.place)
    app.connection.where = hello.where
    return app
