"""`[[stores]]`: what is read of them, and what is wrong with them, on which line."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.config.load import load
from millpond.config.stores import without_password
from millpond.model import StoreSettings

GOOD = """\
data = "data"

[[stores]]
name = "default"
affinity = 0

[[stores]]
name = "disk2"
driver = "sqlite"
path = "more"

[[stores]]
name = "pg"
driver = "postgres"
url = "postgresql://user:secret@host/db"
affinity = 0.5
"""


def read(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "pond.toml"
    file.write_text(text)
    return [str(one).removeprefix(f"{tmp_path}/") for one in load(str(file), {}, {}).problems]


def test_stores_are_read_in_their_order_with_paths_from_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD) == []
    loaded = load(str(tmp_path / "pond.toml"), {}, {})
    assert loaded.config.stores == (
        StoreSettings(name="default", affinity=0.0),
        StoreSettings(name="disk2", driver="sqlite", path=str(tmp_path / "more")),
        StoreSettings(name="pg", driver="postgres", url="postgresql://user:secret@host/db", affinity=0.5),
    )
    assert loaded.origins["stores.disk2"] == f"{tmp_path}/pond.toml:7"
    assert loaded.warnings == []


def test_without_stores_there_are_none(tmp_path: Path) -> None:
    assert load(None, {}, {}).config.stores == ()


STORE = "[[stores]]\nname = 'a'\ndriver = 'sqlite'\npath = 'a'\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (STORE + STORE.replace("path = 'a'", "path = 'b'"), "pond.toml:7: stores.name is 'a' a second time; give each"),
        (STORE + STORE.replace("name = 'a'", "name = 'b'"), "pond.toml:9: stores.path is that of store 'a' too; give"),
        (STORE.replace("path = 'a'", "path = 'data'"), "pond.toml:5: stores.path is that of store 'default' too; give"),
        ("[[stores]]\ndriver = 'memory'", "pond.toml:2: stores.name is missing; give the store a name"),
        ("[[stores]]\nname = 'a'", "pond.toml:2: stores.driver is missing; use sqlite or postgres or memory"),
        (STORE.replace("'sqlite'", "'sqlit'"), "pond.toml:4: stores.driver is 'sqlit'; did you mean 'sqlite'?"),
        (STORE.replace("'sqlite'", "'oracle'"), "pond.toml:4: stores.driver is 'oracle'; use sqlite or postgres or"),
        (STORE.replace("'sqlite'", "3"), "pond.toml:4: stores.driver is 3; use sqlite or postgres or memory"),
        (
            "[[stores]]\nname = 'a'\ndriver = 'sqlite'",
            "pond.toml:2: stores.path is missing; a store of driver 'sqlite'",
        ),
        (STORE + "url = 'postgres://h/d'", "pond.toml:6: stores.url is for driver 'postgres'; remove it, or change"),
        (STORE + "affinity = 1.5", "pond.toml:6: stores.affinity is 1.5; use a number from 0.0 (no partitions) to 1.0"),
        (STORE + "affinity = -0.1", "pond.toml:6: stores.affinity is -0.1; use a number from 0.0"),
        (STORE + "affinity = 'half'", "pond.toml:6: stores.affinity is 'half'; use a number from 0.0"),
        (STORE + "affinity = true", "pond.toml:6: stores.affinity is bool; use a number from 0.0"),
        (STORE + "affinity = nan", "pond.toml:6: stores.affinity is nan; use a number from 0.0"),
        (STORE + "afinity = 1", "pond.toml:6: stores.afinity is no key of a store; did you mean 'affinity'?"),
        (STORE.replace("name = 'a'", "name = 'a b'"), "pond.toml:3: stores.name is 'a b'; use 1 to 63 letters"),
        (STORE.replace("name = 'a'", "name = ''"), "pond.toml:3: stores.name is ''; use 1 to 63 letters"),
        (STORE.replace("name = 'a'", "name = 7"), "pond.toml:3: stores.name is 7; use 1 to 63 letters"),
        (STORE.replace("name = 'a'", "name = 'default'"), "pond.toml:4: stores.driver is set for store 'default'"),
        (
            "[[stores]]\nname = 'a'\ndriver = 'postgres'\nurl = 'mysql://u:secret@h/d'",
            "pond.toml:5: stores.url is no address of a database; write it like 'postgresql://user@host:5432/database'",
        ),
        ("stores = [1]", "pond.toml:2: stores is an array; write [[stores]] and its keys below"),
    ],
)
def test_a_wrong_store_is_told_with_its_line_its_key_and_what_to_do(tmp_path: Path, text: str, expected: str) -> None:
    problems = read(tmp_path, "data = 'data'\n" + text)
    assert [one for one in problems if one.startswith(expected)], problems
    assert "secret" not in str(problems)


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    text = "[[stores]]\nname = 'a b'\ndriver = 'x'\naffinity = 2\n[[stores]]\nnam = 'b'\n"
    assert len(read(tmp_path, text)) == 6


def test_stores_that_take_nothing_and_stores_that_forget_are_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "pond.toml"
    file.write_text("stores = [{name = 'default', affinity = 0}, {name = 'm', driver = 'memory', affinity = 0}]")
    none, forgets = load(str(file), {}, {}).warnings
    assert "all stores have affinity 0" in none
    assert "store 'm' is in memory" in forgets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://host/db", "postgresql://host/db"),
        ("postgresql://user@host:1/db?sslmode=require", "postgresql://user@host:1/db?sslmode=require"),
        ("postgresql://user:secret@host:1/db", "postgresql://user:***@host:1/db"),
        ("postgresql://user:a@b:secret@host/db", "postgresql://user:***@host/db"),
        ("postgresql://host/db?password=secret&x=1", "postgresql://host/db?***"),
        ("postgresql://user:sec?ret@host/db", "postgresql://user:***@host/db"),
        ("postgresql://user:sec#ret@host/db?sslmode=require", "postgresql://user:***@host/db?sslmode=require"),
        ("postgresql://user:secret@a:1,b/db", "postgresql://user:***@a:1,b/db"),
        ("postgresql://host/db?pass%77ord=secret", "postgresql://host/db?***"),
        ("postgresql://host?oauth_client_secret=secret", "postgresql://host?***"),
        ("postgresql://[half", "***"),
        ("", ""),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown
