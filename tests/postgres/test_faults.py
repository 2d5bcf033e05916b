"""A server that goes away, hangs, is full or loses what it had: the commit fails, and `recover` tells what is there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from millpond.store import postgres_connections
from millpond.store.base import Store, StoreFailed, StoreFull
from tests.conformance.stores import chunk, turn
from tests.postgres.conftest import MakeStores
from tests.postgres.server import Server, lent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """In the place of the one that all tests share: sessions are ended here, and the server with them."""
    yield from lent()


def turns_of(store: Store) -> list[int]:
    return [row.turn for row in store.recover().rows]


def test_connections_that_the_server_has_ended_are_not_used(server: Server, store: Store) -> None:
    store.commit(turn(1))
    pids = "SELECT pid FROM pg_stat_activity WHERE application_name = 'millpond'"
    server.ask(f"SELECT pg_terminate_backend(pid) FROM ({pids}) AS ours")
    while server.ask(pids):
        pass
    store.commit(turn(2))
    assert turns_of(store) == [1, 2]


def test_a_server_that_is_away_fails_the_commit_and_is_used_again_when_it_is_back(server: Server, store: Store) -> None:
    store.commit(turn(1))
    server.stop()
    try:
        with pytest.raises(StoreFailed, match="check that the server runs and can be reached"):
            store.commit(turn(2))
        with pytest.raises(StoreFailed, match="check that the server runs and can be reached"):
            store.recover()
    finally:
        server.start()
    assert turns_of(store) == [1]
    store.commit(turn(2))


def test_a_server_that_hangs_fails_the_commit(server: Server, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_connections, "ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(postgres_connections, "WAKE_S", 0.05)
    store.commit(turn(1))
    [(pid,)] = server.until(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'millpond' AND strpos(query, 'commit_turn') > 0"
        " ORDER BY state_change DESC LIMIT %s",
        1,
    )
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreFailed, match=r"no answer within 0\.3 s"):
            store.commit(turn(2))
        assert turns_of(store) == [1]
    finally:
        os.kill(pid, signal.SIGCONT)
    server.until("SELECT 1 WHERE NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)", pid)
    assert turns_of(store) == [1]  # what it had been sent came too late
    store.commit(turn(2))


def test_a_statement_that_takes_too_long_is_given_up(
    server: Server, make_stores: MakeStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connections, "STATEMENT_TIMEOUT_S", 0.3)
    store = make_stores().open("incarnation", 0, "full")
    store.recover()
    with server.connect() as connection, connection.transaction():
        connection.execute("LOCK TABLE millpond.journal IN SHARE MODE")
        with pytest.raises(StoreFailed, match=r"statement timeout.*see what keeps the server busy"):
            store.commit(turn(1))
    assert turns_of(store) == []


def test_when_all_connections_are_in_use_the_error_says_so(
    make_stores: MakeStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connections, "ANSWER_TIMEOUT_S", 0.1)
    stores = make_stores(connections_max=1)
    store = stores.open("incarnation", 0, "full")
    inner: Any = stores.inner
    with inner._connections.take(), pytest.raises(StoreFailed, match="all 1 connections are in use"):
        store.recover()
    store.recover()


def test_more_partitions_than_connections_wait_for_each_other(make_stores: MakeStores) -> None:
    stores = make_stores(connections_max=2)

    def work(partition: int) -> None:
        store = stores.open("incarnation", partition, "full")
        store.recover()
        for number in range(1, 21):
            store.commit(turn(number))
        assert turns_of(store) == list(range(1, 21))

    with ThreadPoolExecutor(10) as threads:
        for done in [threads.submit(work, partition) for partition in range(10)]:
            done.result()


def raising(server: Server, code: str) -> None:
    """From now on no chunk can be written."""
    server.ask(
        "CREATE FUNCTION millpond.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION USING"
        f" ERRCODE = '{code}', MESSAGE = 'could not extend file'; END $$;"
        " CREATE TRIGGER refuse BEFORE INSERT ON millpond.chunk FOR EACH ROW EXECUTE FUNCTION millpond.refuse()"
    )


def test_a_full_disk_of_the_server_is_told_from_other_errors(server: Server, store: Store) -> None:
    store.commit(turn(1))
    raising(server, "53100")
    try:
        with pytest.raises(StoreFull, match=r"could not extend file.*free disk space on the database server"):
            store.commit(turn(2, chunks=[chunk(1)]))
        assert store.relieve(full=True) is False
        assert turns_of(store) == [1]
        store.commit(turn(2, ended=(1, 1)))  # completes may go on
    finally:
        server.ask("DROP FUNCTION millpond.refuse() CASCADE")
    assert store.relieve(full=False) is True
    store.commit(turn(3, chunks=[chunk(1)]))


def test_a_server_that_only_reads_is_told_from_other_errors(server: Server, make_stores: MakeStores) -> None:
    stores = make_stores()
    store = stores.open("incarnation", 0, "full")
    store.recover()
    server.ask("ALTER ROLE postgres SET default_transaction_read_only = on")
    stores.inner.close()  # as a failover does
    try:
        with pytest.raises(StoreFailed, match=r"read-only transaction.*it only reads, as a standby does"):
            store.commit(turn(1))
    finally:
        server.ask("BEGIN READ WRITE; ALTER ROLE postgres RESET default_transaction_read_only; COMMIT")
    assert turns_of(store) == []
    store.commit(turn(1))


def test_a_turn_that_a_failover_has_lost_is_noticed_with_the_next(server: Server, store: Store, scope: str) -> None:
    for number in (1, 2, 3):
        store.commit(turn(number))
    place = f"(SELECT place FROM millpond.owner WHERE incarnation = '{scope}incarnation')"
    server.ask(f"DELETE FROM millpond.journal WHERE turn = 3 AND place = {place}")
    with pytest.raises(StoreFailed, match="the turn before this one is not stored"):
        store.commit(turn(4))
    assert turns_of(store) == [1, 2]
    store.commit(turn(3))


def test_a_commit_that_no_standby_has_confirmed_is_not_acknowledged(server: Server, store: Store) -> None:
    store.commit(turn(1))
    server.ask("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    server.ask("SELECT pg_reload_conf()")
    server.until("SELECT 1 WHERE current_setting('synchronous_standby_names') = %s", "nobody")
    try:
        with ThreadPoolExecutor() as threads:
            commit = threads.submit(store.commit, turn(2))
            [(pid,)] = server.until("SELECT pid FROM pg_stat_activity WHERE wait_event = %s", "SyncRep")
            server.ask("SELECT pg_cancel_backend(%s)", pid)
            with pytest.raises(StoreFailed, match=r"synchronous replication.*see to the standby"):
                commit.result()
    finally:
        server.ask("ALTER SYSTEM RESET synchronous_standby_names")
        server.ask("SELECT pg_reload_conf()")
        server.until("SELECT 1 WHERE current_setting('synchronous_standby_names') = %s", "")
    assert turns_of(store) == [1, 2]
