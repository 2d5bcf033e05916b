"""What is in the tables, and how it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.store.base import Store, StoreFailed, Stores
from tests.conformance.stores import chunk, turn
from tests.postgres.conftest import MakeStores
from tests.postgres.scoped import ScopedStores
from tests.postgres.server import Server

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("DELETE FROM millpond.journal WHERE turn = 3", "turn 4 follows turn 2"),
        ("DELETE FROM millpond.journal WHERE turn = 9", "ends at turn 8, before the snapshot of turn 9"),
        ("UPDATE millpond.journal SET total = total + 1 WHERE turn = 9", "turn 9 has total"),
        (
            "DELETE FROM millpond.journal WHERE turn < 9; DELETE FROM millpond.snapshot WHERE turn = 9",
            "begins at turn 9",
        ),
    ],
)
def test_check_finds_a_journal_that_does_not_hold_together(
    server: Server, store: Store, scope: str, damage: str, problem: str
) -> None:
    for number in range(1, 9):
        store.commit(turn(number))
    store.commit(turn(9, snapshot=b"state"))
    place = f"(SELECT place FROM millpond.owner WHERE incarnation = '{scope}incarnation')"
    for statement in damage.split("; "):
        server.ask(f"{statement} AND place = {place}")
    assert problem in store.check()[0]


def test_turns_that_are_missing_are_found(server: Server, store: Store, scope: str) -> None:
    for number in range(1, 6):
        store.commit(turn(number))
    place = f"(SELECT place FROM millpond.owner WHERE incarnation = '{scope}incarnation')"
    server.ask(f"DELETE FROM millpond.journal WHERE turn = 3 AND place = {place}")
    with pytest.raises(StoreFailed, match="lacks turns after turn 0; restore it from a backup"):
        store.recover()


def test_destroyed_queues_leave_no_rows(server: Server, stores: Stores, store: Store, scope: str) -> None:
    store.commit(turn(1, chunks=[chunk(n, 1) for n in range(5000)], docs={1: b"doc"}, snapshot=b"state"))
    [(place,)] = server.ask("SELECT place FROM millpond.owner WHERE incarnation = %s", f"{scope}incarnation")
    stores.destroy("incarnation")
    for table in ("owner", "chunk", "doc", "journal", "snapshot"):
        assert server.ask(f"SELECT 1 FROM millpond.{table} WHERE place = %s", place) == []


# ---- how it is asked --------------------------------------------------------------------------------------


def test_a_commit_is_one_round_trip(stores: ScopedStores, store: Store, tmp_path: Path) -> None:
    store.commit(turn(1))
    with (tmp_path / "trace").open("wb") as trace:
        with stores.inner._connections.take() as connection:
            connection.pgconn.trace(trace.fileno())
        for number in (2, 300):
            store.commit(turn(2 if number == 2 else 3, chunks=[chunk(number << 40)], docs={number: b""}, snapshot=b"s"))
        connection.pgconn.untrace()
        sent = [line.split("\t")[3] for line in (tmp_path / "trace").read_text().splitlines() if "\tF\t" in line]
    assert sent == ["Bind", "Describe", "Execute", "Sync"] * 2


def test_durability_does_not_hang_on_the_servers_default(server: Server, make_stores: MakeStores) -> None:
    server.ask("ALTER ROLE postgres SET synchronous_commit = off")
    try:
        stores = make_stores()
        with stores.inner._connections.take() as connection:
            assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
    finally:
        server.ask("ALTER ROLE postgres RESET synchronous_commit")
