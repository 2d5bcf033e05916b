"""Driver, executors, Python processes and the server are killed, the queries go on from their checkpoints, and every
item arrives once: in Parquet, and in a second queue. `make torture-spark` does more of it, see tests/spark/torture.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.spark.torture.points import Query, Trigger, Victim, kill_at
from tests.spark.torture.victims import caller
from tests.spark.torture.world import Setup, World

TIMEOUT_S = 600  # for some starts of Spark, on a machine that is busy

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def test_batches_of_several_pages_survive_the_death_of_driver_and_server(tmp_path: Path) -> None:
    setup = Setup("pages", items_max=12_000, waves=(13_000, 75))
    kills = [
        kill_at("claim made, before the offset log", Victim.DRIVER, Query.PARQUET),
        kill_at("page read, reply lost", Victim.SERVER, Query.PARQUET),
        kill_at("a task's chunks staged", Victim.PYTHON, Query.QUEUE),
        kill_at("published, reply lost", Victim.SERVER, Query.QUEUE),
        kill_at("published, before the commit log", Victim.MACHINE, Query.QUEUE),
    ]
    with World(tmp_path, setup) as world:
        world.run(kills)


def test_batches_survive_the_death_of_executors(tmp_path: Path) -> None:
    setup = Setup("executors", executors=True, items_max=12_000, waves=(13_000,))
    kills = [
        kill_at("in the middle of read", Victim.EXECUTOR, Query.PARQUET),
        kill_at("chunk staged, reply lost", Victim.EXECUTOR, Query.QUEUE),
        kill_at("rows in Parquet, not committed", Victim.DRIVER, Query.PARQUET),
        kill_at("before a chunk is staged", Victim.SERVER, Query.QUEUE),
    ]
    with World(tmp_path, setup) as world:
        world.run(kills)


def test_the_last_batch_of_a_run_that_ends_survives_too(tmp_path: Path) -> None:
    setup = Setup("last", trigger=Trigger.NOW)
    kills = [
        kill_at("after initialOffset", Victim.PYTHON, Query.QUEUE),
        kill_at("last batch: before complete", Victim.DRIVER, Query.PARQUET),
        kill_at("before commit(end of N-1)", Victim.PYTHON, Query.PARQUET),
        kill_at("last batch: after complete", Victim.SERVER, Query.QUEUE),
    ]
    with World(tmp_path, setup) as world:
        world.run(kills)


def test_who_calls_is_told_by_both_ends_of_a_connection() -> None:
    """One port may have connections to several, and those that are over stay in the list for a minute."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        asked, over, never = [listener.getsockname()[1] for listener in listeners]
        first = stack.enter_context(_connection(0, over))
        port = first.getsockname()[1]
        stack.enter_context(_connection(port, asked))
        first.close()
        assert caller((port, asked), os.getsid(0)) == os.getpid()
        assert caller((port, over), os.getsid(0)) is None
        assert caller((port, never), os.getsid(0)) is None


def _connection(source: int, target: int) -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", source))
    one.connect(("127.0.0.1", target))
    return one
