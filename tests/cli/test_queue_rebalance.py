"""`millpond queue rebalance`, in this process."""

from __future__ import annotations

import pytest

from millpond.blocking import Pond
from millpond.model import QueueInfo
from millpond.queue import draining
from tests.cli.calls import Cli
from tests.crash.doomed_rebalance import at_once

pytestmark = pytest.mark.slow  # each opens a data directory again and again


def fill_two(cli: Cli, queue: str) -> None:
    """An item into each of two partitions: both are awake when the first is produced."""
    with cli.open() as pond:
        pond.stats(queue)
        for text in ("one", "two"):
            pond.produce(queue, [text])


def test_a_rebalance_is_planned_done_and_shown(cli: Cli) -> None:
    cli.ok("queue", "create", "orders")
    planned = cli.value("queue", "rebalance", "orders", "--partitions", "3", "--dry-run")
    assert (planned["status"], planned["added"], planned["stores"]) == ("planned", [1, 2], {"default": 3})
    assert cli.value("queue", "rebalance", "orders", "--partitions", "3", "--wait")["status"] == "done"
    assert "rebalance" in cli.ok("queue", "info", "orders")
    told = cli("queue", "rebalance", "orders")
    assert (told.code, told.err) == (0, "orders has 3 partitions (3 in default); there is nothing to do\n")


def test_a_rebalance_that_runs_is_shown_and_stands_in_the_way_of_another(cli: Cli) -> None:
    cli.ok("queue", "create", "orders", "--partitions", "2")
    fill_two(cli, "orders")
    assert (
        "0 new partitions; 1 old one with 1 item to be removed"
        in cli("queue", "rebalance", "orders", "--partitions", "1").err
    )
    assert "to 1 partition: 0 of 1 old partition removed, 1 item left (1 ready)" in cli.ok("queue", "info", "orders")
    refused = cli("queue", "rebalance", "orders", "--partitions", "4")
    assert refused.code == 1
    assert "rebalanced already, with 0 of 1 old partitions removed and 1 items left in them; wait" in refused.err
    assert "draining" in cli.ok("queue", "stats", "orders")


def test_all_queues_are_rebalanced_whatever_becomes_of_one(cli: Cli) -> None:
    for name in ("a", "b", "c"):
        cli.ok("queue", "create", name, "--partitions", "2")
    fill_two(cli, "b")
    cli.ok("queue", "rebalance", "b", "--partitions", "1")
    ran = cli("queue", "rebalance", "--all", "--partitions", "3")
    assert ran.code == 1
    assert "b: queue 'b' is being rebalanced" in ran.err
    assert "a has 3 partitions" in ran.err
    assert "c has 3 partitions" in ran.err


def test_a_wait_ends_when_the_old_partitions_are_gone(cli: Cli) -> None:
    """Nothing was ever completed in them, so nobody can come for that."""
    cli.ok("queue", "create", "orders", "--partitions", "3")
    done = cli.value("queue", "rebalance", "orders", "--partitions", "1", "--wait")
    assert (done["status"], done["removed"]) == ("done", [1, 2])


def test_a_wait_is_for_one_that_runs_already_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.ok("queue", "create", "orders", "--partitions", "2")
    fill_two(cli, "orders")
    cli.ok("queue", "rebalance", "orders", "--partitions", "1")

    look = Pond.queue_info

    def look_and_empty(pond: Pond, name: str) -> QueueInfo:
        told = look(pond, name)
        pond.clear(name)
        return told

    monkeypatch.setattr(Pond, "queue_info", look_and_empty)
    monkeypatch.setattr(draining, "removable_at", at_once)
    ran = cli("queue", "rebalance", "orders", "--partitions", "3", "--wait")
    assert ran.code == 0
    assert "orders is being rebalanced already; when that is done, this one begins" in ran.err
    assert "orders has 3 partitions (3 in default): 2 new partitions, 0 old ones removed" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [[], ["orders", "--all"], ["orders", "--partitions", "x"], ["orders", "--partitions", "0"], ["--partitions", "2"]],
)
def test_wrong_arguments_are_refused(cli: Cli, arguments: list[str]) -> None:
    cli.ok("queue", "create", "orders")
    assert cli("queue", "rebalance", *arguments).code == 2


def test_an_unknown_queue_is_not_found(cli: Cli) -> None:
    cli.ok("queue", "create", "orders")
    assert cli("queue", "rebalance", "mail").code == 3
