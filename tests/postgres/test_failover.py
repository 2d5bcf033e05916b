"""A standby takes over from a server that is gone: a store that names both goes on with all that was acknowledged."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import millpond
from millpond import StoreSettings
from tests.postgres.server import USER, Server, Standby
from tests.service.test_stores import texts

pytestmark = pytest.mark.slow


@pytest.fixture
def standby(own_server: Server) -> Iterator[Standby]:
    """Has each commit before it is acknowledged."""
    made = Standby(own_server)
    made.start()
    own_server.ask("ALTER SYSTEM SET synchronous_standby_names = '*'")
    own_server.ask("SELECT pg_reload_conf()")
    own_server.until("SELECT 1 FROM pg_stat_replication WHERE sync_state = %s", "sync")
    yield made
    made.remove()


def test_a_synchronous_standby_that_takes_over_has_all_that_was_acknowledged(
    tmp_path: Path, own_server: Server, standby: Standby
) -> None:
    servers = f"127.0.0.1:{own_server.port},127.0.0.1:{standby.port}"
    url = f"postgresql://{USER}@{servers}/postgres?target_session_attrs=read-write"
    stores = [StoreSettings(name="default", affinity=0.0), StoreSettings(name="pg", driver="postgres", url=url)]
    with millpond.open(tmp_path, stores=stores) as pond:
        pond.create_queue("q", partitions=2, lease_timeout="1h")
        for number in range(20):
            pond.produce("q", [str(number)])
        leased = pond.lease("q", batch=10)
        pond.complete(leased[:5])
        own_server.stop(signal.SIGQUIT)
        standby.promote()
        for number in range(20, 40):
            pond.produce("q", [str(number)])
        assert all(result.ok for result in pond.complete(leased[5:]))
        done = [item.text for item in leased]
        assert sorted(done + texts(pond), key=int) == [str(number) for number in range(40)]
