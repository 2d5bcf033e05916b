"""A queue in the data directory and in PostgreSQL at once: what is left of it while the server is away, and after."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import millpond
from millpond import StoreSettings
from millpond.errors import OutcomeUnknown, Unavailable
from tests.postgres.server import Server
from tests.service.test_stores import change, statuses, texts, until

pytestmark = pytest.mark.slow


def at(server: Server, password: str = "") -> StoreSettings:
    user = "ann" if password else "postgres"
    return StoreSettings(name="pg", driver="postgres", url=server.url(user=user, password=password))


def test_a_queue_goes_on_while_the_server_is_away_and_loses_nothing(tmp_path: Path, own_server: Server) -> None:
    with millpond.open(tmp_path, stores=[at(own_server)]) as pond:
        pond.create_queue("q", partitions=4)
        assert statuses(pond) == {"default": {"open"}, "pg": {"open"}}
        for number in range(40):
            pond.produce("q", [str(number)])
        own_server.stop(signal.SIGQUIT)

        def produce(number: int) -> str | None:
            """What was on its way as the server went may be there or not, and its producer is told so."""
            try:
                pond.produce("q", [str(number)])
            except OutcomeUnknown:
                return str(number)
            return None

        with ThreadPoolExecutor(20) as pool:
            doubtful = {number for number in pool.map(produce, range(40, 60)) if number is not None}
        assert len(doubtful) < 20
        found = texts(pond)
        assert statuses(pond)["default"] == {"open"}
        until(pond, lambda: statuses(pond)["pg"] == {"failed"})
        own_server.start()
        until(pond, lambda: statuses(pond)["pg"] == {"open"})
        found += texts(pond)
        assert len(found) == len(set(found))
        assert {str(number) for number in range(60)} - doubtful <= set(found)


def test_what_never_reached_the_server_goes_elsewhere_at_once(tmp_path: Path, own_server: Server) -> None:
    """Nothing of it can have been written, so nobody waits for the server to come back and say so."""
    with millpond.open(tmp_path, stores=[at(own_server)]) as pond:
        pond.create_queue("q", partitions=2)
        for number in range(4):
            pond.produce("q", [str(number)])
        own_server.stop()  # its sessions are ended in good order: each is noticed before it is used
        for number in range(4, 20):
            pond.produce("q", [str(number)])
        assert statuses(pond)["pg"] == {"failed"}
        own_server.start()
        until(pond, lambda: statuses(pond)["pg"] == {"open"})
        assert sorted(texts(pond), key=int) == [str(number) for number in range(20)]


def test_a_server_that_is_away_at_the_start_is_no_reason_not_to_open(tmp_path: Path, own_server: Server) -> None:
    with millpond.open(tmp_path, stores=[at(own_server)]) as pond:
        pond.create_queue("q", partitions=2)
        pond.queue_info("q")  # each partition has been read by then
        for number in range(10):
            pond.produce("q", [str(number)])
    own_server.stop()
    with millpond.open(tmp_path, stores=[at(own_server)]) as pond:
        found = texts(pond)
        assert len(found) == 5
        with pytest.raises(Unavailable, match=r"store 'pg' cannot take partitions \(.*\); bring it back"):
            pond.create_queue("r", partitions=2)
        own_server.start()
        until(pond, lambda: statuses(pond)["pg"] == {"open"})
        assert sorted(found + texts(pond), key=int) == [str(number) for number in range(10)]
        pond.delete_queue("q")
    assert own_server.ask("SELECT count(*) FROM millpond.owner")[0][0] == 0


def test_wrong_credentials_are_told_without_the_password(tmp_path: Path, own_server: Server) -> None:
    own_server.ask("CREATE ROLE ann LOGIN PASSWORD 'right'")
    with millpond.open(tmp_path) as pond:
        with pytest.raises(Unavailable, match="store 'pg' cannot take partitions") as caught:
            change(pond, at(own_server, "wr0ng-s3cret"))
        assert "wr0ng-s3cret" not in caught.value.message
        assert "ann" in caught.value.message
        assert change(pond) == [], "nothing has changed"
