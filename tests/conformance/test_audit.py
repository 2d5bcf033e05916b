"""The audit log of a registry, and files of every version that was released."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from millpond.model import AuditEntry, to_datetime
from millpond.store.base import Registry, StoreFailed
from millpond.store.sqlite_registry import REGISTRY_UPGRADES, SqliteRegistry
from tests.conformance.stores import Backend, only
from tests.conformance.test_registries import definition
from tests.golden.registry_story import ENTRIES, QUEUES, dumped
from tests.golden.story import FOLDER


def entry(number: int, queue: str = "a") -> AuditEntry:
    detail = {"number": number, "deep": {"list": [1, "two"]}}
    return AuditEntry(at=to_datetime(number), who="ann", action="pause", queue=queue, detail=detail, error="why; what")


def numbers(registry: Registry, before: int | None = None, limit: int = 100, queue: str = "a") -> list[int]:
    return [one.detail["number"] for _, one in registry.audit(queue, before, limit)]


def test_entries_come_back_as_they_were_added_the_newest_first(registry: Registry) -> None:
    registry.put([definition("a")], [entry(1), entry(2, "b")])
    registry.put([], [entry(3), entry(4)])
    assert [one for _, one in registry.audit("a", None, 10)] == [entry(4), entry(3), entry(1)]
    assert numbers(registry, queue="b") == [2]
    assert registry.audit("c", None, 10) == []


def test_pages_lead_from_one_to_the_next(registry: Registry) -> None:
    registry.put([], [entry(number) for number in range(1, 8)])
    seen: list[int] = []
    before = None
    while page := registry.audit("a", before, 3):
        seen += [one.detail["number"] for _, one in page]
        before = page[-1][0]
        registry.put([], [entry(9)])  # what is added meanwhile does not shift them
    assert seen == [7, 6, 5, 4, 3, 2, 1]


def test_the_entries_of_a_removed_queue_stay_and_its_incarnation_is_known_to_have_gone(registry: Registry) -> None:
    registry.put([definition("a")], [entry(1)])
    registry.remove("a", "incarnation-of-a", [entry(2)])
    assert numbers(registry) == [2, 1]
    assert registry.gone(["incarnation-of-a", "other"]) == ["incarnation-of-a"]
    assert registry.gone([]) == []


@only(lambda backend: backend.survives_restart)
def test_entries_survive_a_restart(backend: Backend, tmp_path: Path, registry: Registry) -> None:
    registry.put([], [entry(1)])
    registry.close()
    again = backend.registry(tmp_path)
    assert numbers(again) == [1]
    again.close()


def test_a_change_and_its_entry_are_one_commit(tmp_path: Path) -> None:
    registry = SqliteRegistry(tmp_path)
    registry.load()
    with registry._connected() as connection:
        connection.execute("CREATE TEMP TRIGGER no BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'no'); END")
    with pytest.raises(StoreFailed):
        registry.put([definition("a")], [entry(1)])
    assert registry.load() == []
    registry.put([definition("a")], [entry(1)])
    assert (len(registry.load()), numbers(registry)) == (1, [1])
    registry.close()


@pytest.mark.parametrize("statement", ["DELETE FROM audit", "UPDATE audit SET queue = 'b'"])
def test_nobody_changes_or_removes_an_entry(tmp_path: Path, statement: str) -> None:
    registry = SqliteRegistry(tmp_path)
    registry.put([], [entry(1)])
    registry.close()
    connection = apsw.Connection(str(tmp_path / "meta.db"))
    with pytest.raises(apsw.ConstraintError, match="audit entries stay"):
        connection.execute(statement)
    connection.close()
    assert numbers(registry) == [1]
    registry.close()


@pytest.mark.parametrize("version", range(1, len(REGISTRY_UPGRADES) + 1))
def test_a_registry_of_every_version_is_read_and_brought_up_to_date(tmp_path: Path, version: int) -> None:
    connection = apsw.Connection(str(tmp_path / "meta.db"))
    connection.execute((FOLDER / f"registry-v{version}.sql").read_text())
    connection.close()
    registry = SqliteRegistry(tmp_path)
    assert registry.load() == QUEUES
    found = [one for _, one in registry.audit("plain", None, 10)]
    assert found == ([] if version < 2 else [ENTRIES[1], ENTRIES[0]])
    registry.put([], [entry(1)])
    assert numbers(registry) == [1]
    registry.close()


def test_the_newest_golden_file_is_what_is_written_today(tmp_path: Path) -> None:
    connection = apsw.Connection(str(tmp_path / "meta.db"))
    connection.execute((FOLDER / "registry-v1.sql").read_text())
    connection.close()
    registry = SqliteRegistry(tmp_path)
    registry.put(QUEUES, ENTRIES[:2])
    registry.remove("old", "zzzzzzzz", ENTRIES[2:])
    registry.close()
    assert dumped(tmp_path / "meta.db") == (FOLDER / f"registry-v{len(REGISTRY_UPGRADES)}.sql").read_text()
