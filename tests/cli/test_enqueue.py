"""`millpond enqueue`, `list`, `status` and `config`, in this process: QueueCTL's part of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.calls import Cli

FIELDS = {"id", "command", "state", "attempts", "max_retries", "priority", "created_at", "updated_at", "last_error"}


def test_a_job_is_json_or_a_bare_command(cli: Cli) -> None:
    assert cli.ok("enqueue", '{"id": "job1", "command": "sleep 2"}') == "job1\n"
    made = cli.ok("enqueue", "echo hi").strip()
    assert cli.ok("enqueue", "echo", "a b", "--id", "words") == "words\n"
    jobs = cli.value("list")
    assert [(one["id"], one["command"]) for one in jobs] == [
        ("job1", "sleep 2"),
        (made, "echo hi"),
        ("words", "echo 'a b'"),
    ]
    assert set(jobs[0]) >= FIELDS
    assert (jobs[0]["state"], jobs[0]["attempts"], jobs[0]["max_retries"]) == ("pending", 0, 3)


def test_a_flag_fills_in_what_the_json_leaves_out(cli: Cli) -> None:
    cli.ok(
        "enqueue", '{"command": "a", "priority": 1, "delay": "1h"}', "--priority", "5", "--timeout", "90", "--id", "x"
    )
    [job] = cli.value("list", "--state", "pending")
    assert (job["id"], job["priority"], job["timeout"]) == ("x", 1, 90.0)
    assert job["run_at"] is not None


def test_what_queuectl_has_shown_can_be_enqueued(cli: Cli) -> None:
    shown = {"id": "j", "command": "true", "state": "pending", "attempts": 0, "max_retries": 5}
    cli.ok("enqueue", json.dumps(shown | {"created_at": "2025-11-04T10:30:00Z", "updated_at": "2025-11-04T10:30:00Z"}))
    assert cli.value("list")[0]["max_retries"] == 5


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (['{"id": "a", "command": '], 2, "the job is no JSON"),
        (['{"id": "a"}'], 2, "the job has no command"),
        (['{"command": ""}'], 2, "the job has no command"),
        (["   "], 2, "the job has no command"),
        (['{"comand": "x"}'], 2, "did you mean 'command'?"),
        (['{"command": "x", "max_retry": 1}'], 2, "did you mean 'max_retries'?"),
        (['{"command": "x", "max_retries": -1}'], 2, "max_retries is -1"),
        (['{"command": "x", "max_retries": "many"}'], 2, "$.max_retries"),
        (['{"command": 7}'], 2, "$.command"),
        (['{"command": "x", "timeout": -1}'], 2, "timeout is -1"),
        (['{"command": "x", "timeout": "soon"}'], 2, "timeout is 'soon'"),
        (['{"command": "x", "delay": 1, "run_at": "2030-01-01T00:00:00Z"}'], 2, "do not go together"),
        (['{"command": "x", "run_at": "tomorrow"}'], 2, "$.run_at"),
        (['{"command": "x", "after": ["gone"]}'], 3, "there is no job 'gone'"),
        (['{"id:', '"x"}'], 2, "in single quotes"),
        (["x", "--max-retries", "-1"], 2, "give a whole number of 0 or more"),
        (["x", "--delay", "-1"], 2, "--delay"),
        (["x", "--env", "novalue"], 2, "NAME=VALUE"),
        (["x", "--id", "no spaces"], 2, "no spaces"),
        (["x", "--queue", "a b"], 2, "a b"),
        (["x\udcff"], 2, "Unicode"),
        (["x", "--file", "y"], 2, "do not go together"),
        ([], 2, "there is no job"),
        (["--file", "gone"], 1, "No such file"),
    ],
)
def test_a_wrong_job_says_what_is_wrong_and_is_not_there(cli: Cli, arguments: list[str], code: int, words: str) -> None:
    ran = cli("enqueue", *arguments)
    assert (ran.code, ran.out) == (code, ""), ran
    assert words in ran.err
    assert not cli.data.exists() or cli.value("list") == []


def test_an_id_that_is_taken_is_a_failure_and_changes_nothing(cli: Cli) -> None:
    cli.ok("enqueue", "first", "--id", "a")
    ran = cli("enqueue", "second", "--id", "a")
    assert (ran.code, ran.out) == (1, "")
    assert "id 'a' is taken" in ran.err
    assert [one["command"] for one in cli.value("list")] == ["first"]


@pytest.mark.slow
def test_many_jobs_are_enqueued_from_lines(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text('{"id": "a", "command": "x"}\n\necho bare\n{"command": "y", "queue": "other"}\n')
    made = cli.value("enqueue", "--file", "jobs", "--priority", "3")
    assert (made["enqueued"], made["taken"], made["ids"][0]) == (3, [], "a")
    assert [(one["queue"], one["priority"]) for one in cli.value("list")] == [("jobs", 3), ("jobs", 3), ("other", 3)]
    again = cli("enqueue", "-", stdin='{"id": "a", "command": "x"}\n{"id": "b", "command": "x"}\n')
    assert (again.code, again.out) == (1, "b\n")
    assert "id 'a' is taken" in again.err


def test_a_wrong_line_is_named_and_none_is_enqueued(cli: Cli) -> None:
    ran = cli("enqueue", "-", stdin='{"command": "x"}\n{"command": \n')
    assert ran.code == 2
    assert "line 2: the job is no JSON" in ran.err
    assert not cli.data.exists()


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ('"id": "a"', "line 3: id 'a' is that of line 1 too"),
        ('"id": "a b"', "line 3: id is 'a b'"),
        ('"priority": 99999', "line 3: priority is 99999"),
        ('"key": ""', "line 3: key is empty"),
        ('"max_retries": 5000000000', "line 3: max_retries is 5000000000"),
        ('"queue": "x y"', "line 3: 'x y' is not a queue name"),
    ],
)
def test_what_a_queue_would_refuse_is_told_before_a_line_is_enqueued(cli: Cli, field: str, words: str) -> None:
    ran = cli("enqueue", "-", stdin=f'{{"id": "a", "command": "x"}}\n\n{{"command": "x", {field}}}\n')
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert "nothing was enqueued" in ran.err
    assert not cli.data.exists()


@pytest.mark.slow
def test_a_file_may_be_larger_than_a_request(cli: Cli) -> None:
    lines = "\n".join(f": {number} {'x' * 120_000}" for number in range(150))
    assert len(cli.ok("enqueue", "-", stdin=lines).split()) == 150
    assert cli.value("status")["counts"]["pending"] == 150


@pytest.mark.slow
def test_lines_that_wait_for_others_are_counted_and_told_in_order(cli: Cli) -> None:
    lines = ['{"id": "c", "command": "x", "after": ["p"]}', '{"id": "p", "command": "x"}']
    assert cli.ok("enqueue", "-", stdin="\n".join(lines)) == "c\np\n"
    ran = cli("enqueue", "-", stdin='{"command": "x"}\n{"command": "x", "after": ["gone"]}\n')
    assert (ran.code, ran.out) == (3, "")
    assert "stopped after 1 of 2 jobs" in ran.err
    assert len(cli.value("list")) == 3


@pytest.mark.slow
def test_jobs_are_listed_by_state_and_queue(cli: Cli) -> None:
    cli.ok("enqueue", "a", "--id", "a")
    cli.ok("enqueue", "b", "--id", "b", "--queue", "other")
    cli.ok("job", "cancel", "a")
    assert [one["id"] for one in cli.value("list", "--state", "cancelled")] == ["a"]
    assert [one["id"] for one in cli.value("list", "--queue", "other")] == ["b"]
    assert cli.value("list", "--state", "dead") == []
    assert cli.ok("list", "--limit", "1").splitlines()[1].split()[:3] == ["a", "jobs", "cancelled"]
    assert "there are more than these 1" in cli("list", "--limit", "1").err
    assert cli("list", "--state", "lost").code == 2
    assert cli("list", "--limit", "0").code == 2


def test_status_counts_every_state(cli: Cli) -> None:
    cli.ok("enqueue", "a")
    cli.ok("enqueue", "b", "--queue", "reports")
    cli.ok("queue", "create", "orders")
    cli.ok("produce", "orders", "no job")
    found = cli.value("status")
    assert found["counts"] == {
        "pending": 2,
        "processing": 0,
        "completed": 0,
        "failed": 0,
        "dead": 0,
        "cancelled": 0,
    }
    assert (found["active_workers"], found["workers"]) == (0, [])
    assert [(one["name"], one["jobs"]) for one in found["queues"]] == [
        ("jobs", True),
        ("reports", True),
        ("orders", False),
    ]
    shown = cli.ok("status")
    assert "no worker is running" in shown
    assert "pending     2" in shown


def test_reading_where_there_is_nothing_says_what_to_do(cli: Cli) -> None:
    for arguments in (["job", "show", "x"], ["dlq", "retry", "x"], ["queue", "list"]):
        ran = cli(*arguments)
        assert (ran.code, ran.out) == (3, ""), arguments
        assert "the first `millpond enqueue`" in ran.err
    assert not cli.data.exists()


# ---- config -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_settings_are_kept_and_count_for_jobs_enqueued_afterwards(cli: Cli) -> None:
    assert cli.value("config", "list") == {"max_retries": 3, "backoff_base": 2, "poll_interval": 1}
    cli.ok("enqueue", "a", "--id", "before")
    cli.ok("config", "set", "max-retries", "7")
    cli.ok("config", "set", "backoff_base", "1.5")
    cli.ok("config", "set", "poll-interval", "5")
    assert cli.value("config", "list") == {"max_retries": 7, "backoff_base": 1.5, "poll_interval": 5}
    assert cli.ok("config", "get", "max-retries") == "7\n"
    assert cli.value("config", "get", "backoff-base") == {"backoff_base": 1.5}
    cli.ok("enqueue", "b", "--id", "after")
    assert [one["max_retries"] for one in cli.value("list")] == [3, 7]
    assert "max_retries    7" in cli.ok("config", "list")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["set", "max-retries", "-1"], 2, "max_retries is '-1'; give a whole number"),
        (["set", "max-retries", "2.5"], 2, "give a whole number"),
        (["set", "backoff-base", "nan"], 2, "give a number"),
        (["set", "max-retry", "1"], 2, "did you mean max_retries?"),
        (["get", "colour"], 2, "use one of max_retries"),
    ],
)
def test_wrong_settings_are_refused(cli: Cli, arguments: list[str], code: int, words: str) -> None:
    ran = cli("config", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err
    assert not cli.data.exists()
