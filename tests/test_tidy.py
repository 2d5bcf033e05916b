"""Style is a test: import directions, words, the clock-free queue, purposes of SQL statements, paths in the docs.

Each rule is a function from sources to complaints. It is run on the repository, and on small made-up sources
that it must complain about (or must not).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "millpond"

# ---- what the rules say -----------------------------------------------------------------------------------

NOUNS = {"model", "errors", "clock", "api", "meters", "durations"}
EDGE = NOUNS - {"clock"}  # all that a front end knows; the composition root hands it a service
ENGINE = NOUNS | {"history", "store", "queue", "service", "embedded"}

MAY_IMPORT: dict[str, set[str]] = {
    "model": NOUNS,
    "errors": NOUNS,
    "clock": NOUNS,
    "api": NOUNS,
    "meters": NOUNS,
    "durations": NOUNS,
    "doorbell": set(),
    "history": NOUNS | {"store"},
    "store": NOUNS | {"history"},
    "queue": NOUNS | {"history", "store", "doorbell"},
    "service": NOUNS | {"history", "store", "queue", "doorbell"},
    "directory": NOUNS,
    "consuming": EDGE,  # items that finish themselves and loops over them, for clients and ponds
    "embedded": ENGINE | {"directory", "consuming"},
    "blocking": NOUNS | {"embedded", "consuming"},
    "access": NOUNS | {"store"},  # tokens and roles; of the stores only how a file is made to last
    "config": NOUNS | {"service"},  # of the service only how a duration and a list of stores are read
    "log": NOUNS,
    "wire": EDGE,  # the calls as types, for the server and the clients
    "http": EDGE | {"access", "log", "wire"},
    "jobs": EDGE | {"history"},  # what a job is; of the history only how its events are written
    "worker": NOUNS | {"jobs", "consuming"},  # of the loops over items only how long they pause
    "tasks": NOUNS | {"jobs", "worker", "embedded", "sharing", "blocking", "client", "consuming"},
    "dashboard": EDGE,
    "client": EDGE | {"wire", "consuming"},
    "spark": EDGE | {"client", "history"},
    "triage": EDGE | {"store"},  # many dead items at a time; of the stores only how a directory is made to last
    "sharing": ENGINE | {"directory", "consuming", "blocking", "http", "client"},
    "server": ENGINE | {"sharing", "http", "dashboard", "access", "config", "log"},
    "cli": ENGINE
    | {"sharing", "blocking", "http", "dashboard", "server", "worker", "client", "access", "config", "log"}
    | {"triage", "spark", "jobs", "tasks", "demo", "__init__"},
    "__init__": ENGINE | {"blocking", "sharing", "client", "tasks"},  # `import millpond`: what users see
    "demo": {"__init__"},  # a user
}

QUEUE_SHELL = "millpond.queue.runner"  # the only module of the queue that may wait, sleep or know the time
NOT_IN_QUEUE = {"time", "asyncio", "threading", "random"}
UNUSED_WORDS = {"message", "messages", "util", "utils", "helper", "helpers", "common"}
THE_MANAGER = "millpond.service.manager"

# ---- sources and their imports ----------------------------------------------------------------------------

Sources = Mapping[str, str]  # dotted module name -> text; a package is named `millpond.queue.__init__`


class Import(NamedTuple):
    """`module` is imported whole (`name` is None), or `name` from it."""

    module: str
    name: str | None
    line: int


def read_sources(folder: Path, base: Path) -> dict[str, str]:
    files = sorted(folder.rglob("*.py"))
    return {".".join(file.relative_to(base).with_suffix("").parts): file.read_text() for file in files}


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Several rules look at the same files."""
    return tuple(ast.walk(ast.parse(source)))


def imports_of(importer: str, source: str) -> Iterator[Import]:
    """All of them: an import inside a function or under TYPE_CHECKING is a dependency too."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            parents = importer.split(".")[: -node.level] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)


def target_of(found: Import, sources: Sources) -> str | None:
    """The module of `sources` that an import reaches, None if it is somebody else's."""
    inside = f"{found.module}.{found.name}" if found.name else found.module
    for candidate in (inside, f"{inside}.__init__", found.module, f"{found.module}.__init__"):
        if candidate in sources:
            return candidate
    return None


