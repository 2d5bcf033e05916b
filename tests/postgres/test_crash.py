"""Clients and servers that die in the middle of commits: nothing acknowledged is lost, nothing is there twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest

from millpond.store.base import Store, StoreFailed
from tests.postgres.conftest import MakeStores
from tests.postgres.doomed import work_of
from tests.postgres.scoped import ScopedStores
from tests.postgres.server import Server, lent

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIVES = 8
TURNS = 150
RESTARTS = 3
COMMITTING = (
    "SELECT pid FROM pg_stat_activity"
    " WHERE application_name = 'millpond' AND state = 'active' AND strpos(query, 'commit_turn') > 0"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """In the place of the one that all tests share: sessions are ended here, and the server with them."""
    yield from lent()


def last_turn(store: Store) -> int:
    recovered = store.recover()
    return recovered.rows[-1].turn if recovered.rows else recovered.snapshot_turn


def check(store: Store, last: int) -> None:
    """All turns up to the last are there, once, and what they wrote is what they should have left."""
    rows = store.journal(0, 1_000_000)
    assert [row.turn for row in rows] == list(range(1, last + 1))
    assert store.check() == []
    kept = range(max(1, last - 4), last + 1)
    chunks, docs = store.read([number * 10 for number in range(last + 2)], range(last + 2))
    assert docs == {number: b"doc %d" % number for number in kept}
    lives = {row.turn: row.events.decode().partition(" of ")[2] for row in rows}
    assert chunks == {number * 10: f"chunk {number} of {lives[number]}".encode() * 500 for number in kept}


# ---- clients ----------------------------------------------------------------------------------------------


def live_and_die(server: Server, incarnation: str, steps: int) -> tuple[int, int]:
    """One life, killed after it has said so many lines: the last turn it acknowledged and the last it began."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    arguments = [sys.executable, "-m", "tests.postgres.doomed", server.url(), incarnation]
    said: dict[str, int] = {"!": 0, "?": 0}

    def hear(line: bytes) -> None:
        said[line.decode().strip()[-1]] = int(line.strip()[:-1])

    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment, cwd=ROOT) as child:
        assert child.stdout is not None
        try:
            for number, line in enumerate(child.stdout):
                hear(line)
                if number >= steps:
                    break
        finally:
            child.kill()
        for line in child.stdout:
            hear(line)
    assert child.returncode == -signal.SIGKILL, "it must not have ended by itself"
    return said["!"], said["?"]


@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed-{seed}-")
def test_a_killed_client_loses_nothing_and_doubles_nothing(seed: int, server: Server, stores: ScopedStores) -> None:
    random = Random(seed)
    store = stores.open("incarnation", 0, "full")
    for _ in range(LIVES):
        acknowledged, begun = live_and_die(server, f"{stores.scope}incarnation", random.randrange(100))
        found = last_turn(store)
        assert acknowledged <= found <= begun
        check(store, found)


# ---- servers and connections ------------------------------------------------------------------------------


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Does it again and again in a thread, until the end of the block."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Crew:
    """Threads that work on partitions. They end with their test, however it ends, and do not wait for a server then."""

    def __init__(self) -> None:
        self.over = threading.Event()  # what is under way is the last
        self.given_up = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, work: Callable[[], object]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.over.set()
    made.given_up.set()
    made.join()


def work_through(store: Store, turns: int, crew: Crew) -> int:
    """Commits turns, recovering whenever one fails; how often that was. Each outcome in doubt is one of two."""
    failures, number = 0, recover_at_last(store, crew)
    while number < turns:
        try:
            store.commit(work_of(number + 1, f"failure {failures}"))
        except StoreFailed:
            failures += 1
            found = recover_at_last(store, crew)
            assert found in (number, number + 1), "a turn was lost, or written that nobody wrote"
            number = found
        else:
            number += 1
    return failures


def recover_at_last(store: Store, crew: Crew) -> int:
    while True:
        try:
            return last_turn(store)
        except StoreFailed:
            if crew.given_up.is_set():
                raise
            # The server is on its way back.


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT, signal.SIGKILL], ids=["fast", "immediate", "kill"])
def test_a_server_that_is_restarted_in_the_middle_of_commits_loses_and_doubles_nothing(
    how: signal.Signals, server: Server, store: Store, crew: Crew
) -> None:
    failures: list[int] = []

    def work() -> None:
        while not crew.over.is_set():
            failures.append(work_through(store, recover_at_last(store, crew) + TURNS, crew))

    crew.begin(work)
    for _ in range(RESTARTS):
        server.until(COMMITTING + " LIMIT %s", 1)
        server.stop(how)
        server.start()
    crew.over.set()
    crew.join()
    assert sum(failures) > 0
    check(store, last_turn(store))


def test_connections_that_are_ended_in_the_middle_of_commits_lose_and_double_nothing(
    server: Server, store: Store, crew: Crew
) -> None:
    failures = last = 0
    with meanwhile(lambda: server.ask(f"SELECT pg_terminate_backend(pid) FROM ({COMMITTING}) AS ours")):
        while failures < 20:
            last += TURNS
            failures += work_through(store, last, crew)
    check(store, last_turn(store))


def test_commits_that_are_cancelled_lose_and_double_nothing(server: Server, store: Store, crew: Crew) -> None:
    failures = last = 0
    with meanwhile(lambda: server.ask(f"SELECT pg_cancel_backend(pid) FROM ({COMMITTING}) AS ours")):
        while failures < 20:
            last += TURNS
            failures += work_through(store, last, crew)
    check(store, last_turn(store))


def until_ended(session: psycopg.Connection[Any]) -> None:
    """The server is not down at once."""
    with suppress(psycopg.OperationalError):
        while True:
            session.execute("SELECT 1")


def test_a_backend_that_is_killed_takes_the_server_through_recovery_and_nothing_is_lost(
    server: Server, make_stores: MakeStores, crew: Crew
) -> None:
    """Several partitions at once; the server ends all sessions and replays its log."""
    stores = make_stores()
    partitions = [stores.open("incarnation", partition, "full") for partition in range(4)]
    failures: list[int] = []

    def work(store: Store) -> None:
        failures.append(work_through(store, 4 * TURNS, crew))

    for partition in partitions:
        crew.begin(partial(work, partition))
    for _ in range(2):
        with server.connect() as another:
            [(pid,)] = server.until(COMMITTING + " LIMIT %s", 1)
            os.kill(pid, signal.SIGKILL)
            until_ended(another)
        recover_at_last(stores.open("another", 0, "full"), crew)
    crew.join()
    assert sum(failures) > 0
    for store in partitions:
        check(store, last_turn(store))


def test_what_a_crash_leaves_of_relaxed_turns_is_whole(server: Server, stores: ScopedStores) -> None:
    """Not all that was acknowledged need be there."""
    store = stores.open("incarnation", 0, "relaxed")
    last_turn(store)
    for number in range(1, TURNS):
        store.commit(work_of(number, "relaxed"))
    server.stop(signal.SIGQUIT)
    server.start()
    kept = last_turn(stores.open("incarnation", 0, "relaxed"))
    with pytest.raises(StoreFailed):
        store.commit(work_of(TURNS, "relaxed"))
    assert last_turn(store) == kept
    check(store, kept)
