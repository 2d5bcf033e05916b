"""Commands for tests: jobs by hand, an executor to run them, and a pipe by which a test sees who still lives.

A *pulse* is a named pipe that a command's processes hold open for writing. What they print there is read line by line;
its end is the end of the last of them. So a test waits for neither time nor process ids.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millpond.jobs.spec import JobSpec
from millpond.model import LeasedFields, LeasedItem
from millpond.worker.commands import CommandExecutor
from millpond.worker.executors import Outcome, Running
from millpond.worker.logs import Logs

PATIENCE = 30.0  # seconds after which a test gives up
CORRELATION_ID = os.environ.setdefault("MILLPOND_TEST_RUN", f"c-{os.getpid()}")
"""Of all items here, and in workers that a test starts: so tests that run at the same time are not mixed up."""
INCARNATION = "pond1"  # of the queue of all items here
EPOCH = datetime.fromtimestamp(0, UTC)


def leased(id: str = "j1", deliveries: int = 1, correlation_id: str = CORRELATION_ID, attempts: int = 0) -> LeasedItem:
    fields = LeasedFields(
        id=id,
        lease=f"{INCARNATION}.{id}",
        payload=b"",
        correlation_id=correlation_id,
        attempts=attempts or deliveries,
        deliveries=deliveries,
        fencing_token=deliveries,
        lease_deadline=EPOCH,
        created_at=EPOCH,
        kind="command",
    )
    return LeasedItem(b"", 0, None, fields)


def job_of(command: str, item: LeasedItem | None = None, lease: float = 60.0, **spec: Any) -> Running:
    return Running(item or leased(), "jobs", JobSpec(command=command, **spec), time.monotonic() + lease)


class Commands:
    """An executor, with futures for ends."""

    def __init__(self, executor: CommandExecutor) -> None:
        self.executor = executor

    def begin(self, job: Running) -> asyncio.Future[Outcome]:
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.executor.run(job, lambda _, outcome: ended.set_result(outcome))
        return ended

    async def run(self, command: str, item: LeasedItem | None = None, lease: float = 60.0, **spec: Any) -> Outcome:
        async with asyncio.timeout(PATIENCE):
            return await self.begin(job_of(command, item, lease, **spec))


@asynccontextmanager
async def commands(folder: Path, *, slots: int = 1, grace: float = 5.0, **options: Any) -> AsyncIterator[Commands]:
    executor = CommandExecutor(Logs(folder / "logs"), slots=slots, grace=grace, **options)
    await executor.start()
    try:
        yield Commands(executor)
    finally:
        await executor.stop(force=True)


class Pulse:
    """`path` is to be opened by the command: `exec 3>path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._text = b""

    def line(self) -> str:
        while b"\n" not in self._text:
            read = self._read()
            assert read, f"it ended, after {self._text!r}"
            self._text += read
        line, _, self._text = self._text.partition(b"\n")
        return line.decode()

    def lines(self, count: int) -> list[str]:
        return [self.line() for _ in range(count)]

    def wait_for_end(self) -> None:
        """Of all that hold it. To be asked only after somebody has printed a line."""
        while self._read():
            pass

    def is_held(self) -> bool:
        """Whether somebody has it open now."""
        try:
            while os.read(self._file, 4_096):
                pass
        except BlockingIOError:
            return True
        return False

    def _read(self) -> bytes:
        """Empty at the end of the last writer."""
        until = time.monotonic() + PATIENCE
        while True:
            assert select.select([self._file], [], [], until - time.monotonic())[0], "nothing came, and nobody ended"
            try:
                return os.read(self._file, 4_096)
            except BlockingIOError:
                continue

    def close(self) -> None:
        os.close(self._file)
