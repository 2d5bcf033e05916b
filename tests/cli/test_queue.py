"""`millpond queue` and `millpond claim`, in this process."""

from __future__ import annotations

import pytest

from tests.cli.calls import Cli

pytestmark = pytest.mark.slow  # each opens a data directory again and again


def test_a_queue_is_created_shown_changed_and_deleted(cli: Cli) -> None:
    made = cli.value("queue", "create", "orders", "--lease-timeout", "5m", "--backoff-base", "3", "--partitions", "2")
    assert (made["name"], made["lease_timeout"], made["backoff"]["base"]) == ("orders", 300.0, 3.0)
    assert len(made["partitions"]) == 2
    changed = cli.value("queue", "update", "orders", "--max-attempts", "0", "--backoff-cap", "10")
    assert (changed["max_attempts"], changed["backoff"], changed["lease_timeout"]) == (
        0,
        {"base": 3.0, "cap": 10.0, "jitter": 0.0},
        300.0,
    )
    shown = cli.ok("queue", "info", "orders")
    assert "max attempts    unlimited" in shown
    assert "lease timeout   5m" in shown
    assert cli.value("queue", "delete", "orders")["deleted"] is True
    assert cli("queue", "info", "orders").code == 3


def test_a_queue_that_is_there_is_an_error_unless_it_may_be(cli: Cli) -> None:
    cli.ok("queue", "create", "orders")
    assert cli("queue", "create", "orders").code == 1
    assert cli.value("queue", "create", "orders", "--if-missing", "--max-attempts", "9")["max_attempts"] == 5


def test_a_queue_that_is_created_for_jobs_is_as_one_that_a_job_has_made(cli: Cli) -> None:
    cli.ok("enqueue", "true", "--queue", "made")
    cli.ok("queue", "create", "reports", "--jobs", "--max-attempts", "9")
    cli.ok("queue", "create", "jobs")
    own = ("name", "created_at", "updated_at", "partitions", "incarnation")
    made, reports, jobs = (
        {name: value for name, value in cli.value("queue", "info", queue).items() if name not in own}
        for queue in ("made", "reports", "jobs")
    )
    assert reports == made | {"max_attempts": 9}
    assert jobs == made
    assert cli("queue", "create", "more", "--jobs", "--reference", "mine").code == 2


def test_queues_are_listed_with_what_is_in_them(cli: Cli) -> None:
    for name in ("team-a/x", "team-a/y", "z"):
        cli.ok("queue", "create", name)
    cli.ok("produce", "team-a/x", "one")
    cli.ok("queue", "pause", "z")
    lines = cli.ok("queue", "list").splitlines()
    assert [line.split() for line in lines] == [
        ["QUEUE", "READY", "WAITING", "LEASED", "COMPLETED", "DEAD", "STATUS"],
        ["team-a/x", "1", "0", "0", "0", "0", "-"],
        ["team-a/y", "0", "0", "0", "0", "0", "-"],
        ["z", "0", "0", "0", "0", "0", "paused"],
    ]
    assert [one["name"] for one in cli.value("queue", "list", "team-a/")] == ["team-a/x", "team-a/y"]


def test_a_paused_queue_leases_nothing_until_it_is_resumed(cli: Cli) -> None:
    cli.ok("queue", "create", "orders")
    cli.ok("produce", "orders", "one")
    cli.ok("queue", "pause", "orders")
    assert cli("lease", "orders").code == 3
    assert "orders (paused)" in cli.ok("queue", "stats", "orders")
    cli.ok("queue", "resume", "orders")
    assert cli("lease", "orders").code == 0


def test_what_destroys_can_be_tried_first_and_asks(cli: Cli) -> None:
    cli.ok("queue", "create", "orders")
    cli.ok("produce", "orders", "--lines", stdin="a\nb\n")
    assert cli.value("queue", "delete", "orders", "--dry-run")["items"] == 2
    assert "2 items (2 ready)" in cli.ok("queue", "delete", "orders", "--dry-run")
    assert cli.value("queue", "clear", "orders", "--dry-run")["removed"] == {"ready": 2, "scheduled": 0, "retrying": 0}
    refused = cli("queue", "clear", "orders")
    assert (refused.code, refused.err) == (2, "millpond: nothing was removed; say --yes\n")
    assert cli("queue", "delete", "orders").code == 1
    assert cli.value("queue", "stats", "orders")["counts"]["ready"] == 2
    assert cli.value("queue", "clear", "orders", "--yes")["removed"]["ready"] == 2
    cli.ok("produce", "orders", "c")
    cli.ok("queue", "delete", "orders", "--force")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["create", "a b"], 2, "a b"),
        (["create", "orders", "--max-attempts", "-1"], 2, "give a whole number of 0 or more"),
        (["create", "orders", "--lease-timeout", "soon"], 2, "give a duration"),
        (["create", "orders", "--dead-queue", "nowhere"], 2, "does not exist"),
        (["update", "gone", "--max-attempts", "1"], 3, "gone"),
        (["update", "gone"], 2, "nothing to change was named"),
        (["update", "gone", "--dead-queue", "x", "--no-dead-queue"], 2, "do not go together"),
        (["stats", "gone"], 3, "gone"),
        (["clear", "gone", "--yes"], 3, "gone"),
        (["clear", "gone", "--state", "nonsense"], 2, "invalid choice"),
    ],
)
def test_wrong_calls_say_what_is_wrong(cli: Cli, arguments: list[str], code: int, words: str) -> None:
    cli.data.mkdir()
    ran = cli("queue", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err


def test_a_claim_is_listed_and_released(cli: Cli) -> None:
    cli.ok("queue", "create", "orders")
    cli.ok("produce", "orders", "--lines", stdin="a\nb\n")
    with cli.open() as pond:
        pond.claim("orders", "left-behind", owner="spark")
    assert [(one["claim_id"], one["items"]) for one in cli.value("claim", "list", "orders")] == [("left-behind", 2)]
    assert "left-behind  2" in cli.ok("claim", "list", "orders")
    assert cli("claim", "release", "orders", "left-behind").code == 2
    assert cli.value("claim", "release", "orders", "left-behind", "--dry-run")["items"] == 2
    assert cli.value("claim", "release", "orders", "left-behind", "--yes")["items"] == 2
    assert cli("claim", "release", "orders", "left-behind", "--yes").code == 3
    assert len(cli.value("lease", "orders", "--batch", "2")) == 2
