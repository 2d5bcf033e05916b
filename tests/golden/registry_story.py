"""Makes the golden file of the registry's newest version: `python -m tests.golden.registry_story`, once a version.

The file is the database as SQL text, with its version: what SQLite makes of its pages is SQLite's business.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import apsw

from millpond.model import AuditEntry, Backoff, PartitionDefinition, QueueDefinition, QueueSettings, to_datetime
from millpond.store.sqlite_registry import REGISTRY_UPGRADES, SqliteRegistry
from tests.golden.story import FOLDER

QUEUES = [
    QueueDefinition(
        name="plain",
        incarnation="abcdefgh",
        settings=QueueSettings(),
        partitions=(PartitionDefinition(partition=0),),
        created_at=1_700_000_000_000,
        updated_at=1_700_000_000_000,
    ),
    QueueDefinition(
        name="team-a/rich",
        incarnation="ijkmnpqr",
        settings=QueueSettings(
            lease_timeout_ms=5_000,
            dead_queue="plain",
            backoff=Backoff(base=3.0, cap_ms=60_000, jitter=0.5),
            completed_retention_ms=3_600_000,
            durability="relaxed",
            reference="über",
        ),
        partitions=(PartitionDefinition(partition=1), PartitionDefinition(partition=4, store="b", read_only=True)),
        created_at=1_700_000_000_001,
        updated_at=1_700_000_000_002,
        paused=True,
        dirty=True,
        next_wake=1_700_000_000_003,
    ),
]


TABLES = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
OBJECTS = "SELECT sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' ORDER BY type = 'trigger', rowid"


def dumped(path: Path) -> str:
    connection = apsw.Connection(str(path))
    lines = [f"{sql};" for (sql,) in connection.execute(OBJECTS)]
    for (table,) in connection.execute(TABLES).fetchall():
        for row in connection.execute(f"SELECT * FROM {table} ORDER BY 1"):
            lines.append(f"INSERT INTO {table} VALUES ({', '.join(map(apsw.format_sql_value, row))});")
    lines.append(f"PRAGMA user_version = {connection.pragma('user_version')};")
    connection.close()
    return "\n".join(lines) + "\n"


ENTRIES = [
    AuditEntry(
        at=to_datetime(1_700_000_000_000),
        who="embedded",
        action="create",
        queue="plain",
        detail={"incarnation": "abcdefgh", "partitions": {"default": 1}},
    ),
    AuditEntry(at=to_datetime(1_700_000_000_001), who="ann", action="clear failed", queue="plain", error="no; try"),
    AuditEntry(
        at=to_datetime(1_700_000_000_002), who="local", action="delete", queue="old", detail={"incarnation": "zzzzzzzz"}
    ),
]


def tell(registry: SqliteRegistry) -> None:
    registry.put(QUEUES, ENTRIES[:2])
    registry.remove("old", "zzzzzzzz", ENTRIES[2:])


def write() -> None:
    with TemporaryDirectory() as folder:
        registry = SqliteRegistry(Path(folder))
        tell(registry)
        registry.close()
        (FOLDER / f"registry-v{len(REGISTRY_UPGRADES)}.sql").write_text(dumped(Path(folder) / "meta.db"))


if __name__ == "__main__":
    write()
