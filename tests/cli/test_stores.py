"""`millpond queue audit`, and the stores of a configuration, in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.calls import Cli

pytestmark = pytest.mark.slow  # each opens a data directory again and again


def configure(cli: Cli, text: str) -> None:
    file = Path(cli.data).parent / "pond.toml"
    file.write_text(text)
    cli.setenv("MILLPOND_CONFIG", str(file))


def test_what_was_done_to_a_queue_is_shown_the_newest_first(cli: Cli) -> None:
    cli.ok("queue", "create", "orders", "--partitions", "2")
    cli.ok("queue", "pause", "orders")
    cli.ok("produce", "orders", "one")
    cli.ok("queue", "clear", "orders", "--yes")
    cli.ok("queue", "delete", "orders")
    lines = [line.split() for line in cli.ok("queue", "audit", "orders").splitlines()]
    assert [line[:2] for line in lines[:1]] == [["TIME", "(UTC)"]]
    assert [line[3] for line in lines[1:]] == ["delete", "clear", "clear", "pause", "create"]
    assert lines[2][3:] == ["clear", "done", "removed=ready:1,scheduled:0,retrying:0"] or "removed=" in lines[2][5]
    assert "partitions=default:2" in lines[-1]
    assert [one["action"] for one in cli.value("queue", "audit", "orders", "--limit", "2")] == ["delete", "clear done"]
    assert cli("queue", "audit", "none").code == 3
    assert cli("queue", "audit", "orders", "--limit", "0").code == 2


def test_commands_use_the_stores_of_the_configuration(cli: Cli) -> None:
    configure(cli, "[[stores]]\nname = 'b'\ndriver = 'sqlite'\npath = 'b'\n")
    made = cli.value("queue", "create", "orders", "--partitions", "2")
    assert [one["store"] for one in made["partitions"]] == ["default", "b"]
    assert "b" in cli.ok("queue", "stats", "orders")


def test_config_check_shows_stores_without_their_passwords(cli: Cli) -> None:
    pytest.importorskip("psycopg")
    configure(
        cli,
        "[[stores]]\nname = 'pg'\ndriver = 'postgres'\nurl = 'postgresql://u:secret@h/d'\naffinity = 0.5\n"
        "[[stores]]\nname = 'default'\naffinity = 0\n",
    )
    ran = cli("config", "check")
    assert (ran.code, "secret" in ran.out + ran.err) == (0, False)
    assert "stores.pg" in ran.out
    value = cli.value("config", "check")["config"]
    assert value["stores.pg"]["value"] == {"driver": "postgres", "url": "postgresql://u:***@h/d", "affinity": 0.5}
    assert value["stores.default"]["value"] == {"affinity": 0.0}


def test_a_driver_that_is_not_installed_is_told_with_what_installs_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith("millpond.store.postgres")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    configure(cli, "[[stores]]\nname = 'pg'\ndriver = 'postgres'\nurl = 'postgresql://h/d'\n")
    for words in (("config", "check"), ("queue", "list")):
        cli.data.mkdir(exist_ok=True)
        ran = cli(*words)
        assert ran.code == 2
        assert (
            "store 'pg' needs psycopg, which is not here; install it with: pip install 'millpond[postgres]'" in ran.err
        )
