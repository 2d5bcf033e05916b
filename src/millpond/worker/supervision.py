"""One supervisor: runs the commands that its worker sends, one at a time, and keeps their time.

A command has ended when nothing of its tree is left. What its main process leaves behind is ended too: SIGTERM, some
seconds, SIGKILL, and again until the system says that there are no children any more.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Final

from millpond.worker import tree
from millpond.worker.capture import Capture
from millpond.worker.frames import Frames, packed, receive
from millpond.worker.orders import LEASE_OVER, NO_ROOM, TIMED_OUT, WARDEN_GONE, WORKER_GONE, Order, Report
from millpond.worker.spawning import Spawner

READ_BYTES: Final = 64 << 10  # as much as a pipe holds
READS_MAX: Final = 16  # at a time: a command that never stops printing must still be ended in time
DRAIN_READS_MAX: Final = 64  # after the end: a process outside of the tree may hold the pipe and go on
KILL_PAUSE: Final = 0.005  # seconds between two looks at what SIGKILL has left, doubled up to the next
KILL_PAUSE_MAX: Final = 0.5
GROUP_PAUSE: Final = 0.02  # seconds between looks at a process group, where nobody tells of its end
REFUSED_PATIENCE: Final = 5.0  # seconds after which processes that may not be killed are left
LEFTOVER_PATIENCE: Final = 5.0  # seconds in which processes of an earlier delivery must be gone
FOREVER: Final = float("inf")
NO_ROOM_ERRORS: Final = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class Run:
    """A command that runs. Once it is `ending`, all that is left of it is killed from `kill_at` on."""

    def __init__(self, order: Order, pid: int, output: int, now: float) -> None:
        self.number = order.number
        self.pid = pid
        self.output = output
        self.capture = Capture(order.folder, order.attempt, order.head_bytes)
        self.started_at = now
        self.timeout_at = FOREVER if order.timeout is None else now + order.timeout
        self.grace = order.grace
        self.status: int | None = None
        self.why: str | None = None
        self.ending = False
        self.kill_at = FOREVER
        self.killed_at = FOREVER  # for the first time
        self.pause = KILL_PAUSE
        self.extend(order.deadline, now)

    def extend(self, deadline: float, now: float) -> None:
        """It is asked to end so long before the deadline that it can be gone by then; extensions come at half time."""
        self.deadline = deadline
        self.soft_at = deadline - min(self.grace, (deadline - now) / 4)

    def next_at(self) -> float:
        if not self.ending:
            return min(self.timeout_at, self.soft_at)
        return self.kill_at if tree.LINUX else min(self.kill_at, time.monotonic() + GROUP_PAUSE)


class Supervisor:
    """`worker` and `warden` are files that become readable when those have died."""

    def __init__(self, channel: socket.socket, worker: int, warden: int) -> None:
        tree.adopt_orphans()
        self._sees_tree = tree.started(os.getpid()) > 0  # not on macOS, nor where /proc is not mounted
        self._channel = channel
        self._frames = Frames()
        self._spawner = Spawner()
        self._run: Run | None = None
        self._going = False  # no more orders: it goes when nothing runs
        self._children = wake_on_children()
        self._handlers: dict[int, Callable[[], None]] = {channel.fileno(): self._hear, self._children: self._reap}
        self._handlers[warden] = lambda: self._leave(WARDEN_GONE)
        if worker >= 0:
            self._handlers[worker] = lambda: self._leave(WORKER_GONE)
        self._poll = select.poll()
        for file in self._handlers:
            self._poll.register(file, select.POLLIN)

    def serve(self) -> None:
        """Until the worker has gone."""
        while self._run is not None or not self._going:
            for file, _ in self._poll.poll(self._patience()):
                if (handler := self._handlers.get(file)) is not None:  # an earlier one may have closed it
                    handler()
            if self._run is not None:
                self._keep_time(self._run, time.monotonic())

    def _patience(self) -> float | None:
        """Milliseconds, or for ever."""
        if self._run is None or (until := self._run.next_at()) == FOREVER:
            return None
        return max(0.0, until - time.monotonic()) * 1_000 + 1

    # ---- what it hears and tells --------------------------------------------------------------------------

    def _hear(self) -> None:
        data = receive(self._channel)
        if data is None:
            return self._leave(WORKER_GONE)
        for what, number, *rest in self._frames.feed(data):
            if what == "run":
                self._start(Order(number, *rest))
            elif self._run is not None and self._run.number == number:  # else it was over before this came
                if what == "extend":
                    self._run.extend(rest[0], time.monotonic())
                else:
                    self._end(self._run, *rest)

    def _leave(self, why: str) -> None:
        self._going = True
        kept = {self._children} if self._run is None else {self._children, self._run.output}
        for file in self._handlers.keys() - kept:
            self._poll.unregister(file)
            del self._handlers[file]
        if self._run is not None:
            self._end(self._run, why, self._run.grace)

    def _tell(self, report: Report) -> None:
        try:
            self._channel.sendall(packed(tuple(report)))
        except OSError:  # the worker has gone, and nobody waits for it
            self._going = True

    # ---- a command begins and prints ----------------------------------------------------------------------

    def _start(self, order: Order) -> None:
        if order.names is not None and (left := tree.end_leftovers(tree.of_item(*order.names), LEFTOVER_PATIENCE)):
            problem = f"processes of an earlier attempt could not be ended ({', '.join(map(str, left))})"
            return self._tell(Report(order.number, problem=problem))
        now = time.monotonic()
        if now >= order.deadline or self._going:
            return self._tell(Report(order.number, why=LEASE_OVER))
        try:
            pid, output = self._spawner.spawn(order)
        except (OSError, ValueError) as error:
            why = NO_ROOM if isinstance(error, OSError) and error.errno in NO_ROOM_ERRORS else None
            problem = f"the command could not be started: {_text(error)}"
            return self._tell(Report(order.number, problem=problem, why=why))
        self._run = Run(order, pid, output, now)
        self._handlers[output] = self._read
        self._poll.register(output, select.POLLIN)

    def _read(self, reads: int = READS_MAX) -> None:
        run = self._run
        assert run is not None, "the pipe is closed with the run"
        for _ in range(reads):
            try:
                chunk = os.read(run.output, READ_BYTES)
            except BlockingIOError:
                return
            if not chunk:  # all have closed it; the command may go on
                return self._close_output(run)
            run.capture.take(chunk)

    def _close_output(self, run: Run) -> None:
        if run.output >= 0:
            self._poll.unregister(run.output)
            del self._handlers[run.output]
            os.close(run.output)
            run.output = -1

    # ---- a command ends -----------------------------------------------------------------------------------

    def _reap(self) -> None:
        os.read(self._children, 4_096)
        run = self._run
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if run is not None and ended[0] == run.pid:
                    run.status = ended[1]
        except ChildProcessError:
            if run is not None and (tree.LINUX or not tree.signal_group(run.pid, 0)):
                return self._finish(run)
        if run is not None and run.status is not None and not run.ending:
            self._end(run, None, run.grace)  # the rest of it

    def _keep_time(self, run: Run, now: float) -> None:
        if not run.ending:
            if now >= run.timeout_at:
                self._end(run, TIMED_OUT, run.grace)
            elif now >= run.soft_at:
                self._end(run, LEASE_OVER, run.grace)
        if run.ending and now >= run.kill_at:
            self._kill(run, now)
        if run.ending and not tree.LINUX and self._run is not None:
            self._look_at_group(run)

    def _end(self, run: Run, why: str | None, grace: float) -> None:
        """Asked to end twice, it has the shorter of the two times."""
        now = time.monotonic()
        if not run.ending:
            run.ending = True
            run.why = None if self._has_ended(run) else why
            self._signal(run, signal.SIGTERM)
        run.kill_at = min(run.kill_at, now + grace, max(now, run.deadline))

    def _has_ended(self, run: Run) -> bool:
        if run.status is None and (ended := os.waitpid(run.pid, os.WNOHANG))[0]:
            run.status = ended[1]
        return run.status is not None

    def _kill(self, run: Run, now: float) -> None:
        run.killed_at = min(run.killed_at, now)
        refused = self._signal(run, signal.SIGKILL)
        run.kill_at = now + run.pause
        run.pause = min(run.pause * 2, KILL_PAUSE_MAX)
        if refused and now - run.killed_at >= REFUSED_PATIENCE:
            self._finish(run, tuple(refused))
            self._going = True  # what is left goes to the warden: none of it may be mixed up with the next command

    def _signal(self, run: Run, number: int) -> list[int]:
        if self._sees_tree:
            return tree.signal_below(os.getpid(), number).refused
        tree.signal_group(run.pid, number)
        return []

    def _finish(self, run: Run, left: tuple[int, ...] = ()) -> None:
        if run.output >= 0:
            self._read(DRAIN_READS_MAX)
        self._close_output(run)
        run.capture.close()
        self._run = None
        seconds = time.monotonic() - run.started_at
        capture = run.capture
        self._tell(Report(run.number, run.status, seconds, capture.last, capture.path, capture.problem, run.why, left))

    def _look_at_group(self, run: Run) -> None:
        """Where orphans are not adopted nobody tells of their ends."""
        if run.status is not None and not tree.signal_group(run.pid, 0):
            self._finish(run)


def wake_on_children() -> int:
    """A file that becomes readable when a child has ended. Signals to this process itself do nothing."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _text(error: OSError | ValueError) -> str:
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror} ({error.filename})"
