"""`millpond job`, `dlq` for jobs, and `schedule`, in this process. Attempts are made by hand: no worker runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.cli.job_logs import _next
from millpond.model import Retry
from millpond.worker.logs import Logs
from tests.cli.calls import Cli

pytestmark = pytest.mark.slow  # each opens a data directory again and again


def fail_once(cli: Cli, error: str = "exit code 3: boom", *, dead: bool = False) -> str:
    with cli.open() as pond:
        [item] = pond.lease("jobs", client_id="w1")
        pond.retry([Retry(lease=item.lease, error=error, dead=dead)])
        return item.id


def complete_one(cli: Cli, result: object) -> None:
    with cli.open() as pond:
        [item] = pond.lease("jobs", client_id="w1")
        pond.complete([item.lease], result=result)


# ---- job ----------------------------------------------------------------------------------------------------------


def test_a_job_is_shown_with_every_attempt(cli: Cli) -> None:
    cli.ok("enqueue", "exit 3", "--id", "a", "--backoff-base", "0")
    cli.ok("queue", "update", "jobs", "--backoff-base", "0")
    fail_once(cli)
    complete_one(cli, {"exit_code": 0, "output": "fine\n"})
    shown = cli.value("job", "show", "a")
    assert [(one["number"], one["how"], one["by"]) for one in shown["timeline"]] == [
        (1, "failed", "w1"),
        (2, "completed", "w1"),
    ]
    assert (shown["state"], shown["exit_code"], shown["attempts"]) == ("completed", 0, 2)
    assert "completed" in shown["explanation"]
    text = cli.ok("job", "show", "a")
    assert "exit code 3: boom" in text
    assert "attempts        2 of 3" in text


def test_an_error_is_told_only_where_it_is_what_the_job_is_about(cli: Cli) -> None:
    for id in ("done", "off", "bad"):
        cli.ok("enqueue", "exit 3", "--id", id, "--backoff-base", "0")
    cli.ok("queue", "update", "jobs", "--backoff-base", "0")
    for _ in range(3):
        fail_once(cli)
    cli.ok("job", "cancel", "off")
    assert cli("job", "result", "off").err.startswith("millpond: job off is cancelled; see")
    complete_one(cli, None)
    fail_once(cli, dead=True)
    rows = {line.split()[0]: line for line in cli.ok("list").splitlines()}
    assert {id: "boom" in rows[id] for id in ("done", "off", "bad")} == {"done": False, "off": False, "bad": True}
    assert {one["last_error"] for one in cli.value("list")} == {"exit code 3: boom"}
    assert "is dead: exit code 3: boom" in cli("job", "result", "bad").err


def test_attempts_that_did_not_count_and_those_after_a_redrive_are_told_apart(cli: Cli) -> None:
    cli.ok("enqueue", "exit 3", "--id", "a", "--max-retries", "1")
    with cli.open() as pond:
        [item] = pond.lease("jobs", client_id="w1")
        pond.retry([Retry(lease=item.lease, intent="defer")])
    fail_once(cli)
    cli.ok("dlq", "retry", "a")
    complete_one(cli, None)
    table = cli.ok("job", "show", "a").rpartition("ATTEMPT")[2].splitlines()[1:]
    assert [(line.split()[0], line.split()[4]) for line in table] == [
        ("-", "deferred"),
        ("1", "failed"),
        ("-", "redriven"),
        ("1", "completed"),
    ]


PROGRESS = [
    ({"fraction": 0.25, "done": 1, "total": 4, "note": "row 1"}, "25% (1 of 4) row 1"),
    ({"fraction": 0.3333}, "33.33%"),
    ({"fraction": 0.0, "note": "begun"}, "0% begun"),
    ("odd", '"odd"'),
]


def test_progress_is_shown_as_people_read_it(cli: Cli) -> None:
    cli.ok("enqueue", "true", "--id", "a")
    with cli.open() as pond:
        [item] = pond.lease("jobs")
        for version, (progress, shown) in enumerate(PROGRESS):
            pond.write_state(item.lease, {"progress": progress}, version=version)
            assert f"progress        {shown}\n" in cli.ok("job", "show", "a")


def test_a_job_is_explained_in_a_sentence(cli: Cli) -> None:
    cli.ok("enqueue", "true", "--id", "a")
    cli.ok("enqueue", "true", "--id", "b", "--after", "a")
    assert "no worker runs on queue jobs" in cli.ok("job", "explain", "a")
    assert cli.ok("job", "explain", "b") == "Job b is waiting for job a (pending) to complete.\n"
    assert cli.value("job", "explain", "b")["reason"] == "waiting_for_jobs"


def test_a_job_that_waits_can_be_released(cli: Cli) -> None:
    cli.ok("enqueue", "true", "--id", "a", "--delay", "1h")
    assert cli.value("list")[0]["run_at"] is not None
    cli.ok("job", "release", "a")
    assert "it is the next" in cli.ok("job", "explain", "a")


def test_a_result_is_there_once_the_job_has_completed(cli: Cli) -> None:
    cli.ok("enqueue", "true", "--id", "a")
    waits = cli("job", "result", "a")
    assert (waits.code, waits.out) == (1, "")
    assert "job a is pending" in waits.err
    complete_one(cli, {"exit_code": 0})
    assert cli.ok("job", "result", "a") == '{\n  "exit_code": 0\n}\n'
    assert cli.value("job", "result", "a", "--wait", "5s")["state"] == "completed"


def test_jobs_are_cancelled_by_id_or_by_state(cli: Cli) -> None:
    for id in ("a", "b", "c"):
        cli.ok("enqueue", "true", "--id", id)
    assert cli.value("job", "cancel", "a", "b", "--dry-run")["would_cancel"] == ["a", "b"]
    assert cli.value("job", "cancel", "a")["cancelled"] == ["a"]
    assert cli("job", "cancel", "--state", "pending").code == 2
    assert "2 jobs would be cancelled" in cli.ok("job", "cancel", "--state", "pending", "--dry-run")
    assert cli.value("job", "cancel", "--state", "pending", "--yes")["cancelled"] == ["b", "c"]
    assert cli.value("status")["counts"]["cancelled"] == 3


def test_a_running_job_is_told_to_stop(cli: Cli) -> None:
    cli.ok("enqueue", "true", "--id", "a")
    [item] = cli.value("lease", "jobs")
    assert cli("job", "cancel", "a").err == "job a is told to stop\n"
    assert "the item was cancelled" in cli("extend", item["lease"]).err


def test_a_job_that_is_not_there_is_three(cli: Cli) -> None:
    cli.ok("enqueue", "true", "--id", "a")
    for arguments in (["show"], ["explain"], ["cancel"], ["result"], ["logs"], ["logs", "-f"], ["release"]):
        ran = cli("job", *arguments, "gone")
        assert (ran.code, ran.out) == (3, ""), arguments
        assert "there is no job 'gone'" in ran.err
    assert cli("job", "cancel").code == 2


@pytest.mark.parametrize("looks", ["list", "list --state dead", "dlq list", "schedule list", "worker list"])
def test_before_the_first_job_there_is_nothing_to_list(cli: Cli, looks: str) -> None:
    assert cli.value(*looks.split()) == []
    ran = cli(*looks.split())
    assert (ran.code, ran.out) == (0, "")
    assert f"there is no data directory {cli.data} yet" in ran.err
    assert not cli.data.exists()


def test_before_the_first_job_there_is_a_status_and_nobody_to_stop(cli: Cli) -> None:
    assert set(cli.value("status")["counts"].values()) == {0}
    assert "no worker is running" in cli("worker", "stop").err
    assert (cli("list", "--queue", "reports").code, cli("list", "--data", "nowhere").code) == (3, 3)
    assert not cli.data.exists()


def test_the_log_of_an_attempt_is_shown(cli: Cli) -> None:
    cli.ok("enqueue", "true", "--id", "a")
    unseen = cli("job", "logs", "a")
    assert (unseen.code, unseen.out) == (3, "")
    assert "has not run yet" in unseen.err
    complete_one(cli, {"exit_code": 0, "log": "/elsewhere/1.log", "host": "other"})
    assert "on other; it is not here" in cli("job", "logs", "a").err
    other = cli.data / "logs/jobs@another/a"  # a job of the same id in another pond
    other.mkdir(parents=True)
    (other / "1.log").write_text("not mine\n")
    assert cli("job", "logs", "a").out == ""
    folder = cli.data / f"logs/jobs@{cli.value('queue', 'info', 'jobs')['incarnation']}/a"
    folder.mkdir(parents=True)
    for attempt in (1, 2):
        (folder / f"{attempt}.log").write_text(f"attempt {attempt}\n")
    assert cli.ok("job", "logs", "a", "--attempt", "1") == "attempt 1\n"
    assert cli.ok("job", "logs", "a", "-f") == "attempt 2\n"
    assert cli.value("job", "logs", "a")["output"] == "attempt 2\n"
    assert cli("job", "logs", "a", "-f", "--json").code == 2
    folder.rename(folder.parent / "forgotten")
    assert cli.ok("job", "logs", "forgotten") == "attempt 2\n"


def test_every_attempt_after_the_latest_is_followed(tmp_path: Path) -> None:
    logs, seen = Logs(tmp_path), list[Path]()
    folder = logs.folder("jobs", "a")
    folder.mkdir(parents=True)

    def write(*attempts: int) -> None:
        for attempt in attempts:
            (folder / f"{attempt}.log").write_text(f"attempt {attempt}\n")

    def numbers() -> list[int]:
        return [log.attempt for log in iter(lambda: _next(logs, "jobs", "a", None, seen), None)]

    assert numbers() == []
    write(1, 2)
    assert numbers() == [2]
    write(3, 4)
    assert numbers() == [3, 4]


# ---- dlq ----------------------------------------------------------------------------------------------------------


def test_dead_jobs_are_listed_shown_retried_and_purged(cli: Cli) -> None:
    for id in ("a", "b"):
        cli.ok("enqueue", "exit 3", "--id", id, "--max-retries", "1")
        fail_once(cli)
    cli.ok("queue", "create", "orders")
    dead = cli.value("dlq", "list")
    assert [(one["id"], one["state"], one["attempts"]) for one in dead] == [("a", "dead", 1), ("b", "dead", 1)]
    assert cli.ok("dlq", "list").splitlines()[1].split()[:3] == ["a", "jobs", "dead"]
    assert cli.value("dlq", "show", "a")["last_error"] == "exit code 3: boom"
    assert cli.value("dlq", "retry", "a") == [{"id": "a", "queue": "jobs", "state": "pending", "attempts": 0}]
    [job] = cli.value("list", "--state", "pending")
    assert (job["id"], job["attempts"]) == ("a", 0)
    assert cli("dlq", "retry", "a").code == 1
    assert cli("dlq", "show", "a").code == 1
    assert cli("dlq", "retry", "gone").code == 3
    assert cli("dlq", "retry").code == 2
    assert cli.value("dlq", "purge", "--dry-run")["would_remove"] == 1
    assert cli("dlq", "purge").code == 2
    assert cli.value("dlq", "purge", "--yes") == {"queue": "jobs", "removed": 1}
    assert cli.value("dlq", "list") == []


def test_all_dead_jobs_are_retried_and_other_queues_are_told_of(cli: Cli) -> None:
    for id in ("a", "b"):
        cli.ok("enqueue", "exit 3", "--id", id)
        fail_once(cli, dead=True)
    cli.ok("queue", "create", "orders")
    cli.ok("produce", "orders", "x")
    cli.ok("retry", cli.value("lease", "orders")[0]["lease"], "--dead")
    assert "1 dead item in orders: `millpond dlq list orders`" in cli("dlq", "list").err
    assert [one["queue"] for one in cli.value("dlq", "list", "--queues")] == ["jobs", "orders"]
    assert [one["id"] for one in cli.value("dlq", "retry", "--all")] == ["a", "b"]


# ---- schedule -----------------------------------------------------------------------------------------------------


def test_a_schedule_is_added_listed_paused_and_removed(cli: Cli) -> None:
    made = cli.value("schedule", "add", "backup", "--cron", "0 3 * * *", "--timezone", "Europe/Berlin", "./backup.sh")
    assert (made["name"], made["command"], made["timezone"]) == ("backup", "./backup.sh", "Europe/Berlin")
    cli.ok("schedule", "add", "ping", "--every", "5m", "--queue", "net", "--", "curl", "-f", "https://example.org")
    listed = cli.value("schedule", "list")
    assert [(one["name"], one["every"], one["command"]) for one in listed] == [
        ("backup", None, "./backup.sh"),
        ("ping", 300.0, "curl -f https://example.org"),
    ]
    assert cli.value("schedule", "pause", "ping")["paused"] is True
    assert "paused" in cli.ok("schedule", "list")
    assert cli.value("schedule", "resume", "ping")["next_at"] is not None
    assert cli("schedule", "add", "ping", "--every", "1m", "true").code == 1
    assert cli.value("schedule", "add", "ping", "--every", "1m", "--replace", "true")["every"] == 60
    assert cli.value("schedule", "remove", "ping", "--dry-run")["removed"] is False
    cli.ok("schedule", "remove", "ping")
    assert [one["name"] for one in cli.value("schedule", "list")] == ["backup"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["add", "x", "--cron", "* * * *", "true"], 2, "4 fields"),
        (["add", "x", "--cron", "99 * * * *", "true"], 2, "99"),
        (["add", "x", "--cron", "0 0 31 2 *", "true"], 2, "never comes"),
        (["add", "x", "--cron", "* * * * *", "--timezone", "Mars/Base", "true"], 2, "Mars/Base"),
        (["add", "x", "--every", "5m", "--timezone", "Mars/Base", "true"], 2, "Mars/Base"),
        (["add", "x", "--every", "-5m", "true"], 2, "--every"),
        (["add", "x", "--every", "0", "true"], 2, "0"),
        (["add", "x", "true"], 2, "--cron"),
        (["add", "x", "--every", "1m"], 2, "COMMAND"),
        (["add", "x", "--every", "1m", '{"id": "a", "command": "true"}'], 2, "no id"),
        (["add", "x", "--every", "1m", '{"command": "true", "expire_timeout": "5m"}'], 2, "no expire_timeout"),
        (["add", "no spaces", "--every", "1m", "true"], 2, "no spaces"),
        (["remove", "gone"], 3, "there is no schedule 'gone'"),
        (["pause", "gone"], 3, "there is no schedule 'gone'"),
    ],
)
def test_wrong_schedules_say_what_is_wrong(cli: Cli, arguments: list[str], code: int, words: str) -> None:
    cli.data.mkdir()
    ran = cli("schedule", *arguments)
    assert (ran.code, ran.out) == (code, ""), ran
    assert words in ran.err


# ---- completion, bench, demo --------------------------------------------------------------------------------------


def test_bench_measures_in_a_place_of_its_own(cli: Cli, tmp_path: Path) -> None:
    found = cli.value("bench", "--items", "100", "--batch", "10", "--dir", str(tmp_path))
    assert set(found["a_second"]) == {"produce", "lease", "complete", "produce_one_at_a_time"}
    assert list(tmp_path.iterdir()) == []


def test_demo_loses_nothing(cli: Cli) -> None:
    assert "nothing lost, nothing twice" in cli.ok("demo")
