"""Urls, users and schemas: the error says what is wrong and what to do, and shows no password."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millpond.errors import InvalidRequest
from millpond.store import postgres, postgres_connections
from millpond.store.base import StoreFailed
from millpond.store.postgres import PostgresStores
from tests.conformance.stores import turn
from tests.postgres.conftest import At
from tests.postgres.server import Server, free_port

pytestmark = pytest.mark.slow

PASSWORD = "s3cr:et@/%"
QUOTED = "s3cr%3Aet%40%2F%25"

# ---- the url ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:sec@ret@host/db",
        "postgresql://ann:sec/ret@host/db",
        "postgresql://ann:sec%zzret@host/db",
        "postgresql://ann:secret@host:port/db",
        "host=here password=sec ret",
        "postgresql://ann:secret@host/db?colour=blue",
        "https://ann:secret@host/db",
        "",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(InvalidRequest, match="postgresql://user:password@host") as caught:
        PostgresStores(url)
    assert "ret" not in str(caught.value).replace("postgresql://user:password@host", "")
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("hosts", ["a,b", "a:1,b", "a,b:2,[::1]:3", "[::1]"])
def test_several_servers_may_be_named_each_with_its_port_or_without(hosts: str) -> None:
    PostgresStores(f"postgresql://ann@{hosts}/db?target_session_attrs=read-write")


@pytest.mark.parametrize("schema", ["Upper", "two,words", "a-b", "x" * 64, "1st", ""])
def test_a_schema_must_be_one_plain_word(schema: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be the schema"):
        PostgresStores(f"postgresql://host/db?options=-csearch_path%3D{schema}")


def test_stores_are_kept_in_the_schema_that_the_url_names(at: At, server: Server) -> None:
    stores = at(server.url(schema="elsewhere"))
    stores.settle_in()
    stores.open("one", 0, "full").recover()
    assert server.ask("SELECT incarnation FROM elsewhere.owner") == [("one",)]
    server.ask("DROP SCHEMA elsewhere CASCADE")


# ---- nobody lets us in ------------------------------------------------------------------------------------


@pytest.fixture
def role(server: Server) -> Iterator[str]:
    """Somebody who may connect, and no more."""
    server.ask(f"CREATE ROLE ann LOGIN PASSWORD '{PASSWORD}'")
    yield "ann"
    server.ask("DROP OWNED BY ann CASCADE")
    server.ask("DROP ROLE ann")


def failure(stores: PostgresStores) -> str:
    with pytest.raises(StoreFailed) as caught:
        stores.settle_in()
    with pytest.raises(StoreFailed):
        stores.open("incarnation", 0, "full").recover()
    with pytest.raises(StoreFailed):
        stores.incarnations()
    return str(caught.value)


def test_wrong_credentials_are_named_and_not_shown(at: At, server: Server, role: str) -> None:
    text = failure(at(server.url(user=role, password="wr0ng-passw0rd")))
    assert re.search(r'"ann".*the user or the password is wrong; correct the store\'s url', text)
    assert "wr0ng" not in text
    text = failure(at(server.url(user="nobody", password="wr0ng-passw0rd")))
    assert "the user or the password is wrong" in text
    assert "wr0ng" not in text


def test_an_unknown_database_is_named(at: At, server: Server) -> None:
    text = failure(at(server.url(database="nowhere")))
    assert re.search('"nowhere" does not exist.*there is no such database; create it', text)


def test_a_server_that_is_not_there_is_named(at: At) -> None:
    port = free_port()
    text = failure(at(f"postgresql://ann:{QUOTED}@127.0.0.1:{port}/db"))
    assert f"PostgreSQL at 127.0.0.1:{port}/db failed" in text
    assert "check that the server runs and can be reached" in text
    assert "s3cr" not in text


def test_a_server_that_takes_the_connection_and_says_nothing_is_given_up(at: At) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        stores = at(f"postgresql://ann@127.0.0.1:{silent.getsockname()[1]}/db?connect_timeout=2")
        with pytest.raises(StoreFailed, match=r"timeout.*check that the server runs"):
            stores.incarnations()


def test_without_the_privilege_to_make_a_schema_the_error_says_what_to_ask_for(
    at: At, server: Server, role: str
) -> None:
    url = server.url(user=role, password=QUOTED, schema="anns")
    assert "CREATE SCHEMA anns AUTHORIZATION ann" in failure(at(url))
    server.ask("CREATE SCHEMA anns AUTHORIZATION ann")
    stores = at(url)
    stores.settle_in()
    store = stores.open("incarnation", 0, "full")
    store.recover()
    store.commit(turn(1))
    server.ask("REVOKE ALL ON ALL TABLES IN SCHEMA anns FROM ann")
    with pytest.raises(StoreFailed, match="permission denied for table owner"):
        store.commit(turn(2))


# ---- the schema -------------------------------------------------------------------------------------------


def test_a_database_without_the_schema_is_not_taken_for_an_empty_store(at: At, server: Server) -> None:
    stores = at(server.url(schema="absent"))
    for call in (stores.incarnations, stores.open("one", 0, "full").recover, lambda: stores.destroy("one")):
        with pytest.raises(StoreFailed, match="has no schema absent of ours, so it is not this store"):
            call()
    assert server.ask("SELECT 1 FROM pg_namespace WHERE nspname = 'absent'") == []


def test_a_schema_that_disappears_is_an_error(at: At, server: Server) -> None:
    stores = at(server.url(schema="brief"))
    stores.settle_in()
    store = stores.open("incarnation", 0, "full")
    store.recover()
    server.ask("DROP SCHEMA brief CASCADE")
    with pytest.raises(StoreFailed, match="is gone; restore it from a backup"):
        store.commit(turn(1))
    with pytest.raises(StoreFailed, match="is gone; restore it from a backup"):
        store.recover()


def test_a_schema_of_a_newer_version_is_refused(at: At, server: Server) -> None:
    url = server.url(schema="later")
    made = at(url)
    made.settle_in()
    server.ask("UPDATE later.version SET version = 99")
    assert "the schema later is of version 99" in failure(at(url))
    server.ask("DROP SCHEMA later CASCADE")


def test_a_schema_is_brought_up_to_date_step_by_step(at: At, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.url(schema="earlier")
    made = at(url)
    made.settle_in()
    steps = {"schema_2": "ALTER TABLE doc ADD a integer", "schema_3": "ALTER TABLE doc ADD b integer"}
    monkeypatch.setattr(postgres_connections, "SQL", {**postgres_connections.SQL, **steps})
    monkeypatch.setattr(postgres_connections, "UPGRADES", (*postgres_connections.UPGRADES, *steps))
    with ThreadPoolExecutor() as threads:
        many = [at(url) for _ in range(4)]
        for done in [threads.submit(one.incarnations) for one in many]:
            assert done.result() == []
    assert server.ask("SELECT version FROM earlier.version") == [(3,)]
    server.ask("DROP SCHEMA earlier CASCADE")


def test_every_statement_is_used() -> None:
    files = [Path(str(module.__file__)) for module in (postgres, postgres_connections)]
    source = "".join(file.read_text() for file in files)
    assert [name for name in postgres_connections.SQL if f'"{name}"' not in source] == []
