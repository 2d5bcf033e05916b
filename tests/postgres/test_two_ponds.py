"""Two processes with one queue, as after a pause or a restored copy: each acknowledges only what it has written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import millpond
from millpond import Pond, StoreSettings
from millpond.errors import OutcomeUnknown
from millpond.store.base import StoreFailed, Turn
from millpond.store.postgres import PostgresStore
from tests.postgres.server import Server
from tests.service.test_stores import texts

pytestmark = pytest.mark.slow


@pytest.fixture
def ponds(tmp_path: Path, server: Server) -> Iterator[tuple[Pond, Pond]]:
    """Copies of one data directory, with a queue of one partition in PostgreSQL."""
    stores = [
        StoreSettings(name="default", affinity=0.0),
        StoreSettings(name="pg", driver="postgres", url=server.url(), affinity=1.0),
    ]
    with millpond.open(tmp_path / "one", stores=stores) as pond:
        pond.create_queue("q", lease_timeout="1h")
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=shutil.ignore_patterns("socket"))
    with millpond.open(tmp_path / "one", stores=stores) as one, millpond.open(tmp_path / "two", stores=stores) as two:
        yield one, two
        one.delete_queue("q", force=True)


def test_what_a_former_owner_could_not_write_is_written_anew(ponds: tuple[Pond, Pond]) -> None:
    one, two = ponds
    ids = [pond.produce("q", [text])[0].id for pond, text in ((one, "a"), (two, "b"), (one, "c"), (two, "d"))]
    assert len(set(ids)) == 4
    assert sorted(texts(one)) == ["a", "b", "c", "d"]


def test_no_item_is_leased_to_the_consumers_of_both(ponds: tuple[Pond, Pond]) -> None:
    one, two = ponds
    one.produce("q", [str(number) for number in range(4)])
    two.stats("q")
    leased = [pond.lease("q", batch=1)[0] for pond in (one, two, one, two)]
    assert sorted(item.text for item in leased) == ["0", "1", "2", "3"]
    for pond, item in zip((two, one, two, one), leased, strict=True):
        assert pond.complete([item.lease])[0].ok
    assert texts(one) == texts(two) == []


def test_what_was_written_and_overtaken_is_in_doubt_and_done_once(
    ponds: tuple[Pond, Pond], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply is lost, and before the partition is read again another process goes on from there."""
    one, two = ponds
    one.produce("q", ["a"])
    commit = PostgresStore.commit

    def losing(store: PostgresStore, turn: Turn) -> None:
        commit(store, turn)
        monkeypatch.setattr(PostgresStore, "commit", commit)
        assert sorted(texts(two)) == ["a", "b"]
        store.close()
        raise StoreFailed("the connection is lost")

    monkeypatch.setattr(PostgresStore, "commit", losing)
    with pytest.raises(OutcomeUnknown, match="another process has had partition 0 meanwhile"):
        one.produce("q", ["b"], request_id="r")
    assert one.produce("q", ["b"], request_id="r")[0].duplicate is False
    assert texts(one) == []
