"""The worker's side of its supervisors: a warden's process, and a line to each supervisor that it has forked.

Everything happens on the worker's event loop, and nothing waits there.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from millpond.worker.aside import aside
from millpond.worker.frames import Frames, packed, receive
from millpond.worker.orders import Order, Report
from millpond.worker.warden import NUMBER_BYTES, UNBORN

PROGRAM: Final = Path(__file__).parent / "supervisor.py"
SECRETS: Final = ("MILLPOND_TOKEN",)  # of the worker: whoever may enqueue a command may print its environment
GONE_PATIENCE: Final = 30.0  # seconds for all to go once nothing runs: more than a warden gives its supervisors


class Line:
    """To one supervisor. `busy` is what it runs, for the caller to keep; one that has gone is not open any more."""

    def __init__(self, number: int, channel: socket.socket, read: Callable[[Line], None]) -> None:
        self.number = number
        self.busy: Any = None
        self.is_open = True
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._frames = Frames()
        self._unsent = b""
        channel.setblocking(False)
        self._loop.add_reader(channel, read, self)

    def run(self, order: Order) -> None:
        self._send(("run", *order))

    def extend(self, number: int, deadline: float) -> None:
        self._send(("extend", number, deadline))

    def end(self, number: int, why: str, grace: float) -> None:
        self._send(("end", number, why, grace))

    def close(self) -> None:
        """The supervisor goes, after what it runs."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._channel)
            self._loop.remove_writer(self._channel)
            _shut(self._channel)

    def reports(self) -> list[Report]:
        """Those that have come, or some of them. Closes the line if the supervisor has gone."""
        data = receive(self._channel) if self.is_open else b""
        if data is None:
            self.close()
            return []
        return [Report(*values) for values in self._frames.feed(data)] if data else []

    def _send(self, value: tuple[Any, ...]) -> None:
        data = packed(value)
        if self.is_open and not self._unsent:
            data = data[self._try(data) :]
            if data:
                self._loop.add_writer(self._channel, self._send_rest)
        self._unsent += data

    def _send_rest(self) -> None:
        self._unsent = self._unsent[self._try(self._unsent) :]
        if not self._unsent:
            self._loop.remove_writer(self._channel)

    def _try(self, data: bytes) -> int:
        try:
            return self._channel.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # it has gone, as the next read tells
            return len(data)


class Supervisors:
    """A warden and its supervisors. Once the warden is gone, no more can be opened: make another of these.

    `heard(line, report)`: a command has ended. `lost(line, clean)`: a supervisor died while it was busy; `clean` if
    nothing of what it ran is left, else nobody has seen to that. `unborn(line)`: the system had no room for it.
    """

    def __init__(
        self,
        heard: Callable[[Line, Report], None],
        lost: Callable[[Line, bool], None],
        unborn: Callable[[Line], None],
    ) -> None:
        self._heard = heard
        self._lost = lost
        self._unborn = unborn
        self._loop = asyncio.get_running_loop()
        self._lines: dict[int, Line] = {}
        self._numbers = 0
        self._told = b""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _start(theirs)
        self._channel = ours
        self.is_alive = True
        ours.setblocking(False)
        self._loop.add_reader(ours, self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_lines(self) -> bool:
        return bool(self._lines)

    def open(self) -> Line:
        """A new supervisor. Raises OSError where there can be none."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._numbers += 1
            number = self._numbers
            try:
                socket.send_fds(self._channel, [number.to_bytes(NUMBER_BYTES, "little")], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        line = self._lines[number] = Line(number, ours, self._read_line)
        return line

    def kill(self, line: Line) -> None:
        """For one that does not answer: it is told as lost."""
        if self.is_alive and self._lines.get(line.number) is line:
            try:
                self._channel.send(line.number.to_bytes(NUMBER_BYTES, "little"))
            except OSError:  # the warden is gone or stuck as well
                pass

    async def close(self) -> None:
        """Waits until all of these processes have gone."""
        for line in self._lines.values():
            line.close()
        self._close()
        await aside(_wait, self._process)

    # ---- what comes ---------------------------------------------------------------------------------------

    def _read_line(self, line: Line) -> None:
        for report in line.reports():
            self._heard(line, report)
        if not line.is_open and not (self.is_alive and line.busy is not None):
            self._forget(line, clean=False)  # else the warden sees to it, and tells

    def _read(self) -> None:
        while self.is_alive and (data := receive(self._channel)) != b"":
            if data is None:
                self._close()
                _wait(self._process)
            else:
                self._told += data
        while len(self._told) >= NUMBER_BYTES:
            number, self._told = int.from_bytes(self._told[:NUMBER_BYTES], "little"), self._told[NUMBER_BYTES:]
            if (line := self._lines.get(number & ~UNBORN)) is None:
                continue
            if number & UNBORN:
                line.close()
                del self._lines[line.number]
                self._unborn(line)
            else:
                self._hear_last(line)
                self._forget(line, clean=True)
        if not self.is_alive:  # supervisors that are busy tell what becomes of it; the others just go
            for line in [line for line in self._lines.values() if not line.is_open or line.busy is None]:
                self._forget(line, clean=False)

    def _hear_last(self, line: Line) -> None:
        """What it told before it went. The line is closed first, so that nothing new is given to it."""
        last: list[Report] = []
        while reports := line.reports():
            last += reports
        line.close()
        for report in last:
            self._heard(line, report)

    def _forget(self, line: Line, clean: bool) -> None:
        line.close()
        if self._lines.pop(line.number, None) is not None and line.busy is not None:
            self._lost(line, clean)

    def _close(self) -> None:
        if self.is_alive:
            self.is_alive = False
            self._loop.remove_reader(self._channel)
            _shut(self._channel)


def _shut(channel: socket.socket) -> None:
    """For all who have it: processes that the worker forked may have a copy."""
    try:
        channel.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other end has gone
        pass
    channel.close()


def _start(channel: socket.socket) -> subprocess.Popen[bytes]:
    """In a session of its own: what a terminal sends to the worker is not for it. Commands have its environment."""
    arguments = [sys.executable, "-I", "-S", str(PROGRAM), str(os.getpid()), str(channel.fileno())]
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name not in SECRETS},
        pass_fds=[channel.fileno()],
        start_new_session=True,
    )


def _wait(process: subprocess.Popen[bytes]) -> None:
    """It is on its way out, or out already. One that is stuck is killed: its supervisors go by themselves then."""
    try:
        process.wait(GONE_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