def part_of(module: str) -> str:
    """`queue` of `millpond.queue.logical`: the name that the import directions speak of."""
    return module.split(".")[1]


# ---- the rules --------------------------------------------------------------------------------------------


def wrong_directions(sources: Sources) -> Iterator[str]:
    for importer, source in sources.items():
        part = part_of(importer)
        if part not in MAY_IMPORT:
            yield f"{importer}: {part} has no place in the import directions; give it one in MAY_IMPORT"
            continue
        for found in imports_of(importer, source):
            target = target_of(found, sources)
            if target and part_of(target) not in MAY_IMPORT[part] | {part}:
                yield f"{importer}:{found.line} imports {target}; {part} may not know {part_of(target)}"


def cycles(sources: Sources) -> Iterator[str]:
    """Depth first; a module met again while it is still on the path closes a cycle."""
    graph = {
        importer: sorted({t for found in imports_of(importer, source) if (t := target_of(found, sources))} - {importer})
        for importer, source in sources.items()
    }
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[str]:
        if module in path:
            yield "modules import each other: " + " -> ".join([*path[path.index(module) :], module])
        elif module not in done:
            for target in graph[module]:
                yield from visit(target, [*path, module])
            done.add(module)

    for module in graph:
        yield from visit(module, [])


def cycles_of_parts(sources: Sources) -> Iterator[str]:
    """The same, one level up: history and store are on one level, and must not come to lean on each other."""
    merged: dict[str, str] = {}
    for importer, source in sources.items():
        targets = {t for found in imports_of(importer, source) if (t := target_of(found, sources))}
        lines = [f"import millpond.{part_of(t)}" for t in sorted(targets) if part_of(t) != part_of(importer)]
        name = f"millpond.{part_of(importer)}"
        merged[name] = "\n".join([merged.get(name, ""), *lines])
    return cycles(merged)


def stray_pyspark(sources: Sources) -> Iterator[str]:
    for importer, source in sources.items():
        for found in imports_of(importer, source):
            if found.module.split(".")[0] == "pyspark" and part_of(importer) != "spark":
                yield f"{importer}:{found.line} imports {found.module}; only millpond.spark may"


def clocks_and_threads_in_queue(sources: Sources) -> Iterator[str]:
    for importer, source in sources.items():
        if part_of(importer) != "queue" or importer == QUEUE_SHELL:
            continue
        for found in imports_of(importer, source):
            if found.module == "random" and found.name == "Random":
                continue  # the type of an instance that is handed in
            if found.module.split(".")[0] in NOT_IN_QUEUE:
                yield f"{importer}:{found.line} imports {found.module}; only {QUEUE_SHELL} may, the rest is told"
        for node in nodes(source):
            if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
                yield f"{importer}:{node.lineno} awaits; only {QUEUE_SHELL} may"


def words_in(name: str) -> set[str]:
    """Of snake_case and CamelCase names alike."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def unused_words(sources: Sources) -> Iterator[str]:
    for module, source in sources.items():
        classes = [node.name for node in nodes(source) if isinstance(node, ast.ClassDef)]
        for name in [*module.split("."), *classes]:
            for word in sorted(words_in(name) & UNUSED_WORDS):
                yield f"{module}: {name} says {word!r}; say what it is (docs/vocabulary.md)"
            if "manager" in words_in(name) and module != THE_MANAGER:
                yield f"{module}: {name} is a second manager; the one is {THE_MANAGER}"


SQL_TOKEN = re.compile(
    r"(?P<comment>--[^\n]*)|(?P<block>/\*.*?\*/)|\$\$.*?\$\$|'(?:[^']|'')*'|(?P<end>;)|(?P<code>\S)", re.DOTALL
)


def statements_without_purpose(name: str, sql: str) -> Iterator[str]:
    """A statement's purpose is a comment of two words or more on the line above it (`-- name: x` is none)."""
    lines = sql.splitlines()
    in_statement = False
    for token in SQL_TOKEN.finditer(sql):
        if token["comment"] or token["block"]:
            continue
        if not in_statement and not token["end"]:
            line = sql.count("\n", 0, token.start())
            above = lines[line - 1].strip() if line else ""
            if not re.match(r"--(?!\s*name:).*?\w+\W+\w+", above):
                yield f"{name}:{line + 1} has no purpose; write one in a comment on the line above"
        in_statement = not token["end"]


