"""`millpond produce`, `lease`, `complete`, `retry`, `extend`, `state` and `tail`, in this process."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millpond.model import PAYLOAD_BYTES_MAX
from tests.cli.calls import Cli

pytestmark = pytest.mark.slow  # each opens a data directory again and again


@pytest.fixture
def orders(cli: Cli) -> Cli:
    cli.ok("queue", "create", "orders", "--completed-retention", "1h", "--backoff-base", "0")
    return cli


# ---- produce ------------------------------------------------------------------------------------------------------


def test_an_item_is_produced_from_an_argument_stdin_or_a_file(orders: Cli, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"\x89PNG\0")
    ids = [
        orders.ok("produce", "orders", "one", "--kind", "text", "--priority", "-1").strip(),
        orders.ok("produce", "orders", "-", stdin="two\nlines\n").strip(),
        orders.ok("produce", "orders", "--file", "cat.png", "--id", "cat").strip(),
        orders.ok("produce", "orders", stdin="four").strip(),
    ]
    leased = orders.value("lease", "orders", "--batch", "9")
    assert [one["id"] for one in leased] == ids
    assert [one.get("text") or one["bytes"] for one in leased] == ["one", "two\nlines\n", "iVBORwA=", "four"]


def test_a_key_that_is_taken_adds_nothing_and_can_be_a_failure(orders: Cli) -> None:
    first = orders.ok("produce", "orders", "a", "--key", "k").strip()
    again = orders("produce", "orders", "b", "--key", "k")
    assert (again.code, again.out.strip()) == (0, first)
    assert "was there already" in again.err
    assert orders("produce", "orders", "b", "--key", "k", "--on-conflict", "reject").code == 1
    assert orders.value("produce", "orders", "b", "--key", "k")["duplicate"] is True


def test_lines_are_items(orders: Cli) -> None:
    many = "".join(f"order {number}\n\n" for number in range(2_500))
    assert orders.value("produce", "orders", "--lines", stdin=many) == {
        "queue": "orders",
        "produced": 2_500,
        "duplicates": 0,
    }
    assert orders.value("queue", "stats", "orders")["counts"]["ready"] == 2_500
    assert orders.value("lease", "orders")[0]["text"] == "order 0"


def test_a_line_that_is_too_long_is_named_and_those_before_it_are_kept(orders: Cli) -> None:
    lines = b"x\n" * 1_500 + b"y" * (PAYLOAD_BYTES_MAX + 1) + b"\nz\n"
    ran = orders("produce", "orders", "--lines", stdin=lines)
    assert ran.code == 2
    assert "line 1501 is longer" in ran.err
    assert "stopped after 1,000 items" in ran.err
    assert orders.value("queue", "stats", "orders")["counts"]["ready"] == 1_000


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["orders", "a", "--file", "b"], 2, "the payload is from one place"),
        (["orders", "--lines", "--key", "k"], 2, "name one item"),
        (["orders", "a", "--delay", "-5s"], 2, "--delay: is '-5s'; give a duration"),
        (["orders", "a", "--delay", "5s", "--at", "2026-01-01"], 2, "do not go together"),
        (["orders", "a", "--at", "tomorrow"], 2, "give an instant"),
        (["orders", "a", "--priority", "99999"], 2, "from -32767 to 32767"),
        (["orders", "a", "--id", "no spaces"], 2, "no spaces"),
        (["orders", "--file", "gone"], 1, "No such file"),
        (["gone", "a"], 3, "gone"),
    ],
)
def test_wrong_produces_say_what_is_wrong(orders: Cli, arguments: list[str], code: int, words: str) -> None:
    ran = orders("produce", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err


# ---- lease and what follows ---------------------------------------------------------------------------------------


def test_a_leased_item_is_completed_with_a_result(orders: Cli) -> None:
    id = orders.ok("produce", "orders", "one").strip()
    [item] = orders.value("lease", "orders")
    assert orders.value("complete", item["lease"], "--result", '{"pages": 12}')[0]["ok"] is True
    with orders.open() as pond:
        assert pond.get_item("orders", id).result == {"pages": 12}


def test_a_table_of_leased_items_has_each_under_its_name(orders: Cli) -> None:
    orders.ok("produce", "orders", "one order")
    head, row = orders.ok("lease", "orders").splitlines()
    assert row[head.index("PAYLOAD") :] == "one order"
    assert orders("complete", row[head.index("LEASE ") :].split()[0]).code == 0


def test_the_lease_may_be_in_the_environment(orders: Cli) -> None:
    orders.ok("produce", "orders", "one")
    orders.setenv("MILLPOND_LEASE", orders.value("lease", "orders")[0]["lease"])
    assert orders.ok("state", '{"page": 1}') == "1\n"
    assert orders("state", '{"page": 2}').code == 1
    assert orders.ok("state", "-", "--version", "1", stdin='{"page": 2}') == "2\n"
    assert "extended 1 of 1, until" in orders("extend", "--lease-timeout", "10m").err
    assert orders("retry", "--error", "boom").code == 0
    [item] = orders.value("lease", "orders")
    assert (item["state_doc"], item["last_error"], item["attempts"]) == ({"page": 2}, "boom", 2)
    lost = orders("complete")
    assert lost.code == 1
    assert "lease" in lost.err


def test_a_deferred_item_has_its_attempt_back_and_a_dead_one_is_dead(orders: Cli) -> None:
    orders.ok("produce", "orders", "one")
    orders.ok("retry", orders.value("lease", "orders")[0]["lease"], "--defer")
    [item] = orders.value("lease", "orders")
    assert item["attempts"] == 1
    orders.ok("retry", item["lease"], "--dead", "--error", "no such order")
    assert orders.value("queue", "stats", "orders")["counts"]["dead"] == 1


def test_many_leases_are_completed_from_stdin_and_bad_ones_say_why(orders: Cli) -> None:
    orders.ok("produce", "orders", "--lines", stdin="a\nb\nc\n")
    leases = [one["lease"] for one in orders.value("lease", "orders", "--batch", "3")]
    ran = orders("complete", "-", stdin="\n".join([*leases, "nonsense"]))
    assert ran.code != 0
    assert "nonsense" in ran.err
    assert orders("complete", *leases).code == 0


def test_an_empty_queue_is_three(orders: Cli) -> None:
    ran = orders("lease", "orders")
    assert (ran.code, ran.out, ran.err) == (3, "", "there is nothing to lease in orders\n")
    assert orders.value("lease", "orders", code=3) == []


def test_a_payload_file_that_cannot_be_written_gives_the_item_back(orders: Cli) -> None:
    orders.ok("produce", "orders", "one")
    ran = orders("lease", "orders", "--payload-file", "no/such/folder/x")
    assert ran.code == 1
    assert "back in its queue" in ran.err
    [item] = orders.value("lease", "orders")
    assert item["attempts"] == 1


def test_an_item_that_cannot_be_told_of_is_given_back(orders: Cli) -> None:
    orders.ok("produce", "orders", "one")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "millpond.cli", "lease", "orders", "--json"]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 1
    assert "No space left" in ran.stderr
    [item] = orders.value("lease", "orders")
    assert item["attempts"] == 1


NASTY = 'it\'s "$(touch gone)" `touch gone` \\ ; touch gone\nsecond line'


def test_what_is_exported_is_safe_to_evaluate(orders: Cli, tmp_path: Path) -> None:
    orders.ok("produce", "orders", NASTY, "--correlation-id", "a'b$(touch gone)")
    exported = orders.ok("lease", "orders", "--export")
    program = exported + 'printf "%s|%s" "$MILLPOND_PAYLOAD" "$MILLPOND_CORRELATION_ID"'
    shell = shutil.which("dash") or "sh"
    ran = subprocess.run([shell, "-ec", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ran.stdout == f"{NASTY}|a'b$(touch gone)"
    assert not (tmp_path / "gone").exists()


def test_a_payload_that_is_no_text_goes_to_a_file(orders: Cli, tmp_path: Path) -> None:
    orders.ok("produce", "orders", "-", stdin=b"\xff\0")
    orders.ok("produce", "orders", "-", stdin=b"\xff\0")
    bare = orders("lease", "orders", "--export")
    assert "take it with --payload-file" in bare.err
    assert "MILLPOND_PAYLOAD=" not in bare.out
    exported = orders.ok("lease", "orders", "--export", "--payload-file", "x")
    assert f"export MILLPOND_PAYLOAD_FILE={tmp_path / 'x'}" in exported
    assert (tmp_path / "x").read_bytes() == b"\xff\0"
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("arguments", [["orders"], ["gone"], ["orders", "--batch", "2"]])
def test_evaluating_the_exports_of_nothing_fails(orders: Cli, arguments: list[str]) -> None:
    ran = orders("lease", *arguments, "--export")
    assert ran.code != 0
    ended = subprocess.run(["sh", "-c", f'eval "{ran.out}"'], check=False)
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["complete"], 2, "there is no lease"),
        (["complete", "nonsense"], 2, "nonsense"),
        (["complete", "a", "b", "--result", "1"], 2, "of one item"),
        (["complete", "a", "--result", "{"], 2, "is no JSON"),
        (["state", "a", "{"], 2, "is no JSON"),
        (["retry", "a", "--delay", "1s", "--at", "2026-01-01"], 2, "do not go together"),
        (["lease", "orders", "--batch", "0"], 2, "from 1 to 1000"),
        (["lease", "orders", "--wait", "1d"], 2, "wait"),
    ],
)
def test_wrong_calls_of_holders_say_what_is_wrong(orders: Cli, arguments: list[str], code: int, words: str) -> None:
    ran = orders(*arguments)
    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err


# ---- tail ---------------------------------------------------------------------------------------------------------


def test_tail_tells_what_has_happened_with_the_items_own_ids(orders: Cli) -> None:
    orders.ok("produce", "orders", "one", "--id", "first")
    orders.ok("produce", "orders", "two", "--id", "second")
    orders.ok("retry", orders.value("lease", "orders", "--client-id", "me")[0]["lease"], "--delay", "1h")
    events = orders.value("tail", "orders", "--once", "--payload")
    assert [(one["why"], one["id"], one["to"], one["who"], one["payload"]) for one in events] == [
        ("produced", "first", "ready", None, "one"),
        ("produced", "second", "ready", None, "two"),
        ("leased", "first", "leased", "me", None),
        ("failure", "first", "retrying", "me", None),
    ]
    assert [one["why"] for one in orders.value("tail", "orders", "--once", "-n", "1")] == ["failure"]
    assert [one["why"] for one in orders.value("tail", "orders", "--once", "--id", "second")] == ["produced"]
    assert len(orders.ok("tail", "orders", "--once").splitlines()) == 4


def test_tail_follows_until_it_is_interrupted(orders: Cli) -> None:
    command = [sys.executable, "-m", "millpond.cli", "tail", "orders", "-n", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stderr is not None
        assert following.stdout is not None
        assert following.stderr.readline() == "following orders; end with Ctrl-C\n"
        id = orders.ok("produce", "orders", "one").strip()
        event = json.loads(following.stdout.readline())
        assert (event["id"], event["why"], event["to"]) == (id, "produced", "ready")
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 130


def test_what_a_producer_wrote_does_not_reach_the_terminal_as_it_is(orders: Cli) -> None:
    orders.ok("produce", "orders", "\x1b[2Jgone\nline")
    assert "\\x1b[2Jgone" in orders.ok("tail", "orders", "--once", "--payload")
    shown = orders.ok("lease", "orders")
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 2
