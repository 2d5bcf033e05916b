"""One owner a partition: a former one can write nothing, and what it had under way is seen or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from millpond.store import postgres_connections
from millpond.store.base import Store, StoreFailed, Stores
from tests.conformance.stores import chunk, turn
from tests.postgres.conftest import MakeStores
from tests.postgres.server import Server, lent

pytestmark = pytest.mark.slow

WAITING = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
COMMIT, TAKEOVER = "%commit_turn%", "%take_over%"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """In the place of the one that all tests share: sessions are ended here, and the server with them."""
    yield from lent()


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[], Any]], Future[Any]]]:
    """Runs a call in a thread."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


@contextmanager
def locked(server: Server, statement: str) -> Iterator[psycopg.Connection[Any]]:
    """Another session that holds a lock until the end of the block."""
    with server.connect() as connection, connection.transaction():
        connection.execute(statement.encode())
        yield connection


def another(stores: Stores) -> Store:
    return stores.open("incarnation", 0, "full")


def turns_of(store: Store) -> list[int]:
    return [row.turn for row in store.recover().rows]


def test_a_former_owner_cannot_write_after_a_takeover(stores: Stores, store: Store) -> None:
    store.commit(turn(1, chunks=[chunk(1)]))
    heir = another(stores)
    assert turns_of(heir) == [1]
    with pytest.raises(StoreFailed, match=r"another process has taken the partition over.*stop the other"):
        store.commit(turn(2, chunks=[chunk(2)], chunk_drops=[1], docs={1: b"doc"}, snapshot=b"state"))
    heir.commit(turn(2, events=b"the heir's"))
    assert heir.read([1, 2], [1]) == ({1: b"chunk 1"}, {})
    recovered = heir.recover()
    assert (recovered.snapshot, [row.events for row in recovered.rows][1:]) == (None, [b"the heir's"])


def test_a_former_owner_that_recovers_is_the_owner_again(stores: Stores, store: Store) -> None:
    heir = another(stores)
    heir.recover()
    heir.commit(turn(1))
    assert turns_of(store) == [1]
    store.commit(turn(2))
    with pytest.raises(StoreFailed, match="taken the partition over"):
        heir.commit(turn(2))


def test_a_takeover_waits_for_the_commit_that_is_under_way_and_sees_it(
    server: Server, stores: Stores, store: Store, start: Callable[..., Future[Any]]
) -> None:
    store.commit(turn(1))
    with locked(server, "LOCK TABLE millpond.journal IN SHARE MODE"):
        commit = start(store.commit, turn(2))
        server.until(WAITING, COMMIT)
        takeover = start(turns_of, another(stores))
        server.until(WAITING, TAKEOVER)
        assert not takeover.done()
    commit.result()
    assert takeover.result() == [1, 2]
    with pytest.raises(StoreFailed, match="taken the partition over"):
        store.commit(turn(3))


def test_a_commit_that_arrives_during_a_takeover_is_refused(
    server: Server, scope: str, store: Store, start: Callable[..., Future[Any]]
) -> None:
    store.commit(turn(1))
    with locked(server, f"SET search_path = millpond; SELECT take_over('{scope}incarnation', 0)"):
        commit = start(store.commit, turn(2))
        server.until(WAITING, COMMIT)
    with pytest.raises(StoreFailed, match="taken the partition over"):
        commit.result()
    assert turns_of(store) == [1]


def test_a_commit_whose_connection_is_lost_is_undone_before_the_takeover_reads(
    server: Server, store: Store, start: Callable[..., Future[Any]]
) -> None:
    store.commit(turn(1))
    with locked(server, "LOCK TABLE millpond.journal IN SHARE MODE"):
        commit = start(store.commit, turn(2))
        [(pid,)] = server.until(WAITING, COMMIT)
        server.ask("SELECT pg_terminate_backend(%s)", pid)
        with pytest.raises(StoreFailed, match="terminating connection"):
            commit.result()
        assert turns_of(store) == [1]
    store.commit(turn(2))
    assert turns_of(store) == [1, 2]


def test_a_commit_that_hangs_in_the_server_is_ended_by_the_takeover(
    server: Server, make_stores: MakeStores, store: Store, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its client had died between the statement and its end, and the system had not said so."""
    store.commit(turn(1))
    monkeypatch.setattr(postgres_connections, "LOCK_TIMEOUT_S", 0.2)
    heir = another(make_stores())
    hold = (
        "SELECT pg_advisory_xact_lock_shared('millpond.owner'::regclass::oid::integer, place) FROM millpond.owner "
        f"WHERE incarnation = '{scope}incarnation'"
    )
    hung = server.connect()
    hung.execute("BEGIN")
    hung.execute(hold.encode())
    with pytest.raises(StoreFailed, match="in the way; it is tried again"):
        heir.recover()
    assert turns_of(heir) == [1]
    heir.commit(turn(2))
    with pytest.raises(psycopg.OperationalError, match="terminating connection"):
        hung.execute("COMMIT")
    hung.close()


def test_the_former_owner_of_a_destroyed_partition_cannot_write(stores: Stores, store: Store) -> None:
    store.commit(turn(1))
    stores.destroy("incarnation")
    with pytest.raises(StoreFailed, match="taken the partition over"):
        store.commit(turn(2, chunks=[chunk(1)]))
    assert store.size() == 0
    assert stores.incarnations() == []


def test_the_partition_made_anew_under_the_same_name_is_another(stores: Stores, store: Store) -> None:
    stores.destroy("incarnation")
    heir = another(stores)
    heir.recover()
    with pytest.raises(StoreFailed, match="taken the partition over"):
        store.commit(turn(1))
    heir.commit(turn(1))


def test_the_sessions_isolation_is_read_committed_whatever_the_servers_default(
    server: Server, make_stores: MakeStores
) -> None:
    """An epoch read from a snapshot that is older than the lock would be worth nothing."""
    server.ask("ALTER ROLE postgres SET default_transaction_isolation = 'serializable'")
    try:
        store, heir = another(make_stores()), another(make_stores())
        store.recover()
        store.commit(turn(1))
        heir.recover()
        with pytest.raises(StoreFailed, match="taken the partition over"):
            store.commit(turn(2))
    finally:
        server.ask("ALTER ROLE postgres RESET default_transaction_isolation")


def test_owners_that_fight_for_a_partition_lose_and_double_nothing(stores: Stores) -> None:
    """Each writes its name until it has written enough; whatever was acknowledged is there, once, at its turn."""
    acknowledged: dict[int, bytes] = {}
    taken = threading.Lock()

    def fight(name: int) -> None:
        store, written = another(stores), 0
        number = 0
        while written < 30:
            try:
                if number == 0:
                    number = len(store.recover().rows)
                store.commit(turn(number + 1, events=b"%d/%d" % (name, number + 1)))
            except StoreFailed:
                number = 0
                continue
            number, written = number + 1, written + 1
            with taken:
                assert number not in acknowledged
                acknowledged[number] = b"%d/%d" % (name, number)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(fight, name) for name in range(4)]:
            done.result()
    store = another(stores)
    rows = store.recover().rows
    assert {row.turn: row.events for row in rows} == acknowledged
    assert len(rows) == 120
    assert store.check() == []
