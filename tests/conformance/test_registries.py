"""What store/base.py promises of a registry, on every backend."""

from __future__ import annotations

import time
from pathlib import Path

from millpond.model import Backoff, PartitionDefinition, QueueDefinition, QueueSettings
from millpond.store.base import Registry
from tests.conformance.stores import Backend, only


def definition(name: str, **changes: object) -> QueueDefinition:
    fields: dict[str, object] = {
        "incarnation": f"incarnation-of-{name}",
        "settings": QueueSettings(dead_queue="dead", backoff=Backoff(base=3.0, jitter=0.5), durability="relaxed"),
        "partitions": (PartitionDefinition(partition=0), PartitionDefinition(partition=4, store="b", read_only=True)),
        "created_at": 1,
        "updated_at": 2,
    }
    return QueueDefinition(name=name, **{**fields, **changes})  # type: ignore[arg-type]


def test_a_new_registry_is_empty(registry: Registry) -> None:
    assert registry.load() == []


def test_definitions_come_back_as_they_were_put_in_order_of_name(registry: Registry) -> None:
    one, two = definition("a/queue", paused=True, dirty=True, next_wake=77), definition("b")
    registry.put([two, one])
    assert registry.load() == [one, two]


def test_a_definition_replaces_the_one_of_the_same_name(registry: Registry) -> None:
    registry.put([definition("a"), definition("b")])
    registry.put([definition("a", updated_at=9)])
    assert registry.load() == [definition("a", updated_at=9), definition("b")]


def test_a_removed_queue_is_gone_and_removing_it_again_is_fine(registry: Registry) -> None:
    registry.put([definition("a"), definition("b")])
    registry.remove("a")
    registry.remove("a")
    assert registry.load() == [definition("b")]


def test_putting_nothing_is_fine(registry: Registry) -> None:
    registry.put([])
    assert registry.load() == []


def test_a_closed_registry_opens_again(registry: Registry) -> None:
    registry.put([definition("a")])
    registry.close()
    assert registry.load() == [definition("a")]


@only(lambda backend: backend.survives_restart)
def test_a_restart_finds_all_queues(backend: Backend, tmp_path: Path, registry: Registry) -> None:
    registry.put([definition("a"), definition("b")])
    registry.close()
    again = backend.registry(tmp_path)
    assert again.load() == [definition("a"), definition("b")]
    again.close()


def test_ten_thousand_queues_are_written_and_loaded_at_once(registry: Registry) -> None:
    """The time is bounded generously, to find what is quadratic; benchmarks measure."""
    definitions = [definition(f"namespace/queue-{number:05}") for number in range(10_000)]
    started = time.perf_counter()
    registry.put(definitions)
    registry.close()
    assert registry.load() == definitions
    assert time.perf_counter() - started < 5