PATH_IN_DOC = re.compile(r"(?<![\w/:.-])(?:[\w.-]+/)*[\w-]+\.(?:py|sql|md|toml|txt|json)\b|`((?:[\w.-]+/)+[\w.-]*)`")


def missing_paths(text: str, bases: list[Path]) -> Iterator[str]:
    """Files by their ending, anywhere in the text; folders and files with a slash, in backticks."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in PATH_IN_DOC.finditer(line):
            path = match[1] or match[0]
            if not any((base / path).exists() for base in bases):
                yield f"line {number} names {path}, which does not exist"


# ---- the repository keeps them ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package() -> dict[str, str]:
    return read_sources(PACKAGE, PACKAGE.parent)


def assert_none(complaints: Iterator[str]) -> None:
    found = list(complaints)
    assert not found, "\n" + "\n".join(found)


def test_imports_follow_the_data_path(package: Sources) -> None:
    assert_none(wrong_directions(package))


def test_no_modules_import_each_other(package: Sources) -> None:
    assert_none(cycles(package))


def test_no_packages_import_each_other(package: Sources) -> None:
    assert_none(cycles_of_parts(package))


def test_only_spark_imports_pyspark(package: Sources) -> None:
    assert_none(stray_pyspark(package))


def test_the_queue_is_told_the_time_and_never_waits(package: Sources) -> None:
    assert_none(clocks_and_threads_in_queue(package))


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_modules_and_classes_use_the_words_of_the_vocabulary(folder: str) -> None:
    base = PACKAGE.parent if folder == "src" else ROOT
    assert_none(unused_words(read_sources(ROOT / folder, base)))


def test_every_sql_statement_says_its_purpose() -> None:
    for file in sorted(PACKAGE.rglob("*.sql")):
        assert_none(statements_without_purpose(file.name, file.read_text()))


def test_every_path_in_the_architecture_page_exists() -> None:
    page = ROOT / "docs" / "architecture.md"
    assert_none(missing_paths(page.read_text(), [ROOT, PACKAGE, page.parent]))


# ---- the rules fire ---------------------------------------------------------------------------------------


def made_up(modules: Mapping[str, str]) -> dict[str, str]:
    """A millpond of empty modules, save for these."""
    empty = ["__init__", "model", "store.base", "queue.logical", "service.service", "embedded", "http.routes"]
    return {f"millpond.{name}": "" for name in empty} | {f"millpond.{name}": text for name, text in modules.items()}


@pytest.mark.parametrize(
    "sources",
    [
        made_up({"model": "import millpond.store.base"}),
        made_up({"store.base": "from millpond.queue import logical"}),
        made_up({"store.base": "from ..queue.logical import Queue"}),
        made_up({"queue.logical": "def f():\n    from millpond.service.service import Service"}),
        made_up({"service.service": "import typing\nif typing.TYPE_CHECKING:\n    import millpond.embedded"}),
        made_up({"http.routes": "from millpond.service.service import Service"}),
        made_up({"client.base": "import millpond.store.base"}),
        made_up({"embedded": "from millpond.http import routes"}),
        made_up({"service.service": "from millpond import open"}),
        made_up({"odds.ends": ""}),
    ],
)
def test_an_import_against_the_data_path_is_found(sources: Sources) -> None:
    assert len(list(wrong_directions(sources))) == 1


def test_imports_along_the_data_path_pass() -> None:
    sources = made_up(
        {
            "queue.logical": "import heapq\nfrom millpond.store import base\nfrom millpond.model import Item",
            "service.service": "from millpond.queue.logical import Queue",
            "server": "from millpond import embedded\nfrom millpond.http.routes import app",
            "demo": "import millpond",
        }
    )
    assert list(wrong_directions(sources)) == []


@pytest.mark.parametrize(
    "sources",
    [
        made_up({"queue.a": "import millpond.queue.b", "queue.b": "import millpond.queue.a"}),
        made_up({"queue.a": "def f():\n    from millpond.queue import b", "queue.b": "from millpond.queue.a import A"}),
        made_up({"queue.a": "from .b import B", "queue.b": "from .c import C", "queue.c": "from .a import A"}),
        made_up({"queue.__init__": "from millpond.queue.a import A", "queue.a": "from millpond.queue import A"}),
    ],
)
def test_a_cycle_of_modules_is_found(sources: Sources) -> None:
    [complaint] = cycles(sources)
    assert complaint.startswith("modules import each other: millpond.queue.")


def test_modules_that_share_an_import_are_no_cycle() -> None:
    sources = made_up(
        {
            "queue.__init__": "from millpond.queue.a import A",
            "queue.a": "from millpond.queue import b, c",
            "queue.b": "import millpond.queue.c",
            "queue.c": "",
        }
    )
    assert list(cycles(sources)) == []


def test_a_cycle_of_packages_is_found() -> None:
    sources = made_up(
        {
            "history.format": "",
            "history.export": "import millpond.store.base",
            "store.sqlite": "import millpond.history.format",
        }
    )
    assert list(cycles(sources)) == []
    assert len(list(cycles_of_parts(sources))) == 1


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        (made_up({"history.export": "import pyspark.sql"}), 1),
        (made_up({"cli.report": "def f():\n    from pyspark.sql import DataFrame"}), 1),
        (made_up({"spark.sink": "from pyspark.sql import DataFrame"}), 0),
    ],
)
def test_pyspark_outside_spark_is_found(sources: Sources, found: int) -> None:
    assert len(list(stray_pyspark(sources))) == found


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        (made_up({"queue.logical": "import time"}), 1),
        (made_up({"queue.logical": "from time import monotonic"}), 1),
        (made_up({"queue.waiters": "import asyncio.events"}), 1),
        (made_up({"queue.waiters": "def f():\n    import threading"}), 1),
        (made_up({"queue.dispatch": "import random"}), 1),
        (made_up({"queue.dispatch": "from random import choice"}), 1),
        (made_up({"queue.waiters": "async def f(): ..."}), 1),
        (made_up({"queue.dispatch": "from random import Random"}), 0),
        (made_up({"queue.runner": "import asyncio, threading, time\nasync def f(): ..."}), 0),
        (made_up({"store.sqlite": "import time"}), 0),
    ],
)
def test_a_clock_a_thread_or_chance_in_the_queue_is_found(sources: Sources, found: int) -> None:
    assert len(list(clocks_and_threads_in_queue(sources))) == found


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("millpond.store.util", "", 1),
        ("tests.helpers", "", 1),
        ("millpond.sql_utils", "", 1),
        ("millpond.model", "class Message: ...", 1),
        ("millpond.model", "class HTTPHelper: ...", 1),
        ("millpond.model", "def f():\n    class CommonThing: ...", 1),
        ("millpond.queue.manager", "", 1),
        ("millpond.queue.logical", "class LeaseManager: ...", 1),
        ("millpond.service.manager", "class QueueManager: ...", 0),
        ("millpond.model", "message = 'free to use for a variable'\nclass Utility: ...", 0),
    ],
)
def test_a_word_that_says_nothing_is_found(module: str, source: str, found: int) -> None:
    assert len(list(unused_words({module: source}))) == found


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("SELECT 1;", 1),
        ("-- name: one\nSELECT 1;", 1),
        ("-- Two statements need two.\nSELECT 1;\nSELECT 2;", 1),
        ("-- The first.\n\nSELECT 1;", 1),
        ("-- one\nSELECT 1", 1),
        ("/* A block. */ SELECT 1;", 1),
        ("-- The first one.\nSELECT ';', 'it''s';\n\n-- name: two\n-- The second one.\nSELECT 2 -- ; no end\n;\n", 0),
    ],
)
def test_a_statement_without_a_purpose_is_found(sql: str, found: int) -> None:
    assert len(list(statements_without_purpose("made_up.sql", sql))) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("| `queue/gone.py` | what it does |", 1),
        ("```\n  gone.py --> model.py\n```", 1),
        ("the folder `gone/`, or `src/gone`", 2),
        ("[decisions](adr/gone.md)", 1),
        ("[decisions](vocabulary.md), `src/millpond/model.py`, `tests/`, `model.py` and `/v1/queue.produce`", 0),
        ("either/or, e.g. 3.py3 and https://example.org/gone.py", 0),
    ],
)
def test_a_path_that_does_not_exist_is_found(text: str, found: int) -> None:
    assert len(list(missing_paths(text, [ROOT, PACKAGE, ROOT / "docs"]))) == found
