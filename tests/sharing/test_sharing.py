"""One data directory, several processes: the first owns it, the others are its guests, and one of them inherits."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

import millpond
from millpond.directory import LOCK, SOCKET, DirectoryLock
from millpond.embedded import AsyncPond
from millpond.errors import Conflict, DirectoryInUse
from millpond.sharing import SharedPond
from tests.service.looks import until_parked

# Does what each line says, and answers with a line.
OTHER = """
import sys, millpond
with millpond.open(sys.argv[1]) as pond:
    print("open", flush=True)
    for line in sys.stdin:
        print(eval(line, {"pond": pond}), flush=True)
"""


class Other:
    """A pond in another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._in: IO[str] = process.stdin
        self._out: IO[str] = process.stdout
        assert self._out.readline() == "open\n"

    def ask(self, call: str) -> str:
        self.tell(call)
        return self.answer()

    def tell(self, call: str) -> None:
        self._in.write(f"{call}\n")
        self._in.flush()

    def answer(self) -> str:
        return self._out.readline().strip()

    def end(self) -> None:
        self._in.close()
        self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def other(path: Path) -> Iterator[Other]:
    command = [sys.executable, "-c", OTHER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Other(process)
        finally:
            process.kill()


def lock_of(path: Path) -> list[int]:
    """Process id and epoch of the owner."""
    return [int(number) for number in (path / LOCK).read_text().split()]


def test_a_second_process_is_a_guest_of_the_first(tmp_path: Path) -> None:
    with millpond.open(tmp_path) as pond, other(tmp_path) as guest:
        assert lock_of(tmp_path) == [os.getpid(), 1]
        guest.ask("pond.create_queue('q')")
        pond.produce("q", ["a"])
        assert guest.ask("[item.text for item in pond.lease('q')]") == "['a']"
        guest.ask("pond.produce('q', ['b'])")
        [item] = pond.lease("q")
        assert item.text == "b"
        guest.end()
        assert [result.ok for result in pond.complete([item])] == [True]


def test_a_directory_has_one_owner_in_a_process_too(tmp_path: Path) -> None:
    with millpond.open(tmp_path) as owner, millpond.open(tmp_path) as guest:
        owner.create_queue("q")
        guest.produce("q", ["a"])
        [item] = owner.lease("q")
        [result] = guest.complete([item])
        assert result.ok


@pytest.mark.parametrize("end", ["end", "kill"])
def test_a_guest_inherits(end: str, tmp_path: Path) -> None:
    with other(tmp_path) as owner:
        owner.ask("pond.create_queue('q')")
        owner.ask("pond.produce('q', ['a', 'b'])")
        with millpond.open(tmp_path) as pond:
            [item] = pond.lease("q")
            assert lock_of(tmp_path) == [owner.process.pid, 1]
            getattr(owner, end)()
            assert [result.ok for result in pond.complete([item])] == [True]
            pond.produce("q", ["c"])
            assert [item.text for item in pond.lease("q", batch=9)] == ["b", "c"]
            assert lock_of(tmp_path) == [os.getpid(), 2]


@pytest.mark.parametrize("listen", [True, False])
def test_a_parked_lease_survives_its_owner(listen: bool, tmp_path: Path) -> None:
    with (
        other(tmp_path) as owner,
        millpond.open(tmp_path, listen=listen) as pond,
        ThreadPoolExecutor() as threads,
    ):
        pond.create_queue("q")
        lease = threads.submit(pond.lease, "q", wait="60s")
        until_parked(pond, "q")
        owner.kill()
        pond.produce("q", ["a"])
        assert [item.text for item in lease.result()] == ["a"]


def test_a_parked_look_survives_its_owner(tmp_path: Path) -> None:
    with other(tmp_path) as owner, millpond.open(tmp_path) as pond, ThreadPoolExecutor() as threads:
        pond.create_queue("q", completed_retention="1h")
        [made] = pond.produce("q", ["a"])
        look = threads.submit(pond.get_item, "q", made.id, wait="60s")
        assert owner.ask("pond.stats('q').counts['ready']") == "1"
        owner.kill()
        pond.cancel("q", [made.id])
        assert look.result().state == "cancelled"


@pytest.mark.slow
def test_of_many_guests_one_inherits_and_the_others_find_it(tmp_path: Path) -> None:
    with other(tmp_path) as owner, other(tmp_path) as one, other(tmp_path) as two, other(tmp_path) as three:
        owner.ask("pond.create_queue('q')")
        owner.kill()
        guests = [one, two, three]
        for guest in guests:
            guest.tell("len(pond.produce('q', ['x'] * 10))")
        assert [guest.answer() for guest in guests] == ["10"] * 3
        assert one.ask("pond.stats('q').counts['ready']") == "30"
        pid, epoch = lock_of(tmp_path)
        assert pid in [guest.process.pid for guest in guests]
        assert epoch == 2


def test_a_pond_for_a_moment_answers_nobody_and_is_waited_for(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        with millpond.open(tmp_path, listen=False) as pond:
            pond.create_queue("q")
            assert not (tmp_path / SOCKET).exists()
            opening = threads.submit(millpond.open, tmp_path)
        with opening.result() as later:
            assert [queue.name for queue in later.list_queues().queues] == ["q"]


def test_an_owner_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.sharing.SETTLE_S", 0.0)
    lock = DirectoryLock(tmp_path)
    try:
        with pytest.raises(DirectoryInUse, match=f"process {os.getpid()}, which does not answer; close"):
            millpond.open(tmp_path)
    finally:
        lock.release()
    with millpond.open(tmp_path):
        pass


def test_an_engine_of_its_own_shares_with_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with AsyncPond(tmp_path):
            with pytest.raises(DirectoryInUse):
                await AsyncPond(tmp_path).open()

    asyncio.run(scenario())


def test_a_pond_is_opened_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with SharedPond(tmp_path) as owner, SharedPond(tmp_path) as guest:
            assert owner.engine is not None
            assert guest.engine is None
            for pond in (owner, guest):
                with pytest.raises(Conflict, match="already"):
                    await pond.open()
        async with guest:
            assert guest.engine is not None

    asyncio.run(scenario())


def test_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 30) / ("longer" * 20)
    with millpond.open(path) as pond, other(path) as guest:
        pond.create_queue("q")
        assert guest.ask("len(pond.list_queues().queues)") == "1"
        guest.end()


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with millpond.open(path):
        assert (path / SOCKET).is_socket()
        assert (path / SOCKET).stat().st_mode & 0o777 == 0o600
        assert path.stat().st_mode & 0o777 == 0o700
    assert not (path / SOCKET).exists()


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    with other(tmp_path) as owner:
        owner.kill()
    assert (tmp_path / SOCKET).is_socket()
    with millpond.open(tmp_path) as pond, other(tmp_path) as guest:
        pond.create_queue("q")
        assert guest.ask("len(pond.list_queues().queues)") == "1"
        guest.end()


@pytest.mark.parametrize("instead", ["nothing", "a file"])
def test_a_socket_that_was_removed_comes_back(instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.sharing.SOCKET_LOOK_S", 0.01)
    monkeypatch.setattr("millpond.sharing.SETTLE_S", 5.0)
    with millpond.open(tmp_path) as owner:
        owner.create_queue("q")
        (tmp_path / SOCKET).unlink()
        if instead == "a file":
            (tmp_path / SOCKET).touch()
        with millpond.open(tmp_path) as guest:
            assert [queue.name for queue in guest.list_queues().queues] == ["q"]
        assert lock_of(tmp_path) == [os.getpid(), 1]
    assert not (tmp_path / SOCKET).exists()


def test_who_lost_its_directory_leaves_the_next_owners_socket_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.sharing.SETTLE_S", 5.0)
    path = tmp_path / "data"

    async def scenario() -> None:
        first, second = SharedPond(path), SharedPond(path)
        await first.open()
        shutil.rmtree(path)
        async with second:
            assert second.engine is not None
            await first.close()
            assert (path / SOCKET).is_socket()
            async with SharedPond(path) as guest:
                assert guest.engine is None

    asyncio.run(scenario())


def test_who_lost_its_directory_binds_no_socket_in_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    has_directory = AsyncPond.has_directory

    def looking(engine: AsyncPond) -> bool:
        found = has_directory(engine)
        if not found:
            looked.set()
        return found

    monkeypatch.setattr("millpond.sharing.SOCKET_LOOK_S", 0.001)
    monkeypatch.setattr(AsyncPond, "has_directory", looking)
    path = tmp_path / "data"
    with millpond.open(path):
        shutil.rmtree(path)
        path.mkdir()
        for _ in range(2):  # at the second what followed the first is over
            looked.clear()
            assert looked.wait(20)
        assert os.listdir(path) == []


def test_a_pond_from_before_a_fork_says_so_in_the_child(tmp_path: Path) -> None:
    script = """
import os, signal, sys, millpond
with millpond.open(sys.argv[1]) as pond:
    pond.create_queue("q")
    pond.produce("q", ["a", "b"])
    item = pond.lease("q")[0]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        for call in (lambda: pond.produce("q", ["c"]), item.complete, lambda: next(iter(pond.consume("q")))):
            try:
                call()
            except millpond.errors.Closed as error:
                print(error.message, flush=True)
        pond.close()
        with millpond.open(sys.argv[1]) as own:
            own.produce("q", ["d"])
        os._exit(0)
    print(os.waitpid(child, 0)[1], pond.stats("q").counts["ready"], item.complete())
"""
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    *told, last = done.stdout.splitlines()
    assert told == ["the pond was opened before a fork; open it again in the child"] * 3
    assert last == "0 2 None"


def test_a_forked_child_does_not_hold_its_parents_directory(tmp_path: Path) -> None:
    script = """
import os, sys, millpond
pond = millpond.open(sys.argv[1])
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("forked", flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "forked\n"
        process.wait()
        with millpond.open(tmp_path) as pond:
            pond.create_queue("q")
            assert lock_of(tmp_path)[0] == os.getpid()
        process.stdin.close()
